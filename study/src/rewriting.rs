//! Which rewriting rules are used.

use crate::failure::Failure;
use dreamc_compiler::rewrite::{Rewriting, Rules, Target};
use dreamc_data::files;
use dreamc_device::Device;
use dreamc_runtime::train::folder::RunFolder;
use dreamc_runtime::train::ledger::Ledger;

/// Choice of rewriting rules: all of them by default.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Rewrite nothing.
    pub no_rewrite: bool,
    /// These rules alone, where any are named.
    pub only: Vec<String>,
    /// The device whose roofline chooses; that which runs the plan where none is named.
    pub target: Option<String>,
}

impl Choice {
    /// The choice where nothing runs; an error where there is no such target. A rule that does not
    /// exist is refused by compilation.
    pub fn rewriting(&self) -> Result<Rewriting, Failure> {
        self.or(Target::default())
    }

    /// The choice for plans that this device runs.
    pub fn on(&self, device: &dyn Device) -> Result<Rewriting, Failure> {
        self.or(Target::of_name(&device.name()))
    }

    fn or(&self, default: Target) -> Result<Rewriting, Failure> {
        let target = match &self.target {
            None => default,
            Some(name) => Target::named(name).ok_or_else(|| {
                Failure::Usage(format!("no target `{name}`; there are {}", Target::names()))
            })?,
        };
        let rules = match (self.no_rewrite, self.only.is_empty()) {
            (true, _) => Rules::Off,
            (false, true) => Rules::All,
            (false, false) => Rules::Only(self.only.clone()),
        };
        Ok(Rewriting { rules, target, proofs: false })
    }

    /// The choice for a run that is continued: what it began with. Another is refused unless
    /// changes are allowed, since other rules round differently.
    pub fn continued(&self, run: &RunFolder, allow_changes: bool) -> Result<Rewriting, Failure> {
        let path = run.ledger();
        let began = match files::read_text(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Rewriting::default(),
            Err(e) => return Err(files::about(&path, e).into()),
            Ok(text) => {
                let ledger: Ledger = serde_json::from_str(&text).map_err(|e| {
                    let path = path.display();
                    Failure::Usage(format!("{path} does not say which rewriting rules the run uses: {e}"))
                })?;
                ledger.rewriting
            }
        };
        if !self.no_rewrite && self.only.is_empty() && self.target.is_none() {
            return Ok(began);
        }
        let asked = self.or(began.target)?;
        if asked != began && !allow_changes {
            return Err(Failure::Usage(format!(
                "the run began with {began}, and {asked} would round differently; leave it out, or add --allow-changes"
            )));
        }
        Ok(asked)
    }
}
