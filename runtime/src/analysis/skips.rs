//! Decisions to skip, as a model makes them.
//!
//! *In*: a model compiled with [`Options::observe`](dreamc_compiler::Options), and data. *Out*:
//! [`Seen`]: the decisions that [`super::routing`] analyses, with the tokens they are about; and
//! the loss without each routed part. *Promise*: decisions are those the model evaluates by, read
//! from the device; only tokens of documents with targets count, padding does not.

use super::real;
use super::routing::{Ablated, Decisions, Part, class};
use crate::evaluate::{self, EvaluateError, Loss};
use crate::model::{Model, ModelError};
use dreamc_compiler::CompileError;
use dreamc_compiler::architecture::{Architecture, Work, for_each_application, names, skips};
use dreamc_compiler::bind::Owner;
use dreamc_compiler::compiled::Observation;
use dreamc_data::{Batches, Dataset, Tokenizer};
use dreamc_dsl::spec::{self, Expr, SkipRule};
use std::collections::BTreeMap;
use thiserror::Error;

/// Decisions and what they are about.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// The decisions; all tokens are of one class without name until [`Seen::built_in`] or
    /// [`Seen::label`].
    pub decisions: Decisions,
    /// The tokens, in order.
    pub tokens: Vec<u32>,
    /// Place of each token in its row.
    pub places: Vec<usize>,
}

/// Why labels do not fit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LabelError {
    /// Another number than there are tokens.
    #[error(
        "there are {labels} labels for {tokens} tokens: every token of the rows that are read needs one line, begin and end tokens \
         included (--write-tokens writes them in order)"
    )]
    Count {
        /// Lines.
        labels: usize,
        /// Tokens.
        tokens: usize,
    },
}

/// A part of a layer and what it is made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wrapped {
    /// Depth of the application.
    pub depth: u64,
    /// The set of weights: `layers.{set}`.
    pub set: u64,
    /// The body that is applied.
    pub body: usize,
    /// Which of the layer's wrapped parts.
    pub number: u64,
    /// How it chooses its tokens.
    pub rule: SkipRule,
    /// The share of tokens that it is to process.
    pub asked: f64,
    /// The wrapped composition as it is written.
    text: String,
    components: Vec<String>,
    /// The rest of the layer.
    others: Vec<String>,
}

/// Every application of every wrapped part; `passes` replaces the count of the outermost `recur`.
pub(crate) fn wrapped(model: &spec::Model, passes: Option<u64>) -> Result<Vec<Wrapped>, CompileError> {
    let a = Architecture::new(model, passes)?;
    let mut all = vec![];
    for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
        let Work::Layer(expr) = &a.bodies[apply.body].work else { return };
        let set = (a.leader(apply.body), apply.set.at(variables));
        let set = a.sets.iter().position(|s| *s == set).unwrap_or_default() as u64;
        for (number, (skip, inner)) in skips(expr).into_iter().enumerate() {
            let components: Vec<String> = names(inner).into_iter().map(String::from).collect();
            let others = names(expr).into_iter().map(String::from).filter(|n| !components.contains(n));
            all.push(Wrapped {
                depth: apply.depth.at(variables),
                set,
                body: apply.body,
                number: number as u64,
                rule: skip.rule.clone(),
                asked: skip.rule.capacity(),
                text: text(inner),
                others: others.collect(),
                components,
            });
        }
    });
    Ok(all)
}

/// A composition as it is written, without the rules of what is wrapped.
fn text(expr: &Expr) -> String {
    let terms = |all: &[Expr], between: &str| {
        let each = all.iter().map(|e| match e {
            Expr::Sequential(_) | Expr::Parallel(_) => format!("({})", text(e)),
            _ => text(e),
        });
        each.collect::<Vec<_>>().join(between)
    };
    match expr {
        Expr::Component(name) => name.clone(),
        Expr::Norm => "norm".into(),
        Expr::Sequential(all) => terms(all, " > "),
        Expr::Parallel(all) => terms(all, " | "),
        Expr::Skip(_, inner) => format!("skip {{ {} }}", text(inner)),
    }
}

