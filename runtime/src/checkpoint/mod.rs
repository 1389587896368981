//! Checkpoints: all a run needs to go on to the same bits, and all a user needs to take a model
//! away.
//!
//! *In*: a [`State`] and tensors, one at a time. *Out*: a folder `step-00000500` of
//! `model.safetensors` (names of `docs/dev/semantics.md` section 11, the specification in its
//! metadata), `optimizer.safetensors` (moments as `{name}.m` and `.v`, selection counts as
//! `{name}.counts`), `state.json` (step, data cursor, counters) and `checksums.txt` (BLAKE3 of the
//! others, in the format of `b3sum`). Where weights or states are cut over ranks, each rank writes
//! a part of either file, and `parts.json` says where all numbers are ([`parts`]). *Promise*: a
//! folder of that name is whole: it is written under a temporary name, synced, renamed, and only
//! then is an older one removed. Files are verified to the last byte when they are opened, parts
//! before the first number of them is read. A damaged checkpoint is refused with what is wrong, and
//! [`Checkpoints::latest`], which verifies every byte, falls back to the newest good one.

pub mod dcp;
pub mod folder;
pub mod parts;
pub mod safetensors;
mod weights;

pub use weights::{Binding, Weights};

use crate::train::guard::Guard;
use dreamc_data::Cursor;
use dreamc_data::files;
use dreamc_data::sums::{CHECKSUMS, Sums, SumsError, put, seal};
use parts::{Filed, Kind, Manifest, PARTS};
use safetensors::Tensors;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Changes whenever an older dreamc could not read what a newer one writes.
pub const VERSION: u32 = 1;

const STATE: &str = "state.json";

/// A checkpoint that cannot be used.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The system says no.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// It is not what was written.
    #[error("{}: {problem}", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// The mistake.
        problem: String,
    },
    /// The file does not exist.
    #[error("{}: {problem}", path.display())]
    Missing {
        /// Where one was looked for.
        path: PathBuf,
        /// The file expected.
        problem: String,
    },
    /// There is one already.
    #[error("{} exists already: choose another place, or replace it with --force", path.display())]
    Exists {
        /// Which folder.
        path: PathBuf,
    },
    /// There is something else.
    #[error("{} holds files that are not a model of dreamc; it is left alone, choose another place", path.display())]
    Foreign {
        /// Which folder.
        path: PathBuf,
    },
    /// A model's folder holds a specification that is not the one written there.
    #[error("{} is a specification of yours, or was changed since it was written; it is left alone: move it away, or choose another place", path.display())]
    Edited {
        /// The specification.
        path: PathBuf,
    },
    /// The base of a checkpoint cannot be had.
    #[error("{} holds only what was trained, and its base cannot be opened: {error}; name the base with --base", path.display())]
    NoBase {
        /// Which checkpoint.
        path: PathBuf,
        /// Why.
        error: Box<CheckpointError>,
    },
    /// A checkpoint is bound to another base.
    #[error(
        "{} was trained on other weights than {}: BLAKE3 of the base must be {expected}, and is {found}",
        path.display(),
        base.display()
    )]
    OtherBase {
        /// Which checkpoint.
        path: PathBuf,
        /// The base given.
        base: PathBuf,
        /// The hash it is bound to.
        expected: String,
        /// The hash of what was given.
        found: String,
    },
    /// It belongs to another model.
    #[error("{}: does not fit the model: {problem}", path.display())]
    Mismatch {
        /// Which file.
        path: PathBuf,
        /// Which tensor, and how it differs.
        problem: String,
    },
}

impl From<SumsError> for CheckpointError {
    fn from(error: SumsError) -> Self {
        match error {
            SumsError::Io { path, error } => CheckpointError::Io { path, error },
            SumsError::Corrupt { path, problem } => CheckpointError::Corrupt { path, problem },
        }
    }
}

