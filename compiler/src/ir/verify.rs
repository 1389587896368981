//! The rules that every pass may rely on, checked.
//!
//! *In*: a [`Module`]. *Out*: nothing, or the first rule broken, naming function and node as
//! printed. *Promise*: in a module that passes,
//!
//! - every dimension has a size from 1 to 2^48, and no value more than 2^48 elements;
//! - values are numbered parameters first, then results of nodes in order, and every operand is
//!   defined earlier;
//! - no type has a dimension twice, and every node's types are those that [`infer`](infer()) gives;
//! - names of parameters are unique, and so are names of results;
//! - [`Binding::Index`] parameters are `i32` scalars, [`Binding::Weight`] and [`Binding::Buffer`]
//!   ones floats;
//! - a result named as a state parameter has its type and its binding.
//!
//! Indices *inside* tensors (ids, orders, offsets) are values, which no type can promise; the
//! reader them checks.

use super::infer::repeated;
use super::text::show_value;
use super::{Binding, DType, Dim, Function, Module, Type, TypeError, infer};
use std::collections::{HashMap, HashSet};
use thiserror::Error;

/// Largest size of a dimension and largest number of elements of a value: sizes multiply without
/// care below it.
pub const LARGEST: u64 = 1 << 48;

/// A rule that a module breaks.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum VerifyError {
    /// A dimension's size is out of range.
    #[error("dimension {name} has size {size}; sizes are 1 to 2^48")]
    Size {
        /// The dimension.
        name: String,
        /// Its size.
        size: u64,
    },
    /// A function stands in the table under another name.
    #[error("@{name} stands in the table as {key}; use one name")]
    Key {
        /// Name of the function.
        name: String,
        /// Its key.
        key: String,
    },
    /// A parameter is wrong.
    #[error("@{function}, {param}: {problem}")]
    Param {
        /// The function.
        function: String,
        /// The parameter as printed.
        param: String,
        /// The rule broken.
        problem: String,
    },
    /// A node is wrong.
    #[error("@{function}, `{node}`: {problem}")]
    Node {
        /// The function.
        function: String,
        /// The node as printed.
        node: String,
        /// The rule broken.
        problem: String,
    },
    /// A node's operands are of the wrong type.
    #[error("@{function}, `{node}`: {error}")]
    Type {
        /// The function.
        function: String,
        /// The node as printed.
        node: String,
        /// The error of inference.
        error: TypeError,
    },
    /// A result is wrong.
    #[error("@{function}, result {result}: {problem}")]
    Result {
        /// The function.
        function: String,
        /// The result's name.
        result: String,
        /// The rule broken.
        problem: String,
    },
}

/// Checks a module; see the [module's page](self) for the rules.
pub fn verify(module: &Module) -> Result<(), VerifyError> {
    verify_dims(module)?;
    for (key, function) in &module.functions {
        if *key != function.name {
            return Err(VerifyError::Key { name: function.name.clone(), key: key.clone() });
        }
        verify_body(module, function)?;
    }
    Ok(())
}

/// Checks one function over the dimensions of `module`, whether or not it stands in its table.
pub fn verify_function(module: &Module, function: &Function) -> Result<(), VerifyError> {
    verify_dims(module)?;
    verify_body(module, function)
}

fn verify_dims(module: &Module) -> Result<(), VerifyError> {
    match module.dims.iter().find(|(_, size)| !(1..=LARGEST).contains(*size)) {
        Some((name, &size)) => Err(VerifyError::Size { name: name.clone(), size }),
        None => Ok(()),
    }
}

