//! Do the arms agree in what must be equal?
//!
//! *In*: for each arm what it is trained on and how, known from specifications before training or
//! from ledgers after it. *Out*: every disagreement with the baseline, with both values. The same
//! rule serves `dreamc compare`, which refuses to train, and the report, which looks again.

use crate::number::{decimals, many};
use dreamc_compiler::looks_ahead;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{OnNan, Precision, Schedule, Train, TransferRule, warmup_steps};
use dreamc_dsl::suite::Equal;

/// Cost and data of an arm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// FLOPs of a generated token.
    pub flops: Option<f64>,
    /// The same at the shares of tokens that its routers let through, where runs have ended.
    pub flops_processed: Option<f64>,
    /// Whether runs have ended, so that these are known.
    pub ended: bool,
    /// FLOPs of a trained token, a teacher's among them.
    pub training: Option<f64>,
    /// FLOPs of all training.
    pub budget: Option<f64>,
    /// FLOPs that the donor of a transplant was trained with.
    pub donor: Option<f64>,
    /// Parameters.
    pub parameters: Option<f64>,
    /// Bytes while generating.
    pub memory: Option<f64>,
    /// Tokens of each run.
    pub tokens: Vec<u64>,
    /// Hashes of the data of each run.
    pub data: Vec<String>,
    /// Hashes of the tokenizer of each run.
    pub tokenizer: Vec<String>,
    /// Seeds.
    pub seeds: Vec<u64>,
}

/// Something that must be equal, as an arm has it.
#[derive(Clone, Debug, PartialEq)]
struct Fact {
    what: &'static str,
    key: &'static str,
    value: Value,
    /// Largest relative difference; `None` where it need not be equal.
    limit: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Number(Option<f64>),
    Text(String),
}

impl Value {
    fn show(&self) -> String {
        match self {
            Value::Number(Some(n)) => decimals(*n),
            Value::Number(None) => "unknown".into(),
            Value::Text(text) => text.clone(),
        }
    }
}

/// A quantity that must be equal, of two arms.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Name of the quantity.
    pub what: &'static str,
    /// Its key in `equal`; empty where no key allows a difference.
    pub key: &'static str,
    /// The baseline's.
    pub baseline: String,
    /// The arm's.
    pub arm: String,
    /// Relative difference of numbers.
    pub difference: Option<f64>,
    /// Largest relative difference that the suite allows; `None` where it asks for nothing.
    pub limit: Option<f64>,
    /// Whether the suite is content.
    pub agrees: bool,
}

impl Comparison {
    /// The pair of `equal` with which these two would agree; empty where no pair would do.
    pub fn allowance(&self) -> String {
        match (self.limit, self.difference) {
            _ if self.key == UNWRITTEN => String::new(),
            (Some(limit), Some(difference)) if limit > 0.0 && difference.is_finite() => {
                format!("{}: {}", self.key, share_above(difference.abs()))
            }
            _ if NUMBERS.contains(&self.key) => format!("{}: none", self.key),
            _ => format!("{}: false", self.key),
        }
    }
}

/// Keys of `equal` that take a share.
const NUMBERS: [&str; 6] = ["flops", "flops_processed", "training", "budget", "parameters", "memory"];

/// The key of a quantity that no suite can leave unequal.
const UNWRITTEN: &str = "";

/// The least percentage of two digits that a share is within.
pub fn share_above(share: f64) -> String {
    let percent = 100.0 * share;
    let unit = if percent > 0.0 { 10f64.powf(percent.log10().floor() - 1.0) } else { 0.01 };
    let digits = (-unit.log10()).round().max(0.0) as usize;
    let above = (percent / unit - 1e-6).ceil().max(1.0) * unit;
    let text = format!("{above:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}%")
}

/// Compares an arm with the baseline, in everything a suite can name.
pub fn compare(equal: &Equal, baseline: (&Spec, &Facts), arm: (&Spec, &Facts)) -> Vec<Comparison> {
    let (ours, theirs) = (facts(equal, baseline.0, baseline.1), facts(equal, arm.0, arm.1));
    let compare = |(b, a): (Fact, Fact)| {
        let difference = match (&b.value, &a.value) {
            (Value::Number(Some(b)), Value::Number(Some(a))) => Some(a / b - 1.0),
            _ => None,
        };
        let agrees = match (b.limit, difference) {
            (None, _) => true,
            (Some(limit), Some(difference)) => difference.abs() <= limit,
            (Some(_), None) => b.value == a.value && b.value != Value::Number(None),
        };
        Comparison {
            what: b.what,
            key: b.key,
            baseline: b.value.show(),
            arm: a.value.show(),
            difference,
            limit: b.limit,
            agrees,
        }
    };
    // FLOPs of all training follow from those of a token and the tokens, unless a suite asks.
    let asked = |c: &Comparison| c.key != "budget" || equal.budget.is_some();
    ours.into_iter().zip(theirs).map(compare).filter(asked).collect()
}

