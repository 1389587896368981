//! `dreamc doctor --gpu`: every kernel of some models on the GPU, against its naive kernel.
//!
//! *In*: a GPU. *Out*: a line for each kernel: its shape, the rung of its text, how far it is from
//! the naive kernel against what rounding may do, its time, and the share of the data sheet's rates
//! that it reaches. *Promise*: code on the GPU that faults or does not end costs that line alone;
//! exit code 1 where a line is not right.

use clap::Args;
use dreamc_device::cuda::CudaDevice;
use dreamc_device::gpu::proof::cases::{CASES, Case};
use dreamc_device::gpu::proof::{Outcome, Prover, Rung, Trial, Verdict, prove_by, watch};
use dreamc_device::{Device, DeviceError};
use dreamc_runtime::train::event::{Event, Watcher};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::progress::Progress;
use dreamc_study::{say, show};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

#[derive(Args)]
pub(super) struct GpuArguments {
    /// Prove each kernel on a GPU against the naive one
    #[arg(long)]
    gpu: bool,

    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0, requires = "gpu")]
    gpu_number: usize,

    /// Prove the kernels of these models alone
    #[arg(long, value_name = "MODEL,…", value_delimiter = ',', requires = "gpu", value_parser = case)]
    only: Vec<String>,

    /// Seconds after which a kernel that does not end is given up
    #[arg(long, value_name = "SECONDS", default_value_t = PATIENCE, requires = "gpu")]
    patience: u64,

    /// Be the process that proves: a task on standard input, findings on standard output
    #[arg(long, hide = true, conflicts_with = "gpu")]
    prove: bool,
}

impl GpuArguments {
    pub(super) fn asked(&self) -> bool {
        self.gpu || self.prove
    }
}

fn case(name: &str) -> Result<String, String> {
    let known: Vec<&str> = CASES.iter().map(|case| case.name).collect();
    match known.contains(&name) {
        true => Ok(name.into()),
        false => Err(format!("there are {}", known.join(", "))),
    }
}

/// One rung of a kernel.
struct Line {
    case: &'static str,
    kernel: String,
    shape: String,
    origin: String,
    verdict: Verdict,
    share: Option<f64>,
}

pub(super) fn run(a: &GpuArguments, json: bool) -> Done {
    if a.prove {
        return prove();
    }
    let begun = Instant::now();
    let device = CudaDevice::new(a.gpu_number)?;
    let cases: Vec<&Case> =
        CASES.iter().filter(|c| a.only.is_empty() || a.only.iter().any(|name| name == c.name)).collect();
    let trials = cases.iter().map(|case| case.trial(&device)).collect::<Result<Vec<Trial>, _>>()?;
    let mut progress = Progress::default();
    progress.tell(&Event::Busy("compiling"));
    device.compile(&trials.iter().collect::<Vec<_>>());
    let compiled = begun.elapsed().as_secs_f64();
    let prover = prover(a.patience)?;
    let (mut lines, mut launches) = (vec![], 0);
    for (case, trial) in cases.iter().zip(&trials) {
        progress.tell(&Event::Busy(case.name));
        launches += trial.launches();
        for verdict in watch(&prover, a.gpu_number, trial, &mut |_| {})? {
            let kernel = trial.kernel(verdict.launch);
            let (kernel, shape) = kernel.split_once(' ').unwrap_or((kernel, ""));
            lines.push(Line {
                case: case.name,
                kernel: kernel.into(),
                shape: shape.into(),
                origin: trial.origin(verdict.launch).into(),
                share: trial.share(&verdict),
                verdict,
            });
        }
    }
    progress.clear();
    let wrong = lines.iter().filter(|line| !line.verdict.outcome.right()).count();
    let summary = Summary {
        device: device.name(),
        driver: device.driver(),
        nvrtc: device.nvrtc(),
        launches,
        wrong,
        compiled,
        seconds: begun.elapsed().as_secs_f64(),
    };
    if json {
        show::json(&summary.json(&lines))?
    } else {
        summary.print(&lines)?
    }
    if wrong == 0 { Ok(()) } else { Err(Failure::Said) }
}

/// This program as a process that proves.
fn prover(patience: u64) -> std::io::Result<Prover> {
    let arguments = ["doctor", "--prove"].map(String::from).into();
    Ok(Prover {
        program: std::env::current_exe()?,
        arguments,
        patience: Duration::from_secs(patience.max(1)),
    })
}

/// See [`super::prove_plans`]; a program that does not know its file proves nothing.
pub(super) fn prove_plans() {
    let asked = std::env::var("DREAMC_PATIENCE").ok().and_then(|seconds| seconds.parse().ok());
    if let Ok(prover) = prover(asked.unwrap_or(PATIENCE)) {
        prove_by(prover);
    }
}

