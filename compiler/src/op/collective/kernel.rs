//! Sums over the ranks of a group.

use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Slot, Work, updated};

/// The sum over the ranks of a group, left on all of them. A plan for one rank has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllReduce {
    /// How many.
    pub elements: u64,
    /// Over how many ranks.
    pub ranks: u64,
}

impl KernelKind for AllReduce {
    fn signature(&self) -> Vec<Slot> {
        vec![updated("x", &[self.elements])]
    }

    fn check(&self) -> Result<(), String> {
        if self.ranks < 2 { Err("a sum over one rank".into()) } else { Ok(()) }
    }

    fn summary(&self) -> String {
        format!("all_reduce {} over {} ranks", self.elements, self.ranks)
    }

    fn work(&self) -> Work {
        Work::default()
    }

    /// Nothing: the executor hands the range to the group.
    fn cuda(&self, _: Variant) -> Result<Option<Source>, CodegenError> {
        Ok(None)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.cuda(variant)
    }
}