/// Where a run stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Format of the checkpoint.
    pub version: u32,
    /// Optimizer steps taken.
    pub step: u64,
    /// Tokens read, padding included.
    pub tokens: u64,
    /// Tokens loss was taken on.
    pub targets: u64,
    /// Seconds spent in training steps.
    pub train_seconds: f64,
    /// Multiply-adds carried out by training steps.
    pub multiply_adds: u64,
    /// Multiply-adds of a teacher's forward.
    #[serde(default)]
    pub teacher_multiply_adds: u64,
    /// FLOPs that the donor of the first weights was trained with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub donor_flops: Option<u64>,
    /// Hash of the resolved specification.
    pub spec_hash: String,
    /// Hash of the data.
    pub data_hash: String,
    /// Where the data goes on.
    pub cursor: Cursor,
    /// Length of `metrics.jsonl` at this step.
    pub metrics_bytes: u64,
    /// Length of the TensorBoard file at this step.
    pub events_bytes: u64,
    /// Length of `samples.jsonl` at this step.
    pub samples_bytes: u64,
    /// Step and loss of the best evaluation.
    pub best: Option<(u64, f64)>,
    /// Evaluations since then.
    pub stale: u64,
    /// Steps left out because of infinities or spikes, where that was asked for.
    pub skipped: u64,
    /// State of the guard that skips steps.
    #[serde(default)]
    pub guard: Guard,
    /// Step of the evaluation that concluded the run, once the metrics hold it.
    #[serde(default)]
    pub concluded: Option<u64>,
    /// Continuations with another specification, first to last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
}

/// A continuation of a run with another specification.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Steps that were taken before it.
    pub after_step: u64,
    /// Hash of the specification of these steps, since the change before.
    pub spec_hash: String,
    /// Lines that were taken away and added, with the section that each is in.
    pub difference: String,
}

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub folder: PathBuf,
    /// Where the run stood.
    pub state: State,
    /// Tensors of the model.
    pub model: Tensors,
    /// Tensors of the optimizer.
    pub optimizer: Tensors,
}

impl Checkpoint {
    /// Opens a checkpoint and verifies what is whole of it; parts are all there, and verified once
    /// they are read.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        Checkpoint::open_as(folder, false)
    }

    /// Opens one whose whole files another rank has verified: this one reads ranges of them.
    pub fn open_verified(folder: &Path) -> Result<Self, CheckpointError> {
        Checkpoint::open_as(folder, true)
    }

    fn open_as(folder: &Path, verified: bool) -> Result<Self, CheckpointError> {
        let corrupt =
            |name: &str, problem: String| CheckpointError::Corrupt { path: folder.join(name), problem };
        let sums = Sums::open(folder)?;
        let state: State = serde_json::from_slice(&sums.read(STATE)?)
            .map_err(|e| corrupt(STATE, format!("cannot be read: {e}")))?;
        if state.version != VERSION {
            let problem = format!("is of format {}, this dreamc reads format {VERSION}", state.version);
            return Err(corrupt(STATE, problem));
        }
        let manifest = Manifest::open(&sums)?;
        if let Some(manifest) = manifest.as_ref().filter(|manifest| manifest.step != state.step) {
            let problem = format!("is of step {}, and {STATE} of step {}", manifest.step, state.step);
            return Err(corrupt(PARTS, problem));
        }
        // Verified before it is parsed: the header of a damaged file is not worth reading.
        let open = |kind: Kind| match manifest.as_ref().and_then(|manifest| manifest.tensors(kind, &sums)) {
            Some(parts) => Ok(parts),
            None => {
                if !verified {
                    sums.verify(kind.whole())?;
                }
                Tensors::open(&folder.join(kind.whole()))
            }
        };
        let (model, optimizer) = (open(Kind::Model)?, open(Kind::Optimizer)?);
        Ok(Checkpoint { folder: folder.to_path_buf(), state, model, optimizer })
    }

    /// Verifies every byte that opening did not.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.model.verify()?;
        self.optimizer.verify()
    }
}