fn facts(equal: &Equal, spec: &Spec, facts: &Facts) -> Vec<Fact> {
    // Fields that all arms tuned alike may differ: here they are all alike.
    let mut alike = spec.train.clone();
    for field in &equal.tuned {
        if let Some(field) = field.strip_prefix("train.") {
            put(&mut alike, field, 1.0);
        }
    }
    let t = &alike;
    let sequence = t.sequence.unwrap_or(spec.model.context);
    let number = |what, key, value, limit| Fact { what, key, value: Value::Number(value), limit };
    let text = |what, key, value: String, asked: bool| Fact {
        what,
        key,
        value: Value::Text(value),
        limit: asked.then_some(0.0),
    };
    let short = |hashes: &[String]| {
        let mut names: Vec<String> = hashes.iter().map(|h| h.chars().take(12).collect()).collect();
        names.dedup();
        names.join(", ")
    };
    let mut tokens: Vec<String> = facts.tokens.iter().map(u64::to_string).collect();
    tokens.dedup();
    let whole = |hashes: &[String]| hashes.join(" ");
    // Batches are a function of data, seed, rows and length.
    let order = format!("{} {:?} {} {sequence}", whole(&facts.data), facts.seeds, t.batch);
    let order = blake3::hash(order.as_bytes()).to_hex().as_str().chars().take(12).collect();
    let seeds: Vec<String> = facts.seeds.iter().map(u64::to_string).collect();
    let processed = equal.flops_processed.filter(|_| facts.ended);
    vec![
        number(FLOPS, "flops", facts.flops, equal.flops),
        number(PROCESSED, "flops_processed", facts.flops_processed, processed),
        number("training FLOPs per token", "training", facts.training, equal.training),
        number(budget(equal), "budget", spent(equal, facts), equal.budget),
        number("parameters", "parameters", facts.parameters, equal.parameters),
        number("memory of generation", "memory", facts.memory, equal.memory),
        text("training tokens", "tokens", tokens.join(", "), equal.tokens),
        text("data", "data", short(&facts.data), equal.data),
        text("order", "order", order, equal.order),
        text("tokenizer", "tokenizer", short(&facts.tokenizer), equal.tokenizer),
        text("schedule", "schedule", schedule(t), equal.schedule),
        text("optimizer", "optimizer", optimizer(t), equal.optimizer),
        text("batch", "batch", format!("{} × {sequence}", t.batch), equal.batch),
        text("precision", "precision", format!("{:?}", t.precision).to_lowercase(), equal.precision),
        text("seeds", "seeds", seeds.join(", "), equal.seeds),
        // No suite can ask for less: losses of different questions do not compare.
        text(
            READ,
            UNWRITTEN,
            if looks_ahead(&spec.model) { "later ones, too" } else { "earlier ones" }.into(),
            true,
        ),
    ]
}

/// The name of the FLOPs of all training.
fn budget(equal: &Equal) -> &'static str {
    match equal.donor {
        true => "training FLOPs with the donor's",
        false => "training FLOPs without a donor's",
    }
}

/// FLOPs of all training, the donor's where the suite counts them.
fn spent(equal: &Equal, facts: &Facts) -> Option<f64> {
    Some(facts.budget? + facts.donor.filter(|_| equal.donor).unwrap_or(0.0))
}

/// FLOPs of a generated token as they are declared.
pub const FLOPS: &str = "FLOPs per token";

/// FLOPs of a generated token at the shares of tokens that routers let through.
pub const PROCESSED: &str = "FLOPs processed per token";

/// The tokens by which a model decides when its loss is measured.
pub const READ: &str = "tokens read for a loss";

/// The change to an arm whose loss reads other tokens than the baseline's; empty where
/// all read the same.
pub fn advice<'a>(mut broken: impl Iterator<Item = &'a Comparison>) -> &'static str {
    match broken.any(|c| c.what == READ) {
        true => {
            "\nA top-k `skip` without `causal`, or one with `level sequence`, chooses by later tokens, and its loss is no loss of predicting \
             them: give it a rule by which it is evaluated and sampled, such as `causal bce 0.01` in `skip(…)`\n"
        }
        false => "",
    }
}

