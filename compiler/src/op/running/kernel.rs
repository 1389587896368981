//! Sums over the tokens so far.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Tokens;
use crate::op::kernel::{KernelKind, Of, Slot, Work, input, ints, need, result, times, updated, wide};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// `y[i] = Σ_{j≤i} x[j]`, or over later tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Running {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Channels of each.
    pub channels: u64,
    /// Whether it sums over later tokens.
    pub reverse: bool,
    /// Which tokens are of one sequence.
    pub of: Tokens,
    /// The tokens of a block, where sums begin again with each.
    pub block: Option<u64>,
}

impl KernelKind for Running {
    fn signature(&self) -> Vec<Slot> {
        let &Running { batch, tokens, channels, of, .. } = self;
        let mut list = vec![input("x", &[batch, tokens, channels]).rows(2)];
        match of {
            Tokens::All => {}
            Tokens::Segments => list.push(ints("segments", &[batch, tokens])),
            Tokens::Kept => list.push(ints("slots", &[batch, tokens]).of(Of::Operand(2))),
        }
        if self.block.is_some() {
            let positions = ints("positions", &[batch, tokens]);
            list.push(if of == Tokens::Kept { positions.of(Of::Operand(3)) } else { positions });
        }
        list.push(result("y", &[batch, tokens, channels]));
        let halves = 1 + u64::from(self.block.is_some());
        list.extend((of == Tokens::Kept).then(|| updated("sum", &[batch, halves, channels]).state(1, 1)));
        list
    }

    fn check(&self) -> Result<(), String> {
        need(self.block != Some(0), "blocks of no token")?;
        need(!self.reverse || self.of != Tokens::Kept, "what has a state is not reversed")
    }

    fn summary(&self) -> String {
        let reversed = if self.reverse { " reversed" } else { "" };
        format!("running{reversed} {}×{}×{}", self.batch, self.tokens, self.channels)
    }

    fn work(&self) -> Work {
        Work::elementwise(wide(&[self.batch, self.tokens, self.channels]))
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        // The fast kernel has no blocks.
        if self.block.is_some() { self.naive(variant) } else { super::cuda::running(self, variant) }
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let marks = match self.of {
            Tokens::All => 0,
            Tokens::Segments => 1,
            Tokens::Kept => 2,
        };
        let numbers: &[(&str, &dyn Display)] = numbers![
            "SEQUENCE": self.tokens,
            "CHANNELS": self.channels,
            "REVERSE": self.reverse.into(),
            "MARKS": marks,
            "BLOCK": self.block.unwrap_or(0),
        ];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("sums", times(&[self.batch, self.channels]))?.finish())
    }
}

impl Choose for super::Running {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let x = s.dims(0);
        Ok(Kernel::Running(Running {
            batch: s.size(x[0]),
            tokens: s.size(x[1]),
            channels: s.elements(&x[2..]),
            reverse: self.reverse,
            of: self.tokens,
            block: self.block,
        }))
    }
}
