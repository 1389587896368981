//! Decisions of Mixture-of-Depths routers: the analyses of the study of Gemma 2 (rates by kind of
//! layer, norms, ablation, classes of tokens, a linear probe), of decisions that were observed.
//!
//! *In*: [`Decisions`]: for every routed part and every token whether it was processed, its score
//! and the norm of its input ([`super::skips`] observes them). *Out*: rates and tests. *Promise*:
//! everything is computed from the decisions given; classes with fewer than [`FEWEST`] tokens are
//! left out, and corrections count the classes that are left. A token that never came to a part,
//! because it skips what is around it, does not count there.

use crate::evaluate::Loss;
use crate::statistics::{
    Correlation, Logistic, Summary, TTest, binomial, bonferroni, paired, pearson, spearman, welch,
};
use dreamc_data::rng::Philox;
use serde::Serialize;
use std::ops::RangeInclusive;

/// Fewest tokens of a class that is reported.
pub const FEWEST: usize = 30;

/// The probe holds out one token in this number.
const HELD_OUT: u64 = 5;

/// A routed part of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Depth of its layer.
    pub depth: u64,
    /// The layer's set of weights: `layers.{set}` in names of tensors.
    pub set: u64,
    /// Which of the layer's wrapped parts: `skip.{number}` in names of tensors.
    pub number: u64,
    /// Kind of its layer, such as `local` and `global`.
    pub kind: String,
    /// Whether each token came to it.
    pub reached: Vec<bool>,
    /// Whether each token was processed.
    pub kept: Vec<bool>,
    /// Each token's score.
    pub scores: Vec<f64>,
    /// Norm of each token's input.
    pub norms: Vec<f64>,
}

impl Part {
    /// The tokens in a range that came to it.
    fn tokens(&self, range: std::ops::Range<usize>) -> impl Iterator<Item = usize> + '_ {
        range.filter(|&i| self.reached[i])
    }

    /// These, of all.
    fn all(&self) -> Vec<usize> {
        self.tokens(0..self.kept.len()).collect()
    }

    fn share(&self, tokens: &[usize]) -> f64 {
        tokens.iter().filter(|&&i| self.kept[i]).count() as f64 / tokens.len().max(1) as f64
    }
}

/// Decisions of routers over some sequences.
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

/// How deep tokens recurse in a wrapped part that is applied several times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recursion {
    /// Its name, as its tensors begin: `layers.3.skip.0`.
    pub name: String,
    /// Depths of its applications.
    pub depths: Vec<u64>,
    /// Shares of the tokens that none, one, two … of its applications process.
    pub shares: Vec<f64>,
}

/// Two kinds of layers, over sequences.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kinds {
    /// Least and largest depth of the layers that are compared.
    pub depths: (u64, u64),
    /// One kind.
    pub first: String,
    /// The other.
    pub second: String,
    /// Share of tokens that were processed.
    pub rate: Paired,
    /// Norm of what routers read.
    pub norm: Paired,
}

/// A mean over the layers of a kind and the tokens of a sequence, of two kinds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Paired {
    /// Of one kind over sequences.
    pub first: Summary,
    /// Of the other.
    pub second: Summary,
    /// Share of sequences in which it is larger for the first kind.
    pub above: f64,
    /// Paired over sequences; `None` where they do not vary.
    pub test: Option<TTest>,
}

/// A part's rate and what goes with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartRate {
    /// Depth of its layer.
    pub depth: u64,
    /// Which of the layer's wrapped parts.
    pub number: u64,
    /// Kind of its layer.
    pub kind: String,
    /// Tokens that came to it.
    pub tokens: usize,
    /// Share of them that was processed.
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

impl ClassRate {
    /// The study's criterion: significant at 5 % after correction, and at least five percentage
    /// points off.
    pub fn stands_out(&self) -> bool {
        self.corrected < 0.05 && self.deviation.abs() >= 0.05
    }
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

/// A part of a layer left out, the rest of the model as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ablated {
    /// Depths at which its weights are applied.
    pub depths: Vec<u64>,
    /// The part that was left out.
    pub part: String,
    /// Kind of the layer: of its routed part.
    pub kind: String,
    /// Whether it is the routed part, or, as a control, all else of the layer.
    pub routed: bool,
    /// Loss without it, in nats a token.
    pub loss: f64,
}