fn verify_body(module: &Module, function: &Function) -> Result<(), VerifyError> {
    verify_params(module, function)?;
    let mut defined = function.params.len();
    for (index, node) in function.nodes.iter().enumerate() {
        let fail = |problem: String| VerifyError::Node {
            function: function.name.clone(),
            node: module.show_node(function, node),
            problem,
        };
        let end = defined.saturating_add(node.count as usize);
        if node.first.index() != defined || end > function.types.len() {
            return Err(VerifyError::Node {
                function: function.name.clone(),
                node: format!("node {index}: {}", node.op.name()),
                problem: format!(
                    "claims values {}..{}; {defined} are defined before it, {} exist",
                    node.first.0,
                    u64::from(node.first.0) + u64::from(node.count),
                    function.types.len()
                ),
            });
        }
        if let Some(&v) = node.inputs.iter().find(|v| v.index() >= defined) {
            return Err(fail(format!("uses {} before it is defined", show_value(function, v))));
        }
        if let Some(d) = node.op.dims().iter().find(|d| d.0 as usize >= module.dims.len()) {
            return Err(fail(unknown(*d)));
        }
        for ty in &function.types[defined..end] {
            verify_type(module, ty).map_err(&fail)?;
        }
        let operands: Vec<&Type> = node.inputs.iter().map(|&v| function.ty(v)).collect();
        let inferred = infer(module, &node.op, &operands).map_err(|error| VerifyError::Type {
            function: function.name.clone(),
            node: module.show_node(function, node),
            error,
        })?;
        if inferred != function.types[defined..end] {
            let types: Vec<String> = inferred.iter().map(|t| module.show(t)).collect();
            return Err(fail(format!("its type should be {}", types.join(", "))));
        }
        defined = end;
    }
    if defined != function.types.len() {
        return Err(VerifyError::Result {
            function: function.name.clone(),
            result: "of no node".into(),
            problem: format!("{} types for {defined} values", function.types.len()),
        });
    }
    verify_results(module, function)
}

fn verify_params(module: &Module, function: &Function) -> Result<(), VerifyError> {
    let mut names = HashSet::new();
    for (i, param) in function.params.iter().enumerate() {
        let fail = |problem: String| VerifyError::Param {
            function: function.name.clone(),
            param: format!("{} %{}", param.binding.words(), param.name),
            problem,
        };
        let Some(ty) = function.types.get(i) else { return Err(fail("has no type".into())) };
        verify_type(module, ty).map_err(&fail)?;
        if !names.insert(&param.name) {
            return Err(fail("another parameter has this name".into()));
        }
        match param.binding {
            Binding::Index(_) if *ty != Type::i32(&[]) => {
                return Err(fail(format!("is {}; an index is i32[]", module.show(ty))));
            }
            Binding::Weight | Binding::PassWeight | Binding::TurnWeight | Binding::Buffer
                if !ty.dtype.is_float() =>
            {
                return Err(fail(format!("is {}; weights and buffers are floats", module.show(ty))));
            }
            _ => {}
        }
    }
    Ok(())
}

fn verify_type(module: &Module, ty: &Type) -> Result<(), String> {
    if let Some(d) = ty.dims.iter().find(|d| d.0 as usize >= module.dims.len()) {
        return Err(unknown(*d));
    }
    if let Some(&d) = repeated(&ty.dims) {
        return Err(format!("{} has dimension {} twice", module.show(ty), module.name(d)));
    }
    if module.elements(&ty.dims) > LARGEST {
        return Err(format!("{} has more than 2^48 elements", module.show(ty)));
    }
    Ok(())
}

fn unknown(dim: Dim) -> String {
    format!("dimension {} is not in the module's table", dim.0)
}

fn verify_results(module: &Module, function: &Function) -> Result<(), VerifyError> {
    let mut names = HashSet::new();
    let states: HashMap<&str, (&Type, Binding)> = function
        .params
        .iter()
        .zip(&function.types)
        .filter(|(p, _)| p.binding.is_state())
        .map(|(p, ty)| (p.name.as_str(), (ty, p.binding)))
        .collect();
    for (port, value) in &function.results {
        let name = &port.name;
        let fail = |problem: String| VerifyError::Result {
            function: function.name.clone(),
            result: name.clone(),
            problem,
        };
        let Some(ty) = function.types.get(value.index()) else {
            return Err(fail(format!("{} is not defined", show_value(function, *value))));
        };
        if !names.insert(name) {
            return Err(fail("another result has this name".into()));
        }
        let Some((state, binding)) = states.get(name.as_str()) else { continue };
        if *state != ty {
            let (found, state) = (module.show(ty), module.show(state));
            return Err(fail(format!("is {found}, but the state of this name is {state}")));
        }
        if port.binding != *binding {
            let (found, state) = (port.binding.words(), binding.words());
            return Err(fail(format!("is bound as {found}, but the state of this name as {state}")));
        }
    }
    Ok(())
}

impl DType {
    /// All but those whose blocks are as long as a row.
    pub const ALL: [DType; 9] = [
        DType::F32,
        DType::Bf16,
        DType::I32,
        DType::Packed(crate::format::Packed::F16),
        DType::Packed(crate::format::Packed::Q8),
        DType::Packed(crate::format::Packed::Q4),
        DType::Packed(crate::format::Packed::Mxfp4),
        DType::Packed(crate::format::Packed::Q4K),
        DType::Packed(crate::format::Packed::Q6K),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Binary, Op, Reduce, Unary, Value};
    use crate::op::Reduction;
    use smallvec::smallvec;
    use std::sync::Arc;

