//! `dreamc watch`: a live view of a run or of a comparison, from what they write.
//!
//! It reads `metrics.jsonl`, `ledger.json` and `spec.yaml` and touches nothing, so that it can
//! watch a run of another process, or one that is over. Without a terminal it writes its picture
//! once, as plain text.

use clap::Args;
use dreamc_data::files;
use dreamc_dsl::Spec;
use dreamc_runtime::train::folder::resident;
use dreamc_runtime::train::ledger::Ledger;
use dreamc_runtime::train::metrics::{EvaluationLine, Metrics};
use dreamc_runtime::train::signal;
use dreamc_study::compare::study::{Listed, ended, ledger, runs};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::output::Stream;
use dreamc_study::show::{bytes, duration, short, table};
use dreamc_study::{say, spec};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// Watch a run or a comparison: loss curve, speed, balance of experts, memory; of a comparison,
/// every run and the time left
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc watch runs/quickstart-001          until the run ends; Ctrl-C stops watching, not the run
  dreamc watch runs/quickstart-001 --once   one picture
  dreamc watch runs/reasoning               all runs of a comparison")]
pub struct Arguments {
    /// The folder of the run, or of the comparison
    #[arg(value_name = "RUN|COMPARISON")]
    run: PathBuf,

    /// Write one picture and stop
    #[arg(long)]
    once: bool,

    /// Milliseconds between pictures
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    every: u64,
}

/// State of a run.
struct State {
    folder: String,
    spec: Spec,
    ledger: Option<Ledger>,
    metrics: Metrics,
    /// Bytes its process has in memory; `None` where there is no such process.
    resident: Option<u64>,
}

/// The run or comparison that is watched, as it stands.
enum View {
    Run(Box<State>),
    Comparison(Runs),
}

impl View {
    fn read(folder: &Path) -> Result<Self, Failure> {
        Ok(match runs(folder)? {
            None => View::Run(Box::new(State::read(folder)?)),
            Some(all) => View::Comparison(Runs::read(folder, all)?),
        })
    }

    fn picture(&self, width: usize, height: usize) -> Vec<String> {
        match self {
            View::Run(state) => state.picture(width, height),
            View::Comparison(runs) => runs.picture(width, height),
        }
    }

    /// Whether nothing more will happen.
    fn over(&self) -> bool {
        match self {
            View::Run(state) => state.over(),
            View::Comparison(runs) => {
                runs.all.iter().all(|(_, s)| s.as_ref().is_some_and(|s| s.over() && s.resident.is_none()))
            }
        }
    }
}

/// A comparison.
struct Runs {
    folder: String,
    /// How each stands; `None` where it has not begun.
    all: Vec<(Listed, Option<State>)>,
}

impl Runs {
    fn read(folder: &Path, all: Vec<Listed>) -> Result<Self, Failure> {
        let state = |run: Listed| {
            let begun = run.path.join("spec.yaml").is_file();
            let state = if begun { Some(State::read(&run.path)?) } else { None };
            Ok((run, state))
        };
        let all = all.into_iter().map(state).collect::<Result<_, Failure>>()?;
        Ok(Runs { folder: folder.display().to_string(), all })
    }

    fn picture(&self, width: usize, height: usize) -> Vec<String> {
        let head = ["run", "status", "step", "loss", "validation loss", "exact match", "left"];
        let mut rows = vec![head.map(String::from).to_vec()];
        // A run that has not begun takes as long for its FLOPs as those that have.
        let known = self.all.iter().filter_map(|(run, s)| Some((s.as_ref()?.seconds()?, run.weight)));
        let (seconds, weights) =
            known.fold((0.0, 0.0), |(s, w), (seconds, weight)| (s + seconds, w + weight));
        let mean = seconds / weights;
        let (mut left, mut active) = (0.0, 0);
        for (run, state) in &self.all {
            let (name, mean) = (&run.name, mean * run.weight);
            let Some(state) = state else {
                left += mean;
                rows.push(vec![name.clone(), "not begun".into()]);
                continue;
            };
            active = rows.len() - 1;
            let last = state.metrics.steps.last();
            let (step, steps) = (last.map_or(0, |s| s.step), state.spec.train.steps);
            let own = if state.over() { 0.0 } else { state.left().unwrap_or(mean) };
            left += own;
            let evaluation = state.metrics.evaluations.last();
            rows.push(vec![
                name.clone(),
                state.status().into(),
                format!("{step}/{steps}"),
                last.map_or(String::new(), |s| format!("{:.4}", s.loss)),
                evaluation.and_then(|e| e.validation_loss).map_or(String::new(), |v| format!("{v:.4}")),
                evaluation
                    .and_then(|e| e.exact_match)
                    .map_or(String::new(), |v| format!("{:.1} %", 100.0 * v)),
                if own > 0.0 { duration(own) } else { String::new() },
            ]);
        }
        let ended = self.all.iter().filter(|(_, s)| s.as_ref().is_some_and(State::over)).count();
        let mut lines = vec![format!("{}  {ended} of {} runs at their end", self.folder, self.all.len())];
        if left > 0.0 {
            lines[0] += &format!(", {} left where one runs at a time", duration(left));
        }
        lines.push(String::new());
        let shown = table(&rows);
        let mut shown = shown.lines().map(str::to_string);
        lines.extend(shown.next());
        lines.extend(window(shown.collect(), active, height.saturating_sub(lines.len())));
        lines.into_iter().map(|l| l.chars().take(width).collect()).collect()
    }
}

