//! `dreamc eval`: what a model is worth.

use crate::arguments::{BaseArguments, DeviceArguments, RewriteArguments};
use clap::{Args, value_parser};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::{CompileError, looks_ahead};
use dreamc_data::{Dataset, Tokenizer, task};
use dreamc_device::Device;
use dreamc_runtime::evaluate::{self, Against, Answers, Difficulty, Loss};
use dreamc_runtime::generate::NextLogits;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::health::{self, Health};
use dreamc_runtime::train::prepare;
use dreamc_study::compare::study;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Passes;
use dreamc_study::model::{Texts, Trained};
use dreamc_study::number::{grouped, many};
use dreamc_study::show::table;
use dreamc_study::spec::{measure_on, open_data};
use dreamc_study::{note, say, show};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Prompts answered at once.
const ROWS: usize = 8;

/// Measure a model on held-out data
#[derive(Args)]
#[command(after_help = "\
Running text: perplexity and bits per byte. Generated tasks: exact match by difficulty. Documents with prompts: loss on the
answers, and final answers (behind the last `####`, where there is one) against the right ones. With --choices: how often the
right continuation is the likeliest.

Examples:
  dreamc eval runs/quickstart-001
  dreamc eval runs/book-001 --data other.txt --stride 64
  dreamc eval runs/gsm8k-001 --data gsm8k-test.jsonl --examples 200 --json
  dreamc eval quick-q8 --against runs/quickstart-001         what a quantised model lost
  dreamc eval runs/reasoning                                 all runs of a comparison
  dreamc eval runs/quickstart-001 --depth 2 --depth 8        a recurrent model at other depths")]
pub struct Arguments {
    /// A run folder, a checkpoint, a .safetensors file, or the folder of a comparison, all of whose
    /// runs are measured
    #[arg(value_name = "RUN|CHECKPOINT|COMPARISON")]
    model: PathBuf,

    /// Measure on all of this file (text, .jsonl, .parquet) in place of what was held out
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Rows `{"prompt": …, "choices": […], "answer": 0}` to rank by likelihood
    #[arg(long, value_name = "FILE.jsonl")]
    choices: Option<PathBuf>,

    /// Compare with this model, of the same tokens, on the same targets: its loss, the mean KL
    /// divergence of the model from it, and how often the likeliest token is another
    #[arg(long, value_name = "RUN|CHECKPOINT")]
    against: Option<PathBuf>,

    /// Examples of each difficulty, or prompts in all; the specification's by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=1_000_000_000))]
    examples: Option<u64>,

    /// Tokens a row of running text advances by; a whole row by default, so that rows do not
    /// overlap
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 40))]
    stride: Option<u64>,

    /// Tokens of a row; those the model was trained with by default
    #[arg(long, value_name = "N")]
    sequence: Option<u64>,

    /// Run a recurrent model at this depth, too: the count of its outermost `recur`; may be given
    /// several times
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    depth: Vec<u64>,

    /// Print as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

/// Figures at one depth.
#[derive(Serialize)]
struct Report {
    /// Which run of a comparison it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<String>,
    model: String,
    step: Option<u64>,
    /// Count of the outermost `recur`, where it was asked for.
    recur: Option<u64>,
    /// Applications of layers.
    depth: u64,
    data: Vec<String>,
    /// How texts begin and rows advance.
    conventions: String,
    /// The type that it was computed in.
    precision: &'static str,
    loss: Option<Loss>,
    perplexity: Option<f64>,
    bits_per_byte: Option<f64>,
    exact_match: Option<f64>,
    by_difficulty: Vec<(String, Vec<Difficulty>)>,
    answers: Option<Answers>,
    choices: Option<Ranked>,
    /// Against another model.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Against>,
    /// Of routers, on the first held-out rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    health: Option<Health>,
    /// Whether it decides by later tokens: the loss is then that of training, and what it would
    /// write is not to be had.
    looks_ahead: bool,
}

