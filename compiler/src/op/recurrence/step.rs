//! The function of one step of a recurrence.
//!
//! Its parameters are states (bound as state), then rows (values), then constants (weights); its
//! results are outputs, then the states in their order, under their names. It has neither a batch
//! nor a sequence.

use super::*;
use crate::autodiff::{Seed, differentiate, prune};
use crate::ir::{Function, Port};
use std::sync::Arc;

/// The name of the function, which the text form leaves out.
const NAME: &str = "step";

/// A function of one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Step(Arc<Function>);

/// A step without operands, which no recurrence takes.
impl Default for Step {
    fn default() -> Self {
        Step(Arc::new(Function::new(NAME)))
    }
}

/// The function by which cotangents pass a step: states, rows, constants, cotangents of outputs and
/// of states -> cotangents of states, rows and constants. Of the cotangents that it takes it may
/// lack some.
pub struct AdjointStep(Function);

impl From<Function> for Step {
    fn from(function: Function) -> Step {
        Step(Arc::new(Function { name: NAME.into(), ..function }))
    }
}

impl Step {
    /// The function.
    pub fn function(&self) -> &Function {
        &self.0
    }

    /// Visits it as an attribute.
    pub(crate) fn attribute(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        let mut function = Function::clone(&self.0);
        a.function(&mut function)?;
        *self = Step::from(function);
        Ok(())
    }

    fn params(&self, of: fn(Binding) -> bool) -> impl Iterator<Item = &Type> + Clone {
        let f = &self.0;
        f.params.iter().zip(&f.types).filter(move |(p, _)| of(p.binding)).map(|(_, ty)| ty)
    }

    /// Types of the states.
    pub fn states(&self) -> impl Iterator<Item = &Type> + Clone {
        self.params(|binding| binding.is_state())
    }

    /// Types of the rows.
    pub fn rows(&self) -> impl Iterator<Item = &Type> + Clone {
        self.params(|binding| binding == Binding::Value)
    }

    /// How many rows there are.
    pub fn row_count(&self) -> usize {
        self.rows().count()
    }

    /// Types of the constants.
    pub fn constants(&self) -> impl Iterator<Item = &Type> + Clone {
        self.params(|binding| binding == Binding::Weight)
    }

    /// Types of the outputs.
    pub fn outputs(&self) -> impl Iterator<Item = &Type> + Clone {
        let f = &self.0;
        f.results.iter().filter(|(p, _)| !p.binding.is_state()).map(|(_, v)| f.ty(*v))
    }

    /// Rows, constants and initial states.
    pub fn operands(&self) -> usize {
        self.0.params.len()
    }

    /// Elements of all states.
    pub fn state_elements(&self, module: &Module) -> u64 {
        self.states().fold(0, |n: u64, ty| n.saturating_add(module.elements(&ty.dims)))
    }

    /// Element-wise operations of a step; sums of products in it are not the matmuls that
    /// count.
    pub(super) fn cost(&self, module: &Module) -> Count {
        cost_of(module, &self.0)
    }

    /// Why it is no step, in words.
    pub(super) fn check(&self, module: &Module) -> Result<(), String> {
        let f = &*self.0;
        ir::verify_function(module, f).map_err(|e| e.to_string())?;
        let rank = |p: &Port| match p.binding {
            Binding::State(Lifetime::Depth) => Some(0),
            Binding::Value => Some(1),
            Binding::Weight => Some(2),
            _ => None,
        };
        let ranks: Option<Vec<u8>> = f.params.iter().map(rank).collect();
        if !ranks.is_some_and(|ranks| ranks.is_sorted()) {
            return Err("a step takes states, then rows (`input`), then constants (`weight`)".into());
        }
        if f.types.iter().any(|ty| ty.dtype != DType::F32) {
            return Err("all values of a step are f32".into());
        }
        let states: Vec<&Port> = f.params.iter().filter(|p| p.binding.is_state()).collect();
        let split = f.results.len().saturating_sub(states.len());
        let (outputs, left) = f.results.split_at(split);
        let values = outputs.iter().all(|(p, _)| p.binding == Binding::Value);
        if !values || !left.iter().map(|(p, _)| p).eq(states) {
            return Err("a step returns outputs, then each of its states in order".into());
        }
        if outputs.is_empty() || self.row_count() == 0 {
            return Err("a step takes at least one row and returns at least one output".into());
        }
        Program::forward(module, self).map(drop)
    }

