//! Events of a run, for its watchers.

use super::metrics::{EvaluationLine, StepLine};
use std::path::Path;

/// Something that happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// A step was taken.
    Step {
        /// Its figures.
        line: &'a StepLine,
        /// Steps in all.
        steps: u64,
        /// Tokens a second, lately.
        speed: f64,
        /// Seconds left, as far as one can tell.
        left: f64,
    },
    /// Something takes a while: `evaluating`, `saving`.
    Busy(&'static str),
    /// An evaluation was made.
    Evaluated(&'a EvaluationLine),
    /// Text that the model generated.
    Sample {
        /// After which step.
        step: u64,
        /// The prompt.
        prompt: &'a str,
        /// The text generated.
        text: &'a str,
        /// The right answer, where there is one.
        answer: Option<&'a str>,
    },
    /// A checkpoint was written.
    Saved {
        /// The step it belongs to.
        step: u64,
        /// Where.
        path: &'a Path,
    },
    /// Something worth knowing.
    Note(&'a str),
}

/// Whoever watches a run.
pub trait Watcher {
    /// Told of everything, in order.
    fn tell(&mut self, event: &Event);
}

impl<F: FnMut(&Event)> Watcher for F {
    fn tell(&mut self, event: &Event) {
        self(event);
    }
}
