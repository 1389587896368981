//! Checkpoints that are written while training goes on.
//!
//! *In*: on each rank that writes a [`Snapshot`], its share of a checkpoint, in memory; on rank 0
//! also a [`Seal`]. *Out*: a checkpoint in its folder. *Promise*: one is under way at a time. Where
//! several ranks write, it gets its name after each has said that its files are on disk, which they
//! do between two steps. Older ones are removed once it is whole and every byte of it was read back
//! and matches its checksum. An error of writing is an error of the run, at the next step or at its
//! end, and older checkpoints stay. Threads end before their owner.

use crate::checkpoint::parts::{Filed, Holding, Manifest, Mesh, Share};
use crate::checkpoint::safetensors::Entry;
use crate::checkpoint::{Begun, Checkpoint, CheckpointError, Checkpoints, Keep, State};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The share of a rank in a checkpoint.
pub struct Snapshot {
    /// The folder that is being filled.
    pub folder: PathBuf,
    /// The step.
    pub step: u64,
    /// Which rank.
    pub rank: u64,
    /// See [`Share::metadata`].
    pub metadata: Vec<(String, String)>,
    /// Its tensors of the model and of the optimizer.
    pub holdings: [Vec<Holding>; 2],
    /// Whether either is cut over ranks.
    pub cut: [bool; 2],
    /// Values of both, by name.
    pub values: HashMap<String, Vec<f32>>,
}

/// All that rank 0 needs to make a checkpoint of files.
pub struct Seal {
    /// The checkpoints of the run.
    pub checkpoints: Checkpoints,
    /// The folder that is being filled.
    pub begun: Begun,
    /// When.
    pub since: Instant,
    /// Where the run stands.
    pub state: State,
    /// The ranks.
    pub mesh: Mesh,
    /// Tensors of the model and of the optimizer, all of them.
    pub entries: [Vec<Entry>; 2],
    /// Texts kept with the model.
    pub metadata: Vec<(String, String)>,
    /// Which checkpoints are kept after it.
    pub keep: Keep,
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Written {
    /// The step it belongs to.
    pub step: u64,
    /// Where.
    pub path: PathBuf,
    /// From its snapshot until it was whole.
    pub took: Duration,
}

impl Snapshot {
    /// Writes it.
    fn write(self) -> Result<Vec<Filed>, CheckpointError> {
        let Snapshot { folder, step, rank, metadata, holdings: [model, optimizer], cut, mut values } = self;
        let share = Share {
            folder: &folder,
            step,
            rank,
            metadata: &metadata,
            holdings: [&model, &optimizer],
            cut,
            // Memory is given back tensor by tensor.
            read: &mut |name| {
                values.remove(name).ok_or_else(|| io::Error::other(format!("no values of {name}")))
            },
        };
        share.write().map_err(|error| CheckpointError::Io { path: folder.clone(), error })
    }
}

impl Seal {
    /// Makes a checkpoint of files that are on disk, and removes older ones.
    fn finish(self, filed: &[Filed]) -> Result<Written, CheckpointError> {
        let Seal { checkpoints, begun, since, state, mesh, entries: [model, optimizer], metadata, keep } =
            self;
        let step = state.step;
        let about = |error| CheckpointError::Io { path: checkpoints.at(step), error };
        let manifest = match filed.iter().any(Filed::is_part) {
            true => Some(Manifest::of(step, mesh, filed, [&model, &optimizer], &metadata).map_err(about)?),
            false => None,
        };
        let path = checkpoints.finish(begun, &state, manifest.as_ref(), filed)?;
        // Parts were read back by their ranks.
        Checkpoint::open(&path)?;
        checkpoints.prune(step, keep)?;
        Ok(Written { step, path, took: since.elapsed() })
    }
}

/// The checkpoint under way.
#[derive(Default)]
pub struct Writing {
    /// This rank's share of a checkpoint that several ranks write.
    share: Option<JoinHandle<Result<Vec<Filed>, CheckpointError>>>,
    /// Its files, once they are on disk.
    filed: Option<Vec<Filed>>,
    /// The rest of the checkpoint, which waits for the shares of all.
    seal: Option<Seal>,
    /// The rest of it, or all where rank 0 alone writes.
    whole: Option<JoinHandle<Result<Written, CheckpointError>>>,
}

/// The result of a thread.
fn joined<T>(thread: JoinHandle<Result<T, CheckpointError>>) -> Result<T, CheckpointError> {
    let panicked = |_| {
        let error = io::Error::other("the thread that writes checkpoints panicked");
        Err(CheckpointError::Io { path: PathBuf::from("checkpoints"), error })
    };
    thread.join().unwrap_or_else(panicked)
}

fn spawn<T: Send + 'static>(
    path: PathBuf,
    work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
) -> Result<JoinHandle<Result<T, CheckpointError>>, CheckpointError> {
    let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
    thread.map_err(|error| CheckpointError::Io { path, error })
}

impl Writing {
    /// Begins to write what rank 0 alone writes; the one before is over.
    pub fn begin(&mut self, snapshot: Snapshot, seal: Seal) -> Result<(), CheckpointError> {
        let work = move || seal.finish(&snapshot.write()?);
        self.whole = Some(spawn("checkpoints".into(), work)?);
        Ok(())
    }

    /// Begins to write a rank's share; `seal` is rank 0's.
    pub fn begin_share(&mut self, snapshot: Snapshot, seal: Option<Seal>) -> Result<(), CheckpointError> {
        self.seal = seal;
        self.share = Some(spawn(snapshot.folder.clone(), move || snapshot.write())?);
        Ok(())
    }

    /// Whether ranks write a checkpoint together and rank 0 does not have all shares; on every rank
    /// at once.
    pub fn is_shared(&self) -> bool {
        self.share.is_some() || self.filed.is_some()
    }

    /// Whether this rank's share is on disk, or waits for it.
    pub fn on_disk(&mut self, wait: bool) -> Result<bool, CheckpointError> {
        if let Some(share) = self.share.take_if(|share| wait || share.is_finished()) {
            self.filed = Some(joined(share)?);
        }
        Ok(self.filed.is_some())
    }

    /// The files of this rank on disk; the share is over.
    pub fn filed(&mut self) -> Vec<Filed> {
        self.filed.take().unwrap_or_default()
    }

    /// Begins to make a checkpoint of what all ranks have on disk, on rank 0.
    pub fn seal(&mut self, filed: Vec<Filed>) -> Result<(), CheckpointError> {
        let Some(seal) = self.seal.take() else { return Ok(()) };
        self.whole = Some(spawn("checkpoints".into(), move || seal.finish(&filed))?);
        Ok(())
    }

    /// The checkpoint that was under way, if it is over now.
    pub fn over(&mut self) -> Result<Option<Written>, CheckpointError> {
        if self.whole.as_ref().is_some_and(|thread| thread.is_finished()) { self.wait() } else { Ok(None) }
    }

    /// Waits for the checkpoint under way.
    pub fn wait(&mut self) -> Result<Option<Written>, CheckpointError> {
        self.whole.take().map(joined).transpose()
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        // The run's lock is given back after this: nobody else may write meanwhile.
        let _ = self.share.take().map(JoinHandle::join);
        let _ = self.whole.take().map(JoinHandle::join);
    }
}