/// Rows whose right choice is the likeliest.
#[derive(Clone, Copy, Default, Serialize)]
struct Ranked {
    asked: u64,
    /// By log-probability.
    right: u64,
    /// By log-probability per token.
    right_per_token: u64,
}

pub fn run(a: Arguments) -> Done {
    let device = a.device.open()?;
    let mut reports = vec![];
    match study::runs(&a.model)? {
        None => one(&a, None, &a.model, device.as_ref(), &mut reports)?,
        Some(runs) => {
            for run in runs {
                one(&a, Some(run.name), &run.path, device.as_ref(), &mut reports)?;
            }
        }
    }
    if a.json {
        show::json(&reports)?;
    }
    Ok(())
}

/// Measures one model, a run of a comparison where it has a name.
fn one(
    a: &Arguments,
    run: Option<String>,
    path: &Path,
    device: &dyn Device,
    reports: &mut Vec<Report>,
) -> Done {
    let mut trained = Trained::open(path, a.base.moved(), &[], a.rewriting.on(device)?)?;
    let tokenizer = trained.tokenizer()?;
    if let Some(file) = &a.data {
        let beside = trained.tokenizer_file();
        measure_on(&mut trained.spec, file, beside.as_deref())?;
    }
    if let Some(sequence) = a.sequence {
        let context = trained.spec.model.context;
        if sequence == 0 || sequence > context {
            return Err(Failure::Usage(format!(
                "--sequence {sequence}: the model has a context of 1 to {context}"
            )));
        }
        trained.spec.train.sequence = Some(sequence);
    }
    let spec = &trained.spec;
    let stride = a.stride.or(spec.eval.stride);
    let dataset = match &spec.data {
        None => None,
        Some(data) => Some(open_data(spec, data, stride)?),
    };
    let micro = (spec.train.batch / spec.train.accumulate.max(1)).max(1);
    if let (Some(_), Some(dataset), Narrow::Nothing) = (&a.data, &dataset, trained.narrow(device)) {
        let rows = rows_of(dataset, micro)?;
        trained.spec.train.batch = rows;
        trained.spec.train.accumulate = 1;
    }
    let spec = &trained.spec;
    let mut depths: Vec<Option<u64>> = vec![None];
    let more = if a.depth.is_empty() { &spec.eval.depths } else { &a.depth };
    depths.extend(more.iter().map(|&d| Some(d)));
    for depth in depths {
        let mut model = trained.measurer(device, depth)?;
        let measure = Measure { a, trained: &trained, tokenizer: &tokenizer, device, depth, stride };
        let report = Report { run: run.clone(), ..measure.measure(dataset.as_ref(), &mut model)? };
        if !a.json {
            print(&report)?;
        }
        reports.push(report);
    }
    Ok(())
}

/// Rows of a file, at most `most`: those that a short file lacks are not computed. In f32
/// the losses of a row do not depend on the other rows; in bf16 the size of a batch decides
/// what is rounded.
fn rows_of(dataset: &Dataset, most: u64) -> Result<u64, Failure> {
    let Some(mut batches) = dataset.drawn(most)? else { return Ok(most) };
    let Some(batch) = batches.take(most as usize)? else { return Ok(1) };
    let last = batch.targets.chunks(batch.sequence.max(1)).rposition(|row| row.iter().any(|t| *t >= 0));
    Ok(last.map_or(1, |row| row as u64 + 1))
}

/// Everything that a measurement needs.
struct Measure<'a> {
    a: &'a Arguments,
    trained: &'a Trained,
    tokenizer: &'a Tokenizer,
    device: &'a dyn Device,
    depth: Option<u64>,
    stride: Option<u64>,
}