    /// `y = -x + x`, valid.
    fn sample() -> Module {
        let mut module = Module::default();
        let b = module.dim("b", 2);
        let mut f = Function::new("f");
        let x = f.param("x", Binding::Value, Type::f32(&[b]));
        let neg = f.add(&module, Op::Unary(Unary::Neg), &[x]).unwrap()[0];
        let y = f.add(&module, Op::Binary(Binary::Add), &[neg, x]).unwrap()[0];
        f.results.push(("y".into(), y));
        module.functions.insert("f".into(), f);
        module
    }

    /// The verifier's error once `damage` is done. The text form cannot express most of it, so it
    /// is done here.
    fn broken(damage: impl Fn(&mut Module, &mut Function)) -> String {
        let mut module = sample();
        verify(&module).expect("the sample is valid");
        let mut f = module.functions.shift_remove("f").unwrap();
        damage(&mut module, &mut f);
        module.functions.insert("f".into(), f);
        verify(&module).expect_err("the damage is seen").to_string()
    }

    #[test]
    fn structure() {
        let later = "@f, `%0 = neg %1 : f32[b]`: uses %1 before it is defined";
        assert_eq!(broken(|_, f| f.nodes[0].inputs[0] = Value(2)), later);
        let itself = "@f, `%0 = neg %0 : f32[b]`: uses %0 before it is defined";
        assert_eq!(broken(|_, f| f.nodes[0].inputs[0] = Value(1)), itself);
        let nowhere = "@f, `%0 = neg %?77 : f32[b]`: uses %?77 before it is defined";
        assert_eq!(broken(|_, f| f.nodes[0].inputs[0] = Value(77)), nowhere);
        let swapped = "@f, `node 0: add`: claims values 2..3; 1 are defined before it, 3 exist";
        assert_eq!(broken(|_, f| f.nodes.swap(0, 1)), swapped);
        let many = "@f, `node 0: neg`: claims values 1..4294967296; 1 are defined before it, 3 exist";
        assert_eq!(broken(|_, f| f.nodes[0].count = u32::MAX), many);
        let missing = "@f, result of no node: 3 types for 2 values";
        assert_eq!(broken(|_, f| drop(f.nodes.pop())), missing);
        assert_eq!(broken(|_, f| f.types.clear()), "@f, input %x: has no type");
        let result = "@f, result y: %?9 is not defined";
        assert_eq!(broken(|_, f| f.results[0].1 = Value(9)), result);
        let twice = "@f, result y: another result has this name";
        assert_eq!(broken(|_, f| f.results.push(("y".into(), Value(0)))), twice);
        assert_eq!(broken(|_, f| f.name = "g".into()), "@g stands in the table as f; use one name");
        let wrong = "@f, `%0 = neg %x : i32[b]`: its type should be f32[b]";
        assert_eq!(broken(|_, f| f.types[1].dtype = DType::I32), wrong);
    }

    #[test]
    fn dimensions() {
        let unknown = "@f, input %x: dimension 7 is not in the module's table";
        assert_eq!(broken(|_, f| f.types[0].dims[0] = Dim(7)), unknown);
        let attribute = "@f, `%0 = sum %x over [\"?\"] : f32[b]`: dimension 9 is not in the module's table";
        let sum = Op::Reduce(Reduction { how: Reduce::Sum, over: smallvec![Dim(9)] });
        assert_eq!(broken(|_, f| f.nodes[0].op = sum.clone()), attribute);
        let none = "dimension none has size 0; sizes are 1 to 2^48";
        assert_eq!(broken(|m, _| m.dims = Arc::new([("none".into(), 0)].into())), none);
        let long = format!("dimension long has size {}; sizes are 1 to 2^48", LARGEST + 1);
        assert_eq!(broken(|m, _| m.dims = Arc::new([("long".into(), LARGEST + 1)].into())), long);
    }

    #[test]
    fn parameters() {
        let again = |f: &mut Function| {
            let mut g = Function::new("f");
            g.param("x", Binding::Value, f.types[0].clone());
            g.param("x", Binding::Value, f.types[0].clone());
            *f = g;
        };
        assert_eq!(broken(|_, f| again(f)), "@f, input %x: another parameter has this name");
    }
}
