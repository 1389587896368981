//! Matching: fields of a model moved until it costs what a baseline costs.
//!
//! *In*: two specs and [`Objective`]s, each a measure and the field that meets it. *Out*:
//! [`Matched`], or a [`MatchError`] that says what stands in the way and what came closest.
//! *Promise*: the measures are those of [`figures`]; the search is deterministic, and a field's
//! value is the multiple of its step at which the measure is closest to the baseline's while the
//! other fields stay (ties to the smaller value), as long as the measure is monotone in it.
//!
//! This is the bivariate coordinate descent of the paper (section 3.8): FLOPs by a binary search of
//! one field, parameters by one of another, and again until nothing changes. Each search begins
//! where the field stands, so the last rounds are short.
//!
//! Where no fields are named, or those named do not do, [`candidates`], [`pair`] and [`remedies`]
//! try all sizes of the model.

use crate::count::{CountError, Figures, figures, training_flops};
use crate::fields::{FieldError, broken_rule, field, sizes};
use dreamc_dsl::spec::{Match, MatchFields, Model, Spec, Train};
use indexmap::IndexMap;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use thiserror::Error;

/// The quantity compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Decoding FLOPs per token.
    FlopsPerToken,
    /// FLOPs of a trained token, forward and backward.
    TrainingFlopsPerToken,
    /// Parameters in total.
    Parameters,
    /// Bytes while generating.
    MemoryBytes,
}

impl Measure {
    fn of(self, f: &Figures) -> u128 {
        match self {
            // Both models are counted for as many tokens.
            Measure::FlopsPerToken => f.flops_per_token.total,
            // Each model has micro-batches of its own: the mean, to the FLOP.
            Measure::TrainingFlopsPerToken => {
                f.training_flops_per_token.map_or(0, |t| t.total / t.tokens.max(1))
            }
            Measure::Parameters => f.parameters,
            Measure::MemoryBytes => f.memory_bytes,
        }
    }

    /// The measure that a key of `match` names.
    pub fn keyed(key: &str) -> Option<Self> {
        match key {
            "flops" => Some(Measure::FlopsPerToken),
            "training" => Some(Measure::TrainingFlopsPerToken),
            "params" => Some(Measure::Parameters),
            "memory" => Some(Measure::MemoryBytes),
            _ => None,
        }
    }
}

/// The figures of a model, those of training where a measure is of them.
fn figures_of(
    model: &Model,
    train: &Train,
    tokens: u64,
    objectives: &[Objective],
) -> Result<Figures, CountError> {
    let mut found = figures(model, train.precision, tokens)?;
    if objectives.iter().any(|o| o.measure == Measure::TrainingFlopsPerToken) {
        found.training_flops_per_token = Some(training_flops(model, train)?);
    }
    Ok(found)
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Measure::FlopsPerToken => "FLOPs per token",
            Measure::TrainingFlopsPerToken => "training FLOPs per token",
            Measure::Parameters => "parameters",
            Measure::MemoryBytes => "memory",
        })
    }
}

/// A measure and the field that meets it.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// The quantity to match.
    pub measure: Measure,
    /// Path of the field, see [`crate::fields`].
    pub field: String,
    /// Its values are multiples of this.
    pub step: u64,
    /// Largest relative difference that counts as matched.
    pub tolerance: f64,
}

/// How to match.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Quantities to match, in the order of the search.
    pub objectives: Vec<Objective>,
    /// Length of the sequence that decoding is averaged over.
    pub tokens: u64,
}

/// Length of the sequence that decoding is averaged over, where nothing else is asked for.
pub const TOKENS: u64 = 1024;

impl From<&Match> for Request {
    fn from(m: &Match) -> Self {
        Request::new(&m.fields, &|_| m.tolerance)
    }
}

