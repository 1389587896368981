//! Products of bf16 in tile registers ([`amx`]).
//!
//! *In*: operands and results as [`super::tile_into`] has them. *Out*: the product. *Promise*: a
//! tile of results is multiplied by sixteen words after sixteen words, the last perhaps fewer, in
//! increasing order, whatever is beside it; [`super::few`] keeps to the same order.
//!
//! Two by two tiles are summed up at once. A product of tiles of sixteen lines takes the processor
//! 16 cycles and its result is there after 52, says the manual for the first of them, so four sums
//! keep it busy; two tiles of each operand are loaded for four products. No processor has timed
//! that here.
//!
//! Nothing is padded. Lower tiles at the lower edge and shorter lines at the end of sums are shapes
//! of their own, and sums between two shapes rest in memory, in f32, as they were.

use super::{DEPTH, Left, Panels, Results, Size, VECTORS, shape, transpose};
use crate::device::cpu::simd::amx::{self, SIDE, load, multiply, store, zero};
use crate::device::cpu::simd::narrow;
use std::mem::MaybeUninit;

/// Rows, and columns, of the microkernel.
pub(super) const SQUARE: usize = 2 * SIDE;
/// Words from row to row of a copy: rows begin in different places of the first cache.
const PITCH: usize = DEPTH + SIDE;

/// Room for a copy of the left rows of one microkernel, one after the other.
#[repr(C, align(64))]
struct Room(MaybeUninit<[f32; SQUARE * PITCH]>);

/// Lines that are evenly apart: the first, and the bytes from one to the next.
#[derive(Clone, Copy)]
pub(super) struct Even {
    pub(super) start: *const f32,
    pub(super) apart: usize,
}

impl Even {
    /// So many lines, at least one, if they are.
    #[inline(always)]
    pub(super) fn of(count: usize, line: impl Fn(usize) -> *const f32) -> Option<Self> {
        let start = line(0);
        let apart = if count > 1 { line(1).addr().wrapping_sub(start.addr()) } else { 0 };
        let even = (2..count).all(|i| line(i).addr().wrapping_sub(line(i - 1).addr()) == apart);
        even.then_some(Even { start, apart })
    }

    /// Whether lines compete for the same few places of the cache.
    fn crowded(&self) -> bool {
        self.apart.is_multiple_of(4096)
    }
}

/// Words of the left operand that are multiplied with one shape of tiles.
#[derive(Clone, Copy)]
struct Words {
    first: usize,
    count: usize,
    /// Of all of them.
    all: usize,
}

impl Words {
    /// Those of one tile.
    fn depth(self) -> usize {
        if (1..SIDE).contains(&self.count) { self.count } else { SIDE }
    }
}

/// `c = a · b`, or `c += a · b`, `k` in words.
///
/// # Safety
/// As for [`super::tile_of`]; the processor has tiles. Where `c` is rounded it has room for sums,
/// too.
pub(super) unsafe fn tile((m, n, k): Size, a: Left, b: Panels, c: Results) {
    let mut room = Room(MaybeUninit::uninit());
    let mut first = 0;
    loop {
        let left = k - first;
        let count = if left < SIDE { left } else { (left / SIDE * SIDE).min(DEPTH) };
        let last = first + count == k;
        let rounded = c.rounded.filter(|_| last);
        let c = Results { accumulate: c.accumulate || first > 0, rounded, ..c };
        // SAFETY: the caller's.
        unsafe { part((m, n), Words { first, count, all: k }, a, b, c, room.0.as_mut_ptr().cast()) };
        first += count;
        if last {
            break;
        }
    }
    // SAFETY: the caller's.
    unsafe { amx::release() };
}

/// The same for some words, all but the last of them whole tiles.
///
/// # Safety
/// As for [`tile`]; `room` is a [`Room`].
unsafe fn part(
    (m, n): (usize, usize),
    words: Words,
    a: Left,
    (b, panel): Panels,
    c: Results,
    room: *mut f32,
) {
    let (whole, depth) = (m / SIDE * SIDE, words.depth());
    for (from, to, height) in [(0, whole, SIDE), (whole, m, m - whole)] {
        if from == to {
            continue;
        }
        let (sums, left, right) = ((height, SIDE), (height, depth), (depth, SIDE));
        // SAFETY: the caller's.
        unsafe { amx::configure([sums, sums, sums, sums, left, left, right, right]) };
        for i in (from..to).step_by(SQUARE) {
            let rows = (to - i).min(SQUARE);
            let [upper, lower] = [0, SIDE].map(|at| {
                let at = if at < rows { at } else { 0 };
                // SAFETY: the caller's: `height` lines from `i + at` on; `room` has rows for them.
                unsafe { lines(a, i + at, height, words, room.add(at * PITCH)) }
            });
            for j in (0..n).step_by(SQUARE) {
                // SAFETY: the caller's: panels are in order.
                unsafe {
                    let b = b.add(j / SQUARE * panel + words.first * SQUARE);
                    square((rows, SQUARE.min(n - j)), words, [upper, lower], b, c.at(i, j));
                }
            }
        }
    }
}