/// The change of loss without each part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ablation {
    /// Perplexity of the whole model.
    pub perplexity: f64,
    /// Targets that it and the others are over.
    pub targets: u64,
    /// Parts that were left out, with the change of perplexity.
    pub parts: Vec<(Ablated, f64)>,
    /// Changes by routed parts, of every pair of kinds.
    pub tests: Vec<Changes>,
    /// Changes by all else of the same layers: where these differ alike, depth and not the kind of
    /// part explains it.
    pub controls: Vec<Changes>,
}

/// Changes of perplexity, of two kinds of layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changes {
    /// One kind.
    pub first: String,
    /// The other.
    pub second: String,
    /// Changes by parts of the first kind.
    pub first_change: Summary,
    /// Changes by parts of the other.
    pub second_change: Summary,
    /// Welch's test; `None` where there are too few parts, or they do not vary.
    pub test: Option<TTest>,
}

impl Decisions {
    /// Every pair of kinds of layers, of those within a range of depths. Sequences in which no
    /// token came to any part of a kind do not count.
    pub fn kinds(&self, depths: RangeInclusive<u64>) -> Vec<Kinds> {
        let parts: Vec<&Part> = self.parts.iter().filter(|p| depths.contains(&p.depth)).collect();
        let (Some(low), Some(high)) =
            (parts.iter().map(|p| p.depth).min(), parts.iter().map(|p| p.depth).max())
        else {
            return vec![];
        };
        let mut all = vec![];
        for (first, second) in pairs(parts.iter().map(|p| p.kind.as_str())) {
            let compare = |of: &dyn Fn(&Part, &[usize]) -> f64| {
                let (a, b) = (self.means(&parts, &first, of), self.means(&parts, &second, of));
                let both: Vec<(f64, f64)> =
                    a.into_iter().zip(b).filter_map(|(a, b)| Some((a?, b?))).collect();
                let (a, b): (Vec<f64>, Vec<f64>) = both.iter().copied().unzip();
                let above = both.iter().filter(|(a, b)| a > b).count() as f64 / both.len().max(1) as f64;
                Some(Paired {
                    first: Summary::of(&a)?,
                    second: Summary::of(&b)?,
                    above,
                    test: paired(&a, &b),
                })
            };
            let rate = compare(&|part, tokens| part.share(tokens));
            let norm = compare(&|part, tokens| {
                tokens.iter().map(|&i| part.norms[i]).sum::<f64>() / tokens.len() as f64
            });
            let (Some(rate), Some(norm)) = (rate, norm) else { continue };
            all.push(Kinds { depths: (low, high), first, second, rate, norm });
        }
        all
    }

    /// A mean over the parts of a kind, of each sequence.
    fn means(&self, parts: &[&Part], kind: &str, of: &dyn Fn(&Part, &[usize]) -> f64) -> Vec<Option<f64>> {
        let mut from = 0;
        let mut means = vec![];
        for &length in self.sequences.iter().filter(|n| **n > 0) {
            let mut values = vec![];
            for part in parts.iter().filter(|p| p.kind == kind) {
                let tokens: Vec<usize> = part.tokens(from..from + length).collect();
                if !tokens.is_empty() {
                    values.push(of(part, &tokens));
                }
            }
            means.push(crate::statistics::mean(&values));
            from += length;
        }
        means
    }

