//! `dreamc bench`: how fast a specification trains and writes here.

use crate::arguments::{DeviceArguments, RewriteArguments, SpecArguments};
use clap::{Args, value_parser};
use dreamc_compiler::format::Packed;
use dreamc_device::{Device, machine};
use dreamc_dsl::spec::Precision;
use dreamc_runtime::bench::{self, Decoding, LaunchTime, Together, Training};
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::say;
use dreamc_study::show::{self, bytes, short, table};
use serde::Serialize;

/// Measure how fast a specification trains and writes on this machine
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc bench examples/quickstart.yaml
  dreamc bench examples/tiny-dr-da.yaml --batch 8 --sequence 128 --threads 2 --launches 20
  dreamc bench examples/quickstart.yaml --decode
  dreamc bench benches/cpu/a.yaml --set train.precision=f32 --json | jq .training.tokens_per_second")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Sequences in a step; by default as the spec trains
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    batch: Option<u64>,

    /// Tokens of a sequence; by default as the spec trains
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 24))]
    sequence: Option<u64>,

    /// Training steps measured
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = value_parser!(u64).range(1..=10_000))]
    steps: u64,

    /// Tokens of a prompt
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = value_parser!(u64).range(1..=1_000_000))]
    prompt: u64,

    /// Tokens written; 0 for none
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = value_parser!(u64).range(0..=1_000_000))]
    tokens: u64,

    /// Leave out training; write one sequence, then eight at once, and say how near that comes to
    /// the speed of memory
    #[arg(long, conflicts_with_all = ["batch", "sequence", "steps", "ranks"])]
    decode: bool,

    /// With `--decode`: matrices in this format, as those of a quantised model are
    #[arg(long, value_name = "FORMAT", requires = "decode", value_parser = clap::builder::PossibleValuesParser::new(Packed::NAMES))]
    format: Option<String>,

    /// Measure alone how fast this device reads a matrix of 14,336 rows of 4,096 numbers, in every
    /// format, for one row of activations and for eight
    #[arg(long, conflicts_with_all = ["batch", "sequence", "steps", "ranks", "decode"])]
    blocks: bool,

    /// Also train by this many ranks, in threads, and say how much of their sums is hidden by
    /// the backward
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = value_parser!(u64).range(1..=64))]
    ranks: u64,

    /// Show the launches that take most time
    #[arg(long, default_value_t = 0, value_name = "N")]
    launches: usize,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Report {
    model: String,
    machine: String,
    device: String,
    training: Option<Training>,
    decoding: Option<Decoding>,
    /// Eight sequences at once.
    decoding_eight: Option<Decoding>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<Together>,
    /// FLOP/s of a large product.
    ceiling: Ceiling,
    /// Bytes a second that a copy reads and writes.
    copy: f64,
    /// Largest memory of the process so far, in bytes, where the system tells.
    peak_resident: Option<u64>,
}

#[derive(Serialize)]
struct Ceiling {
    f32: Option<f64>,
    bf16: Option<f64>,
}

pub fn run(a: Arguments) -> Done {
    let spec = a.spec.load()?;
    let batch = a.batch.unwrap_or(spec.train.batch / spec.train.accumulate.max(1)).max(1);
    let sequence = a.sequence.unwrap_or_else(|| prepare::sequence(&spec));
    if sequence > spec.model.context {
        let context = spec.model.context;
        return Err(Failure::Usage(format!("--sequence {sequence} exceeds the model's context {context}")));
    }
    let device = a.device.open()?;
    let device = device.as_ref();
    if a.blocks {
        return read_blocks(device, a.json);
    }
    let rewriting = a.rewriting.on(device)?;
    let training = match a.decode {
        true => None,
        false => Some(bench::training(&spec, device, (batch, sequence), a.steps as usize, &rewriting)?),
    };
    let peak_resident = machine::peak_resident();
    let ranks = match a.ranks {
        1 => None,
        n => Some(bench::together(&spec, device, (batch, sequence), a.steps as usize, &rewriting, n)?),
    };
    let context = spec.model.context as usize;
    let tokens = (a.tokens as usize).min(context.saturating_sub(1));
    let written = |sequences: usize| match tokens {
        0 | 1 => Ok(None),
        _ => {
            let prompt = (context - tokens).min(a.prompt as usize);
            bench::decoding(&spec, device, (sequences, prompt, tokens), &rewriting, a.format.as_deref())
        }
    };
    let decoding = written(1)?;
    let decoding_eight = if a.decode { written(8)? } else { None };
    let ceiling = Ceiling {
        f32: bench::ceiling(device, Precision::F32)?,
        bf16: bench::ceiling(device, Precision::Bf16)?,
    };
    let copy = bench::copying(device)?;
    let report = Report {
        model: spec.model.name.clone(),
        machine: machine::describe(),
        device: device.name(),
        training,
        decoding,
        decoding_eight,
        ranks,
        ceiling,
        copy,
        peak_resident,
    };
    if a.json {
        show::json(&report)?;
        return Ok(());
    }
    tell(&report, a.launches)
}