impl Measure<'_> {
    fn measure(&self, dataset: Option<&Dataset>, model: &mut Model) -> Result<Report, Failure> {
        let Measure { a, trained, tokenizer, stride, .. } = *self;
        let spec = &trained.spec;
        let begins = if trained.begins(tokenizer) {
            "texts and rows begin with the begin token"
        } else {
            "no begin token"
        };
        let sequence = model.sequence() as u64;
        let mut report = Report {
            run: None,
            model: spec.model.name.clone(),
            step: trained.tensors.metadata("step").and_then(|s| s.parse().ok()),
            recur: self.depth,
            depth: model.compiled().depth,
            data: dataset.map(Dataset::describe).unwrap_or_default(),
            conventions: format!(
                "{begins}; rows of {sequence} tokens, stride {}",
                stride.unwrap_or(sequence)
            ),
            precision: trained.narrow(self.device).name(),
            loss: None,
            perplexity: None,
            bits_per_byte: None,
            exact_match: None,
            by_difficulty: vec![],
            answers: None,
            choices: None,
            against: None,
            health: None,
            looks_ahead: looks_ahead(&spec.model),
        };
        if report.looks_ahead && (a.examples.is_some() || a.choices.is_some()) {
            return Err(CompileError::LooksAhead.into());
        }
        let examples = a.examples.unwrap_or(spec.eval.examples);
        if let Some(dataset) = dataset {
            let tasks: Vec<_> = dataset.tasks().collect();
            // A file that is named is measured whole.
            let loss = match &a.data {
                Some(_) => evaluate::drawn(model, dataset, u64::MAX)?,
                None => evaluate::held_out(model, dataset, &spec.train)?,
            };
            if let Some(loss) = loss {
                report.loss = Some(loss);
                report.perplexity = Some(loss.perplexity());
                report.bits_per_byte = if tasks.is_empty() { loss.bits_per_byte() } else { None };
            }
            report.against = self.against(dataset)?;
            report.health = self.health(dataset)?;
            if report.looks_ahead {
                return Ok(report);
            }
            let mut all = vec![];
            let mut scorer = None;
            for task in tasks {
                let scorer = match &mut scorer {
                    Some(scorer) => scorer,
                    none => none.insert(trained.scoring(self.device, self.depth)?),
                };
                let mask = prepare::masked(spec);
                let found = evaluate::exact_match(scorer, tokenizer, task, spec.train.seed, mask, examples)?;
                all.extend(found.clone());
                report.by_difficulty.push((task::name(task.kind).to_string(), found));
            }
            report.exact_match = evaluate::share(&all);
            let asked = dataset.held_out(examples)?;
            if !asked.is_empty() {
                let most = spec.eval.max_tokens as usize;
                let rows = asked.len().min(ROWS) as u64;
                let prompt = asked.iter().map(|e| e.learn as u64 + 1).max();
                let texts = Texts { rows, prompt, context: None };
                let passes = Passes { depth: self.depth, exit: None };
                let mut decoder = trained.decoder(self.device, texts, passes, true)?;
                report.answers = Some(evaluate::answers(decoder.as_mut(), tokenizer, &asked, most)?);
            }
        }
        if let Some(path) = &a.choices {
            report.choices = Some(rank(path, trained, tokenizer, model)?);
        }
        Ok(report)
    }

    /// The model against the one it is compared with, on the rows that the loss is measured on.
    fn against(&self, dataset: &Dataset) -> Result<Option<Against>, Failure> {
        let Measure { a, trained, device, depth, .. } = *self;
        let Some(path) = &a.against else { return Ok(None) };
        let mut other = Trained::open(path, None, &[], trained.rewriting.clone())?;
        let (vocab, theirs) = (trained.spec.model.vocab, other.spec.model.vocab);
        if vocab != theirs {
            let path = path.display();
            return Err(Failure::Usage(format!(
                "--against {path}: it has a vocabulary of {theirs} tokens, and the model one of {vocab}"
            )));
        }
        let sequence = prepare::sequence(&trained.spec);
        if sequence > other.spec.model.context {
            let (path, context) = (path.display(), other.spec.model.context);
            return Err(Failure::Usage(format!(
                "--against {path}: it has a context of {context}, and rows have {sequence} tokens"
            )));
        }
        // Rows are the model's own.
        (other.spec.data, other.spec.train.sequence) = (trained.spec.data.clone(), Some(sequence));
        let (mut own, mut other) = (trained.comparer(device, depth)?, other.comparer(device, depth)?);
        let rows = match &a.data {
            Some(_) => u64::MAX,
            None => dataset.most_rows(evaluate::asked_rows(&trained.spec.train)),
        };
        Ok(evaluate::against(&mut own, &mut other, dataset, rows)?)
    }

    /// Health of the routers on held-out rows, as a run's evaluations show it.
    fn health(&self, dataset: &Dataset) -> Result<Option<Health>, Failure> {
        let Some(compiled) = self.trained.health_observer(self.device, self.depth)? else { return Ok(None) };
        let mut observer = Model::load(self.device, compiled)?;
        observer.restore(&self.trained.tensors)?;
        let rows = (health::TOKENS / observer.sequence().max(1) as u64).max(1);
        let Some(held) = dataset.drawn(rows)? else { return Ok(None) };
        let spec = &self.trained.spec;
        let mut health = Health::look(&mut observer, &spec.model, self.depth, held)?;
        if let (Some(health), Some(held)) = (&mut health, dataset.drawn(health::TEXTS)?)
            && !health.parts.is_empty()
            && !looks_ahead(&spec.model)
        {
            let context = Some(prepare::sequence(spec));
            let texts = Texts { rows: health::TEXTS, prompt: None, context };
            let passes = Passes { depth: self.depth, exit: None };
            let mut decoder = self.trained.decoder(self.device, texts, passes, true)?;
            let sampling = Health::sampling(spec);
            let writing: (&mut dyn NextLogits, &Tokenizer) = (decoder.as_mut(), &dataset.tokenizer);
            health.write(&mut observer, &spec.model, self.depth, writing, (held, sampling))?;
        }
        Ok(health)
    }
}

