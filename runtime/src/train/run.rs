//! The loop.
//!
//! *In*: a [`Prepared`] model, data, a run folder, perhaps a checkpoint. *Out*: a trained model in
//! the folder and an [`Outcome`]. *Promise*: the bits after step `n` are a function of
//! specification, data and seed, however often the run was cut off before: a step reads nothing but
//! the tensors, the data cursor and its own number, and all three are in a checkpoint.
//! Lines of metrics and events after a checkpoint are dropped when it is continued, and written
//! again.
//!
//! Several ranks run the loop together. Each reads the whole batch of a step and computes
//! micro-batches of its own; gradients are summed over the group during the backward of the last of
//! these, selection counts before the norm, losses with them, so that every rank takes the same
//! decisions and the same update. Rank 0 alone has a folder, and hands the others weights and state
//! when it begins. A checkpoint is copied in memory between two steps, and written while the next
//! ones are taken. Rank 0 writes what every rank has; of what is cut over the ranks each writes its
//! part into the folder of the run, and rank 0 makes one checkpoint of the parts once all have
//! said, with the figures of a step, that theirs is on disk. Any number of ranks that divides the
//! micro-batches goes on with it, with weights or states cut or whole.

use super::error::TrainError;
use super::event::{Event, Watcher};
use super::folder::{LOCK, RunFolder};
use super::guard::Verdict;
use super::health::{self, Health};
use super::ledger::Ledger;
use super::metrics::{Balance, EvaluationLine, Lines, SkippedLine, StepLine};
use super::pace::Pace;
use super::preferences::Reference;
use super::prepare::Prepared;
use super::schedule::Interval;
use super::teacher::{self, Given, Teacher};
use super::tensorboard::Events;
use super::writing::{Seal, Snapshot, Writing, Written};
use super::{changes, schedule, signal};
use crate::checkpoint::parts::{Filed, Holding, Mesh};
use crate::checkpoint::safetensors::{Entry, Tensors};
use crate::checkpoint::{Binding, Checkpoint, Checkpoints, Keep, State, VERSION, Weights};
use crate::evaluate;
use crate::generate::{Cached, NextLogits};
use crate::model::{Model, Scale};
use crate::train::sample;
use dreamc_compiler::architecture::{Architecture, components};
use dreamc_compiler::bind::Owner;
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::count::Counts;
use dreamc_compiler::count::executed::{Masks, executed};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{ProgramKey, Task};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::{Batch, Batches, Dataset};
use dreamc_device::group::{Group, GroupError};
use dreamc_device::machine;
use dreamc_device::{Device, Instrument};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Component;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Steps between looks at the balance of experts, for which the device has to be read.
const BALANCE: u64 = 10;

/// Problems of each difficulty that an evaluation before the last asks, at the most.
const EXAMPLES: u64 = 32;

/// Between two looks whether the run's folder is still there.
const LOOK: Duration = Duration::from_secs(1);

/// Parts of a run.
pub struct Setup<'a> {
    /// The checked specification.
    pub spec: &'a Spec,
    /// Its resolved text, as it is kept in the folder.
    pub text: &'a str,
    /// Where it runs.
    pub device: &'a dyn Device,
    /// The data.
    pub dataset: &'a Dataset,
    /// The ranks that train together, for as many as which the model was prepared.
    pub group: Group,
    /// The folder, of rank 0; the other ranks write nothing.
    pub folder: Option<&'a RunFolder>,
    /// Begin with these weights in place of random ones.
    pub base: Option<Weights>,
    /// Continue from here.
    pub from: Option<Checkpoint>,
    /// Continue even where specification or data have changed.
    pub allow_changes: bool,
    /// Compare the multiply-adds of every micro-batch with those its program should execute.
    pub count: bool,
}

/// Why the loop ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// All steps were taken.
    Finished,
    /// The validation loss no longer improved.
    Early,
    /// A signal asked for it; the run can be continued.
    Interrupted(&'static str),
}

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// Why.
    pub stop: Stop,
    /// Its account.
    pub ledger: Ledger,
    /// The last evaluation, where there was one.
    pub evaluation: Option<EvaluationLine>,
}

/// Trains until the end or until asked to stop. The other ranks of a group end where one fails.
pub fn run(prepared: Prepared, setup: Setup, watcher: &mut dyn Watcher) -> Result<Outcome, TrainError> {
    let group = setup.group.clone();
    let failed = |error: &TrainError| group.fail(&error.to_string());
    let mut runner = Runner::new(prepared, setup, watcher).inspect_err(failed)?;
    // The others hear of a failure before the folder that they write in is removed.
    let outcome = go(&mut runner).inspect_err(failed)?;
    drop(runner);
    // Rank 0 may still fail where the others are done.
    group.barrier()?;
    Ok(outcome)
}

fn go(runner: &mut Runner) -> Result<Outcome, TrainError> {
    let result = runner.train();
    let status = match &result {
        Ok(Stop::Finished) => "finished",
        Ok(Stop::Early) => "stopped early",
        Ok(Stop::Interrupted(_)) => "interrupted",
        Err(_) => "failed",
    };
    let ledger = runner.ledger(status);
    let written = runner.write_ledger(&ledger);
    let stop = result?;
    written?;
    Ok(Outcome { stop, ledger, evaluation: runner.evaluation.take() })
}

struct Runner<'a> {
    setup: Setup<'a>,
    watcher: &'a mut dyn Watcher,
    model: Model,
    scorer: Option<Model>,
    writer: Option<Cached>,
    observer: Option<Model>,
    teacher: Option<Teacher>,
    teacher_flops_per_token: Option<f64>,
    /// Bytes of the teacher on the device.
    teacher_memory: u64,
    batches: Batches,
    /// Of the pairs, where the run learns from preferences.
    reference: Option<Reference>,
    state: State,
    /// The pace of all ranks.
    pace: Pace,
    /// The files, of rank 0.
    record: Option<Record<'a>>,
    pooled: Pooled,
    evaluation: Option<EvaluationLine>,
    /// The checkpoint that is being written. Ended before the record, whose folder is locked.
    writing: Writing,
    /// The last step whose checkpoint was begun.
    saved: u64,
    /// When that was, or the run began, and when the next is due by the clock.
    saved_at: Instant,
    interval: Option<Interval>,
    looked: Instant,
    /// Tensors of the model that a checkpoint holds, and the base that holds the others.
    kept: Vec<Entry>,
    base: Option<Binding>,
    speed: f64,
    narrow: Narrow,
    rewriting: Rewriting,
    declared: Option<Counts>,
    rewritten: Vec<(String, usize)>,
}

