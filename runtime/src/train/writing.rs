//! Checkpoints that are written while training goes on.
//!
//! *In*: a [`Snapshot`], all of a checkpoint in memory. *Out*: a checkpoint in its folder.
//! *Promise*: one is under way at a time; older ones are removed once it is whole and every byte of
//! it was read back and matches its checksum. An error of writing is an error of the run, at the
//! next step or at its end, and older checkpoints stay. The thread ends before its owner.

use crate::checkpoint::safetensors::Entry;
use crate::checkpoint::{Binding, Checkpoint, CheckpointError, Checkpoints, Content, Keep, State};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// All of a checkpoint.
pub struct Snapshot {
    /// Where the run stands.
    pub state: State,
    /// The resolved specification.
    pub spec: String,
    /// See [`Content::base`].
    pub base: Option<Binding>,
    /// Tensors of the model and of the optimizer.
    pub entries: [Vec<Entry>; 2],
    /// Values of both, by name.
    pub values: HashMap<String, Vec<f32>>,
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
    /// Writes it, reads it back, and removes older ones.
    fn write(mut self, checkpoints: &Checkpoints) -> Result<Written, CheckpointError> {
        let begun = Instant::now();
        let [model, optimizer] = std::mem::take(&mut self.entries);
        let values = &mut self.values;
        let path = checkpoints.save(Content {
            state: &self.state,
            spec: &self.spec,
            base: self.base.as_ref(),
            model,
            optimizer,
            // Memory is given back tensor by tensor.
            read: &mut |name| {
                values.remove(name).ok_or_else(|| io::Error::other(format!("no values of {name}")))
            },
        })?;
        Checkpoint::open(&path)?;
        let step = self.state.step;
        checkpoints.prune(step, self.keep)?;
        Ok(Written { step, path, took: begun.elapsed() })
    }
}

/// The checkpoint under way.
#[derive(Default)]
pub struct Writing {
    thread: Option<JoinHandle<Result<Written, CheckpointError>>>,
}

impl Writing {
    /// Begins to write; the one before is over.
    pub fn begin(&mut self, checkpoints: Checkpoints, snapshot: Snapshot) -> Result<(), CheckpointError> {
        let folder = checkpoints.at(snapshot.state.step);
        let write = move || snapshot.write(&checkpoints);
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(write);
        self.thread = Some(thread.map_err(|error| CheckpointError::Io { path: folder, error })?);
        Ok(())
    }

    /// The checkpoint that was under way, if it is over now.
    pub fn over(&mut self) -> Result<Option<Written>, CheckpointError> {
        if self.thread.as_ref().is_some_and(|thread| thread.is_finished()) { self.wait() } else { Ok(None) }
    }

    /// Waits for the checkpoint under way.
    pub fn wait(&mut self) -> Result<Option<Written>, CheckpointError> {
        let Some(thread) = self.thread.take() else { return Ok(None) };
        let panicked = |_| {
            let error = io::Error::other("the thread that writes checkpoints panicked");
            Err(CheckpointError::Io { path: PathBuf::from("checkpoints"), error })
        };
        thread.join().unwrap_or_else(panicked).map(Some)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        // The run's lock is given back after this: nobody else may write meanwhile.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
