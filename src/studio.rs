//! Answers to the studio's page: the language server, drawings, counts, matching, and runs.

use crate::command::matching::with_values;
use crate::lsp::Session;
use dreamc_compiler::count::device::{DEVICES, Device};
use dreamc_compiler::count::{Options, count};
use dreamc_compiler::matching::{Measure, Request, TOKENS, find, pair};
use dreamc_dsl::{Diagnostics, FileKind, Spec, Spelling};
use dreamc_runtime::train::folder::process;
use dreamc_studio::{Exam, Folder, Job, Loops, Match, Question, Said, Tools, View};
use dreamc_study::compare::arms::TOLERANCE;
use dreamc_study::compare::study::{self, Holds, Manifest, ended, ledger, walk};
use dreamc_study::report::{draw, page};
use indexmap::IndexMap;
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Tabs whose documents are kept; the one that was opened first is forgotten.
const TABS: usize = 64;

/// The language server of each tab, and the processes begun from the page.
#[derive(Default)]
pub struct Studio {
    tabs: Mutex<IndexMap<String, Session>>,
    /// Processes that train, and what those said that failed.
    begun: Mutex<Begun>,
}

#[derive(Default)]
struct Begun {
    processes: Vec<(Child, PathBuf)>,
    failed: Option<String>,
}

impl Tools for Studio {
    fn language(&self, tab: &str, path: &Path, message: &Value) -> Vec<Value> {
        let mut tabs = self.tabs.lock().unwrap_or_else(PoisonError::into_inner);
        if tabs.len() >= TABS && !tabs.contains_key(tab) {
            tabs.shift_remove_index(0);
        }
        tabs.entry(tab.to_string()).or_default().answer(path, message)
    }

    fn view(&self, path: &Path, text: &str, device: Option<&str>, loops: Loops) -> Option<View> {
        let spec = spec(path, text).ok()??;
        let tokens = TOKENS.min(spec.model.context);
        let counts = count(&spec, &Options { tokens, device: device.and_then(Device::find) }).ok()?;
        let loops = match loops {
            Loops::Folded => draw::Loops::Folded,
            Loops::Unrolled => draw::Loops::Unrolled,
        };
        let svg = page::alone(&draw::svg(&spec.model, loops));
        let components = spec.model.components.keys().cloned().collect();
        Some(View { svg, counts: serde_json::to_value(counts).ok()?, components })
    }

    fn devices(&self) -> Vec<String> {
        DEVICES.iter().map(|device| device.name.to_string()).collect()
    }

    fn inside(&self, path: &Path, text: &str, component: &str) -> Option<String> {
        let model = spec(path, text).ok()??.model;
        Some(page::alone(&draw::inside(component, &model).ok()??))
    }