/// Runs a model over `sequences` rows and notes what its tokens skip.
pub fn decisions(
    model: &mut Model,
    spec: &spec::Model,
    batches: &mut Batches,
    sequences: u64,
) -> Result<Seen, EvaluateError> {
    let wrapped = wrapped(spec, None).map_err(ModelError::from)?;
    let part = |w: &Wrapped| Part {
        depth: w.depth,
        set: w.set,
        number: w.number,
        kind: w.text.clone(),
        reached: vec![],
        kept: vec![],
        scores: vec![],
        norms: vec![],
    };
    let mut seen = Seen {
        decisions: Decisions {
            sequences: vec![],
            parts: wrapped.iter().map(part).collect(),
            classes: vec![String::new()],
            class: vec![],
        },
        tokens: vec![],
        places: vec![],
    };
    let mut rows = 0;
    while rows < sequences {
        let Some(batch) = batches.take(model.batch())? else { break };
        let mut real = real(&batch);
        let most = (sequences - rows).min(batch.rows() as u64) as usize;
        real[most * batch.sequence..].fill(false);
        let counts: Vec<usize> =
            real.chunks(batch.sequence.max(1)).map(|row| row.iter().filter(|r| **r).count()).collect();
        let counts: Vec<usize> = counts.into_iter().filter(|n| *n > 0).collect();
        if counts.is_empty() {
            break;
        }
        rows += counts.len() as u64;
        seen.decisions.sequences.extend(counts);
        model.evaluate(&batch)?;
        let counted: Vec<usize> = (0..real.len()).filter(|&i| real[i]).collect();
        seen.tokens.extend(counted.iter().map(|&i| batch.ids[i] as u32));
        seen.places.extend(counted.iter().map(|&i| i % batch.sequence.max(1)));
        for (w, part) in wrapped.iter().zip(&mut seen.decisions.parts) {
            let read = |what: Observation| -> Result<Vec<f32>, ModelError> {
                let owner = Owner::Skip(w.number as u32);
                let observed = &model.compiled().observed;
                let found = observed.iter().find(|o| (o.owner, o.what) == (owner, what));
                let missing = || ModelError::NoBuffer(format!("skip.{}", w.number));
                let buffer = found.ok_or_else(missing)?.buffer;
                let mut values = vec![0f32; real.len()];
                model.session().read_at(buffer, w.depth, 0, &mut values)?;
                Ok(counted.iter().map(|&i| values[i]).collect())
            };
            let taking = read(Observation::Taking)?;
            part.reached.extend(taking.iter().map(|t| *t > 0.5));
            part.kept.extend(taking.iter().map(|t| *t > 1.5));
            part.scores.extend(read(Observation::Score)?.into_iter().map(f64::from));
            part.norms.extend(read(Observation::Norm)?.into_iter().map(f64::from));
        }
    }
    seen.decisions.class = vec![0; seen.tokens.len()];
    Ok(seen)
}

impl Seen {
    /// Gives tokens the classes that their text tells.
    pub fn built_in(&mut self, tokenizer: &Tokenizer) {
        let texts: Vec<String> = self.tokens.iter().map(|t| tokenizer.decode(&[*t])).collect();
        let before = |i: usize| (self.places[i] > 0 && i > 0).then(|| texts[i - 1].as_str());
        let labels: Vec<&str> = (0..texts.len()).map(|i| class(&texts[i], before(i))).collect();
        self.classify(&labels);
    }

    /// Gives tokens these classes, one each.
    pub fn label(&mut self, labels: &[&str]) -> Result<(), LabelError> {
        if labels.len() != self.tokens.len() {
            return Err(LabelError::Count { labels: labels.len(), tokens: self.tokens.len() });
        }
        self.classify(labels);
        Ok(())
    }

    /// Classes in order of their names.
    fn classify(&mut self, labels: &[&str]) {
        let mut classes: Vec<&str> = labels.to_vec();
        classes.sort_unstable();
        classes.dedup();
        self.decisions.class = labels.iter().map(|l| classes.binary_search(l).unwrap_or_default()).collect();
        self.decisions.classes = classes.into_iter().map(String::from).collect();
    }

    /// Leaves out the first tokens of every row, which attention treats apart.
    pub fn without_first(&mut self, first: usize) {
        let stays: Vec<bool> = self.places.iter().map(|p| *p >= first).collect();
        let mut from = 0;
        for length in &mut self.decisions.sequences {
            let end = from + *length;
            *length = stays[from..end].iter().filter(|s| **s).count();
            from = end;
        }
        fn pick<T>(values: &mut Vec<T>, stays: &[bool]) {
            let mut each = stays.iter();
            values.retain(|_| each.next().copied().unwrap_or(false));
        }
        for part in &mut self.decisions.parts {
            pick(&mut part.reached, &stays);
            pick(&mut part.kept, &stays);
            pick(&mut part.scores, &stays);
            pick(&mut part.norms, &stays);
        }
        pick(&mut self.decisions.class, &stays);
        pick(&mut self.tokens, &stays);
        pick(&mut self.places, &stays);
    }
}

