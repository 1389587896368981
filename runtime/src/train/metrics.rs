//! `metrics.jsonl`: one line a step, one an evaluation.

use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

/// A file of JSON lines that goes on where a checkpoint was.
#[derive(Debug)]
pub struct Lines {
    file: File,
    bytes: u64,
}

impl Lines {
    /// Opens a file and goes on at `bytes`, dropping what is behind: lines of steps that will be taken again.
    pub fn open(path: &Path, bytes: u64) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        let bytes = bytes.min(file.metadata()?.len());
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(Lines { file, bytes })
    }

    /// Writes a line. A reader never sees half of one, since it is one write.
    pub fn push(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)?;
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// Makes what was written durable.
    pub fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Bytes written in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Figures of one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepLine {
    /// Which step, from 1.
    pub step: u64,
    /// Mean loss over its targets, in nats.
    pub loss: f64,
    /// Learning rate.
    pub learning_rate: f64,
    /// Gradient norm before clipping.
    pub norm: f64,
    /// Tokens read so far.
    pub tokens: u64,
    /// Seconds of training so far.
    pub seconds: f64,
}

/// Figures of one evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EvaluationLine {
    /// After which step.
    pub step: u64,
    /// Mean loss over held-out targets, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The same in bits per byte of text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Share of held-out problems answered exactly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
    /// The same by number of steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by_difficulty: Vec<(u64, f64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_on_where_the_checkpoint_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let line = |step| EvaluationLine { step, ..Default::default() };
        let mut lines = Lines::open(&path, 0).unwrap();
        lines.push(&line(1)).unwrap();
        let mark = lines.bytes();
        lines.push(&line(2)).unwrap();
        drop(lines);
        let mut lines = Lines::open(&path, mark).unwrap();
        lines.push(&line(3)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":3}\n");
        // A file that lost its end to a power cut is taken as it is.
        assert_eq!(Lines::open(&path, 1000).unwrap().bytes(), 22);
    }
}
