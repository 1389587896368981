//! The folder of a run.
//!
//! *Promise*: a folder is made, taken over with `force`, or resumed, never silently overwritten;
//! one process at a time has it: the folder itself is locked, and `run.lock`, which people may
//! delete, says by which. A folder that is removed while its run trains is not made again: the run
//! stops.
//!
//! | entry | content |
//! |---|---|
//! | `spec.yaml` | the specification with every default filled in |
//! | `tokenizer.json` | the tokenizer, where it is not the byte level |
//! | `generation_config.json` | which of its tokens end a text, where its names do not say |
//! | `metrics.jsonl` | one line a step, one an evaluation |
//! | `events.out.tfevents.dreamc` | the same for TensorBoard |
//! | `checkpoints/` | see [`crate::checkpoint`] |
//! | `reference.safetensors` | what pairs were worth before training, see [`super::preferences`] |
//! | `samples.jsonl` | what the model wrote at evaluations |
//! | `ledger.json` | what was run on what, and what it cost |
//! | `earlier/` | specifications that the run went on from with another, by the last step of each |
//! | `run.lock` | locked while a process trains here |

use super::ledger::Ledger;
use crate::checkpoint::Checkpoints;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Tokenizer;
use dreamc_data::files;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a folder cannot be used.
#[derive(Debug, Error)]
pub enum FolderError {
    /// The system says no.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// There is something already.
    #[error("{0} exists already: resume it with `dreamc resume {0}`, choose another --out, or replace it with --force", path.display())]
    Exists {
        /// Which folder.
        path: PathBuf,
    },
    /// It is no run.
    #[error("{} is not empty and is not a run of dreamc; it is left alone, choose another --out", path.display())]
    Foreign {
        /// Which folder.
        path: PathBuf,
    },
    /// It is what was left when a run that was being replaced was killed.
    #[error("{0} has files of a run and no spec.yaml: it cannot be resumed; replace it with --force, or choose another --out", path.display())]
    Remains {
        /// Which folder.
        path: PathBuf,
    },
    /// The folder is missing.
    #[error("{} is not a run folder: it has no spec.yaml", path.display())]
    NoRun {
        /// Which folder.
        path: PathBuf,
    },
    /// It was removed, or another put in its place, while a run trained in it.
    #[error("{} was removed or replaced while the run trained in it; the run stops, and what it had not saved there is lost", path.display())]
    Gone {
        /// Which folder.
        path: PathBuf,
    },
    /// Another process has it.
    #[error("{}: another process{holder} is training in this folder; wait for it or choose another --out", path.display())]
    Locked {
        /// Which folder.
        path: PathBuf,
        /// ` (process 123)`, where it is known.
        holder: String,
    },
}

/// Files of a run folder; nothing else is ever removed.
const OURS: [&str; 10] = [
    "spec.yaml",
    "tokenizer.json",
    "generation_config.json",
    "metrics.jsonl",
    EVENTS,
    "checkpoints",
    "samples.jsonl",
    "ledger.json",
    "earlier",
    LOCK,
];

/// The file that the process which trains in a folder has locked; its number is in it.
pub(super) const LOCK: &str = "run.lock";

const EVENTS: &str = "events.out.tfevents.dreamc";

/// Where a new run goes.
#[derive(Clone, Debug)]
pub enum Place {
    /// `runs/NAME-001`, or the first number that is free.
    Numbered {
        /// The folder of runs.
        runs: PathBuf,
        /// The model's name.
        name: String,
    },
    /// Here.
    At {
        /// The folder.
        path: PathBuf,
        /// A run that is there already is replaced.
        force: bool,
    },
}

/// A run folder that this process has locked.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// The folder itself, which is locked.
    folder: File,
    _lock: File,
}