/// The loss of a model with each routed part left out, and as a control with everything else of its
/// layer left out: what would be added to the stream is 0. A set of weights that is applied at
/// several depths is left out at all of them.
pub fn ablate(
    model: &mut Model,
    spec: &spec::Model,
    dataset: &Dataset,
    sequences: u64,
) -> Result<Vec<Ablated>, EvaluateError> {
    let mut sets: BTreeMap<(u64, u64, bool), (Wrapped, Vec<u64>)> = BTreeMap::new();
    for w in wrapped(spec, None).map_err(ModelError::from)? {
        for routed in [true, false] {
            if routed || !w.others.is_empty() {
                let entry = sets.entry((w.set, w.number, routed)).or_insert_with(|| (w.clone(), vec![]));
                entry.1.push(w.depth);
            }
        }
    }
    let mut found = vec![];
    for ((set, _, routed), (w, depths)) in sets {
        let components = if routed { &w.components } else { &w.others };
        let last = |c: &String| {
            ["out.weight", "out.shared.weight", "down.weight"].map(|n| format!("layers.{set}.{c}.{n}"))
        };
        let last: Vec<String> = components.iter().flat_map(last).collect();
        let mut kept = vec![];
        for name in model.compiled().tensors.iter().map(|t| t.name.clone()).filter(|n| last.contains(n)) {
            kept.push((name.clone(), model.get(&name)?));
        }
        for (name, values) in &kept {
            model.set(name, &vec![0.0; values.len()])?;
        }
        let loss = held_out(model, dataset, sequences)?;
        for (name, values) in &kept {
            model.set(name, values)?;
        }
        found.push(Ablated {
            depths,
            part: if routed { w.text.clone() } else { w.others.join(", ") },
            kind: w.text,
            routed,
            loss: loss.mean(),
        });
    }
    Ok(found)
}

/// The loss over the first rows that are held out, those that [`decisions`] observes.
pub fn held_out(model: &mut Model, dataset: &Dataset, sequences: u64) -> Result<Loss, EvaluateError> {
    let Some(held) = dataset.validation()? else { return Ok(Loss::default()) };
    evaluate::loss(model, held.at_most(sequences))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        let part = Part {
            depth: 1,
            set: 0,
            number: 0,
            kind: "sa".into(),
            reached: vec![true; 5],
            kept: vec![true, false, true, false, true],
            scores: vec![1.0, 2.0, 3.0, 4.0, 5.0],
            norms: vec![1.0; 5],
        };
        let decisions = Decisions {
            sequences: vec![3, 2],
            parts: vec![part],
            classes: vec![String::new()],
            class: vec![0; 5],
        };
        Seen { decisions, tokens: vec![65, 32, 98, 49, 44], places: vec![0, 1, 2, 0, 1] }
    }

    #[test]
    fn the_first_tokens_of_rows_are_left_out() {
        let mut seen = seen();
        seen.without_first(1);
        assert_eq!(seen.decisions.sequences, [2, 1]);
        assert_eq!((seen.tokens, seen.places), (vec![32, 98, 44], vec![1, 2, 1]));
        assert_eq!(seen.decisions.parts[0].scores, [2.0, 3.0, 5.0]);
        assert_eq!(seen.decisions.parts[0].kept, [false, true, true]);
    }

    #[test]
    fn labels_are_one_a_token() {
        let mut all = seen();
        assert_eq!(all.label(&["x"]), Err(LabelError::Count { labels: 1, tokens: 5 }));
        all.label(&["noun", "verb", "noun", "adj", "verb"]).unwrap();
        assert_eq!(all.decisions.classes, ["adj", "noun", "verb"]);
        assert_eq!(all.decisions.class, [1, 2, 1, 0, 2]);
        all.built_in(&Tokenizer::bytes());
        let names: Vec<&str> =
            all.decisions.class.iter().map(|&c| all.decisions.classes[c].as_str()).collect();
        assert_eq!(names, ["capitalised", "space", "word-initial", "digits", "punctuation"]);
    }
}
