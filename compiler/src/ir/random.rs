//! A small random instance of every operation, for tests of whatever claims to compute or derive
//! one.
//!
//! *In*: a seed. *Out*: an [`Instance`]: a module, a function of one node, and arguments that are
//! valid for it: routes chosen, offsets that group them, outputs and statistics that a forward
//! operation really gave to its gradient. *Promise*: [`table`] has an entry for every operation and
//! every choice inside it (a test goes through [`Op::VARIANTS`] to be sure), sizes of one and odd
//! sizes occur, arguments keep away from kinks and poles, and a seed means one instance for ever.
//!
//! ```
//! use dreamc_compiler::ir::{interpret, random};
//!
//! for entry in random::table() {
//!     let instance = entry.instance(7);
//!     interpret(&instance.module, &instance.function, &instance.args).unwrap();
//! }
//! ```

use super::interpret::evaluate;
use super::{Binding, Dim, Dims, Function, Index, Lifetime, Module, Node, Op, Port, Tensor, Type, Value};
use crate::op::Signature;

/// Random numbers that are a function of the seed alone (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6a09_e667_f3bc_c909)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 where `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits().checked_rem(n).unwrap_or(0)
    }

    /// A number from `low` up to, but not including, `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// One operation with operands.
#[derive(Clone, Debug)]
pub struct Instance {
    /// The dimensions, and the function.
    pub module: Module,
    /// A function of one node, named after its operation; its parameters are the operands in order.
    /// Caches and counts are [`Binding::State`] and returned under their names.
    pub function: Function,
    /// A tensor a parameter.
    pub args: Vec<Tensor>,
}

impl Instance {
    /// The node.
    pub fn node(&self) -> &Node {
        &self.function.nodes[0]
    }

    /// The operation.
    pub fn op(&self) -> &Op {
        &self.node().op
    }

    /// Types of the operands.
    pub fn operand_types(&self) -> Vec<&Type> {
        self.node().inputs.iter().map(|&v| self.function.ty(v)).collect()
    }

    /// Types of the results.
    pub fn result_types(&self) -> Vec<Type> {
        self.node().results().map(|v| self.function.ty(v).clone()).collect()
    }
}

/// A kind of operation.
pub struct Entry {
    /// The operation's word in the text form.
    pub name: &'static str,
    blank: Op,
}

impl Entry {
    /// The instance of that seed.
    pub fn instance(&self, seed: u64) -> Instance {
        // The name enters the seed, so that entries differ in their sizes.
        let mixed = self.name.bytes().fold(seed, |s, b| s.wrapping_mul(31).wrapping_add(u64::from(b)));
        self.blank.operation().random(Case::new(self.name, mixed))
    }
}

/// An entry for every kind of operation.
pub fn table() -> Vec<Entry> {
    Op::blanks().into_iter().map(|blank| Entry { name: blank.name(), blank }).collect()
}

/// An instance under construction. A failure here is a bug of the operation's folder, and panics.
#[derive(Clone)]
pub(crate) struct Case {
    pub rng: Rng,
    pub module: Module,
    pub function: Function,
    pub args: Vec<Tensor>,
}

impl Case {
    fn new(name: &str, seed: u64) -> Self {
        Case { rng: Rng::new(seed), module: Module::default(), function: Function::new(name), args: vec![] }
    }

    pub fn size(&mut self) -> u64 {
        [1, 1, 2, 3, 3, 4, 5, 7][self.rng.below(8) as usize]
    }

    pub fn dim(&mut self, name: &str) -> Dim {
        let size = self.size();
        self.module.dim(name, size)
    }

    pub fn sized(&mut self, name: &str, size: u64) -> Dim {
        self.module.dim(name, size)
    }

    /// No, one or two dimensions of rows.
    pub fn rows(&mut self) -> Dims {
        ["b", "t"][..self.rng.below(3) as usize].iter().map(|n| self.dim(n)).collect()
    }

    pub fn tensor(&mut self, name: &str, binding: Binding, ty: Type, tensor: Tensor) -> Value {
        assert!(tensor.fits(&self.module, &ty), "{name} does not fit its type");
        self.args.push(tensor);
        self.function.param(name, binding, ty)
    }

    pub fn sizes(&self, dims: &[Dim]) -> Vec<usize> {
        dims.iter().map(|&d| self.module.size(d) as usize).collect()
    }

    pub fn fill<T>(&mut self, dims: &[Dim], mut element: impl FnMut(&mut Rng) -> T) -> Vec<T> {
        (0..self.module.elements(dims)).map(|_| element(&mut self.rng)).collect()
    }

    pub fn floats_from(&mut self, name: &str, dims: &[Dim], element: impl FnMut(&mut Rng) -> f64) -> Value {
        let data = self.fill(dims, element);
        self.tensor(name, Binding::Value, Type::f32(dims), Tensor::float(&self.sizes(dims), data))
    }

    pub fn floats(&mut self, name: &str, dims: &[Dim]) -> Value {
        self.floats_from(name, dims, |rng| rng.between(-1.5, 1.5))
    }

    pub fn state(&mut self, name: &str, dims: &[Dim]) -> Value {
        let value = self.floats(name, dims);
        self.function.params[value.index()].binding = Binding::State(Lifetime::Depth);
        value
    }

    pub fn ints_from(&mut self, name: &str, dims: &[Dim], element: impl FnMut(&mut Rng) -> i32) -> Value {
        let data = self.fill(dims, element);
        self.tensor(name, Binding::Value, Type::i32(dims), Tensor::int(&self.sizes(dims), data))
    }

    pub fn ints(&mut self, name: &str, dims: &[Dim], bound: u64) -> Value {
        self.ints_from(name, dims, |rng| rng.below(bound) as i32)
    }

