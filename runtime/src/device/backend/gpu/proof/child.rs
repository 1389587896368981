//! The process that proves: runs a trial on a GPU, each launch by each of its rungs from the same
//! memory, and says what it does before it does it.

use super::trial::{Blocks, Fill, Range, Step, Type, With};
use super::{Event, Outcome, Rung, Trial, Verdict};
use crate::device::DeviceError;
use crate::device::backend::Value;
use crate::device::backend::gpu::{Compiler, Given, Gpu, Memory, NOTHING, STATUS_BYTES, distinct};
use crate::rng::Philox;
use dreamc_compiler::format::Packed;
use dreamc_compiler::ir::DType;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::thread;

/// The standard input of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) device: usize,
    pub(super) trial: Trial,
}

/// Random numbers between -1 and 1; a prime number of them, so that rows rarely repeat one another.
const NUMBERS: usize = 1_000_003;
/// Seconds of launches that a time is taken of, and launches at most.
const ENOUGH: f64 = 1e-3;
const MOST: f64 = 20.0;

/// Reads a task from `input`, opens its device, and writes events.
pub(crate) fn child<G: Gpu>(
    input: &[u8],
    open: impl FnOnce(usize) -> Result<(G, Compiler), DeviceError>,
    say: &mut dyn FnMut(String),
) -> Result<(), DeviceError> {
    let broken = |message: String| DeviceError::Driver { device: "the process that proves".into(), message };
    let task: Task = serde_json::from_slice(input).map_err(|e| broken(e.to_string()))?;
    let (gpu, compiler) = open(task.device)?;
    let mut say = |event: Event| say(serde_json::to_string(&event).unwrap_or_default());
    let mut bench = Bench::new(gpu, &compiler, &task, &mut say)?;
    for step in &task.trial.steps {
        bench.step(step, &mut say)?;
    }
    bench.gpu.finish()?;
    say(Event::Ended);
    Ok(())
}

/// A trial's memory and code.
struct Bench<'t, G: Gpu> {
    gpu: G,
    memory: Memory,
    trial: &'t Trial,
    /// One for each text, or why there is none; which of them each source has.
    modules: Vec<Result<G::Module, String>>,
    texts: Vec<usize>,
    known: HashSet<usize>,
    without: HashSet<(usize, Rung)>,
}

impl<'t, G: Gpu> Bench<'t, G> {
    fn new(
        mut gpu: G,
        compiler: &Compiler,
        task: &'t Task,
        say: &mut dyn FnMut(Event),
    ) -> Result<Self, DeviceError> {
        let trial = &task.trial;
        let scratch_bytes = trial.sources.iter().map(|s| s.scratch).max().unwrap_or(0);
        let arena = gpu.allocate(trial.arena, "arena")?;
        let mapped = if trial.mapped > 0 { gpu.allocate(trial.mapped, "packed weights")? } else { 0 };
        let scratch = gpu.allocate_scratch(scratch_bytes)?;
        let status = gpu.allocate(STATUS_BYTES, "status word")?;
        gpu.write(status, &NOTHING.to_le_bytes())?;
        let memory = Memory { arena, mapped, scratch, status };
        say(Event::Busy);
        let (firsts, texts) = distinct(&trial.sources);
        let sources: Vec<_> = firsts.iter().map(|&i| &trial.sources[i]).collect();
        let mut modules = vec![];
        // A few at a time, so that something is heard where nothing is in the cache.
        for sources in sources.chunks(64) {
            for (source, code) in sources.iter().zip(compiler.compile_each(sources)) {
                say(Event::Busy);
                let code = code.map_err(|e| e.to_string());
                modules.push(code.and_then(|code| gpu.load(source, &code).map_err(|e| e.to_string())));
            }
        }
        let mut random = Philox::new(0, "proofs").stream(0);
        let numbers: Vec<f32> =
            (0..NUMBERS).map(|_| random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0).collect();
        for (i, fill) in trial.fills.iter().enumerate() {
            say(Event::Busy);
            write(&mut gpu, arena, fill, &numbers, i * 7919)?;
        }
        for blocks in &trial.blocks {
            say(Event::Busy);
            write_blocks(&mut gpu, &memory, blocks, &numbers)?;
        }
        let known = trial.known.iter().copied().collect();
        let without = trial.without.iter().copied().collect();
        Ok(Bench { gpu, memory, trial, modules, texts, known, without })
    }

