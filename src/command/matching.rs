//! `dreamc match`: fields of a spec moved until it costs what a baseline costs.

use crate::arguments::SpecArguments;
use clap::{Args, value_parser};
use dreamc_compiler::matching::{
    Candidate, Matched, Measure, Objective, Request, TOKENS, candidates, find, pair,
};
use dreamc_data::files;
use dreamc_dsl::{Diagnostics, FileKind, Spec, Spelling};
use dreamc_study::compare::arms::{self, Matching, Place, TOLERANCE};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::number::{decimal_bytes, decimals, grouped};
use dreamc_study::spec::Named;
use dreamc_study::{say, show};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Change fields of a specification until its FLOPs and parameters are a baseline's
///
/// Fields and baseline come from the `match` section where they are not given. With a baseline
/// alone it shows the value at which each size would meet the FLOPs or the parameters, and the
/// pair that meets both. A suite matches all its variants.
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc match examples/dr-da-16.yaml
  dreamc match my.yaml --baseline la-16.yaml            show the sizes that could meet it
  dreamc match my.yaml --baseline la-16.yaml --auto     take the pair that it shows
  dreamc match my.yaml --baseline la-16.yaml --flops ea.intermediate:8 --params ea.count --write matched.yaml
  dreamc match examples/paper-16.suite.yaml --json

Exit code 1 when nothing is close enough; the error says what came closest.")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Specification to meet
    #[arg(long, value_name = "SPEC")]
    baseline: Option<PathBuf>,

    /// Field that meets the FLOPs per token, and its step
    #[arg(long, value_name = "FIELD:STEP", value_parser = field)]
    flops: Option<(String, u64)>,

    /// Field that meets the FLOPs of training, per token, and its step
    #[arg(long, value_name = "FIELD[:STEP]", value_parser = field)]
    training: Option<(String, u64)>,

    /// Field that meets the parameters
    #[arg(long, value_name = "FIELD[:STEP]", value_parser = field)]
    params: Option<(String, u64)>,

    /// Field that meets the memory of generation
    #[arg(long, value_name = "FIELD[:STEP]", value_parser = field)]
    memory: Option<(String, u64)>,

    /// Take the pair of sizes that meets FLOPs and parameters
    #[arg(long, conflicts_with_all = ["flops", "training", "params", "memory"])]
    auto: bool,

    /// Largest relative difference that counts as matched: `0.5%` or `0.005`
    #[arg(long, value_name = "SHARE", value_parser = tolerance)]
    tolerance: Option<f64>,

    /// Length of the generated sequence that FLOPs and memory are averaged over; 1024 by default,
    /// or the shorter context
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 48))]
    tokens: Option<u64>,

    /// Write the specification with the matched values; of a suite, those of its variants into this
    /// folder
    #[arg(long, value_name = "OUT")]
    write: Option<PathBuf>,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,
}

fn field(text: &str) -> Result<(String, u64), String> {
    let (field, step) = text.split_once(':').unwrap_or((text, "1"));
    match step.parse() {
        Ok(step) if step > 0 && !field.is_empty() => Ok((field.into(), step)),
        _ => Err("write a field and its step: `ea.intermediate:8`".into()),
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number.trim(), 0.01),
        None => (text, 1.0),
    };
    let value = number.parse().map_or(f64::NAN, |n: f64| n * unit);
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("write `0.5%` or `0.005`".into()) }
}

/// Output of `--json` for a suite.
#[derive(Serialize)]
struct Report {
    suite: String,
    variants: Vec<Arm>,
}

/// A variant of a suite that was matched.
#[derive(Serialize)]
struct Arm {
    name: String,
    #[serde(flatten)]
    matched: Matched,
}

pub fn run(a: Arguments) -> Done {
    match dreamc_dsl::parse_file(&a.spec.spec)?.kind {
        FileKind::Spec => one(&a),
        FileKind::Suite => suite(&a),
    }
}

fn load(path: &Path, set: &[String]) -> Result<Spec, Failure> {
    Named { spec: path.into(), set: set.into() }.load()
}

fn one(a: &Arguments) -> Done {
    let spec = a.spec.load()?;
    let section = spec.matching.as_ref();
    let baseline = match (&a.baseline, section) {
        (Some(path), _) => path.clone(),
        (None, Some(section)) => a.spec.base().join(&section.baseline),
        (None, None) => {
            let what =
                "nothing to compare with: give `--baseline SPEC`, or the specification a `match` section";
            return Err(Failure::Usage(what.into()));
        }
    };
    let given = [
        (Measure::FlopsPerToken, &a.flops),
        (Measure::TrainingFlopsPerToken, &a.training),
        (Measure::Parameters, &a.params),
        (Measure::MemoryBytes, &a.memory),
    ];
    let mut request = match section {
        Some(section) if !a.auto && given.iter().all(|(_, field)| field.is_none()) => Request::from(section),
        _ => {
            let tolerance = section.map_or(TOLERANCE, |s| s.tolerance);
            let objective = |(measure, field): (Measure, &Option<(String, u64)>)| {
                let (field, step) = field.clone()?;
                Some(Objective { measure, field, step, tolerance })
            };
            let objectives: Vec<Objective> = given.into_iter().filter_map(objective).collect();
            if objectives.is_empty() {
                return propose(a, &spec, &load(&baseline, &[])?);
            }
            Request { objectives, tokens: TOKENS }
        }
    };
    if let Some(tolerance) = a.tolerance {
        request.objectives.iter_mut().for_each(|o| o.tolerance = tolerance);
    }
    let baseline = load(&baseline, &[])?;
    request.tokens = Matching { tolerance: a.tolerance, tokens: a.tokens }.tokens(&spec, &baseline);
    let matched = find(&spec, &baseline, &request).map_err(|error| {
        let help = arms::help(&spec, &baseline, &request, &error, Place::Options);
        Failure::Error(format!("{error}{help}").into())
    })?;
    leave(a, &spec, &matched)
}

