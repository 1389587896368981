//! Launches, in the words that every GPU has: the interpreter's crate defines them, and drivers
//! take the same.

pub use dreamc_ptx::{Arg, Launch, Swizzle, TensorMap};

/// An argument at a place of its own, which suits the largest of them.
pub(crate) fn placed(arg: &Arg) -> [u64; 16] {
    let (mut place, bytes) = ([0; 16], arg.bytes());
    bytemuck::bytes_of_mut(&mut place)[..bytes.len()].copy_from_slice(&bytes);
    place
}
