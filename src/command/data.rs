//! `dreamc data`: look at what a model would be trained on.

use crate::arguments::SpecArguments;
use clap::{Args, Subcommand};
use dreamc_data::files::cache_folder;
use dreamc_data::task::{self, Problem, Problems, Split};
use dreamc_data::{Batch, Cursor, Dataset, Settings, Tokenizer};
use dreamc_dsl::spec::{Source, Task, TaskKind};
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::number::many;
use dreamc_study::progress::Progress;
use dreamc_study::spec::Named;
use dreamc_study::{output, say, show};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Look at training data
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Inspect(Inspect),
    Show(Show),
}

/// Show rows as the model would be trained on them, decoded, with the loss mask
#[derive(Args)]
#[command(after_help = "\
Text that loss is taken on is green on a terminal and in ⟦brackets⟧ elsewhere; ¶ stands for the end of a document.

Examples:
  dreamc data inspect examples/quickstart.yaml
  dreamc data inspect model.yaml --data train.jsonl --rows 10 --validation
  dreamc data inspect model.yaml --json")]
struct Inspect {
    #[command(flatten)]
    spec: SpecArguments,

    /// This file (text, .jsonl, .parquet) in place of the specification's data
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Rows to show
    #[arg(long, default_value_t = 4, value_name = "N")]
    rows: usize,

    /// Rows held out for validation
    #[arg(long)]
    validation: bool,

    /// Print ids, targets, positions and segments as JSON
    #[arg(long)]
    json: bool,
}

/// Show problems of a generated task, with what is asked in them
#[derive(Args)]
#[command(after_help = "\
What is asked is green on a terminal and in ⟦brackets⟧ elsewhere.

Examples:
  dreamc data show mqar
  dreamc data show p_hop --steps 8 --problems 10
  dreamc data show symmetric --size 3 --held-out --json
  dreamc data show examples/quickstart.yaml")]
struct Show {
    /// A task, or a specification that has one
    #[arg(value_name = "TASK|SPEC")]
    of: String,

    /// Steps of every problem; by default those that the task draws
    #[arg(long, value_name = "N")]
    steps: Option<u64>,

    /// The task's `size`
    #[arg(long, value_name = "N")]
    size: Option<u64>,

    /// The task's `length`
    #[arg(long, value_name = "N")]
    length: Option<u64>,

    /// Problems to show
    #[arg(short = 'n', long, default_value_t = 4, value_name = "N")]
    problems: u64,

    /// Seed of the problems; a specification's own by default
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Those that are held out
    #[arg(long)]
    held_out: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A problem as JSON has it.
#[derive(Serialize)]
struct Shown {
    task: &'static str,
    steps: u64,
    prompt: String,
    answer: String,
    asked: Vec<String>,
}

#[derive(Serialize)]
struct Row<'a> {
    ids: &'a [i32],
    targets: &'a [i32],
    positions: &'a [i32],
    segments: &'a [i32],
    text: String,
}

pub fn run(a: Arguments) -> Done {
    match a.command {
        Command::Inspect(a) => inspect(&a),
        Command::Show(a) => problems(&a),
    }
}

/// The tasks that are named: one by its name, or those of a specification, with its seed.
fn tasks(of: &str) -> Result<(Vec<Task>, u64), Failure> {
    let named = TaskKind::ALL.iter().find(|kind| kind.facts().name == of);
    if let Some(&kind) = named {
        let steps = kind.facts().steps;
        return Ok((vec![Task::new(kind, steps.least, steps.default)], 0));
    }
    if !Path::new(of).exists() {
        let names: Vec<&str> = TaskKind::ALL.iter().map(|kind| kind.facts().name).collect();
        return Err(Failure::Usage(format!("{of} is no task and no file; tasks are {}", names.join(", "))));
    }
    let spec = Named { spec: of.into(), set: vec![] }.load()?;
    let sources = spec.data.iter().flat_map(|data| &data.sources);
    let found: Vec<Task> = sources
        .filter_map(|(source, _)| match source {
            Source::Task(task) => Some(task.clone()),
            Source::Text { .. } | Source::Jsonl { .. } | Source::Parquet { .. } => None,
        })
        .collect();
    if found.is_empty() {
        return Err(Failure::Usage(format!("{of} has no task; `dreamc data inspect {of}` shows its rows")));
    }
    Ok((found, spec.train.seed))
}

/// Shows problems of tasks.
fn problems(a: &Show) -> Done {
    let (tasks, seed) = tasks(&a.of)?;
    let split = if a.held_out { Split::Test } else { Split::Train };
    let color = output::Stream::Out.has_color();
    let mut all = vec![];
    for mut task in tasks {
        task.size = a.size.unwrap_or(task.size);
        if let Some(length) = a.length {
            if task.length.is_none() {
                return Err(Failure::Usage(format!("{} has no length", task::name(task.kind))));
            }
            task.length = Some(length);
        }
        if let Some(steps) = a.steps {
            (task.min_steps, task.max_steps, task.longer) = (steps, steps, vec![]);
        }
        let problems = Problems::new(&task, a.seed.unwrap_or(seed), split)?;
        if !a.json {
            say!("{}", about(&task))?;
        }
        for i in 0..a.problems {
            let problem = problems.at(i)?;
            if a.json {
                let asked = problem.answers().map(|range| problem.answer[range].to_string()).collect();
                let (task, steps) = (task::name(task.kind), problem.steps);
                all.push(Shown { task, steps, prompt: problem.prompt, answer: problem.answer, asked });
            } else {
                say!("{:>6}  {}", problem.steps, marked(&problem, color))?;
            }
        }
    }
    if a.json { Ok(show::json(&all)?) } else { Ok(()) }
}

