//! Results of the proofs, for people and programs.

use super::{Check, Place};
use serde::Serialize;
use std::fmt;

/// How a proof ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// It holds.
    Proved,
    /// There is nothing to prove.
    Nothing {
        /// Why.
        why: String,
    },
    /// No weights that were drawn can decide it.
    Unproved {
        /// Why.
        why: String,
    },
    /// It does not hold.
    Failed {
        /// The difference.
        why: String,
        /// Layer and component, where they are known.
        #[serde(flatten)]
        place: Place,
    },
}

/// A proof that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Proved {
    /// Its name.
    pub proof: &'static str,
    /// The statement it proves.
    pub claim: &'static str,
    /// How.
    pub how: &'static str,
    /// How it ended.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How many comparisons there were.
    pub checks: u64,
    /// The one closest to its tolerance.
    pub worst: Option<Check>,
    /// Those beyond it.
    pub failed: Vec<Check>,
    /// How long it took.
    pub seconds: f64,
}

/// All of it. Serialised, the keys are stable.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The model.
    pub model: String,
    /// Sizes that were made smaller: `vocab 256 -> 17`.
    pub shrunk: Vec<String>,
    /// Applications of layers of what was looked at.
    pub depth: u64,
    /// Its parameters.
    pub parameters: u64,
    /// `random`, or `its own`.
    pub weights: &'static str,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Devices compared with the CPU.
    pub devices: Vec<String>,
    /// The proofs.
    pub proofs: Vec<Proved>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    /// Whether nothing failed.
    pub fn holds(&self) -> bool {
        !self.proofs.iter().any(|p| matches!(p.verdict, Verdict::Failed { .. }))
    }

    /// How many proofs say nothing, because no draw of weights was good for them.
    pub fn unproved(&self) -> usize {
        self.proofs.iter().filter(|p| matches!(p.verdict, Verdict::Unproved { .. })).count()
    }

    /// The proof of that name.
    pub fn proof(&self, name: &str) -> Option<&Proved> {
        self.proofs.iter().find(|p| p.proof == name)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<&str> =
            [&self.layer, &self.component].into_iter().flatten().map(String::as_str).collect();
        f.write_str(&parts.join(", "))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} parameters, {} deep, {} weights, seed {}",
            self.model, self.parameters, self.depth, self.weights, self.seed
        )?;
        if !self.shrunk.is_empty() {
            writeln!(f, "made smaller: {}", self.shrunk.join(", "))?;
        }
        writeln!(f)?;
        let width = self.proofs.iter().map(|p| p.claim.chars().count()).max().unwrap_or(0);
        for p in &self.proofs {
            let name = p.proof;
            let (mark, figures) = match (&p.verdict, &p.worst) {
                (Verdict::Nothing { why }, _) => ("–", format!("nothing to prove: {why}")),
                (Verdict::Unproved { why }, _) => ("?", format!("not proved: {why}")),
                (_, None) => ("✓", String::new()),
                (v, Some(w)) => {
                    let mark = if matches!(v, Verdict::Proved) { "✓" } else { "✗" };
                    let error = match (w.error, w.tolerance) {
                        (0.0, 0.0) => "equal".to_string(),
                        (0.0, t) => format!("0 of {t:.0e}"),
                        (e, t) => format!("{e:.1e} of {t:.0e}"),
                    };
                    (mark, format!("{error:<18} {:>5} checks  {:>6.2} s", p.checks, p.seconds))
                }
            };
            let mark = if matches!(p.verdict, Verdict::Failed { .. }) { "✗" } else { mark };
            writeln!(f, "{mark} {name:<10} {:<width$}  {figures}", p.claim)?;
            if let Verdict::Failed { why, place } = &p.verdict {
                let at = place.to_string();
                let at = if at.is_empty() { at } else { format!("{at}: ") };
                writeln!(f, "    {at}{why}")?;
                let more = p.failed.len().saturating_sub(1);
                for check in p.failed.iter().skip(1).take(3) {
                    writeln!(f, "    {} differs by {:.1e}", check.what, check.error)?;
                }
                if more > 3 {
                    writeln!(f, "    and {} more", more - 3)?;
                }
            }
        }
        let failed = self.proofs.iter().filter(|p| matches!(p.verdict, Verdict::Failed { .. })).count();
        let proved = self.proofs.iter().filter(|p| p.verdict == Verdict::Proved).count();
        let checks: u64 = self.proofs.iter().map(|p| p.checks).sum();
        let unproved = match self.unproved() {
            0 => String::new(),
            n => format!("{n} not proved, "),
        };
        write!(f, "\n{proved} proved, {failed} failed, {unproved}{checks} comparisons, {:.1} s", self.seconds)
    }
}
