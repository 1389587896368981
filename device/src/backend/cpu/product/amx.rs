//! Products of bf16 in tile registers ([`amx`]).
//!
//! *In*: operands and results as [`super::tile_into`] has them. *Out*: the product. *Promise*: a
//! tile of results is multiplied by sixteen words after sixteen words, the last perhaps fewer, in
//! increasing order, whatever tiles are next to it; [`super::few`] keeps to the same order.
//!
//! Two by two tiles are summed up at once. A product of tiles of sixteen lines takes the processor
//! 16 cycles and its result is there after 52, says the manual for the first of them, so four sums
//! keep it busy; two tiles of each operand are loaded for four products. No processor has timed
//! that here.
//!
//! Nothing is padded. Lower tiles at the lower edge and shorter lines at the end of sums are shapes
//! of their own, and sums between two shapes rest in memory, in f32, as they were.

use super::{DEPTH, Left, Panels, Results, Size, VECTORS, shape, transpose};
use crate::cpu::simd::amx::{self, SIDE, load, multiply, store, zero};
use crate::cpu::simd::narrow;
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
    /// `count` lines, at least one; `None` where they are not evenly apart.
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
            // SAFETY: the caller's: `height` lines from `i` on, twice where there are as many rows,
            // and `room` has rows for them.
            let (upper, lower) = unsafe {
                let upper = lines(a, i, height, words, room);
                let two = rows > SIDE;
                (upper, if two { lines(a, i + SIDE, SIDE, words, room.add(SIDE * PITCH)) } else { upper })
            };
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

/// Copies lines to rows. Lines are adjacent by fours, and the words of each are `step` apart.
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
/// Tiles have the shapes that [`part`] gave them; `b` is a panel, `c` has these rows and columns.
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