    fn matched(&self, own: (&Path, &str), baseline: (&Path, &str)) -> Result<Match, String> {
        let read = |(path, text): (&Path, &str)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match spec(path, text) {
                Ok(Some(spec)) => Ok(spec),
                Ok(None) => Err(format!("{name} is a suite, and no specification")),
                Err(_) => Err(format!("{name} has errors: mend them first")),
            }
        };
        let (own_spec, baseline) = (read(own)?, read(baseline)?);
        let tokens = TOKENS.min(own_spec.model.context).min(baseline.model.context);
        let matched = match &own_spec.matching {
            Some(section) => {
                let request = Request { tokens, ..Request::from(section) };
                find(&own_spec, &baseline, &request).map_err(|e| e.to_string())?
            }
            None => {
                let measures = [Measure::FlopsPerToken, Measure::Parameters].map(|m| (m, TOLERANCE));
                let both = pair(&own_spec, &baseline, measures, tokens).map_err(|e| e.to_string())?;
                let closest = |closest: Option<_>| match closest {
                    Some(closest) => format!("no two sizes meet FLOPs and parameters; closest: {closest}"),
                    None => "no two sizes meet FLOPs and parameters".to_string(),
                };
                both.map_err(closest)?.1
            }
        };
        let name = own.0.to_string_lossy();
        let text = with_values(&name, own.1.to_string(), &matched).map_err(|e| e.to_string())?;
        Ok(Match { fields: json!(matched.fields), residual: json!(matched.residual), text })
    }

    fn runs(&self, root: &Path) -> Vec<Value> {
        listed(root)
    }

    fn plan(&self, root: &Path, job: &Job) -> Result<String, String> {
        answer(asked(this().current_dir(root), job).arg("--dry-run"))
    }

    fn start(&self, root: &Path, job: &Job) -> Result<(), String> {
        self.begin(root, |line| asked(line, job))
    }

    fn resume(&self, root: &Path, run: &Path) -> Result<(), String> {
        if !trainers(run).is_empty() {
            return Err("a process trains there already".into());
        }
        match Holds::of(run) {
            Some(Holds::Run) => self.begin(root, |line| line.arg("resume").arg(run)),
            Some(Holds::Exam) => self.begin(root, |line| line.arg("exam").arg(run)),
            Some(Holds::Ladder) => Err("a ladder goes on by `dreamc compare` with its suite".into()),
            Some(Holds::Comparison) => {
                let (suite, set) = suite(root, run)?;
                let set = set.into_iter().flat_map(|set| ["--set".to_string(), set]);
                self.begin(root, |line| line.arg("compare").arg(suite).arg("--out").arg(run).args(set))
            }
            None => Err("no run is there".into()),
        }
    }

    fn stop(&self, run: &Path) -> Result<(), String> {
        let found = trainers(run);
        if found.is_empty() {
            return Err("no process trains there".into());
        }
        for process in found {
            let Ok(id) = i32::try_from(process) else { continue };
            // SAFETY: the call has no memory to keep; a number that is no process's is answered by
            // an error.
            if unsafe { libc::kill(id, libc::SIGINT) } != 0 {
                let error = io::Error::last_os_error();
                return Err(format!("process {process} cannot be asked to end: {error}"));
            }
        }
        Ok(())
    }

    fn tell(&self, root: &Path, question: Question) -> Result<String, String> {
        let mut line = this();
        line.current_dir(root).env("COLUMNS", "100").stdin(Stdio::null());
        match question {
            Question::Run(run) => answer(line.arg("watch").arg(run).arg("--once")),
            Question::Difference(one, other) => {
                answer(line.arg("diff").arg(within(root, one)).arg(within(root, other)))
            }
            Question::Continuation(run, prompt) => {
                answer(line.arg("generate").arg(run).arg("--").arg(prompt))
            }
            Question::Reading(run, prompt) => {
                only(line.args(["analyze", "tokens", "--json"]).arg(run).arg("--").arg(prompt))
            }
            Question::Analysis(run) => answer(line.arg("analyze").arg(run)),
        }
    }

    fn said(&self) -> Said {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let Begun { processes, failed } = &mut *begun;
        let mut notes = vec![];
        processes.retain_mut(|(child, log)| {
            let text = std::fs::read_to_string(&*log).unwrap_or_default();
            let text = text.trim();
            match child.try_wait() {
                Ok(None) => {
                    notes.extend((!text.is_empty()).then(|| last(text)));
                    return true;
                }
                Ok(Some(status)) if !status.success() && !text.is_empty() => *failed = Some(last(text)),
                Ok(Some(_)) | Err(_) => {}
            }
            let _ = std::fs::remove_file(log);
            false
        });
        Said { failed: failed.clone(), notes: (!notes.is_empty()).then(|| notes.join("\n")) }
    }
}

impl Studio {
    /// Starts dreamc in a process group of its own, which Ctrl-C at the studio does not reach.
    fn begin(&self, root: &Path, with: impl FnOnce(&mut Command) -> &mut Command) -> Result<(), String> {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let log = std::env::temp_dir().join(format!("dreamc-studio-{}-{now}", std::process::id()));
        let failed = |e: io::Error| format!("dreamc cannot be started: {e}");
        let out = File::create_new(&log).map_err(failed)?;
        let mut line = this();
        line.current_dir(root).stdin(Stdio::null()).stdout(Stdio::null()).stderr(out).process_group(0);
        let child = with(&mut line).spawn().map_err(failed)?;
        begun.failed = None;
        begun.processes.push((child, log));
        Ok(())
    }
}

/// This program.
fn this() -> Command {
    Command::new(std::env::current_exe().unwrap_or_else(|_| "dreamc".into()))
}

/// The command that trains a file: a suite is compared.
fn command(path: &Path) -> &'static str {
    match dreamc_dsl::parse_file(path).map(|tree| tree.kind) {
        Ok(FileKind::Suite) => "compare",
        Ok(FileKind::Spec) | Err(_) => "train",
    }
}

/// A job in the words of a command.
fn asked<'a>(line: &'a mut Command, job: &Job) -> &'a mut Command {
    match job {
        Job::File(path) => line.arg(command(path)).arg(path),
        Job::Exam(Exam { specs, tasks, budget, steps, seeds }) => {
            line.arg("exam").args(specs).args(["--seeds", &seeds.to_string()]);
            match steps {
                Some(steps) => line.args(["--steps", &steps.to_string()]),
                None => line.args(["--budget", budget]),
            };
            if tasks.is_empty() { line } else { line.args(["--tasks", tasks]) }
        }
    }
}

/// A path as a person in the folder would write it.
fn within<'a>(root: &Path, path: &'a Path) -> &'a Path {
    path.strip_prefix(root).unwrap_or(path)
}

/// The text that a command prints; its error where it fails.
fn answer(line: &mut Command) -> Result<String, String> {
    printed(line).map(|[out, error]| [out, error].join("\n").trim_end().to_string())
}

