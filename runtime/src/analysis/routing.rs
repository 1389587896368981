//! What Mixture-of-Depths routers decide by: the analyses of the study of Gemma 2 (rates by kind of layer, norms, ablation, classes of
//! tokens, a linear probe), of decisions that were observed.
//!
//! *In*: [`Decisions`]: for every routed part and every token whether it was processed, its score and the norm of its input. *Out*: rates and tests.
//! *Promise*: everything is computed from the decisions given; classes with fewer than [`FEWEST`] tokens are left out, and
//! corrections count the classes that are left.

use crate::rng::Philox;
use crate::statistics::{
    Correlation, Logistic, Summary, TTest, binomial, bonferroni, paired, pearson, spearman, welch,
};
use serde::Serialize;

/// Fewest tokens of a class that is reported.
pub const FEWEST: usize = 30;

/// One token in so many is held out from the probe.
const HELD_OUT: u64 = 5;

/// A routed part of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Depth of its layer.
    pub depth: u64,
    /// Kind of its layer, such as `local` and `global`.
    pub kind: String,
    /// Whether each token was processed.
    pub kept: Vec<bool>,
    /// Each token's score.
    pub scores: Vec<f64>,
    /// Norm of each token's input.
    pub norms: Vec<f64>,
}

/// What routers decided over some sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Decisions {
    /// Tokens of each sequence.
    pub sequences: Vec<usize>,
    /// The routed parts.
    pub parts: Vec<Part>,
    /// Names of classes.
    pub classes: Vec<String>,
    /// The class of each token.
    pub class: Vec<usize>,
}

/// Rates of two kinds of layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kinds {
    /// One kind.
    pub first: String,
    /// The other.
    pub second: String,
    /// Its rates over sequences.
    pub first_rate: Summary,
    /// The other's.
    pub second_rate: Summary,
    /// Paired over sequences; `None` where they do not vary.
    pub test: Option<TTest>,
}

/// A part's rate and what goes with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartRate {
    /// Depth of its layer.
    pub depth: u64,
    /// Kind of its layer.
    pub kind: String,
    /// Share of tokens that were processed.
    pub rate: f64,
    /// Linear correlation of score and norm.
    pub pearson: Option<Correlation>,
    /// The same of ranks.
    pub spearman: Option<Correlation>,
    /// Rates by class.
    pub classes: Vec<ClassRate>,
    /// The probe; `None` where all decisions are alike.
    pub probe: Option<Probe>,
}

/// How a class differs from all tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassRate {
    /// Its name.
    pub class: String,
    /// Its tokens.
    pub tokens: usize,
    /// Share of them that was processed.
    pub rate: f64,
    /// That less the rate of all.
    pub deviation: f64,
    /// Binomial test against the rate of all.
    pub p: f64,
    /// The same, corrected for the number of classes (Bonferroni).
    pub corrected: f64,
}

/// A logistic regression from the class of a token to the decision, on tokens it was not fitted to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Share of right guesses.
    pub accuracy: f64,
    /// Share of right guesses of the commoner decision.
    pub majority: f64,
    /// Tokens held out.
    pub tokens: usize,
}

/// What a part is worth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ablation {
    /// Kinds of parts with the changes of perplexity when each of theirs is left out.
    pub kinds: Vec<(String, Vec<f64>)>,
    /// Welch's test between the first two kinds.
    pub test: Option<TTest>,
}

impl Decisions {
    /// Every pair of kinds of layers.
    pub fn kinds(&self) -> Vec<Kinds> {
        let mut kinds: Vec<&str> = vec![];
        for part in &self.parts {
            if !kinds.contains(&part.kind.as_str()) {
                kinds.push(&part.kind);
            }
        }
        let rates: Vec<Vec<f64>> = kinds.iter().map(|k| self.rates(k)).collect();
        let mut all = vec![];
        for i in 0..kinds.len() {
            for j in i + 1..kinds.len() {
                let (Some(first_rate), Some(second_rate)) = (Summary::of(&rates[i]), Summary::of(&rates[j]))
                else {
                    continue;
                };
                let (first, second) = (kinds[i].to_string(), kinds[j].to_string());
                let test = paired(&rates[i], &rates[j]);
                all.push(Kinds { first, second, first_rate, second_rate, test });
            }
        }
        all
    }

