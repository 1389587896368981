//! Results of launches, held until they are compared: in spare memory of the device where that has
//! room, else by the host.
//!
//! *In*: ranges of the arena. *Out*: [`Held`] contents, restored or compared ([`Apart`]).
//! *Promise*: the device compares only after its kernel gave, for numbers of every kind, what the
//! host gives; where that fails, or nothing is spare, the host compares and finds the same.

use super::Trial;
use super::trial::{Range, Type};
use crate::DeviceError;
use crate::backend::gpu::launch::{Arg, Launch};
use crate::backend::gpu::{Compiler, Gpu};
use dreamc_compiler::codegen::{Language, Pass, Source, Turns};
use std::borrow::Cow;
use std::thread;

/// Contents of ranges, as they were at one moment.
pub(super) enum Held {
    Host(Vec<Vec<u8>>),
    /// From this address on, each at a multiple of [`ALIGNED`].
    Device(u64),
}

/// Bytes of ranges together from which on the device holds them: fewer come to the host sooner than
/// a kernel is launched.
const LARGE: u64 = 1 << 20;
/// Where contents begin in spare memory.
const ALIGNED: u64 = 256;
/// Memory that stays free, for what the driver takes as kernels run.
const LEFT: u64 = 1 << 30;
/// Blocks of the kernel that compares, threads of each, and words that a block leaves.
const BLOCKS: u32 = 1056;
const THREADS: u32 = 256;
const WORDS: usize = 4;

fn room(ranges: &[Range]) -> u64 {
    ranges.iter().map(|range| range.bytes.next_multiple_of(ALIGNED)).sum()
}

/// Spare memory, and the code that compares there.
pub(super) struct Holder<G: Gpu> {
    /// Nothing where the host does all of it.
    code: Option<G::Module>,
    /// Words of all blocks, then contents.
    words: u64,
    begin: u64,
    bytes: u64,
    taken: u64,
}

/// The text that compares, for both types of floats.
fn source() -> Source {
    let pass = |entry: &str| Pass {
        entry: entry.into(),
        grid: BLOCKS,
        block: THREADS,
        shared_bytes: 0,
        arguments: vec![],
        turns: Turns::default(),
    };
    let entry = |name: &str, element: &str| {
        format!(
            "KERNEL {name}(const {element} *a, const {element} *b, u32 *words, i64 elements) {{ apart<{THREADS}>(a, b, words, \
             elements); }}\n"
        )
    };
    Source {
        name: "apart".into(),
        text: format!(
            "#include \"apart.cuh\"\n\n{}{}",
            entry("apart_f32", "float"),
            entry("apart_bf16", "bf16")
        ),
        passes: vec![pass("apart_f32"), pass("apart_bf16")],
        iterations: 1,
        scratch: 0,
        language: Language::Portable,
    }
}

impl<G: Gpu> Holder<G> {
    /// Takes the memory that the largest step of a trial needs, as far as it is free.
    pub(super) fn new(gpu: &mut G, compiler: &Compiler, trial: &Trial) -> Result<Self, DeviceError> {
        let needs = trial.steps.iter().filter(|step| !trial.known.contains(&step.distinct)).map(|step| {
            let all = room(&step.written);
            if all < LARGE { 0 } else { all * (1 + trial.distinct[step.distinct].rungs.len() as u64) }
        });
        let needed = needs.max().unwrap_or(0);
        Holder::with_room(gpu, compiler, needed)
    }

    /// Takes this many bytes, as far as they are free.
    fn with_room(gpu: &mut G, compiler: &Compiler, needed: u64) -> Result<Self, DeviceError> {
        let nothing = Holder { code: None, words: 0, begin: 0, bytes: 0, taken: 0 };
        let words = u64::from(BLOCKS) * 4 * WORDS as u64;
        let free = gpu.free()?.unwrap_or(u64::MAX).saturating_sub(LEFT + words);
        let bytes = needed.min(free);
        if bytes < LARGE {
            return Ok(nothing);
        }
        let source = source();
        let Ok(code) = compiler.compile(&[&source]) else { return Ok(nothing) };
        let Ok(code) = gpu.load(&source, code.first().map_or(&[], Vec::as_slice)) else {
            return Ok(nothing);
        };
        let Ok(at) = gpu.allocate_scratch(words + bytes) else { return Ok(nothing) };
        let mut holder = Holder { code: Some(code), words: at, begin: at + words, bytes, taken: 0 };
        if !holder.agrees(gpu)? {
            holder.code = None;
        }
        Ok(holder)
    }

