//! Components that a specification defines: their typed graph as IR.
//!
//! A value of the graph is a value of the IR with its dimensions in the order of the graph; one of
//! each token has the dimensions of tokens before them. A matrix is `[out, in]`, whatever
//! dimensions its ends are made of. Weights are named by the value that they are written in.

mod attend;
mod depth;
mod step;
mod tokens;
mod values;

use super::*;
use dreamc_dsl::define::graph::{
    self, DimId, Fact, Function as Of, Graph, Node, Purpose, Reads, Region, Turn, Type as Typed, ValueId,
    WeightId,
};
use smallvec::smallvec;
use values::Values;

/// Tensors and states of definitions, which have names of their own.
mod part {
    use super::Purpose;
    use crate::bind::Part;

    const OF: &str = "define";

    /// A weight: matrices of products are adapted, and one may make what is returned.
    pub(super) fn of_weight(path: &str, purpose: Purpose) -> Part {
        let part = Part::named(OF, path);
        match purpose {
            Purpose::Matrix => part.with_low_rank(),
            Purpose::Output => part.with_low_rank().at_end(),
            Purpose::Bias | Purpose::Gain | Purpose::Filter | Purpose::Own => part,
        }
    }

    /// A state, or a value that is kept of each application.
    pub(super) fn kept(path: &str) -> Part {
        Part::named(OF, path).with_rows(0)
    }

    /// A value that is kept of the last application to each token, in the row after that of the
    /// application; the first row is zero.
    pub(super) fn kept_behind(path: &str) -> Part {
        Part::named(OF, path).with_rows(1)
    }

    /// A state of each text, by its number in the component.
    pub(super) fn text(number: u16) -> Part {
        Part::named(OF, &format!("text{number}"))
    }
}

impl Lowering for spec::Defined {
    fn fits(&self, _: u64) -> Result<(), CompileError> {
        Ok(())
    }

    fn lower(&self, l: &mut Lower, c: Owner, _: Kind, n: Value) -> Result<Value, CompileError> {
        let graph = self.graph(&l.architecture.model).map_err(|_| crate::architecture::UNFIT)?;
        l.defined(c, &graph, n)
    }
}

/// A definition while it is lowered.
struct Defining<'g> {
    graph: &'g Graph,
    owner: Owner,
    /// The row of each token.
    input: Value,
    /// Dimensions of tokens.
    rows: Dims,
    /// The dimensions of the graph.
    dims: Dims,
    /// The values so far.
    values: Vec<Value>,
    /// Parts of dimensions that several slices take.
    cuts: HashMap<(ValueId, DimId), Vec<(u64, Value)>>,
    /// Results of recurrences.
    emitted: HashMap<ValueId, Vec<Value>>,
    /// Choices of blocks.
    choices: HashMap<ValueId, tokens::Made>,
    /// Attentions among them.
    attentions: HashMap<ValueId, tokens::Read>,
    /// How many states of texts there are.
    texts: u16,
    /// Values that the next application reads: the states that hold them, and what they were.
    remembered: IndexMap<String, (Port, Value, Value)>,
    /// The cache of processed tokens: entries, slots of the tokens here, positions of all.
    admitted: Option<Admitted>,
}

/// Where keys of the tokens here are appended.
#[derive(Clone, Copy)]
pub(super) struct Admitted {
    /// Entries of a row.
    pub(super) entries: Dim,
    /// The entry of each token.
    pub(super) slots: Value,
    /// The position of every entry.
    pub(super) keys: Value,
}

impl Defining<'_> {
    /// The value of the IR.
    fn value(&self, value: ValueId) -> Value {
        self.values[value.0 as usize]
    }

    /// The operand of a node.
    fn arg(&self, node: &Node, k: usize) -> Result<Value, CompileError> {
        node.args.get(k).map(|&arg| self.value(arg)).ok_or(MALFORMED)
    }

    /// The node of an operand.
    fn made<'n>(&'n self, node: &Node, k: usize) -> Option<&'n Node> {
        node.args.get(k).map(|&arg| self.graph.region.node(arg))
    }

    /// The dimension of the IR.
    fn dim(&self, dim: DimId) -> Dim {
        self.dims[dim.0 as usize]
    }

    fn dims(&self, dims: &[DimId]) -> Dims {
        dims.iter().map(|&dim| self.dim(dim)).collect()
    }

    /// The own dimensions of a value.
    fn own(&self, ty: &Typed) -> Dims {
        self.dims(&ty.dims)
    }

    /// The number of another state of texts.
    fn text(&mut self) -> u16 {
        self.texts += 1;
        self.texts - 1
    }

    /// The next state of each text.
    fn text_state(&mut self) -> Part {
        part::text(self.text())
    }
}