    /// How deep tokens recurse, in every part that is applied several times.
    pub fn recursions(&self) -> Vec<Recursion> {
        let mut names: Vec<(u64, u64)> = self.parts.iter().map(|part| (part.set, part.number)).collect();
        names.sort_unstable();
        names.dedup();
        let own = |(set, number): (u64, u64)| -> Option<Recursion> {
            let parts: Vec<&Part> =
                self.parts.iter().filter(|part| (part.set, part.number) == (set, number)).collect();
            let tokens = self.class.len();
            let mut counts = vec![0u64; parts.len() + 1];
            for token in 0..tokens {
                counts[parts.iter().filter(|part| part.kept[token]).count()] += 1;
            }
            (parts.len() > 1).then(|| Recursion {
                name: format!("layers.{set}.skip.{number}"),
                depths: parts.iter().map(|part| part.depth).collect(),
                shares: counts.into_iter().map(|n| n as f64 / tokens.max(1) as f64).collect(),
            })
        };
        names.into_iter().filter_map(own).collect()
    }

    /// Every part. The probe's split of tokens is a function of the seed.
    pub fn parts(&self, seed: u64) -> Vec<PartRate> {
        let rate = |part: &Part| {
            let all = part.all();
            let of = |values: &[f64]| all.iter().map(|&i| values[i]).collect::<Vec<f64>>();
            let (scores, norms) = (of(&part.scores), of(&part.norms));
            PartRate {
                depth: part.depth,
                number: part.number,
                kind: part.kind.clone(),
                tokens: all.len(),
                rate: part.share(&all),
                pearson: pearson(&scores, &norms),
                spearman: spearman(&scores, &norms),
                classes: self.classes(part, &all),
                probe: self.probe(part, &all, seed),
            }
        };
        self.parts.iter().map(rate).collect()
    }

