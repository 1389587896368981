//! Tokens taken from their sequence and put back.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::DType;
use crate::op::kernel::{KernelKind, Slot, Work, input, ints, need, result, small, times};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Places of the `k` largest of each sequence, in increasing order of the places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TopTokens {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// How many are chosen.
    pub k: u64,
}

/// The rows at some places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TakeTokens {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Places of each.
    pub k: u64,
    /// Row length.
    pub width: u64,
    /// Storage of the rows.
    pub dtype: DType,
}

/// Rows put at some places; rows at no place become -0, or -1 where `dtype` is of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PutTokens {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Places of each.
    pub k: u64,
    /// Row length.
    pub width: u64,
    /// Storage of the rows.
    pub dtype: DType,
}

fn choice(tokens: u64, k: u64) -> Result<(), String> {
    small(tokens, "more tokens than integers")?;
    need(k <= tokens, "cannot choose more than there are")
}

impl KernelKind for TopTokens {
    fn signature(&self) -> Vec<Slot> {
        let &TopTokens { batch, tokens, k } = self;
        vec![input("r", &[batch, tokens]), result("index", &[batch, k]).ints()]
    }

    fn check(&self) -> Result<(), String> {
        choice(self.tokens, self.k)
    }

    fn summary(&self) -> String {
        format!("top_tokens {}: {} of {}", self.batch, self.k, self.tokens)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::top_tokens(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &TopTokens { batch, tokens, k } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "K": k];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("top", times(&[batch, k]))?.finish())
    }
}

impl KernelKind for TakeTokens {
    fn signature(&self) -> Vec<Slot> {
        let &TakeTokens { batch, tokens, k, width, dtype } = self;
        vec![
            input("x", &[batch, tokens, width]).stored(dtype),
            ints("index", &[batch, k]),
            result("y", &[batch, k, width]).stored(dtype),
        ]
    }

    fn check(&self) -> Result<(), String> {
        need(!matches!(self.dtype, DType::E4m3 | DType::Packed(_)), "rows that are packed")?;
        choice(self.tokens, self.k)
    }

    fn summary(&self) -> String {
        format!("take_tokens {}: {} of {}×{}", self.batch, self.k, self.tokens, self.width)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::take_tokens(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &TakeTokens { batch, tokens, k, width, .. } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "K": k, "WIDTH": width];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("take", times(&[batch, k, width]))?.finish())
    }
}

impl KernelKind for PutTokens {
    fn signature(&self) -> Vec<Slot> {
        let &PutTokens { batch, tokens, k, width, dtype } = self;
        vec![
            input("x", &[batch, k, width]).stored(dtype),
            ints("index", &[batch, k]),
            result("y", &[batch, tokens, width]).stored(dtype),
        ]
    }

    fn check(&self) -> Result<(), String> {
        need(!matches!(self.dtype, DType::E4m3 | DType::Packed(_)), "rows that are packed")?;
        choice(self.tokens, self.k)
    }

    fn summary(&self) -> String {
        format!("put_tokens {}: {} to {}×{}", self.batch, self.k, self.tokens, self.width)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::put_tokens(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &PutTokens { batch, tokens, k, width, .. } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "K": k, "WIDTH": width];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("put", times(&[batch, tokens, width]))?.finish())
    }
}

impl Choose for super::TopTokens {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let k = self.k;
        let d = s.dims(0);
        Ok(Kernel::TopTokens(TopTokens { batch: s.size(d[0]), tokens: s.size(d[1]), k: s.size(k) }))
    }
}

impl Choose for super::TakeTokens {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (from, to) = (s.dims(0), s.result(0));
        let (batch, width) = (s.size(from[0]), s.elements(&from[2..]));
        let (tokens, k) = (s.size(from[1]), s.size(to.dims[1]));
        Ok(Kernel::TakeTokens(TakeTokens { batch, tokens, k, width, dtype: to.dtype }))
    }
}

impl Choose for super::PutTokens {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (from, to) = (s.dims(0), s.result(0));
        let (batch, width) = (s.size(from[0]), s.elements(&from[2..]));
        let (tokens, k) = (s.size(to.dims[1]), s.size(from[1]));
        Ok(Kernel::PutTokens(PutTokens { batch, tokens, k, width, dtype: to.dtype }))
    }
}