/// A graph that elaboration does not make.
const MALFORMED: CompileError = CompileError::Unsupported("a graph of a definition without its operands");

impl<'a> Lower<'a> {
    /// Functions of one token.
    fn formulas(&mut self, rows: &[Dim]) -> Values<'_, 'a> {
        Values { b: &mut self.b, rows: rows.into(), places: vec![] }
    }
}

impl Lower<'_> {
    /// The value that a definition returns.
    pub(super) fn defined(&mut self, c: Owner, graph: &Graph, n: Value) -> Result<Value, CompileError> {
        let asking = self.asking.take();
        // A function of tokens that follows another one reads rows of it that nothing else reads.
        let behind = self.ahead;
        let left = !self.read_values(&self.architecture.label(c)).is_empty();
        let mixes = |node: &&Node| match node.function.reads() {
            Reads::Tokens | Reads::Depths => true,
            Reads::Nothing | Reads::Token | Reads::Place | Reads::Losses | Reads::Region => false,
        };
        self.ahead |= left || graph.region.nodes.iter().filter(mixes).count() > 1;
        let rows = self.b.rows(n);
        let dims = graph.dims.iter().map(|dim| self.own_dim(c, &dim.name, dim.size)).collect();
        let mut d = Defining {
            graph,
            owner: c,
            input: n,
            rows,
            dims,
            values: vec![],
            cuts: HashMap::new(),
            emitted: HashMap::new(),
            choices: HashMap::new(),
            attentions: HashMap::new(),
            texts: 0,
            remembered: IndexMap::new(),
            admitted: None,
        };
        for (i, node) in graph.region.nodes.iter().enumerate() {
            let value = self.defined_node(&mut d, node, ValueId(i as u32))?;
            if let Some(name) = &node.name {
                self.b.call(value, name);
                self.point(c, name, value);
            }
            d.values.push(value);
        }
        self.ahead = behind;
        self.remember_values(&mut d)?;
        self.leave_values(&d)?;
        for loss in &graph.losses {
            let loss = self.each_token(&d, d.value(*loss));
            let mean = self.b.reduce(Reduce::Mean, loss, &d.rows);
            self.auxiliary.push(mean);
        }
        let result = graph.region.results.first().ok_or(MALFORMED)?;
        let hidden = self.hidden();
        let result = d.value(*result);
        let y = self.formulas(&d.rows).spread(result, &[hidden], true);
        Ok(match asking {
            Some(index) => self.b.op(Op::TakeTokens, &[y, index]),
            None => y,
        })
    }

    /// A dimension of a definition; `hidden` is the stream's.
    fn own_dim(&mut self, c: Owner, name: &str, size: u64) -> Dim {
        if name == "hidden" { self.hidden() } else { self.dim_of(c, name, size) }
    }

    /// One value of a definition.
    fn defined_node(&mut self, d: &mut Defining, node: &Node, at: ValueId) -> Result<Value, CompileError> {
        let arg = |k: usize| d.arg(node, k);
        match &node.function {
            Of::Input => Ok(d.input),
            Of::Fact(fact) => self.fact(*fact),
            Of::Noise(deviation) => {
                let dims = [&d.rows[..], &[self.hidden()]].concat();
                let noise = self.noise(&dims);
                Ok(self.b.scale(noise, *deviation))
            }
            Of::Weight(weight) => Ok(self.own_weight(d, *weight, self.is_matrix(d, at))),
            Of::Embedding => self.embedding(d, node),
            Of::Linear(over) => self.linear(d, node, over),
            Of::Slice { of, .. } => self.sliced(d, node, at, *of),
            Of::Rope { base, over, at } => self.turned(d, node, *base, *over, *at),
            Of::Shift(by) => {
                let (v, part) = (arg(0)?, d.text_state());
                let v = self.each_token(d, v);
                let v = self.of_last_token(d, v);
                Ok(self.shifted(d.owner, part, v, *by))
            }
            Of::Conv(width) => self.convolved(d, node, *width),
            Of::Running(block) => {
                let v = arg(0)?;
                Ok(self.summed(d, v, *block))
            }
            Of::Average { all } => {
                let v = arg(0)?;
                let v = self.each_token(d, v);
                Ok(self.averaged(d, v, *all))
            }
            Of::Choose(choice) => self.chosen_blocks(d, node, at, choice),
            Of::Scores => self.tokens_scores(d, node),
            Of::Attend(attend) => self.attended(d, node, at, attend),
            Of::Mass => self.mass_of(d, node),
            Of::Recurrence(recurrence) => {
                let results = self.recurrence(d, node, recurrence)?;
                let first = results.first().copied().ok_or(MALFORMED)?;
                d.emitted.insert(at, results);
                Ok(first)
            }
            Of::Emitted(number) => {
                let of = node.args.first().and_then(|arg| d.emitted.get(arg));
                of.and_then(|results| results.get(*number as usize)).copied().ok_or(MALFORMED)
            }
            Of::DepthAttend { scale, .. } => self.depth_attended(d, node, *scale),
            Of::Earlier(name) => self.earlier(d, node, name),
            Of::ValueOf(component, name) => self.value_of(d, node, component, name),
            Of::Apply(applied) => {
                let architecture = self.architecture;
                let (c, component) = architecture.applied(d.owner, &applied.path).ok_or(MALFORMED)?;
                let v = arg(0)?;
                let v = self.each_token(d, v);
                self.output_of(c, component, v)
            }
            Of::Head(dim) => {
                let dim = d.dim(*dim);
                Ok(self.formulas(&d.rows).places(dim))
            }
            function => match function.reads() {
                Reads::Nothing | Reads::Token => {
                    let args: Vec<Value> = node.args.iter().map(|&arg| d.value(arg)).collect();
                    let mut values = self.formulas(&d.rows);
                    values.node(node, &args, &d.graph.region, &d.dims)
                }
                Reads::Place | Reads::Losses | Reads::Tokens | Reads::Depths => Err(MALFORMED),
                Reads::Region => Err(CompileError::Unsupported("a value of a region outside it")),
            },
        }
    }

    /// A number of the token, or of the application.
    fn fact(&mut self, fact: Fact) -> Result<Value, CompileError> {
        let index = match fact {
            Fact::Depth => self.b.index("depth", Index::Depth),
            Fact::Depths => self.b.index("depths", Index::Depths),
            Fact::Position => {
                let positions = self.given(Input::Positions);
                return Ok(self.b.op(Op::Numbers, &[positions]));
            }
            Fact::Pass => self.b.index("pass", Index::Pass),
        };
        Ok(self.b.op(Op::Number, &[index]))
    }

    /// Normal numbers of every token here.
    fn noise(&mut self, dims: &[Dim]) -> Value {
        let all = [self.stream_rows(), smallvec![self.hidden()]].concat();
        let noise = self.b.param(Input::Noise.name(), Binding::Batch(Input::Noise), Type::f32(&all));
        if all == dims { noise } else { self.here_again(noise) }
    }

    /// The value, for each token where it is constant.
    fn each_token(&mut self, d: &Defining, v: Value) -> Value {
        let mut values = self.formulas(&d.rows);
        let own = values.own(v);
        values.spread(v, &own, true)
    }

    /// The value of each token that later ones read, where tokens leave the loop around.
    fn of_last_token(&mut self, d: &mut Defining, v: Value) -> Value {
        if self.staying.is_none() {
            return v;
        }
        let part = part::kept(&format!("pass{}", d.text()));
        self.of_last(d.owner, part, v)
    }

    /// Whether a weight is read by products alone, which make it themselves.
    fn is_matrix(&self, d: &Defining, weight: ValueId) -> bool {
        let readers = d.graph.region.nodes.iter().filter(|n| n.args.contains(&weight));
        let mut readers = readers.peekable();
        readers.peek().is_some()
            && readers.all(|n| matches!(n.function, Of::Linear(_)) && n.args.get(1) == Some(&weight))
    }

    /// How a weight begins.
    fn beginning(&self, graph: &Graph, weight: &graph::Weight) -> Option<Init> {
        let inputs: u64 =
            graph.elements(&weight.dims[weight.dims.len() - weight.inputs.min(weight.dims.len())..]);
        match weight.init {
            Some(graph::Init::Constant(x)) => Some(Init::Constant(x)),
            Some(graph::Init::Normal(deviation)) => Some(Init::Normal(deviation)),
            Some(graph::Init::Uniform(low, high)) => Some(Init::Uniform(low, high)),
            Some(graph::Init::Ramp(first, last)) => Some(Init::Ramp(first, last)),
            Some(graph::Init::LogUniform(low, high)) => Some(Init::LogUniform(low, high)),
            Some(graph::Init::InverseSoftplusUniform(low, high)) => {
                Some(Init::InverseSoftplusUniform(low, high))
            }
            None => match weight.purpose {
                Purpose::Output => self.output_init(),
                Purpose::Matrix => Some(Init::Normal((1.0 / (5.0 * inputs as f64)).sqrt())),
                Purpose::Gain => Some(Init::Constant(1.0)),
                Purpose::Bias => Some(Init::Constant(0.0)),
                Purpose::Filter => {
                    let width = weight.dims.last().map_or(1, |&d| graph.size(d));
                    let most = (width as f64).sqrt().recip();
                    Some(Init::Uniform(-most, most))
                }
                Purpose::Own => None,
            },
        }
    }

    /// A dimension that stands for several, or for one that is there twice.
    fn joint(&mut self, d: &Defining, dims: &[DimId], apart: bool) -> Dim {
        match dims {
            &[dim] if !apart => d.dim(dim),
            _ => {
                let names: Vec<&str> = dims.iter().map(|&dim| d.graph.name(dim)).collect();
                // No dimension of a text, nor of a component inside this one, is called so.
                let name = format!(".{}{}", names.join("."), if apart { ".in" } else { "" });
                self.dim_of(d.owner, &name, d.graph.elements(dims))
            }
        }
    }

    /// The ends of a matrix: `[out, in]`.
    fn ends(&mut self, d: &Defining, weight: &graph::Weight) -> [Dim; 2] {
        let (out, sum) = weight.dims.split_at(weight.dims.len() - weight.inputs.min(weight.dims.len()));
        let [of_out, of_sum] = [out, sum].map(|dims| self.joint(d, dims, false));
        match sum {
            // A dimension of the result, too.
            _ if of_out == of_sum => [self.joint(d, out, true), of_sum],
            &[dim] if out.contains(&dim) => [of_out, self.joint(d, sum, true)],
            _ => [of_out, of_sum],
        }
    }

    /// A weight of a definition; a matrix that products make themselves is left out.
    fn own_weight(&mut self, d: &Defining, weight: WeightId, left_out: bool) -> Value {
        let weight = &d.graph.weights[weight.0 as usize];
        let init = self.beginning(d.graph, weight);
        let part = part::of_weight(&weight.path, weight.purpose);
        match weight.purpose {
            Purpose::Matrix | Purpose::Output if left_out => d.input,
            Purpose::Matrix | Purpose::Output => {
                let ends = self.ends(d, weight);
                self.whole_matrix(d.owner, part, ends, init)
            }
            Purpose::Bias | Purpose::Gain | Purpose::Filter | Purpose::Own => {
                let dims = d.dims(&weight.dims);
                if dims.is_empty() {
                    let init = init.unwrap_or(Init::Constant(0.0));
                    return self.number(d.owner, part, init);
                }
                // Matrices of products decay, whatever dimensions others have.
                let kind = if dims.len() < 2 { TensorKind::Gain } else { TensorKind::Steady };
                self.weight(d.owner, part, &dims, kind, init)
            }
        }
    }

    /// A product with a weight.
    fn linear(&mut self, d: &Defining, node: &Node, over: &[DimId]) -> Result<Value, CompileError> {
        let x = d.arg(node, 0)?;
        let Some(Of::Weight(id)) = d.made(node, 1).map(|n| &n.function) else { return Err(MALFORMED) };
        let weight = &d.graph.weights[id.0 as usize];
        let (part, init) = (part::of_weight(&weight.path, weight.purpose), self.beginning(d.graph, weight));
        let x = self.each_token(d, x);
        let over = d.dims(over);
        let [out, sum] = self.ends(d, weight);
        let outs = d.dims(&weight.dims[..weight.dims.len() - weight.inputs]);
        let own = d.own(&node.ty);
        let mut values = self.formulas(&d.rows);
        let x = values.summed_last(x, &over, sum);
        let each = values.own(x).into_iter().filter(|dim| *dim != sum && outs.contains(dim));
        let each: Dims = each.collect();
        let y = if each.is_empty() {
            let y = self.matrix(d.owner, part, x, [out, sum], init);
            let mut values = self.formulas(&d.rows);
            let left = values.own(y);
            values.reshaped(y, &[&left[..left.len() - 1], &outs].concat())
        } else {
            let w = self.weight(d.owner, part, &[out, sum], TensorKind::Matrix, init);
            let w = match part.adaptable() {
                Some(matrix) => self.adapted_whole(d.owner, matrix, w, [out, sum]),
                None => w,
            };
            self.formulas(&d.rows).product_each(x, w, &each, &outs)
        };
        let mut values = self.formulas(&d.rows);
        let y = values.ordered(y, &own);
        match node.args.get(2) {
            Some(&bias) => {
                let bias = d.value(bias);
                Ok(values.binary(ir::Binary::Add, y, bias, &own))
            }
            None => Ok(y),
        }
    }

    /// The row of a table for the id of each token.
    fn embedding(&mut self, d: &Defining, node: &Node) -> Result<Value, CompileError> {
        let table = d.arg(node, 0)?;
        let (vocab, row) = (self.b.dims(table)[0], self.joint(d, &node.ty.dims, false));
        let table = self.b.reshape(table, &[vocab, row]);
        let ids = self.given(Input::Ids);
        let rows = self.b.op(Op::Embed, &[table, ids]);
        Ok(self.b.reshape(rows, &[&d.rows[..], &d.own(&node.ty)].concat()))
    }

    /// Part of a dimension. All parts of a value's dimension that are taken somewhere are cut at
    /// once, where they do not overlap.
    fn sliced(
        &mut self,
        d: &mut Defining,
        node: &Node,
        at: ValueId,
        of: DimId,
    ) -> Result<Value, CompileError> {
        let Of::Slice { from, .. } = node.function else { return Err(MALFORMED) };
        let &source = node.args.first().ok_or(MALFORMED)?;
        let own = d.own(&node.ty);
        if let Some(parts) = d.cuts.get(&(source, of))
            && let Some(&(_, part)) = parts.iter().find(|(first, _)| *first == from)
        {
            return Ok(self.formulas(&d.rows).ordered(part, &own));
        }
        let region = &d.graph.region;
        let taken = |n: &&Node| n.args.first() == Some(&source);
        let part = |n: &Node| match n.function {
            Of::Slice { of: other, from, to } if other == of => Some((from, to)),
            _ => None,
        };
        let mut parts: Vec<(u64, DimId)> = region.nodes.iter().filter(taken).filter_map(part).collect();
        parts.sort_by_key(|(from, _)| *from);
        parts.dedup();
        let end = |(from, to): (u64, DimId)| from + d.graph.size(to);
        if parts.windows(2).any(|w| end(w[0]) > w[1].0) {
            // This one alone.
            parts = part(region.node(at)).into_iter().collect();
        }
        let (mut dims, mut firsts, mut reached) = (vec![], vec![], 0);
        let all = d.graph.size(of);
        let ends: Vec<(u64, Option<DimId>)> =
            parts.iter().map(|&(from, to)| (from, Some(to))).chain([(all, None)]).collect();
        for (from, to) in ends {
            if from > reached {
                dims.push(self.dim(&format!("left{}", from - reached), from - reached));
                firsts.push(None);
            }
            if let Some(to) = to {
                dims.push(d.dim(to));
                firsts.push(Some(from));
                reached = end((from, to));
            }
        }
        let x = d.value(source);
        let mut values = self.formulas(&d.rows);
        let cut = if dims.len() == 1 {
            let x = values.last(x, &[d.dim(of)]);
            let left = values.own(x);
            vec![values.reshaped(x, &[&left[..left.len() - 1], &dims].concat())]
        } else {
            values.cut(x, d.dim(of), &dims)
        };
        let found: Vec<(u64, Value)> =
            firsts.into_iter().zip(cut).filter_map(|(first, part)| Some((first?, part))).collect();
        let own_part = found.iter().find(|(first, _)| *first == from).map(|(_, part)| *part);
        let own_part = values.ordered(own_part.ok_or(MALFORMED)?, &own);
        if parts.len() > 1 {
            d.cuts.insert((source, of), found);
        }
        Ok(own_part)
    }

    /// A rotation by the position of the token, or the depth of the application.
    fn turned(
        &mut self,
        d: &Defining,
        node: &Node,
        base: f64,
        over: DimId,
        at: Turn,
    ) -> Result<Value, CompileError> {
        let x = d.arg(node, 0)?;
        let x = self.each_token(d, x);
        let own = d.own(&node.ty);
        let x = self.formulas(&d.rows).last(x, &[d.dim(over)]);
        let rope =
            |positions| Op::Rope(ir::Rope { base, positions, scaling: None, chosen: None, inverse: false });
        let y = match at {
            Turn::Position => {
                let positions = self.given(Input::Positions);
                self.b.op(rope(Positions::Tokens), &[x, positions])
            }
            Turn::Depth => {
                let (l, all) = (self.b.index("depth", Index::Depth), self.b.index("depths", Index::Depths));
                self.b.op(rope(Positions::Depth { half_reversed: false }), &[x, l, all])
            }
        };
        Ok(self.formulas(&d.rows).ordered(y, &own))
    }
}