/// A matrix of Llama's MLP of 8 billion numbers.
const MATRIX: (u64, u64) = (14_336, 4096);

/// How fast every format is read.
fn read_blocks(device: &dyn Device, json: bool) -> Done {
    let found = bench::readings(device, MATRIX, &[1, 8], 512 << 20)?;
    if json {
        return Ok(show::json(&serde_json::json!({ "device": device.name(), "readings": found }))?);
    }
    let line = |r: &bench::Reading| {
        let rate = format!("{}B/s", short(r.bytes_per_second));
        vec![
            r.format.into(),
            format!("{} rows", r.rows),
            bytes(r.bytes),
            format!("{:.1} µs", r.seconds * 1e6),
            rate,
        ]
    };
    say!("{}\n{}", device.name(), table(&found.iter().map(line).collect::<Vec<_>>()))?;
    Ok(())
}

fn tell(r: &Report, launches: usize) -> Done {
    let precision = r.training.as_ref().map(|t| t.precision).or(r.decoding.as_ref().map(|d| d.precision));
    let mut rows = vec![vec!["device".to_string(), format!("{}, {}", r.device, precision.unwrap_or("f32"))]];
    if let Some(t) = &r.training {
        rows.extend(trained(r, t));
    }
    rows.push(vec![
        "writing".into(),
        r.decoding.as_ref().map_or("not measured".into(), |d| {
            format!(
                "{} tokens/s one at a time, {} tokens/s of a prompt of {}",
                short(d.tokens_per_second),
                short(d.prompt_tokens_per_second),
                d.prompt
            )
        }),
    ]);
    if let Some(d) = &r.decoding {
        rows.push(vec![
            "products of the prompt".into(),
            part_of_ceiling(r, d.precision, d.prompt_flops_per_second),
        ]);
        rows.push(vec![
            "weights read".into(),
            format!(
                "{} a token, {}B/s ({}B/s in the best step): {:.0} % of the {}B/s of reading alone, between the tokens; \
                 a copy reads and writes {}B/s",
                bytes(d.weights),
                short(d.weights_per_second),
                short(d.best_weights_per_second),
                100.0 * d.weights_per_second / d.read,
                short(d.read),
                short(r.copy)
            ),
        ]);
    }
    if let (Some(one), Some(eight)) = (&r.decoding, &r.decoding_eight) {
        let times = eight.tokens_per_second / one.tokens_per_second;
        let text = format!("{} tokens/s, {times:.1} times one", short(eight.tokens_per_second));
        rows.push(vec!["eight at once".into(), text]);
    }
    say!("{}", table(&rows))?;
    if launches > 0 {
        let parts = [("training", r.training.as_ref().map(|t| &t.launches))];
        let written = [
            ("writing", r.decoding.as_ref().map(|d| &d.launches)),
            ("reading a prompt", r.decoding.as_ref().map(|d| &d.prompt_launches)),
            ("writing eight", r.decoding_eight.as_ref().map(|d| &d.launches)),
        ];
        for (name, all) in parts.into_iter().chain(written).filter_map(|(n, l)| Some((n, l?))) {
            tell_launches(name, all, launches)?;
        }
    }
    Ok(())
}