/// News of all ranks at the last step.
#[derive(Default)]
struct Pooled {
    /// A wish to stop that a rank had.
    signal: Option<&'static str>,
    /// Whether rank 0 wished for a checkpoint.
    late: bool,
    /// Whether all had their shares of the checkpoint under way on disk.
    filed: bool,
}

/// The files of a run.
struct Record<'a> {
    folder: &'a RunFolder,
    metrics: Lines,
    samples: Lines,
    events: Events,
}

impl Record<'_> {
    /// Makes what was written durable.
    fn sync(&mut self) -> std::io::Result<()> {
        self.metrics.sync().and_then(|()| self.events.sync()).and_then(|()| self.samples.sync())
    }
}

/// A rank's part of the figures of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Part {
    loss: f32,
    auxiliary: f32,
    /// The part of a teacher.
    taught: f32,
    multiply_adds: u64,
    /// Multiply-adds of the teacher.
    teacher: u64,
    /// Seconds of its micro-batches, without waiting for others.
    seconds: f32,
    /// A wish to stop: 0 for none.
    signal: u8,
    /// Whether a checkpoint is due by the clock.
    late: bool,
    /// Whether its share of the checkpoint under way is on disk.
    filed: bool,
}

/// Bytes of the figures of a step, the loss first, as ranks exchange them.
pub const FIGURES: usize = 3 * 4 + 2 * 8 + 4 + 3;

impl Part {
    fn bytes(self) -> Vec<u8> {
        let floats = [self.loss, self.auxiliary, self.taught].map(f32::to_le_bytes).concat();
        let work = [self.multiply_adds, self.teacher].map(u64::to_le_bytes).concat();
        let wishes = [self.signal, u8::from(self.late), u8::from(self.filed)];
        [&floats[..], &work, &self.seconds.to_le_bytes(), &wishes].concat()
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        let (loss, rest) = bytes.split_first_chunk()?;
        let (auxiliary, rest) = rest.split_first_chunk()?;
        let (taught, rest) = rest.split_first_chunk()?;
        let (multiply_adds, rest) = rest.split_first_chunk()?;
        let (teacher, rest) = rest.split_first_chunk()?;
        let (seconds, rest) = rest.split_first_chunk()?;
        let [signal, late, filed] = *rest else { return None };
        Some(Part {
            loss: f32::from_le_bytes(*loss),
            auxiliary: f32::from_le_bytes(*auxiliary),
            taught: f32::from_le_bytes(*taught),
            multiply_adds: u64::from_le_bytes(*multiply_adds),
            teacher: u64::from_le_bytes(*teacher),
            seconds: f32::from_le_bytes(*seconds),
            signal,
            late: late > 0,
            filed: filed > 0,
        })
    }
}

impl<'a> Runner<'a> {
    fn new(
        prepared: Prepared,
        mut setup: Setup<'a>,
        watcher: &'a mut dyn Watcher,
    ) -> Result<Self, TrainError> {
        let train = &setup.spec.train;
        let spec_hash = blake3::hash(setup.text.as_bytes()).to_hex().to_string();
        let data_hash = setup.dataset.hash();
        let group = &setup.group;
        if prepared.ranks != group.size() || group.leads() != setup.folder.is_some() {
            let (for_ranks, size) = (prepared.ranks, group.size());
            return Err(TrainError::Recipe(format!(
                "prepared for {for_ranks} ranks, one of which writes; there are {size}"
            )));
        }
        let mut model = Model::of_rank(setup.device, prepared.compiled, group)?;
        model.session().instrument(Instrument { count: true, time: false });
        let scorer = prepared.scorer.map(|c| model.beside(c)).transpose()?;
        let writer = prepared.writer.map(|c| Cached::over(model.beside(c)?)).transpose()?;
        let observer = prepared.observer.map(|c| model.beside(c)).transpose()?;
        let teacher_flops_per_token = teacher_flops(&prepared.teacher, setup.spec);
        let mut teacher = match prepared.teacher {
            Some(plan) => Some(Teacher::load(plan, setup.spec, setup.device, &setup.dataset.tokenizer)?),
            None => None,
        };
        let teacher_memory = teacher.as_mut().map_or(0, |teacher| teacher.memory().total);
        let mut kept = model.entries();
        let (mut bound, mut states, mut donor_flops) = (None, None, None);
        let mut goes_on = None;
        let parted = group.size() > 1 && cut(&model, &kept).contains(&true);
        if parted {
            seen(group, setup.folder)?;
        }
        let begins = setup.from.is_none();
        if group.leads() && model.is_shared() {
            model.hand_to(group);
        }
        let mut state = match setup.from.take() {
            // Rank 0 has what the run begins with.
            _ if !group.leads() => State::default(),
            None => {
                model.initialise(train.seed)?;
                if let Some(base) = setup.base.take() {
                    donor_flops = base.metadata("donor_flops").and_then(|flops| flops.parse().ok());
                    let new = model.begin_from(&base)?;
                    // Adapters begin with every run.
                    let said: Vec<&str> =
                        new.iter().map(String::as_str).filter(|name| !model.adapts(name)).collect();
                    if !said.is_empty() {
                        watcher.tell(&Event::Note(&format!("begin anew: {}", said.join(", "))));
                    }
                    let all = kept.len();
                    kept.retain(|(name, _)| model.trains(name) || new.contains(name));
                    bound = (kept.len() < all).then(|| base.binding()).transpose()?;
                }
                State { version: VERSION, donor_flops, spec_hash, data_hash, ..State::default() }
            }
            Some(from) => {
                if !setup.allow_changes {
                    changes::refuse(&from, setup.text, &data_hash)?;
                }
                let mut all = from.state.changes.clone();
                if let Some(change) = changes::of(&from, setup.text) {
                    if let (Some(folder), Some(was)) = (setup.folder, from.model.metadata("spec")) {
                        folder.keep_earlier(change.after_step, was)?;
                    }
                    all.push(change);
                }
                model.check_optimizer(&from.optimizer)?;
                goes_on = Some(from.folder);
                states = Some(from.optimizer);
                bound = Binding::of(&from.model);
                if bound.is_some() {
                    kept.retain(|(name, _)| model.trains(name) || from.model.stored(name).is_some());
                }
                model.restore(&Weights::complete(from.model, None)?)?;
                State { spec_hash, data_hash, changes: all, ..from.state }
            }
        };
        share(group, &mut model, (&mut state, &mut kept), states.as_ref())?;
        // Every rank reads its own part of what is cut; rank 0 has that of the model.
        if parted && let Some(from) = reopen(group, goes_on)? {
            model.restore_part(&from.model)?;
            model.restore_part(&from.optimizer)?;
        } else if let (true, Some(states)) = (parted, &states) {
            model.restore_part(states)?;
        }
        let batches = setup.dataset.train(state.cursor.clone())?;
        let reference = train.dpo.map(|_| reference(&setup, &mut model, begins, watcher)).transpose()?;
        let record = setup.folder.map(|folder| open(folder, &state, setup.spec, &model)).transpose()?;
        let saved = state.step;
        let interval = Interval::new(train.checkpoint.minutes);
        let runner = Runner {
            setup,
            watcher,
            model,
            scorer,
            writer,
            observer,
            teacher,
            teacher_flops_per_token,
            teacher_memory,
            batches,
            reference,
            state,
            pace: Pace::default(),
            record,
            pooled: Pooled::default(),
            evaluation: None,
            writing: Writing::default(),
            saved,
            saved_at: Instant::now(),
            interval,
            looked: Instant::now(),
            kept,
            base: bound,
            speed: 0.0,
            narrow: prepared.narrow,
            rewriting: prepared.rewriting,
            declared: prepared.declared,
            rewritten: prepared.rewritten,
        };
        runner.write_ledger(&runner.ledger("running"))?;
        Ok(runner)
    }

