//! Cross-entropy, of logits and of the head that makes them.

use crate::CompileError;
use crate::codegen::naive::{Naive, whole};
use crate::codegen::text::float;
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Bits;
use crate::op::kernel::{
    Amount, KernelKind, Slot, Work, input, ints, need, result, small, storage, times, wide,
};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// `nll = lse - logits[target]`, and 0 where a target is negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropy {
    /// Rows.
    pub rows: u64,
    /// Classes.
    pub vocab: u64,
}

/// The gradient of [`CrossEntropy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropyGrad {
    /// Rows.
    pub rows: u64,
    /// Classes.
    pub vocab: u64,
}

/// [`CrossEntropy`] of `x · wᵀ`, whose logits are never stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadLoss {
    /// Rows.
    pub rows: u64,
    /// Classes.
    pub vocab: u64,
    /// Row length.
    pub width: u64,
    /// Soft-cap of the logits.
    pub softcap: Option<Bits>,
    /// `w` has a storage type of its own: a weight in bf16, while `x` is f32.
    pub stored: bool,
}

/// The gradient of [`HeadLoss`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadLossGrad {
    /// Rows.
    pub rows: u64,
    /// Classes.
    pub vocab: u64,
    /// Row length.
    pub width: u64,
    /// Soft-cap of the logits.
    pub softcap: Option<Bits>,
    /// `dw` adds.
    pub accumulate: bool,
}

fn classes(vocab: u64) -> Result<(), String> {
    need(vocab > 0, "no classes")?;
    small(vocab, "more classes than integers")
}

fn positive(softcap: Option<Bits>) -> Result<(), String> {
    need(softcap.is_none_or(|c| c.0 > 0.0), "the soft-cap must be positive")
}

impl KernelKind for CrossEntropy {
    fn signature(&self) -> Vec<Slot> {
        let &CrossEntropy { rows, vocab } = self;
        vec![
            input("logits", &[rows, vocab]).float(0),
            ints("targets", &[rows]),
            result("nll", &[rows]),
            result("lse", &[rows]),
        ]
    }

    fn check(&self) -> Result<(), String> {
        classes(self.vocab)
    }

    fn summary(&self) -> String {
        format!("cross_entropy {}×{}", self.rows, self.vocab)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::cross_entropy(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &CrossEntropy { rows, vocab } = self;
        let numbers: &[(&str, &dyn Display)] =
            &[("VOCAB", &whole(vocab)), ("CAPPED", &0), ("SOFTCAP", &"1.0f")];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("cross_entropy", rows)?.finish())
    }
}

impl KernelKind for CrossEntropyGrad {
    fn signature(&self) -> Vec<Slot> {
        let &CrossEntropyGrad { rows, vocab } = self;
        vec![
            input("logits", &[rows, vocab]).float(0),
            ints("targets", &[rows]),
            input("lse", &[rows]),
            input("d", &[rows]),
            result("dlogits", &[rows, vocab]).float(0),
        ]
    }

    fn check(&self) -> Result<(), String> {
        classes(self.vocab)
    }

    fn summary(&self) -> String {
        format!("cross_entropy_grad {}×{}", self.rows, self.vocab)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::cross_entropy_grad(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &CrossEntropyGrad { rows, vocab } = self;
        let numbers: &[(&str, &dyn Display)] =
            &[("VOCAB", &whole(vocab)), ("CAPPED", &0), ("SOFTCAP", &"1.0f")];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("cross_entropy_grad", times(&[rows, vocab]))?.finish())
    }
}

impl KernelKind for HeadLoss {
    fn signature(&self) -> Vec<Slot> {
        let &HeadLoss { rows, vocab, width, stored, .. } = self;
        vec![
            input("x", &[rows, width]).float(0),
            input("w", &[vocab, width]).weight(stored, 0),
            ints("targets", &[rows]),
            result("nll", &[rows]),
            result("lse", &[rows]),
        ]
    }

    fn check(&self) -> Result<(), String> {
        classes(self.vocab)?;
        positive(self.softcap)
    }

    fn summary(&self) -> String {
        format!("head_loss {}×{}×{}{}", self.rows, self.vocab, self.width, storage(self.stored))
    }

