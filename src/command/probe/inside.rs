//! Values inside a model: listed, captured, patched, read by the head or a linear map, taken out.
//!
//! *In*: a model, tokens, patterns of names. *Out*: tables, and a safetensors file of values.
//! *Promise*: everything is checked before anything is computed, and everything is computed before
//! the file is written.

use super::{Arguments, Subject};
use clap::{Args, ValueEnum};
use dreamc_compiler::Options;
use dreamc_compiler::probe::{Point, Probe, matches, points};
use dreamc_data::Batch;
use dreamc_data::files::{about, read_text, write_named};
use dreamc_device::Device;
use dreamc_dsl::spec::Stream;
use dreamc_runtime::analysis::probe::{self, LENS, Part, ProbeError, Probing, Without, largest};
use dreamc_runtime::checkpoint::safetensors::{self, Entry, Tensors};
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::say;
use dreamc_study::show::table;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Tokens of the shapes that `--list` prints where no tokens are given, at most.
const LISTED: u64 = 128;
/// Heads or experts that the table of an ablation prints.
const PRINTED: usize = 24;

/// Looking into a model.
#[derive(Args)]
pub struct Look {
    /// List what can be captured, with dimensions and sizes
    #[arg(long, conflicts_with_all = ["capture", "patch", "lens", "linear", "ablate", "out"])]
    list: bool,

    /// Write a value inside the model: `layers.3.sa.scores`, `layers.*.out`; may be given several
    /// times
    #[arg(long, value_name = "PATTERN", conflicts_with = "weights")]
    capture: Vec<String>,

    /// Give a value the one of the same name in a file of --capture, and say what follows; may be
    /// given several times
    #[arg(long, value_name = "PATTERN=FILE", value_parser = patch, conflicts_with = "weights")]
    pub patch: Vec<(String, PathBuf)>,

    /// The tokens of --patch, from 0: `4`, `4..7`, with commas between them; all by default
    #[arg(long, value_name = "PLACES", value_parser = places, value_delimiter = ',')]
    pub tokens: Vec<Range<usize>>,

    /// The ids whose logits --patch compares, after the last token; the likeliest of the file's
    /// text and of this one by default
    #[arg(long, value_name = "ID,ID", value_parser = pair)]
    pub difference: Option<(usize, usize)>,

    /// Losses that the head has on the stream after every application of a layer
    #[arg(long, conflicts_with_all = ["patch", "weights"])]
    lens: bool,

    /// Linear maps from each captured value to labels: a JSON list of a list for each row, a class
    /// for each token, -1 for none
    #[arg(long, value_name = "LABELS.json", requires = "capture")]
    linear: Option<PathBuf>,

    /// Losses without each head or each expert
    #[arg(long, value_name = "PART", conflicts_with_all = ["patch", "weights"])]
    ablate: Option<Ablated>,
}

/// The parts that are taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Ablated {
    /// Each head of each attention: its output is zero
    Heads,
    /// Each expert of each mixture: its gate is zero
    Experts,
}

fn patch(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text
        .split_once('=')
        .filter(|(name, file)| !name.is_empty() && !file.is_empty())
        .ok_or("write the name of a value, `=`, and a file of --capture, as layers.3.out=a.safetensors")?;
    Ok((name.into(), file.into()))
}

fn places(text: &str) -> Result<Range<usize>, String> {
    let wrong = || "write the place of a token, from 0, or a range of them, as 4..7".to_string();
    let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
    let range = match text.split_once("..") {
        Some((from, to)) => number(from)?..number(to)?,
        None => number(text)?..number(text)?.checked_add(1).ok_or_else(wrong)?,
    };
    if range.is_empty() { Err(wrong()) } else { Ok(range) }
}

fn pair(text: &str) -> Result<(usize, usize), String> {
    let ids = text.split_once(',').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    ids.filter(|(a, b)| a != b).ok_or_else(|| "write two ids with a comma between them, as 17,23".into())
}

