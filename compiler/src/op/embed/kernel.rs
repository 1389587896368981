//! Rows of a table by number.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Slot, Touches, Work, adding, input, ints, result, small, times};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// `x[r] = table[ids[r]]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Embed {
    /// Ids.
    pub rows: u64,
    /// Rows of the table.
    pub vocab: u64,
    /// Row length.
    pub width: u64,
}

/// The sum of the rows of each id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EmbedGrad {
    /// Ids.
    pub rows: u64,
    /// Rows of the table.
    pub vocab: u64,
    /// Row length.
    pub width: u64,
    /// Adds. Otherwise rows of absent ids are zeroed.
    pub accumulate: bool,
}

impl KernelKind for Embed {
    fn signature(&self) -> Vec<Slot> {
        let &Embed { rows, vocab, width } = self;
        vec![
            input("table", &[vocab, width]).weight(true, 0).touches(Touches::AtMost(times(&[rows, width]))),
            ints("ids", &[rows]),
            result("x", &[rows, width]),
        ]
    }

    fn check(&self) -> Result<(), String> {
        small(self.vocab, "more rows than integers")
    }

    fn summary(&self) -> String {
        format!("embed {}×{}", self.rows, self.width)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::embed(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Embed { rows, vocab, width } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["VOCAB": vocab, "WIDTH": width];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("embed", times(&[rows, width]))?.finish())
    }
}

impl KernelKind for EmbedGrad {
    fn signature(&self) -> Vec<Slot> {
        let &EmbedGrad { rows, vocab, width, accumulate } = self;
        // Rows of absent ids are left alone where they are added to.
        let moved = if accumulate { Touches::AtMost(times(&[rows, width])) } else { Touches::All };
        vec![
            input("d", &[rows, width]),
            ints("ids", &[rows]),
            result("table", &[vocab, width]).adds(accumulate).touches(moved),
        ]
    }

    fn check(&self) -> Result<(), String> {
        small(self.vocab, "more rows than integers")
    }

    fn summary(&self) -> String {
        format!("embed_grad {}×{}{}", self.rows, self.width, adding(self.accumulate))
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::embed_grad(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &EmbedGrad { rows, vocab, width, accumulate } = self;
        let numbers: &[(&str, &dyn Display)] =
            numbers!["ROWS": rows, "VOCAB": vocab, "WIDTH": width, "ACCUMULATE": accumulate.into()];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("grad", times(&[vocab, width]))?.finish())
    }
}

impl Choose for super::Embed {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (table, ids) = (s.dims(0), s.dims(1));
        Ok(Kernel::Embed(Embed { rows: s.elements(ids), vocab: s.size(table[0]), width: s.size(table[1]) }))
    }
}

impl Choose for super::EmbedGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let vocab = self.vocab;
        let (rows, width) = s.rows_and_last(0);
        Ok(Kernel::EmbedGrad(EmbedGrad { rows, vocab: s.size(vocab), width, accumulate: s.adds(0) }))
    }
}
