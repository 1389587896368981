//! `dreamc launch`: several ranks on this machine.

use clap::{Args, value_parser};
use dreamc_runtime::train::signal;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::note;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Train by several ranks on this machine
#[derive(Args)]
#[command(after_help = "\
Starts the command once for each rank, with the variables of `torchrun`: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. Ranks share the micro-batches of a step, so train.accumulate is a multiple of their number; they
share the threads of the machine, and `--device cuda` is for each a GPU of its own. On several machines start the ranks with
srun, mpirun or torchrun: `torchrun --nproc_per_node=8 --no-python dreamc train model.yaml`.

Examples:
  dreamc launch -n 4 train model.yaml --set train.batch=8 --set train.accumulate=4 --out runs/four
  dreamc launch -n 2 resume runs/four         any number that divides train.accumulate goes on")]
pub struct Arguments {
    /// How many ranks
    #[arg(short = 'n', value_name = "N", value_parser = value_parser!(u64).range(1..=1024))]
    ranks: u64,

    /// Keep the output of every rank in `FOLDER/rank-N.log`
    #[arg(long, value_name = "FOLDER")]
    logs: Option<PathBuf>,

    /// `train` or `resume`, with its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(20);

/// Ranks notice by themselves that one of them failed; after this time they are ended.
const GRACE: Duration = Duration::from_secs(30);

/// The ranks, which end with this.
struct Ranks(Vec<(Child, Option<ExitStatus>)>);

impl Ranks {
    fn signal(&mut self, signal: libc::c_int) {
        for (child, _) in self.0.iter().filter(|(_, ended)| ended.is_none()) {
            // SAFETY: the process was not waited for, so its number is still its own.
            unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        for (child, ended) in &mut self.0 {
            if ended.is_none() {
                let _ = child.wait();
            }
        }
    }
}

pub fn run(a: Arguments) -> Done {
    if !matches!(a.command.first().map(String::as_str), Some("train" | "resume")) {
        return Err(Failure::Usage(format!(
            "`{}` has no ranks; `train` and `resume` have",
            a.command.join(" ")
        )));
    }
    if a.command.iter().any(|word| word == "-") {
        let problem = "ranks share no standard input: write the specification to a file, and name that";
        return Err(Failure::Usage(problem.into()));
    }
    let program = std::env::current_exe()?;
    if let Some(logs) = &a.logs {
        std::fs::create_dir_all(logs).map_err(|e| dreamc_data::files::about(logs, e))?;
    }
    // A port that is free now.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    signal::catch();
    let mut ranks = Ranks(vec![]);
    for rank in 0..a.ranks {
        let mut command = Command::new(&program);
        // Signals are handed on, so that each rank gets them once.
        command.args(&a.command).stdin(Stdio::null()).process_group(0);
        for (name, value) in [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", a.ranks.to_string()),
            ("LOCAL_WORLD_SIZE", a.ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.to_string()),
        ] {
            command.env(name, value);
        }
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        if let Some(logs) = &a.logs {
            let log = log(logs, rank)?;
            command.stdout(log.try_clone()?).stderr(log);
        }
        ranks.0.push((command.spawn()?, None));
    }
    match watch(&mut ranks)? {
        None => Ok(()),
        Some(failed) => {
            if let Some(name) = signal::caught() {
                return Err(Failure::Stopped(name));
            }
            let (rank, status) = failed;
            note!("rank {rank} ended first, with {status}");
            // A command line that is wrong is so for all of them.
            Err(if status.code() == Some(2) { Failure::Unread } else { Failure::Said })
        }
    }
}

fn log(folder: &Path, rank: u64) -> Result<File, Failure> {
    let path = folder.join(format!("rank-{rank}.log"));
    Ok(File::create(&path).map_err(|e| dreamc_data::files::about(&path, e))?)
}

/// Waits for all ranks; gives the first that failed.
fn watch(ranks: &mut Ranks) -> Result<Option<(usize, ExitStatus)>, Failure> {
    let mut failed: Option<(usize, ExitStatus, Instant)> = None;
    let mut passed_on = false;
    loop {
        for (rank, (child, ended)) in ranks.0.iter_mut().enumerate().filter(|(_, (_, ended))| ended.is_none())
        {
            *ended = child.try_wait()?;
            if let (Some(status), None) = (*ended, &failed)
                && !status.success()
            {
                failed = Some((rank, status, Instant::now()));
            }
        }
        if ranks.0.iter().all(|(_, ended)| ended.is_some()) {
            return Ok(failed.map(|(rank, status, _)| (rank, status)));
        }
        if failed.is_some_and(|(_, _, since)| since.elapsed() > GRACE) {
            ranks.signal(libc::SIGKILL);
        }
        if let (Some(name), false) = (signal::caught(), passed_on) {
            ranks.signal(if name == "SIGTERM" { libc::SIGTERM } else { libc::SIGINT });
            passed_on = true;
        }
        sleep(LOOK);
    }
}