/// Sets a field of a recipe that a sweep may tune; whether there is one of that name.
pub fn put(train: &mut Train, field: &str, value: f64) -> bool {
    match field {
        "learning_rate" => train.learning_rate = value,
        "weight_decay" => train.weight_decay = value,
        "warmup" if value < 1.0 => train.warmup = warmup_steps(value, train.steps),
        "warmup" => train.warmup = value as u64,
        "eps" => train.eps = value,
        "clip" => train.clip = Some(value),
        "optimizer.matrix_rate" => match train.optimizer.with_matrix_rate(value) {
            Some(optimizer) => train.optimizer = optimizer,
            None => return false,
        },
        _ => return false,
    }
    true
}

fn schedule(t: &Train) -> String {
    let then = match t.schedule {
        Schedule::Points(ref points) => {
            let each = points.iter().map(|(step, factor)| format!("{factor} at {step}"));
            return format!(
                "{} × {}, {}",
                t.learning_rate,
                each.collect::<Vec<_>>().join(", "),
                many(t.steps.into(), "step")
            );
        }
        Schedule::Constant => "constant".into(),
        Schedule::Cosine { floor } => format!("cosine to {floor}"),
        Schedule::Linear { floor } => format!("linear to {floor}"),
        Schedule::Wsd { decay, floor } => format!("constant, last {decay} linear to {floor}"),
    };
    let [warmup, steps] = [t.warmup, t.steps].map(|n| many(n.into(), "step"));
    format!("{} after {warmup}, {then}, {steps}", t.learning_rate)
}

