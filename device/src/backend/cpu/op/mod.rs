//! The kernels of the CPU: a file for each operation, by the compiler's name of it.
//!
//! *In*: a kernel's numbers and its operands, by the names of its signature. *Out*: results in
//! memory. *Promise*: a kernel of the compiler that has none here does not compile. Integers come
//! from memory, so each is looked at before it is believed ([`Context::indices_below`]).

mod arrange;
mod attention;
mod by_head;
mod cache;
mod choose;
mod chosen;
mod collective;
mod combine;
mod contract;
mod conv;
mod counts;
mod depth;
mod embed;
mod fp8;
mod gather;
mod group;
mod grouped;
mod linear_attention;
mod loss;
mod memory;
mod places;
mod recurrence;
mod route;
mod rows;
mod running;
mod shift;
mod sources;
mod tokens;
mod update;

pub(super) use rows::Compiled;

use super::{Arguments, Context, Scratch, Stored};

/// A kernel on the CPU.
pub(super) trait Run {
    /// Floats that it needs apart from its operands.
    fn scratch(&self) -> Scratch {
        Scratch::default()
    }

    /// Runs a launch whose operands that may be bf16 are of type `T`.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments);
}

/// Sizes as indices.
fn sizes<const N: usize>(sizes: [u64; N]) -> [usize; N] {
    sizes.map(|n| n as usize)
}
