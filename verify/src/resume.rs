//! A run that was cut off goes on to the same bits.

use super::subject::Subject;
use super::trial::{CUT, STEPS, Trial, checkpoint, lines, same_bits};
use super::{Checks, Place, Proof, VerifyError};
use dreamc_device::group::Group;

/// Resume is bit-equal.
pub struct Resume;

impl Proof for Resume {
    fn name(&self) -> &'static str {
        "resume"
    }

    fn claim(&self) -> &'static str {
        "a resumed run ends with the same bits"
    }

    fn how(&self) -> &'static str {
        "six steps on a generated task, of two micro-batches each, at random depths where the model recurs, against three \
         and three"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let trial = Trial::new(s, 2)?;
        let device = s.cpu(1);
        let prepared = trial.prepared(s)?;
        let whole = trial.folder("whole")?;
        trial.run(&prepared, &device, Group::alone(), Some(&whole), None)?;
        // Lines that a killed run wrote after its checkpoint.
        let cut = trial.folder("cut")?;
        for (from, to) in [(whole.metrics(), cut.metrics()), (whole.events(), cut.events())] {
            std::fs::copy(from, to)?;
        }
        if whole.samples().is_file() {
            std::fs::copy(whole.samples(), cut.samples())?;
        }
        let from = checkpoint(&whole, CUT)?;
        trial.run(&prepared, &device, Group::alone(), Some(&cut), Some(from))?;
        same_bits(checks, &checkpoint(&whole, STEPS)?, &checkpoint(&cut, STEPS)?)?;
        let losses = |line: serde_json::Value| format!("{} {} {}", line["step"], line["loss"], line["norm"]);
        let (a, b): (Vec<String>, Vec<String>) = (
            lines(&whole)?.into_iter().map(losses).collect(),
            lines(&cut)?.into_iter().map(losses).collect(),
        );
        let other = a.iter().zip(&b).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len());
        checks.check("lines of losses", other as f64, 0.0, Place::default());
        Ok(None)
    }
}
