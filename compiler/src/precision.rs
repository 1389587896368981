//! Storage in bf16: the pass that makes casts explicit.
//!
//! *In*: a function in f32. *Out*: the same with casts: products and attention along the sequence
//! read bf16, add up in f32, and activations that they give are stored in bf16. *Promise*: what
//! stays in f32 is parameters (weights are the master copies, and what products read of them are
//! casts, prepared once for all calls where that pays), gradients of weights, the stream and its
//! cotangent, norms and other row work, the logits of routers, attention along depth and its
//! caches, losses. Caches of attention along the sequence are bf16 as what they are made of and
//! read for.
//!
//! Weights that a file holds in bf16, or packed ([`Formats`](crate::format::Formats)), are
//! parameters of that type. Matmuls and embeddings read them as they are, with an operand in f32
//! (bf16 ones also with one in bf16; the head's loss reads packed ones with one in bf16). All other
//! readers read casts, which are exact.
//!
//! With fp8 ([`Narrow::Fp8`]) matmuls of layers read [`Fp8`] of what they read else: the forward's,
//! and both of the backward. Activations and cotangents have tiles of 128 numbers along the sum,
//! weights of 128 by 128, which are the same forward and back. Logits that choices are made from,
//! weights of a base that are stored in few bits, heads and embeddings stay in bf16 (DeepSeek-AI,
//! *DeepSeek-V3 Technical Report*, 2024, section 3.3). With [`Narrow::E4m3`] the same numbers are
//! stored as codes with scales where a matmul's sizes allow it: rows along the sum, in whole tiles.
//!
//! A cast rounds to nearest even where its value goes to memory. Within a kernel it rounds nothing:
//! there numbers are f32.

use crate::CompileError;
use crate::ir::{Binding, DType, Dim, Function, Lifetime, Module, Node, Op, PerToken, Port, TILE, Value};
use crate::op::{Bf16, Cast, Class, Fp8};
use crate::rewrite::hoist::sources;
use crate::rewrite::language::Source;
use dreamc_dsl::spec::Precision;
use std::collections::{HashMap, HashSet};

/// How much is stored in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Narrow {
    /// Nothing.
    #[default]
    Nothing,
    /// Operands of products and attention, and activations that they give.
    Storage,
    /// The same, and matmuls of layers read operands rounded to e4m3.
    Fp8,
    /// The same numbers; operands of what a GPU multiplies in e4m3 are stored so.
    E4m3,
}

/// On a device that has them all.
impl From<Precision> for Narrow {
    fn from(asked: Precision) -> Narrow {
        match asked {
            Precision::F32 => Narrow::Nothing,
            Precision::Bf16 => Narrow::Storage,
            Precision::Fp8 => Narrow::Fp8,
        }
    }
}

/// The dimension that every value of tokens has.
const BATCH: Dim = Dim(0);

impl Narrow {
    /// The type that a step computes in, in words.
    pub fn name(self) -> &'static str {
        match self {
            Narrow::Nothing => "f32",
            Narrow::Storage => "bf16",
            Narrow::Fp8 | Narrow::E4m3 => "fp8",
        }
    }

    /// How functions outside the layers are stored, and those that write: their matmuls stay in
    /// bf16.
    pub fn outside(self) -> Narrow {
        if self.is_fp8() { Narrow::Storage } else { self }
    }

    /// Whether matmuls of layers read operands rounded to e4m3.
    pub fn is_fp8(self) -> bool {
        matches!(self, Narrow::Fp8 | Narrow::E4m3)
    }

    /// The same on a GPU whose tensor cores multiply e4m3.
    pub fn on_cores(self) -> Narrow {
        if self == Narrow::Fp8 { Narrow::E4m3 } else { self }
    }
}