fn optimizer(t: &Train) -> String {
    let clip = t.clip.map_or("no clipping".into(), |c| format!("clip {c}"));
    let name = t.optimizer.described();
    let mut text =
        format!("{name} {} {}, eps {:e}, decay {}, {clip}", t.betas.0, t.betas.1, t.eps, t.weight_decay);
    if t.moments == Precision::Bf16 {
        text += ", moments in bf16";
    }
    text += match t.transfer.as_ref().map(|transfer| transfer.rule) {
        None => "",
        Some(TransferRule::Mup) => ", over sizes by muP",
        Some(TransferRule::Completep) => ", over sizes by CompleteP",
        Some(TransferRule::Spectral) => ", over sizes by the spectral condition",
        Some(TransferRule::Standard) => ", the same at all sizes",
        Some(TransferRule::Hyperp) => ", over sizes by HyperP",
        Some(TransferRule::Umup) => ", over sizes by u-µP",
    };
    if t.decay_embeddings {
        text += ", embeddings decay";
    }
    for (name, list) in [("only", &t.only), ("freeze", &t.freeze)] {
        if !list.is_empty() {
            text += &format!(", {name} {}", list.join(" "));
        }
    }
    if t.on_nan == OnNan::Skip {
        text += ", NaN skipped";
    }
    text += &t.spike.map_or(String::new(), |s| format!(", spikes above {s} skipped"));
    for g in &t.groups {
        text += &format!(", {} × {}", g.pattern, g.learning_rate);
        text += &g.weight_decay.map_or(String::new(), |d| format!(" decay {d}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(train: &str) -> Spec {
        let text = format!(
            "model:\n  name: m\n  vocab: 256\n  hidden: 16\n  context: 32\n  components:\n    sa: {{sequence: {{heads: 2, \
             kv_heads: 1, head_size: 8}}}}\n  body: [{{layer: sa}}]\ntrain: {train}\n"
        );
        let ast = dreamc_dsl::parse("m.yaml", &text, dreamc_dsl::Spelling::Yaml).unwrap();
        dreamc_dsl::check(&ast, &[]).unwrap().0
    }

    fn equal(flops: Option<f64>) -> Equal {
        Equal {
            flops,
            flops_processed: Some(0.01),
            training: None,
            budget: None,
            donor: false,
            parameters: Some(0.001),
            memory: None,
            tuned: vec![],
            tokens: true,
            data: true,
            order: true,
            tokenizer: true,
            schedule: true,
            optimizer: true,
            batch: true,
            precision: true,
            seeds: true,
        }
    }

    fn facts() -> Facts {
        Facts {
            flops: Some(1000.0),
            flops_processed: Some(1000.0),
            ended: true,
            training: Some(3000.0),
            budget: Some(1.92e6),
            donor: None,
            parameters: Some(5000.0),
            memory: Some(10.0),
            tokens: vec![640],
            data: vec!["d".into()],
            tokenizer: vec!["t".into()],
            seeds: vec![0, 1],
        }
    }

    /// Quantities that disagree.
    fn broken(equal: &Equal, a: (&Spec, &Facts), b: (&Spec, &Facts)) -> Vec<&'static str> {
        compare(equal, a, b).into_iter().filter(|c| !c.agrees).map(|c| c.what).collect()
    }

    #[test]
    fn every_difference_is_found_and_nothing_else() {
        let s = spec("{steps: 10, batch: 4, precision: f32}");
        let base = facts();
        let all = equal(Some(0.005));
        assert_eq!(broken(&all, (&s, &base), (&s, &base)), [""; 0]);
        let near = Facts { flops: Some(1004.0), parameters: Some(5006.0), memory: Some(99.0), ..facts() };
        assert_eq!(broken(&all, (&s, &base), (&s, &near)), ["parameters"]);
        assert_eq!(broken(&equal(Some(0.003)), (&s, &base), (&s, &near)), ["FLOPs per token", "parameters"]);
        assert_eq!(broken(&equal(None), (&s, &base), (&s, &near)), ["parameters"]);
        let unknown = Facts { flops: None, ..facts() };
        assert_eq!(broken(&all, (&s, &unknown), (&s, &unknown)), ["FLOPs per token"]);
        let other = spec("{steps: 10, batch: 8, learning_rate: 1e-3, clip: 1, precision: bf16}");
        let moved =
            Facts { tokens: vec![1280], data: vec!["e".into()], tokenizer: vec!["u".into()], ..facts() };
        let found = broken(&all, (&s, &base), (&other, &moved));
        let expected =
            ["training tokens", "data", "order", "tokenizer", "schedule", "optimizer", "batch", "precision"];
        assert_eq!(found, expected);
        let skipping = Facts { flops_processed: Some(927.0), ..facts() };
        assert_eq!(broken(&all, (&s, &base), (&s, &skipping)), [PROCESSED]);
        let unseen = Facts { flops_processed: None, ..facts() };
        assert_eq!(broken(&all, (&s, &base), (&s, &unseen)), [PROCESSED]);
        let untrained = Facts { ended: false, ..unseen };
        assert_eq!(broken(&all, (&s, &untrained), (&s, &untrained)), [""; 0]);
        let seeds = Facts { seeds: vec![0, 2], ..facts() };
        assert_eq!(broken(&all, (&s, &base), (&s, &seeds)), ["order", "seeds"]);
        let dearer = Facts { training: Some(3100.0), ..facts() };
        assert_eq!(broken(&all, (&s, &base), (&s, &dearer)), [""; 0]);
        let asked = Equal { training: Some(0.01), ..equal(Some(0.005)) };
        assert_eq!(broken(&asked, (&s, &base), (&s, &dearer)), ["training FLOPs per token"]);
        let taken = Facts { donor: Some(1e6), ..facts() };
        let free = Equal { budget: Some(0.01), ..equal(Some(0.005)) };
        assert_eq!(broken(&free, (&s, &base), (&s, &taken)), [""; 0]);
        let paid = Equal { donor: true, ..free };
        assert_eq!(broken(&paid, (&s, &base), (&s, &taken)), ["training FLOPs with the donor's"]);
        let less = Facts { budget: Some(0.92e6), ..taken };
        assert_eq!(broken(&paid, (&s, &base), (&s, &less)), [""; 0]);
    }

    /// The pairs that a refusal advises are enough.
    #[test]
    fn the_advice_of_a_refusal_is_enough() {
        for (share, advice) in [
            (0.0012, "0.12%"),
            (0.00501, "0.51%"),
            (0.005, "0.5%"),
            (0.0451, "4.6%"),
            (0.123, "13%"),
            (2.0, "200%"),
        ] {
            assert_eq!(share_above(share), advice);
        }
        let (a, b) = (spec("{steps: 10, batch: 4}"), spec("{steps: 10, batch: 4, learning_rate: 1e-3}"));
        let near = Facts { flops: Some(1234.5), parameters: None, ..facts() };
        let found = compare(&equal(Some(0.005)), (&a, &facts()), (&b, &near));
        let advice: Vec<String> = found.iter().filter(|c| !c.agrees).map(Comparison::allowance).collect();
        assert_eq!(advice, ["flops: 24%", "parameters: none", "schedule: false"]);
    }
}