impl Request {
    /// Of the fields that a file names, with the tolerance of each measure.
    pub fn new(fields: &MatchFields, tolerance: &dyn Fn(Measure) -> f64) -> Self {
        let objective = |(key, (field, step)): (&str, &(String, u64))| {
            let measure = Measure::keyed(key)?;
            Some(Objective { measure, field: field.clone(), step: *step, tolerance: tolerance(measure) })
        };
        Request { objectives: fields.each().filter_map(objective).collect(), tokens: TOKENS }
    }
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Matched {
    /// The fields' values.
    pub fields: IndexMap<String, u64>,
    /// The baseline's figures.
    pub baseline: Figures,
    /// The matched model's figures.
    pub matched: Figures,
    /// Relative differences from the baseline, of the objectives: `matched / baseline - 1`.
    pub residual: IndexMap<Measure, f64>,
    /// Rounds over all objectives; the last one changed nothing.
    pub iterations: u64,
    /// The model with the fields' values.
    #[serde(skip)]
    pub model: Model,
}

impl Matched {
    /// The largest relative difference.
    fn worst(&self) -> f64 {
        self.residual.values().fold(0.0, |w, r| r.abs().max(w))
    }

    /// The first objective that is not met.
    fn missed<'o>(&self, objectives: &'o [Objective]) -> Option<&'o Objective> {
        // A difference that is no number is not met either.
        objectives.iter().find(|o| !self.residual.get(&o.measure).is_some_and(|r| r.abs() <= o.tolerance))
    }
}

impl fmt::Display for Matched {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let fields: Vec<String> = self.fields.iter().map(|(k, v)| format!("{k} {v}")).collect();
        let residual: Vec<String> =
            self.residual.iter().map(|(m, r)| format!("{m} {:+.3} %", 100.0 * r)).collect();
        write!(f, "{} ({})", fields.join(", "), residual.join(", "))
    }
}

/// Why nothing was matched.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum MatchError {
    /// There is nothing to meet.
    #[error("nothing to match: name a field for FLOPs, training FLOPs, parameters or memory")]
    NoObjective,
    /// A path leads nowhere.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// A model cannot be counted.
    #[error("{model}: {error}")]
    Count {
        /// Which model.
        model: String,
        /// Why.
        error: CountError,
    },
    /// A step of zero.
    #[error("the step of `{0}` is 0; it is at least 1")]
    Step(String),
    /// Two objectives move one field.
    #[error("contradictory objectives: {first} and {second} would both set `{field}`")]
    SameField {
        /// The field.
        field: String,
        /// One.
        first: Measure,
        /// The other.
        second: Measure,
    },
    /// The field does not change what it should meet.
    #[error("`{field}` has no effect on {measure}: choose another field")]
    NoEffect {
        /// The field.
        field: String,
        /// The measure.
        measure: Measure,
    },
    /// The field's own value breaks a rule.
    #[error("`{field}` has no value to start from: {rule}")]
    Rule {
        /// The field.
        field: String,
        /// Which rule.
        rule: String,
    },
    /// One objective undoes another.
    #[error(
        "contradictory objectives: after {rounds} rounds meeting one still undoes another; closest: {closest}"
    )]
    Contradictory {
        /// How many were tried.
        rounds: u64,
        /// The closest candidate.
        closest: Box<Matched>,
    },
    /// No values are close enough.
    #[error("no match within {:.3} % for {measure}; closest: {closest}{note}", 100.0 * tolerance)]
    Tolerance {
        /// The quantity that is not met.
        measure: Measure,
        /// The request.
        tolerance: f64,
        /// The closest candidate.
        closest: Box<Matched>,
        /// The limit of the search, if it met one.
        note: String,
    },
}

/// Rounds after which a search that still moves is given up.
const ROUNDS: u64 = 64;

/// Sizes are below this.
const LARGEST: u64 = (1 << 48) - 1;

