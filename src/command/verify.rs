//! `dreamc verify`: proofs about a specification.

use crate::arguments::{BaseArguments, DeviceArguments};
use clap::Args;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_device::Device;
use dreamc_runtime::train::event::{Event, Watcher};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::progress::Progress;
use dreamc_study::spec::Named;
use dreamc_study::spec::is_specification;
use dreamc_study::{say, show};
use dreamc_verify::{Compiler, Task, VerifyError, shrink, verify};
use indexmap::IndexMap;
use std::path::PathBuf;

/// Prove that what is compiled computes what the specification says
#[derive(Args)]
#[command(after_help = "\
The model is made small first: sizes shrink, components and how they are put together stay. A run or checkpoint is looked
at with its own weights where it is small already. Every proof says by how much it holds, and against which tolerance; one that fails
names the layer and the component, and the exit code is 1.

Examples:
  dreamc verify model.yaml
  dreamc verify model.yaml --only gradients,cached --seed 7
  dreamc verify runs/quickstart-001 --json
  dreamc verify model.yaml --device ptx          the GPU's kernels, interpreted, under two schedules
  dreamc verify model.yaml --ranks 4             four ranks, in threads, train what one trains")]
pub struct Arguments {
    /// A specification, a run folder, a checkpoint or a .safetensors file
    #[arg(value_name = "SPEC|CHECKPOINT")]
    model: PathBuf,

    /// Try these proofs alone
    #[arg(long, value_name = "PROOF,…", value_delimiter = ',')]
    only: Vec<String>,

    /// Seed of weights and tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Also train by this many ranks, in threads, and compare with one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    ranks: u64,

    /// Change a field: `--set ea.count=1024`; may be given several times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(a: Arguments) -> Done {
    let specification = is_specification(&a.model);
    let (spec, tensors) = if specification {
        (Named { spec: a.model.clone(), set: a.set.clone() }.load()?, None)
    } else {
        let trained = Trained::open(&a.model, a.base.moved(), &a.set, Rewriting::default())?;
        (trained.spec, Some(trained.tensors))
    };
    let weights = match &tensors {
        Some(tensors) if shrink(&spec, true).whole => {
            let mut all = IndexMap::new();
            for (name, _) in tensors.entries() {
                if let Some((_, values)) = tensors.get(name)? {
                    all.insert(name.to_string(), values.to_vec());
                }
            }
            Some(all)
        }
        _ => None,
    };
    let devices = a.device.compared(a.seed)?;
    let devices: Vec<(String, &dyn Device)> =
        devices.iter().map(|(name, device)| (name.clone(), device.as_ref())).collect();
    let task = Task {
        spec: &spec,
        weights: weights.as_ref(),
        seed: a.seed,
        only: &a.only,
        devices: &devices,
        pipeline: &Compiler,
        ranks: a.ranks,
    };
    let mut progress = Progress::default();
    let report = verify(&task, &mut |proof| progress.tell(&Event::Busy(proof)));
    progress.clear();
    let report = report.map_err(|e| match e {
        VerifyError::NoProof { .. } => Failure::Usage(format!("--only: {e}")),
        e => e.into(),
    })?;
    if a.json {
        show::json(&report)?;
    } else {
        say!("{report}")?;
    }
    if report.holds() { Ok(()) } else { Err(Failure::Said) }
}