/// Puts bf16 where it belongs. `stored` is the type that a weight is stored in, `router` whether it
/// is one of a router.
pub fn narrow(
    module: &Module,
    f: &Function,
    how: Narrow,
    stored: &dyn Fn(&Port) -> DType,
    router: &dyn Fn(&Port) -> bool,
) -> Result<Function, CompileError> {
    let mut g = Function::new(f.name.clone());
    let params = (0..f.params.len() as u32).map(Value);
    let own = |v: Value| Some((v, stored(&f.params[v.index()]))).filter(|(_, dtype)| *dtype != DType::F32);
    let weights: HashMap<Value, DType> = params.filter_map(own).collect();
    if how == Narrow::Nothing && weights.is_empty() {
        return Ok(f.clone());
    }
    let cache = |v: Value| {
        let read = matches!(
            f.params[v.index()].binding,
            Binding::State(Lifetime::Token(PerToken::Latest | PerToken::First))
        );
        read || f.nodes.iter().any(|n| n.op == Op::Append && n.inputs[0] == v)
    };
    let mut narrow = HashMap::new();
    for (i, (p, ty)) in f.params.iter().zip(&f.types).enumerate() {
        let v = Value(i as u32);
        let mut ty = ty.clone();
        if let Some(&dtype) = weights.get(&v) {
            ty.dtype = dtype;
        } else if how != Narrow::Nothing && cache(v) {
            ty.dtype = DType::Bf16;
        }
        if ty.dtype == DType::Bf16 {
            narrow.insert(v, v);
        }
        g.param(p.name.clone(), p.binding, ty);
    }
    let (source, logits) = (sources(f), logits(f));
    let mut pass = Pass {
        how,
        module,
        f,
        g,
        defined: f.definitions(),
        routers: if how.is_fp8() { routers(f, &source, &logits, router) } else { vec![] },
        source,
        logits,
        wide: (0..f.params.len() as u32).map(Value).collect(),
        narrow,
        packed: HashMap::new(),
        rounded: HashMap::new(),
        weights,
    };
    let stored = (0..f.params.len() as u32).map(Value).filter(|v| pass.weights.contains_key(v));
    for v in stored.collect::<Vec<_>>() {
        pass.wide[v.index()] = pass.one(Cast(DType::F32), &[v])?;
    }
    for i in 0..f.nodes.len() {
        pass.node(i)?;
    }
    // The last value of a cache is of the cache's type.
    let cached = |v: &Value| pass.defined[v.index()].is_some_and(|n| f.nodes[n].op == Op::Append);
    let result =
        |v: &Value| pass.narrow.get(v).filter(|_| cached(v)).copied().unwrap_or(pass.wide[v.index()]);
    let results = f.results.iter().map(|(n, v)| (n.clone(), result(v))).collect();
    pass.g.results = results;
    Ok(crate::autodiff::prune_nodes(&pass.g))
}

/// Products that choices are made from, with nothing but row work in between.
fn logits(f: &Function) -> Vec<bool> {
    let defined = f.definitions();
    let mut found = vec![false; f.nodes.len()];
    let chosen = f.nodes.iter().filter(|n| matches!(n.op, Op::Route(_)));
    let mut stack: Vec<Value> = chosen.flat_map(|n| n.inputs.clone()).collect();
    while let Some(v) = stack.pop() {
        // A parameter: a bias.
        let Some(n) = defined[v.index()] else { continue };
        let node = &f.nodes[n];
        let signature = node.op.signature();
        if matches!(signature.bf16, Bf16::Product | Bf16::Slots) {
            found[n] = true;
        } else if matches!(signature.class, Class::View { .. } | Class::Identity | Class::Element(_))
            && !std::mem::replace(&mut found[n], true)
        {
            stack.extend(&node.inputs);
        }
    }
    found
}