/// A task and its numbers.
fn about(task: &Task) -> String {
    let facts = task.kind.facts();
    let paper = if facts.paper.is_empty() { String::new() } else { format!(" (arXiv {})", facts.paper) };
    let steps = format!("{} to {}", task.min_steps, task.max_steps);
    let length = task.length.map_or(String::new(), |length| format!(", length {length}"));
    format!("{}: {}{paper}\nsteps {steps}, size {}{length}", facts.name, facts.about, task.size)
}

/// A problem with what is asked marked.
fn marked(problem: &Problem, color: bool) -> String {
    let marks = if color { ("\x1b[32m", "\x1b[0m") } else { ("⟦", "⟧") };
    let (mut out, mut at) = (problem.prompt.clone(), 0);
    for asked in problem.answers() {
        out += &problem.answer[at..asked.start];
        out += &format!("{}{}{}", marks.0, &problem.answer[asked.clone()], marks.1);
        at = asked.end;
    }
    out + &problem.answer[at..]
}

/// Shows rows.
fn inspect(a: &Inspect) -> Done {
    let spec = a.spec.load_to_train(a.data.as_deref())?;
    let Some(data) = &spec.data else {
        return Err(Failure::Usage("the specification has no data; name a file with --data".into()));
    };
    let sequence = prepare::sequence(&spec);
    let (vocab, seed) = (spec.model.vocab, spec.train.seed);
    let settings =
        Settings { base: Path::new(""), cache: &cache_folder(), sequence, vocab, seed, stride: None };
    let mut progress = Progress::default();
    let dataset = Dataset::open(data, &settings, &mut |n| progress.notice(&n));
    progress.clear();
    let dataset = dataset?;
    let batch = if a.validation {
        let Some(mut held) = dataset.validation()? else {
            return Err(Failure::Usage("nothing is held out for validation".into()));
        };
        held.take(a.rows)?
    } else {
        dataset.train(Cursor::default())?.take(a.rows)?
    };
    let mut batch = batch.unwrap_or_default();
    // Rows beyond the end of what is held out hold nothing.
    while batch.rows() > 0 && batch.slice(batch.rows() - 1, 1).learned() == 0 {
        batch = batch.slice(0, batch.rows() - 1);
    }
    if a.json {
        let rows: Vec<_> = (0..batch.rows()).map(|r| row(&batch, r, &dataset.tokenizer)).collect();
        show::json(&rows)?;
        return Ok(());
    }
    for line in dataset.describe() {
        say!("{line}")?;
    }
    let color = output::Stream::Out.has_color();
    for r in 0..batch.rows() {
        let one = batch.slice(r, 1);
        let last = one.segments.last().copied().unwrap_or(0);
        let unused = one.targets.iter().rev().take_while(|&&t| t < 0).count();
        say!(
            "\nrow {}: {} tokens, loss on {}, {}, {unused} unused",
            r + 1,
            batch.sequence,
            one.learned(),
            many(u128::from(last.unsigned_abs()) + 1, "document")
        )?;
        say!("{}", masked_text(&one, &dataset.tokenizer, color))?;
    }
    Ok(())
}

fn row<'a>(batch: &'a Batch, r: usize, tokenizer: &Tokenizer) -> Row<'a> {
    let range = r * batch.sequence..(r + 1) * batch.sequence;
    let ids: Vec<u32> = batch.ids[range.clone()].iter().map(|&id| id as u32).collect();
    Row {
        ids: &batch.ids[range.clone()],
        targets: &batch.targets[range.clone()],
        positions: &batch.positions[range.clone()],
        segments: &batch.segments[range],
        text: tokenizer.decode(&ids),
    }
}

/// The text of a row: what each place predicts where loss is taken, what it holds elsewhere.
fn masked_text(row: &Batch, tokenizer: &Tokenizer, color: bool) -> String {
    let marks = if color { ("\x1b[32m", "\x1b[0m") } else { ("⟦", "⟧") };
    let used = row.targets.iter().rposition(|&t| t >= 0).map_or(0, |i| i + 1);
    let mut out = String::new();
    let mut i = 0;
    while i < used {
        let learned = row.targets[i] >= 0;
        let end = (i..used).find(|&k| (row.targets[k] >= 0) != learned).unwrap_or(used);
        // Of a stretch without loss its inputs are shown, but for the begin token; the input of the
        // first learned place belongs to the stretch before it.
        let ids: Vec<u32> = if learned {
            row.targets[i..end].iter().map(|&t| t as u32).collect()
        } else {
            row.ids[i..(end + 1).min(row.ids.len())].iter().map(|&id| id as u32).collect()
        };
        let mut text = tokenizer.decode(&ids);
        if learned && ids.last() == Some(&tokenizer.end()) {
            text.push('¶');
        }
        if learned {
            out += &format!("{}{text}{}", marks.0, marks.1);
        } else {
            out += &text;
        }
        i = end;
    }
    out
}
