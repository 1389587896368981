//! `dreamc train`: from a specification to a trained model in a folder.

use crate::arguments::{DeviceArguments, RewriteArguments, SpecArguments};
use crate::command::runs;
use clap::{Args, value_parser};
use dreamc_compiler::format::Formats;
use dreamc_compiler::looks_ahead;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::BufferId;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Dataset;
use dreamc_device::Device;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Precision, Shard};
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::model::Memory;
use dreamc_runtime::train::event::Event;
use dreamc_runtime::train::folder::{Place, RunFolder};
use dreamc_runtime::train::preferences::Preferred;
use dreamc_runtime::train::teacher::{Plan, words};
use dreamc_runtime::train::{self, Outcome, Prepared, Setup, Stop, prepare};
use dreamc_study::compare::study;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::{beginning, latest, stored};
use dreamc_study::number::{grouped, many};
use dreamc_study::output::{self, Stream};
use dreamc_study::progress::Progress;
use dreamc_study::ranks;
use dreamc_study::show::{bytes, duration, short, table, times};
use dreamc_study::spec::{open_data, resolved};
use dreamc_study::{note, say, show, transplant};
use std::path::{Path, PathBuf};

/// Train a model; leaves a folder with checkpoints, metrics and a ledger
#[derive(Args)]
#[command(after_help = "\
A specification begins from random weights, or from those it names as `base`; the folder of a run or an import begins from the
weights in it.

Examples:
  dreamc train examples/quickstart.yaml
  dreamc train model.yaml --data book.txt --out runs/book
  dreamc train imports/smollm2 --data book.txt          train an imported model further
  dreamc train runs/book-001 --data more.txt            a new run from the weights of another
  dreamc train runs/book-001/spec.yaml                  the same recipe again, from random weights
  dreamc train model.yaml --seeds 3                     three runs that differ in their seed, and their mean
  dreamc train model.yaml --set train.steps=500 --set train.learning_rate=1e-3
  dreamc train model.yaml --out runs/book --resume      go on after a Ctrl-C or a crash")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Train on this file (text, .jsonl, .parquet) in place of the specification's data
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Folder of the run; `runs/NAME-001`, or the next number, by default
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Train this many runs, with the specification's seed and those after it, in OUT-seed0,
    /// OUT-seed1 …; OUT is `runs/NAME` by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=1024), conflicts_with = "json")]
    seeds: Option<u64>,

    /// Replace the run that is in --out
    #[arg(long, conflicts_with = "resume")]
    force: bool,

    /// Go on with the run in --out; with --seeds, with those that are not at their end
    #[arg(long)]
    resume: bool,

    /// With --resume: go on even though the specification, the data or the rewriting rules have
    /// changed
    #[arg(long, requires = "resume")]
    allow_changes: bool,

    /// Compile, print what would be done, and stop
    #[arg(long)]
    dry_run: bool,

    /// Compare the multiply-adds that the device counts with those of the launch list, to the last
    /// one
    #[arg(long)]
    count: bool,

    /// Print the final ledger as JSON on standard output, everything else, losses too, on the error
    /// stream
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(a: Arguments) -> Done {
    for (flag, given) in [("--force", a.force), ("--resume", a.resume)] {
        if given && a.out.is_none() && a.seeds.is_none() {
            return Err(Failure::Usage(format!("{flag} needs --out, the folder of the run")));
        }
    }
    ranks::together(|group| {
        let spec = a.spec.load_to_train(a.data.as_deref())?;
        match a.seeds {
            None => train(&a, spec, a.out.as_deref(), group),
            Some(seeds) => train_seeds(&a, &spec, seeds, group),
        }
    })
}