impl RunFolder {
    /// Makes one.
    pub fn create(place: &Place) -> Result<Self, FolderError> {
        match place {
            Place::Numbered { runs, name } => {
                fs::create_dir_all(runs).map_err(|e| io_error(runs, e))?;
                let mut number = 1;
                loop {
                    let path = runs.join(format!("{name}-{number:03}"));
                    match fs::create_dir(&path) {
                        Ok(()) => return Self::lock(path),
                        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                        Err(e) => return Err(io_error(&path, e)),
                    }
                }
            }
            Place::At { path, force } => {
                fs::create_dir_all(path).map_err(|e| io_error(path, e))?;
                let found = names(path)?;
                if found.is_empty() || (unbegun(&found) && begun_by_dreamc(path)) {
                    let folder = Self::lock(path.clone())?;
                    // Between the look and the lock another process may have made a run here, and
                    // ended it.
                    return if unbegun(&names(path)?) {
                        Ok(folder)
                    } else {
                        Err(FolderError::Exists { path: path.clone() })
                    };
                }
                if !begun_by_dreamc(path) {
                    return Err(FolderError::Foreign { path: path.clone() });
                }
                if !force {
                    let path = path.clone();
                    let whole = found.iter().any(|n| n == "spec.yaml");
                    return Err(if whole {
                        FolderError::Exists { path }
                    } else {
                        FolderError::Remains { path }
                    });
                }
                let folder = Self::lock(path.clone())?;
                for name in OURS.iter().filter(|n| **n != LOCK) {
                    let entry = path.join(name);
                    let removed = match fs::symlink_metadata(&entry) {
                        Ok(m) if m.is_dir() => fs::remove_dir_all(&entry),
                        Ok(_) => fs::remove_file(&entry),
                        Err(_) => Ok(()),
                    };
                    removed.map_err(|e| io_error(&entry, e))?;
                }
                Ok(folder)
            }
        }
    }

    /// Takes one that exists.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        if !path.join("spec.yaml").is_file() {
            return Err(FolderError::NoRun { path: path.to_path_buf() });
        }
        Self::lock(path.to_path_buf())
    }

    fn lock(path: PathBuf) -> Result<Self, FolderError> {
        let name = path.join(LOCK);
        let open = File::options().create(true).truncate(false).read(true).write(true).open(&name);
        let mut file = open.map_err(|e| io_error(&name, e))?;
        let folder = File::open(&path).map_err(|e| io_error(&path, e))?;
        // A file system without locks on folders has those on files.
        let held = match folder.try_lock() {
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Ok(()) | Err(TryLockError::Error(_)) => file.try_lock(),
        };
        match held {
            Ok(()) => {
                let write = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
                write.map_err(|e| io_error(&name, e))?;
                // A killed process left unfinished files: nobody else writes here while the lock is
                // held.
                files::remove_abandoned(&path, None);
                let folder = RunFolder { path, folder, _lock: file };
                folder.checkpoints().remove_abandoned();
                Ok(folder)
            }
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let _ = file.rewind().and_then(|()| file.read_to_string(&mut text));
                let holder =
                    text.trim().parse::<u32>().map_or(String::new(), |id| format!(" (process {id})"));
                Err(FolderError::Locked { path, holder })
            }
            Err(TryLockError::Error(e)) => Err(io_error(&name, e)),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses where the folder is no longer there, or is another.
    pub fn check(&self) -> Result<(), FolderError> {
        let id = |m: fs::Metadata| (m.dev(), m.ino());
        match (fs::metadata(&self.path).map(id), self.folder.metadata().map(id)) {
            (Ok(there), Ok(ours)) if there == ours => Ok(()),
            (Err(e), _) if e.kind() != io::ErrorKind::NotFound => Err(io_error(&self.path, e)),
            (_, Err(e)) => Err(io_error(&self.path, e)),
            (Ok(_) | Err(_), Ok(_)) => Err(FolderError::Gone { path: self.path.clone() }),
        }
    }

    /// Its checkpoints.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.path.join("checkpoints"))
    }

    /// The resolved specification.
    pub fn spec(&self) -> PathBuf {
        self.path.join("spec.yaml")
    }

    /// The metrics.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// The TensorBoard file.
    pub fn events(&self) -> PathBuf {
        self.path.join(EVENTS)
    }

    /// The samples.
    pub fn samples(&self) -> PathBuf {
        self.path.join("samples.jsonl")
    }

    /// The ledger.
    pub fn ledger(&self) -> PathBuf {
        self.path.join("ledger.json")
    }

    /// Says what the run is. The specification goes last: a folder that has it can be resumed, and
    /// one that has it not is begun again.
    pub fn begin(&self, spec: &str, tokenizer: &Tokenizer, rewriting: &Rewriting) -> Result<(), FolderError> {
        let spec_hash = blake3::hash(spec.as_bytes()).to_hex().to_string();
        let ledger =
            Ledger { status: "running".into(), spec_hash, rewriting: rewriting.clone(), ..Ledger::default() };
        self.write("ledger.json", &ledger.text())?;
        if let Some(config) = tokenizer.generation_config() {
            self.write("generation_config.json", &config)?;
        }
        if let Some(json) = tokenizer.json() {
            self.write("tokenizer.json", json)?;
        }
        self.write("spec.yaml", spec)
    }

    /// Keeps the specification of the steps up to this one, which goes on with another.
    pub fn keep_earlier(&self, step: u64, spec: &str) -> Result<(), FolderError> {
        let folder = self.path.join("earlier");
        fs::create_dir_all(&folder).map_err(|e| io_error(&folder, e))?;
        self.write(&format!("earlier/spec-to-{step:08}.yaml"), spec)
    }

    /// Writes one of its files as a whole.
    pub fn write(&self, name: &str, content: &str) -> Result<(), FolderError> {
        let path = self.path.join(name);
        files::write_atomic(&path, |out| out.write_all(content.as_bytes())).map_err(|e| io_error(&path, e))
    }
}

