//! Chosen keys as losses read them.

use super::ABSENT;
use crate::CompileError;
use crate::codegen::naive::{Naive, whole};
use crate::codegen::text::float;
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{Attention, Mask};
use crate::op::attention::kernel::{AttentionShape, window};
use crate::op::kernel::{Amount, KernelKind, Slot, Units, Work, input, need, result, times, wide};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// How much the heads of a list read of each of its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyMass {
    /// Sizes.
    pub shape: AttentionShape,
    /// How keys are seen, the lists, and the scale of products.
    pub seen: Attention,
}

/// The scores of tokens that were chosen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyScores {
    /// Sizes.
    pub shape: AttentionShape,
    /// How keys are seen, the lists, and the scale of products.
    pub seen: Attention,
    /// Whether products below zero count as zero.
    pub relu: bool,
    /// Whether heads have weights.
    pub weighed: bool,
}

/// The gradient of [`KeyScores`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyScoresGrad {
    /// The forward kernel.
    pub scores: KeyScores,
}

/// A number for each block of each list.
fn of_lists(s: &AttentionShape, seen: &Attention) -> [u64; 4] {
    let (lists, count) = seen.among.map_or((1, 1), |among| (among.heads, among.count));
    [s.batch, s.queries, lists, count]
}

fn check(s: &AttentionShape, seen: &Attention) -> Result<(), String> {
    s.check_keys(seen)?;
    need(seen.among.is_some_and(|among| among.count > 0), "no keys that were chosen, or lists of none")?;
    let plain = seen.program.is_none() && seen.softcap.is_none() && seen.dropout.is_none();
    need(plain, "chosen keys have neither a program, a soft-cap nor dropout")
}

fn summary(name: &str, s: &AttentionShape, seen: &Attention) -> String {
    let [batch, queries, lists, count] = of_lists(s, seen);
    let block = seen.among.map_or(1, |among| among.block);
    format!(
        "{name} {batch}×{queries}×{}, {}/{} heads of {}: {lists} lists of {count} blocks of {block}",
        s.keys, s.heads, s.kv_heads, s.size
    )
}

/// `products` products and `elementwise` operations for each key that a head reads.
fn work(s: &AttentionShape, seen: &Attention, masks: usize, products: u64, elementwise: u64) -> Work {
    Work {
        fixed: Amount { multiply_adds: 0, elementwise: 0 },
        each: Amount { multiply_adds: wide(&[products, s.size]), elementwise: elementwise.into() },
        units: Units::Pairs { shape: *s, attention: seen.clone(), masks },
    }
}

fn naive(
    kernel: &dyn KernelKind,
    s: &AttentionShape,
    seen: &Attention,
    (relu, weighed): (bool, bool),
    variant: Variant,
) -> Result<Naive, CodegenError> {
    let [_, _, lists, count] = of_lists(s, seen);
    let numbers: &[(&str, &dyn Display)] = &[
        ("QUERIES", &whole(s.queries)),
        ("KEYS", &whole(s.keys)),
        ("HEADS", &whole(s.heads)),
        ("KV_HEADS", &whole(s.kv_heads)),
        ("SIZE", &whole(s.size)),
        ("LISTS", &whole(lists)),
        ("COUNT", &whole(count)),
        ("BLOCK", &whole(seen.among.map_or(1, |among| among.block))),
        ("EVERY", &whole(seen.every.unwrap_or(1))),
        ("WINDOW", &window(seen)?),
        ("SCALE", &float(seen.scale)),
        ("ABSENT", &float(ABSENT)),
        ("RELU", &u8::from(relu)),
        ("WEIGHED", &u8::from(weighed)),
        ("POSITIONS", &u8::from(seen.mask == Mask::Positions)),
        ("SEGMENTS", &u8::from(seen.segments)),
    ];
    let text = concat!(include_str!("../attention/seen.cuh"), include_str!("naive.cuh"));
    Naive::new(kernel, variant, text, numbers)
}

impl KernelKind for KeyMass {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![s.queries("q"), s.keys("k"), s.lse("lse")];
        list.extend(s.masks(&self.seen));
        list.push(result("mass", &of_lists(s, &self.seen)));
        list
    }

    fn check(&self) -> Result<(), String> {
        check(&self.shape, &self.seen)
    }

    fn summary(&self) -> String {
        summary("key_mass", &self.shape, &self.seen)
    }

    fn work(&self) -> Work {
        work(&self.shape, &self.seen, super::KeyMass::MASK, 1, 4)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let naive = naive(self, &self.shape, &self.seen, (false, false), variant)?;
        Ok(naive.pass("mass", times(&of_lists(&self.shape, &self.seen)))?.finish())
    }
}

impl KeyScores {
    fn operands(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![s.queries("q"), s.keys("k")];
        list.extend(s.masks(&self.seen));
        list.extend(self.weighed.then(|| s.lse("weights")));
        list
    }
}

impl KernelKind for KeyScores {
    fn signature(&self) -> Vec<Slot> {
        let mut list = self.operands();
        list.push(result("scores", &of_lists(&self.shape, &self.seen)));
        list
    }

    fn check(&self) -> Result<(), String> {
        check(&self.shape, &self.seen)?;
        need(self.seen.among.is_some_and(|among| among.block == 1), "scores are of tokens")
    }

    fn summary(&self) -> String {
        summary("key_scores", &self.shape, &self.seen)
    }

    fn work(&self) -> Work {
        work(&self.shape, &self.seen, super::KeyScores::MASK, 1, 4)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let naive = naive(self, &self.shape, &self.seen, (self.relu, self.weighed), variant)?;
        Ok(naive.pass("scores", times(&of_lists(&self.shape, &self.seen)))?.finish())
    }
}

impl KernelKind for KeyScoresGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.scores.shape;
        let mut list = self.scores.operands();
        list.push(input("d", &of_lists(s, &self.scores.seen)));
        list.extend([s.queries("dq"), s.keys("dk")].map(Slot::written));
        list.extend(self.scores.weighed.then(|| s.lse("dweights").written()));
        list
    }

    fn check(&self) -> Result<(), String> {
        self.scores.check()
    }

    fn summary(&self) -> String {
        summary("key_scores_grad", &self.scores.shape, &self.scores.seen)
    }

    fn work(&self) -> Work {
        work(&self.scores.shape, &self.scores.seen, super::KeyScores::MASK, 3, 6)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let (of, s) = (&self.scores, &self.scores.shape);
        let naive = naive(self, s, &of.seen, (of.relu, of.weighed), variant)?;
        let naive = naive.pass("queries", times(&[s.batch, s.queries, s.heads, s.size]))?;
        let naive = naive.pass("keys", times(&[s.batch, s.keys, s.kv_heads, s.size]))?;
        match of.weighed {
            true => Ok(naive.pass("weights", times(&[s.batch, s.queries, s.heads]))?.finish()),
            false => Ok(naive.finish()),
        }
    }
}

impl Choose for super::KeyMass {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::KeyMass(KeyMass { shape: AttentionShape::of(s), seen: self.0.clone() }))
    }
}

impl super::KeyScores {
    fn kernel(&self, s: &Select) -> KeyScores {
        let (relu, weighed) = (self.relu, self.weighed);
        KeyScores { shape: AttentionShape::of(s), seen: self.seen.clone(), relu, weighed }
    }
}

impl Choose for super::KeyScores {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::KeyScores(self.kernel(s)))
    }
}

impl Choose for super::KeyScoresGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::KeyScoresGrad(KeyScoresGrad { scores: self.0.kernel(s) }))
    }
}