    /// Mean rate of the parts of a kind, of each sequence.
    fn rates(&self, kind: &str) -> Vec<f64> {
        let mut from = 0;
        let mut rates = vec![];
        for &length in self.sequences.iter().filter(|n| **n > 0) {
            let parts = self.parts.iter().filter(|p| p.kind == kind);
            let kept: Vec<f64> = parts.map(|p| share(&p.kept[from..from + length])).collect();
            rates.push(kept.iter().sum::<f64>() / kept.len().max(1) as f64);
            from += length;
        }
        rates
    }

    /// Every part.
    pub fn parts(&self, seed: u64) -> Vec<PartRate> {
        let rate = |part: &Part| PartRate {
            depth: part.depth,
            kind: part.kind.clone(),
            rate: share(&part.kept),
            pearson: pearson(&part.scores, &part.norms),
            spearman: spearman(&part.scores, &part.norms),
            classes: self.classes(part),
            probe: self.probe(part, seed),
        };
        self.parts.iter().map(rate).collect()
    }

    fn classes(&self, part: &Part) -> Vec<ClassRate> {
        let all = share(&part.kept);
        let mut found = vec![];
        for (number, name) in self.classes.iter().enumerate() {
            let own = self.class.iter().zip(&part.kept).filter(|(c, _)| **c == number);
            let kept: Vec<bool> = own.map(|(_, k)| *k).collect();
            if kept.len() < FEWEST {
                continue;
            }
            let right = kept.iter().filter(|k| **k).count();
            let Some(p) = binomial(right as u64, kept.len() as u64, all) else { continue };
            let (rate, tokens) = (share(&kept), kept.len());
            found.push(ClassRate {
                class: name.clone(),
                tokens,
                rate,
                deviation: rate - all,
                p,
                corrected: p,
            });
        }
        let tests = found.len();
        found.iter_mut().for_each(|c| c.corrected = bonferroni(c.p, tests));
        found
    }

    fn probe(&self, part: &Part, seed: u64) -> Option<Probe> {
        let width = self.classes.len();
        let philox = Philox::new(seed, "analysis/probe");
        let held = |i: usize| philox.stream(i as u64).below(HELD_OUT) == 0;
        let row = |i: usize| (0..width).map(move |c| f64::from(self.class[i] == c));
        let (test, train): (Vec<usize>, Vec<usize>) = (0..part.kept.len()).partition(|i| held(*i));
        let features: Vec<f64> = train.iter().flat_map(|i| row(*i)).collect();
        let labels: Vec<bool> = train.iter().map(|i| part.kept[*i]).collect();
        let probe = Logistic::fit(&features, width, &labels)?;
        let guess = |i: &usize| probe.probability(&row(*i).collect::<Vec<_>>()) >= 0.5;
        let right = test.iter().filter(|i| guess(i) == part.kept[**i]).count();
        let common = share(&labels) >= 0.5;
        let majority = test.iter().filter(|i| part.kept[**i] == common).count();
        let tokens = test.len();
        let of = |n: usize| n as f64 / tokens as f64;
        (tokens > 0).then(|| Probe { accuracy: of(right), majority: of(majority), tokens })
    }
}

/// What leaving parts out does to perplexity: `without` has the kind of each part and the loss without it, in nats a token.
pub fn ablation(loss: f64, without: &[(String, f64)]) -> Ablation {
    let mut kinds: Vec<(String, Vec<f64>)> = vec![];
    for (kind, nats) in without {
        let change = nats.exp() - loss.exp();
        match kinds.iter_mut().find(|k| k.0 == *kind) {
            Some(k) => k.1.push(change),
            None => kinds.push((kind.clone(), vec![change])),
        }
    }
    let test = match &kinds[..] {
        [a, b, ..] => welch(&a.1, &b.1),
        _ => None,
    };
    Ablation { kinds, test }
}