    pub fn index(&mut self, name: &str, i: u64) -> Value {
        self.tensor(name, Binding::Index(Index::Given), Type::i32(&[]), Tensor::index(i as i32))
    }

    /// Results of an operation on values made so far.
    pub fn forward(&self, op: &Op, inputs: &[Value]) -> Vec<Tensor> {
        let types: Vec<&Type> = inputs.iter().map(|&v| self.function.ty(v)).collect();
        let operands: Vec<Tensor> = inputs.iter().map(|v| self.args[v.index()].clone()).collect();
        evaluate(&self.module, op, &types, &operands).expect("the forward operation is valid").0
    }

    /// Results of an operation on tensors of these types.
    pub fn made<const N: usize>(
        &self,
        op: impl Into<Op>,
        types: &[&Type],
        tensors: &[Tensor],
    ) -> [Tensor; N] {
        let (results, _) = evaluate(&self.module, &op.into(), types, tensors).expect("valid operands");
        results.try_into().expect("so many results")
    }

    /// Rows and a last dimension.
    pub fn row_dims(&mut self, last: &str) -> Dims {
        let mut dims = self.rows();
        dims.push(self.dim(last));
        dims
    }

    /// A dimension of at least one and at most as many as another.
    pub fn some_of(&mut self, name: &str, of: Dim) -> Dim {
        let k = 1 + self.rng.below(self.module.size(of));
        self.sized(name, k)
    }

    /// The instance; results have the names of the operation's signature.
    pub fn finish(self, op: impl Into<Op>, inputs: &[Value]) -> Instance {
        self.instance(op.into(), inputs)
    }

    fn instance(mut self, op: Op, inputs: &[Value]) -> Instance {
        let values = self.function.add(&self.module, op.clone(), inputs).expect("operands fit the operation");
        let names = Signature::names(op.signature().results, values.len());
        let port =
            |name: String| match self.function.find_param(&name).map(|p| &self.function.params[p.index()]) {
                Some(state) if state.binding.is_state() => state.clone(),
                _ => Port::from(name),
            };
        self.function.results = names.into_iter().map(port).zip(values).collect();
        self.module.functions.insert(self.function.name.clone(), self.function.clone());
        Instance { module: self.module, function: self.function, args: self.args }
    }
}

/// Dimensions with one more.
pub(crate) fn with(dims: &[Dim], last: Dim) -> Dims {
    [dims, &[last]].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Binary, Mask, Reduce, Unary, parse, verify};

    fn instances() -> Vec<Instance> {
        table().iter().flat_map(|e| (0..40).map(|seed| e.instance(seed))).collect()
    }

    #[test]
    fn every_operation_has_an_entry() {
        let shown: Vec<String> = instances().iter().map(|i| format!("{:?}", i.op())).collect();
        let has = |text: &str| shown.iter().any(|s| s.contains(text));
        for op in Op::VARIANTS {
            let starts = |s: &String| s.split(|c: char| !c.is_alphanumeric()).next() == Some(op);
            assert!(shown.iter().any(starts), "no instance of Op::{op}: give random::table an entry");
        }
        let unary: Vec<String> = Unary::ALL.iter().map(|f| format!("{:?}", Op::Unary(*f))).collect();
        let binary: Vec<String> = Binary::ALL.iter().map(|f| format!("{:?}", Op::Binary(*f))).collect();
        let reduce = Reduce::ALL.map(|how| format!("how: {how:?}"));
        let mask = [Mask::Causal, Mask::Positions].map(|m| format!("mask: {m:?}"));
        for variant in [&unary[..], &binary, &reduce, &mask].concat() {
            assert!(has(&variant), "no instance of {variant}");
        }
        for variant in
            ["Tokens", "half_reversed: true", "half_reversed: false", "inverse: true", "Some(Llama3"]
        {
            assert!(has(variant), "no instance of a rotation with {variant}");
        }
    }

    /// The operands and results of a signature are those that an operation has, and states stay in
    /// their places.
    #[test]
    fn signatures_list_operands_and_results() {
        for instance in instances() {
            let (signature, f) = (instance.op().signature(), &instance.function);
            let params: Vec<String> = f.params.iter().map(|p| p.name.clone()).collect();
            assert_eq!(Signature::names(signature.operands, params.len()), params, "{}", instance.module);
            let states = (0..params.len()).filter(|&k| f.params[k].binding.is_state());
            let in_place = (0..f.results.len()).filter_map(|k| signature.in_place(k));
            assert_eq!(states.collect::<Vec<_>>(), in_place.collect::<Vec<_>>(), "{}", instance.module);
        }
    }

    #[test]
    fn every_instance_is_valid_prints_and_parses_back() {
        for instance in instances() {
            verify(&instance.module).unwrap_or_else(|e| panic!("{e}\n{}", instance.module));
            let text = instance.module.to_string();
            let parsed = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!(parsed, instance.module, "{text}");
            assert_eq!(parsed.to_string(), text);
            let results = crate::ir::interpret(&instance.module, &instance.function, &instance.args);
            for (name, tensor) in results.unwrap_or_else(|e| panic!("{e}\n{text}")) {
                let value = instance.function.find_result(&name).expect("it is a result");
                assert!(tensor.fits(&instance.module, instance.function.ty(value)), "{name} of {text}");
                let finite = |x: &f64| x.is_finite() || (name == "lse" && *x == f64::NEG_INFINITY);
                assert!(tensor.floats().iter().all(finite), "{name} of {text}");
            }
        }
    }

    #[test]
    fn a_seed_means_one_instance() {
        for entry in table() {
            let (a, b) = (entry.instance(3), entry.instance(3));
            assert_eq!(a.module, b.module);
            assert_eq!(a.args, b.args);
        }
    }
}
