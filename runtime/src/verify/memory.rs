//! Layers that are computed again have the bits of layers that are kept.

use super::subject::Subject;
use super::trial::{STEPS, Trial, checkpoint, lines, same_bits};
use super::{Checks, Place, Proof, VerifyError};
use crate::group::Group;
use dreamc_compiler::precision::Narrow;

/// Bytes below which layers computed again may take what they save.
const ROUNDING: u64 = 8192;

/// Training within less memory is the same training.
pub struct Memory;

impl Proof for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn claim(&self) -> &'static str {
        "layers computed again on the way back train to the same bits"
    }

    fn how(&self) -> &'static str {
        "six steps on a generated task with storage in bf16, of two micro-batches each, at random depths where the model \
         recurs, with every layer kept and with every layer that can be computed again"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let trial = Trial::new(s, 2)?;
        let device = s.cpu(1);
        let kept = trial.within(s, Narrow::Storage, 0)?;
        if kept.compiled.kept.is_empty() {
            return Ok(Some(
                "no layer keeps the values of several applications that it could compute again".into(),
            ));
        }
        let again = trial.within(s, Narrow::Storage, usize::MAX)?;
        let all = again.compiled.kept.iter().filter(|kept| !kept.again).count();
        checks.check("layers that are kept", all as f64, 0.0, Place::default());
        // Sums of their own and the rounding of buffers take some back.
        let saved: u64 = again.compiled.kept.iter().map(|kept| kept.bytes).sum();
        let (most, least) = (kept.compiled.plan.arena, again.compiled.plan.arena);
        let more = least.saturating_sub(most) as f64;
        let what = format!("memory of {least} bytes beside {most}, of which {saved} are not kept, more:");
        checks.check(what, more, ROUNDING as f64, Place::default());
        if saved > ROUNDING {
            checks.check("no less memory", f64::from(u8::from(least >= most)), 0.0, Place::default());
        }
        let (a, b) = (trial.folder("kept")?, trial.folder("again")?);
        trial.run(&kept, &device, Group::alone(), Some(&a), None)?;
        trial.run(&again, &device, Group::alone(), Some(&b), None)?;
        let losses = |line: serde_json::Value| format!("{} {} {}", line["step"], line["loss"], line["norm"]);
        let (first, second): (Vec<String>, Vec<String>) =
            (lines(&a)?.into_iter().map(losses).collect(), lines(&b)?.into_iter().map(losses).collect());
        let other = first.iter().zip(&second).filter(|(a, b)| a != b).count();
        checks.check("lines of losses", other as f64, 0.0, Place::default());
        same_bits(checks, &checkpoint(&a, STEPS)?, &checkpoint(&b, STEPS)?)?;
        Ok(None)
    }
}