/// At most `room` lines of a list around one of them, with a word on those that are left out.
fn window(all: Vec<String>, around: usize, room: usize) -> Vec<String> {
    if all.len() <= room {
        return all;
    }
    let room = room.saturating_sub(2);
    let first = around.saturating_sub(2 * room / 3).min(all.len() - room);
    let word = |n: usize, place: &str| format!("  … {n} runs {place}");
    let mut shown = vec![word(first, "before")];
    shown.extend_from_slice(&all[first..first + room]);
    shown.push(word(all.len() - room - first, "after"));
    shown
}

pub fn run(a: Arguments) -> Done {
    if a.once || !Stream::Out.is_live() {
        let state = View::read(&a.run)?;
        for line in state.picture(100, 200) {
            say!("{line}")?;
        }
        return Ok(());
    }
    signal::catch();
    let mut out = io::stdout();
    // The other screen, without a cursor; whatever happens, both are put back.
    write!(out, "\x1b[?1049h\x1b[?25l")?;
    let result = live(&a, &mut out);
    write!(out, "\x1b[?25h\x1b[?1049l")?;
    out.flush()?;
    let state = result?;
    for line in state.picture(Stream::Out.size().0, 24) {
        say!("{line}")?;
    }
    Ok(())
}

/// Draws until the run ends or somebody has seen enough; gives the last state.
fn live(a: &Arguments, out: &mut impl Write) -> Result<View, Failure> {
    loop {
        let state = View::read(&a.run)?;
        let (width, height) = Stream::Out.size();
        let mut text = String::from("\x1b[H");
        for line in state.picture(width, height.saturating_sub(1)) {
            text += &format!("{line}\x1b[K\r\n");
        }
        text += "\x1b[J";
        out.write_all(text.as_bytes())?;
        out.flush()?;
        let over = state.over();
        let mut waited = 0;
        while waited < a.every && signal::caught().is_none() && !over {
            sleep(Duration::from_millis(50));
            waited += 50;
        }
        if over || signal::caught().is_some() {
            return Ok(state);
        }
    }
}

impl State {
    fn read(folder: &Path) -> Result<Self, Failure> {
        let path = folder.join("spec.yaml");
        if !path.is_file() {
            return Err(Failure::Usage(format!(
                "{} is not a run folder: it has no spec.yaml; nor is it the folder of a comparison",
                folder.display()
            )));
        }
        let text = std::fs::read_to_string(&path).map_err(|e| files::about(&path, e))?;
        let metrics = folder.join("metrics.jsonl");
        Ok(State {
            folder: folder.display().to_string(),
            spec: spec::parse(&path.display().to_string(), &text, &[])?,
            ledger: ledger(folder)?,
            metrics: if metrics.is_file() { Metrics::read(&metrics)? } else { Metrics::default() },
            resident: resident(folder),
        })
    }

    fn status(&self) -> &str {
        match &self.ledger {
            Some(l) if l.status == "running" && self.resident.is_none() => "stopped without a word",
            Some(l) => l.status.as_str(),
            None => "not begun",
        }
    }

    /// Whether nothing more will happen.
    fn over(&self) -> bool {
        self.ledger.as_ref().is_some_and(|l| l.status != "running")
    }

    /// Seconds of training in all, as far as one can tell.
    fn seconds(&self) -> Option<f64> {
        let last = self.metrics.steps.last()?;
        Some(last.seconds * self.spec.train.steps as f64 / last.step.max(1) as f64)
    }

    /// Seconds of training left.
    fn left(&self) -> Option<f64> {
        Some((self.seconds()? - self.metrics.steps.last()?.seconds).max(0.0))
    }