/// Trains runs that differ in their seed, one after another, and says their mean.
fn train_seeds(a: &Arguments, spec: &Spec, seeds: u64, group: &Group) -> Done {
    let out = a.out.clone().unwrap_or_else(|| Path::new("runs").join(&spec.model.name));
    let mut folders = vec![];
    for seed in (spec.train.seed..).take(seeds as usize) {
        let mut name = out.clone().into_os_string();
        name.push(format!("-seed{seed}"));
        folders.push((seed, PathBuf::from(name)));
    }
    // Of runs that are there already nothing is lost, and none of the others is begun.
    for (_, folder) in folders.iter().filter(|_| group.leads() && !a.resume && !a.force && !a.dry_run) {
        if folder.exists() {
            return Err(Failure::Usage(format!(
                "{} exists already: go on with --resume, choose another --out, or replace it with --force",
                folder.display()
            )));
        }
    }
    for (seed, folder) in &folders {
        let ended = group.leads() && a.resume && study::ledger(folder)?.is_some_and(|l| study::ended(&l));
        let ended = ranks::from_first(group, || Ok(ended.to_string()))? == "true";
        if ended {
            note!("{}: trained already", folder.display());
            continue;
        }
        let mut spec = spec.clone();
        spec.train.seed = *seed;
        train(a, spec, Some(folder), group)?;
        if a.dry_run {
            return Ok(());
        }
    }
    if !group.leads() {
        return Ok(());
    }
    let mut ledgers = vec![];
    for (_, folder) in &folders {
        ledgers.extend(study::ledger(folder)?);
    }
    Ok(say!("\n{}", runs::over_seeds(&[(spec.model.name.clone(), ledgers.iter().collect())]))?)
}

fn train(a: &Arguments, spec: Spec, out: Option<&Path>, group: &Group) -> Done {
    let device = a.device.open()?;
    let job = Job { spec: &spec, device: device.as_ref(), group, json: a.json, count: a.count };
    let begun = match out {
        // Of several runs the last are not begun yet.
        Some(out) if a.resume && group.leads() && (a.seeds.is_none() || out.exists()) => {
            Some(RunFolder::open(out)?)
        }
        _ => None,
    };
    if begun.is_none() {
        if let (Some(out), true) = (out, a.force) {
            transplant::keep(&spec, out)?;
        }
        transplant::check(&spec)?;
    }
    let rewriting = ranks::from_first(group, || {
        Ok(serde_json::to_string(&match &begun {
            Some(folder) => a.rewriting.continued(folder, a.allow_changes)?,
            None => a.rewriting.on(device.as_ref())?,
        })?)
    })?;
    let rewriting: Rewriting = serde_json::from_str(&rewriting)?;
    let from = match &begun {
        Some(folder) if group.leads() => latest(folder, &|_| Some(spec.train.steps))?,
        _ => None,
    };
    let formats = stored(&spec, from.as_ref(), device.as_ref(), group);
    let prepared = job.prepare(&rewriting, &formats)?;
    let dataset = job.dataset()?;
    if a.dry_run {
        return Ok(());
    }
    job.agree(&dataset, &rewriting)?;
    let folder = match begun {
        _ if !group.leads() => None,
        Some(folder) => Some(folder),
        None => {
            let place = match out {
                Some(path) => Place::At { path: path.into(), force: a.force },
                None => Place::Numbered { runs: "runs".into(), name: spec.model.name.clone() },
            };
            Some(RunFolder::create(&place)?)
        }
    };
    job.train(prepared, &dataset, folder.as_ref(), from, a.allow_changes)
}

/// A training to be done, new or continued.
pub struct Job<'a> {
    /// The specification.
    pub spec: &'a Spec,
    /// Where.
    pub device: &'a dyn Device,
    /// The ranks that train together.
    pub group: &'a Group,
    /// Whether standard output is for a program.
    pub json: bool,
    /// Whether the device's work is compared with the launch list.
    pub count: bool,
}