    fn classes(&self, part: &Part, tokens: &[usize]) -> Vec<ClassRate> {
        let all = part.share(tokens);
        let mut found = vec![];
        for (number, name) in self.classes.iter().enumerate() {
            let own: Vec<usize> = tokens.iter().copied().filter(|&i| self.class[i] == number).collect();
            if own.len() < FEWEST {
                continue;
            }
            let right = own.iter().filter(|&&i| part.kept[i]).count();
            let Some(p) = binomial(right as u64, own.len() as u64, all) else { continue };
            let rate = part.share(&own);
            found.push(ClassRate {
                class: name.clone(),
                tokens: own.len(),
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

    fn probe(&self, part: &Part, tokens: &[usize], seed: u64) -> Option<Probe> {
        let width = self.classes.len();
        let philox = Philox::new(seed, "analysis/probe");
        let held = |i: usize| philox.stream(i as u64).below(HELD_OUT) == 0;
        let row = |i: usize| (0..width).map(move |c| f64::from(self.class[i] == c));
        let (test, train): (Vec<usize>, Vec<usize>) = tokens.iter().partition(|&&i| held(i));
        let features: Vec<f64> = train.iter().flat_map(|i| row(*i)).collect();
        let labels: Vec<bool> = train.iter().map(|i| part.kept[*i]).collect();
        let probe = Logistic::fit(&features, width, &labels)?;
        let guess = |i: &usize| probe.probability(&row(*i).collect::<Vec<_>>()) >= 0.5;
        let right = test.iter().filter(|i| guess(i) == part.kept[**i]).count();
        let common = part.share(&train) >= 0.5;
        let majority = test.iter().filter(|i| part.kept[**i] == common).count();
        let tokens = test.len();
        let of = |n: usize| n as f64 / tokens as f64;
        (tokens > 0).then(|| Probe { accuracy: of(right), majority: of(majority), tokens })
    }
}

/// Changes of perplexity where parts are left out, against the loss of the whole model.
pub fn ablation(whole: Loss, parts: Vec<Ablated>) -> Ablation {
    let loss = whole.mean();
    let parts: Vec<(Ablated, f64)> =
        parts.into_iter().map(|p| (p.loss.exp() - loss.exp(), p)).map(|(change, p)| (p, change)).collect();
    let tests = |routed: bool| {
        let of = |kind: &str| {
            let own = parts.iter().filter(|(p, _)| p.routed == routed && p.kind == kind);
            own.map(|p| p.1).collect::<Vec<f64>>()
        };
        let kinds = parts.iter().filter(|(p, _)| p.routed == routed).map(|(p, _)| p.kind.as_str());
        let mut found = vec![];
        for (first, second) in pairs(kinds) {
            let (a, b) = (of(&first), of(&second));
            let (Some(first_change), Some(second_change)) = (Summary::of(&a), Summary::of(&b)) else {
                continue;
            };
            found.push(Changes { first, second, first_change, second_change, test: welch(&a, &b) });
        }
        found
    };
    let (tests, controls) = (tests(true), tests(false));
    Ablation { perplexity: loss.exp(), targets: whole.targets, parts, tests, controls }
}

/// Every pair of different names, in the order in which they first stand.
fn pairs<'a>(names: impl Iterator<Item = &'a str>) -> Vec<(String, String)> {
    let mut distinct: Vec<&str> = vec![];
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    let mut all = vec![];
    for (i, first) in distinct.iter().enumerate() {
        all.extend(distinct[i + 1..].iter().map(|second| (first.to_string(), second.to_string())));
    }
    all
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two parts over four sequences: one keeps the first class, the other three tokens in four.
    fn decisions() -> Decisions {
        let n = 400;
        let class: Vec<usize> = (0..n).map(|i| i % 2).collect();
        let part = |depth: u64, kind: &str, kept: Vec<bool>| Part {
            depth,
            set: 0,
            number: 0,
            kind: kind.into(),
            reached: vec![true; n],
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
        let found = decisions().kinds(0..=9);
        assert_eq!(found.len(), 1);
        let k = &found[0];
        assert_eq!((k.first.as_str(), k.second.as_str(), k.rate.first.mean), ("local", "global", 0.5));
        assert_eq!((k.depths, k.rate.above, k.norm.test), ((2, 3), 0.0, None));
        let test = k.rate.test.unwrap();
        assert!(test.d < -1.0 && test.p < 1e-3 && test.df == 3.0, "{test:?}");
        assert!(decisions().kinds(0..=2).is_empty(), "one kind has nothing to be compared with");
    }

    #[test]
    fn tokens_that_never_came_to_a_part_do_not_count() {
        let mut all = decisions();
        let local = &mut all.parts[0];
        local.reached = (0..400).map(|i| i % 2 == 0 && i >= 100).collect();
        let found = &all.parts(0)[0];
        assert_eq!((found.tokens, found.rate, found.classes.len()), (150, 1.0, 1));
        let kinds = &all.kinds(0..=9)[0];
        assert_eq!((kinds.rate.first.n, kinds.rate.first.mean), (3, 1.0));
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
        let part = |kind: &str, routed: bool, loss: f64| Ablated {
            depths: vec![0],
            part: "sa".into(),
            kind: kind.into(),
            routed,
            loss,
        };
        let routed = [("local", 2.1), ("global", 2.3), ("local", 2.2), ("global", 2.35)];
        let mut parts: Vec<Ablated> = routed.map(|(kind, loss)| part(kind, true, loss)).to_vec();
        parts.push(part("local", false, 2.5));
        let found = ablation(Loss { nats: 20.0, targets: 10, bytes: 0 }, parts);
        assert_eq!(found.targets, 10);
        assert!((found.parts[0].1 - (2.1f64.exp() - 2f64.exp())).abs() < 1e-12);
        assert_eq!(found.tests[0].first_change.n, 2);
        assert!(found.tests[0].test.unwrap().difference < 0.0);
        assert_eq!(found.controls, [], "a single kind has nothing to be compared with");
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

    #[test]
    fn tokens_are_counted_by_the_passes_that_process_them() {
        let mut all = decisions();
        let [recursion] = &all.recursions()[..] else { panic!("{:?}", all.recursions()) };
        assert_eq!((recursion.name.as_str(), &recursion.depths[..]), ("layers.0.skip.0", &[2, 3][..]));
        let both = (0..400).filter(|i| all.parts[0].kept[*i] && all.parts[1].kept[*i]).count();
        assert_eq!(recursion.shares[2], both as f64 / 400.0);
        assert!((recursion.shares.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        all.parts[1].set = 1;
        assert!(all.recursions().is_empty(), "parts of two layers are not passes of one");
    }
}
