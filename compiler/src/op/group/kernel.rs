//! Slots sorted by expert, and as many of each as fill tiles.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Slot, Work, divides, input, ints, need, result, small};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Slots by expert: a stable sort, where each expert's begin, and where each slot went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// Choices.
    pub slots: u64,
    /// Groups.
    pub experts: u64,
}

/// As many choices of each expert as fill tiles; all others are `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoundGroups {
    /// Choices.
    pub slots: u64,
    /// Groups.
    pub experts: u64,
    /// Choices of a row; the last `spare` only fill tiles.
    pub k: u64,
    /// See `k`.
    pub spare: u64,
    /// Slots of a tile.
    pub tile: u64,
    /// The choice of no expert.
    pub none: u64,
}

impl KernelKind for Group {
    fn signature(&self) -> Vec<Slot> {
        let &Group { slots, experts } = self;
        vec![
            ints("chosen", &[slots]),
            result("order", &[slots]).ints(),
            result("offsets", &[experts.saturating_add(1)]).ints(),
            result("inverse", &[slots]).ints(),
        ]
    }

    fn check(&self) -> Result<(), String> {
        small(self.slots, "more slots than integers")?;
        small(self.experts, "more groups than integers")
    }

    fn summary(&self) -> String {
        format!("group {} by {}", self.slots, self.experts)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::group(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Group { slots, experts } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["SLOTS": slots, "EXPERTS": experts];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("places", slots)?.pass("offsets", experts.saturating_add(1))?.finish())
    }
}

impl KernelKind for RoundGroups {
    fn signature(&self) -> Vec<Slot> {
        let &RoundGroups { slots, experts, .. } = self;
        vec![
            input("score", &[slots]),
            ints("chosen", &[slots]),
            ints("order", &[slots]),
            ints("offsets", &[experts.saturating_add(1)]),
            result("kept", &[slots]).ints(),
        ]
    }

    fn check(&self) -> Result<(), String> {
        small(self.slots, "more slots than integers")?;
        small(self.experts, "more groups than integers")?;
        small(self.none, "no expert is no integer")?;
        small(self.tile, "more slots of a tile than integers")?;
        divides(self.k, self.slots, "slots must be a multiple of the choices of a row")?;
        need(self.tile > 0, "a tile has one slot at least")?;
        need(self.spare <= self.k, "more choices are spare than there are")?;
        need(self.none >= self.experts, "no expert is a number beyond the last")
    }

    fn summary(&self) -> String {
        let RoundGroups { slots, experts, k, spare, tile, .. } = self;
        format!("round_groups {slots} of {experts} by {tile}, {spare} of {k} spare")
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::round_groups(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &RoundGroups { slots, experts, k, spare, tile, none } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["SLOTS": slots, "EXPERTS": experts, "K": k, "OWN": k - spare, "TILE": tile, "NONE": none];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("round", slots)?.finish())
    }
}

impl Choose for super::Group {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let &super::Group { slots, experts, .. } = self;
        Ok(Kernel::Group(Group { slots: s.size(slots), experts: s.size(experts) }))
    }
}

impl Choose for super::RoundGroups {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let &super::RoundGroups { experts, tile, spare, none } = self;
        let (rows, k) = s.rows_and_last(1);
        let slots = rows.saturating_mul(k);
        let experts = s.size(experts);
        Ok(Kernel::RoundGroups(RoundGroups { slots, experts, k, spare, tile, none }))
    }
}