/// Products of routers, forward and back: those that choices are made from, those that read a
/// weight of either, and those that the gradient of one is made of.
fn routers(f: &Function, source: &[Source], logits: &[bool], router: &dyn Fn(&Port) -> bool) -> Vec<bool> {
    let defined = f.definitions();
    // A value's origin: parameters of work on weights alone, else the products before light work.
    let made_of = |v: Value| {
        let (mut products, mut params, mut stack) = (vec![], vec![], vec![v]);
        while let Some(v) = stack.pop() {
            let Some(n) = defined[v.index()] else {
                params.push(v);
                continue;
            };
            let class = f.nodes[n].op.class();
            let light = matches!(class, Class::View { .. } | Class::Identity | Class::Element(_));
            match light || source[v.index()] == Source::Weights {
                true => stack.extend(&f.nodes[n].inputs),
                false => products.push(n),
            }
        }
        (products, params)
    };
    let weight = |v: &Value| f.params[v.index()].binding.is_weights();
    let of_weights = |v: &&Value| source[v.index()] == Source::Weights;
    let reads =
        |n: usize| f.nodes[n].inputs.iter().filter(of_weights).flat_map(|v| made_of(*v).1).filter(weight);
    let product = |n: &usize| matches!(f.nodes[*n].op, Op::Contract(_));
    let of_logits = (0..f.nodes.len()).filter(|&n| logits[n]).filter(product).flat_map(reads);
    let own = (0..f.params.len() as u32).map(Value).filter(|v| weight(v) && router(&f.params[v.index()]));
    let weights: HashSet<Value> = of_logits.chain(own).collect();
    let mut found: Vec<bool> = (0..f.nodes.len())
        .map(|n| logits[n] || product(&n) && reads(n).any(|v| weights.contains(&v)))
        .collect();
    let names: HashSet<String> = weights.iter().map(|v| f.params[v.index()].cotangent().name).collect();
    for (_, v) in f.results.iter().filter(|(port, _)| names.contains(&port.name)) {
        // A gradient may pass work on weights, a norm of one. It ends where tokens are summed, as
        // these may bring the layer's own matmuls: a score has the cotangent of all that it weighs.
        let mut stack = vec![*v];
        while let Some(v) = stack.pop() {
            let Some(n) = defined[v.index()].filter(|_| !f.ty(v).has(BATCH)) else { continue };
            match f.nodes[n].op.class() {
                Class::Anchor(..) => found[n] = true,
                _ => stack.extend(&f.nodes[n].inputs),
            }
        }
    }
    found
}

struct Pass<'a> {
    how: Narrow,
    module: &'a Module,
    f: &'a Function,
    g: Function,
    defined: Vec<Option<usize>>,
    source: Vec<Source>,
    logits: Vec<bool>,
    /// In fp8, matmuls that stay out of it.
    routers: Vec<bool>,
    /// Values of `f` in `g`, in their own types.
    wide: Vec<Value>,
    /// Values of `f` in `g` as bf16, where there is one.
    narrow: HashMap<Value, Value>,
    /// Views of packed weights of `f` in `g`.
    packed: HashMap<Value, Value>,
    /// Values of `f` in `g` rounded to e4m3, by their tiles, and groups where those bound them.
    rounded: HashMap<(Value, Fp8, Option<Value>), Value>,
    /// Weights that are stored in another type than f32.
    weights: HashMap<Value, DType>,
}

