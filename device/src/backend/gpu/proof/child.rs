//! The process that proves: runs a trial on a GPU, each launch by each of its rungs from the same
//! memory, and says what it does before it does it.

use super::held::{Held, Holder, floor, largest, read, worst};
use super::trial::{Blocks, Fill, Range, Step, Type, With};
use super::{Event, Outcome, Rung, Trial, Verdict};
use crate::DeviceError;
use crate::backend::Value;
use crate::backend::gpu::{Compiler, Given, Gpu, Memory, NOTHING, STATUS_BYTES, distinct};
use dreamc_compiler::format::Packed;
use dreamc_compiler::ir::DType;
use dreamc_data::rng::Philox;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

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
    holder: Holder<G>,
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
        let holder = Holder::new(&mut gpu, compiler, trial)?;
        let known = trial.known.iter().copied().collect();
        let without = trial.without.iter().copied().collect();
        Ok(Bench { gpu, memory, trial, modules, texts, known, without, holder })
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
        self.holder.begin();
        let before = self.hold(step)?;
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
            let ran = ran.and_then(|()| self.hold(step));
            match ran {
                Ok(after) => {
                    // The arbiter's results stay; its time is nobody's concern.
                    let fast = rung != Rung::Naive;
                    let seconds = if fast { self.timed(step, source)? } else { 0.0 };
                    if fast {
                        self.restore(step, &before)?;
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
        mut results: Vec<(Rung, Held, f64)>,
        say: &mut dyn FnMut(Event),
    ) -> Result<(), DeviceError> {
        let Some((last, expected, _)) = results.pop() else { return Ok(()) };
        let proved = |rung, (error, bound, buffer): (f64, f64, String), seconds| {
            let outcome = Outcome::Ran { error, bound, buffer, seconds };
            Event::Proved(Verdict { launch: step.distinct, rung, outcome })
        };
        let mut compared = vec![];
        for (rung, found, seconds) in results {
            let pair = [&expected, &found];
            compared.push((rung, self.holder.apart(&mut self.gpu, &step.written, pair)?, seconds));
        }
        let written = compared.iter().flat_map(|(_, apart, _)| apart).map(|apart| apart.largest);
        let floor = floor(written.chain(self.largest_read(step)?));
        for (rung, apart, seconds) in compared {
            let worst = worst(&step.written, &apart, floor);
            if worst.0 > worst.1 {
                self.without.insert((step.distinct, rung));
            }
            say(proved(rung, worst, seconds));
        }
        if last == Rung::Naive {
            say(proved(last, (0.0, 0.0, String::new()), 0.0));
        } else {
            // Without the arbiter: memory is to be as this one leaves it.
            self.restore(step, &expected)?;
        }
        say(Event::Busy);
        Ok(())
    }

    /// Contents that the launch of a step left.
    fn hold(&mut self, step: &Step) -> Result<Held, DeviceError> {
        self.holder.hold(&mut self.gpu, self.memory.arena, &step.written)
    }

    fn restore(&mut self, step: &Step, held: &Held) -> Result<(), DeviceError> {
        self.holder.restore(&mut self.gpu, self.memory.arena, &step.written, held)
    }

    /// The largest number of each range that a step reads.
    fn largest_read(&self, step: &Step) -> Result<Vec<f64>, DeviceError> {
        let one = |range: &Range| {
            let bytes = read(&self.gpu, self.memory.arena + range.at, range.bytes)?;
            Ok(largest(range.dtype, &bytes))
        };
        step.read.iter().map(one).collect()
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
    // Short periods together: each copy is a call.
    let times = (NUMBERS as u64 / period.max(1)).clamp(1, fill.elements.div_ceil(period.max(1)).max(1));
    let bytes = bytes.repeat(times as usize);
    let all = fill.elements * fill.dtype.bytes();
    let once = (bytes.len() as u64).min(all);
    gpu.write(arena + fill.at, &bytes[..once as usize])?;
    gpu.repeat(arena + fill.at, once, all)
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
    let (all, at) = (DType::Packed(packed).room(blocks.elements), memory.place(blocks.at));
    let once = (bytes.len() as u64).min(all);
    gpu.write(at, &bytes[..once as usize])?;
    gpu.repeat(at, once, all)
}