/// The layers whose forward is computed once more on the way back, so that training takes no more
/// memory than it may.
fn again(prepared: &Prepared, most: Option<u64>) -> String {
    let kept = prepared.compiled.kept.iter().filter(|kept| kept.again);
    let names: Vec<&str> = kept.clone().map(|kept| kept.body.as_str()).collect();
    let saved: u64 = kept.map(|kept| kept.bytes).sum();
    match names[..] {
        [] => format!("nothing, to stay within {}", bytes(most.unwrap_or(0))),
        _ => format!(
            "{}, to stay within {}: {} less",
            names.join(", "),
            bytes(most.unwrap_or(0)),
            bytes(saved)
        ),
    }
}

impl Job<'_> {
    /// Where the header and the losses go: with JSON on standard output, the error stream.
    fn record(&self) -> Stream {
        if self.json { Stream::Err } else { Stream::Out }
    }

    /// A line of the header; what its stream does not take is no reason not to train.
    fn tell(&self, line: &str) {
        match self.record() {
            _ if output::quiet() => {}
            Stream::Out => drop(say!("{line}")),
            Stream::Err => output::complain(&format!("{line}\n")),
        }
    }

    /// Compiles, and says what will be done.
    pub fn prepare(&self, rewriting: &Rewriting, formats: &Formats) -> Result<Prepared, Failure> {
        let (spec, t) = (self.spec, &self.spec.train);
        let prepared = prepare(spec, self.device, rewriting, self.group, formats)?;
        let (memory, scoring) = prepared.memory(self.device)?;
        let taught_by = prepared.teacher_memory(self.device)?;
        let shard = prepared.compiled.cut;
        let own = memory.optimizer + if shard.weights() { memory.weights + memory.gradients } else { 0 };
        let kept = self.group.gather(&own.to_le_bytes())?;
        let tokens = t.batch * prepared.sequence;
        let micro = if t.accumulate > 1 { format!(" in {} parts", t.accumulate) } else { String::new() };
        let (all, moved) = (prepared.parameters(), prepared.trained());
        let moved = match moved < all {
            true => format!(", of which {} are trained", short(moved as f64)),
            false => String::new(),
        };
        let (name, depth) = (&spec.model.name, prepared.compiled.depth);
        self.tell(&format!("{name}: {} parameters{moved}, depth {depth}", short(all as f64)));
        let donor = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref());
        match (&spec.weights, donor) {
            (Some(weights), _) => self.tell(&format!("  begins from the weights of {weights}")),
            (None, Some(donor)) => self.tell(&format!("  begins from a transplant of {donor}")),
            (None, None) => {}
        }
        if let (Some(heal), Some(teacher)) = (&spec.heal, &prepared.teacher) {
            self.tell(&format!("  teacher  {}", teacher.path.display()));
            heal.stages.iter().for_each(|stage| self.tell(&format!("    {}", words(stage))));
        }
        let rows = vec![
            vec!["steps".into(), format!("{} of {} × {} tokens{micro}", t.steps, t.batch, prepared.sequence)],
            vec!["tokens".into(), short((t.steps * tokens) as f64)],
            vec![
                "compute".into(),
                prepared.declared.as_ref().map_or("not counted".into(), |c| {
                    let f = c.flops_per_token.training.mean();
                    let all = f * (t.steps * tokens) as f64;
                    format!("{}FLOP ({}FLOP a token)", short(all), short(f))
                }),
            ],
            vec!["teacher".into(), taught(spec, &prepared, tokens)],
            vec![
                "device".into(),
                format!("{}, {}", self.device.name(), precision(prepared.narrow, t.precision)),
            ],
            vec![
                "ranks".into(),
                format!("{}, {} of a step each", self.group.size(), parts(t.accumulate / self.group.size())),
            ],
            vec![if shard.weights() { "weights" } else { "states" }.into(), cut(shard, &kept)],
            vec!["experts".into(), owned(&prepared)],
            vec![
                "memory".into(),
                format!(
                    "{} (weights {}, gradients {}, optimizer {}, activations {}, scoring {})",
                    bytes(memory.total),
                    bytes(memory.weights),
                    bytes(memory.gradients),
                    bytes(memory.optimizer),
                    bytes((memory.activations + memory.temporary + memory.scratch).saturating_sub(scoring)),
                    bytes(scoring),
                ),
            ],
            vec!["teacher's memory".into(), held(&taught_by)],
            vec![
                "in its file".into(),
                format!(
                    "{}, {}",
                    bytes(memory.mapped),
                    if self.device.copies() { "copied" } else { "mapped" }
                ),
            ],
            vec!["computed again".into(), again(&prepared, t.memory)],
            vec!["compiled in".into(), format!("{:.0} ms, {rewriting}", prepared.seconds * 1e3)],
        ];
        let shown = |row: &Vec<String>| match row[0].as_str() {
            "ranks" => self.group.size() > 1,
            "teacher" | "teacher's memory" => prepared.teacher.is_some(),
            "states" | "weights" => shard.states(),
            "experts" => prepared.compiled.tensors.iter().any(|t| t.owners > 1),
            "in its file" => memory.mapped > 0,
            "computed again" => t.memory.is_some(),
            _ => true,
        };
        let rows: Vec<_> = rows.into_iter().filter(shown).collect();
        let width = rows.iter().map(|r| r[0].len()).max().unwrap_or(0);
        for row in rows {
            self.tell(&format!("  {:<width$}  {}", row[0], row[1]));
        }
        Ok(prepared)
    }

    /// Opens the data: rank 0 first, which tokenises what is not in the cache yet.
    pub fn dataset(&self) -> Result<Dataset, Failure> {
        if !self.group.leads() {
            self.group.barrier()?;
        }
        let dataset = self.open()?;
        if self.group.leads() {
            self.group.barrier()?;
        }
        Ok(dataset)
    }

    /// Refuses ranks that would not train the same as rank 0.
    pub fn agree(&self, dataset: &Dataset, rewriting: &Rewriting) -> Done {
        ranks::agree(self.group, &resolved(self.spec), dataset, rewriting)
    }

    fn open(&self) -> Result<Dataset, Failure> {
        let Some(data) = &self.spec.data else {
            return Err(Failure::Usage(
                "the specification has no data; add a `data` section or name a file with --data".into(),
            ));
        };
        let dataset = open_data(self.spec, data, self.spec.eval.stride)?;
        for line in dataset.describe() {
            self.tell(&format!("  data  {line}"));
        }
        let t = &self.spec.train;
        if let Some(epochs) = dataset.epochs(t.steps * t.batch * prepare::sequence(self.spec)) {
            let again = if epochs > 1.0 { ": the data is repeated" } else { "" };
            self.tell(&format!("  epochs  {}{again}", times(epochs)));
        }
        Ok(dataset)
    }

    /// Trains in a folder, and says how it ended.
    pub fn train(
        &self,
        prepared: Prepared,
        dataset: &Dataset,
        folder: Option<&RunFolder>,
        from: Option<Checkpoint>,
        allow_changes: bool,
    ) -> Done {
        let text = resolved(self.spec);
        if let Some(folder) = folder {
            if from.is_none() {
                folder.begin(&text, &dataset.tokenizer, &prepared.rewriting)?;
            } else if allow_changes {
                folder.write("spec.yaml", &text)?;
            }
            self.tell(&format!("  run  {}\n", folder.path().display()));
        }
        let mut progress = Progress::labelled("", true, self.record());
        let base = match folder {
            Some(folder) => beginning(self.spec, from.as_ref(), (folder.path(), self.device))?,
            None => None,
        };
        let setup = Setup {
            spec: self.spec,
            base,
            text: &text,
            device: self.device,
            dataset,
            group: self.group.clone(),
            folder,
            from,
            allow_changes,
            count: self.count,
        };
        let Some(folder) = folder else {
            let outcome = train::run(prepared, setup, &mut |_: &Event| {})?;
            return stopped(&outcome);
        };
        let outcome = train::run(prepared, setup, &mut progress);
        progress.clear();
        let outcome = outcome.inspect_err(|_| {
            let last = folder.checkpoints().steps().last().copied();
            if let Some(step) = last.filter(|step| *step < self.spec.train.steps) {
                let folder = folder.path().display();
                note!("the run stopped: `dreamc resume {folder}` goes on after step {step}");
            }
        })?;
        if self.json {
            show::json(&outcome.ledger)?;
        } else {
            let evaluated = dataset.tasks().next().is_some() || looks_ahead(&self.spec.model);
            report(&outcome, folder.path(), evaluated, self.count)?;
            if let Some(text) = diverged(&outcome, progress.loss, self.spec.model.vocab) {
                say!("{text}")?;
            }
        }
        stopped(&outcome)
    }
}