    /// Runs a launch once, and proves it where nobody did.
    fn step(&mut self, step: &Step, say: &mut dyn FnMut(Event)) -> Result<(), DeviceError> {
        let distinct = &self.trial.distinct[step.distinct];
        let rungs: Vec<(Rung, usize)> = distinct
            .rungs
            .iter()
            .copied()
            .filter(|(rung, _)| !self.without.contains(&(step.distinct, *rung)))
            .collect();
        if step.written.is_empty() || self.known.contains(&step.distinct) {
            // A rung that is wrong is left out: the launches after this one read right numbers.
            let Some(&(_, source)) = rungs.first() else { return Ok(()) };
            return self.launch(step, source).map(drop);
        }
        let before = self.read(&step.written)?;
        let mut results = vec![];
        for &(rung, source) in &rungs {
            say(Event::Begun(step.distinct, rung));
            let failed = |outcome| Event::Proved(Verdict { launch: step.distinct, rung, outcome });
            if let Err(why) = &self.modules[self.texts[source]] {
                say(failed(Outcome::Uncompiled { why: why.clone() }));
                say(Event::Busy);
                self.without.insert((step.distinct, rung));
                continue;
            }
            let ran = self.launch(step, source).and_then(|()| self.gpu.finish());
            let ran = ran.and_then(|()| self.read(&step.written));
            match ran {
                Ok(after) => {
                    // The arbiter's results stay; its time is nobody's concern.
                    let fast = rung != Rung::Naive;
                    let seconds = if fast { self.timed(step, source)? } else { 0.0 };
                    if fast {
                        self.write(&step.written, &before)?;
                    }
                    results.push((rung, after, seconds));
                }
                Err(error) => {
                    say(failed(Outcome::Faults { why: error.to_string() }));
                    self.without.insert((step.distinct, rung));
                    if let DeviceError::Lost { .. } = error {
                        return Err(error);
                    }
                    say(Event::Busy);
                }
            }
        }
        self.judge(step, results, say)
    }

    /// Holds what rungs left against what the last of them did.
    fn judge(
        &mut self,
        step: &Step,
        mut results: Vec<(Rung, Vec<Vec<u8>>, f64)>,
        say: &mut dyn FnMut(Event),
    ) -> Result<(), DeviceError> {
        let Some((last, expected, _)) = results.pop() else { return Ok(()) };
        let proved = |rung, (error, bound, buffer): (f64, f64, String), seconds| {
            let outcome = Outcome::Ran { error, bound, buffer, seconds };
            Event::Proved(Verdict { launch: step.distinct, rung, outcome })
        };
        let read = self.read(&step.read)?;
        let floor = floor(&step.written, &expected).max(floor(&step.read, &read));
        for (rung, found, seconds) in results {
            let worst = apart(&step.written, &expected, &found, floor);
            if worst.0 > worst.1 {
                self.without.insert((step.distinct, rung));
            }
            say(proved(rung, worst, seconds));
        }
        if last == Rung::Naive {
            say(proved(last, (0.0, 0.0, String::new()), 0.0));
        } else {
            // Without the arbiter: memory is to be as this one leaves it.
            self.write(&step.written, &expected)?;
        }
        say(Event::Busy);
        Ok(())
    }

    fn launch(&mut self, step: &Step, source: usize) -> Result<(), DeviceError> {
        let values: Vec<Value> = step.operands.iter().map(|&number| number.into()).collect();
        let origin = self.trial.origin(step.distinct);
        let given =
            Given { number: step.distinct, values: &values, places: step.places, origin, waited: false };
        match &self.modules[self.texts[source]] {
            Ok(module) => self.memory.launch(&mut self.gpu, module, &self.trial.sources[source], &given),
            Err(_) => Ok(()),
        }
    }

    /// Seconds of a launch, by the device's clock. Memory is as several leave it.
    fn timed(&mut self, step: &Step, source: usize) -> Result<f64, DeviceError> {
        let mut seconds = 0.0;
        let mut times = 1.0;
        for _ in 0..2 {
            if !self.gpu.mark(0)? {
                return Ok(0.0);
            }
            for _ in 0..times as usize {
                self.launch(step, source)?;
            }
            self.gpu.mark(1)?;
            self.gpu.finish()?;
            seconds = self.gpu.between(0, 1)? / times;
            times = (ENOUGH / seconds.max(1e-9)).floor().clamp(1.0, MOST);
            if times < 2.0 {
                break;
            }
        }
        Ok(seconds)
    }

