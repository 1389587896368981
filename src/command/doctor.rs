//! `dreamc doctor`: what this machine can do, and what to install so that it can do more.
//!
//! *In*: the machine. *Out*: a table, or JSON. *Promise*: nothing is changed, and a part that is
//! missing is an answer, not a failure. With `--gpu` ([`gpu`]): kernels are proved on the GPU, and
//! a wrong one is a failure.

mod gpu;

use clap::Args;
use dreamc_data::files::cache_folder;
use dreamc_device::cpu::CpuDevice;
use dreamc_device::cuda::CudaDevice;
use dreamc_device::{Device, machine};
use dreamc_nvrtc::Nvrtc;
use dreamc_study::failure::Done;
use dreamc_study::{output, say, show};
use serde_json::{Map, Value, json};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// See what this machine can do, and what to install
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc doctor
  dreamc doctor --json | jq .missing
  dreamc doctor --gpu             prove each kernel on the GPU against the naive one, a minute or two

Nothing is changed. Exit code 0, whatever is found: dreamc trains on the CPU with nothing installed.
With --gpu: exit code 1 where a kernel is wrong, faults, does not end or does not compile.")]
pub struct Arguments {
    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    gpu: gpu::GpuArguments,
}

/// Less free space than this is said: a checkpoint of a model with a hundred million parameters
/// takes 1.2 GB.
const LITTLE_SPACE: u64 = 2 << 30;

/// One line of the table.
struct Finding {
    part: &'static str,
    found: String,
    /// The advice, where something is missing.
    advice: Option<String>,
}

/// From now on plans that are loaded on a GPU are proved by this program.
pub fn prove_plans() {
    gpu::prove_plans();
}

pub fn run(a: Arguments) -> Done {
    if a.gpu.asked() {
        return gpu::run(&a.gpu, a.json);
    }
    let findings = findings();
    let missing: Vec<(&str, &str)> =
        findings.iter().filter_map(|f| Some((f.part, f.advice.as_deref()?))).collect();
    if a.json {
        let mut report: Map<String, Value> =
            findings.iter().map(|f| (f.part.replace(' ', "_"), json!(f.found))).collect();
        let missing: Map<String, Value> =
            missing.iter().map(|(part, advice)| (part.replace(' ', "_"), json!(advice))).collect();
        report.insert("missing".into(), Value::Object(missing));
        return Ok(show::json(&report)?);
    }
    let width = findings.iter().map(|f| f.part.len()).max().unwrap_or(0);
    for f in &findings {
        say!("{:<width$}  {}", f.part, f.found)?;
    }
    say!()?;
    if missing.is_empty() {
        return Ok(say!("Nothing is missing: the CPU and the GPU can train.")?);
    }
    say!("The CPU can train with nothing installed. For more:")?;
    for (part, advice) in missing {
        output::write(format!("  {part}: {advice}\n").as_bytes())?;
    }
    Ok(())
}

fn findings() -> Vec<Finding> {
    let plain = |part, found: String| Finding { part, found, advice: None };
    let (system, kind) = (std::env::consts::OS, std::env::consts::ARCH);
    let mut all = vec![
        plain("dreamc", format!("{}, {system} {kind}", env!("CARGO_PKG_VERSION"))),
        plain("processor", machine::processor().unwrap_or_else(|| "unknown".into())),
        // Threads and instructions, as `train` prints them.
        plain("CPU device", CpuDevice::default().name()),
        memory(),
    ];
    all.extend(gpus());
    all.push(nvrtc());
    let here = std::env::current_dir().unwrap_or_else(|_| ".".into());
    all.extend([disk("disk here", &here), disk("disk of caches", &cache_folder())]);
    all
}

fn memory() -> Finding {
    let found = match machine::memory() {
        Some((all, free)) => format!("{}, {} of it free", show::bytes(all), show::bytes(free)),
        None => "unknown: the system has no /proc/meminfo".into(),
    };
    Finding { part: "memory", found, advice: None }
}

/// Every GPU, or why there is none.
fn gpus() -> Vec<Finding> {
    let mut all = vec![];
    loop {
        match CudaDevice::new(all.len()) {
            Ok(gpu) => {
                let (major, minor) = gpu.driver();
                let remark = gpu.remark().map_or(String::new(), |remark| format!(", {remark}"));
                let mut found = format!("{}, driver for CUDA {major}.{minor}{remark}", gpu.name());
                let mut advice = None;
                match gpu.try_a_kernel() {
                    Ok(()) => found += ", runs a kernel",
                    Err(error) => {
                        found += ", runs no kernel";
                        advice = Some(error.to_string());
                    }
                }
                all.push(Finding { part: "GPU", found, advice });
            }
            Err(error) if all.is_empty() => {
                let text = error.to_string();
                let why = text.strip_prefix("cuda:0: ").unwrap_or(&text);
                let (found, advice) =
                    why.split_once("; ").unwrap_or((why, "see `dreamc train --device cuda`"));
                let advice = Some(advice.to_string());
                return vec![Finding { part: "GPU", found: found.into(), advice }];
            }
            Err(_) => return all,
        }
    }
}

fn nvrtc() -> Finding {
    let part = "NVRTC";
    match Nvrtc::find() {
        Ok(found) => {
            let (major, minor) = found.version();
            let place = found.path().map_or(String::new(), |path| format!(", {}", path.display()));
            Finding { part, found: format!("{major}.{minor}{place}"), advice: None }
        }
        Err(error) => {
            let text = error.to_string();
            let (found, advice) = text.split_once("; ").unwrap_or((&text, "install another"));
            let advice = format!("{advice}; it compiles the kernels of `--device cuda` and `ptx`");
            Finding { part, found: found.into(), advice: Some(advice) }
        }
    }
}

/// Free space where a folder is, or would be made.
fn disk(part: &'static str, folder: &Path) -> Finding {
    let there = folder.ancestors().find(|f| f.is_dir()).unwrap_or(Path::new("/"));
    match free_space(there) {
        Some(free) => {
            let found = format!("{} free in {}", show::bytes(free), folder.display());
            let advice = (free < LITTLE_SPACE)
                .then(|| "make room: a checkpoint has 12 bytes for each parameter".to_string());
            Finding { part, found, advice }
        }
        None => Finding { part, found: format!("unknown of {}", folder.display()), advice: None },
    }
}

/// Bytes that this user may still write in a folder.
fn free_space(folder: &Path) -> Option<u64> {
    let path = CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: the call reads a C string and writes a `statvfs` into the one given, which is zeroed,
    // a valid value of it.
    let found = unsafe {
        let mut found: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(path.as_ptr(), &mut found) == 0).then_some(found)
    }?;
    // The fields have other widths on other systems.
    #[allow(clippy::unnecessary_cast)]
    Some((found.f_bavail as u64).saturating_mul(found.f_frsize as u64))
}