    fn work(&self) -> Work {
        let &HeadLoss { rows, vocab, width, softcap, .. } = self;
        let elementwise = wide(&[rows, vocab, 4 + 3 * u64::from(softcap.is_some())]);
        let fixed = Amount { multiply_adds: wide(&[rows, vocab, width]), elementwise };
        Work { fixed, ..Work::default() }
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::head_loss(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &HeadLoss { rows, vocab, width, softcap, .. } = self;
        let cap = float(softcap.map_or(1.0, |c| c.0));
        let numbers: &[(&str, &dyn Display)] = &[
            ("VOCAB", &whole(vocab)),
            ("WIDTH", &whole(width)),
            ("CAPPED", &u8::from(softcap.is_some())),
            ("SOFTCAP", &cap),
        ];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?
            .scratch("logits", times(&[rows, vocab]));
        Ok(naive.pass("logits", times(&[rows, vocab]))?.pass("head_loss", rows)?.finish())
    }
}

impl KernelKind for HeadLossGrad {
    fn signature(&self) -> Vec<Slot> {
        let &HeadLossGrad { rows, vocab, width, accumulate, .. } = self;
        vec![
            input("x", &[rows, width]).float(0),
            input("w", &[vocab, width]).float(0),
            ints("targets", &[rows]),
            input("lse", &[rows]),
            input("d", &[rows]),
            result("dx", &[rows, width]),
            result("dw", &[vocab, width]).adds(accumulate),
        ]
    }

    fn check(&self) -> Result<(), String> {
        classes(self.vocab)?;
        positive(self.softcap)
    }

    fn summary(&self) -> String {
        format!("head_loss_grad {}×{}×{}", self.rows, self.vocab, self.width)
    }

    fn work(&self) -> Work {
        let &HeadLossGrad { rows, vocab, width, softcap, .. } = self;
        let elementwise = wide(&[rows, vocab, 3 + 6 * u64::from(softcap.is_some())]);
        let fixed = Amount { multiply_adds: wide(&[3, rows, vocab, width]), elementwise };
        Work { fixed, ..Work::default() }
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::head_loss_grad(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &HeadLossGrad { rows, vocab, width, softcap, accumulate } = self;
        let cap = float(softcap.map_or(1.0, |c| c.0));
        let numbers: &[(&str, &dyn Display)] = &[
            ("ROWS", &whole(rows)),
            ("VOCAB", &whole(vocab)),
            ("WIDTH", &whole(width)),
            ("CAPPED", &u8::from(softcap.is_some())),
            ("SOFTCAP", &cap),
            ("ACCUMULATE", &u8::from(accumulate)),
        ];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?
            .scratch("logits", times(&[rows, vocab]));
        Ok(naive
            .pass("logits", times(&[rows, vocab]))?
            .pass("cotangents", times(&[rows, vocab]))?
            .pass("rows", times(&[rows, width]))?
            .pass("classes", times(&[vocab, width]))?
            .finish())
    }
}

impl Choose for super::CrossEntropy {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (rows, vocab) = s.rows_and_last(0);
        Ok(Kernel::CrossEntropy(CrossEntropy { rows, vocab }))
    }
}

impl Choose for super::CrossEntropyGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (rows, vocab) = s.rows_and_last(0);
        Ok(Kernel::CrossEntropyGrad(CrossEntropyGrad { rows, vocab }))
    }
}

/// Rows, classes and row length of a head.
fn head(s: &Select) -> (u64, u64, u64) {
    let (w, targets) = (s.dims(1), s.dims(2));
    (s.elements(targets), s.size(w[0]), s.size(w[1]))
}

impl Choose for super::HeadLoss {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let softcap = self.softcap;
        let ((rows, vocab, width), softcap) = (head(s), softcap.map(Bits));
        let stored = s.dtype(0) != s.dtype(1);
        Ok(Kernel::HeadLoss(HeadLoss { rows, vocab, width, softcap, stored }))
    }
}

impl Choose for super::HeadLossGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let softcap = self.softcap;
        let ((rows, vocab, width), softcap) = (head(s), softcap.map(Bits));
        let accumulate = s.adds(1);
        Ok(Kernel::HeadLossGrad(HeadLossGrad { rows, vocab, width, softcap, accumulate }))
    }
}
