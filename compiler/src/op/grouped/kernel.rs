//! Products of groups of rows with a matrix each.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{
    KernelKind, Of, Slot, Units, Work, adding, divides, input, ints, need, result, small, storage, times,
};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Per group of rows, `y = x · wᵀ` (`k` is `inner`), or `y = x · w` where `transposed` (`k` is
/// `out`). Rows beyond the last offset are zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grouped {
    /// Rows, used or not.
    pub slots: u64,
    /// Matrices.
    pub experts: u64,
    /// Rows of a matrix.
    pub out: u64,
    /// Columns of a matrix.
    pub inner: u64,
    /// Sums over `out` rather than `inner`.
    pub transposed: bool,
    /// `x` is `[slots / g, k]` and `order` says which of its rows: `order[s] / g`.
    pub gather: Option<u64>,
    /// `w` has a storage type of its own: bf16 or packed, while `x` is f32.
    pub stored: bool,
}

/// Per group the sum of outer products of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedOuter {
    /// Rows, used or not.
    pub slots: u64,
    /// Matrices.
    pub experts: u64,
    /// Rows of a matrix.
    pub out: u64,
    /// Columns of a matrix.
    pub inner: u64,
    /// As for [`Grouped`].
    pub gather: Option<u64>,
    /// Adds. Otherwise matrices of empty groups are zeroed.
    pub accumulate: bool,
}

/// Rows that a grouped matmul reads, all of them or some in an order: operand `operand` of the
/// operation.
fn rows(operand: usize, slots: u64, length: u64, gather: Option<u64>) -> Slot {
    match gather {
        None => input("x", &[slots, length]).of(Of::Operand(operand)),
        Some(g) => input("x", &[slots / g.max(1), length]).of(Of::Gathered(operand)),
    }
}

fn check(slots: u64, experts: u64, gather: Option<u64>) -> Result<(), String> {
    small(slots, "more slots than integers")?;
    need(experts > 0, "no experts")?;
    gather.map_or(Ok(()), |g| divides(g, slots, "slots must be a multiple of slots per row"))
}

fn gathering(gather: Option<u64>) -> &'static str {
    if gather.is_some() { " gathering" } else { "" }
}

fn work(slots: u64, experts: u64, out: u64, inner: u64) -> Work {
    let units = Units::Slots { offsets: 2, entries: experts.saturating_add(1), slots };
    Work::per(units, &[out, inner])
}

impl KernelKind for Grouped {
    fn signature(&self) -> Vec<Slot> {
        let &Grouped { slots, experts, out, inner, transposed, gather, stored } = self;
        let (k, n) = if transposed { (out, inner) } else { (inner, out) };
        let order = gather.map(|_| ints("order", &[slots]).of(Of::Order(0)));
        let mut list = vec![
            rows(0, slots, k, gather).float(0),
            input("w", &[experts, out, inner]).weight(stored, 0).of(Of::Operand(1)),
            ints("offsets", &[experts.saturating_add(1)]).of(Of::Operand(2)),
        ];
        list.extend(order);
        list.push(result("y", &[slots, n]).float(1));
        list
    }

    fn check(&self) -> Result<(), String> {
        check(self.slots, self.experts, self.gather)
    }

    fn summary(&self) -> String {
        let &Grouped { slots, experts, out, inner, transposed, gather, stored } = self;
        let how = if transposed { " transposed" } else { "" };
        let of = storage(stored);
        format!("grouped {slots} by {experts}×{out}×{inner}{how}{}{of}", gathering(gather))
    }

    fn work(&self) -> Work {
        work(self.slots, self.experts, self.out, self.inner)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::grouped(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Grouped { slots, experts, out, inner, transposed, gather, stored: _ } = self;
        let (width, depth) = if transposed { (inner, out) } else { (out, inner) };
        let numbers: &[(&str, &dyn Display)] = numbers!["SLOTS": slots, "EXPERTS": experts, "OUT": out, "INNER": inner, "WIDTH": width, "DEPTH": depth, "TRANSPOSED": transposed.into(), "GATHER": gather.unwrap_or(0)];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("grouped", times(&[slots, width]))?.finish())
    }
}

impl KernelKind for GroupedOuter {
    fn signature(&self) -> Vec<Slot> {
        let &GroupedOuter { slots, experts, out, inner, gather, accumulate } = self;
        let order = gather.map(|_| ints("order", &[slots]).of(Of::Order(1)));
        let mut list = vec![
            input("y", &[slots, out]).float(0).of(Of::Operand(0)),
            rows(1, slots, inner, gather).float(0),
            ints("offsets", &[experts.saturating_add(1)]).of(Of::Operand(2)),
        ];
        list.extend(order);
        list.push(result("w", &[experts, out, inner]).adds(accumulate));
        list
    }

    fn check(&self) -> Result<(), String> {
        check(self.slots, self.experts, self.gather)
    }

    fn summary(&self) -> String {
        let &GroupedOuter { slots, experts, out, inner, gather, accumulate } = self;
        let (gather, add) = (gathering(gather), adding(accumulate));
        format!("grouped_outer {slots} by {experts}×{out}×{inner}{gather}{add}")
    }

    fn work(&self) -> Work {
        work(self.slots, self.experts, self.out, self.inner)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::grouped_outer(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &GroupedOuter { slots, experts, out, inner, gather, accumulate } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["SLOTS": slots, "OUT": out, "INNER": inner, "GATHER": gather.unwrap_or(0), "ACCUMULATE": accumulate.into()];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("outer", times(&[experts, out, inner]))?.finish())
    }
}

impl Choose for super::Grouped {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let over = self.over;
        let w = s.dims(1);
        Ok(Kernel::Grouped(Grouped {
            slots: s.size(s.result(0).dims[0]),
            experts: s.size(w[0]),
            out: s.size(w[1]),
            inner: s.size(w[2]),
            transposed: w[1] == over,
            gather: s.gathered(0),
            stored: s.dtype(0) != s.dtype(1),
        }))
    }
}

impl Choose for super::GroupedOuter {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let experts = self.experts;
        Ok(Kernel::GroupedOuter(GroupedOuter {
            slots: s.size(s.dims(0)[0]),
            experts: s.size(experts),
            out: s.size(s.dims(0)[1]),
            inner: s.size(s.dims(1)[1]),
            gather: s.gathered(1),
            accumulate: s.adds(0),
        }))
    }
}