impl Look {
    /// Whether something inside is asked for.
    pub fn looks(&self) -> bool {
        let named = self.capture.len() + self.patch.len() > 0;
        named || self.list || self.lens || self.linear.is_some() || self.ablate.is_some()
    }

    /// The values that the program leaves, and those that it takes.
    fn probe(&self) -> Probe {
        let mut captured = self.capture.clone();
        let mut patched: Vec<String> = self.patch.iter().map(|(name, _)| name.clone()).collect();
        if self.lens {
            captured.push(LENS[0].into());
            patched.push(LENS[1].into());
        }
        if let Some(ablated) = self.ablate {
            let [look, change] = part(ablated).patterns();
            captured.extend(look);
            patched.extend(change);
        }
        Probe { captured, patched }
    }
}

fn part(ablated: Ablated) -> Part {
    match ablated {
        Ablated::Heads => Part::Heads,
        Ablated::Experts => Part::Experts,
    }
}

/// A value that a file gives.
struct Given {
    name: String,
    shape: Vec<u64>,
    values: Vec<f32>,
    file: PathBuf,
}

pub fn run(a: &Arguments, subject: &Subject, device: &dyn Device) -> Done {
    let look = &a.look;
    if look.list {
        return list(a, subject);
    }
    if look.lens && matches!(subject.spec.model.stream, Stream::Attend { .. }) {
        return Err(ProbeError::NoLens.into());
    }
    let batch = subject.batch(a)?;
    let labels = look.linear.as_deref().map(|path| labels(path, &batch)).transpose()?;
    let mut options = options(a, subject, [batch.rows() as u64, batch.sequence as u64]);
    options.probe = meant(subject, &options, look)?;
    let given = given(look, subject, &options, &batch)?;
    let mut probing = Probing::new(subject.load(a, device, &options)?)?;
    let looks = if look.lens { lens(&mut probing, &batch)? } else { vec![] };
    if let Some(ablated) = look.ablate {
        ablate(&mut probing, &batch, ablated)?;
    }
    let tokens = |place: usize| look.tokens.is_empty() || look.tokens.iter().any(|r| r.contains(&place));
    let effect =
        if given.is_empty() { None } else { Some(effect(look, &mut probing, &batch, &given, &tokens)?) };
    if look.capture.is_empty() && a.out.is_none() {
        return effect.map_or(Ok(()), |said| Ok(say!("{said}")?));
    }
    if given.is_empty() {
        probing.model().evaluate(&batch)?;
    }
    if let Some(labels) = &labels {
        linear(&probing, look, labels, batch.sequence)?;
    }
    if let Some(out) = &a.out {
        write(a, out, &mut probing, &batch, looks)?;
    }
    effect.map_or(Ok(()), |said| Ok(say!("{said}")?))
}

fn options(a: &Arguments, subject: &Subject, [rows, sequence]: [u64; 2]) -> Options {
    let (rewrite, narrow, formats) = (subject.rewrite.clone(), subject.narrow, subject.formats.clone());
    Options { logits: true, depth: a.depth, rewrite, narrow, formats, ..prepare::forward(rows, sequence) }
}

/// Everything that can be captured.
fn list(a: &Arguments, subject: &Subject) -> Done {
    let shape = match a.ids.is_some() || !a.text.is_empty() {
        true => subject.batch(a).map(|batch| [batch.rows() as u64, batch.sequence as u64])?,
        false => [1, subject.spec.model.context.min(LISTED)],
    };
    let all = points(&subject.spec.model, &options(a, subject, shape))?;
    let mut rows = vec![["value", "dimensions", "sizes"].map(String::from).to_vec()];
    rows.extend(all.into_iter().map(|Point { name, dims, shape, .. }| {
        let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
        vec![name, dims.join(" "), sizes.join(" × ")]
    }));
    let [rows_of, tokens] = shape;
    say!("{}{} in all, for {rows_of} × {tokens} tokens", table(&rows), rows.len() - 1)?;
    Ok(())
}

