//! `dreamc bench`: how fast a specification trains and writes here.

use crate::device::DeviceArguments;
use crate::failure::{Done, Failure};
use crate::rewriting::RewriteArguments;
use crate::say;
use crate::show::{self, bytes, short, table};
use crate::spec::SpecArguments;
use clap::{Args, value_parser};
use dreamc_dsl::spec::Precision;
use dreamc_runtime::bench::{self, Decoding, LaunchTime, Training};
use dreamc_runtime::device::machine;
use dreamc_runtime::train::prepare;
use serde::Serialize;

/// Measure how fast a specification trains and writes on this machine
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc bench examples/quickstart.yaml
  dreamc bench examples/tiny-dr-da.yaml --batch 8 --sequence 128 --threads 2 --launches 20
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

    /// Tokens written; 0 for none
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = value_parser!(u64).range(0..=1_000_000))]
    tokens: u64,

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
    training: Training,
    decoding: Option<Decoding>,
    /// FLOP/s of a large product.
    ceiling: Ceiling,
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
    let rewriting = a.rewriting.on(device)?;
    let training = bench::training(&spec, device, (batch, sequence), a.steps as usize, &rewriting)?;
    let peak_resident = machine::peak_resident();
    let context = spec.model.context as usize;
    let decoding = match (a.tokens as usize).min(context.saturating_sub(1)) {
        0 | 1 => None,
        tokens => bench::decoding(&spec, device, ((context - tokens).min(64), tokens), &rewriting)?,
    };
    let ceiling = Ceiling {
        f32: bench::ceiling(device, Precision::F32)?,
        bf16: bench::ceiling(device, Precision::Bf16)?,
    };
    let report = Report {
        model: spec.model.name.clone(),
        machine: machine::describe(),
        device: device.name(),
        training,
        decoding,
        ceiling,
        peak_resident,
    };
    if a.json {
        show::json(&report)?;
        return Ok(());
    }
    tell(&report, a.launches)
}

fn tell(r: &Report, launches: usize) -> Done {
    let t = &r.training;
    let share = |ceiling: Option<f64>| ceiling.map_or(String::new(), |c| format!(" of {}FLOP/s", short(c)));
    let ceiling = if t.precision == "f32" { r.ceiling.f32 } else { r.ceiling.bf16 };
    let mut rows = vec![
        vec!["device".to_string(), format!("{}, {}", r.device, t.precision)],
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
        vec!["products".into(), format!("{}FLOP/s{}", short(t.flops_per_second), share(ceiling))],
        vec![
            "memory".into(),
            format!(
                "{} planned{}",
                bytes(t.memory.total),
                r.peak_resident.map_or(String::new(), |p| format!(", {} resident at most", bytes(p)))
            ),
        ],
    ];
    if let Some(text) = by_library(&t.launches) {
        rows.push(vec!["cuBLASLt".into(), text]);
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
    say!("{}", table(&rows))?;
    if launches > 0 {
        let all: f64 = t.launches.iter().map(|l| l.seconds).sum();
        let lines = t.launches.iter().take(launches).map(|l| {
            let rate =
                if l.flops > 0 { format!("{}FLOP/s", short(l.flops as f64 / l.seconds)) } else { "".into() };
            vec![
                format!("{:.2} ms", l.seconds * 1e3),
                format!("{:.1} %", 100.0 * l.seconds / all),
                rate,
                format!("×{}", l.count),
                l.origin.clone(),
                l.kernel.clone(),
                l.choice.as_ref().map_or(String::new(), |choice| {
                    format!("{}: {}", if choice.library { "cuBLASLt" } else { "generated" }, choice.reason)
                }),
            ]
        });
        say!("\n{:.1} ms in launches\n{}", all * 1e3, table(&lines.collect::<Vec<_>>()))?;
    }
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
    use dreamc_runtime::device::Choice;

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