    /// The lines shown, no line longer than `width`, no more lines than `height`.
    fn picture(&self, width: usize, height: usize) -> Vec<String> {
        let steps = &self.metrics.steps;
        let total = self.spec.train.steps;
        let step = steps.last().map_or(0, |s| s.step);
        let status = self.status();
        let mut lines = vec![format!("{}  {}  {status}", self.spec.model.name, self.folder)];
        let bar = width.saturating_sub(24).min(60);
        let done = (bar as u64 * step / total.max(1)) as usize;
        lines.push(format!(
            "{}{}  step {step}/{total}",
            "█".repeat(done.min(bar)),
            "░".repeat(bar - done.min(bar))
        ));
        lines.push(String::new());
        if let Some(last) = steps.last() {
            let fixed = 10 + self.metrics.evaluations.len().min(4);
            let rows = height.saturating_sub(fixed).clamp(3, 16);
            let routers = last.auxiliary.map(|a| format!(" + {a:.4} of routers")).unwrap_or_default();
            let depth = last.depth.map(|d| format!("   depth {d}")).unwrap_or_default();
            lines.push(format!(
                "loss {:.4}{routers}{depth}   norm {:.3}   learning rate {:.2e}",
                last.loss, last.norm, last.learning_rate
            ));
            let losses: Vec<f64> = steps.iter().map(|s| s.loss).collect();
            lines.extend(curve(&losses, width, rows));
            lines.push(String::new());
            lines.push(self.speed(width));
        }
        lines.extend(self.balance(width));
        lines.extend(self.memory());
        let from = self.metrics.evaluations.len().saturating_sub(4);
        for e in &self.metrics.evaluations[from..] {
            lines.push(format!("step {:<9} {}", e.step, e.words()));
        }
        if let Some(e) = &self.metrics.conclusion {
            lines.push(format!("held out       {}", e.words()));
        }
        lines.extend(self.metrics.last().and_then(by_difficulty));
        if let Some(health) = self.metrics.last().and_then(|e| e.health.as_ref()) {
            lines.extend(health.words().into_iter().map(|(name, words)| format!("{name} {words}")));
        }
        lines.truncate(height);
        lines.into_iter().map(|l| l.chars().take(width).collect()).collect()
    }

    fn speed(&self, width: usize) -> String {
        let steps = &self.metrics.steps;
        let rates: Vec<f64> = steps
            .windows(2)
            .map(|w| w[1].tokens.saturating_sub(w[0].tokens) as f64 / (w[1].seconds - w[0].seconds).max(1e-9))
            .collect();
        let recent = &rates[rates.len().saturating_sub(20)..];
        let rate = recent.iter().sum::<f64>() / recent.len().max(1) as f64;
        let each = steps.last().map_or(0.0, |s| s.tokens as f64 / s.step.max(1) as f64);
        let over = self.ledger.as_ref().is_some_and(ended);
        let left =
            self.spec.train.steps.saturating_sub(steps.last().map_or(0, |s| s.step)) as f64 * each / rate;
        let left =
            if over || recent.is_empty() { String::new() } else { format!("   {} left", duration(left)) };
        format!("tokens/s   {:<9} {}{left}", short(rate), spark(&rates, width.saturating_sub(44).min(32)))
    }

    fn balance(&self, width: usize) -> Option<String> {
        let all: Vec<_> = self.metrics.steps.iter().filter_map(|s| s.balance).collect();
        let last = all.last()?;
        let violations: Vec<f64> = all.iter().map(|b| b.violation).collect();
        Some(format!(
            "experts    busiest {:.2} × the mean, {:.1} % idle  {}",
            1.0 + last.violation,
            100.0 * last.idle,
            spark(&violations, width.saturating_sub(52).min(28))
        ))
    }

    fn memory(&self) -> Option<String> {
        let planned = self.ledger.as_ref().map(|l| format!("{} planned", bytes(l.peak_memory)));
        let resident = self.resident.map(|r| format!("{} resident", bytes(r)));
        let parts: Vec<String> = [planned, resident].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| format!("memory     {}", parts.join(", ")))
    }
}

/// Exact match by steps, where several difficulties were asked.
fn by_difficulty(e: &EvaluationLine) -> Option<String> {
    let each = e.by_difficulty.iter().map(|(steps, share)| format!("{steps}: {:.0} %", 100.0 * share));
    let each: Vec<String> = each.collect();
    (each.len() > 1).then(|| format!("by steps       {}", each.join(", ")))
}

/// Means over as many equal pieces.
fn pieces(values: &[f64], count: usize) -> Vec<f64> {
    let count = count.min(values.len());
    (0..count)
        .map(|i| {
            let part = &values[i * values.len() / count..(i + 1) * values.len() / count];
            part.iter().sum::<f64>() / part.len() as f64
        })
        .collect()
}