/// Lines of the left operand from word `words.first` on, evenly apart: in place, or copied to
/// `room`.
///
/// # Safety
/// There are `height` lines from `first` on, of `words`, and as many rows of `room`.
unsafe fn lines(a: Left, first: usize, height: usize, words: Words, room: *mut f32) -> Even {
    // SAFETY: the caller's.
    unsafe {
        match a {
            Left::Lines(a) => {
                let line = |i: usize| a[first + i].add(words.first).get();
                if let Some(lines) = Even::of(height, line).filter(|lines| !lines.crowded()) {
                    return lines;
                }
                for i in 0..height {
                    std::ptr::copy_nonoverlapping(line(i), room.add(i * PITCH), words.count);
                }
            }
            Left::Panels(a) => {
                let width = shape().rows;
                let line =
                    |i: usize| a.as_ptr().add((first + i) / width * width * words.all + (first + i) % width);
                turn(line, width, height, words, room);
            }
            Left::Steps(start, step) => turn(|i| start.add(first + i).get(), step, height, words, room),
        }
    }
    Even { start: room, apart: 4 * PITCH }
}

/// Copies lines of which four are adjacent, and the same words of all `step` apart, to rows.
///
/// # Safety
/// As for [`lines`]; lines are adjacent from a multiple of four to the next.
unsafe fn turn(line: impl Fn(usize) -> *const f32, step: usize, height: usize, words: Words, room: *mut f32) {
    let at = |i: usize, w: usize| line(i).wrapping_add((words.first + w) * step);
    let (lines, fours) = (height / 4 * 4, words.count / 4 * 4);
    // SAFETY: the caller's: four lines from `i` and four words from `w` on, or one of each.
    unsafe {
        for i in (0..lines).step_by(4) {
            for w in (0..fours).step_by(4) {
                transpose([0, 1, 2, 3].map(|s| at(i, w + s)), room.add(i * PITCH + w), PITCH);
            }
        }
        for i in 0..height {
            for w in if i < lines { fours } else { 0 }..words.count {
                *room.add(i * PITCH + w) = *at(i, w);
            }
        }
    }
}

/// Results of one microkernel.
///
/// # Safety
/// Tiles have the shapes that [`part`] gave them; `b` is a panel, `c` so many rows and columns.
unsafe fn square((rows, columns): (usize, usize), words: Words, a: [Even; 2], b: *const f32, c: Results) {
    let tiles = words.count.div_ceil(SIDE);
    let run = match (rows > SIDE, columns > SIDE) {
        (false, false) => micro::<false, false>,
        (false, true) => micro::<false, true>,
        (true, false) => micro::<true, false>,
        (true, true) => micro::<true, true>,
    };
    // SAFETY: the caller's.
    unsafe {
        if columns.is_multiple_of(SIDE) && c.rounded.is_none() {
            return run(tiles, a, b, c.sums, 4 * c.stride, c.accumulate);
        }
        // Tiles are whole, and store f32, so the last columns and rounded ones take a detour.
        let mut edge = [0.0f32; SQUARE * SQUARE];
        let each = |edge: &mut [f32], f: fn(&mut [f32], Results)| {
            for (i, edge) in edge.chunks_exact_mut(SQUARE).enumerate().take(rows) {
                f(&mut edge[..columns], c.at(i, 0));
            }
        };
        if c.accumulate {
            each(&mut edge, |edge, c| {
                edge.copy_from_slice(std::slice::from_raw_parts(c.sums, edge.len()));
            });
        }
        run(tiles, a, b, edge.as_mut_ptr(), 4 * SQUARE, c.accumulate);
        each(&mut edge, |edge, c| match c.rounded {
            Some((to, _)) => narrow(edge, std::slice::from_raw_parts_mut(to, edge.len())),
            None => std::ptr::copy_nonoverlapping(edge.as_ptr(), c.sums, edge.len()),
        });
    }
}

/// The microkernel: one tile of sums or two, `DOWN` and `ACROSS`, through so many tiles of words.
///
/// # Safety
/// As for [`square`]; rows of `c` are `apart` bytes from one another and as long as the tiles.
unsafe fn micro<const DOWN: bool, const ACROSS: bool>(
    tiles: usize,
    [upper, lower]: [Even; 2],
    mut b: *const f32,
    c: *mut f32,
    apart: usize,
    accumulate: bool,
) {
    const { assert!(SQUARE == VECTORS * 16) };
    let below = c.wrapping_byte_add(SIDE * apart);
    // SAFETY: the caller's.
    unsafe {
        macro_rules! sums {
            ($each:ident $($apart:ident)?) => {{
                $each::<0>($(c, $apart)?);
                if ACROSS {
                    $each::<1>($(c.wrapping_add(SIDE), $apart)?);
                }
                if DOWN {
                    $each::<2>($(below, $apart)?);
                }
                if DOWN && ACROSS {
                    $each::<3>($(below.wrapping_add(SIDE), $apart)?);
                }
            }};
        }
        match accumulate {
            false => sums!(zero),
            true => sums!(load apart),
        }
        for tile in 0..tiles {
            load::<4>(upper.start.add(tile * SIDE), upper.apart);
            load::<6>(b, 4 * SQUARE);
            multiply::<0, 4, 6>();
            if ACROSS {
                load::<7>(b.add(SIDE), 4 * SQUARE);
                multiply::<1, 4, 7>();
            }
            if DOWN {
                load::<5>(lower.start.add(tile * SIDE), lower.apart);
                multiply::<2, 5, 6>();
            }
            if DOWN && ACROSS {
                multiply::<3, 5, 7>();
            }
            b = b.wrapping_add(SIDE * SQUARE);
        }
        sums!(store apart);
    }
}