/// The same without what it says on its error stream.
fn only(line: &mut Command) -> Result<String, String> {
    printed(line).map(|[out, _]| out)
}

fn printed(line: &mut Command) -> Result<[String; 2], String> {
    let output = line.output().map_err(|e| format!("dreamc cannot be started: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_string();
    let [out, error] = [text(&output.stdout), text(&output.stderr)];
    if output.status.success() { Ok([out, error]) } else { Err(error) }
}

/// The last lines of a text, as many as a page shows.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Runs that are listed, at most.
const MOST: usize = 10_000;

/// Runs and what holds them, those that train first.
fn listed(root: &Path) -> Vec<Value> {
    let mut found: Vec<(PathBuf, Value)> = vec![];
    let mut holders: Vec<(PathBuf, Holds)> = vec![];
    walk(root, &mut |folder, holds| match holds {
        Holds::Run if found.len() < MOST => found.push((folder.to_path_buf(), run(root, folder))),
        Holds::Run => {}
        Holds::Comparison | Holds::Ladder | Holds::Exam => holders.push((folder.to_path_buf(), holds)),
    });
    let holders: Vec<Value> =
        holders.iter().map(|(folder, holds)| holder(root, folder, *holds, &found)).collect();
    let mut all: Vec<Value> = holders.into_iter().chain(found.into_iter().map(|(_, run)| run)).collect();
    let name = |run: &Value| run["path"].as_str().unwrap_or_default().to_string();
    all.sort_by_cached_key(|run| (run["trains"] != true, name(run)));
    all
}

/// A run as it stands.
fn run(root: &Path, folder: &Path) -> Value {
    // A ledger that is being written is there again at the next look.
    let ledger = ledger(folder).ok().flatten();
    let process = process(folder);
    let status = match &ledger {
        Some(l) if l.status == "running" && process.is_none() => "stopped without a word",
        Some(l) => l.status.as_str(),
        None => "begins",
    };
    json!({
        "path": within(root, folder).to_string_lossy(),
        "kind": Holds::Run.word(),
        "model": ledger.as_ref().map(|l| l.model.clone()),
        "status": status,
        "steps": ledger.as_ref().map(|l| l.steps),
        "tokens": ledger.as_ref().map(|l| l.tokens),
        "flops": ledger.as_ref().and_then(|l| l.declared_flops_per_token),
        "loss": ledger.as_ref().and_then(|l| l.validation_loss),
        "trains": process.is_some(),
        "ended": ledger.as_ref().is_some_and(ended),
    })
}

/// A comparison, a ladder or an exam as its runs stand.
fn holder(root: &Path, folder: &Path, holds: Holds, runs: &[(PathBuf, Value)]) -> Value {
    let own = || runs.iter().filter(|(path, _)| path.starts_with(folder)).map(|(_, run)| run);
    let of = study::runs(folder).ok().flatten().map_or(0, |runs| runs.len());
    let ended = own().filter(|run| run["ended"] == true).count();
    json!({
        "path": within(root, folder).to_string_lossy(),
        "kind": holds.word(),
        "status": format!("{}, {ended} of {of} runs at their end", holds.word()),
        "trains": own().any(|run| run["trains"] == true),
        "ended": of > 0 && ended >= of,
    })
}

/// The processes that train in a folder, or in those of its runs.
fn trainers(folder: &Path) -> Vec<u32> {
    let mut found = vec![];
    walk(folder, &mut |folder, holds| {
        if holds == Holds::Run {
            found.extend(process(folder));
        }
    });
    found.sort_unstable();
    found.dedup();
    found
}

/// The file of the suite that a comparison is of, and the changes to it: the one of the folder that
/// has its name and text.
fn suite(root: &Path, folder: &Path) -> Result<(PathBuf, Vec<String>), String> {
    let manifest = Manifest::of(folder).map_err(|e| e.to_string())?;
    let none = || "this comparison goes on by `dreamc compare` with its suite".to_string();
    let manifest = manifest.ok_or_else(none)?;
    let inside = Folder::new(root).map_err(|e| e.to_string())?;
    let own = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy() == manifest.file)
            && std::fs::read_to_string(path).is_ok_and(|text| text == manifest.text)
    };
    let found = inside.list().into_iter().map(|path| root.join(path)).find(own);
    let gone = format!("{} is not in this folder, or has changed since", manifest.file);
    Ok((found.ok_or(gone)?, manifest.set))
}

/// The specification of a text; `None` of a suite.
fn spec(path: &Path, text: &str) -> Result<Option<Spec>, Diagnostics> {
    let name = path.to_string_lossy();
    let tree = dreamc_dsl::parse(&name, text, Spelling::of(&name))?;
    if tree.kind != FileKind::Spec {
        return Ok(None);
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    Ok(Some(dreamc_dsl::check_in(tree, folder, &[])?.0))
}
