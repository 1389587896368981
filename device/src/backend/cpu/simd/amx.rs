//! Tile registers: eight of sixteen lines of 64 bytes, and the product of two of bf16 added to a
//! third of f32 (AMX-TILE, AMX-BF16).
//!
//! *In*: shapes of tiles, and addresses with the bytes from line to line. *Out*: tiles loaded,
//! multiplied and stored. *Promise*: nothing here runs where [`available`] says that it cannot.
//!
//! Rust's functions for the instructions are not stable, so they are inline assembly. The compiler
//! keeps nothing in tile registers, so they hold from one function here to the next. Each thread
//! has its own, which are in use from [`configure`] to [`release`].
//!
//! `TDPBF16PS` rounds to nearest, makes zero of numbers too small for a normal one, and looks at no
//! control register. Of a line of the left tile and a column of the right one it adds the products
//! of the low halves of their words in order, those of the high halves apart from them, then the
//! two sums, and that to the third tile.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _xgetbv};

#[cfg(all(test, target_os = "linux"))]
pub(crate) mod emulated;

/// Lines of a tile, and words of a line, at most.
pub(crate) const SIDE: usize = 16;
/// Tile registers.
pub(crate) const TILES: usize = 8;

/// Whether the processor has tiles of such a size and multiplies bf16 in them, and the system keeps
/// them for each thread of this process: Linux does where it is asked, which this does.
pub(crate) fn available() -> bool {
    // SAFETY: the instruction is part of the architecture.
    #[allow(unused_unsafe)]
    let leaf = |leaf: u32, part: u32| unsafe { __cpuid_count(leaf, part) };
    if leaf(0, 0).eax < 0x1d {
        return false;
    }
    let (has_bf16, has_tiles) = (leaf(7, 0).edx & 1 << 22 != 0, leaf(7, 0).edx & 1 << 24 != 0);
    if !has_bf16 || !has_tiles {
        return false;
    }
    let palette = leaf(0x1d, 1);
    let (line, tiles, lines) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    if (line as usize) < 4 * SIDE || (tiles as usize) < TILES || (lines as usize) < SIDE {
        return false;
    }
    // SAFETY: a system that kept no registers by this instruction would have no AVX-512, without
    // which nobody asks.
    let kept = unsafe { _xgetbv(0) };
    kept >> 17 & 3 == 3 && permitted()
}

/// Asks the system for the registers.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM`.
    const ASK: libc::c_long = 0x1023;
    /// Contents of tiles, among the parts of a thread's state.
    const CONTENTS: libc::c_long = 18;
    // SAFETY: it changes the allowances of this process and no memory of it.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ASK, CONTENTS) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The operand of `LDTILECFG`: the first palette, the line to begin with, bytes of a line of each
/// tile, and lines of each.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    nothing: [u8; 14],
    bytes: [u16; 16],
    lines: [u8; 16],
}

/// Gives the tiles of this thread their shapes, lines and words of a line of each; all that they
/// held is zero. Tiles of no line are not to be used.
///
/// # Safety
/// The processor has tiles.
pub(crate) unsafe fn configure(tiles: [(usize, usize); TILES]) {
    let mut shapes = Shapes { palette: 1, start: 0, nothing: [0; 14], bytes: [0; 16], lines: [0; 16] };
    for (i, (lines, words)) in tiles.into_iter().enumerate() {
        debug_assert!(lines <= SIDE && words <= SIDE);
        let none = lines == 0 || words == 0;
        shapes.lines[i] = if none { 0 } else { lines as u8 };
        shapes.bytes[i] = if none { 0 } else { 4 * words as u16 };
    }
    // SAFETY: the caller's; the operand is 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, preserves_flags, readonly)) };
}

/// Ends the use of tiles by this thread, so that the system need not keep them.
///
/// # Safety
/// The processor has tiles.
pub(crate) unsafe fn release() {
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

/// Tile `T` becomes zero.
///
/// # Safety
/// This thread has given the tile a shape, as for the functions below.
#[inline(always)]
pub(crate) unsafe fn zero<const T: usize>() {
    // SAFETY: the caller's.
    unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, preserves_flags, nomem)) };
}

/// Loads tile `T` from lines that are `apart` bytes from one another.
///
/// # Safety
/// Likewise; the lines are there.
#[inline(always)]
pub(crate) unsafe fn load<const T: usize>(from: *const f32, apart: usize) {
    // SAFETY: the caller's.
    unsafe {
        asm!("tileloadd tmm{t}, [{from} + {apart}*1]", t = const T, from = in(reg) from,
            apart = in(reg) apart, options(nostack, preserves_flags, readonly))
    };
}

/// Stores tile `T` to lines that are `apart` bytes from one another.
///
/// # Safety
/// Likewise.
#[inline(always)]
pub(crate) unsafe fn store<const T: usize>(to: *mut f32, apart: usize) {
    // SAFETY: the caller's.
    unsafe {
        asm!("tilestored [{to} + {apart}*1], tmm{t}", t = const T, to = in(reg) to,
            apart = in(reg) apart, options(nostack, preserves_flags))
    };
}

/// Adds the product of tiles `A` and `B` to tile `C`.
///
/// # Safety
/// Likewise; a line of `A` has as many words as `B` lines, `C` the lines of `A` and the words of
/// `B`.
#[inline(always)]
pub(crate) unsafe fn multiply<const C: usize, const A: usize, const B: usize>() {
    // SAFETY: the caller's.
    unsafe {
        asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
            options(nostack, preserves_flags, nomem))
    };
}