/// Values over the whole width, those between two of them on the line that joins them.
fn stretched(values: &[f64], width: usize) -> Vec<f64> {
    if values.len() < 2 || values.len() >= width {
        return values.to_vec();
    }
    let at = |x: usize| {
        let place = x as f64 * (values.len() - 1) as f64 / (width - 1) as f64;
        let (i, share) =
            ((place as usize).min(values.len() - 2), place - (place as usize).min(values.len() - 2) as f64);
        values[i] + share * (values[i + 1] - values[i])
    };
    (0..width).map(at).collect()
}

/// A curve in one line.
fn spark(values: &[f64], width: usize) -> String {
    let values: Vec<f64> = pieces(values, width).into_iter().filter(|v| v.is_finite()).collect();
    let (low, high) = bounds(&values);
    let level = |v: &f64| if high > low { ((v - low) / (high - low) * 7.0).round() as usize } else { 0 };
    values.iter().map(|v| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][level(v).min(7)]).collect()
}

fn bounds(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    (low, values.iter().copied().fold(f64::NEG_INFINITY, f64::max))
}

/// A curve of dots, eight to a character, with its bounds at the left; logarithmic where all values
/// are positive.
fn curve(values: &[f64], width: usize, rows: usize) -> Vec<String> {
    let label = 9;
    let columns = width.saturating_sub(label + 1).max(4);
    let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    let (low, high) = bounds(&finite);
    if finite.is_empty() {
        return vec![];
    }
    let log = low > 0.0 && high > low;
    let place = |v: f64| {
        if log {
            (v / low).ln() / (high / low).ln()
        } else if high > low {
            (v - low) / (high - low)
        } else {
            0.5
        }
    };
    let dots = 4 * rows;
    let mut cells = vec![vec![0u8; columns]; rows];
    let mut before: Option<usize> = None;
    let points = stretched(&pieces(&finite, 2 * columns), 2 * columns);
    for (x, v) in points.iter().enumerate() {
        let y = ((1.0 - place(*v)) * (dots - 1) as f64).round().clamp(0.0, (dots - 1) as f64) as usize;
        // Points far apart are joined by the dots between them.
        let from = before.map_or(y, |b| if b < y { b + 1 } else { b.saturating_sub(1) });
        for y in from.min(y)..=from.max(y) {
            // Dots of a braille cell are numbered down the left, then down the right; the last row
            // came later.
            let bit = match (x % 2, y % 4) {
                (0, 3) => 6,
                (1, 3) => 7,
                (side, row) => 3 * side + row,
            };
            cells[y / 4][x / 2] |= 1 << bit;
        }
        before = Some(y);
    }
    let name = |row: usize| match row {
        0 => format!("{high:>8.3}"),
        r if r == rows - 1 => format!("{low:>8.3}"),
        _ => " ".repeat(8),
    };
    let line = |(row, cells): (usize, &Vec<u8>)| {
        let dots: String =
            cells.iter().map(|c| char::from_u32(0x2800 + u32::from(*c)).unwrap_or(' ')).collect();
        format!("{} ┤{}", name(row), dots.trim_end_matches('\u{2800}'))
    };
    cells.iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_shows_the_run_that_trains() {
        let all: Vec<String> = (0..50).map(|i| i.to_string()).collect();
        assert_eq!(window(all.clone(), 30, 60), all);
        let shown = window(all.clone(), 30, 8);
        assert_eq!(shown, ["  … 26 runs before", "26", "27", "28", "29", "30", "31", "  … 18 runs after"]);
        assert_eq!(window(all.clone(), 49, 5).last().unwrap(), "  … 0 runs after");
        assert_eq!(window(all, 0, 4), ["  … 0 runs before", "0", "1", "  … 48 runs after"]);
    }

    #[test]
    fn curves_fall_from_left_to_right() {
        let values: Vec<f64> = (0..400).map(|i| 8.0 / (1.0 + f64::from(i))).collect();
        let lines = curve(&values, 40, 4);
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("   8.000 ┤") && lines[3].starts_with("   0.020 ┤"), "{lines:?}");
        assert!(lines[0].chars().count() < lines[3].chars().count(), "{lines:?}");
        assert!(lines.iter().all(|l| l.chars().count() <= 40), "{lines:?}");
        assert_eq!(curve(&[f64::NAN], 40, 4), [""; 0]);
        assert_eq!(curve(&[1.0], 20, 3).len(), 3);
    }

    #[test]
    fn sparks_span_their_values() {
        assert_eq!(spark(&[0.0, 1.0, 2.0, 7.0], 4), "▁▂▃█");
        assert_eq!(spark(&[3.0, 3.0], 4), "▁▁");
        assert_eq!(spark(&[], 4), "");
        assert_eq!(stretched(&[1.0, 3.0], 5), [1.0, 1.5, 2.0, 2.5, 3.0]);
        assert_eq!(pieces(&[1.0, 3.0, 5.0, 7.0], 2), [2.0, 6.0]);
    }
}