    fn read(&self, ranges: &[Range]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let one = |range: &Range| {
            let mut bytes = vec![0; range.bytes as usize];
            self.gpu.read(self.memory.arena + range.at, &mut bytes).map(|()| bytes)
        };
        ranges.iter().map(one).collect()
    }

    fn write(&mut self, ranges: &[Range], contents: &[Vec<u8>]) -> Result<(), DeviceError> {
        let mut all = ranges.iter().zip(contents);
        all.try_for_each(|(range, bytes)| self.gpu.write(self.memory.arena + range.at, bytes))
    }
}

/// Writes what memory holds at the beginning.
fn write<G: Gpu>(
    gpu: &mut G,
    arena: u64,
    fill: &Fill,
    numbers: &[f32],
    from: usize,
) -> Result<(), DeviceError> {
    let period = match fill.with {
        With::Around(..) | With::Below(_) => NUMBERS as u64,
        With::Counted(row) | With::Documents(row) => row,
    };
    let random = |i: u64| numbers[((from as u64 + i) % NUMBERS as u64) as usize];
    let mut bytes = vec![];
    for i in 0..period.min(fill.elements) {
        let (float, int) = match fill.with {
            With::Around(centre, far) => (centre + far * random(i), 0),
            With::Below(bound) => (0.0, ((f64::from(random(i)) + 1.0) / 2.0 * bound as f64) as i32),
            With::Counted(_) => (0.0, i as i32),
            With::Documents(row) => (0.0, (i * 3 / row) as i32),
        };
        match fill.dtype {
            Type::F32 => bytes.extend(float.to_le_bytes()),
            Type::Bf16 => bytes.extend(half::bf16::from_f32(float).to_le_bytes()),
            Type::I32 => bytes.extend(int.to_le_bytes()),
        }
    }
    // Short periods together: each write is waited for.
    let times = (NUMBERS as u64 / period.max(1)).clamp(1, fill.elements.div_ceil(period.max(1)).max(1));
    let bytes = bytes.repeat(times as usize);
    let (mut done, all) = (0, fill.elements * fill.dtype.bytes());
    while done < all && !bytes.is_empty() {
        let part = (bytes.len() as u64).min(all - done);
        gpu.write(arena + fill.at + done, &bytes[..part as usize])?;
        done += part;
    }
    Ok(())
}

/// Writes packed weights: the blocks of some rows again and again.
fn write_blocks<G: Gpu>(
    gpu: &mut G,
    memory: &Memory,
    blocks: &Blocks,
    numbers: &[f32],
) -> Result<(), DeviceError> {
    let Some(packed) = Packed::named(&blocks.format, blocks.row) else { return Ok(()) };
    let rows = (1 << 16) / blocks.row.max(1);
    let count = (blocks.row * rows.max(1)).min(blocks.elements) as usize;
    let far = (3.0 / blocks.row.max(1) as f32).sqrt();
    let values: Vec<f32> = (0..count).map(|i| far * numbers[i % NUMBERS]).collect();
    let mut bytes = vec![];
    // Numbers this small have a place in every format.
    if packed.pack(&values, &mut bytes).is_err() || bytes.is_empty() {
        return Ok(());
    }
    let (mut done, all) = (0, DType::Packed(packed).room(blocks.elements));
    while done < all {
        let part = (bytes.len() as u64).min(all - done);
        gpu.write(memory.place(blocks.at) + done, &bytes[..part as usize])?;
        done += part;
    }
    Ok(())
}

/// Bytes that a thread looks at.
const PIECE: usize = 1 << 22;

/// The largest of what `of` gives for pieces of two contents, on all cores.
fn most(a: &[u8], b: &[u8], of: impl Fn(&[u8], &[u8]) -> f64 + Sync) -> f64 {
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    let each = a.len().div_ceil(threads).next_multiple_of(4).max(PIECE);
    thread::scope(|scope| {
        let of = &of;
        let pieces: Vec<_> = a.chunks(each).zip(b.chunks(each)).collect();
        let threads: Vec<_> = pieces.into_iter().map(|(a, b)| scope.spawn(move || of(a, b))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(f64::MAX)).fold(0.0, f64::max)
    })
}