    fn train(&mut self) -> Result<Stop, TrainError> {
        let train = self.setup.spec.train.clone();
        signal::catch();
        while self.state.step < train.steps {
            let alone = self.setup.group.size() == 1;
            if let Some(name) = if alone { signal::caught() } else { self.pooled.signal } {
                self.save()?;
                self.written(true)?;
                return Ok(Stop::Interrupted(name));
            }
            self.step()?;
            self.written(false)?;
            if let (Some(record), true) = (&self.record, self.looked.elapsed() >= LOOK) {
                record.folder.check()?;
                self.looked = Instant::now();
            }
            let step = self.state.step;
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            let mut best = false;
            if due(train.evaluate.every) && step < train.steps {
                best = self.evaluate()?;
                if train.patience.is_some_and(|p| p > 0 && self.state.stale >= p) {
                    self.finish()?;
                    return Ok(Stop::Early);
                }
            }
            let late = if alone { self.late() } else { self.pooled.late };
            if (due(train.checkpoint.every) || late || (best && train.checkpoint.best)) && step < train.steps
            {
                self.save()?;
            }
        }
        self.finish()?;
        Ok(Stop::Finished)
    }

    /// Whether a checkpoint is due by the clock.
    fn late(&self) -> bool {
        self.interval.is_some_and(|i| i.due(self.saved_at.elapsed()))
    }

    /// The figures of a step over all ranks, in their order; also what they wish for next.
    fn pool(&mut self, own: Part) -> Result<Part, TrainError> {
        let group = &self.setup.group;
        if group.size() == 1 {
            return Ok(own);
        }
        let signal = signal::caught().map_or(0, |name| 1 + u8::from(name == "SIGTERM"));
        let filed = self.writing.on_disk(false)?;
        let own = Part { signal, late: group.leads() && self.late(), filed, ..own };
        let (mut all, mut seconds) = (Part { filed: true, ..Part::default() }, vec![]);
        for (rank, bytes) in group.gather(&own.bytes())?.iter().enumerate() {
            let part = Part::of(bytes).ok_or(GroupError::Ended { rank: rank as u64 })?;
            seconds.push(f64::from(part.seconds));
            all = Part {
                loss: all.loss + part.loss,
                auxiliary: all.auxiliary + part.auxiliary,
                taught: all.taught + part.taught,
                multiply_adds: all.multiply_adds + part.multiply_adds,
                teacher: all.teacher + part.teacher,
                seconds: all.seconds.max(part.seconds),
                signal: all.signal.max(part.signal),
                late: all.late || part.late,
                filed: all.filed && part.filed,
            };
        }
        if let Some(words) = self.pace.step(&seconds)
            && self.setup.group.leads()
        {
            self.watcher.tell(&Event::Note(&words));
        }
        let signal = [None, Some("Ctrl-C"), Some("SIGTERM")][usize::from(all.signal.min(2))];
        self.pooled = Pooled { signal, late: all.late, filed: all.filed };
        Ok(all)
    }

    /// The last evaluation and the last checkpoint.
    fn finish(&mut self) -> Result<(), TrainError> {
        let cut = self.batches.too_long();
        if cut > 0 {
            let what = format!(
                "{cut} documents were longer than a row and were cut, or left out where no answer fitted"
            );
            self.watcher.tell(&Event::Note(&what));
        }
        self.conclude()?;
        self.save()?;
        self.written(true)
    }

    /// Takes note of a checkpoint that has been written meanwhile, or waits for it.
    fn written(&mut self, wait: bool) -> Result<(), TrainError> {
        // All ranks are here at once: each says what it has, and rank 0 makes a checkpoint of it.
        if self.writing.is_shared() && (wait || self.pooled.filed) {
            self.writing.on_disk(true)?;
            let unread =
                |error: serde_json::Error| GroupError::Meeting(format!("the parts of a rank: {error}"));
            let own = serde_json::to_vec(&self.writing.filed()).map_err(unread)?;
            let all = self.setup.group.gather(&own)?;
            let all = all.iter().map(|filed| serde_json::from_slice::<Vec<Filed>>(filed).map_err(unread));
            self.writing.seal(all.collect::<Result<Vec<_>, _>>()?.concat())?;
        }
        let found = if wait { self.writing.wait()? } else { self.writing.over()? };
        let Some(Written { step, path, took }) = found else { return Ok(()) };
        if let Some(interval) = &mut self.interval {
            interval.took(took);
        }
        self.watcher.tell(&Event::Saved { step, path: &path });
        Ok(())
    }