    /// The function by which cotangents pass it.
    pub(super) fn adjoint(&self, module: &Module) -> Result<AdjointStep, CompileError> {
        let f = &*self.0;
        let mut own = Module { dims: module.dims.clone(), ..Module::default() };
        let seeds: Vec<(&str, Seed)> =
            f.results.iter().map(|(p, _)| (p.name.as_str(), Seed::Param)).collect();
        let joint = differentiate(&mut own, f, &seeds, &|_| true)?;
        Ok(AdjointStep(prune(&joint, &|p| p.binding.is_cotangent())))
    }

    /// A small step: one or two states, one of them a matrix, with decay, a sum of products, an
    /// output that reads the new state, and a constant.
    pub(super) fn random(case: &mut Case) -> Step {
        let h = case.rng.once_in(2).then(|| case.dim("h"));
        let (v, k) = (case.dim("v"), case.dim("k"));
        let with = |dims: &[Dim]| h.into_iter().chain(dims.iter().copied()).collect::<Dims>();
        let delta = case.rng.once_in(2);
        let two = case.rng.once_in(2);
        let mut module = case.module.clone();
        let mut b = Builder::new(&mut module, NAME);
        let matrix = Type::f32(&with(&[v, k]));
        let state = Binding::State(Lifetime::Depth);
        let s = b.param("S", state, matrix.clone());
        let n = two.then(|| b.param("n", state, Type::f32(&with(&[k]))));
        let key = b.param("key", Binding::Value, Type::f32(&with(&[k])));
        let value = b.param("value", Binding::Value, Type::f32(&with(&[v])));
        let decay = b.param("decay", Binding::Value, Type::f32(&with(&[])));
        let gain = b.param("gain", Binding::Weight, Type::f32(&with(&[v])));
        let a = b.unary(Unary::Sigmoid, decay);
        let mut left = b.mul(a, s);
        let mut what = value;
        if delta {
            let product = b.mul(left, key);
            let old = b.reduce(crate::ir::Reduce::Sum, product, &[k]);
            what = b.sub(value, old);
        }
        let zeros = b.zeros(&matrix);
        let wide = b.add(zeros, what);
        let outer = b.mul(wide, key);
        left = b.add(left, outer);
        let read = b.mul(left, key);
        let sum = b.reduce(crate::ir::Reduce::Sum, read, &[k]);
        let mut o = b.mul(sum, gain);
        let mut states = vec![("S", left)];
        if let Some(n) = n {
            let n = b.add(n, key);
            let square = b.unary(Unary::Square, n);
            let size = b.reduce(crate::ir::Reduce::Mean, square, &[k]);
            let one = b.constant(1.0);
            let size = b.add(size, one);
            let root = b.unary(Unary::Rsqrt, size);
            o = b.mul(o, root);
            states.push(("n", n));
        }
        b.result("o", o);
        for (name, v) in states {
            b.result(Port::new(name, state), v);
        }
        Step::from(b.finish().expect("the step is well formed"))
    }
}

fn cost_of(module: &Module, f: &Function) -> Count {
    let total = ir::cost::total(module, f, |_| Extents::default());
    Count(total.ok().and_then(|cost| cost.elementwise.checked_add(cost.flops)))
}

impl AdjointStep {
    /// The function.
    pub fn function(&self) -> &Function {
        &self.0
    }

    pub(super) fn cost(&self, module: &Module) -> Count {
        cost_of(module, &self.0)
    }

    /// Cotangents of states, rows and constants, from states, rows, constants and cotangents of
    /// outputs and states.
    pub(super) fn evaluate(
        &self,
        module: &Module,
        step: &Step,
        given: &[Tensor],
    ) -> Result<Vec<Tensor>, String> {
        let f = step.function();
        let names = f.params.iter().map(|p| p.name.clone());
        let names = names.chain(f.results.iter().map(|(p, _)| p.cotangent().name));
        let given: HashMap<String, &Tensor> = names.zip(given).collect();
        let args: Option<Vec<&Tensor>> = self.0.params.iter().map(|p| given.get(&p.name).copied()).collect();
        let args = args.ok_or("the adjoint of the step reads what the step has not")?;
        let results = ir::interpret::run(module, &self.0, &args, &mut |_, _, _| {});
        Ok(results.map_err(|e| e.to_string())?.0.into_iter().map(|(_, t)| t).collect())
    }
}