/// Writes what was matched, and shows it.
fn leave(a: &Arguments, spec: &Spec, matched: &Matched) -> Done {
    if let Some(out) = &a.write {
        let text = edited(&a.spec.spec, &a.spec.set, matched)?;
        files::write_named(out, |out| out.write_all(text.as_bytes()))?;
    }
    if a.json {
        return Ok(show::json(matched)?);
    }
    Ok(say!("{}", table(&spec.model.name, matched))?)
}

/// A size that could meet a measure; output of `--json`.
#[derive(Serialize)]
struct Size {
    field: String,
    step: u64,
    value: u64,
    /// The relative difference that is left of its measure, and that of the other.
    residual: f64,
    meets: bool,
    flops_per_token: f64,
    parameters: u128,
}

/// Output of `--json` where no fields are named.
#[derive(Serialize)]
struct Proposals {
    flops: Vec<Size>,
    params: Vec<Size>,
    pair: Option<Matched>,
}

impl From<&Candidate> for Size {
    fn from(c: &Candidate) -> Self {
        Size {
            field: c.objective.field.clone(),
            step: c.objective.step,
            value: c.matched.fields.values().copied().next().unwrap_or(0),
            residual: c.residual(),
            meets: c.meets(),
            flops_per_token: c.matched.matched.flops_per_token.mean(),
            parameters: c.matched.matched.parameters,
        }
    }
}

/// Shows the sizes that could meet the baseline, and the pair that meets both FLOPs and parameters;
/// takes that pair where it is asked to.
fn propose(a: &Arguments, spec: &Spec, baseline: &Spec) -> Done {
    let tolerance = a.tolerance.or(spec.matching.as_ref().map(|m| m.tolerance)).unwrap_or(TOLERANCE);
    let tokens = Matching { tolerance: None, tokens: a.tokens }.tokens(spec, baseline);
    let measures = [Measure::FlopsPerToken, Measure::Parameters].map(|measure| (measure, tolerance));
    let both = pair(spec, baseline, measures, tokens)?;
    let percent = 100.0 * tolerance;
    if a.auto || a.write.is_some() {
        return match both {
            Ok((_, matched)) if a.auto => leave(a, spec, &matched),
            Ok(_) => {
                Err(Failure::Usage("nothing to write: name the fields, or take the pair with --auto".into()))
            }
            Err(closest) => {
                let closest = closest.map_or(String::new(), |m| format!("; closest: {m}"));
                let what = format!(
                    "no two sizes meet FLOPs and parameters within {percent} %{closest}\n  without --auto the command shows each size alone; \
                     --tolerance widens what counts"
                );
                Err(Failure::Error(what.into()))
            }
        };
    }
    let [flops, params] = measures.map(|of| candidates(spec, baseline, of, tokens));
    let (flops, params) = (flops?, params?);
    if a.json {
        let of = |list: &[Candidate]| list.iter().map(Size::from).collect();
        let pair = both.ok().map(|(_, matched)| matched);
        return Ok(show::json(&Proposals { flops: of(&flops), params: of(&params), pair })?);
    }
    for (list, option, other) in [(&flops, "--flops", "parameters"), (&params, "--params", "FLOPs per token")]
    {
        say!("{}\n", alone(list, option, other))?;
    }
    match both {
        Ok((request, matched)) => {
            let [f, p] =
                [0, 1].map(|i| format!("{}:{}", request.objectives[i].field, request.objectives[i].step));
            say!(
                "Both within {percent} %: --flops {f} --params {p}, or --auto\n{}",
                table(&spec.model.name, &matched)
            )?
        }
        Err(Some(closest)) => say!("No two sizes meet both within {percent} %; closest: {closest}")?,
        Err(None) => say!("No two sizes meet both.")?,
    }
    Ok(())
}

