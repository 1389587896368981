//! Layers that are computed again have the bits of layers that are kept.
//!
//! Two micro-batches of the subject at a depth of three or more, at which a layer can be taken for
//! another, with random weights, which are larger than first ones; then a short run. A run alone
//! sees little: its weights are first values, whose layers add next to nothing to the stream.

use super::subject::{Subject, add_backward};
use super::trial::{STEPS, Trial, checkpoint, lines, same_bits};
use super::{Checks, Place, Proof, VerifyError, widen};
use dreamc_compiler::Options;
use dreamc_compiler::precision::Narrow;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Item;
use dreamc_runtime::model::Scale;
use indexmap::IndexMap;

/// Bytes below which layers computed again may take what they save.
const ROUNDING: u64 = 8192;

/// Training within less memory is the same training.
pub struct Memory;

/// The least number of applications of what is repeated.
const DEEP: u64 = 3;

impl Proof for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn claim(&self) -> &'static str {
        "layers computed again on the way back train to the same bits"
    }

    fn how(&self) -> &'static str {
        "gradients and choices of two micro-batches at three applications or more, in f32, with storage in bf16 and in fp8, with \
         every layer kept, and with one and all of those computed again that can be; then six steps on a generated task with storage in \
         bf16, of two micro-batches each, at random depths where the model recurs"
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
        gradients(&s.with(deep(&s.spec))?, checks)?;
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
        let apart = first.iter().zip(&second).filter(|(a, b)| a != b);
        let other = apart.count() + first.len().abs_diff(second.len());
        checks.check("lines of losses", other as f64, 0.0, Place::default());
        same_bits(checks, &checkpoint(&a, STEPS)?, &checkpoint(&b, STEPS)?)?;
        Ok(None)
    }
}

/// The specification with everything that is repeated applied three times or more.
fn deep(spec: &Spec) -> Spec {
    fn items(all: &mut [Item]) {
        for item in all {
            match item {
                Item::Layer(_) | Item::Statement(_) => {}
                Item::Repeat { count, items: inner, .. } | Item::Recur { count, items: inner, .. } => {
                    if *count > 1 {
                        *count = (*count).max(DEEP);
                    }
                    items(inner);
                }
            }
        }
    }
    let mut spec = spec.clone();
    items(&mut spec.model.body);
    spec
}

/// Every result of two micro-batches with the largest layer computed again, and with all that can
/// be, has the bits of those with none.
fn gradients(s: &Subject, checks: &mut Checks) -> Result<(), VerifyError> {
    for narrow in [Narrow::Nothing, Narrow::Storage, Narrow::Fp8] {
        for depth in std::iter::once(None).chain(s.depths().into_iter().map(Some)) {
            let options = Options { narrow, ..s.options() };
            let can = s.compile(&options)?.kept.len();
            let expected = micro_batches(s, &options, depth)?;
            // Any other number is of the same layers.
            for again in [1, can].into_iter().take(can) {
                let found = micro_batches(s, &Options { again, ..options.clone() }, depth)?;
                // In the order of the way back, so that the first that differs is where something
                // is.
                for (name, expected) in expected.iter().rev() {
                    let found = found.get(name).map_or(&[][..], Vec::as_slice);
                    let apart = expected.iter().zip(found).filter(|(a, b)| a.to_bits() != b.to_bits());
                    let other = apart.count() + expected.len().abs_diff(found.len());
                    let at = depth.map_or(String::new(), |d| format!(" at depth {d}"));
                    let what = format!("bits of {name}{at}, {again} of {can} again, {narrow:?}");
                    checks.check(what, other as f64, 0.0, Place::of_tensor(name));
                }
            }
        }
    }
    Ok(())
}

/// Gradients and counted choices by tensor, after two micro-batches, with the losses and the
/// logits of the last.
fn micro_batches(
    s: &Subject,
    options: &Options,
    depth: Option<u64>,
) -> Result<IndexMap<String, Vec<f64>>, VerifyError> {
    let device = s.cpu(1);
    let mut model = s.load(&device, options)?;
    model.drop_step()?;
    let scale = Scale { loss: 0.5 / s.batch.learned().max(1) as f32, auxiliary: 0.5 };
    add_backward(&mut model, &s.batch, scale, depth, true)?;
    let found = add_backward(&mut model, &s.batch, scale, depth, false)?;
    let mut all = found.gradients;
    for t in model.compiled().tensors.clone() {
        if t.counts.is_some() {
            let counts = model.get(&format!("{}.counts", t.name))?;
            all.insert(t.name, widen(&counts));
        }
    }
    all.insert("the logits".into(), found.logits);
    all.insert("the loss".into(), vec![found.loss]);
    Ok(all)
}
