//! Products of the vectors of heads with a matrix of each head.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Slot, Touches, Units, Work, input, need, result, storage, times};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Per head `y = x · wᵀ` with rows `first..first + part` of its matrix (`k` is `inner`), or
/// `y = x · w` where `transposed` (`k` is `part`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByHead {
    /// Rows, each with a vector for every head.
    pub rows: u64,
    /// Heads.
    pub heads: u64,
    /// Rows of a matrix.
    pub out: u64,
    /// Columns of a matrix.
    pub inner: u64,
    /// The first row of a matrix that takes part.
    pub first: u64,
    /// Rows of a matrix that take part.
    pub part: u64,
    /// Sums over `part` rather than `inner`.
    pub transposed: bool,
    /// `w` has a storage type of its own: bf16 or packed, while `x` is f32.
    pub stored: bool,
}

impl ByHead {
    /// Elements of a head in a row of the result, and of the vector that it is made of.
    pub fn sizes(&self) -> (u64, u64) {
        if self.transposed { (self.inner, self.part) } else { (self.part, self.inner) }
    }
}

impl KernelKind for ByHead {
    fn signature(&self) -> Vec<Slot> {
        let &ByHead { rows, heads, out, inner, part, .. } = self;
        let (n, k) = self.sizes();
        let w = input("w", &[heads, out, inner]).weight(self.stored, 0);
        vec![
            input("x", &[rows, heads, k]).float(0),
            w.touches(Touches::AtMost(times(&[heads, part, inner]))),
            result("y", &[rows, heads, n]).float(1),
        ]
    }

    fn check(&self) -> Result<(), String> {
        let end = self.first.checked_add(self.part);
        need(end.is_some_and(|end| end <= self.out), "more rows than a matrix has")
    }

    fn summary(&self) -> String {
        let &ByHead { rows, heads, out, inner, first, part, transposed, stored } = self;
        let (how, of) = (if transposed { " transposed" } else { "" }, storage(stored));
        let end = first.saturating_add(part);
        format!("by_head {rows} by {heads}×{out}×{inner}, rows {first}..{end}{how}{of}")
    }

    fn work(&self) -> Work {
        Work::per(Units::Rows { rows: self.rows, some: true }, &[self.heads, self.part, self.inner])
    }

    fn rows(&self) -> Option<u64> {
        Some(self.rows)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::by_head(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &ByHead { rows, heads, out, inner, first, transposed, .. } = self;
        let (n, k) = self.sizes();
        let numbers: &[(&str, &dyn Display)] = numbers!["N": n, "K": k, "HEADS": heads, "OUT": out, "INNER": inner, "FIRST": first, "TRANSPOSED": transposed.into()];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("by_head", times(&[rows, heads, n]))?.finish())
    }
}

impl Choose for super::ByHead {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (x, w) = (s.dims(0), s.dims(1));
        Ok(Kernel::ByHead(ByHead {
            rows: s.elements(&x[..x.len() - 2]),
            heads: s.size(w[0]),
            out: s.size(w[1]),
            inner: s.size(w[2]),
            first: self.first,
            part: s.size(self.part),
            transposed: self.over == self.part,
            stored: s.dtype(0) != s.dtype(1),
        }))
    }
}