/// A checkpoint whose folder is being filled, under a temporary name; removed where it does not
/// come to its end.
#[derive(Debug)]
pub struct Begun {
    /// The folder.
    pub folder: PathBuf,
    path: PathBuf,
    /// Whoever looks for what killed processes left sees that this is no such thing.
    _lock: File,
}

impl Drop for Begun {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// The number of the newest to keep; at least one.
    pub newest: u64,
    /// Those at multiples of this step; 0 for none.
    pub every: u64,
    /// This one.
    pub best: Option<u64>,
}

impl Checkpoints {
    /// The checkpoints in this folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Checkpoints { folder: folder.into() }
    }

    /// The folder of a step.
    pub fn at(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    /// Steps that have one, oldest first.
    pub fn steps(&self) -> Vec<u64> {
        let step = |e: fs::DirEntry| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> =
            fs::read_dir(&self.folder).into_iter().flatten().flatten().filter_map(step).collect();
        steps.sort_unstable();
        steps
    }

    /// Makes the folder that a checkpoint is written in.
    pub fn begin(&self, step: u64) -> Result<Begun, CheckpointError> {
        let path = self.at(step);
        let make = || {
            fs::create_dir_all(&self.folder)?;
            self.remove_abandoned();
            files::claim_folder(&path)
        };
        match make() {
            Ok((folder, lock)) => Ok(Begun { folder, path, _lock: lock }),
            Err(error) => Err(CheckpointError::Io { path, error }),
        }
    }

    /// Gives a checkpoint its name, once all ranks have what they wrote on disk: the manifest of
    /// its parts, where it has any, its state and the checksums of all come last.
    pub fn finish(
        &self,
        begun: Begun,
        state: &State,
        manifest: Option<&Manifest>,
        written: &[Filed],
    ) -> Result<PathBuf, CheckpointError> {
        let path = begun.path.clone();
        let attempt = || -> io::Result<()> {
            let folder = &begun.folder;
            if let Some(manifest) = manifest {
                let check = |file: &parts::File| file.check(folder, manifest.files.len());
                manifest.files.iter().try_for_each(check).map_err(io::Error::other)?;
            }
            let mut sums: Vec<(&str, String)> =
                written.iter().map(|file| (file.file.as_str(), file.sum.clone())).collect();
            if let Some(manifest) = manifest {
                let text = |out: &mut dyn Write| Ok(serde_json::to_writer(out, manifest)?);
                sums.push((PARTS, put(folder, PARTS, Box::new(text))?));
            }
            let text = |out: &mut dyn Write| Ok(serde_json::to_writer_pretty(out, state)?);
            sums.push((STATE, put(folder, STATE, Box::new(text))?));
            seal(folder, &sums)?;
            // A step saved twice (a damaged one, or one saved by a resumed run) is replaced.
            let replaced = files::temporary(&path);
            if path.exists() {
                fs::rename(&path, &replaced)?;
            }
            fs::rename(folder, &path)?;
            let _ = fs::remove_dir_all(&replaced);
            files::sync_folder(&self.folder)
        };
        attempt().map_err(|error| CheckpointError::Io { path: path.clone(), error })?;
        Ok(path)
    }

    /// Removes what a killed process left half written. The run's lock says that no other process
    /// writes here.
    pub(crate) fn remove_abandoned(&self) {
        files::remove_abandoned(&self.folder, None);
    }

    /// The newest good one, and what was wrong with newer ones.
    pub fn latest(&self) -> Result<(Checkpoint, Vec<CheckpointError>), CheckpointError> {
        let mut refused = vec![];
        for step in self.steps().into_iter().rev() {
            let good = |checkpoint: Checkpoint| checkpoint.verify().map(|()| checkpoint);
            match Checkpoint::open(&self.at(step)).and_then(good) {
                Ok(checkpoint) => return Ok((checkpoint, refused)),
                Err(error) => refused.push(error),
            }
        }
        let problem = match refused.first() {
            None => "holds no checkpoint yet; a run has one from its first saved step on".to_string(),
            Some(first) => format!("none of its {} checkpoints is good; the newest: {first}", refused.len()),
        };
        Err(CheckpointError::Missing { path: self.folder.clone(), problem })
    }

    /// Removes those up to step `last` that need not stay. Newer ones are damaged where a run goes
    /// on from an older one: they count for nothing, and are replaced when it gets there.
    pub fn prune(&self, last: u64, keep: Keep) -> Result<(), CheckpointError> {
        let mut steps = self.steps();
        steps.retain(|&step| step <= last);
        let old = steps.len().saturating_sub(keep.newest.max(1) as usize);
        for &step in &steps[..old] {
            if (keep.every > 0 && step.is_multiple_of(keep.every)) || keep.best == Some(step) {
                continue;
            }
            // First away from its name, so that a kill in between leaves no half of a checkpoint
            // under it.
            let path = self.at(step);
            let temporary = files::temporary(&path);
            fs::rename(&path, &temporary)
                .and_then(|()| fs::remove_dir_all(&temporary))
                .map_err(|error| CheckpointError::Io { path, error })?;
        }
        Ok(())
    }
}

