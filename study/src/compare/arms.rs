//! The arms of a suite: specifications with what the suite changes in them, matched to the
//! baseline.

use super::agreement;
use crate::failure::{Done, Failure};
use crate::note;
use crate::spec::{Named, begins_elsewhere, make_absolute, make_data_absolute, parse, resolved, warn};
use dreamc_compiler::fields::field;
use dreamc_compiler::matching::{MatchError, Matched, Measure, Objective, Request, TOKENS, find, remedies};
use dreamc_dsl::suite::{Suite, Variant};
use dreamc_dsl::{Ast, Diagnostic, Diagnostics, Severity, Spec};
use std::path::{Path, PathBuf};

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
    arguments: &Named,
    matching: Matching,
    fields: &Fields,
    tell: &mut dyn FnMut(&Arm) -> Done,
) -> Result<(Suite, Vec<Arm>), Failure> {
    let ast = dreamc_dsl::parse_file(&arguments.spec)?;
    load_tree(&ast, &arguments.base(), &arguments.set, (matching, fields), tell)
}

/// The same of the tree of a suite that stands in `base`.
pub fn load_tree(
    ast: &Ast,
    base: &Path,
    set: &[String],
    (matching, fields): (Matching, &Fields),
    tell: &mut dyn FnMut(&Arm) -> Done,
) -> Result<(Suite, Vec<Arm>), Failure> {
    // A field of a section that the suite leaves to its arms is changed in each: a section made of
    // that field alone would take the place of theirs.
    let left = |set: &&String| {
        ["train", "eval"].iter().any(|section| ast.root.get(section).is_none() && changes(set, section))
    };
    let (everywhere, of_suite): (Vec<_>, Vec<_>) = set.iter().partition(left);
    let of_suite: Vec<String> = of_suite.into_iter().cloned().collect();
    let (mut suite, warnings) = dreamc_dsl::check_suite(ast, &of_suite)?;
    warn(&suite.sources, warnings);
    said_once(&suite, set)?;
    if let Some(data) = &mut suite.data {
        make_data_absolute(data, base);
    }
    let read = |arm: usize, path: &str, set: &[String]| -> Result<(Spec, PathBuf), Failure> {
        let path = base.join(path);
        let written = set;
        let shared = [
            ("train", suite.train.is_some()),
            ("data", suite.data.is_some()),
            ("eval", suite.eval.is_some()),
        ];
        // Changes of a section that the suite has are made in the suite's: the arm's own may be
        // absent.
        let again = |set: &&String| shared.iter().any(|(section, shared)| *shared && changes(set, section));
        let (again, own): (Vec<&String>, Vec<&String>) = written.iter().partition(again);
        let steps = again.iter().filter(|set| changes(set, "train.steps"));
        let mut set: Vec<String> = own.iter().chain(steps).map(|set| set.to_string()).collect();
        let again: Vec<String> = again.iter().map(|set| set.to_string()).collect();
        set.extend(everywhere.iter().map(|set| set.to_string()));
        let fields = fields(arm);
        let (recipe, model): (Vec<_>, Vec<_>) = fields.iter().partition(|(f, _)| f.starts_with("train."));
        set.extend(model.iter().map(|(field, value)| format!("{field}={value}")));
        // Defaults of the model that follow the number of steps follow the suite's.
        if !written.iter().any(|set| changes(set, "train.steps")) {
            set.extend(suite.train.iter().map(|train| format!("train.steps={}", train.steps)));
        }
        let arguments = Named { spec: path.clone(), set };
        let mut spec = arguments.load()?;
        begins_elsewhere(&path, &spec)?;
        make_absolute(&mut spec, &arguments.base());
        if suite.data.is_some() {
            spec.data.clone_from(&suite.data);
        }
        if let Some(train) = &suite.train {
            spec.train.clone_from(train);
        }
        if let Some(eval) = &suite.eval {
            spec.eval.clone_from(eval);
        }
        if !again.is_empty() {
            spec = changed(&suite, arm, &spec, &again)?;
            make_absolute(&mut spec, &arguments.base());
        }
        for (field, value) in recipe {
            if !field.strip_prefix("train.").is_some_and(|f| agreement::put(&mut spec.train, f, *value)) {
                let what = format!("{}: the sweep's `{field}` is no field of its recipe", path.display());
                return Err(Failure::Usage(what));
            }
        }
        if let Some(bad) = spec.train.transfer.as_ref().and_then(|transfer| transfer.bad(&spec.model)) {
            let message = format!("{}: {}", path.display(), bad.message);
            let field = format!("train.transfer.{}", bad.field);
            let error = Diagnostic::error("bad-base", message).at(&suite.sources, &field).help(bad.help);
            return Err(Diagnostics::new(suite.sources.clone(), vec![error]).into());
        }
        spec.carry();
        // The suite says what is matched with what.
        if fields.is_empty() {
            unused(&suite, arm, &path, &spec);
        }
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
    for (i, arm) in variants.iter_mut().enumerate() {
        let unknown = no_fields(&suite, i, &arm.spec);
        if !unknown.is_empty() {
            return Err(Diagnostics::new(suite.sources.clone(), unknown).into());
        }
        if let Some(mut request) = request(matching, &suite, &suite.variants[i]) {
            request.tokens = matching.tokens(&arm.spec, &baseline[0].spec);
            let found = find(&arm.spec, &baseline[0].spec, &request).map_err(|error| {
                let help = help(&arm.spec, &baseline[0].spec, &request, &error, Place::Suite);
                Failure::Error(format!("{}: {error}{help}", arm.name).into())
            })?;
            arm.spec.model = found.model.clone();
            if let Some(bad) = arm.spec.train.transfer.as_ref().and_then(|t| t.bad(&arm.spec.model)) {
                let what = format!("{}, matched: `train.transfer`: {}; {}", arm.name, bad.message, bad.help);
                return Err(Failure::Usage(what));
            }
            arm.spec.carry();
            arm.matched = Some(found);
        }
        tell(arm)?;
    }
    Ok((suite, arms))
}

/// Refuses a field that `--set` gives all arms where the suite gives it a value of its own: one of
/// the two would be lost.
fn said_once(suite: &Suite, set: &[String]) -> Result<(), Diagnostics> {
    let field = |set: &str| set.split_once('=').map_or(set, |(field, _)| field).to_string();
    let both = |a: &str, b: &str| changes(&format!("{a}="), b) || changes(&format!("{b}="), a);
    let mut found = vec![];
    for set in set {
        let given = field(set);
        for (i, variant) in suite.variants.iter().enumerate() {
            for own in variant.set.iter().map(|own| field(own)).filter(|own| both(own, &given)) {
                let message = format!("`--set {set}` is of all arms, and this variant sets `{own}`, too");
                let error = Diagnostic::error("duplicate-key", message)
                    .at(&suite.sources, &format!("variants[{i}].set.{own}"));
                found.push(error.help("take one of the two away"));
            }
        }
        if suite.sweep.iter().any(|(swept, _)| both(swept, &given)) {
            let message = format!("`--set {set}` is of all arms, and the sweep gives `{given}` its values");
            let error = Diagnostic::error("duplicate-key", message).at(&suite.sources, "sweep");
            found.push(error.help(format!("write `--set sweep.{given}=[…]`, or take one of the two away")));
        }
    }
    if found.is_empty() { Ok(()) } else { Err(Diagnostics::new(suite.sources.clone(), found)) }
}

/// Says what of an arm's own file a suite does not use.
fn unused(suite: &Suite, arm: usize, path: &Path, spec: &Spec) {
    let variant = arm.checked_sub(1).and_then(|i| suite.variants.get(i));
    if spec.matching.is_some() && variant.is_none_or(|v| v.matching.is_none()) {
        note!(
            "`match` of {} is not used here: a suite matches by the `match` of its variants",
            path.display()
        );
    }
    let seed = spec.train.seed;
    if suite.train.is_none() && seed != 0 && suite.seeds != [seed] {
        note!(
            "`train.seed` {seed} of {} is not used here: the suite's `seeds` are those of all arms",
            path.display()
        );
    }
}

/// Whether a change, as `--set` takes it, is of a field or of one below it.
fn changes(set: &str, field: &str) -> bool {
    set.strip_prefix(field).is_some_and(|rest| rest.starts_with(['.', '=']))
}

/// A variant with its own changes of sections that the suite has for all arms.
fn changed(suite: &Suite, arm: usize, spec: &Spec, set: &[String]) -> Result<Spec, Diagnostics> {
    parse(&format!("the recipe of the suite with {}", set.join(", ")), &resolved(spec), set).map_err(
        |found| {
            let said = found.list.iter().find(|d| d.severity == Severity::Error).map(|d| d.message.clone());
            let field = set[0].split_once('=').map_or(&*set[0], |(field, _)| field);
            let message = format!(
                "`{field}` does not go with what the suite says of all arms: {}",
                said.unwrap_or_default()
            );
            let at = format!("variants[{}].set.{field}", arm.saturating_sub(1));
            let error = Diagnostic::error("unreached", message).at(&suite.sources, &at);
            Diagnostics::new(suite.sources.clone(), vec![error.help("change it there, or take it away here")])
        },
    )
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

/// Fields of a variant's `match` that its model does not have, each at its token.
pub fn no_fields(suite: &Suite, variant: usize, spec: &Spec) -> Vec<Diagnostic> {
    let mut found = vec![];
    let mut model = spec.model.clone();
    for (key, (path, _)) in suite.variants[variant].matching.iter().flat_map(|m| m.each()) {
        if let Err(error) = field(&mut model, path) {
            let at = format!("variants[{variant}].match.{key}");
            let error = Diagnostic::error("unknown-field", error.to_string()).at(&suite.sources, &at);
            found.push(error.help("name one of these, or another of its components"));
        }
    }
    found
}

/// Where a person writes what helps a match that failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `match` of a variant, `equal` of the suite.
    Suite,
    /// Options of `dreamc match`.
    Options,
}

/// Help for a match that failed, a line each: other fields, or another tolerance.
pub fn help(spec: &Spec, baseline: &Spec, request: &Request, error: &MatchError, place: Place) -> String {
    let Some((missed, closest, found)) = remedies(spec, baseline, request, error) else {
        return String::new();
    };
    let keys = |measure| match measure {
        Measure::FlopsPerToken => ("flops", "flops"),
        Measure::TrainingFlopsPerToken => ("training", "training"),
        Measure::Parameters => ("params", "parameters"),
        Measure::MemoryBytes => ("memory", "memory"),
    };
    let (key, _) = keys(missed.measure);
    let mut lines = vec![];
    for (objective, matched) in found {
        let (field, step) = (&objective.field, objective.step);
        lines.push(match place {
            Place::Suite => format!("`{key}: {{{field}: {step}}}` meets it: {matched}"),
            Place::Options => format!("`--{key} {field}:{step}` meets it: {matched}"),
        });
    }
    let left = |o: &Objective| closest.residual.get(&o.measure).map_or(f64::INFINITY, |r| r.abs());
    lines.push(match place {
        Place::Suite => {
            let missed = request.objectives.iter().filter(|o| left(o) > o.tolerance);
            let pairs: Vec<String> = missed
                .map(|o| format!("{}: {}", keys(o.measure).1, agreement::share_above(left(o))))
                .collect();
            format!("`equal: {{{}}}` of the suite allows what came closest", pairs.join(", "))
        }
        Place::Options => {
            let most = request.objectives.iter().map(left).fold(0.0, f64::max);
            format!("`--tolerance {}` allows what came closest", agreement::share_above(most))
        }
    });
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

/// The request of a suite for a variant.
fn request(matching: Matching, suite: &Suite, variant: &Variant) -> Option<Request> {
    let equal = &suite.equal;
    let tolerance = |measure| {
        let asked = match measure {
            Measure::FlopsPerToken => equal.flops,
            Measure::TrainingFlopsPerToken => equal.training,
            Measure::Parameters => equal.parameters,
            Measure::MemoryBytes => equal.memory,
        };
        matching.tolerance.or(asked).unwrap_or(TOLERANCE)
    };
    Some(Request::new(variant.matching.as_ref()?, &tolerance))
}
