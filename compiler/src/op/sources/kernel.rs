//! Attention over sources in depth.

use crate::CompileError;
use crate::codegen::naive::{Naive, whole};
use crate::codegen::text::float;
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Bits;
use crate::op::kernel::{
    Amount, KernelKind, Slot, Touches, Units, Work, index, input, need, times, updated, wide,
};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Shapes of a reading of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourcesShape {
    /// Rows of the sources.
    pub sources: u64,
    /// Tokens.
    pub rows: u64,
    /// Elements of a source of a token.
    pub width: u64,
    /// Added to the mean square.
    pub eps: Bits,
}

/// Every token reads a mixture of rows `0..row` of itself in `sources` and its row of `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadSources(pub SourcesShape);

/// The gradient of [`ReadSources`]; `dsources` is added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadSourcesGrad(pub SourcesShape);

/// The operand of both kernels that gives how many rows of the sources are read.
const ROW: usize = 3;

/// Work of a token. For each source: multiply-adds for each element (forward: the score and the
/// result; backward: the score again, the cotangent of the weight, three for the source's and one
/// for the query's); then element-wise operations for each element (the square and its sum) and for
/// the source as a whole. Last, element-wise operations for each element of the result.
pub(super) fn work(gradient: bool) -> (u64, (u64, u64), u64) {
    if gradient { (6, (2, 12), 0) } else { (2, (2, 8), 1) }
}

impl SourcesShape {
    fn all(&self) -> [u64; 3] {
        [self.sources, self.rows, self.width]
    }

    fn of_tokens(&self, name: &'static str) -> Slot {
        input(name, &[self.rows, self.width])
    }

    /// The share of the sources that a launch reads, by the products that every row would take.
    fn share(&self, gradient: bool) -> Touches {
        let [sources, rows, width] = self.all();
        Touches::Share(wide(&[work(gradient).0, rows, width, sources]))
    }

    fn operands(&self, gradient: bool) -> Vec<Slot> {
        vec![
            input("sources", &self.all()).touches(self.share(gradient)),
            self.of_tokens("x").rows(1),
            input("q", &[self.width]),
            index("row", Some(self.sources)),
        ]
    }

    fn check(&self) -> Result<(), String> {
        need(self.width > 0, "sources of no elements")
    }

    fn summary(&self) -> String {
        format!("{} of {} at {} rows", self.rows, self.width, self.sources)
    }

    fn work(&self, gradient: bool) -> Work {
        let &SourcesShape { sources, rows, width, .. } = self;
        let (products, elementwise, outputs) = work(gradient);
        Work {
            fixed: Amount { multiply_adds: 0, elementwise: wide(&[rows, width, outputs]) },
            each: Amount {
                multiply_adds: wide(&[products, width]),
                elementwise: wide(&[width, elementwise.0]) + u128::from(elementwise.1),
            },
            units: Units::Depth { row: ROW, depths: sources, window: None, rows, some: false },
        }
    }

    fn naive(&self, kernel: &dyn KernelKind, variant: Variant) -> Result<Naive, CodegenError> {
        let numbers: &[(&str, &dyn Display)] =
            &[("ROWS", &whole(self.rows)), ("WIDTH", &whole(self.width)), ("EPS", &float(self.eps.0))];
        Naive::new(kernel, variant, include_str!("naive.cuh"), numbers)
    }
}

impl KernelKind for ReadSources {
    fn signature(&self) -> Vec<Slot> {
        let mut list = self.0.operands(false);
        list.push(self.0.of_tokens("u").written());
        list
    }

    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn summary(&self) -> String {
        format!("read_sources {}", self.0.summary())
    }

    fn work(&self) -> Work {
        self.0.work(false)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::forward(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let naive = self.0.naive(self, variant)?;
        Ok(naive.pass("forward", times(&[self.0.rows, self.0.width]))?.finish())
    }
}

impl KernelKind for ReadSourcesGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.0;
        let mut list = s.operands(true);
        list.extend([
            s.of_tokens("du"),
            s.of_tokens("dx").written(),
            s.of_tokens("dq").written(),
            updated("dsources", &s.all()).touches(s.share(true)).state(5, 2),
        ]);
        list
    }

    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn summary(&self) -> String {
        format!("read_sources_grad {}", self.0.summary())
    }

    fn work(&self) -> Work {
        self.0.work(true)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::backward(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let naive = self.0.naive(self, variant)?;
        Ok(naive.pass("backward", times(&[self.0.rows, self.0.width]))?.finish())
    }
}

fn shape(s: &Select, eps: f64) -> SourcesShape {
    let (sources, x) = (s.dims(0), s.dims(1));
    let (rows, width) = x.split_at(x.len() - 1);
    SourcesShape {
        sources: s.size(sources[0]),
        rows: s.elements(rows),
        width: s.elements(width),
        eps: Bits(eps),
    }
}

impl Choose for super::ReadSources {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::ReadSources(ReadSources(shape(s, self.eps))))
    }
}

impl Choose for super::ReadSourcesGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::ReadSourcesGrad(ReadSourcesGrad(shape(s, self.eps))))
    }
}