/// The patterns of a probe, those that a model need not have being left out where it has none.
fn meant(subject: &Subject, options: &Options, look: &Look) -> Result<Probe, Failure> {
    let mut probe = look.probe();
    let Some(ablated) = look.ablate else { return Ok(probe) };
    let all = points(&subject.spec.model, options)?;
    let has = |pattern: &String| all.iter().any(|point| matches(pattern, &point.name));
    let [looked, changed] = part(ablated).patterns();
    if !changed.iter().any(has) {
        let what = match ablated {
            Ablated::Heads => "no attention in its layers, so no heads",
            Ablated::Experts => "no mixture in its layers, so no experts",
        };
        return Err(Failure::Usage(format!("{} has {what} to take out", subject.spec.model.name)));
    }
    probe.captured.retain(|pattern| !looked.contains(pattern) || has(pattern));
    probe.patched.retain(|pattern| !changed.contains(pattern) || has(pattern));
    Ok(probe)
}

/// The values that files give, each of a name and the shape that the model has.
fn given(look: &Look, subject: &Subject, options: &Options, batch: &Batch) -> Result<Vec<Given>, Failure> {
    let mut given: Vec<Given> = vec![];
    if look.patch.is_empty() {
        return Ok(given);
    }
    if let Some(range) = look.tokens.iter().find(|range| range.end > batch.sequence) {
        let (at, last) = (range.end - 1, batch.sequence - 1);
        return Err(Failure::Usage(format!("--tokens: there is no token {at}, the last is {last}")));
    }
    let all = points(&subject.spec.model, options)?;
    for (pattern, path) in &look.patch {
        let file = Tensors::open(path)?;
        for point in all.iter().filter(|point| matches(pattern, &point.name)) {
            let name = &point.name;
            let refuse =
                |what: String| Err(Failure::Usage(format!("--patch {pattern}: {}: {what}", path.display())));
            let Some((shape, values)) = file.get(name)? else {
                return refuse(format!("it lacks `{name}`; --capture '{pattern}' writes it"));
            };
            if shape != point.shape {
                return refuse(format!("`{name}` is {shape:?} there and {:?} for these tokens", point.shape));
            }
            if given.iter().any(|given| given.name == *name) {
                return refuse(format!("`{name}` is given twice"));
            }
            given.push(Given { name: name.clone(), shape: shape.to_vec(), values, file: path.clone() });
        }
    }
    Ok(given)
}

/// Applies patches, and says how far they move the logits from this text's to those of the other.
fn effect(
    look: &Look,
    probing: &mut Probing,
    batch: &Batch,
    given: &[Given],
    tokens: &dyn Fn(usize) -> bool,
) -> Result<String, Failure> {
    let before = last_logits(probing, batch)?;
    for Given { name, shape, values, .. } in given {
        let each = shape[2..].iter().product::<u64>().max(1) as usize;
        let along = shape[1].max(1) as usize;
        probing.change(name, (shape, values), |i| tokens(i / each % along))?;
    }
    let after = last_logits(probing, batch)?;
    let vocab = before[0].len();
    let mut other: Option<Vec<Vec<f32>>> = None;
    for Given { file, .. } in given {
        if let Some((shape, logits)) = Tensors::open(file)?.get("logits")?
            && shape == [batch.rows() as u64, batch.sequence as u64, vocab as u64]
        {
            other.get_or_insert(last_of(&logits, batch.sequence, vocab));
        }
    }
    let mut alike = false;
    let mut rows = vec![
        ["row", "ids", "as it is", "patched", "the other text", "of the way"].map(String::from).to_vec(),
    ];
    for row in 0..before.len() {
        let (a, b) = match (look.difference, &other) {
            (Some((a, b)), _) if a.max(b) < vocab => (a, b),
            (Some((a, b)), _) => {
                return Err(Failure::Usage(format!(
                    "--difference: id {} is not below vocab {vocab}",
                    a.max(b)
                )));
            }
            (None, Some(other)) => (largest(&other[row]), largest(&before[row])),
            (None, None) => {
                let what = "the files of --patch have no logits of as many tokens: give --difference ID,ID";
                return Err(Failure::Usage(what.into()));
            }
        };
        alike |= a == b;
        let gap = |logits: &[f32]| f64::from(logits[a]) - f64::from(logits[b]);
        let (from, to) = (gap(&before[row]), gap(&after[row]));
        let there = other.as_ref().map(|other| gap(&other[row]));
        let way = there.filter(|there| a != b && *there != from).map(|there| (to - from) / (there - from));
        rows.push(vec![
            (row + 1).to_string(),
            if a == b { format!("{a} of both") } else { format!("{a} − {b}") },
            format!("{from:+.4}"),
            format!("{to:+.4}"),
            there.map_or("–".into(), |there| format!("{there:+.4}")),
            way.map_or("–".into(), |way| format!("{:.1} %", 100.0 * way)),
        ]);
    }
    let names: Vec<&str> = given.iter().map(|given| given.name.as_str()).collect();
    let mut said = format!(
        "logit differences after the last token, patched: {}\n{}",
        names.join(", "),
        table(&rows).trim_end()
    );
    if alike {
        said += "\nboth texts have one likeliest token there: --difference ID,ID compares two";
    }
    Ok(said)
}