impl Pass<'_> {
    fn add(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Result<Vec<Value>, CompileError> {
        let name = &self.f.name;
        self.g
            .add(self.module, op, inputs)
            .map_err(|e| CompileError::Schedule(format!("{name}: storage in bf16: {e}")))
    }

    fn one(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Result<Value, CompileError> {
        Ok(self.add(op, inputs)?[0])
    }

    /// The value as bf16. A view or gather of something is one of its bf16.
    fn narrowed(&mut self, v: Value) -> Result<Value, CompileError> {
        if let Some(&n) = self.narrow.get(&v) {
            return Ok(n);
        }
        let f = self.f;
        let moved = |n: &&Node| matches!(n.op.class(), Class::View { .. } | Class::Gather(_));
        let n = match self.defined[v.index()].map(|n| &f.nodes[n]).filter(moved) {
            Some(node) => {
                let mut inputs: Vec<Value> = node.inputs.iter().map(|i| self.wide[i.index()]).collect();
                inputs[0] = self.narrowed(node.inputs[0])?;
                let results = self.add(node.op.clone(), &inputs)?;
                for (old, new) in node.results().zip(&results) {
                    self.narrow.insert(old, *new);
                }
                results[(v.0 - node.first.0) as usize]
            }
            None => {
                let x = self.wide[v.index()];
                self.one(Cast(DType::Bf16), &[x])?
            }
        };
        self.narrow.insert(v, n);
        Ok(n)
    }

    /// The value rounded to e4m3: weights from their masters, all else from what is stored. A
    /// gather of rows that have tiles of their own is one of the rounded rows.
    fn rounded(&mut self, v: Value, tiles: Fp8, offsets: Option<Value>) -> Result<Value, CompileError> {
        if let Some(&made) = self.rounded.get(&(v, tiles, offsets)) {
            return Ok(made);
        }
        let f = self.f;
        let gathers =
            |n: &&Node| matches!(n.op.class(), Class::Gather(_)) && tiles.tile[0] == 1 && !tiles.e4m3;
        let made = match self.defined[v.index()].map(|n| &f.nodes[n]).filter(gathers) {
            Some(node) => {
                let mut inputs: Vec<Value> = node.inputs.iter().map(|i| self.wide[i.index()]).collect();
                let rows = f.ty(node.inputs[0]).dims.len() as u64 - 1;
                inputs[0] = self.rounded(node.inputs[0], Fp8 { down: rows, ..tiles }, None)?;
                self.one(node.op.clone(), &inputs)?
            }
            None => {
                let mut inputs = vec![match self.source[v.index()] {
                    Source::Data => self.narrowed(v)?,
                    Source::Constant | Source::Weights => self.wide[v.index()],
                }];
                inputs.extend(offsets.map(|v| self.wide[v.index()]));
                self.one(tiles, &inputs)?
            }
        };
        self.rounded.insert((v, tiles, offsets), made);
        Ok(made)
    }

    /// The tiles of a matmul's operand that is summed over these dimensions; nothing where they are
    /// not adjacent in it.
    fn tiles(&self, v: Value, over: &[Dim]) -> Option<Fp8> {
        let dims = &self.f.ty(v).dims;
        let (all, count) = (dims.len(), over.len());
        let first = dims.iter().position(|d| over.contains(d))?;
        let adjacent = first + count <= all && dims[first..first + count].iter().all(|d| over.contains(d));
        let (first, count) = (first as u64, count as u64);
        let last = first + count == all as u64;
        let weight = self.source[v.index()] == Source::Weights;
        adjacent.then_some(match (weight, last) {
            (false, true) => Fp8 { outer: 0, down: first, tile: [1, TILE], ..Fp8::default() },
            (false, false) => Fp8 { outer: first, down: count, tile: [TILE, 1], ..Fp8::default() },
            // Matrices, whichever side is summed over.
            (true, true) => Fp8 { outer: 0, down: first, tile: [TILE, TILE], ..Fp8::default() },
            (true, false) => Fp8 { outer: first, down: count, tile: [TILE, TILE], ..Fp8::default() },
        })
    }

    /// The same of both operands of a matmul, stored in e4m3 where that is asked for and both have
    /// a place there. Lines are those of one tile of the tensor cores at least.
    fn coded(&self, node: &Node, over: &[Dim]) -> Option<[Fp8; 2]> {
        let tiles = [self.tiles(node.inputs[0], over)?, self.tiles(node.inputs[1], over)?];
        let size = |dims: &mut dyn Iterator<Item = Dim>| {
            dims.fold(1u64, |n, d| n.saturating_mul(self.module.size(d)))
        };
        let depth = size(&mut over.iter().copied());
        let fits = |k: usize| {
            let dims = &self.f.ty(node.inputs[k]).dims;
            let lines = size(&mut dims.iter().copied().filter(|d| !over.contains(d)));
            // Whatever comes after the lines in memory is summed, or is in front of them.
            let matrix = dims.starts_with(over) || dims.ends_with(over);
            matrix && lines >= TILE && Fp8::fits(lines, depth)
        };
        let coded = self.how == Narrow::E4m3 && fits(0) && fits(1);
        let turned = |k: usize| !self.f.ty(node.inputs[k]).dims.ends_with(over);
        let one = |k: usize| Fp8 { e4m3: coded, turned: coded && turned(k), ..tiles[k] };
        Some([one(0), one(1)])
    }

    /// The tiles of both operands of a matmul of layers, where it reads them in e4m3.
    fn fp8(&self, i: usize) -> Option<[(Fp8, Option<Value>); 2]> {
        let node = &self.f.nodes[i];
        let stored = node.inputs.iter().any(|v| self.is_stored(*v));
        if !self.how.is_fp8() || self.routers[i] || stored || self.source[node.first.index()] != Source::Data
        {
            return None;
        }
        let plain = |k: usize, over: &[Dim]| self.tiles(node.inputs[k], over).map(|tiles| (tiles, None));
        match &node.op {
            Op::Contract(c) => self.coded(node, &c.over).map(|both| both.map(|tiles| (tiles, None))),
            Op::Grouped(g) => {
                // A matrix of each expert.
                let matrices = Fp8 { outer: 1, down: 1, tile: [TILE, TILE], ..Fp8::default() };
                Some([plain(0, &[g.over])?, (matrices, None)])
            }
            Op::GroupedOuter(_) => {
                let slots = Fp8 { outer: 0, down: 1, tile: [TILE, 1], groups: true, ..Fp8::default() };
                Some([(slots, Some(node.inputs[2])); 2])
            }
            _ => None,
        }
    }

    /// The view that a value is.
    fn view(&self, v: Value) -> Option<&Node> {
        let node = &self.f.nodes[self.defined[v.index()]?];
        matches!(node.op.class(), Class::View { .. }).then_some(node)
    }

    /// The type of a weight stored in another than f32, of itself or of a view of it. A view of
    /// packed numbers has their rows: blocks are whole.
    fn stored(&self, v: Value) -> Option<DType> {
        if let Some(&dtype) = self.weights.get(&v) {
            return Some(dtype);
        }
        let of = self.view(v)?.inputs[0];
        let dtype = self.stored(of)?;
        let last = |v: Value| self.f.ty(v).dims.last().map(|d| self.module.size(*d));
        let whole = !matches!(dtype, DType::Packed(_)) || last(v) == last(of);
        whole.then_some(dtype)
    }

    fn is_stored(&self, v: Value) -> bool {
        self.stored(v).is_some()
    }

    fn is_packed(&self, v: Value) -> bool {
        matches!(self.stored(v), Some(DType::Packed(_)))
    }

    /// A stored weight, or a view of one, as it is stored.
    fn as_it_is(&mut self, v: Value) -> Result<Value, CompileError> {
        if !self.is_packed(v) {
            return self.narrowed(v);
        }
        if self.weights.contains_key(&v) {
            return Ok(v);
        }
        if let Some(&made) = self.packed.get(&v) {
            return Ok(made);
        }
        let Some(node) = self.view(v).cloned() else { return self.narrowed(v) };
        let mut inputs: Vec<Value> = node.inputs.iter().map(|i| self.wide[i.index()]).collect();
        inputs[0] = self.as_it_is(node.inputs[0])?;
        let results = self.add(node.op.clone(), &inputs)?;
        self.packed.extend(node.results().zip(results.iter().copied()));
        Ok(results[(v.0 - node.first.0) as usize])
    }

    /// Operands of a node that are read as they are stored where activations are f32: the second of
    /// a matmul, and the table of an embedding.
    fn as_stored(&self, node: &Node) -> &'static [usize] {
        match node.op.signature().bf16 {
            Bf16::Product | Bf16::Slots | Bf16::Head
                if self.is_stored(node.inputs[1])
                    && !self.is_stored(node.inputs[0])
                    && self.source[node.first.index()] == Source::Data =>
            {
                &[1]
            }
            Bf16::Stored(of) if of.iter().all(|&k| self.is_stored(node.inputs[k])) => of,
            Bf16::Product
            | Bf16::Slots
            | Bf16::Head
            | Bf16::Stored(_)
            | Bf16::Own
            | Bf16::Follows(_)
            | Bf16::Reads(_) => &[],
        }
    }

    /// Notes what result `k` of a node became: in bf16 (its f32 is a cast) or in its own type.
    fn becomes(&mut self, v: Value, new: Value) -> Result<(), CompileError> {
        debug_assert_eq!(self.wide.len(), v.index(), "values are numbered in order");
        let own = self.f.ty(v).dtype;
        let mut wide = new;
        if self.g.ty(new).dtype == DType::Bf16 && own != DType::Bf16 {
            self.narrow.insert(v, new);
            wide = self.one(Cast(own), &[new])?;
        }
        self.wide.push(wide);
        Ok(())
    }

    fn node(&mut self, i: usize) -> Result<(), CompileError> {
        let f = self.f;
        let node = &f.nodes[i];
        // Operands that are read in bf16, and whether the results are stored so.
        let (narrow, rounds): (&[usize], bool) = match node.op.signature().bf16 {
            _ if self.how == Narrow::Nothing => (self.as_stored(node), false),
            Bf16::Stored(_) => (self.as_stored(node), false),
            // Packed weights are read with an operand in f32, except by the head's loss: its rows
            // are the ones in bf16 that its derivative reads, and a GPU unpacks blocks to bf16,
            // too.
            Bf16::Head if self.is_packed(node.inputs[1]) && !self.as_stored(node).is_empty() => {
                (&[0, 1], false)
            }
            Bf16::Product | Bf16::Slots
                if self.is_packed(node.inputs[1]) && !self.as_stored(node).is_empty() =>
            {
                let rounds = match node.op.signature().bf16 {
                    Bf16::Product => f.ty(node.first).has(BATCH) && !self.logits[i],
                    Bf16::Slots => !self.logits[i],
                    Bf16::Head | Bf16::Stored(_) | Bf16::Own | Bf16::Follows(_) | Bf16::Reads(_) => false,
                };
                (self.as_stored(node), rounds)
            }
            // A product of weights alone makes weights, one over tokens gradients.
            Bf16::Product if self.source[node.first.index()] != Source::Data => (&[], false),
            Bf16::Product => (&[0, 1], f.ty(node.first).has(BATCH) && !self.logits[i]),
            Bf16::Slots => (&[0, 1], !self.logits[i]),
            // The loss of what is rounded anyway: logits that a cap made f32 again stay so.
            Bf16::Follows(of) if of.iter().all(|&k| self.narrow.contains_key(&node.inputs[k])) => (of, false),
            Bf16::Head => (&[0, 1], false),
            Bf16::Reads(of) => (of, false),
            Bf16::Own | Bf16::Follows(_) => (&[], false),
        };
        let fp8 = self.fp8(i);
        let mut inputs = vec![];
        for (k, &v) in node.inputs.iter().enumerate() {
            if let Some((tiles, offsets)) = fp8.and_then(|of| of.get(k).copied()) {
                inputs.push(self.rounded(v, tiles, offsets)?);
                continue;
            }
            inputs.push(match narrow.contains(&k) {
                true if self.is_stored(v) && self.as_stored(node).contains(&k) => self.as_it_is(v)?,
                true => self.narrowed(v)?,
                false => self.wide[v.index()],
            });
        }
        let mut results = match narrow {
            [] => {
                let types = node.results().map(|r| f.ty(r).clone()).collect();
                let first = self.g.push(node.op.clone(), inputs, types);
                (0..node.count).map(|k| Value(first.0 + k)).collect()
            }
            _ => self.add(node.op.clone(), &inputs)?,
        };
        if rounds {
            results[0] = self.one(Cast(DType::Bf16), &[results[0]])?;
        }
        for (v, new) in node.results().zip(results) {
            self.becomes(v, new)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Binding, Tensor, Type, interpret};
    use crate::op::{Contract, Rms};
    use smallvec::smallvec;

    #[test]
    fn what_is_read_by_products_is_cast() {
        let mut module = Module::default();
        let dims: crate::ir::Dims =
            [("batch", 2), ("seq", 3), ("h", 4), ("i", 5)].map(|(n, s)| module.dim(n, s)).into();
        let [b, t, h, i] = dims[..] else { panic!("four dimensions") };
        let mut f = Function::new("f".to_string());
        let x = f.param("x", Binding::Value, Type::f32(&[b, t, h]));
        let w = f.param("w", Binding::Weight, Type::f32(&[i, h]));
        let n = f.add(&module, Rms { inner: 1, eps: 1e-6 }, &[x]).unwrap()[0];
        let y = f.add(&module, Contract { over: smallvec![h] }, &[n, w]).unwrap()[0];
        let dw = f.add(&module, Contract { over: smallvec![b, t] }, &[y, n]).unwrap()[0];
        f.results = vec![("y".into(), y), ("d.w".into(), dw)];
        let g = narrow(&module, &f, Narrow::Storage, &|_| DType::F32, &|_| false).unwrap();
        insta::assert_snapshot!(module.show_function(&g));
        let types = |f: &Function| f.results.iter().map(|(_, v)| f.ty(*v).clone()).collect::<Vec<_>>();
        assert_eq!(types(&f), types(&g));
        let values =
            |n: usize, seed: usize| (0..n).map(|k| ((k * 7 + seed) % 13) as f64 / 6.5 - 0.9).collect();
        let inputs = [Tensor::float(&[2, 3, 4], values(24, 1)), Tensor::float(&[5, 4], values(20, 2))];
        let (a, c) = (interpret(&module, &f, &inputs).unwrap(), interpret(&module, &g, &inputs).unwrap());
        for ((_, a), (_, c)) in a.iter().zip(&c) {
            let (a, c) = (a.floats(), c.floats());
            let apart = a.iter().zip(c).map(|(a, c)| (a - c).abs()).fold(0.0, f64::max);
            assert!(apart > 0.0 && apart < 0.05, "{apart}");
        }
    }

    /// Logits that choices are made from stay in f32, with a bias too; in fp8 matmuls of routers
    /// read bf16, and all others e4m3.
    #[test]
    fn routers_are_not_rounded() {
        let mut module = Module::default();
        let [b, t, h, e, k, o] =
            [("batch", 2), ("seq", 3), ("h", 4), ("e", 5), ("k", 2), ("o", 6)].map(|(n, s)| module.dim(n, s));
        let mut f = Function::new("f".to_string());
        let x = f.param("x", Binding::Value, Type::f32(&[b, t, h]));
        let keys = f.param("keys", Binding::Weight, Type::f32(&[e, h]));
        let bias = f.param("bias", Binding::Weight, Type::f32(&[e]));
        let w = f.param("w", Binding::Weight, Type::f32(&[o, h]));
        let logits = f.add(&module, Contract { over: smallvec![h] }, &[x, keys]).unwrap()[0];
        let biased = f.add(&module, crate::op::Binary::Add, &[logits, bias]).unwrap()[0];
        let chosen = f.add(&module, crate::op::Route { k }, &[biased]).unwrap()[0];
        let y = f.add(&module, Contract { over: smallvec![h] }, &[x, w]).unwrap()[0];
        f.results = vec![("chosen".into(), chosen), ("y".into(), y)];
        for (how, reads) in [(Narrow::Storage, ["cast", "cast"]), (Narrow::Fp8, ["cast", "fp8"])] {
            let g = narrow(&module, &f, how, &|_| DType::F32, &|_| false).unwrap();
            let makes = |v: Value| g.nodes.iter().find(|n| n.results().any(|r| r == v)).unwrap();
            let products: Vec<&Node> = g.nodes.iter().filter(|n| n.op.name() == "contract").collect();
            assert_eq!([0, 1].map(|n: usize| makes(products[n].inputs[1]).op.name()), reads);
            let reader = |v: Value| g.nodes.iter().find(|n| n.inputs.contains(&v)).unwrap().op.name();
            assert_eq!([0, 1].map(|n: usize| reader(products[n].first)), ["add", "cast"]);
        }
    }

    /// A stored weight is read by matmul and embedding as it is, by all else through a cast; values
    /// are those of the function in f32.
    #[test]
    fn stored_weights_are_read_as_they_are() {
        let mut module = Module::default();
        let dims: crate::ir::Dims =
            [("batch", 2), ("seq", 3), ("h", 4), ("v", 5)].map(|(n, s)| module.dim(n, s)).into();
        let [b, t, h, v] = dims[..] else { panic!("four dimensions") };
        let mut f = Function::new("f".to_string());
        let ids = f.param("ids", Binding::Value, Type::i32(&[b, t]));
        let w = f.param("w", Binding::Weight, Type::f32(&[v, h]));
        let x = f.add(&module, Op::Embed, &[w, ids]).unwrap()[0];
        let y = f.add(&module, Contract { over: smallvec![h] }, &[x, w]).unwrap()[0];
        let z = f.add(&module, Rms { inner: 1, eps: 1e-6 }, &[w]).unwrap()[0];
        f.results = vec![("y".into(), y), ("z".into(), z)];
        let stored = |p: &Port| if p.binding == Binding::Weight { DType::Bf16 } else { DType::F32 };
        let g = narrow(&module, &f, Narrow::Nothing, &stored, &|_| false).unwrap();
        let reads = |name: &str, k: usize| {
            let node = g.nodes.iter().find(|n| n.op.signature().name == name).unwrap();
            g.ty(node.inputs[k]).dtype
        };
        assert_eq!((reads("embed", 0), reads("contract", 1)), (DType::Bf16, DType::Bf16));
        assert_eq!((reads("contract", 0), reads("rms", 0)), (DType::F32, DType::F32));
        let table = (0..20).map(|k| f64::from(k) / 16.0 - 0.5).collect();
        let inputs = [Tensor::int(&[2, 3], vec![0, 4, 2, 2, 1, 3]), Tensor::float(&[5, 4], table)];
        let (a, c) = (interpret(&module, &f, &inputs).unwrap(), interpret(&module, &g, &inputs).unwrap());
        for ((_, a), (_, c)) in a.iter().zip(&c) {
            assert_eq!(a.floats(), c.floats());
        }
    }
}