    /// Whether device and host find the same, of numbers of every kind.
    fn agrees(&self, gpu: &mut G) -> Result<bool, DeviceError> {
        let plain = |i: u32| (i as f32 - 700.0) * 0.37;
        let mut lists = [plain as fn(u32) -> f32; 2].map(|of| (0..1500).map(of).collect::<Vec<f32>>());
        let far = LARGE / 2;
        let mut agree = true;
        for change in [None, Some(3.5), Some(-0.0), Some(f32::NAN), Some(f32::INFINITY)] {
            if let Some(number) = change {
                lists[1][1234] = number;
            }
            for dtype in [Type::F32, Type::Bf16, Type::I32] {
                let bytes = lists.each_ref().map(|list| match dtype {
                    Type::Bf16 => list.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
                    Type::F32 | Type::I32 => list.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>(),
                });
                gpu.write(self.begin, &bytes[0])?;
                gpu.write(self.begin + far, &bytes[1])?;
                let found =
                    self.compare(gpu, dtype, bytes[0].len() as u64, (self.begin, self.begin + far))?;
                agree &= found.near(&Apart::of(dtype, &bytes[0], &bytes[1]));
            }
        }
        Ok(agree)
    }

    /// Forgets what it holds, before ranges that are held some times.
    pub(super) fn begin(&mut self) {
        self.taken = 0;
    }

    /// Holds what ranges of the arena have now.
    pub(super) fn hold(&mut self, gpu: &mut G, arena: u64, ranges: &[Range]) -> Result<Held, DeviceError> {
        let all = room(ranges);
        if self.code.is_none() || all < LARGE || self.taken + all > self.bytes {
            let one = |range: &Range| read(gpu, arena + range.at, range.bytes);
            return Ok(Held::Host(ranges.iter().map(one).collect::<Result<_, _>>()?));
        }
        let held = self.begin + self.taken;
        self.taken += all;
        for (range, at) in placed(ranges, held) {
            gpu.copy(arena + range.at, at, range.bytes)?;
        }
        Ok(Held::Device(held))
    }

    /// Gives the arena what was held.
    pub(super) fn restore(
        &self,
        gpu: &mut G,
        arena: u64,
        ranges: &[Range],
        held: &Held,
    ) -> Result<(), DeviceError> {
        match held {
            Held::Host(contents) => {
                let mut all = ranges.iter().zip(contents);
                all.try_for_each(|(range, bytes)| gpu.write(arena + range.at, bytes))
            }
            &Held::Device(held) => {
                placed(ranges, held).try_for_each(|(range, at)| gpu.copy(at, arena + range.at, range.bytes))
            }
        }
    }

    /// How far what was found is from what was expected, range by range.
    pub(super) fn apart(
        &self,
        gpu: &mut G,
        ranges: &[Range],
        [expected, found]: [&Held; 2],
    ) -> Result<Vec<Apart>, DeviceError> {
        match (expected, found) {
            (&Held::Device(expected), &Held::Device(found)) => placed(ranges, expected)
                .zip(placed(ranges, found))
                .map(|((range, a), (_, b))| self.compare(gpu, range.dtype, range.bytes, (a, b)))
                .collect(),
            _ => {
                let [expected, found] = [contents(gpu, ranges, expected)?, contents(gpu, ranges, found)?];
                let pairs = expected.iter().zip(found.iter());
                Ok(ranges.iter().zip(pairs).map(|(range, (a, b))| Apart::of(range.dtype, a, b)).collect())
            }
        }
    }