/// Moves the fields of `spec` until it costs what `baseline` costs.
pub fn find(spec: &Spec, baseline: &Spec, request: &Request) -> Result<Matched, MatchError> {
    let goal = figures_of(&baseline.model, &baseline.train, request.tokens, &request.objectives)
        .map_err(|error| MatchError::Count { model: baseline.model.name.clone(), error })?;
    let objectives = &request.objectives;
    if objectives.is_empty() {
        return Err(MatchError::NoObjective);
    }
    let mut model = spec.model.clone();
    for (i, o) in objectives.iter().enumerate() {
        field(&mut model, &o.field)?;
        if o.step == 0 {
            return Err(MatchError::Step(o.field.clone()));
        }
        if let Some(first) = objectives[..i].iter().find(|f| short(&f.field) == short(&o.field)) {
            let (first, second) = (first.measure, o.measure);
            return Err(MatchError::SameField { field: o.field.clone(), first, second });
        }
    }
    let mut search = Search {
        model,
        train: &spec.train,
        tokens: request.tokens,
        objectives,
        goal,
        known: HashMap::new(),
        limits: IndexMap::new(),
    };
    for o in objectives {
        search.round_to_step(o)?;
    }
    let mut seen = vec![];
    let mut best: Option<Matched> = None;
    for iterations in 1..=ROUNDS {
        let before = search.values(objectives)?;
        for o in objectives {
            search.closest(o)?;
        }
        let values = search.values(objectives)?;
        let found = search.matched(objectives, iterations)?;
        if best.as_ref().is_none_or(|b| found.worst() <= b.worst()) {
            best = Some(found.clone());
        }
        if values == before {
            let Some(missed) = found.missed(objectives) else { return Ok(found) };
            let notes: Vec<&str> = search.limits.values().map(String::as_str).collect();
            let note = if notes.is_empty() { String::new() } else { format!("; {}", notes.join("; ")) };
            let Objective { measure, tolerance, .. } = *missed;
            return Err(MatchError::Tolerance { measure, tolerance, closest: Box::new(found), note });
        }
        if seen.contains(&values) || iterations == ROUNDS {
            let closest = Box::new(best.unwrap_or(found));
            // A cycle among values that are all close enough is a match.
            return if closest.missed(objectives).is_none() {
                Ok(*closest)
            } else {
                Err(MatchError::Contradictory { rounds: iterations, closest })
            };
        }
        seen.push(values);
    }
    Err(MatchError::NoObjective)
}

/// A size that could meet a measure, and the model with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The measure and the size.
    pub objective: Objective,
    /// The size at which the measure is closest to the baseline's, however close that is.
    pub matched: Matched,
}

impl Candidate {
    /// The relative difference that is left of its measure.
    pub fn residual(&self) -> f64 {
        self.matched.residual.get(&self.objective.measure).copied().unwrap_or(f64::NAN)
    }

    /// Whether that is within the tolerance.
    pub fn meets(&self) -> bool {
        self.residual().abs() <= self.objective.tolerance
    }
}

/// Steps that a size is tried with: a width in eights where that is close enough, and otherwise in
/// the least steps that no rule refuses.
const STEPS: [u64; 8] = [8, 1, 2, 4, 8, 16, 32, 64];

/// The place of a size among those that a person would move for a measure, least first.
fn unlikely(measure: Measure, field: &str) -> usize {
    let ends = |of: &[&str]| of.iter().position(|end| field == *end || field.ends_with(end));
    let order: [&str; 4] = match measure {
        Measure::FlopsPerToken | Measure::TrainingFlopsPerToken | Measure::MemoryBytes => {
            [".intermediate", "hidden", ".head_size", ".heads"]
        }
        Measure::Parameters => [".count", ".intermediate", "hidden", ".head_size"],
    };
    // Experts of a projection are no experts of a mixture.
    if field.ends_with("projection.count") { order.len() } else { ends(&order).unwrap_or(order.len()) }
}