/// A rate of multiply-adds as a share of a large matmul's.
fn part_of_ceiling(r: &Report, precision: &str, rate: f64) -> String {
    let ceiling = if precision == "f32" { r.ceiling.f32 } else { r.ceiling.bf16 };
    let ceiling = ceiling.map_or(String::new(), |c| format!(" of {}FLOP/s", short(c)));
    format!("{}FLOP/s{ceiling}", short(rate))
}

/// Rows of what training took.
fn trained(r: &Report, t: &Training) -> Vec<Vec<String>> {
    let mut rows = vec![
        vec![
            "training".into(),
            format!(
                "{} tokens/s ({} × {} tokens, {:.1} ms a step; the best of {}: {})",
                short(t.tokens_per_second),
                t.batch,
                t.sequence,
                t.step_seconds * 1e3,
                t.steps,
                short(t.best_tokens_per_second)
            ),
        ],
        vec!["products".into(), part_of_ceiling(r, t.precision, t.flops_per_second)],
        vec![
            "memory".into(),
            format!(
                "{} planned{}",
                bytes(t.memory.total),
                r.peak_resident.map_or(String::new(), |p| format!(", {} resident at most", bytes(p)))
            ),
        ],
    ];
    rows.extend(by_library(&t.launches).map(|text| vec!["cuBLASLt".into(), text]));
    rows.extend(r.ranks.as_ref().map(|ranks| {
        let text = format!(
            "{} in threads, {:.1} ms a step; sums over them {:.1} ms, {:.0} % of it hidden by the backward",
            ranks.ranks,
            ranks.step_seconds * 1e3,
            ranks.exchanged_seconds * 1e3,
            ranks.hidden * 1e2
        );
        vec!["ranks".into(), text]
    }));
    rows
}

/// The launches that take most time.
fn tell_launches(name: &str, all: &[LaunchTime], most: usize) -> Done {
    let seconds: f64 = all.iter().map(|l| l.seconds).sum();
    let lines = all.iter().take(most).map(|l| {
        let rate =
            if l.flops > 0 { format!("{}FLOP/s", short(l.flops as f64 / l.seconds)) } else { "".into() };
        vec![
            format!("{:.2} ms", l.seconds * 1e3),
            format!("{:.1} %", 100.0 * l.seconds / seconds),
            rate,
            format!("×{}", l.count),
            l.origin.clone(),
            l.kernel.clone(),
            l.choice.as_ref().map_or(String::new(), |choice| {
                format!("{}: {}", if choice.library { "cuBLASLt" } else { "generated" }, choice.reason)
            }),
        ]
    });
    say!("\n{name}: {:.1} ms in launches\n{}", seconds * 1e3, table(&lines.collect::<Vec<_>>()))?;
    Ok(())
}

/// How many of the plain products of a step are the library's; `None` where it was not asked.
fn by_library(launches: &[LaunchTime]) -> Option<String> {
    let able: Vec<_> = launches.iter().filter_map(|l| Some((l, l.choice.as_ref()?))).collect();
    let seconds = |l: &LaunchTime| l.seconds;
    let all: f64 = able.iter().map(|(l, _)| seconds(l)).sum();
    let taken = able.iter().filter(|(_, choice)| choice.library);
    let (count, part) = taken.fold((0, 0.0), |(n, s), (l, _)| (n + 1, s + seconds(l)));
    let share = if all > 0.0 { 100.0 * part / all } else { 0.0 };
    (!able.is_empty())
        .then(|| format!("{count} of {} plain products, {share:.0} % of their time", able.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_device::Choice;

    #[test]
    fn products_of_the_library_have_their_share() {
        let launch = |seconds, library: Option<bool>| LaunchTime {
            kernel: "product".into(),
            origin: "layer0".into(),
            count: 1,
            seconds,
            flops: 1,
            choice: library.map(|library| Choice { library, reason: String::new() }),
        };
        assert_eq!(by_library(&[launch(5.0, None)]), None);
        let launches = [launch(5.0, None), launch(3.0, Some(true)), launch(1.0, Some(false))];
        assert_eq!(by_library(&launches).unwrap(), "1 of 2 plain products, 75 % of their time");
    }
}