/// The class of a token by its text and the one before, where no labels are given.
pub fn class(text: &str, before: Option<&str>) -> &'static str {
    let word = text.trim();
    let Some(first) = word.chars().next() else { return "space" };
    let starts = text.starts_with(char::is_whitespace)
        || before.is_none_or(|b| b.ends_with(|c: char| !c.is_alphanumeric()));
    match first {
        c if c.is_numeric() => "digits",
        c if !c.is_alphanumeric() => "punctuation",
        c if c.is_uppercase() => "capitalised",
        _ if starts => "word-initial",
        _ => "word-internal",
    }
}

fn share(kept: &[bool]) -> f64 {
    kept.iter().filter(|k| **k).count() as f64 / kept.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two parts over four sequences: one keeps the first class, the other three tokens in four.
    fn decisions() -> Decisions {
        let n = 400;
        let class: Vec<usize> = (0..n).map(|i| i % 2).collect();
        let part = |depth: u64, kind: &str, kept: Vec<bool>| Part {
            depth,
            kind: kind.into(),
            scores: (0..n).map(|i| f64::from(i as u32 % 17)).collect(),
            norms: (0..n).map(|i| 3.0 - f64::from(i as u32 % 17)).collect(),
            kept,
        };
        Decisions {
            sequences: vec![100; 4],
            parts: vec![
                part(2, "local", class.iter().map(|c| *c == 0).collect()),
                part(3, "global", (0..n).map(|i| i % 4 != 3 || (i / 100 == 1 && i % 3 == 0)).collect()),
            ],
            classes: vec!["even".into(), "odd".into(), "absent".into()],
            class,
        }
    }

    #[test]
    fn kinds_are_compared_over_sequences() {
        let found = decisions().kinds();
        assert_eq!(found.len(), 1);
        let k = &found[0];
        assert_eq!((k.first.as_str(), k.second.as_str(), k.first_rate.mean), ("local", "global", 0.5));
        let test = k.test.unwrap();
        assert!(test.d < -1.0 && test.p < 1e-3 && test.df == 3.0, "{test:?}");
    }

    #[test]
    fn classes_norms_and_the_probe() {
        let found = decisions().parts(0);
        let local = &found[0];
        assert!((local.pearson.unwrap().r + 1.0).abs() < 1e-12);
        assert_eq!(local.classes.len(), 2);
        assert_eq!((local.classes[0].rate, local.classes[0].deviation), (1.0, 0.5));
        assert!(local.classes[0].corrected < 1e-50 && local.classes[0].corrected > local.classes[0].p);
        let probe = local.probe.unwrap();
        assert_eq!(probe.accuracy, 1.0);
        assert!(probe.majority < 0.7 && probe.tokens > 40);
        // Where classes say nothing, the probe is no better than the commoner decision.
        let mut all = decisions();
        all.parts[0].kept.fill(true);
        assert_eq!(all.parts(0)[0].probe, None);
        assert_eq!(all.parts(0)[0].classes[0].p, 1.0);
    }

    #[test]
    fn ablations_change_perplexity() {
        let without: Vec<(String, f64)> = [("local", 2.1), ("global", 2.3), ("local", 2.2), ("global", 2.35)]
            .map(|(kind, loss)| (kind.to_string(), loss))
            .to_vec();
        let found = ablation(2.0, &without);
        assert!((found.kinds[0].1[0] - (2.1f64.exp() - 2f64.exp())).abs() < 1e-12);
        assert!(found.test.unwrap().difference < 0.0);
        assert_eq!(ablation(2.0, &without[..1]).test, None);
    }

    #[test]
    fn built_in_classes() {
        let texts = ["The", " ", "cat", "alog", " 12", ",", " Rome", "\n"];
        let found: Vec<&str> =
            (0..texts.len()).map(|i| class(texts[i], i.checked_sub(1).map(|b| texts[b]))).collect();
        let expected = [
            "capitalised",
            "space",
            "word-initial",
            "word-internal",
            "digits",
            "punctuation",
            "capitalised",
            "space",
        ];
        assert_eq!(found, expected);
    }
}