/// Every size that a measure depends on, with the value at which it is closest to the baseline's:
/// first those that meet it, and of these those that a person would move.
pub fn candidates(
    spec: &Spec,
    baseline: &Spec,
    (measure, tolerance): (Measure, f64),
    tokens: u64,
) -> Result<Vec<Candidate>, MatchError> {
    let mut found = vec![];
    for field in sizes(&mut spec.model.clone()) {
        let steps = if field.ends_with(".intermediate") { &STEPS[..] } else { &STEPS[1..] };
        let mut best: Option<Candidate> = None;
        for &step in steps {
            let objective = Objective { measure, field: field.clone(), step, tolerance };
            let any = Objective { tolerance: f64::INFINITY, ..objective.clone() };
            let matched = match find(spec, baseline, &Request { objectives: vec![any], tokens }) {
                Ok(matched) => matched,
                Err(error @ MatchError::Count { .. }) => return Err(error),
                Err(MatchError::Rule { .. }) => continue,
                Err(_) => break,
            };
            let candidate = Candidate { objective, matched };
            let closer = |b: &Candidate| candidate.residual().abs() < b.residual().abs();
            if best.as_ref().is_none_or(closer) {
                best = Some(candidate);
            }
            if step == 1 || best.as_ref().is_some_and(Candidate::meets) {
                break;
            }
        }
        found.extend(best);
    }
    let key = |c: &Candidate| (!c.meets(), unlikely(measure, &c.objective.field));
    found.sort_by(|a, b| key(a).cmp(&key(b)).then(a.residual().abs().total_cmp(&b.residual().abs())));
    Ok(found)
}

/// Pairs of sizes that are tried before none is found.
const PAIRS: usize = 12;

/// The first two sizes, of those that a person would move, that meet both of two measures together;
/// otherwise the closest that was found.
pub fn pair(
    spec: &Spec,
    baseline: &Spec,
    [first, second]: [(Measure, f64); 2],
    tokens: u64,
) -> Result<Result<(Request, Matched), Option<Matched>>, MatchError> {
    let [ours, theirs] = [first, second].map(|of| candidates(spec, baseline, of, tokens));
    let (ours, theirs) = (ours?, theirs?);
    let mut pairs: Vec<(&Candidate, &Candidate)> =
        ours.iter().flat_map(|a| theirs.iter().map(move |b| (a, b))).collect();
    pairs.retain(|(a, b)| a.objective.field != b.objective.field);
    let likely = |c: &Candidate| unlikely(c.objective.measure, &c.objective.field);
    pairs.sort_by_key(|(a, b)| likely(a) + likely(b));
    let mut closest: Option<Matched> = None;
    for (a, b) in pairs.into_iter().take(PAIRS) {
        // Together a width in eights may miss what it meets alone.
        let coarse = [a, b].iter().any(|c| c.objective.step == STEPS[0]);
        for fine in [false, true].into_iter().filter(|fine| coarse || !fine) {
            let step = |o: &Objective| if fine && o.step == STEPS[0] { 1 } else { o.step };
            let objectives = [a, b].map(|c| Objective { step: step(&c.objective), ..c.objective.clone() });
            let request = Request { objectives: objectives.to_vec(), tokens };
            match find(spec, baseline, &request) {
                Ok(matched) => return Ok(Ok((request, matched))),
                Err(
                    MatchError::Tolerance { closest: c, .. } | MatchError::Contradictory { closest: c, .. },
                ) => {
                    if closest.as_ref().is_none_or(|b| c.worst() < b.worst()) {
                        closest = Some(*c);
                    }
                }
                Err(_) => {}
            }
        }
    }
    Ok(Err(closest))
}

/// The objective that was missed, what came closest, and objectives that do in its place.
pub type Remedies = (Objective, Matched, Vec<(Objective, Matched)>);