    /// One optimizer step.
    fn step(&mut self) -> Result<(), TrainError> {
        let train = &self.setup.spec.train;
        let begun = Instant::now();
        let step = self.state.step + 1;
        let (rows, micro) = (train.batch as usize, self.model.batch());
        let Some(mut batch) = self.batches.take(rows)? else {
            return Err(TrainError::Recipe("the data has no rows to train on".into()));
        };
        if let Some(reference) = &self.reference {
            reference.give(&mut batch)?;
        }
        let targets = batch.learned();
        let parts = rows / micro.max(1);
        // Preferences have a mean over pairs.
        let terms = if self.reference.is_some() { rows as u64 / 2 } else { targets };
        let own_loss = teacher::own_loss(self.setup.spec, step);
        let scale = Scale { loss: own_loss / terms.max(1) as f32, auxiliary: 1.0 / parts.max(1) as f32 };
        self.model.begin_step()?;
        let depth = schedule::depth(self.setup.spec, step);
        let (mut multiply_adds, mut waited, worked) = (0, 0.0, Instant::now());
        let mut given = Given::default();
        let own = self.setup.group.share(parts);
        let own = own.ok_or_else(|| TrainError::Recipe(format!("{parts} micro-batches cannot be shared")))?;
        let last = own.end.saturating_sub(1) * micro;
        for first in own.map(|part| part * micro) {
            if first == last {
                self.model.last();
            }
            let part = batch.slice(first, micro);
            if let Some(teacher) = &mut self.teacher {
                let part = teacher.give(&mut self.model, &part, (step, targets))?;
                given.constant += part.constant;
                given.multiply_adds += part.multiply_adds;
            }
            self.model.at(step, first as u64);
            let stats = self.model.backward(&part, scale, depth)?;
            let executed = stats.multiply_adds();
            waited += stats.waited;
            if self.setup.count {
                self.compare(step, &part, depth, executed)?;
            }
            multiply_adds += executed;
        }
        let (own, own_auxiliary) = (self.model.loss()?, self.model.auxiliary()?);
        let own_taught = self.model.taught()?.map(|taught| taught + given.constant as f32);
        let own = Part {
            loss: own,
            auxiliary: own_auxiliary.unwrap_or(0.0),
            taught: own_taught.unwrap_or(0.0),
            multiply_adds,
            teacher: given.multiply_adds,
            seconds: (worked.elapsed().as_secs_f64() - waited).max(0.0) as f32,
            ..Part::default()
        };
        let pooled = self.pool(own)?;
        let loss = pooled.loss + pooled.taught;
        let (norm, multiply_adds) = (self.model.norm()?, pooled.multiply_adds);
        let taught = own_taught.map(|_| f64::from(pooled.taught));
        let auxiliary = own_auxiliary.map(|_| f64::from(pooled.auxiliary * scale.auxiliary));
        let verdict = self.state.guard.judge(train, loss, norm);
        let mut balance = None;
        match &verdict {
            Verdict::Take => {
                if step.is_multiple_of(BALANCE) {
                    balance = self.balance()?;
                }
                self.model.update(&schedule::scalars(train, step))?;
            }
            Verdict::Skip(_) => {
                self.state.skipped += 1;
                self.model.drop_step()?;
            }
            Verdict::Stop(what, value) => return Err(self.not_finite(step, what, *value)?),
        }

        let seconds = begun.elapsed().as_secs_f64();
        let tokens = (rows * batch.sequence) as u64;
        let state = &mut self.state;
        state.step = step;
        state.tokens += tokens;
        state.targets += targets;
        state.multiply_adds += multiply_adds;
        state.teacher_multiply_adds += pooled.teacher;
        state.train_seconds += seconds;
        // A moving average that forgets the slow first steps soon.
        let now_speed = tokens as f64 / seconds.max(1e-9);
        self.speed = if self.speed == 0.0 { now_speed } else { 0.9 * self.speed + 0.1 * now_speed };
        if let Verdict::Skip(reason) = verdict {
            let line = SkippedLine { step, skipped: reason };
            self.log(|metrics, events| {
                metrics.push(&line)?;
                events.text(now(), step, "skipped", &line.skipped)
            })?;
            self.watcher.tell(&Event::Note(&format!("step {step} is left out: {}", line.skipped)));
            return Ok(());
        }
        let line = StepLine {
            step,
            loss: f64::from(loss),
            taught,
            auxiliary,
            learning_rate: schedule::learning_rate(train, step),
            norm: f64::from(norm),
            tokens: state.tokens,
            seconds: state.train_seconds,
            depth,
            balance,
        };
        let left = (train.steps - step) as f64 * tokens as f64 / self.speed;
        self.log(|metrics, events| {
            metrics.push(&line)?;
            let scalars = [
                ("loss", Some(line.loss)),
                ("taught", line.taught),
                ("auxiliary", line.auxiliary),
                ("learning_rate", Some(line.learning_rate)),
                ("norm", Some(line.norm)),
                ("tokens", Some(line.tokens as f64)),
                ("seconds", Some(line.seconds)),
                ("tokens_per_second", Some(now_speed)),
                ("depth", line.depth.map(|d| d as f64)),
                ("balance/violation", line.balance.map(|b| b.violation)),
                ("balance/idle", line.balance.map(|b| b.idle)),
            ];
            let scalars: Vec<_> = scalars.into_iter().filter_map(|(k, v)| Some((k, v?))).collect();
            events.scalars(now(), step, &scalars)
        })?;
        self.watcher.tell(&Event::Step { line: &line, steps: train.steps, speed: self.speed, left });
        Ok(())
    }

    /// How evenly the experts were chosen in this step, in the mixture where it is least even.
    fn balance(&self) -> Result<Option<Balance>, TrainError> {
        let tensors = &self.model.compiled().tensors;
        if tensors.iter().all(|t| t.counts.is_none()) {
            return Ok(None);
        }
        let components = components(&self.setup.spec.model);
        let experts = |t: &Tensor| match t.owner {
            Owner::Component(i) => {
                matches!(components.get_index(i as usize), Some((_, Component::Experts(_))))
            }
            _ => false,
        };
        let mut worst: Option<Balance> = None;
        for t in tensors.iter().filter(|t| t.counts.is_some() && experts(t)) {
            if let Some(found) = Balance::of(&self.model.get(&format!("{}.counts", t.name))?) {
                worst = worst.filter(|w| w.violation >= found.violation).or(Some(found));
            }
        }
        Ok(worst)
    }

    /// Stops where the device did more or less work than its program has.
    fn compare(&self, step: u64, part: &Batch, depth: Option<u64>, found: u64) -> Result<(), TrainError> {
        let program = ProgramKey::first(Task::Backward { depth, last: false });
        let masks = Masks { positions: &part.positions, key_positions: &[], segments: &part.segments };
        let plan = &self.model.compiled().plan;
        let expected = executed(plan, program, &|launch| masks.extents(plan, launch))?;
        let found = u128::from(found);
        // Where experts that do nothing were chosen, what was counted is the most there can be.
        if found == expected.multiply_adds || (expected.open() && found < expected.multiply_adds) {
            return Ok(());
        }
        Err(TrainError::Count { step, program, found, expected: expected.multiply_adds })
    }