/// Ranks the choices of every row of a file.
fn rank(path: &Path, trained: &Trained, tokenizer: &Tokenizer, model: &mut Model) -> Result<Ranked, Failure> {
    #[derive(serde::Deserialize)]
    struct Row {
        prompt: String,
        choices: Vec<String>,
        answer: usize,
    }
    let text = dreamc_data::files::read_text(path).map_err(|e| dreamc_data::files::about(path, e))?;
    let mut ranked = Ranked::default();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let refuse = |what: String| Failure::Usage(format!("{}:{}: {what}", path.display(), i + 1));
        let row: Row = serde_json::from_str(line).map_err(|e| {
            refuse(format!("not a row {{\"prompt\": …, \"choices\": […], \"answer\": 0}}: {e}"))
        })?;
        if row.answer >= row.choices.len() {
            return Err(refuse(format!("answer {} of {} choices", row.answer, row.choices.len())));
        }
        // As lm-eval does: spaces at the end of the prompt are the choice's, and both are encoded
        // together.
        let context = row.prompt.trim_end();
        let spaces = &row.prompt[context.len()..];
        let begin = if trained.begins(tokenizer) { Some(tokenizer.begin()) } else { None };
        let mut rows = vec![];
        for choice in &row.choices {
            let (ids, context) = tokenizer.encode_pair(context, &format!("{spaces}{choice}"))?;
            let (context, choice) = ids.split_at(context);
            if choice.is_empty() {
                return Err(refuse("a choice is empty".into()));
            }
            let mut prompt: Vec<u32> = begin.into_iter().chain(context.iter().copied()).collect();
            if prompt.is_empty() {
                prompt.push(tokenizer.end());
            }
            rows.push((prompt, choice.to_vec()));
        }
        let scores = evaluate::likelihoods(model, &rows)?;
        let best = |score: &dyn Fn(&(f64, u64)) -> f64| {
            let mut best = 0;
            for (i, s) in scores.iter().enumerate() {
                if score(s) > score(&scores[best]) {
                    best = i;
                }
            }
            best
        };
        ranked.asked += 1;
        ranked.right += u64::from(best(&|s| s.0) == row.answer);
        ranked.right_per_token += u64::from(best(&|s| s.0 / s.1.max(1) as f64) == row.answer);
    }
    Ok(ranked)
}

