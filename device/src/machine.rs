//! The machine a process runs on, in words, for ledgers and reports.

use std::fs;
use std::thread::available_parallelism;

/// Processor, cores that this process may use, system.
pub fn describe() -> String {
    let cores = available_parallelism().map_or(1, usize::from);
    let s = if cores == 1 { "" } else { "s" };
    let (system, kind) = (std::env::consts::OS, std::env::consts::ARCH);
    format!("{}, {cores} core{s}, {system} {kind}", processor().unwrap_or_else(|| "unknown processor".into()))
}

/// Largest memory of this process so far, in bytes; `None` where the system does not tell.
pub fn peak_resident() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Memory of the machine and how much of it is free, in bytes, no more than the control group of
/// the process allows; `None` where the system does not tell.
pub fn memory() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib.saturating_mul(1024))
    };
    let (mut all, mut free) = (field("MemTotal:")?, field("MemAvailable:")?);
    let group = |name: &str| {
        fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?.trim().parse::<u64>().ok()
    };
    if let (Some(most), Some(used)) = (group("max"), group("current")) {
        (all, free) = (all.min(most), free.min(most.saturating_sub(used)));
    }
    Some((all, free))
}

/// Name of the processor.
pub fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).trim().to_string())
}