/// Requests in place of one that failed: the measure that it missed first, what came closest, and
/// objectives of that measure with which all are met, at most three.
pub fn remedies(spec: &Spec, baseline: &Spec, request: &Request, error: &MatchError) -> Option<Remedies> {
    let (MatchError::Tolerance { closest, .. } | MatchError::Contradictory { closest, .. }) = error else {
        return None;
    };
    let missed = closest.missed(&request.objectives)?.clone();
    let mut tried: Vec<Objective> = vec![];
    if missed.step > 1 {
        tried.push(Objective { step: 1, ..missed.clone() });
    }
    let others = candidates(spec, baseline, (missed.measure, missed.tolerance), request.tokens).ok()?;
    let used = |c: &Candidate| request.objectives.iter().any(|o| short(&o.field) == c.objective.field);
    tried.extend(others.into_iter().filter(|c| !used(c)).map(|c| c.objective));
    let mut found = vec![];
    for objective in tried {
        let mut objectives = request.objectives.clone();
        objectives.iter_mut().filter(|o| o.measure == missed.measure).for_each(|o| *o = objective.clone());
        if let Ok(matched) = find(spec, baseline, &Request { objectives, tokens: request.tokens }) {
            found.push((objective, matched));
        }
        if found.len() == 3 {
            break;
        }
    }
    Some((missed, (**closest).clone(), found))
}

/// Paths that mean the same field are equal in this form.
fn short(path: &str) -> &str {
    let path = path.strip_prefix("model.").unwrap_or(path);
    path.strip_prefix("components.").unwrap_or(path)
}

struct Search<'a> {
    model: Model,
    train: &'a Train,
    tokens: u64,
    objectives: &'a [Objective],
    goal: Figures,
    /// Figures by field and value, while the other fields stay.
    known: HashMap<u64, Figures>,
    /// The limit of each field.
    limits: IndexMap<String, String>,
}

/// A value that was tried.
enum Probe {
    Value(u128),
    /// The language has no such model, or it is too large to count.
    Beyond(String),
}

