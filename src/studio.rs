//! Answers to the studio's page: the language server, drawings, counts, matching, and runs.

use crate::command::matching::with_values;
use crate::command::watch;
use crate::compare::arms::TOLERANCE;
use crate::compare::study::{ended, ledger};
use crate::lsp::Session;
use crate::report::{draw, formulas, page};
use dreamc_compiler::count::device::{DEVICES, Device};
use dreamc_compiler::count::{Options, count};
use dreamc_compiler::matching::{Measure, Request, TOKENS, find, pair};
use dreamc_dsl::spec::Component;
use dreamc_dsl::{Diagnostics, FileKind, Spec, Spelling};
use dreamc_studio::{Match, Question, Tools, View};
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
    said: Option<String>,
}

impl Tools for Studio {
    fn language(&self, tab: &str, path: &Path, message: &Value) -> Vec<Value> {
        let mut tabs = self.tabs.lock().unwrap_or_else(PoisonError::into_inner);
        if tabs.len() >= TABS && !tabs.contains_key(tab) {
            tabs.shift_remove_index(0);
        }
        tabs.entry(tab.to_string()).or_default().answer(path, message)
    }

    fn view(&self, path: &Path, text: &str, device: Option<&str>) -> Option<View> {
        let spec = spec(path, text).ok()??;
        let tokens = TOKENS.min(spec.model.context);
        let counts = count(&spec, &Options { tokens, device: device.and_then(Device::find) }).ok()?;
        let svg = page::alone(&draw::svg(&spec.model));
        let own = |(name, component): (&String, &Component)| {
            matches!(component, Component::Defined(_)).then(|| name.clone())
        };
        let defined = spec.model.components.iter().filter_map(own).collect();
        Some(View { svg, counts: serde_json::to_value(counts).ok()?, defined })
    }

    fn devices(&self) -> Vec<String> {
        DEVICES.iter().map(|device| device.name.to_string()).collect()
    }

    fn inside(&self, path: &Path, text: &str, component: &str) -> Option<String> {
        let model = spec(path, text).ok()??.model;
        let Some(Component::Defined(defined)) = model.components.get(component) else { return None };
        Some(page::alone(&formulas::svg(component, &defined.graph(&model).ok()?)))
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
        let mut found = vec![];
        gather(root, root, DEPTH, &mut found);
        found
            .sort_by_key(|run| (run["trains"] != true, run["path"].as_str().unwrap_or_default().to_string()));
        found
    }

    fn plan(&self, root: &Path, path: &Path) -> Result<String, String> {
        answer(this().current_dir(root).arg(command(path)).arg(path).arg("--dry-run"))
    }

    fn start(&self, root: &Path, path: &Path) -> Result<(), String> {
        self.begin(root, |line| line.arg(command(path)).arg(path))
    }

    fn resume(&self, root: &Path, run: &Path) -> Result<(), String> {
        if watch::process(run).is_some() {
            return Err("a process trains there already".into());
        }
        self.begin(root, |line| line.arg("resume").arg(run))
    }

    fn stop(&self, run: &Path) -> Result<(), String> {
        let none = || "no process trains there".to_string();
        let process = watch::process(run).ok_or_else(none)?;
        let id = i32::try_from(process).map_err(|_| none())?;
        // SAFETY: the call has no memory to keep; a number that is no process's is answered by an
        // error.
        match unsafe { libc::kill(id, libc::SIGINT) } {
            0 => Ok(()),
            _ => Err(format!("process {process} cannot be asked to end: {}", io::Error::last_os_error())),
        }
    }

    fn tell(&self, root: &Path, question: Question) -> Result<String, String> {
        let mut line = this();
        line.current_dir(root).env("COLUMNS", "100").stdin(Stdio::null());
        match question {
            Question::Run(run) => line.arg("watch").arg(run).arg("--once"),
            Question::Difference(one, other) => line.arg("diff").arg(one).arg(other),
            Question::Continuation(run, prompt) => line.arg("generate").arg(run).arg("--").arg(prompt),
        };
        answer(&mut line)
    }

    fn said(&self) -> Option<String> {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let Begun { processes, said } = &mut *begun;
        processes.retain_mut(|(child, log)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                let text = std::fs::read_to_string(&*log).unwrap_or_default();
                if !status.success() && !text.trim().is_empty() {
                    *said = Some(last(&text));
                }
                let _ = std::fs::remove_file(log);
                false
            }
            Err(_) => false,
        });
        said.clone()
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
        begun.said = None;
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

/// The text that a command prints; its error where it fails.
fn answer(line: &mut Command) -> Result<String, String> {
    let output = line.output().map_err(|e| format!("dreamc cannot be started: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_string();
    match output.status.success() {
        true => Ok([text(&output.stdout), text(&output.stderr)].join("\n").trim_end().to_string()),
        false => Err(text(&output.stderr)),
    }
}

/// The last lines of a text, as many as a page shows.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Folders of folders are looked into so deep, and so many runs are listed.
const DEPTH: usize = 5;
const MOST: usize = 10_000;

fn gather(root: &Path, folder: &Path, depth: usize, found: &mut Vec<Value>) {
    if found.len() >= MOST {
        return;
    }
    if folder.join("metrics.jsonl").is_file() {
        // A ledger that is being written is there again at the next look.
        let ledger = ledger(folder).ok().flatten();
        let process = watch::process(folder);
        let status = match &ledger {
            Some(l) if l.status == "running" && process.is_none() => "stopped without a word",
            Some(l) => l.status.as_str(),
            None => "begins",
        };
        found.push(json!({
            "path": folder.strip_prefix(root).unwrap_or(folder).to_string_lossy(),
            "model": ledger.as_ref().map(|l| l.model.clone()),
            "status": status,
            "steps": ledger.as_ref().map(|l| l.steps),
            "tokens": ledger.as_ref().map(|l| l.tokens),
            "loss": ledger.as_ref().and_then(|l| l.validation_loss),
            "trains": process.is_some(),
            "ended": ledger.as_ref().is_some_and(ended),
        }));
        return;
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if depth > 0 && !hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            gather(root, &entry.path(), depth - 1, found);
        }
    }
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
