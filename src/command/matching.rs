//! `dreamc match`: fields of a spec moved until it costs what a baseline costs.

use crate::compare::arms::{self, Matching, TOLERANCE};
use crate::failure::{Done, Failure};
use crate::number::{decimal_bytes, decimals, grouped};
use crate::spec::SpecArguments;
use crate::{say, show};
use clap::{Args, value_parser};
use dreamc_compiler::matching::{Matched, Measure, Objective, Request, TOKENS, find};
use dreamc_dsl::{FileKind, Spec, Spelling};
use dreamc_runtime::files;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Change fields of a specification until its FLOPs and parameters are a baseline's
///
/// Fields and baseline come from the `match` section where they are not given. A suite matches all
/// its variants.
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc match examples/dr-da-16.yaml
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

    /// Field that meets the parameters
    #[arg(long, value_name = "FIELD[:STEP]", value_parser = field)]
    params: Option<(String, u64)>,

    /// Field that meets the memory of generation
    #[arg(long, value_name = "FIELD[:STEP]", value_parser = field)]
    memory: Option<(String, u64)>,

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
    SpecArguments { spec: path.into(), set: set.into() }.load()
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
        (Measure::Parameters, &a.params),
        (Measure::MemoryBytes, &a.memory),
    ];
    let mut request = match section {
        Some(section) if given.iter().all(|(_, field)| field.is_none()) => Request::from(section),
        _ => {
            let tolerance = section.map_or(TOLERANCE, |s| s.tolerance);
            let objective = |(measure, field): (Measure, &Option<(String, u64)>)| {
                let (field, step) = field.clone()?;
                Some(Objective { measure, field, step, tolerance })
            };
            let objectives: Vec<Objective> = given.into_iter().filter_map(objective).collect();
            if objectives.is_empty() {
                let what = "nothing to change: give `--flops FIELD:STEP` and `--params FIELD`, or the specification a \
                            `match` section";
                return Err(Failure::Usage(what.into()));
            }
            Request { objectives, tokens: TOKENS }
        }
    };
    if let Some(tolerance) = a.tolerance {
        request.objectives.iter_mut().for_each(|o| o.tolerance = tolerance);
    }
    let baseline = load(&baseline, &[])?;
    request.tokens = Matching { tolerance: a.tolerance, tokens: a.tokens }.tokens(&spec, &baseline);
    let matched = find(&spec, &baseline, &request)?;
    if let Some(out) = &a.write {
        let text = edited(&a.spec.spec, &a.spec.set, &matched)?;
        files::write_named(out, |out| out.write_all(text.as_bytes()))?;
    }
    if a.json {
        return Ok(show::json(&matched)?);
    }
    Ok(say!("{}", table(&spec.model.name, &matched))?)
}

fn suite(a: &Arguments) -> Done {
    if a.baseline.is_some() || [&a.flops, &a.params, &a.memory].iter().any(|f| f.is_some()) {
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
    let rows = [
        ["", "baseline", "matched", "difference"].map(String::from).to_vec(),
        row(Measure::FlopsPerToken, b.flops_per_token.mean(), f.flops_per_token.mean(), &decimals),
        row(Measure::Parameters, b.parameters as f64, f.parameters as f64, &decimals),
        row(Measure::MemoryBytes, b.memory_bytes as f64, f.memory_bytes as f64, &size),
    ];
    let rounds = if m.iterations == 1 { "1 round".into() } else { format!("{} rounds", m.iterations) };
    format!("{name}: {} after {rounds}\n{}", fields.join(", "), show::table(&rows))
}