    /// The origin of a NaN or an infinity. It has not reached the weights.
    fn not_finite(&mut self, step: u64, what: &'static str, value: f32) -> Result<TrainError, TrainError> {
        let bad = |values: &[f32]| values.iter().any(|v| !v.is_finite());
        let tensors = self.model.compiled().tensors.clone();
        let mut tensor = None;
        for t in &tensors {
            if bad(&self.model.get(&t.name)?) {
                tensor = Some(t.name.clone());
                break;
            }
        }
        for t in &tensors {
            if tensor.is_none() && self.model.gradient(t)?.is_some_and(|g| bad(&g)) {
                tensor = Some(format!("the gradient of {}", t.name));
            }
        }
        // A rank sees its own part of what is cut: the first that found something names it.
        if self.model.is_shared() {
            let all = self.setup.group.gather(tensor.unwrap_or_default().as_bytes())?;
            let found = all.iter().find(|name| !name.is_empty());
            tensor = found.map(|name| String::from_utf8_lossy(name).into_owned());
        }
        Ok(TrainError::NotFinite { step, what, value, tensor })
    }

    /// Measures the model on a sample; says whether it is the best so far.
    fn evaluate(&mut self) -> Result<bool, TrainError> {
        self.watcher.tell(&Event::Busy("evaluating"));
        let rows = evaluate::asked_rows(&self.setup.spec.train);
        let line = self.measure(rows, self.setup.spec.eval.examples.min(EXAMPLES))?;
        self.samples()?;
        let best = self.judge(&line);
        self.enter(&line)?;
        self.evaluation = Some(line);
        Ok(best)
    }

    /// Measures the model on all that is held out, which is what the run is worth. Where that is
    /// more than the evaluations before were over, there is one of those, too: the last point of
    /// their curve.
    fn conclude(&mut self) -> Result<(), TrainError> {
        let Setup { spec, dataset, .. } = self.setup;
        self.watcher.tell(&Event::Busy("evaluating"));
        let asked = evaluate::asked_rows(&spec.train);
        let rows = dataset.most_rows(asked);
        let mut whole = EvaluationLine { complete: true, ..self.measure(rows, spec.eval.examples)? };
        self.look_at_written(&mut whole)?;
        // Killed between its last checkpoint and its end, a run finds this evaluation in its
        // metrics already.
        if self.state.concluded != Some(self.state.step) {
            self.samples()?;
            // A run that stops early was evaluated just now.
            let has_point = self.evaluation.as_ref().is_some_and(|e| e.step == whole.step);
            let part = spec.train.evaluate.every > 0
                && (rows > asked || (self.scorer.is_some() && spec.eval.examples > EXAMPLES));
            let sample = match part && !has_point {
                true => Some(self.measure(asked, spec.eval.examples.min(EXAMPLES))?),
                false => None,
            };
            match sample.filter(|s| (s.targets, s.problems) != (whole.targets, whole.problems)) {
                Some(sample) => {
                    self.judge(&sample);
                    self.enter(&sample)?;
                }
                None if has_point => {}
                None => drop(self.judge(&whole)),
            }
            self.enter(&whole)?;
            self.state.concluded = Some(self.state.step);
        }
        for warning in whole.health.iter().flat_map(Health::warnings) {
            self.watcher.tell(&Event::Note(&format!("warning: {warning}")));
        }
        self.evaluation = Some(whole);
        Ok(())
    }

    /// The loss over `rows` held-out rows, exact match of `examples` problems of each difficulty,
    /// and the health of routers.
    fn measure(&mut self, rows: u64, examples: u64) -> Result<EvaluationLine, TrainError> {
        let Setup { spec, dataset, ref group, .. } = self.setup;
        let mut line = EvaluationLine { step: self.state.step, ..EvaluationLine::default() };
        if let Some(loss) = evaluate::shared(&mut self.model, dataset, rows, group)? {
            line.validation_loss = Some(loss.mean());
            line.targets = Some(loss.targets);
            // Generated answers are not text to be compressed; bits per byte of them would mean
            // nothing.
            line.bits_per_byte = if dataset.tasks().next().is_none() { loss.bits_per_byte() } else { None };
        }
        if let (Some(reference), Some(dpo)) = (&self.reference, spec.train.dpo) {
            line.preferred = reference.measure(&mut self.model, dataset, dpo, rows)?;
        }
        // Rank 0 asks the problems and looks at the routers; the others hear how many were asked.
        // Where layers gather their weights all of them do.
        let looks = group.leads() || self.model.is_shared();
        if let (Some(scorer), true) = (&mut self.scorer, looks) {
            let mut found = vec![];
            for task in dataset.tasks() {
                let mask = spec.data.as_ref().is_some_and(|d| d.document_mask);
                let (tokenizer, seed) = (&dataset.tokenizer, spec.train.seed);
                found.extend(evaluate::exact_match(scorer, tokenizer, task, seed, mask, examples)?);
            }
            line.exact_match = evaluate::share(&found);
            line.problems = Some(found.iter().map(|d| d.asked).sum());
            line.by_difficulty = found
                .iter()
                .filter(|d| d.asked > 0)
                .map(|d| (d.steps, d.right as f64 / d.asked as f64))
                .collect();
        }
        if let (Some(observer), true) = (&mut self.observer, looks) {
            let rows = (health::TOKENS / observer.sequence().max(1) as u64).max(1);
            let held = match dataset.drawn(rows)? {
                Some(held) => held,
                None => dataset.shown()?.at_most(rows),
            };
            line.health = Health::look(observer, &spec.model, None, held)?;
        }
        if self.scorer.is_some() {
            let asked = group.broadcast(0, &line.problems.unwrap_or(0).to_le_bytes())?;
            line.problems = asked.first_chunk().map(|n| u64::from_le_bytes(*n));
        }
        Ok(line)
    }

    /// Adds what wrapped parts process of tokens that the model writes, where it has such parts and
    /// writes.
    fn look_at_written(&mut self, line: &mut EvaluationLine) -> Result<(), TrainError> {
        let Setup { spec, dataset, .. } = self.setup;
        let (Some(health), Some(observer)) = (&mut line.health, &mut self.observer) else { return Ok(()) };
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let held = match dataset.drawn(health::TEXTS)? {
            Some(held) => held,
            None => dataset.shown()?.at_most(health::TEXTS),
        };
        let (writing, sampling) =
            ((writer as &mut dyn NextLogits, &*dataset.tokenizer), Health::sampling(spec));
        Ok(health.write(observer, &spec.model, None, writing, (held, sampling))?)
    }