/// The work of a teacher.
fn taught(spec: &Spec, prepared: &Prepared, tokens: u64) -> String {
    let each = prepared.teacher.as_ref().and_then(|teacher| teacher.flops_per_token);
    let (Some(heal), Some(each)) = (&spec.heal, each) else { return "not counted".into() };
    let steps = Plan::steps(heal, spec.train.steps);
    format!("{}FLOP ({}FLOP a token of {steps} steps)", short(each * (steps * tokens) as f64), short(each))
}

/// Memory of a teacher, which is not counted with the model's.
fn held(memory: &Memory) -> String {
    let all = format!(
        "{} (weights {}, values {})",
        bytes(memory.total),
        bytes(memory.weights),
        bytes(memory.total.saturating_sub(memory.weights))
    );
    match memory.mapped {
        0 => all,
        mapped => format!("{all}, {} in its file, mapped", bytes(mapped)),
    }
}

/// Memory of the experts of a rank, where ranks share them.
fn owned(prepared: &Prepared) -> String {
    let all = prepared.compiled.tensors.iter().filter(|t| t.owners > 1);
    let own = all.map(|t| {
        let state = |(_, id): &(&str, BufferId)| prepared.compiled.plan.buffer(*id).dtype.bytes();
        let each = 4 + if t.gradient.is_some() { 4 } else { 0 } + t.states.iter().map(state).sum::<u64>();
        (t.owners, (t.kept.end - t.kept.start) * each)
    });
    let (owners, all) = own.fold((1, 0), |(owners, all), (team, own)| (team.max(owners), all + own));
    format!("owned by {owners} ranks together, {} of weights, gradients and states by each", bytes(all))
}

