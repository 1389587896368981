//! The watch over processes that prove: starts one, listens, and goes on without what ended it.

use super::child::Task;
use super::{Event, Outcome, ProofError, Rung, Trial, Verdict};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// How a process that proves is started: it calls [`CudaDevice::prove`] and nothing else.
///
/// [`CudaDevice::prove`]: crate::cuda::CudaDevice::prove
#[derive(Clone, Debug)]
pub struct Prover {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// How long it may say nothing.
    pub patience: Duration,
}

/// Proves a trial on a device by processes of a prover's, and tells each verdict as it comes. A
/// process that faults or hangs costs the rung that it was at; the next one goes on without.
pub fn watch(
    prover: &Prover,
    device: usize,
    trial: &Trial,
    tell: &mut dyn FnMut(&Verdict),
) -> Result<Vec<Verdict>, ProofError> {
    let mut task = Task { device, trial: trial.clone() };
    let mut verdicts: Vec<Verdict> = vec![];
    loop {
        let listened = listen(prover, &task, &mut |verdict| {
            tell(&verdict);
            verdicts.push(verdict);
        })?;
        let Some((launch, rung, outcome)) = listened else { return Ok(verdicts) };
        // The device's own words may have come before the process ended.
        let said = verdicts.iter().any(|v| (v.launch, v.rung) == (launch, rung));
        if task.trial.without.contains(&(launch, rung)) {
            return Err(ProofError::Process(format!("ended again: {outcome}")));
        }
        if !said {
            let verdict = Verdict { launch, rung, outcome };
            tell(&verdict);
            verdicts.push(verdict);
        }
        let wrong = verdicts.iter().filter(|v| !v.outcome.right()).map(|v| (v.launch, v.rung));
        task.trial.without = trial.without.iter().copied().chain(wrong).collect();
        let judged = |v: &&Verdict| v.rung == Rung::Naive && v.outcome.right();
        let judged = verdicts.iter().filter(judged).map(|v| v.launch);
        task.trial.known = trial.known.iter().copied().chain(judged).collect();
    }
}

/// One process from its start to its end; gives what ended it, where that was not its last launch.
fn listen(
    prover: &Prover,
    task: &Task,
    hear: &mut dyn FnMut(Verdict),
) -> Result<Option<(usize, Rung, Outcome)>, ProofError> {
    let failed = |what: String| ProofError::Process(what);
    let mut child = Command::new(&prover.program)
        .args(&prover.arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| failed(format!("did not start ({}): {e}", prover.program.display())))?;
    let text = serde_json::to_vec(task).map_err(|e| failed(format!("was given nothing: {e}")))?;
    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    // Ends where the process does, which may read none of it.
    thread::spawn(move || input.map(|mut input| input.write_all(&text)));
    let words = thread::spawn(move || {
        let mut words = String::new();
        let _ = errors.map(|mut errors| errors.read_to_string(&mut words));
        words
    });
    let (sender, events) = channel::<Event>();
    thread::spawn(move || {
        let lines = output.map(|output| BufReader::new(output).lines().map_while(Result::ok));
        for event in lines.into_iter().flatten().filter_map(|line| serde_json::from_str(&line).ok()) {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    let mut at: Option<(usize, Rung)> = None;
    loop {
        match events.recv_timeout(prover.patience) {
            Ok(Event::Busy) => at = None,
            Ok(Event::Begun(launch, rung)) => at = Some((launch, rung)),
            Ok(Event::Proved(verdict)) => hear(verdict),
            Ok(Event::Ended) => {
                let _ = child.wait();
                return Ok(None);
            }
            Err(RecvTimeoutError::Timeout) => {
                end(&mut child);
                let seconds = prover.patience.as_secs();
                let Some((launch, rung)) = at else {
                    return Err(failed(format!("said nothing for {seconds} s before any launch")));
                };
                return Ok(Some((launch, rung, Outcome::Hangs { seconds })));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
                let words = words.join().unwrap_or_default();
                let words = words.trim();
                let Some((launch, rung)) = at else {
                    return Err(failed(format!("ended ({status}) before any launch: {words}")));
                };
                let why = if words.is_empty() { status } else { format!("{status}: {words}") };
                return Ok(Some((launch, rung, Outcome::Faults { why })));
            }
        }
    }
}

/// Ends a process for good, with what it has on the device.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