    fn compare(
        &self,
        gpu: &mut G,
        dtype: Type,
        bytes: u64,
        (a, b): (u64, u64),
    ) -> Result<Apart, DeviceError> {
        let Some(code) = &self.code else { return Ok(Apart::default()) };
        // Integers as floats of the same bits: their word for equality counts alone.
        let (entry, size) = if dtype == Type::Bf16 { ("apart_bf16", 2) } else { ("apart_f32", 4) };
        let args =
            vec![Arg::Pointer(a), Arg::Pointer(b), Arg::Pointer(self.words), Arg::I64((bytes / size) as i64)];
        let launch = Launch {
            kernel: entry.into(),
            grid: [BLOCKS, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args,
        };
        gpu.launch(code, &launch, "the comparison of two kernels")?;
        let mut words = vec![0; BLOCKS as usize * 4 * WORDS];
        gpu.read(self.words, &mut words)?;
        Ok(Apart::folded(dtype, &words))
    }
}

/// Ranges, and where each is held.
fn placed(ranges: &[Range], begin: u64) -> impl Iterator<Item = (&Range, u64)> {
    ranges.iter().scan(begin, |at, range| {
        let own = *at;
        *at += range.bytes.next_multiple_of(ALIGNED);
        Some((range, own))
    })
}

fn contents<'h, G: Gpu>(
    gpu: &G,
    ranges: &[Range],
    held: &'h Held,
) -> Result<Cow<'h, [Vec<u8>]>, DeviceError> {
    match held {
        Held::Host(contents) => Ok(contents.into()),
        &Held::Device(held) => placed(ranges, held).map(|(range, at)| read(gpu, at, range.bytes)).collect(),
    }
}

/// Bytes of the device's memory.
pub(super) fn read<G: Gpu>(gpu: &G, address: u64, bytes: u64) -> Result<Vec<u8>, DeviceError> {
    let mut contents = vec![0; bytes as usize];
    gpu.read(address, &mut contents).map(|()| contents)
}

/// How two contents of a range differ.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Apart {
    /// The largest finite number that is expected; 0 of integers.
    pub(super) largest: f64,
    /// The largest finite difference.
    difference: f64,
    /// Whether numbers differ that have no finite difference.
    beyond: bool,
    /// Whether any bits differ.
    other: bool,
}

impl Apart {
    /// By the host, on all cores.
    pub(super) fn of(dtype: Type, expected: &[u8], found: &[u8]) -> Apart {
        let wide = |c: &[u8]| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]]));
        let narrow = |c: &[u8]| half::bf16::from_le_bytes([c[0], c[1]]).to_f64();
        let floats = match dtype {
            Type::F32 => pieces(expected, found, |a, b| Apart::pairs(a, b, 4, wide)),
            Type::Bf16 => pieces(expected, found, |a, b| Apart::pairs(a, b, 2, narrow)),
            Type::I32 => Apart::default(),
        };
        Apart { other: expected != found, ..floats }
    }

    fn pairs(expected: &[u8], found: &[u8], size: usize, of: impl Fn(&[u8]) -> f64) -> Apart {
        let mut most = Apart::default();
        for (a, b) in expected.chunks_exact(size).zip(found.chunks_exact(size)) {
            let (x, y) = (of(a), of(b));
            let (apart, same) = ((x - y).abs(), x == y || (x.is_nan() && y.is_nan()));
            if x.is_finite() {
                most.largest = most.largest.max(x.abs());
            }
            match (same, apart.is_finite()) {
                (true, _) => {}
                (false, true) => most.difference = most.difference.max(apart),
                (false, false) => most.beyond = true,
            }
        }
        most
    }

    fn most(self, other: Apart) -> Apart {
        Apart {
            largest: self.largest.max(other.largest),
            difference: self.difference.max(other.difference),
            beyond: self.beyond || other.beyond,
            other: self.other || other.other,
        }
    }

    /// Of the words that blocks left.
    fn folded(dtype: Type, words: &[u8]) -> Apart {
        let word = |block: &[u8], i: usize| {
            u32::from_le_bytes([block[4 * i], block[4 * i + 1], block[4 * i + 2], block[4 * i + 3]])
        };
        let float = |block: &[u8], i: usize| f64::from(f32::from_bits(word(block, i)));
        let of = |block: &[u8]| {
            let other = word(block, 3) != 0;
            match dtype {
                Type::I32 => Apart { other, ..Apart::default() },
                Type::F32 | Type::Bf16 => Apart {
                    largest: float(block, 0),
                    difference: float(block, 1),
                    beyond: word(block, 2) != 0,
                    other,
                },
            }
        };
        words.chunks_exact(4 * WORDS).map(of).fold(Apart::default(), Apart::most)
    }

    /// Whether two findings of the same contents agree, up to the rounding of one difference to
    /// f32.
    fn near(&self, other: &Apart) -> bool {
        let difference = (self.difference - other.difference).abs() <= 1e-6 * other.difference;
        difference && Apart { difference: other.difference, ..*self } == *other
    }

    /// The difference relative to the largest number; nothing finite where integers differ or a NaN
    /// meets a number.
    fn error(&self, dtype: Type, floor: f64) -> f64 {
        match (self.other, dtype == Type::I32 || self.beyond) {
            (false, _) => 0.0,
            (true, true) => f64::MAX,
            (true, false) => self.difference / self.largest.max(floor).max(f64::MIN_POSITIVE),
        }
    }
}

