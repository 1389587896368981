//! The arms of a suite: specifications with what the suite changes in them, matched to the
//! baseline.

use super::agreement;
use crate::failure::{Done, Failure};
use crate::spec::{SpecArguments, make_absolute, make_data_absolute, warn};
use dreamc_compiler::matching::{Matched, Measure, Objective, Request, TOKENS, find};
use dreamc_dsl::suite::{Suite, Variant};
use dreamc_dsl::{Diagnostic, Diagnostics, Spec};
use std::path::PathBuf;

/// Tolerance where the suite names none.
pub const TOLERANCE: f64 = 0.005;

/// One arm. The first of a suite is its baseline.
pub struct Arm {
    /// Its name, unique in the suite and good for a file.
    pub name: String,
    /// Its specification: matched, with the sections that all arms share, and all paths absolute.
    pub spec: Spec,
    /// Where it comes from.
    pub path: PathBuf,
    /// Fields that the suite changes.
    pub set: Vec<String>,
    /// How it was matched, where it was.
    pub matched: Option<Matched>,
}

/// How to match, in place of what the suite says.
#[derive(Clone, Copy, Default)]
pub struct Matching {
    /// Largest relative difference that counts as matched.
    pub tolerance: Option<f64>,
    /// Length of the generated sequence that FLOPs and memory are averaged over.
    pub tokens: Option<u64>,
}

impl Matching {
    /// Tokens that both models can generate.
    pub fn tokens(&self, spec: &Spec, baseline: &Spec) -> u64 {
        self.tokens.unwrap_or(TOKENS.min(spec.model.context).min(baseline.model.context))
    }
}

/// Fields of one arm, the baseline being 0, that differ from the suite: the cell of a ladder, or
/// what was tuned.
pub type Fields<'a> = dyn Fn(usize) -> Vec<(String, f64)> + 'a;

/// Reads a suite and all it names, and matches its variants; `tell` hears of each arm when it is
/// ready.
pub fn load(
    arguments: &SpecArguments,
    matching: Matching,
    fields: &Fields,
    tell: &mut dyn FnMut(&Arm) -> Done,
) -> Result<(Suite, Vec<Arm>), Failure> {
    let base = arguments.base();
    let (mut suite, warnings) = dreamc_dsl::load_suite(&arguments.spec, &arguments.set)?;
    warn(&suite.sources, warnings);
    if let Some(data) = &mut suite.data {
        make_data_absolute(data, &base);
    }
    let read = |arm: usize, path: &str, set: &[String]| -> Result<(Spec, PathBuf), Failure> {
        let path = base.join(path);
        let mut set = set.to_vec();
        let fields = fields(arm);
        let (recipe, model): (Vec<_>, Vec<_>) = fields.iter().partition(|(f, _)| f.starts_with("train."));
        set.extend(model.iter().map(|(field, value)| format!("{field}={value}")));
        // Defaults of the model that follow the number of steps follow the suite's.
        set.extend(suite.train.iter().map(|train| format!("train.steps={}", train.steps)));
        let arguments = SpecArguments { spec: path.clone(), set };
        let mut spec = arguments.load()?;
        make_absolute(&mut spec, &arguments.base());
        if suite.data.is_some() {
            spec.data.clone_from(&suite.data);
        }
        if let Some(train) = &suite.train {
            spec.train.clone_from(train);
        }
        for (field, value) in recipe {
            if !field.strip_prefix("train.").is_some_and(|f| agreement::put(&mut spec.train, f, *value)) {
                let what = format!("{}: the sweep's `{field}` is no field of its recipe", path.display());
                return Err(Failure::Usage(what));
            }
        }
        if let Some(eval) = &suite.eval {
            spec.eval.clone_from(eval);
        }
        // The suite says what is matched with what.
        spec.matching = None;
        Ok((spec, path))
    };
    let (spec, path) = read(0, &suite.baseline, &[])?;
    let mut arms = vec![Arm { name: spec.model.name.clone(), spec, path, set: vec![], matched: None }];
    // Names are known to be good for files; here, that they are different.
    for (i, variant) in suite.variants.iter().enumerate() {
        let (spec, path) = read(i + 1, &variant.spec, &variant.set)?;
        let name = variant.name.clone().unwrap_or_else(|| spec.model.name.clone());
        if arms.iter().any(|arm| arm.name == name) {
            let error = Diagnostic::error("duplicate-name", format!("two arms are called `{name}`"));
            let field = format!("variants[{i}]{}", if variant.name.is_some() { ".name" } else { "" });
            let error = error.at(&suite.sources, &field).help("give this variant a `name` of its own");
            return Err(Diagnostics::new(suite.sources.clone(), vec![error]).into());
        }
        arms.push(Arm { name, spec, path, set: variant.set.clone(), matched: None });
    }
    let (baseline, variants) = arms.split_at_mut(1);
    tell(&baseline[0])?;
    for (arm, variant) in variants.iter_mut().zip(&suite.variants) {
        if let Some(mut request) = request(matching, &suite, variant) {
            request.tokens = matching.tokens(&arm.spec, &baseline[0].spec);
            let found = find(&arm.spec, &baseline[0].spec, &request)
                .map_err(|error| Failure::Error(format!("{}: {error}", arm.name).into()))?;
            arm.spec.model = found.model.clone();
            arm.matched = Some(found);
        }
        tell(arm)?;
    }
    Ok((suite, arms))
}

/// Refuses a name in a manifest that dreamc would not have written there.
pub fn check_name(name: &str) -> Done {
    let right = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=200).contains(&name.len()) && name.chars().all(right) && !name.starts_with(['.', '-']) {
        return Ok(());
    }
    let what = format!("the name `{name}` of an arm: use up to 200 letters, digits, `-`, `_` and `.`");
    Err(Failure::Usage(what))
}

/// The request of a suite for a variant.
fn request(matching: Matching, suite: &Suite, variant: &Variant) -> Option<Request> {
    let fields = variant.matching.as_ref()?;
    let equal = &suite.equal;
    let objective = |measure, (field, step): &(String, u64), tolerance: Option<f64>| Objective {
        measure,
        field: field.clone(),
        step: *step,
        tolerance: matching.tolerance.or(tolerance).unwrap_or(TOLERANCE),
    };
    let mut objectives = vec![objective(Measure::FlopsPerToken, &fields.flops, equal.flops)];
    objectives.extend(fields.params.as_ref().map(|f| objective(Measure::Parameters, f, equal.parameters)));
    objectives.extend(fields.memory.as_ref().map(|f| objective(Measure::MemoryBytes, f, equal.memory)));
    Some(Request { objectives, tokens: TOKENS })
}