/// Seconds after which a kernel that does not end is given up.
const PATIENCE: u64 = 60;

/// The other process.
fn prove() -> Done {
    let mut input = vec![];
    std::io::stdin().read_to_end(&mut input).map_err(|e| Failure::Error(e.into()))?;
    let mut output = std::io::stdout().lock();
    let mut gone = false;
    // Nobody listens any more, and nobody wants the rest.
    let said = CudaDevice::prove(&input, &mut |line| {
        gone |= writeln!(output, "{line}").and_then(|()| output.flush()).is_err();
    });
    match said {
        Err(DeviceError::Lost { .. }) if !gone => Err(Failure::Said),
        other => Ok(other?),
    }
}

struct Summary {
    device: String,
    driver: (i32, i32),
    nvrtc: (i32, i32),
    launches: usize,
    wrong: usize,
    compiled: f64,
    seconds: f64,
}

impl Summary {
    fn json(&self, lines: &[Line]) -> Value {
        let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
        let line = |line: &Line| {
            let Line { case, kernel, shape, origin, verdict, share } = line;
            let mut value = json!({"model": case, "kernel": kernel, "shape": shape, "origin": origin,
                "right": verdict.outcome.right(), "share": share});
            if let (Value::Object(all), Ok(Value::Object(own))) = (&mut value, serde_json::to_value(verdict))
            {
                all.extend(own);
            }
            value
        };
        json!({
            "device": self.device,
            "driver": version(self.driver),
            "nvrtc": version(self.nvrtc),
            "kernels": self.launches,
            "wrong": self.wrong,
            "compile_seconds": self.compiled,
            "seconds": self.seconds,
            "lines": lines.iter().map(line).collect::<Vec<_>>(),
        })
    }

    fn print(&self, lines: &[Line]) -> std::io::Result<()> {
        let mut rows =
            vec![["kernel", "rung", "error", "bound", "µs", "roofline", "found"].map(String::from).to_vec()];
        let mut case = "";
        for line in
            lines.iter().filter(|line| line.verdict.rung != Rung::Naive || !line.verdict.outcome.right())
        {
            if line.case != case {
                case = line.case;
                rows.push(vec![format!("— {case}")]);
            }
            rows.push(line.row());
        }
        say!("{}", show::table(&rows))?;
        for line in lines.iter().filter(|line| !line.verdict.outcome.right()) {
            let Line { case, kernel, shape, origin, verdict, .. } = line;
            say!("{kernel} {shape}, {} ({case}, {origin}): {}", verdict.rung, verdict.outcome)?;
        }
        let ((driver, minor), (nvrtc, patch)) = (self.driver, self.nvrtc);
        say!(
            "{} kernels on {}, driver for CUDA {driver}.{minor}, NVRTC {nvrtc}.{patch}: {}; {} to compile, {} in all",
            self.launches,
            self.device,
            if self.wrong == 0 { "all are right".into() } else { format!("{} are not right", self.wrong) },
            show::duration(self.compiled),
            show::duration(self.seconds),
        )
    }
}

/// Kind and shape of a kernel, as far as a column has room.
fn named(kernel: &str, shape: &str) -> String {
    const ROOM: usize = 60;
    let all = format!("{kernel} {shape}");
    match all.char_indices().nth(ROOM) {
        Some((end, _)) => format!("{}…", &all[..end]),
        None => all,
    }
}

impl Line {
    fn row(&self) -> Vec<String> {
        let [error, bound, time] = match &self.verdict.outcome {
            Outcome::Ran { error, bound, seconds, .. } => [
                if *error == f64::MAX { "∞".into() } else { format!("{error:.1e}") },
                format!("{bound:.0e}"),
                if *seconds > 0.0 { format!("{:.1}", seconds * 1e6) } else { String::new() },
            ],
            Outcome::Uncompiled { .. } | Outcome::Faults { .. } | Outcome::Hangs { .. } => {
                [String::new(), String::new(), String::new()]
            }
        };
        let found = match &self.verdict.outcome {
            outcome if outcome.right() => "right",
            Outcome::Ran { .. } => "WRONG",
            Outcome::Uncompiled { .. } => "NO CODE",
            Outcome::Faults { .. } => "FAULTS",
            Outcome::Hangs { .. } => "HANGS",
        };
        let share = self.share.map_or(String::new(), |share| format!("{:.0} %", share * 1e2));
        let rung = self.verdict.rung.to_string();
        vec![named(&self.kernel, &self.shape), rung, error, bound, time, share, found.into()]
    }
}
