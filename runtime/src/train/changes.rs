//! A run is continued with what it began with.

use super::error::TrainError;
use crate::checkpoint::{Change, Checkpoint};
use dreamc_dsl::{Spelling, check, parse, show};

/// Refuses another specification or other data than the checkpoint's.
pub fn refuse(from: &Checkpoint, text: &str, data_hash: &str) -> Result<(), TrainError> {
    let was = from.model.metadata("spec").unwrap_or_default();
    if was != text && as_now(was).as_deref() != Some(text) {
        return Err(TrainError::Changed { what: "the specification", difference: difference(was, text) });
    }
    if from.state.data_hash != data_hash {
        let difference = format!("- data {}\n+ data {data_hash}", from.state.data_hash);
        return Err(TrainError::Changed { what: "the data", difference });
    }
    Ok(())
}

/// A continuation with another specification than the checkpoint's.
pub fn of(from: &Checkpoint, text: &str) -> Option<Change> {
    let was = from.model.metadata("spec").unwrap_or_default();
    let same = was == text || as_now(was).as_deref() == Some(text);
    (!same).then(|| Change {
        after_step: from.state.step,
        spec_hash: from.state.spec_hash.clone(),
        difference: difference(was, text),
    })
}

/// A specification as it is written today: an older dreamc knew fewer keys.
fn as_now(text: &str) -> Option<String> {
    let read = parse("spec.yaml", text, Spelling::Yaml).and_then(|ast| check(&ast, &[]));
    read.ok().map(|(spec, _)| show(&spec, Spelling::Yaml))
}

/// Lines that are in one text and not in the other, in order, each with the closest line above it
/// that is less indented, so that a changed `count` says whose.
pub fn difference(old: &str, new: &str) -> String {
    let (a, b): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    // Longest common subsequence; specifications have a few hundred lines, and the table is bounded
    // all the same.
    if a.len() * b.len() > 25_000_000 {
        return "  (too long to compare)".into();
    }
    let width = b.len() + 1;
    let mut common = vec![0u32; (a.len() + 1) * width];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            common[i * width + j] = if a[i] == b[j] {
                common[(i + 1) * width + j + 1] + 1
            } else {
                common[(i + 1) * width + j].max(common[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut out = vec![];
    let mut said = None;
    while i < a.len() || j < b.len() {
        if i < a.len() && j < b.len() && a[i] == b[j] {
            (i, j) = (i + 1, j + 1);
            continue;
        }
        let old_first =
            j == b.len() || (i < a.len() && common[(i + 1) * width + j] >= common[i * width + j + 1]);
        let (lines, at, sign) = if old_first { (&a, i, '-') } else { (&b, j, '+') };
        let parent = parent(lines, at);
        let above = out.last().and_then(|line: &String| line.get(2..));
        if parent.is_some() && parent != said && parent != above {
            out.push(format!("  {}", parent.unwrap_or_default()));
        }
        said = parent;
        out.push(format!("{sign} {}", lines[at]));
        if old_first { i += 1 } else { j += 1 }
    }
    out.join("\n")
}

fn parent<'a>(lines: &[&'a str], at: usize) -> Option<&'a str> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let own = indent(lines[at]);
    lines[..at].iter().rev().find(|line| indent(line) < own).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_names_what_it_is_in() {
        let old = "model:\n  ea:\n    count: 8\n    active: 2\ntrain:\n  steps: 10\n";
        let new = "model:\n  ea:\n    count: 9\n    active: 2\ntrain:\n  steps: 20\n";
        assert_eq!(
            difference(old, new),
            "    ea:\n-     count: 8\n+     count: 9\n  train:\n-   steps: 10\n+   steps: 20"
        );
        assert_eq!(difference(old, old), "");
        assert_eq!(difference("", "a"), "+ a");
    }
}