    /// Whether an evaluation is the best so far, which is remembered.
    fn judge(&mut self, line: &EvaluationLine) -> bool {
        let measured = line.preferred.map(|p| p.loss).or(line.validation_loss);
        let Some(loss) = measured else { return false };
        let best = loss.is_finite() && self.state.best.is_none_or(|(_, b)| loss < b);
        self.state.stale = if best { 0 } else { self.state.stale + 1 };
        if best {
            self.state.best = Some((line.step, loss));
        }
        best
    }

    /// Puts an evaluation into the files, and tells of it.
    fn enter(&mut self, line: &EvaluationLine) -> Result<(), TrainError> {
        let of = if line.complete { "held_out" } else { "validation" };
        let mut scalars = vec![
            (format!("{of}/loss"), line.validation_loss),
            (format!("{of}/preference_loss"), line.preferred.map(|p| p.loss)),
            (format!("{of}/preferred"), line.preferred.map(|p| p.share)),
            (format!("{of}/margin"), line.preferred.map(|p| p.margin)),
            (format!("{of}/targets"), line.targets.map(|n| n as f64)),
            (format!("{of}/bits_per_byte"), line.bits_per_byte),
            (format!("{of}/exact_match"), line.exact_match),
            (format!("{of}/problems"), line.problems.map(|n| n as f64)),
        ];
        let by = line.by_difficulty.iter();
        scalars.extend(by.map(|(steps, share)| (format!("{of}/exact_match/{steps}_steps"), Some(*share))));
        let figures = line.health.iter().flat_map(Health::figures);
        scalars.extend(figures.map(|(name, value)| (format!("routers/{name}"), Some(value))));
        let scalars: Vec<(&str, f64)> =
            scalars.iter().filter_map(|(k, v)| Some((k.as_str(), (*v)?))).collect();
        self.log(|metrics, events| {
            metrics.push(line)?;
            events.scalars(now(), line.step, &scalars)
        })?;
        self.watcher.tell(&Event::Evaluated(line));
        Ok(())
    }

    /// Lets the model write, for people to look at.
    fn samples(&mut self) -> Result<(), TrainError> {
        let Setup { spec, dataset, .. } = self.setup;
        let looks = self.record.is_some() || self.model.is_shared();
        let (Some(writer), true) = (&mut self.writer, looks) else { return Ok(()) };
        let step = self.state.step;
        for (i, sample) in sample::write(writer, dataset, spec)?.iter().enumerate() {
            if let Some(record) = &mut self.record {
                let path = record.folder.samples();
                let pushed = record.samples.push(&sample.line(step));
                pushed.map_err(|error| TrainError::Io { path, error })?;
            }
            let (prompt, text, answer) = (&*sample.prompt, &*sample.text, sample.answer.as_deref());
            let right = answer.map_or(String::new(), |a| format!("\n\nright: {a}"));
            let shown = format!("{prompt}**{text}**{right}");
            self.log(|_, events| events.text(now(), step, &format!("samples/{i}"), &shown))?;
            self.watcher.tell(&Event::Sample { step, prompt, text, answer });
        }
        Ok(())
    }

    fn log(
        &mut self,
        write: impl FnOnce(&mut Lines, &mut Events) -> std::io::Result<()>,
    ) -> Result<(), TrainError> {
        let Some(record) = &mut self.record else { return Ok(()) };
        write(&mut record.metrics, &mut record.events)
            .map_err(|error| TrainError::Io { path: record.folder.metrics(), error })
    }

    /// Refuses where the ranks no longer have one model: what rank 0 saves would not be what the
    /// others train. So it is with experts that several teams have.
    fn same(&self) -> Result<(), TrainError> {
        if self.setup.group.size() == 1 {
            return Ok(());
        }
        let mut hasher = blake3::Hasher::new();
        let whole = |(name, _): &&Entry| self.model.part(name).is_none();
        for (name, _) in self.model.entries().iter().chain(&self.model.optimizer_entries()).filter(whole) {
            hasher.update(bytemuck::cast_slice(&self.model.get(name)?));
        }
        let group = &self.setup.group;
        group.agree(&[("model after the step", hasher.finalize().to_hex().to_string())])?;
        // Experts of several teams: their owners moved them apart from one another.
        let Some(team) = self.model.team().filter(|team| *team < group.size()) else { return Ok(()) };
        let mut hasher = blake3::Hasher::new();
        let owned = |name: &str| self.model.tensor_of(name).is_some_and(|tensor| tensor.owners > 1);
        for (name, _) in self.model.entries().iter().chain(&self.model.optimizer_entries()) {
            if owned(name) && self.model.part(name).is_some() {
                hasher.update(bytemuck::cast_slice(&self.model.get(name)?));
            }
        }
        Ok(group.agree_apart(team, "experts after the step", hasher.finalize().as_bytes())?)
    }

    /// Begins a checkpoint of the step, unless there is one: copies all of it in memory.
    fn save(&mut self) -> Result<(), TrainError> {
        if self.state.step == self.saved && self.state.step > 0 {
            return Ok(());
        }
        self.same()?;
        // The one before is whole, or the run ends with its error.
        self.written(true)?;
        self.state.cursor = self.batches.cursor();
        if let Some(record) = &mut self.record {
            record.folder.check()?;
            record.sync().map_err(|error| TrainError::Io { path: record.folder.metrics(), error })?;
            self.state.metrics_bytes = record.metrics.bytes();
            self.state.events_bytes = record.events.bytes();
            self.state.samples_bytes = record.samples.bytes();
        }
        let seal = self.record.as_ref().map(|record| self.seal(record.folder.checkpoints())).transpose()?;
        let folder = seal.as_ref().map(|seal| seal.begun.folder.clone());
        if self.parted() {
            let own = folder.as_deref().map_or(&[][..], |folder| folder.as_os_str().as_bytes());
            let folder = PathBuf::from(OsString::from_vec(self.setup.group.broadcast(0, own)?));
            let snapshot = self.snapshot(folder)?;
            self.writing.begin_share(snapshot, seal)?;
        } else if let (Some(seal), Some(folder)) = (seal, folder) {
            let snapshot = self.snapshot(folder)?;
            self.writing.begin(snapshot, seal)?;
        }
        self.saved = self.state.step;
        self.saved_at = Instant::now();
        self.write_ledger(&self.ledger("running"))
    }

    /// Whether several ranks write a checkpoint together, each what it holds.
    fn parted(&self) -> bool {
        self.setup.group.size() > 1 && self.cut().contains(&true)
    }