/// Memory on each rank of what is cut.
fn cut(shard: Shard, kept: &[Vec<u8>]) -> String {
    let of = |bytes: &Vec<u8>| bytes.first_chunk().map_or(0, |n| u64::from_le_bytes(*n));
    let each: Vec<u64> = kept.iter().map(of).collect();
    let (least, most) = (each.iter().min().copied(), each.iter().max().copied());
    format!(
        "{}cut over the ranks: {} to {} on each, {} in all",
        if shard.weights() { "with gradients and states " } else { "" },
        bytes(least.unwrap_or(0)),
        bytes(most.unwrap_or(0)),
        bytes(each.iter().sum())
    )
}

fn stopped(outcome: &Outcome) -> Done {
    match outcome.stop {
        Stop::Interrupted(signal) => Err(Failure::Stopped(signal)),
        Stop::Finished | Stop::Early => Ok(()),
    }
}

fn parts(n: u64) -> String {
    if n == 1 { "one micro-batch".into() } else { format!("{n} micro-batches") }
}

/// The precision used, and why where the recipe says another.
fn precision(used: Narrow, asked: Precision) -> &'static str {
    match (used, asked) {
        (Narrow::Nothing, Precision::Bf16) => "f32 (it has no bf16)",
        _ => used.name(),
    }
}