/// Logits after the last token of each row.
fn last_logits(probing: &mut Probing, batch: &Batch) -> Result<Vec<Vec<f32>>, Failure> {
    probing.model().evaluate(batch)?;
    let logits = probing.model().all_logits()?;
    let vocab = logits.len() / batch.ids.len().max(1);
    Ok(last_of(&logits, batch.sequence, vocab))
}

fn last_of(logits: &[f32], sequence: usize, vocab: usize) -> Vec<Vec<f32>> {
    let rows = logits.chunks((sequence * vocab).max(1));
    rows.map(|row| row[row.len() - vocab..].to_vec()).collect()
}

/// The table of the logit lens.
fn lens(probing: &mut Probing, batch: &Batch) -> Result<Vec<probe::Look>, Failure> {
    let mut rows = vec![["stream", "loss", "right", "as the last"].map(String::from).to_vec()];
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let looks = probe::lens(probing, batch)?;
    for look in &looks {
        let figures = [format!("{:.4}", look.loss), percent(look.right), percent(look.agrees)];
        rows.push([vec![look.name.clone()], figures.to_vec()].concat());
    }
    let targets = batch.learned();
    say!("the head on the stream after every layer, over {targets} targets\n{}", table(&rows).trim_end())?;
    Ok(looks)
}

/// The table of an ablation, what raises the loss the most first.
fn ablate(probing: &mut Probing, batch: &Batch, ablated: Ablated) -> Done {
    let whole = probing.loss(batch)?;
    let (noun, mut found) = match ablated {
        Ablated::Heads => {
            let mut measure = |model: &mut dreamc_runtime::model::Model| -> Result<f64, Failure> {
                let losses = model.evaluate(batch)?;
                let sum: f64 =
                    losses.iter().zip(&batch.targets).filter(|l| *l.1 >= 0).map(|l| f64::from(*l.0)).sum();
                Ok(sum / batch.learned().max(1) as f64)
            };
            ("head", probe::without_heads(probing, &mut measure)?)
        }
        Ablated::Experts => ("expert", probe::without_experts(probing, batch)?),
    };
    found.sort_by(|a, b| b.measure.total_cmp(&a.measure));
    let mut rows = vec![["component", noun, "loss without", "rise"].map(String::from).to_vec()];
    // A rise that rounds to nothing has no sign.
    let signed = |x: f64| format!("{:+.4}", (1e4 * x).round() / 1e4 + 0.0);
    let row = |w: &Without| {
        let (measure, rise) = (format!("{:.4}", w.measure), signed(w.measure - whole));
        vec![w.name.clone(), w.number.to_string(), measure, rise]
    };
    rows.extend(found.iter().take(PRINTED).map(row));
    let left = found.len().saturating_sub(PRINTED);
    let more = if left > 0 { format!("  and {left} more, which matter less\n") } else { String::new() };
    say!("loss {whole:.4} over {} targets\n{}", batch.learned(), (table(&rows) + &more).trim_end())?;
    Ok(())
}