    /// See [`cut`].
    fn cut(&self) -> [bool; 2] {
        cut(&self.model, &self.kept)
    }

    /// The tensors of these that this rank writes: rank 0 all that is whole, and each its part of
    /// the rest. Of ranks that own the same experts the first do.
    fn holdings(&self, entries: Vec<Entry>) -> Vec<Holding> {
        let rank = self.setup.group.rank();
        let holding = |entry: Entry| match self.model.part(&entry.0) {
            None => (rank == 0).then_some(Holding { entry, range: None }),
            Some(part) => {
                let owners = self.model.tensor_of(&entry.0).map_or(1, |tensor| tensor.owners);
                let writes = (owners == 1 || rank < owners) && !part.is_empty();
                let range = part.start as u64..part.end as u64;
                writes.then_some(Holding { entry, range: Some(range) })
            }
        };
        entries.into_iter().filter_map(holding).collect()
    }

    /// The share of this rank in a checkpoint, in memory.
    fn snapshot(&self, folder: PathBuf) -> Result<Snapshot, TrainError> {
        let holdings = [self.kept.clone(), self.model.optimizer_entries()].map(|all| self.holdings(all));
        let names = holdings.iter().flatten().map(|holding| &holding.entry.0);
        let values = names.map(|name| Ok((name.clone(), self.model.get(name)?)));
        Ok(Snapshot {
            folder,
            step: self.state.step,
            rank: self.setup.group.rank(),
            metadata: self.metadata(),
            values: values.collect::<Result<HashMap<_, _>, TrainError>>()?,
            cut: self.cut(),
            holdings,
        })
    }

    /// Texts kept with the model.
    fn metadata(&self) -> Vec<(String, String)> {
        let step = self.state.step.to_string();
        let mut all = vec![("format", "dreamc"), ("spec", self.setup.text), ("step", &step)];
        all.extend(self.base.iter().flat_map(Binding::metadata));
        all.into_iter().map(|(key, text)| (key.to_string(), text.to_string())).collect()
    }

    /// Begins a checkpoint of the step: what rank 0 makes it with.
    fn seal(&self, checkpoints: Checkpoints) -> Result<Seal, TrainError> {
        let rule = &self.setup.spec.train.checkpoint;
        let best = if rule.best { self.state.best.map(|b| b.0) } else { None };
        Ok(Seal {
            begun: checkpoints.begin(self.state.step)?,
            checkpoints,
            since: Instant::now(),
            state: self.state.clone(),
            mesh: Mesh {
                ranks: self.setup.group.size(),
                shard: self.model.shard().name().into(),
                experts: self.model.team().unwrap_or(1),
            },
            entries: [self.kept.clone(), self.model.optimizer_entries()],
            metadata: self.metadata(),
            keep: Keep { newest: rule.keep, every: rule.keep_every, best },
        })
    }

    fn ledger(&self, status: &str) -> Ledger {
        let (state, declared) = (&self.state, self.declared.as_ref());
        let line = self.evaluation.clone().unwrap_or_default();
        let memory = self.model.memory().total + self.teacher_memory;
        Ledger {
            dreamc: env!("CARGO_PKG_VERSION").into(),
            model: self.setup.spec.model.name.clone(),
            depth: self.model.compiled().depth,
            spec_hash: state.spec_hash.clone(),
            tokenizer_hash: self.setup.dataset.tokenizer.fingerprint().into(),
            data_hash: state.data_hash.clone(),
            seed: self.setup.spec.train.seed,
            device: self.setup.device.name(),
            ranks: self.setup.group.size(),
            precision: self.narrow.name().into(),
            rewriting: self.rewriting.clone(),
            machine: machine::describe(),
            status: status.into(),
            rewritten: self.rewritten.clone(),
            steps: state.step,
            tokens: state.tokens,
            targets: state.targets,
            epochs: self.batches.epochs(),
            changes: state.changes.clone(),
            train_seconds: state.train_seconds,
            parameters: self.model.parameters(),
            declared_flops_per_token: declared.map(|c| c.flops_per_token.training.mean()),
            decode_flops_per_token: declared.map(|c| c.flops_per_token.decode.mean()),
            processed_flops_per_token: self.processed(&line),
            generation_memory: declared.and_then(|c| u64::try_from(c.memory_bytes.generation).ok()),
            executed_flops: 2 * state.multiply_adds,
            donor_flops: state.donor_flops,
            teacher_flops_per_token: self.teacher_flops_per_token,
            teacher_flops: self.teacher.as_ref().map(|_| 2 * state.teacher_multiply_adds),
            peak_memory: memory,
            skipped_steps: state.skipped,
            validation_loss: line.validation_loss,
            validation_targets: line.targets,
            bits_per_byte: line.bits_per_byte,
            exact_match: line.exact_match,
            exact_match_problems: line.problems,
            best: state.best,
        }
    }

    /// FLOPs of a generated token at the shares of tokens that an evaluation saw processed; those
    /// that are declared where nothing is left to routers.
    fn processed(&self, line: &EvaluationLine) -> Option<f64> {
        let seen = line.health.as_ref().and_then(|h| h.flops_per_token);
        let declared = self.declared.as_ref().map(|c| c.flops_per_token.decode.mean());
        let model = &self.setup.spec.model;
        let noop = |c: &Component| matches!(c, Component::Experts(e) if e.noop > 0);
        let routed = self.observer.is_some()
            && (Architecture::new(model, None).is_ok_and(|a| a.skips())
                || components(model).values().any(noop));
        if routed { seen } else { declared }
    }

    fn write_ledger(&self, ledger: &Ledger) -> Result<(), TrainError> {
        let Some(record) = &self.record else { return Ok(()) };
        Ok(record.folder.write("ledger.json", &ledger.text())?)
    }
}

/// Whether tensors of the model, of those that a run keeps, and those of its optimizer are cut over
/// ranks.
fn cut(model: &Model, kept: &[Entry]) -> [bool; 2] {
    let states = model.optimizer_entries();
    [kept, &states].map(|entries| entries.iter().any(|(name, _)| model.part(name).is_some()))
}

/// FLOPs of a teacher's forward, a token of all steps.
fn teacher_flops(plan: &Option<teacher::Plan>, spec: &Spec) -> Option<f64> {
    let (heal, each) = (spec.heal.as_ref()?, plan.as_ref()?.flops_per_token?);
    Some(teacher::Plan::flops_over(heal, each, spec.train.steps))
}

