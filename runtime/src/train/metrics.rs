//! `metrics.jsonl`: one line a step, one an evaluation.

use super::health::Health;
use super::preferences::Preferred;
use serde::{Deserialize, Serialize};
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
    /// Opens a file and goes on at `bytes`, dropping the lines after it, of steps that will be
    /// taken again.
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    /// Which step, from 1.
    pub step: u64,
    /// Mean loss over its targets, in nats.
    pub loss: f64,
    /// The part of a teacher, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taught: Option<f64>,
    /// The part of routers: penalties, balance and z losses, weighted; where the model has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auxiliary: Option<f64>,
    /// Learning rate.
    pub learning_rate: f64,
    /// Gradient norm before clipping.
    pub norm: f64,
    /// Tokens read so far.
    pub tokens: u64,
    /// Seconds of training so far.
    pub seconds: f64,
    /// The count of the outermost `recur` that was drawn for the step, where one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u64>,
    /// How evenly experts were chosen, of some steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<Balance>,
}

/// A step that was left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SkippedLine {
    /// Which step.
    pub step: u64,
    /// Why.
    pub skipped: String,
}

/// How evenly the experts of a mixture were chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// Maximal violation: the choices of the busiest expert over the mean, less one; 0 where all
    /// are equal.
    pub violation: f64,
    /// Share of experts that were never chosen.
    pub idle: f64,
}

impl Balance {
    /// Of these numbers of choices; `None` where nothing was chosen.
    pub fn of(counts: &[f32]) -> Option<Self> {
        let total: f64 = counts.iter().map(|c| f64::from(*c)).sum();
        let most = counts.iter().copied().fold(0.0, f32::max);
        let idle = counts.iter().filter(|c| **c == 0.0).count();
        let n = counts.len() as f64;
        (total > 0.0).then(|| Balance { violation: f64::from(most) * n / total - 1.0, idle: idle as f64 / n })
    }
}

/// Figures of one evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationLine {
    /// After which step.
    pub step: u64,
    /// Whether it is the evaluation that concludes the run: over all that is held out (see
    /// [`held_out`](crate::evaluate::held_out)), where those before it are over a sample.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
    /// Mean loss over held-out targets, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// How many targets that is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<u64>,
    /// Held-out pairs, where the run learns from preferences; the loss above is then that of their
    /// better answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferred: Option<Preferred>,
    /// The same in bits per byte of text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Share of held-out problems answered exactly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
    /// How many problems that is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problems: Option<u64>,
    /// The same by number of steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_difficulty: Vec<(u64, f64)>,
    /// Health of routers, where the model has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
}

impl EvaluationLine {
    /// Its figures in words, each with what it is of.
    pub fn words(&self) -> String {
        let of = |n: Option<u64>, what: &str| n.map_or(String::new(), |n| format!(" (of {n} {what})"));
        let parts = [
            self.preferred.map(|p| {
                format!(
                    "preference loss {:.4}, {:.1} % of {} pairs preferred",
                    p.loss,
                    100.0 * p.share,
                    p.pairs
                )
            }),
            self.validation_loss.map(|x| format!("validation loss {x:.4}{}", of(self.targets, "targets"))),
            self.bits_per_byte.map(|x| format!("{x:.4} bits per byte")),
            self.exact_match
                .map(|x| format!("exact match {:.1} %{}", 100.0 * x, of(self.problems, "problems"))),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// All that a run has measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// The steps it took.
    pub steps: Vec<StepLine>,
    /// The steps it left out.
    pub skipped: Vec<SkippedLine>,
    /// Its evaluations, one a step: a curve, whose points are over the same sample.
    pub evaluations: Vec<EvaluationLine>,
    /// The evaluation that concluded it.
    pub conclusion: Option<EvaluationLine>,
}

/// A line of either kind.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Step(StepLine),
    Skipped(SkippedLine),
    Evaluation(EvaluationLine),
}

impl Metrics {
    /// Reads a file that a run may still be writing; an unfinished last line is left for later. A
    /// run that was stopped before its first step has no file, and has measured nothing.
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = match dreamc_data::files::read_text(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            text => text.map_err(|e| dreamc_data::files::about(path, e))?,
        };
        let mut metrics = Metrics::default();
        for (i, line) in text.split_inclusive('\n').enumerate().filter(|(_, l)| l.ends_with('\n')) {
            match serde_json::from_str(line) {
                Ok(Line::Step(step)) => metrics.steps.push(step),
                Ok(Line::Skipped(step)) => metrics.skipped.push(step),
                Ok(Line::Evaluation(evaluation)) => {
                    if evaluation.complete {
                        metrics.conclusion = Some(evaluation.clone());
                    }
                    if metrics.evaluations.last().is_none_or(|e| e.step != evaluation.step) {
                        metrics.evaluations.push(evaluation);
                    }
                }
                Err(e) => {
                    let what = format!("{}:{}: not a line of metrics: {e}", path.display(), i + 1);
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
            }
        }
        Ok(metrics)
    }

    /// The last evaluation: what a run is worth once it is at its end.
    pub fn last(&self) -> Option<&EvaluationLine> {
        self.conclusion.as_ref().or(self.evaluations.last())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
        assert_eq!(Metrics::read(&path).unwrap().evaluations, [line(1), line(3)]);
        // A file that lost its end to a power cut is taken as it is.
        assert_eq!(Lines::open(&path, 1000).unwrap().bytes(), 22);
    }

    #[test]
    fn both_kinds_of_lines_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let step = StepLine {
            taught: None,
            step: 10,
            loss: 1.5,
            auxiliary: Some(0.125),
            learning_rate: 1e-3,
            norm: 0.25,
            tokens: 640,
            seconds: 0.5,
            depth: Some(3),
            balance: Balance::of(&[2.0, 0.0, 6.0, 0.0]),
        };
        assert_eq!(step.balance, Some(Balance { violation: 2.0, idle: 0.5 }));
        let evaluation = EvaluationLine { step: 10, exact_match: Some(0.5), ..Default::default() };
        let mut lines = Lines::open(&path, 0).unwrap();
        lines.push(&step).unwrap();
        let skipped = SkippedLine { step: 11, skipped: "the loss is NaN".into() };
        lines.push(&skipped).unwrap();
        lines.push(&evaluation).unwrap();
        let mut text = fs::read_to_string(&path).unwrap();
        text += "{\"step\": 11, \"lo";
        fs::write(&path, &text).unwrap();
        let read = Metrics::read(&path).unwrap();
        assert_eq!(
            (read.steps, read.skipped, read.evaluations),
            (vec![step], vec![skipped], vec![evaluation])
        );
        fs::write(&path, text + "\n").unwrap();
        assert_eq!(Metrics::read(&folder.path().join("absent")).unwrap(), Metrics::default());
        assert!(Metrics::read(&path).unwrap_err().to_string().contains(":4: not a line"));
    }
}