impl Search<'_> {
    fn values(&mut self, objectives: &[Objective]) -> Result<Vec<u64>, MatchError> {
        objectives.iter().map(|o| Ok(*field(&mut self.model, &o.field)?)).collect()
    }

    fn figures(&self) -> Result<Figures, MatchError> {
        figures_of(&self.model, self.train, self.tokens, self.objectives)
            .map_err(|error| MatchError::Count { model: self.model.name.clone(), error })
    }

    fn matched(&mut self, objectives: &[Objective], iterations: u64) -> Result<Matched, MatchError> {
        let matched = self.figures()?;
        let values = self.values(objectives)?;
        let relative = |m: Measure| {
            let (found, wanted) = (m.of(&matched) as f64, m.of(&self.goal) as f64);
            (m, if wanted == 0.0 && found == 0.0 { 0.0 } else { found / wanted - 1.0 })
        };
        Ok(Matched {
            fields: objectives.iter().map(|o| o.field.clone()).zip(values).collect(),
            baseline: self.goal,
            matched,
            residual: objectives.iter().map(|o| relative(o.measure)).collect(),
            iterations,
            model: self.model.clone(),
        })
    }

    /// Moves a field to the multiple of its step at or above where it stands.
    fn round_to_step(&mut self, o: &Objective) -> Result<(), MatchError> {
        let value = field(&mut self.model, &o.field)?;
        let start = (*value).max(1).checked_next_multiple_of(o.step).filter(|v| *v <= LARGEST);
        *value = start.unwrap_or(o.step);
        match broken_rule(&self.model) {
            Some(rule) => Err(MatchError::Rule { field: o.field.clone(), rule }),
            None => Ok(()),
        }
    }

    /// The measure where the field is `n` steps.
    fn probe(&mut self, o: &Objective, n: u64) -> Result<Probe, MatchError> {
        if let Some(f) = self.known.get(&n) {
            return Ok(Probe::Value(o.measure.of(f)));
        }
        *field(&mut self.model, &o.field)? = n * o.step;
        if let Some(rule) = broken_rule(&self.model) {
            return Ok(Probe::Beyond(rule));
        }
        match figures_of(&self.model, self.train, self.tokens, self.objectives) {
            Ok(f) => {
                self.known.insert(n, f);
                Ok(Probe::Value(o.measure.of(&f)))
            }
            Err(error) => Ok(Probe::Beyond(error.to_string())),
        }
    }

    /// Sets the field to the multiple of its step at which the measure is closest to the
    /// baseline's.
    fn closest(&mut self, o: &Objective) -> Result<(), MatchError> {
        self.known.clear();
        self.limits.shift_remove(&o.field);
        let target = o.measure.of(&self.goal);
        let start = *field(&mut self.model, &o.field)? / o.step;
        let here = match self.probe(o, start)? {
            Probe::Value(v) => v,
            Probe::Beyond(rule) => return Err(MatchError::Rule { field: o.field.clone(), rule }),
        };
        let rising = self.rises(o, start, here)?;
        let past = |v: u128| if rising { v >= target } else { v <= target };
        // The last value before the target is crossed, and the first after.
        let (mut low, mut high);
        if past(here) {
            high = start;
            low = self.walk(o, start, false, |v| !past(v))?;
        } else {
            low = start;
            high = self.walk(o, start, true, past)?;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match self.probe(o, middle)? {
                Probe::Value(v) if past(v) => high = middle,
                Probe::Value(_) => low = middle,
                Probe::Beyond(rule) => return Err(MatchError::Rule { field: o.field.clone(), rule }),
            }
        }
        let distance = |p: Probe| match p {
            Probe::Value(v) => v.abs_diff(target),
            Probe::Beyond(_) => u128::MAX,
        };
        let (below, above) = (distance(self.probe(o, low)?), distance(self.probe(o, high)?));
        let best = if below <= above { low } else { high };
        *field(&mut self.model, &o.field)? = best * o.step;
        Ok(())
    }

    /// Whether the measure grows with the field; an error where it does not depend on it.
    fn rises(&mut self, o: &Objective, start: u64, here: u128) -> Result<bool, MatchError> {
        for up in [false, true] {
            let mut stride = 1u64;
            loop {
                let next =
                    if up { start.saturating_add(stride) } else { start.saturating_sub(stride).max(1) };
                if next == start || next > LARGEST / o.step {
                    break;
                }
                match self.probe(o, next)? {
                    Probe::Value(v) if v != here => return Ok((v > here) == up),
                    Probe::Value(_) => stride = stride.saturating_mul(2),
                    Probe::Beyond(_) => break,
                }
                if !up && next == 1 {
                    break;
                }
            }
        }
        Err(MatchError::NoEffect { field: o.field.clone(), measure: o.measure })
    }

    /// Steps away from `start`, doubling, until `reached`; the last value that there is where none
    /// reaches it.
    fn walk(
        &mut self,
        o: &Objective,
        start: u64,
        up: bool,
        reached: impl Fn(u128) -> bool,
    ) -> Result<u64, MatchError> {
        let end = if up { (LARGEST / o.step).max(start) } else { 1 };
        let (mut at, mut stride) = (start, 1u64);
        while at != end {
            let next =
                if up { at.saturating_add(stride).min(end) } else { at.saturating_sub(stride).max(end) };
            match self.probe(o, next)? {
                Probe::Value(v) if reached(v) => return Ok(next),
                Probe::Value(_) => {
                    at = next;
                    stride = stride.saturating_mul(2);
                }
                // Smaller strides up to the edge of what there is.
                Probe::Beyond(rule) => {
                    if next.abs_diff(at) == 1 {
                        let (last, refused) = (at * o.step, next * o.step);
                        let bound = if up { "most" } else { "least" };
                        let limit =
                            format!("`{}` is at {bound} {last}: {refused} is refused ({rule})", o.field);
                        self.limits.insert(o.field.clone(), limit);
                        return Ok(at);
                    }
                    stride = next.abs_diff(at) / 2;
                }
            }
        }
        Ok(at)
    }
}