/// Bytes that a thread looks at.
const PIECE: usize = 1 << 22;

/// Pieces of two contents by `of`, on all cores.
fn pieces(a: &[u8], b: &[u8], of: impl Fn(&[u8], &[u8]) -> Apart + Sync) -> Apart {
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    let each = a.len().div_ceil(threads).next_multiple_of(4).max(PIECE);
    let failed = Apart { beyond: true, other: true, ..Apart::default() };
    thread::scope(|scope| {
        let of = &of;
        let pieces: Vec<_> = a.chunks(each).zip(b.chunks(each)).collect();
        let threads: Vec<_> = pieces.into_iter().map(|(a, b)| scope.spawn(move || of(a, b))).collect();
        let all = threads.into_iter().map(|thread| thread.join().unwrap_or(failed));
        all.fold(Apart::default(), Apart::most)
    })
}

/// The share of the largest number of a launch below which a buffer holds rounding alone.
const ROUNDING: f64 = 1e-5;

/// No buffer is taken to be of smaller numbers than this: one that is zero by nature holds what
/// rounding left.
pub(super) fn floor(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, f64::max) * ROUNDING
}

/// The largest number of contents that the host has.
pub(super) fn largest(dtype: Type, bytes: &[u8]) -> f64 {
    Apart::of(dtype, bytes, bytes).largest
}

