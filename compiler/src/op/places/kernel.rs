//! Tokens that decide for themselves: places, -1 where a token takes no part, and the caches of
//! those that do.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers, whole};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Of, Slot, Work, divides, input, ints, result, small, times, updated};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// A row's place where it takes part, else -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Decide {
    /// Rows.
    pub rows: u64,
    /// Rows of one sequence.
    pub tokens: u64,
    /// Whether 0 takes part.
    pub inclusive: bool,
}

/// Rows of negative place become -0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Keep {
    /// Rows.
    pub rows: u64,
    /// Row length.
    pub width: u64,
}

/// Rows of negative place become `otherwise`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeepInts {
    /// Rows.
    pub rows: u64,
    /// Row length.
    pub width: u64,
    /// The integer of the other rows.
    pub otherwise: i32,
}

/// Integers as floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numbers {
    /// How many.
    pub elements: u64,
}

/// The number of the run that each token is in: a token that takes part begins one, or ends one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Runs {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Whether tokens that take part begin runs.
    pub begins: bool,
}

/// Tokens that take part get the next entries of their cache that are negative. A full cache is an
/// index out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Admit {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Entries of each cache.
    pub entries: u64,
}

impl KernelKind for Decide {
    fn signature(&self) -> Vec<Slot> {
        vec![input("z", &[self.rows]), result("places", &[self.rows]).ints()]
    }

    fn check(&self) -> Result<(), String> {
        small(self.tokens, "more tokens than integers")?;
        divides(self.tokens, self.rows, "rows must be a multiple of the tokens of a sequence")
    }

    fn summary(&self) -> String {
        format!("decide {}{}", self.rows, if self.inclusive { " inclusive" } else { "" })
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::decide(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Decide { rows, tokens, inclusive } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "INCLUSIVE": inclusive.into()];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("decide", rows)?.finish())
    }
}

impl KernelKind for Keep {
    fn signature(&self) -> Vec<Slot> {
        let &Keep { rows, width } = self;
        vec![input("x", &[rows, width]), ints("places", &[rows]), result("y", &[rows, width])]
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn summary(&self) -> String {
        format!("keep {}×{}", self.rows, self.width)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::keep(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Keep { rows, width } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["WIDTH": width];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("keep", times(&[rows, width]))?.finish())
    }
}

impl KernelKind for KeepInts {
    fn signature(&self) -> Vec<Slot> {
        let &KeepInts { rows, width, .. } = self;
        vec![ints("x", &[rows, width]), ints("places", &[rows]), result("y", &[rows, width]).ints()]
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn summary(&self) -> String {
        format!("keep_ints {}×{}, otherwise {}", self.rows, self.width, self.otherwise)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::keep_ints(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &KeepInts { rows, width, otherwise } = self;
        let numbers: &[(&str, &dyn Display)] = &[("WIDTH", &whole(width)), ("OTHERWISE", &otherwise)];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("keep_ints", times(&[rows, width]))?.finish())
    }
}

impl KernelKind for Numbers {
    fn signature(&self) -> Vec<Slot> {
        vec![ints("x", &[self.elements]), result("y", &[self.elements])]
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn summary(&self) -> String {
        format!("numbers {}", self.elements)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), &[])?;
        Ok(naive.pass("numbers", self.elements)?.finish())
    }
}

impl KernelKind for Runs {
    fn signature(&self) -> Vec<Slot> {
        let of = [self.batch, self.tokens];
        vec![ints("places", &of), ints("documents", &of), result("runs", &of).ints()]
    }

    fn check(&self) -> Result<(), String> {
        small(self.tokens, "more tokens than integers")
    }

    fn summary(&self) -> String {
        format!("runs {}×{}{}", self.batch, self.tokens, if self.begins { " begins" } else { "" })
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::runs(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Runs { batch, tokens, begins } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "BEGINS": begins.into()];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("runs", times(&[batch, tokens]))?.finish())
    }
}

impl KernelKind for Admit {
    fn signature(&self) -> Vec<Slot> {
        let &Admit { batch, tokens, entries } = self;
        vec![
            ints("positions", &[batch, tokens]).of(Of::Operand(1)),
            ints("places", &[batch, tokens]).of(Of::Operand(2)),
            updated("cached", &[batch, entries]).ints().state(0, 0),
            result("slots", &[batch, tokens]).ints().of(Of::Result(1)),
        ]
    }

    fn check(&self) -> Result<(), String> {
        small(self.entries, "more entries than integers")
    }

    fn summary(&self) -> String {
        format!("admit {}×{} to {}", self.batch, self.tokens, self.entries)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::admit(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Admit { batch, tokens, entries } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "ENTRIES": entries];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("admit", batch)?.finish())
    }
}

impl Choose for super::Decide {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let inclusive = self.inclusive;
        let d = s.dims(0);
        Ok(Kernel::Decide(Decide { rows: s.elements(d), tokens: s.size(d[1]), inclusive }))
    }
}

impl Choose for super::Keep {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::Keep(Keep { rows: s.elements(s.dims(1)), width: s.elements(&s.dims(0)[2..]) }))
    }
}

impl Choose for super::KeepInts {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let otherwise = self.otherwise;
        let (rows, width) = (s.elements(s.dims(1)), s.elements(&s.dims(0)[2..]));
        Ok(Kernel::KeepInts(KeepInts { rows, width, otherwise }))
    }
}

impl Choose for super::Numbers {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::Numbers(Numbers { elements: s.elements(s.dims(0)) }))
    }
}

impl Choose for super::Runs {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let begins = self.begins;
        let d = s.dims(0);
        Ok(Kernel::Runs(Runs { batch: s.size(d[0]), tokens: s.size(d[1]), begins }))
    }
}

impl Choose for super::Admit {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (cached, tokens) = (s.dims(0), s.dims(1));
        let (batch, entries) = (s.size(cached[0]), s.size(cached[1]));
        Ok(Kernel::Admit(Admit { batch, tokens: s.size(tokens[1]), entries }))
    }
}