/// The microkernel: one tile of sums or two, `DOWN` and `ACROSS`, through `tiles` tiles of words.
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::super::{Side, block, block_scratch};
    use crate::cpu::Pointer;
    use crate::cpu::simd::amx::emulated::{FAULT, FAULTS};
    use crate::cpu::simd::{VARIABLE, narrow, pairs, tile_registers};
    use half::bf16;
    use std::process::{Command, Output};

    /// `start` and a sum of products, as the manual defines it for sixteen words after sixteen; the
    /// second half of the last word of an odd number of steps is zero.
    fn sum(steps: usize, a: impl Fn(usize) -> bf16, b: impl Fn(usize) -> bf16, start: f32) -> f32 {
        let normal = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
        let mut total = start;
        for first in (0..steps).step_by(32) {
            let mut halves = [0.0f32; 2];
            for s in first..(first + 32).min(steps.next_multiple_of(2)) {
                let [a, b] = match s < steps {
                    true => [a(s), b(s)].map(|x| normal(x.to_f32())),
                    false => [0.0; 2],
                };
                halves[s % 2] = normal(a.mul_add(b, halves[s % 2]));
            }
            total = normal(normal(total) + normal(halves[0] + halves[1]));
        }
        total
    }

    /// Elements of an operand, its lines as layouts have them.
    struct Operand {
        memory: Vec<bf16>,
        order: Vec<i32>,
        /// The first element, and elements from line to line and from step to step.
        at: (usize, usize, usize),
        gathered: bool,
    }

    impl Operand {
        fn new(layout: usize, lines: usize, steps: usize, value: impl Fn(usize) -> f32) -> Self {
            let (at, gathered) = match layout {
                // Whole words, in place.
                0 => ((0, steps.next_multiple_of(2) + 6, 1), false),
                // Halves of words.
                1 => ((1, steps + 1, 1), false),
                // Lines that share their places in the cache.
                2 => ((0, steps.next_multiple_of(2048), 1), false),
                // Lines in another order, which are no longer evenly apart.
                3 => ((0, steps.next_multiple_of(2), 1), true),
                // Lines that are adjacent.
                4 => ((0, 1, lines + 3), false),
                // Neither.
                _ => ((2, 3, 3 * lines + 1), false),
            };
            let (first, line, step) = at;
            let memory = (0..first + lines * line + steps * step + 1).map(|i| bf16::from_f32(value(i)));
            let order = (0..lines as i32).map(|i| if i % 3 == 1 { i / 2 } else { i }).collect();
            Operand { memory: memory.collect(), order, at, gathered }
        }

        fn side(&mut self) -> Side<bf16> {
            let (first, line, step) = self.at;
            let start = Pointer::to(&mut self.memory).add(first);
            match self.gathered {
                false => Side::Strided { start, line, step },
                true => Side::GatheredLines { start, row: line, order: Pointer::to(&mut self.order), per: 1 },
            }
        }

        fn get(&self, line: usize, step: usize) -> bf16 {
            let line = if self.gathered { self.order[line] as usize } else { line };
            self.memory[self.at.0 + line * self.at.1 + step * self.at.2]
        }
    }

    /// Every element of products of all layouts and edges, as f32 and as bf16, overwritten and
    /// added to, has the bits of its definition, whatever is next to it; so have numbers whose
    /// products and sums are too small for normal ones.
    #[test]
    #[ignore = "needs tile registers: `emulated_tiles` runs it where there are some"]
    fn bits_by_definition() {
        assert!(tile_registers());
        let value = |i: usize| ((i * 37 + 11) % 1009) as f32 / 501.7 - 1.0;
        let sizes = [
            (1, 16, 32),
            (1, 21, 71),
            (16, 32, 33),
            (17, 33, 65),
            (40, 70, 100),
            (33, 16, 600),
            (5, 48, 1100),
            (49, 40, 7),
            (3, 3, 1),
            (20, 20, 0),
        ];
        for (m, n, k) in sizes {
            for layout in 0..6 {
                // Numbers near 1, and numbers with products near the smallest normal one.
                for scale in [1.0, 1.1e-19] {
                    let mut a = Operand::new(layout, m, k, |i| value(i) * scale);
                    let mut b = Operand::new((7 * layout + 5) % 6, n, k, |i| value(3 * i + 5) * scale);
                    for accumulate in [false, true] {
                        let (sa, sb) = (a.side(), b.side());
                        let mut scratch = vec![f32::NAN; block_scratch(m, n, k)];
                        let old = |i: usize| bf16::from_f32(value(i) * scale * scale);
                        let mut wide: Vec<f32> = (0..m * (n + 1)).map(|i| old(i).to_f32()).collect();
                        let mut rounded: Vec<bf16> = (0..m * (n + 1)).map(old).collect();
                        let size = (m, n, k);
                        let (c, narrowed) = (Pointer::to(&mut wide), Pointer::to(&mut rounded));
                        // SAFETY: operands have the lines and steps, results rows `n + 1` apart.
                        unsafe {
                            block(size, sa, sb, c, n + 1, accumulate, &mut scratch);
                            block(size, sa, sb, narrowed, n + 1, accumulate, &mut scratch);
                        }
                        for i in 0..m {
                            for j in 0..n {
                                let at = i * (n + 1) + j;
                                let start = if accumulate { old(at).to_f32() } else { 0.0 };
                                let expected = sum(k, |s| a.get(i, s), |s| b.get(j, s), start);
                                let what = format!("{size:?} {layout} {scale} {accumulate} at {i} {j}");
                                assert_eq!(wide[at].to_bits(), expected.to_bits(), "{what}");
                                let mut once = [bf16::ZERO];
                                narrow(&[expected], &mut once);
                                assert_eq!(rounded[at].to_bits(), once[0].to_bits(), "{what}, rounded");
                            }
                            let beside = i * (n + 1) + n;
                            assert_eq!((wide[beside], rounded[beside]), (old(beside).to_f32(), old(beside)));
                        }
                    }
                }
            }
        }
    }

    /// Tests of the CPU device in a process with tiles, emulated where the processor has none.
    fn with_tiles(names: &[&str], fault: Option<&str>) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(names).arg("--include-ignored").env(VARIABLE, "amx");
        match fault {
            Some(fault) => command.env(FAULT, fault),
            None => command.env_remove(FAULT),
        };
        command.output().unwrap()
    }

    /// All tests of the CPU device, products of bf16 in tile registers.
    #[test]
    fn emulated_tiles() {
        if std::env::var_os(VARIABLE).is_some() {
            return;
        }
        if !pairs() {
            return dreamc_skip::skip("the processor has no AVX512-BF16");
        }
        let output = with_tiles(&["backend::cpu"], None);
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("bits_by_definition ... ok"), "{text}{errors}");
    }

    /// Mistakes that a kernel for tiles could make are noticed, each by a test that knows nothing
    /// of it.
    #[test]
    fn faults_of_tiles_are_noticed() {
        if std::env::var_os(VARIABLE).is_some() {
            return;
        }
        if !pairs() || crate::cpu::simd::amx::available() {
            return dreamc_skip::skip(
                "faults are put into emulated tiles, which AVX512-BF16 without AMX has",
            );
        }
        let tests: Vec<&str> = FAULTS.iter().flat_map(|(_, tests)| *tests).copied().collect();
        for (fault, noticing) in FAULTS {
            let output = with_tiles(&tests, Some(fault));
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            for name in noticing {
                assert!(text.contains(&format!("{name} ... FAILED")), "{fault}: {text}{errors}");
            }
        }
    }
}
