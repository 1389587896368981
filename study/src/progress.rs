//! The words about a run while it goes on: a live line on a terminal, and a record of lines that
//! stay.
//!
//! *In*: what a run tells. *Out*: on standard error the live line, rewritten in place; on the
//! stream of the record evaluations, samples, notes and, where no live line stands in their way,
//! the loss every few seconds. *Promise*: nothing here ends a run: what a stream does not take is
//! lost.

use crate::note;
use crate::output::{self, Stream};
use crate::show::{bytes, duration, short};
use dreamc_data::Notice;
use dreamc_runtime::train::event::{Event, Watcher};
use std::time::{Duration, Instant};

/// Between two pictures of the live line.
const FRAME: Duration = Duration::from_millis(100);

/// Between two plain lines.
const PLAIN: Duration = Duration::from_secs(5);

/// Says how work goes on.
pub struct Progress {
    /// The run of its lines, where there are several.
    label: String,
    /// Whether there is a live line.
    live: bool,
    /// Where lines go that stay.
    record: Stream,
    drawn: Option<Instant>,
    recorded: Option<Instant>,
    /// Whether the live line is on the screen.
    shown: bool,
    line: String,
    /// The loss of the last step.
    pub loss: Option<f64>,
    /// Runs that come after this one, as far as their time is known by this one's.
    pub after: f64,
}

impl Default for Progress {
    /// Of work whose result is not its progress: all of it goes to standard error.
    fn default() -> Self {
        Self::labelled("", true, Stream::Err)
    }
}

impl Progress {
    /// Of one run of several: every line begins with its name. With others at the same time there
    /// is no live line.
    pub fn labelled(label: &str, alone: bool, record: Stream) -> Self {
        let label = if label.is_empty() { String::new() } else { format!("{label}  ") };
        let live = alone && Stream::Err.is_live() && !output::quiet();
        Progress {
            label,
            live,
            record,
            drawn: None,
            recorded: None,
            shown: false,
            line: String::new(),
            loss: None,
            after: 0.0,
        }
    }

    /// Takes the live line off the screen.
    pub fn clear(&mut self) {
        if self.shown {
            output::complain("\r\x1b[K");
            self.shown = false;
        }
    }

    /// Progress with some long work on a file.
    pub fn notice(&mut self, n: &Notice) {
        let percent = 100.0 * n.done as f64 / n.total.max(1) as f64;
        let line = format!("{} {}: {percent:.0} % of {}", n.what, n.path.display(), bytes(n.total));
        self.work(&line);
    }

    /// How far some work is. Nothing is said of work that is done at once.
    pub fn work(&mut self, line: &str) {
        let now = Instant::now();
        let last = *self.drawn.get_or_insert(now);
        let wait = if self.live { FRAME } else { PLAIN };
        if now.duration_since(last) >= wait {
            self.drawn = Some(now);
            if self.live { self.draw(line) } else { self.stay(line) }
        }
    }

    /// The phase that long work has come to, said at once.
    pub fn phase(&mut self, line: &str) {
        let line = format!("{line}…");
        if self.live { self.draw(&line) } else { self.stay(&line) }
    }

    /// The live line, as much of it as the terminal is wide: a line that wraps is not rewritten in
    /// place.
    fn draw(&mut self, line: &str) {
        if self.live {
            let width = Stream::Err.size().0.saturating_sub(1);
            let line: String = format!("{}{line}", self.label).chars().take(width).collect();
            output::complain(&format!("\r{line}\x1b[K"));
            self.shown = true;
        }
    }

    /// A line that stays.
    fn stay(&mut self, line: &str) {
        if output::quiet() {
            return;
        }
        self.clear();
        let line = format!("{}{line}\n", self.label);
        match self.record {
            // A fault of standard output is the command's failure at its end, not the run's
            // now.
            Stream::Out => drop(output::write(line.as_bytes())),
            Stream::Err => output::complain(&line),
        }
    }

    /// Whether steps are recorded: not where the live line shows them to the same person.
    fn records_steps(&self) -> bool {
        output::verbose() || !self.live || !self.record.is_terminal()
    }
}

impl Watcher for Progress {
    fn tell(&mut self, event: &Event) {
        match event {
            Event::Step { line, steps, speed, left } => {
                let width = steps.to_string().len();
                let text = format!(
                    "step {:>width$}/{steps}  loss {:.4}  norm {:.3}  rate {:.1e}  {:>6} tokens/s  {} left{}",
                    line.step,
                    line.loss,
                    line.norm,
                    line.learning_rate,
                    short(*speed),
                    duration(*left),
                    match self.after > 0.0 {
                        false => String::new(),
                        true => format!(", {} of all", duration(left + self.after * (line.seconds + left))),
                    }
                );
                self.loss = Some(line.loss);
                let due = |last: Option<Instant>, wait: Duration| {
                    line.step == *steps || last.is_none_or(|t| t.elapsed() >= wait)
                };
                if due(self.drawn, FRAME) {
                    self.drawn = Some(Instant::now());
                    self.draw(&text);
                }
                if self.records_steps() && (output::verbose() || due(self.recorded, PLAIN)) {
                    self.recorded = Some(Instant::now());
                    self.stay(&text);
                }
                self.line = text;
            }
            Event::Busy(what) => {
                let line = format!("{}  {what}…", self.line);
                self.draw(&line);
            }
            Event::Evaluated(line) => {
                let words = line.words();
                if !words.is_empty() {
                    let of = if line.complete { ", the concluding evaluation" } else { "" };
                    self.stay(&format!("step {}{of}: {words}", line.step));
                }
            }
            // Samples of many runs would bury everything else.
            Event::Sample { .. } if !self.label.is_empty() => {}
            Event::Sample { prompt, text, answer, .. } => {
                let mark = match answer {
                    Some(answer) if answer == text => "  ✓".to_string(),
                    Some(answer) => format!("  ✗ (right: {answer})"),
                    None => String::new(),
                };
                let shown = |s: &str| {
                    s.chars().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect::<String>()
                };
                let line =
                    format!("    {} → {}{mark}", shown(prompt).replace('\n', "⏎"), text.replace('\n', "⏎"));
                self.stay(&line);
            }
            Event::Saved { step, path } if output::verbose() => {
                self.stay(&format!("step {step}: checkpoint {}", path.display()));
            }
            Event::Saved { .. } => {}
            // Remarks and warnings are no part of the record.
            Event::Note(text) => {
                self.clear();
                note!("{}{text}", self.label);
            }
        }
    }
}
