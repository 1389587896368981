//! Causal convolutions over the sequence.

use super::Tokens;
use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Of, Slot, Work, input, ints, need, result, times, updated, wide};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Shapes of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvShape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Channels of each.
    pub channels: u64,
    /// Entries of a filter.
    pub width: u64,
}

/// `y[i] = Σ_k w[k] ⊙ x[i-k]`, or of later tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conv {
    /// Sizes.
    pub shape: ConvShape,
    /// Whether it sums over later tokens.
    pub reverse: bool,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
}

/// `dw[k] = Σ_i dy[i] ⊙ x[i-k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvGrad {
    /// Sizes.
    pub shape: ConvShape,
    /// Whether there are segments.
    pub segments: bool,
}

impl ConvShape {
    fn rows(&self, name: &'static str) -> Slot {
        input(name, &[self.batch, self.tokens, self.channels]).rows(2)
    }

    fn marks(&self, name: &'static str) -> Slot {
        ints(name, &[self.batch, self.tokens])
    }

    fn check(&self) -> Result<(), String> {
        need(self.width > 0, "filters of no entry")
    }

    fn summary(&self) -> String {
        format!("{}×{}×{} of {}", self.batch, self.tokens, self.channels, self.width)
    }

    fn work(&self) -> Work {
        Work::elementwise(wide(&[2, self.batch, self.tokens, self.channels, self.width]))
    }

    fn naive(&self, kernel: &dyn KernelKind, reverse: bool, variant: Variant) -> Result<Naive, CodegenError> {
        let tokens = kernel.signature().iter().find_map(|slot| match slot.name {
            "segments" => Some(1),
            "slots" => Some(2),
            _ => None,
        });
        let numbers: &[(&str, &dyn Display)] = numbers![
            "SEQUENCE": self.tokens,
            "ROWS": times(&[self.batch, self.tokens]),
            "CHANNELS": self.channels,
            "WIDTH": self.width,
            "REVERSE": reverse.into(),
            "MARKS": tokens.unwrap_or(0),
        ];
        Naive::new(kernel, variant, include_str!("naive.cuh"), numbers)
    }
}

impl KernelKind for Conv {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![s.rows("x"), input("w", &[s.width, s.channels])];
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => list.push(s.marks("segments")),
            Tokens::Kept => list.push(s.marks("slots").of(Of::Operand(3))),
        }
        list.push(result("y", &[s.batch, s.tokens, s.channels]));
        if self.tokens == Tokens::Kept {
            list.push(updated("history", &[s.batch, s.width.saturating_sub(1), s.channels]).state(2, 1));
        }
        list
    }

    fn check(&self) -> Result<(), String> {
        let fits = !self.reverse || self.tokens != Tokens::Kept;
        need(fits, "what has a history is not reversed")?;
        self.shape.check()
    }

    fn summary(&self) -> String {
        format!("conv{} {}", if self.reverse { " reversed" } else { "" }, self.shape.summary())
    }

    fn work(&self) -> Work {
        self.shape.work()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::conv(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let naive = s.naive(self, self.reverse, variant)?;
        Ok(match self.tokens {
            Tokens::Kept => naive.pass("continue", times(&[s.batch, s.channels]))?,
            Tokens::All | Tokens::Segments => naive.pass("conv", times(&[s.batch, s.tokens, s.channels]))?,
        }
        .finish())
    }
}

impl KernelKind for ConvGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![s.rows("x"), s.rows("dy")];
        list.extend(self.segments.then(|| s.marks("segments")));
        list.push(result("dw", &[s.width, s.channels]));
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check()
    }

    fn summary(&self) -> String {
        format!("conv_grad {}", self.shape.summary())
    }

    fn work(&self) -> Work {
        self.shape.work()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::grad(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let naive = s.naive(self, false, variant)?;
        Ok(naive.pass("filters", times(&[s.width, s.channels]))?.finish())
    }
}

impl Choose for super::Conv {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (x, w) = (s.dims(0), s.dims(1));
        let shape = ConvShape {
            batch: s.size(x[0]),
            tokens: s.size(x[1]),
            channels: s.elements(&x[2..]),
            width: s.size(w[0]),
        };
        Ok(Kernel::Conv(Conv { shape, reverse: self.reverse, tokens: self.tokens }))
    }
}

impl Choose for super::ConvGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let x = s.dims(0);
        let shape = ConvShape {
            batch: s.size(x[0]),
            tokens: s.size(x[1]),
            channels: s.elements(&x[2..]),
            width: s.size(self.width),
        };
        Ok(Kernel::ConvGrad(ConvGrad { shape, segments: self.segments }))
    }
}
