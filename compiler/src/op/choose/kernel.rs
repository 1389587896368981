//! The blocks of keys that queries read.

use super::Measure;
use crate::CompileError;
use crate::codegen::naive::{Naive, whole};
use crate::codegen::text::float;
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{Attention, Mask};
use crate::op::attention::kernel::AttentionShape;
use crate::op::kernel::{Amount, KernelKind, Slot, Units, Work, divides, need, result, small, times, wide};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Numbers of the blocks that each list of heads of each query reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChooseKeys {
    /// Sizes.
    pub shape: AttentionShape,
    /// How keys are seen, and the scale of products.
    pub seen: Attention,
    /// How products become scores.
    pub measure: Measure,
    /// Whether heads have weights.
    pub weighed: bool,
    /// Blocks up to the query's own that are always chosen.
    pub near: u64,
    /// Blocks from the beginning on that are always chosen.
    pub first: u64,
    /// Lists of a query.
    pub lists: u64,
    /// Blocks of a list.
    pub count: u64,
}

impl ChooseKeys {
    /// Tokens of a block.
    pub fn block(&self) -> u64 {
        self.seen.every.unwrap_or(1).max(1)
    }
}

impl KernelKind for ChooseKeys {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![s.queries("q"), s.keys("k")];
        list.extend(s.masks(&self.seen));
        list.extend(self.weighed.then(|| s.lse("weights")));
        list.push(result("chosen", &[s.batch, s.queries, self.lists, self.count]).ints());
        list
    }

    fn check(&self) -> Result<(), String> {
        let s = &self.shape;
        s.check_keys(&self.seen)?;
        divides(self.lists, s.heads, "query heads must be a multiple of lists")?;
        small(s.keys, "more keys than integers")?;
        need(self.seen.every.is_some(), "no blocks to choose")?;
        need(self.count > 0, "lists of none")
    }

    fn summary(&self) -> String {
        let s = &self.shape;
        format!(
            "choose_keys {}×{}×{}, {}/{} heads of {}: {} of blocks of {}",
            s.batch,
            s.queries,
            s.keys,
            s.heads,
            s.kv_heads,
            s.size,
            self.count,
            self.block()
        )
    }

    fn work(&self) -> Work {
        let units =
            Units::Pairs { shape: self.shape, attention: self.seen.clone(), masks: super::ChooseKeys::MASK };
        let s = &self.shape;
        Work {
            fixed: Amount { multiply_adds: 0, elementwise: 0 },
            each: Amount { multiply_adds: wide(&[s.heads, s.size]), elementwise: wide(&[s.heads, 2]) },
            units,
        }
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::choose(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let numbers: &[(&str, &dyn Display)] = &[
            ("QUERIES", &whole(s.queries)),
            ("KEYS", &whole(s.keys)),
            ("HEADS", &whole(s.heads)),
            ("KV_HEADS", &whole(s.kv_heads)),
            ("SIZE", &whole(s.size)),
            ("LISTS", &whole(self.lists)),
            ("COUNT", &whole(self.count)),
            ("BLOCK", &whole(self.block())),
            ("NEAR", &whole(self.near)),
            ("FIRST", &whole(self.first)),
            ("SCALE", &float(self.seen.scale)),
            ("MEASURE", &self.measure.number()),
            ("WEIGHED", &u8::from(self.weighed)),
            ("POSITIONS", &u8::from(self.seen.mask == Mask::Positions)),
            ("SEGMENTS", &u8::from(self.seen.segments)),
        ];
        // Queries see keys as those of attention do.
        let text = concat!(include_str!("../attention/seen.cuh"), include_str!("naive.cuh"));
        let naive = Naive::new(self, variant, text, numbers)?;
        Ok(naive.pass("choose", times(&[s.batch, s.queries, self.lists]))?.finish())
    }
}

impl Choose for super::ChooseKeys {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        Ok(Kernel::ChooseKeys(ChooseKeys {
            shape: AttentionShape::of(s),
            seen: self.seen.clone(),
            measure: self.measure,
            weighed: self.weighed,
            near: self.near,
            first: self.first,
            lists: s.size(self.lists),
            count: s.size(self.count),
        }))
    }
}