/// Classes of tokens from a file.
fn labels(path: &Path, batch: &Batch) -> Result<Vec<i32>, Failure> {
    let refuse = |what: String| Failure::Usage(format!("{}: {what}", path.display()));
    let text = read_text(path).map_err(|e| about(path, e))?;
    let rows: Vec<Vec<i32>> = serde_json::from_str(&text).map_err(|e| {
        refuse(format!("not a JSON list of lists of classes, as [[0, 1, -1], [2, 0, 1]]: {e}"))
    })?;
    let (many, sequence) = (batch.rows(), batch.sequence);
    if rows.len() != many {
        return Err(refuse(format!("it has {} rows of classes, and there are {many} of tokens", rows.len())));
    }
    if let Some((i, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != sequence) {
        return Err(refuse(format!(
            "row {} has {} classes, and {sequence} tokens are read",
            i + 1,
            row.len()
        )));
    }
    Ok(rows.into_iter().flatten().collect())
}

/// The table of linear probes of the captured values.
fn linear(probing: &Probing, look: &Look, labels: &[i32], sequence: usize) -> Done {
    let mut rows = vec![["value", "numbers", "right", "commonest class"].map(String::from).to_vec()];
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let mut tokens = None;
    for probed in asked(probing, look) {
        let name = &probed.name;
        if probed.shape[1] != sequence as u64 {
            continue;
        }
        let values = probing.value(name)?;
        let found = probe::linear(&values, labels, sequence)
            .map_err(|e| Failure::Usage(format!("--linear: `{name}`: {e}")))?;
        let numbers = values.len() / labels.len().max(1);
        rows.push(vec![name.clone(), numbers.to_string(), percent(found.right), percent(found.commonest)]);
        tokens = Some((found.learned, found.held));
    }
    let (learned, held) = tokens.unwrap_or_default();
    let rows = table(&rows);
    say!(
        "classes of {held} tokens of every second row, learned from {learned} of the others\n{}",
        rows.trim_end()
    )?;
    Ok(())
}

/// The points that patterns of `--capture` mean.
fn asked<'p>(probing: &'p Probing, look: &'p Look) -> impl Iterator<Item = &'p Point> {
    let means = |point: &&Point| look.capture.iter().any(|pattern| matches(pattern, &point.name));
    probing.captured().map(|probed| &probed.point).filter(means)
}

/// Writes the captured values with logits, losses, and those of the lens.
fn write(a: &Arguments, out: &Path, probing: &mut Probing, batch: &Batch, looks: Vec<probe::Look>) -> Done {
    let losses = probing.model().evaluate(batch)?;
    let (rows, sequence) = (batch.rows() as u64, batch.sequence as u64);
    let mut all: Vec<(Entry, Vec<f32>)> = vec![];
    if !a.no_logits {
        let logits = probing.model().all_logits()?;
        let vocab = logits.len() as u64 / (rows * sequence);
        all.push((("logits".into(), vec![rows, sequence, vocab]), logits));
    }
    all.push((("losses".into(), vec![rows, sequence]), losses));
    let lens = |look: probe::Look| ((format!("lens.{}", look.name), vec![rows, sequence]), look.losses);
    all.extend(looks.into_iter().map(lens));
    for point in asked(probing, &a.look) {
        all.push(((point.name.clone(), point.shape.clone()), probing.value(&point.name)?));
    }
    let (entries, values): (Vec<Entry>, Vec<Vec<f32>>) = all.into_iter().unzip();
    let metadata = [("format", "dreamc probe")];
    write_named(out, |out| safetensors::write(out, &metadata, &entries, |i| Ok(values[i].clone())))?;
    say!("{}: {} values", out.display(), entries.len())?;
    Ok(())
}