/// The worth of pairs before training: by the weights that the run begins with, else as it was
/// kept.
fn reference(
    setup: &Setup,
    model: &mut Model,
    begins: bool,
    watcher: &mut dyn Watcher,
) -> Result<Reference, TrainError> {
    let (group, hash) = (&setup.group, setup.dataset.hash());
    // The state of rank 0 says whether the run begins, and every rank has its weights.
    let begins = group.broadcast(0, &[u8::from(begins)])?.first() == Some(&1);
    if begins {
        watcher.tell(&Event::Busy("measuring the reference"));
        let reference = Reference::of(model, setup.dataset)?;
        if let Some(folder) = setup.folder {
            reference.write(folder, &hash)?;
        }
        return Ok(reference);
    }
    let own = setup.folder.map(|folder| Reference::open(folder.path(), &hash)).transpose()?;
    Ok(own.unwrap_or_default().share(group)?)
}

/// Opens the files of a run where its checkpoint was.
fn open<'a>(
    folder: &'a RunFolder,
    state: &State,
    spec: &Spec,
    model: &Model,
) -> Result<Record<'a>, TrainError> {
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |error| TrainError::Io { path, error }
    };
    let metrics = Lines::open(&folder.metrics(), state.metrics_bytes).map_err(io(&folder.metrics()))?;
    let samples = Lines::open(&folder.samples(), state.samples_bytes).map_err(io(&folder.samples()))?;
    let mut events =
        Events::open(&folder.events(), state.events_bytes, now()).map_err(io(&folder.events()))?;
    if state.events_bytes == 0 {
        let settings = settings(spec, model);
        events.settings(now(), &settings, &MEASURES).map_err(io(&folder.events()))?;
    }
    Ok(Record { folder, metrics, samples, events })
}

/// Refuses where a rank does not see the run's folder, into which each writes its part of a
/// checkpoint: it has the lock that rank 0 holds.
fn seen(group: &Group, folder: Option<&RunFolder>) -> Result<(), TrainError> {
    let path = folder.map(|folder| absolute(folder.path())).unwrap_or_default();
    let path = PathBuf::from(OsString::from_vec(group.broadcast(0, path.as_os_str().as_bytes())?));
    let lock = std::fs::read(path.join(LOCK)).unwrap_or_default();
    let first = group.broadcast(0, &lock)?;
    let all = group.gather(&[u8::from(!lock.is_empty() && lock == first)])?;
    match all.iter().position(|same| same.first() != Some(&1)) {
        None => Ok(()),
        Some(rank) => Err(TrainError::Recipe(format!(
            "rank {rank} does not see {}, into which each rank writes its part of a checkpoint; \
             name a folder that all ranks see with --out",
            path.display()
        ))),
    }
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf())
}

/// The checkpoint that rank 0 goes on from, on the other ranks.
fn reopen(group: &Group, folder: Option<PathBuf>) -> Result<Option<Checkpoint>, TrainError> {
    let own = folder.map(|folder| absolute(&folder)).unwrap_or_default();
    let path = PathBuf::from(OsString::from_vec(group.broadcast(0, own.as_os_str().as_bytes())?));
    let opens = !group.leads() && !path.as_os_str().is_empty();
    Ok(opens.then(|| Checkpoint::open_verified(&path)).transpose()?)
}

/// Gives all ranks the tensors and the state that rank 0 begins with, the names of the tensors that
/// it saves, and the optimizer's states that it continues, but for what is cut over ranks; those of
/// a new run are zero.
fn share(
    group: &Group,
    model: &mut Model,
    (state, kept): (&mut State, &mut Vec<Entry>),
    states: Option<&Tensors>,
) -> Result<(), TrainError> {
    if group.size() == 1 {
        return Ok(states.map_or(Ok(()), |states| model.restore_optimizer(states))?);
    }
    // Rank 0 handed what is cut as it got it: it has its part of that alone.
    match (model.is_shared(), group.leads()) {
        (true, true) => model.handed()?,
        (true, false) => model.take_handed(group)?,
        (false, _) => {}
    }
    let unread = |error: serde_json::Error| GroupError::Meeting(format!("the state of rank 0: {error}"));
    let text = serde_json::to_vec(state).map_err(unread)?;
    *state = serde_json::from_slice(&group.broadcast(0, &text)?).map_err(unread)?;
    if model.is_shared() {
        let text = serde_json::to_vec(kept).map_err(unread)?;
        *kept = serde_json::from_slice(&group.broadcast(0, &text)?).map_err(unread)?;
    }
    for (name, _) in model.entries() {
        if model.part(&name).is_some() {
            continue;
        }
        let own = if group.leads() { model.get(&name)? } else { vec![] };
        let values = group.broadcast(0, bytemuck::cast_slice(&own))?;
        if !group.leads() {
            model.set(&name, &bytemuck::pod_collect_to_vec::<u8, f32>(&values))?;
        }
    }
    if state.step == 0 {
        return Ok(());
    }
    for (name, _) in model.optimizer_entries() {
        if model.part(&name).is_some() {
            continue;
        }
        let found = states.map(|states| states.get(&name)).transpose()?.flatten();
        let own = found.as_ref().map_or(&[][..], |(_, values)| values.as_slice());
        let values = group.broadcast(0, bytemuck::cast_slice(own))?;
        model.set(&name, &bytemuck::pod_collect_to_vec::<u8, f32>(&values))?;
    }
    Ok(())
}

/// Scalars by which TensorBoard compares runs.
const MEASURES: [&str; 4] = ["loss", "held_out/loss", "held_out/bits_per_byte", "held_out/exact_match"];

/// Settings that TensorBoard shows of a run's recipe and model: values that are no lists or
/// sections of their own.
fn settings(spec: &Spec, model: &Model) -> Vec<(String, serde_json::Value)> {
    let plain = |prefix: &str, value: serde_json::Value| -> Vec<(String, serde_json::Value)> {
        let serde_json::Value::Object(map) = value else { return vec![] };
        let single = |v: &serde_json::Value| v.is_number() || v.is_string() || v.is_boolean();
        map.into_iter().filter(|(_, v)| single(v)).map(|(k, v)| (format!("{prefix}{k}"), v)).collect()
    };
    let section = |value: serde_json::Result<serde_json::Value>| value.unwrap_or_default();
    let mut all = plain("model.", section(serde_json::to_value(&spec.model)));
    all.push(("model.depth".into(), model.compiled().depth.into()));
    all.push(("model.parameters".into(), model.parameters().into()));
    all.extend(plain("train.", section(serde_json::to_value(&spec.train))));
    all
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