/// The largest of what `of` gives for pairs of floats; integers are compared as they are.
fn pairs(dtype: Type, a: &[u8], b: &[u8], of: impl Fn(f64, f64) -> f64 + Sync) -> f64 {
    let wide = |c: &[u8]| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]]));
    let narrow = |c: &[u8]| half::bf16::from_le_bytes([c[0], c[1]]).to_f64();
    match dtype {
        Type::F32 => most(a, b, |a, b| {
            let all = a.chunks_exact(4).zip(b.chunks_exact(4));
            all.fold(0.0, |most: f64, (a, b)| most.max(of(wide(a), wide(b))))
        }),
        Type::Bf16 => most(a, b, |a, b| {
            let all = a.chunks_exact(2).zip(b.chunks_exact(2));
            all.fold(0.0, |most: f64, (a, b)| most.max(of(narrow(a), narrow(b))))
        }),
        Type::I32 => 0.0,
    }
}

fn largest(dtype: Type, bytes: &[u8]) -> f64 {
    pairs(dtype, bytes, bytes, |x, _| if x.is_finite() { x.abs() } else { 0.0 })
}

/// The share of the largest number of a launch below which a buffer holds rounding alone.
const ROUNDING: f64 = 1e-5;

/// No buffer is taken to be of smaller numbers than this: one that is zero by nature holds what
/// rounding left.
fn floor(ranges: &[Range], contents: &[Vec<u8>]) -> f64 {
    let all = ranges.iter().zip(contents).map(|(range, bytes)| largest(range.dtype, bytes));
    all.fold(0.0, f64::max) * ROUNDING
}

/// The largest difference, the bound of that buffer, and its name.
fn apart(ranges: &[Range], expected: &[Vec<u8>], found: &[Vec<u8>], floor: f64) -> (f64, f64, String) {
    let mut worst: Option<(f64, f64, String)> = None;
    for ((range, a), b) in ranges.iter().zip(expected).zip(found) {
        let error = if a == b { 0.0 } else { difference(range.dtype, a, b, floor) };
        let beyond = |(error, bound): (f64, f64)| if error > bound { f64::MAX } else { error };
        if worst.as_ref().is_none_or(|w| beyond((error, range.bound)) > beyond((w.0, w.1))) {
            worst = Some((error, range.bound, range.name.clone()));
        }
    }
    worst.unwrap_or_default()
}

fn difference(dtype: Type, expected: &[u8], found: &[u8], floor: f64) -> f64 {
    if dtype == Type::I32 {
        return f64::MAX;
    }
    let scale = largest(dtype, expected).max(floor).max(f64::MIN_POSITIVE);
    pairs(dtype, expected, found, |x, y| {
        let apart = (x - y).abs();
        let same = x == y || (x.is_nan() && y.is_nan());
        match (same, apart.is_finite()) {
            (true, _) => 0.0,
            (false, true) => apart / scale,
            (false, false) => f64::MAX,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(dtype: Type, bound: f64, name: &str) -> Range {
        Range { at: 0, bytes: 8, dtype, name: name.into(), bound }
    }

    #[test]
    fn what_is_apart_is_relative_to_the_buffer() {
        let bytes = |x: [f32; 2]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let ranges = [range(Type::F32, 1e-4, "large"), range(Type::F32, 1e-4, "small")];
        let expected = [bytes([100.0, -1.0]), bytes([1e-3, 2e-3])];
        let of = |large, small| {
            let floor = floor(&ranges, &expected);
            let (error, _, name) = apart(&ranges, &expected, &[bytes(large), bytes(small)], floor);
            (format!("{error:.0e}"), name)
        };
        assert_eq!(of([100.0, -1.0], [1e-3, 2e-3]).0, "0e0");
        assert_eq!(of([101.0, -1.0], [1e-3, 2e-3]), ("1e-2".into(), "large".into()));
        assert_eq!(of([100.0, -1.0], [1e-3, 1e-3]), ("5e-1".into(), "small".into()));
        assert_eq!(of([f32::NAN, -1.0], [1e-3, 1e-3]).1, "large");
        // Zero by nature: 1e-4 of the largest of its launch times 1e-5 is rounding.
        let expected = [bytes([100.0, 1.0]), bytes([0.0, 0.0])];
        let floor = floor(&ranges, &expected);
        let noise = [bytes([100.0, 1.0]), bytes([5e-9, 0.0])];
        assert!(apart(&ranges, &expected, &noise, floor).0 < 1e-4);
    }

    #[test]
    fn integers_are_equal_or_not() {
        let ranges = [range(Type::I32, 0.0, "order")];
        let bytes = |x: [i32; 2]| vec![x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()];
        assert_eq!(apart(&ranges, &bytes([1, 2]), &bytes([1, 2]), 0.0).0, 0.0);
        assert_eq!(apart(&ranges, &bytes([1, 2]), &bytes([1, 3]), 0.0).0, f64::MAX);
    }
}