/// The model tensors at a path: a run (its newest good checkpoint), a checkpoint, an imported
/// model, or a safetensors file by itself.
pub fn open_model(path: &Path) -> Result<(Tensors, Vec<CheckpointError>), CheckpointError> {
    if path.is_file() {
        // A base that is in parts is named by their manifest.
        if path.file_name().is_some_and(|name| name == PARTS) {
            return Ok((Checkpoint::open(files::parent(path))?.model, vec![]));
        }
        let tensors = Tensors::open(path)?;
        return match tensors.metadata("rank") {
            None => Ok((tensors, vec![])),
            Some(rank) => {
                let problem = format!("is the part that rank {rank} wrote of a checkpoint; name its folder");
                Err(CheckpointError::Corrupt { path: path.to_path_buf(), problem })
            }
        };
    }
    if path.join(CHECKSUMS).exists() {
        // An imported model has no state to go on from.
        let model = match path.join(STATE).exists() {
            true => Checkpoint::open(path)?.model,
            false => {
                Sums::open(path)?.verify_once(Kind::Model.whole(), &files::cache_folder())?;
                Tensors::open(&path.join(Kind::Model.whole()))?
            }
        };
        return Ok((model, vec![]));
    }
    for folder in [path.join("checkpoints"), path.to_path_buf()] {
        let checkpoints = Checkpoints::new(folder);
        if !checkpoints.steps().is_empty() {
            return checkpoints.latest().map(|(c, refused)| (c.model, refused));
        }
    }
    if !path.exists() {
        let problem = "there is no such file or folder".into();
        return Err(CheckpointError::Missing { path: path.to_path_buf(), problem });
    }
    let problem = "holds no checkpoint; name a run folder, a checkpoint folder, an imported model or a .safetensors file".into();
    Err(CheckpointError::Missing { path: path.to_path_buf(), problem })
}

#[cfg(test)]
mod tests {
    use super::parts::{Holding, Share};
    use super::*;

    type Read<'a> = &'a mut dyn FnMut(&str) -> io::Result<Vec<f32>>;

    /// Writes a checkpoint of one rank.
    fn write(checkpoints: &Checkpoints, state: &State, read: Read) -> Result<PathBuf, CheckpointError> {
        let begun = checkpoints.begin(state.step)?;
        let holding = |name: &str| Holding { entry: (name.to_string(), vec![2, 2]), range: None };
        let texts = [("spec", "model: …".to_string()), ("step", state.step.to_string())];
        let share = Share {
            folder: &begun.folder,
            step: state.step,
            rank: 0,
            metadata: &texts.map(|(key, text)| (key.to_string(), text)),
            holdings: [&["w", "b"].map(holding), &["w.m", "w.v"].map(holding)],
            cut: [false; 2],
            read,
        };
        let io = |error| CheckpointError::Io { path: checkpoints.at(state.step), error };
        let filed = share.write().map_err(io)?;
        checkpoints.finish(begun, state, None, &filed)
    }