/// The last line of a run whose losses are far above those of guessing.
fn diverged(outcome: &Outcome, last: Option<f64>, vocab: u64) -> Option<String> {
    let guess = (vocab as f64).ln();
    let validation = outcome.evaluation.as_ref().and_then(|line| line.validation_loss);
    let loss = [last, validation].into_iter().flatten().find(|loss| loss.is_nan() || *loss > 1.5 * guess)?;
    Some(format!(
        "the run diverged: its loss is {loss:.4}, and guessing has {guess:.4}; lower train.learning_rate, or set train.clip"
    ))
}

/// The final table and what to do next.
///
/// A model of tasks is asked for their problems, and one that looks ahead writes nothing: both are
/// `evaluated`.
fn report(outcome: &Outcome, folder: &Path, evaluated: bool, counted: bool) -> Done {
    let l = &outcome.ledger;
    let folder = folder.display();
    match outcome.stop {
        Stop::Finished => say!("\nfinished after {}", many(l.steps.into(), "step"))?,
        Stop::Early => {
            say!("\nstopped after {}: the validation loss no longer improves", many(l.steps.into(), "step"))?;
        }
        Stop::Interrupted(signal) => {
            say!("\n{signal}: stopped after step {}, nothing is lost", l.steps)?;
            say!("go on with:  dreamc resume {folder}")?;
            return Ok(());
        }
    }
    let line = outcome.evaluation.clone().unwrap_or_default();
    let mut rows = vec![];
    let mut row = |name: &str, value: Option<String>| {
        rows.extend(value.map(|v| vec![name.to_string(), v]));
    };
    let of = |n: Option<u64>, what: &str| {
        n.map_or(String::new(), |n| format!("  of {} {what}", grouped(n.into())))
    };
    let loss = |x: f64| format!("{x:.4}{}, in {}", of(line.targets, "targets"), l.precision);
    let preferred = |p: Preferred| {
        format!("{:.1} %, loss {:.4}, margin {:+.4}  of {} pairs", 100.0 * p.share, p.loss, p.margin, p.pairs)
    };
    row("preferred, held out", line.preferred.map(preferred));
    row("validation loss", line.validation_loss.map(loss));
    row("bits per byte", line.bits_per_byte.map(|x| format!("{x:.4}")));
    row(
        "exact match, held out",
        line.exact_match.map(|x| format!("{:.1} %{}", 100.0 * x, of(line.problems, "problems"))),
    );
    for (steps, share) in &line.by_difficulty {
        row(&format!("  {}", many((*steps).into(), "step")), Some(format!("{:.1} %", 100.0 * share)));
    }
    for (name, words) in line.health.iter().flat_map(|h| h.words()) {
        row(&name, Some(words));
    }
    row("tokens", Some(short(l.tokens as f64)));
    row("epochs", l.epochs.map(times));
    for change in &l.changes {
        let name = format!("changed after step {}", change.after_step);
        row(&name, Some(change.difference.lines().map(str::trim).collect::<Vec<_>>().join(", ")));
    }
    row("training time", Some(duration(l.train_seconds)));
    row("tokens/s", Some(short(l.tokens as f64 / l.train_seconds.max(1e-9))));
    row("FLOP/s", Some(short(l.executed_flops as f64 / l.train_seconds.max(1e-9))));
    row("memory", Some(bytes(l.peak_memory)));
    row("steps left out", (l.skipped_steps > 0).then(|| l.skipped_steps.to_string()));
    row(
        "FLOPs executed",
        counted.then(|| format!("{}, as the launch list says", grouped(l.executed_flops.into()))),
    );
    say!("{}", table(&rows))?;
    say!("left in {folder}; next:")?;
    if evaluated {
        say!("  dreamc eval {folder}")?;
    } else {
        say!("  dreamc generate {folder} \"Once upon a time\"")?;
    }
    Ok(())
}