fn print(r: &Report) -> Done {
    let step = r.step.map_or(String::new(), |s| format!(", step {s}"));
    let recur = r.recur.map_or(String::new(), |n| format!("recur {n}, "));
    let run = r.run.as_ref().map_or(String::new(), |run| format!("{run}: "));
    say!("{run}{}{step}, {recur}depth {}", r.model, r.depth)?;
    for line in &r.data {
        say!("  {line}")?;
    }
    say!("  {}", r.conventions)?;
    let percent = |right: u64, asked: u64| format!("{:.1} %", 100.0 * right as f64 / asked.max(1) as f64);
    let mut rows = vec![];
    if let Some(loss) = &r.loss {
        rows.push(vec![
            "loss".into(),
            format!("{:.4}", loss.mean()),
            format!("of {} targets, in {}", grouped(loss.targets.into()), r.precision),
        ]);
        rows.push(vec!["perplexity".into(), format!("{:.3}", loss.perplexity())]);
    }
    if let Some(x) = &r.against {
        let n = grouped(x.targets.into());
        rows.push(vec![
            "loss of the other".into(),
            format!("{:.4}", x.other_loss),
            format!("of {n} targets"),
        ]);
        rows.push(vec!["loss above it".into(), format!("{:+.4}", x.loss - x.other_loss), String::new()]);
        rows.push(vec!["KL divergence".into(), format!("{:.5}", x.divergence), "nats a token".into()]);
        rows.push(vec!["other likeliest token".into(), percent(x.flips, x.targets), format!("of {n}")]);
    }
    if let (Some(bits), Some(loss)) = (r.bits_per_byte, &r.loss) {
        rows.push(vec![
            "bits per byte".into(),
            format!("{bits:.4}"),
            format!("of {} bytes", grouped(loss.bytes.into())),
        ]);
    }
    for (name, difficulties) in &r.by_difficulty {
        rows.push(vec![
            format!("exact match, {name}"),
            format!("{:.1} %", 100.0 * evaluate::share(difficulties).unwrap_or(0.0)),
            format!("of {}", difficulties.iter().map(|d| d.asked).sum::<u64>()),
        ]);
        for d in difficulties {
            rows.push(vec![
                format!("  {}", many(d.steps.into(), "step")),
                percent(d.right, d.asked),
                format!("of {}", d.asked),
            ]);
        }
    }
    if let Some(x) = &r.answers {
        rows.push(vec![
            "final answers".into(),
            percent(x.right, x.asked),
            format!("of {}, {} ended", x.asked, x.ended),
        ]);
    }
    if let Some(x) = &r.choices {
        rows.push(vec!["likeliest choice".into(), percent(x.right, x.asked), format!("of {}", x.asked)]);
        rows.push(vec!["  per token".into(), percent(x.right_per_token, x.asked)]);
    }
    if let Some(health) = &r.health {
        let tokens = format!("of {} tokens", grouped(health.tokens.into()));
        rows.extend(health.words().into_iter().map(|(name, words)| vec![name, words, tokens.clone()]));
    }
    say!("{}", table(&rows))?;
    for warning in r.health.iter().flat_map(Health::warnings) {
        note!("warning: {warning}");
    }
    if r.looks_ahead {
        say!("  {}: this is the loss of training, and no answers are scored", CompileError::LooksAhead)?;
    }
    Ok(())
}