    fn save(checkpoints: &Checkpoints, step: u64) -> PathBuf {
        let state = State { version: VERSION, step, best: Some((1, 0.1 + 0.2)), ..State::default() };
        write(checkpoints, &state, &mut |name| Ok(vec![step as f32, name.len() as f32, -0.0, 1.0])).unwrap()
    }

    #[test]
    fn what_is_saved_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path().join("checkpoints"));
        save(&checkpoints, 3);
        save(&checkpoints, 12);
        save(&checkpoints, 12);
        let (last, refused) = checkpoints.latest().unwrap();
        assert!(refused.is_empty());
        assert_eq!((last.state.step, last.state.best), (12, Some((1, 0.1 + 0.2))));
        assert_eq!(last.model.get("b").unwrap().unwrap().1[..2], [12.0, 1.0]);
        assert_eq!(last.optimizer.get("w.v").unwrap().unwrap().0, [2, 2]);
        for path in [folder.path().to_path_buf(), folder.path().join("checkpoints"), checkpoints.at(12)] {
            assert_eq!(open_model(&path).unwrap().0.metadata("step"), Some("12"));
        }
        assert_eq!(
            open_model(&checkpoints.at(3).join(Kind::Model.whole())).unwrap().0.metadata("spec"),
            Some("model: …")
        );
        assert!(open_model(Path::new("/nonexistent")).unwrap_err().to_string().contains("no such"));
    }

    #[test]
    fn every_flipped_byte_and_every_cut_is_refused_and_the_last_good_one_serves() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        save(&checkpoints, 1);
        let newest = save(&checkpoints, 2);
        for name in [Kind::Model.whole(), Kind::Optimizer.whole(), STATE, CHECKSUMS] {
            let path = newest.join(name);
            let good = fs::read(&path).unwrap();
            for i in 0..good.len() {
                let mut bad = good.clone();
                bad[i] ^= 1 << (i % 8);
                fs::write(&path, &bad).unwrap();
                let error = Checkpoint::open(&newest).unwrap_err().to_string();
                assert!(error.contains("step-00000002"), "{name} byte {i}: {error}");
            }
            for n in [0, 1, good.len() / 2, good.len() - 1] {
                fs::write(&path, &good[..n]).unwrap();
                let (fallback, refused) = checkpoints.latest().unwrap();
                assert_eq!((fallback.state.step, refused.len()), (1, 1), "{name} cut to {n}");
            }
            fs::remove_file(&path).unwrap();
            assert_eq!(checkpoints.latest().unwrap().0.state.step, 1);
            fs::write(&path, &good).unwrap();
        }
        assert_eq!(checkpoints.latest().unwrap().0.state.step, 2);
    }

    #[test]
    fn a_failed_save_leaves_the_last_good_one() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        save(&checkpoints, 1);
        let state = State { version: VERSION, step: 2, ..State::default() };
        let full = &mut |_: &str| Err(io::Error::other("disk full"));
        let error = write(&checkpoints, &state, full).unwrap_err().to_string();
        assert!(error.contains("disk full") && error.contains("step-00000002"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(checkpoints.latest().unwrap().0.state.step, 1);
    }

    #[test]
    fn pruning_keeps_newest_best_and_multiples() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        (1..=9).for_each(|step| drop(save(&checkpoints, step)));
        checkpoints.prune(9, Keep { newest: 2, every: 4, best: Some(3) }).unwrap();
        assert_eq!(checkpoints.steps(), [3, 4, 8, 9]);
        // A run that went on from step 4 because what is newer is damaged.
        checkpoints.prune(4, Keep::default()).unwrap();
        assert_eq!(checkpoints.steps(), [4, 8, 9]);
        checkpoints.prune(9, Keep::default()).unwrap();
        assert_eq!(checkpoints.steps(), [9]);
    }
}
