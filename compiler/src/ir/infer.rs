//! Legality: the result types of every operation, or why its operands do not fit.

use super::{DType, Dim, Function, Module, Op, Type, Value};
use crate::op::Signature;
use thiserror::Error;

/// Operands that an operation does not take.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{op}: {problem}; operands: {operands}")]
pub struct TypeError {
    /// Name of the operation.
    pub op: &'static str,
    /// The fault, and the right form.
    pub problem: String,
    /// The operands' types as the text form prints them.
    pub operands: String,
}

/// Result types of `op` on operands of these types.
pub fn infer(module: &Module, op: &Op, operands: &[&Type]) -> Result<Vec<Type>, TypeError> {
    let signature = op.signature();
    let x = Operands { module, op: signature.name, types: operands };
    x.arity(signature.operands)?;
    let results = op.operation().infer(&x)?;
    for t in &results {
        if let Some(&d) = repeated(&t.dims) {
            return x.fail(format!("the result {} would have {} twice", module.show(t), module.name(d)));
        }
    }
    Ok(results)
}

/// The types of an operation's operands, and the checks that operations have in common.
pub(crate) struct Operands<'a> {
    /// The dimensions.
    pub module: &'a Module,
    op: &'static str,
    types: &'a [&'a Type],
}

impl std::ops::Index<usize> for Operands<'_> {
    type Output = Type;

    fn index(&self, k: usize) -> &Type {
        self.types[k]
    }
}

impl Operands<'_> {
    /// An error about these operands.
    pub fn fail<T>(&self, problem: impl Into<String>) -> Result<T, TypeError> {
        let operands: Vec<String> = self.types.iter().map(|t| self.module.show(t)).collect();
        Err(TypeError { op: self.op, problem: problem.into(), operands: operands.join(", ") })
    }

    pub fn check(&self, ok: bool, problem: &str) -> Result<(), TypeError> {
        if ok { Ok(()) } else { self.fail(problem) }
    }

    /// As many operands as a signature lists.
    fn arity(&self, listed: &[&'static str]) -> Result<(), TypeError> {
        let (n, found) = (listed.len(), self.types.len());
        match listed.last() {
            Some(&"…") => self.check(found + 1 >= n, "has fewer operands than it takes at least"),
            Some(last) if last.ends_with('?') => {
                let names = Signature::names(listed, n);
                let (last, others) = names.split_last().map_or(("", &[][..]), |(l, o)| (l.as_str(), o));
                let fits = found == n || found + 1 == n;
                self.check(fits, &format!("takes {} and perhaps {last}", others.join(", ")))
            }
            Some(_) | None if found == n => Ok(()),
            Some(_) | None => self.fail(format!("takes {n} operands, has {found}")),
        }
    }

    /// The number of operands.
    pub fn len(&self) -> usize {
        self.types.len()
    }

    /// Size of a dimension.
    pub fn size(&self, d: Dim) -> u64 {
        self.module.size(d)
    }

    /// Product of the sizes of dimensions.
    pub fn elements(&self, dims: &[Dim]) -> u64 {
        self.module.elements(dims)
    }

    pub fn float(&self, k: usize) -> Result<(), TypeError> {
        self.check(self[k].dtype.is_float(), "needs floats")
    }

    pub fn int(&self, k: usize) -> Result<(), TypeError> {
        self.check(self[k].dtype == DType::I32, "needs integers where indices are meant")
    }

    /// An `i32` scalar.
    pub fn scalar(&self, k: usize) -> Result<(), TypeError> {
        self.check(self[k] == Type::i32(&[]), "the row is an i32 scalar")
    }

    pub fn same_dtype(&self, a: usize, b: usize) -> Result<(), TypeError> {
        self.check(
            !matches!(self[a].dtype, DType::Packed(_)),
            "packed numbers are read as a matmul's second operand",
        )?;
        self.check(self[a].dtype != DType::E4m3, "e4m3 is read by a matmul of two such operands")?;
        self.check(self[a].dtype == self[b].dtype, "operands have different dtypes; cast one")
    }

    /// A matmul's operands: of one type, or the second a weight that is stored in bf16 or packed.
    pub fn matmul(&self, a: usize, b: usize) -> Result<(), TypeError> {
        let mixed = matches!((self[a].dtype, self[b].dtype), (DType::F32, DType::Bf16 | DType::Packed(_)));
        if mixed { Ok(()) } else { self.same_dtype(a, b) }
    }

    /// The last dimension of an operand.
    pub fn last(&self, k: usize) -> Result<Dim, TypeError> {
        self[k].dims.last().map_or_else(|| self.fail("needs at least one dimension"), |&d| Ok(d))
    }

    /// The dimensions of an operand but the last.
    pub fn rows(&self, k: usize) -> &[Dim] {
        self[k].dims.split_last().map_or(&[], |(_, rows)| rows)
    }

    pub fn one_more(&self, offsets: Dim, experts: Dim) -> Result<(), TypeError> {
        let fits = self.size(offsets) == self.size(experts).saturating_add(1);
        self.check(fits, "offsets must have one entry more than there are experts")
    }
}

/// A dimension that occurs more than once. No value may have one: names decide what is summed and
/// broadcast.
pub(crate) fn repeated(dims: &[Dim]) -> Option<&Dim> {
    dims.iter().enumerate().find(|(i, d)| dims[..*i].contains(d)).map(|(_, d)| d)
}

/// Whether `short` can be had from `long` by leaving dimensions out.
pub fn is_subsequence(short: &[Dim], long: &[Dim]) -> bool {
    let mut rest = long.iter();
    short.iter().all(|d| rest.any(|l| l == d))
}

impl Module {
    /// The type as the text form prints it: `f32[batch, seq]`.
    pub fn show(&self, ty: &Type) -> String {
        let dims: Vec<&str> = ty.dims.iter().map(|&d| self.name(d)).collect();
        format!("{}[{}]", ty.dtype.name(), dims.join(", "))
    }
}

impl DType {
    /// As the text form prints it.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::E4m3 => "e4m3",
            DType::Packed(packed) => packed.name(),
        }
    }
}

impl Function {
    /// Adds a node, inferring its result types; all its results.
    pub fn add(
        &mut self,
        module: &Module,
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<Vec<Value>, TypeError> {
        let op = op.into();
        let operands: Vec<&Type> = inputs.iter().map(|&v| self.ty(v)).collect();
        let types = infer(module, &op, &operands)?;
        let count = types.len() as u32;
        let first = self.push(op, inputs.to_vec(), types);
        Ok((first.0..first.0 + count).map(Value).collect())
    }
}