/// Sizes that could meet a measure, each with what it would reach.
fn alone(list: &[Candidate], option: &str, other: &str) -> String {
    let Some(first) = list.first() else { return format!("No size is for {option}.") };
    let measure = first.objective.measure;
    let head =
        [format!("{measure} by"), "value".into(), "reaches".into(), format!("{other} then"), String::new()];
    let mut rows = vec![head.to_vec()];
    for c in list {
        let m = &c.matched;
        let (ours, theirs) = match measure {
            Measure::Parameters => (m.matched.flops_per_token.mean(), m.baseline.flops_per_token.mean()),
            Measure::FlopsPerToken | Measure::TrainingFlopsPerToken | Measure::MemoryBytes => {
                (m.matched.parameters as f64, m.baseline.parameters as f64)
            }
        };
        rows.push(vec![
            format!("{option} {}:{}", c.objective.field, c.objective.step),
            m.fields.values().map(|v| grouped((*v).into())).collect(),
            format!("{:+.3} %", 100.0 * c.residual()),
            format!("{:+.1} %", 100.0 * (ours / theirs - 1.0)),
            if c.meets() { String::new() } else { "not close enough".into() },
        ]);
    }
    show::table(&rows)
}

fn suite(a: &Arguments) -> Done {
    let fields = [&a.flops, &a.training, &a.params, &a.memory];
    if a.baseline.is_some() || a.auto || fields.iter().any(|f| f.is_some()) {
        let what = "a suite says itself what is matched with what: change its variants' `match`";
        return Err(Failure::Usage(what.into()));
    }
    let (mut variants, mut texts) = (vec![], vec![]);
    let matching = Matching { tolerance: a.tolerance, tokens: a.tokens };
    let (suite, _) = arms::load(&a.spec, matching, &|_| vec![], &mut |arm| {
        let Some(matched) = &arm.matched else { return Ok(()) };
        if let Some(folder) = &a.write {
            let extension = arm.path.extension().unwrap_or_default().to_string_lossy();
            let to = folder.join(format!("{}.{extension}", arm.name));
            texts.push((edited(&arm.path, &arm.set, matched)?, to));
        }
        if !a.json {
            say!("{}", table(&arm.name, matched))?;
        }
        variants.push(Arm { name: arm.name.clone(), matched: matched.clone() });
        Ok(())
    })?;
    if variants.is_empty() {
        return Err(Failure::Usage("no variant of the suite has a `match`".into()));
    }
    // All of them are matched: now they are written.
    if let Some(folder) = &a.write {
        fs::create_dir_all(folder).map_err(|e| files::about(folder, e))?;
    }
    for (text, to) in texts {
        files::write_named(&to, |out| out.write_all(text.as_bytes()))?;
    }
    if a.json {
        show::json(&Report { suite: suite.name, variants })?;
    }
    Ok(())
}

/// The text of a specification with the matched values, and those that `set` gave it; nothing else
/// changes.
fn edited(from: &Path, set: &[String], matched: &Matched) -> Result<String, Failure> {
    let ast = dreamc_dsl::parse_file(from)?;
    let name = match ast.spelling {
        Spelling::Dream => "matched.dream",
        Spelling::Yaml => "matched.yaml",
    };
    let mut text = ast.source.text;
    for (field, value) in set.iter().filter_map(|s| s.split_once('=')) {
        if !matched.fields.contains_key(field.trim()) {
            text = dreamc_dsl::edit(name, &text, field.trim(), value.trim())?;
        }
    }
    Ok(with_values(name, text, matched)?)
}

/// A text, of the spelling of `name`, with the matched values.
pub fn with_values(name: &str, mut text: String, matched: &Matched) -> Result<String, Diagnostics> {
    for (field, value) in &matched.fields {
        text = dreamc_dsl::edit(name, &text, field, &value.to_string())?;
    }
    Ok(text)
}

fn table(name: &str, m: &Matched) -> String {
    let fields: Vec<String> = m.fields.iter().map(|(f, v)| format!("{f} {}", grouped((*v).into()))).collect();
    let row = |measure: Measure, b: f64, f: f64, show: &dyn Fn(f64) -> String| {
        let note = if m.residual.contains_key(&measure) { "" } else { "not an objective" };
        let difference = format!("{:+.3} %", 100.0 * (f / b - 1.0));
        vec![measure.to_string(), show(b), show(f), difference, note.into()]
    };
    let (b, f) = (&m.baseline, &m.matched);
    let size = |n: f64| decimal_bytes(n as u128);
    let mut rows = vec![
        ["", "baseline", "matched", "difference"].map(String::from).to_vec(),
        row(Measure::FlopsPerToken, b.flops_per_token.mean(), f.flops_per_token.mean(), &decimals),
    ];
    if let (Some(b), Some(f)) = (b.training_flops_per_token, f.training_flops_per_token) {
        rows.push(row(Measure::TrainingFlopsPerToken, b.mean(), f.mean(), &decimals));
    }
    rows.extend([
        row(Measure::Parameters, b.parameters as f64, f.parameters as f64, &decimals),
        row(Measure::MemoryBytes, b.memory_bytes as f64, f.memory_bytes as f64, &size),
    ]);
    let rounds = if m.iterations == 1 { "1 round".into() } else { format!("{} rounds", m.iterations) };
    format!("{name}: {} after {rounds}\n{}", fields.join(", "), show::table(&rows))
}