/// The largest difference, the bound of that buffer, and its name.
pub(super) fn worst(ranges: &[Range], found: &[Apart], floor: f64) -> (f64, f64, String) {
    let mut worst: Option<(f64, f64, String)> = None;
    for (range, apart) in ranges.iter().zip(found) {
        let error = apart.error(range.dtype, floor);
        let beyond = |(error, bound): (f64, f64)| if error > bound { f64::MAX } else { error };
        if worst.as_ref().is_none_or(|w| beyond((error, range.bound)) > beyond((w.0, w.1))) {
            worst = Some((error, range.bound, range.name.clone()));
        }
    }
    worst.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::Target;
    use crate::backend::ptx::{ARCHITECTURE, Interpreter};

    fn range(dtype: Type, bound: f64, name: &str) -> Range {
        Range { at: 0, bytes: 8, dtype, name: name.into(), bound }
    }

    /// The worst of some ranges, with the floor that their largest numbers give.
    fn of(ranges: &[Range], expected: &[Vec<u8>], found: &[Vec<u8>]) -> (f64, f64, String) {
        let pairs = ranges.iter().zip(expected.iter().zip(found));
        let apart: Vec<Apart> = pairs.map(|(r, (a, b))| Apart::of(r.dtype, a, b)).collect();
        worst(ranges, &apart, floor(apart.iter().map(|a| a.largest)))
    }

    #[test]
    fn what_is_apart_is_relative_to_the_buffer() {
        let bytes = |x: [f32; 2]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let ranges = [range(Type::F32, 1e-4, "large"), range(Type::F32, 1e-4, "small")];
        let expected = [bytes([100.0, -1.0]), bytes([1e-3, 2e-3])];
        let of = |large, small| {
            let (error, _, name) = of(&ranges, &expected, &[bytes(large), bytes(small)]);
            (format!("{error:.0e}"), name)
        };
        assert_eq!(of([100.0, -1.0], [1e-3, 2e-3]).0, "0e0");
        assert_eq!(of([101.0, -1.0], [1e-3, 2e-3]), ("1e-2".into(), "large".into()));
        assert_eq!(of([100.0, -1.0], [1e-3, 1e-3]), ("5e-1".into(), "small".into()));
        assert_eq!(of([f32::NAN, -1.0], [1e-3, 1e-3]).1, "large");
        // Zero by nature: 1e-4 of the largest of its launch times 1e-5 is rounding.
        let expected = [bytes([100.0, 1.0]), bytes([0.0, 0.0])];
        let noise = [bytes([100.0, 1.0]), bytes([5e-9, 0.0])];
        assert!(self::of(&ranges, &expected, &noise).0 < 1e-4);
    }

    /// Two ranges, one of each type of floats, held by the interpreted device as they were and as
    /// they are: what the kernel finds is what the host finds, and the old contents come back.
    #[test]
    fn a_device_holds_and_compares() {
        let Ok(compiler) = Compiler::new(Target::Ptx, ARCHITECTURE) else {
            return eprintln!("skipped: there is no NVRTC");
        };
        let mut gpu = Interpreter::checked();
        let (floats, halves) = (1 << 18, 1000);
        let arena = gpu.allocate(4 * floats + 2 * halves, "arena").unwrap();
        let ranges = [
            Range { at: 0, bytes: 4 * floats, ..range(Type::F32, 1e-4, "wide") },
            Range { at: 4 * floats, bytes: 2 * halves, ..range(Type::Bf16, 1e-2, "narrow") },
        ];
        let mut holder = Holder::with_room(&mut gpu, &compiler, 3 * room(&ranges)).unwrap();
        assert!(holder.code.is_some());
        let write = |gpu: &mut Interpreter, scale: f32| {
            let number = |i: u64| scale * ((i * 7919 % 1013) as f32 - 500.0);
            let wide: Vec<u8> = (0..floats).flat_map(|i| number(i).to_le_bytes()).collect();
            let narrow: Vec<u8> =
                (0..halves).flat_map(|i| half::bf16::from_f32(number(i)).to_le_bytes()).collect();
            gpu.write(arena, &wide).unwrap();
            gpu.write(arena + 4 * floats, &narrow).unwrap();
            [wide, narrow]
        };
        let old = write(&mut gpu, 0.25);
        let before = holder.hold(&mut gpu, arena, &ranges).unwrap();
        let new = write(&mut gpu, 0.2500001);
        let after = holder.hold(&mut gpu, arena, &ranges).unwrap();
        assert!(matches!((&before, &after), (Held::Device(_), Held::Device(_))));
        let found = holder.apart(&mut gpu, &ranges, [&before, &after]).unwrap();
        for (i, found) in found.iter().enumerate() {
            let expected = Apart::of(ranges[i].dtype, &old[i], &new[i]);
            assert!(expected.largest > 0.0 && found.near(&expected), "{found:?} is not {expected:?}");
        }
        assert!(found[0].difference > 0.0 && found[0].other);
        holder.restore(&mut gpu, arena, &ranges, &before).unwrap();
        let mut now = vec![0; 4 * floats as usize];
        gpu.read(arena, &mut now).unwrap();
        assert!(now == old[0]);
        // Small contents, and those for which nothing is spare, come to the host.
        let small = holder.hold(&mut gpu, arena, &ranges[1..]).unwrap();
        assert!(matches!(small, Held::Host(_)));
        let third = holder.hold(&mut gpu, arena, &ranges).unwrap();
        let fourth = holder.hold(&mut gpu, arena, &ranges).unwrap();
        assert!(matches!((&third, &fourth), (Held::Device(_), Held::Host(_))));
        let equal = holder.apart(&mut gpu, &ranges, [&third, &fourth]).unwrap();
        assert!(equal.iter().all(|apart| !apart.other));
    }

    #[test]
    fn integers_are_equal_or_not() {
        let ranges = [range(Type::I32, 0.0, "order")];
        let bytes = |x: [i32; 2]| vec![x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()];
        assert_eq!(of(&ranges, &bytes([1, 2]), &bytes([1, 2])).0, 0.0);
        assert_eq!(of(&ranges, &bytes([1, 2]), &bytes([1, 3])).0, f64::MAX);
    }
}