/// Bytes that the process which trains in a folder has in memory, where the system says.
pub fn resident(folder: &Path) -> Option<u64> {
    let status = status(process(folder)?)?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

/// The process that trains in a folder, where the system says.
pub fn process(folder: &Path) -> Option<u32> {
    let text = fs::read_to_string(folder.join(LOCK)).ok()?;
    let process: u32 = text.trim().parse().ok()?;
    let status = status(process)?;
    // A number may by now be another process's, or of one that ended and was not waited for.
    let zombie = status.lines().any(|l| l.starts_with("State:") && l.contains('Z'));
    (status.lines().next()?.contains("dreamc") && !zombie).then_some(process)
}

fn status(process: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{process}/status")).ok()
}

fn names(folder: &Path) -> Result<Vec<String>, FolderError> {
    let entries = fs::read_dir(folder).map_err(|e| io_error(folder, e))?;
    Ok(entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
}

/// Whether dreamc began a run in a folder: by its lock, which holds the number of a process, or,
/// where somebody deleted that, by its ledger. A person's own files may have the names of a run's.
fn begun_by_dreamc(folder: &Path) -> bool {
    let lock = files::read_text(&folder.join(LOCK)).ok();
    let ledger = files::read_text(&folder.join("ledger.json")).ok();
    let ours = |text: &String| {
        serde_json::from_str::<serde_json::Value>(text).is_ok_and(|ledger| ledger["dreamc"].is_string())
    };
    let number = |text: &String| text.trim().is_empty() || text.trim().parse::<u32>().is_ok();
    match (&lock, &ledger) {
        (Some(lock), Some(ledger)) => number(lock) && ours(ledger),
        (Some(lock), None) => number(lock),
        (None, Some(ledger)) => ours(ledger),
        (None, None) => false,
    }
}

/// Whether these are the entries of a run folder whose process was killed before it had written
/// anything a run is known by: it is begun again rather than refused.
fn unbegun(names: &[String]) -> bool {
    let early =
        |n: &String| [LOCK, "ledger.json", "generation_config.json", "tokenizer.json"].contains(&n.as_str());
    names.iter().any(|n| n == LOCK) && names.iter().all(|n| early(n) || n.starts_with(files::TEMPORARY))
}

fn io_error(path: &Path, error: io::Error) -> FolderError {
    FolderError::Io { path: path.to_path_buf(), error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &Path, force: bool) -> Place {
        Place::At { path: path.to_path_buf(), force }
    }

    #[test]
    fn numbers_count_up() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::Numbered { runs: folder.path().join("runs"), name: "m".into() };
        let first = RunFolder::create(&place).unwrap();
        let second = RunFolder::create(&place).unwrap();
        assert!(first.path().ends_with("runs/m-001") && second.path().ends_with("runs/m-002"));
    }

    #[test]
    fn nothing_is_overwritten_without_being_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let run = RunFolder::create(&at(&path, false)).unwrap();
        run.write("spec.yaml", "model: {}").unwrap();
        drop(run);
        let error = RunFolder::create(&at(&path, false)).unwrap_err();
        assert!(matches!(error, FolderError::Exists { .. }), "{error}");
        fs::write(path.join("metrics.jsonl"), "x").unwrap();
        fs::write(path.join("notes.txt"), "mine").unwrap();
        RunFolder::create(&at(&path, true)).unwrap();
        assert!(!path.join("metrics.jsonl").exists() && path.join("notes.txt").exists());
        let error = RunFolder::create(&at(folder.path(), true)).unwrap_err();
        assert!(matches!(error, FolderError::Foreign { .. }), "{error}");
    }

    #[test]
    fn files_of_a_person_with_the_names_of_a_run_are_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let own: [&[(&str, &str)]; 5] = [
            &[("spec.yaml", "model: mine")],
            &[("spec.yaml", "model: mine"), ("run.lock", "mine")],
            &[("run.lock", ""), ("spec.yaml", "model: mine"), ("ledger.json", "{\"own\": 1}")],
            &[("ledger.json", "my accounts")],
            &[("run.lock", "mine"), ("ledger.json", "my accounts")],
        ];
        for (i, files) in own.iter().enumerate() {
            let path = home.path().join(i.to_string());
            fs::create_dir(&path).unwrap();
            files.iter().for_each(|(name, text)| fs::write(path.join(name), text).unwrap());
            let error = RunFolder::create(&at(&path, true)).unwrap_err();
            assert!(matches!(error, FolderError::Foreign { .. }), "{i}: {error}");
            for (name, text) in *files {
                assert_eq!(fs::read_to_string(path.join(name)).unwrap(), *text, "{i}");
            }
        }
    }

    #[test]
    fn a_folder_left_by_a_process_killed_at_its_beginning_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        drop(RunFolder::create(&at(&path, false)).unwrap());
        fs::write(path.join(".tmp-1-0-spec.yaml"), "mod").unwrap();
        let run = RunFolder::create(&at(&path, false)).unwrap();
        assert_eq!(names(&path).unwrap(), ["run.lock"]);
        let error = RunFolder::create(&at(&path, false)).unwrap_err();
        assert!(matches!(error, FolderError::Locked { .. }), "{error}");
        drop(run);
    }

    #[test]
    fn a_second_process_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::create(&at(folder.path(), false)).unwrap();
        assert!(matches!(RunFolder::open(folder.path()).unwrap_err(), FolderError::NoRun { .. }));
        run.write("spec.yaml", "model: {}").unwrap();
        let error = RunFolder::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
        fs::remove_file(folder.path().join("run.lock")).unwrap();
        let error = RunFolder::open(folder.path()).unwrap_err();
        assert!(matches!(error, FolderError::Locked { .. }), "{error}");
        drop(run);
        RunFolder::open(folder.path()).unwrap();
    }

    #[test]
    fn a_folder_that_is_removed_or_replaced_is_noticed() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("run");
        let run = RunFolder::create(&at(&path, false)).unwrap();
        run.check().unwrap();
        fs::remove_dir_all(&path).unwrap();
        assert!(matches!(run.check().unwrap_err(), FolderError::Gone { .. }));
        fs::create_dir(&path).unwrap();
        assert!(matches!(run.check().unwrap_err(), FolderError::Gone { .. }));
    }
}
