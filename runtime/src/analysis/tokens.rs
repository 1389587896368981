//! A text as a model reads it: of every token the likeliest next ones, the experts that it chose,
//! the wrapped parts that processed it, the depths its attention looked at, and the share of it
//! that left a loop after each pass.
//!
//! *In*: a model compiled with [`Options::observe`](dreamc_compiler::Options) and its logits, for
//! one row as long as the text. *Out*: a [`Reading`]. *Promise*: choices are those the model made,
//! read from the device; probabilities are the softmax of its logits.

use super::skips::wrapped;
use super::{Form, candidates};
use crate::model::{Model, ModelError};
use dreamc_compiler::bind::Owner;
use dreamc_compiler::compiled::{Application, Observation, Observed};
use dreamc_data::{Batch, NO_LOSS, Tokenizer};
use dreamc_device::Element;
use dreamc_dsl::spec::Spec;
use serde::Serialize;

/// A text, read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reading {
    /// The model's name.
    pub model: String,
    /// Applications of layers.
    pub depth: u64,
    /// Its tokens, in order.
    pub tokens: Vec<Token>,
}

/// A token and what the model did with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Token {
    /// Its number.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// The probability that the tokens before gave it; the first has none.
    pub given: Option<f64>,
    /// The likeliest next tokens, the likeliest first.
    pub next: Vec<Next>,
    /// The experts that routers chose for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<Chosen>,
    /// The wrapped parts that it came to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Processed>,
    /// Where its depth attentions looked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub looks: Vec<Looked>,
    /// Its shares that leave a loop after each pass, the last pass included.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exits: Vec<f64>,
}

/// A token that may follow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Next {
    /// Its number.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// Its probability.
    pub probability: f64,
}

/// A choice of a router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Chosen {
    /// The component.
    pub component: String,
    /// Depth, from 0.
    pub depth: u64,
    /// The experts, from 0, the first choice first.
    pub experts: Vec<u64>,
}

/// A decision about a token that came to a wrapped part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Processed {
    /// Which of its layer's wrapped parts, from 0.
    pub part: u64,
    /// Depth, from 0.
    pub depth: u64,
    /// Whether the part processed it; otherwise it went around.
    pub taken: bool,
}

/// Scores of a depth attention.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Looked {
    /// The component.
    pub component: String,
    /// Depth, from 0.
    pub depth: u64,
    /// Mean scores, over heads, of its own depth and those before it, the first depth first; they
    /// add up to 1.
    pub scores: Vec<f64>,
}

/// Reads a text of as many tokens as the model's one row has; `most` likeliest tokens are kept.
pub fn read(
    model: &mut Model,
    spec: &Spec,
    tokenizer: &Tokenizer,
    ids: &[u32],
    most: usize,
) -> Result<Reading, ModelError> {
    let mut batch = Batch::new(ids.len());
    batch.ids.extend(ids.iter().map(|id| *id as i32));
    batch.targets.extend(ids.iter().skip(1).map(|id| *id as i32).chain([NO_LOSS]));
    batch.positions.extend(0..ids.len() as i32);
    batch.segments.extend(ids.iter().map(|_| 0));
    batch.bytes.extend(ids.iter().map(|_| 0));
    model.evaluate(&batch)?;
    let mut tokens = likeliest(&model.all_logits()?, tokenizer, ids, most);
    for observed in model.compiled().observed.clone() {
        match observed.what {
            Observation::Chosen => chosen(model, &observed, &mut tokens)?,
            Observation::Queries => looked(model, spec, &observed, &mut tokens)?,
            Observation::Share => exits(model, &observed, &mut tokens)?,
            Observation::Entropy
            | Observation::Taking
            | Observation::Score
            | Observation::Norm
            | Observation::Loss => {}
        }
    }
    parts(model, spec, &mut tokens)?;
    let depth = model.compiled().depth;
    Ok(Reading { model: spec.model.name.clone(), depth, tokens })
}

/// Tokens with what may follow them.
fn likeliest(logits: &[f32], tokenizer: &Tokenizer, ids: &[u32], most: usize) -> Vec<Token> {
    let wide = (logits.len() / ids.len().max(1)).max(1);
    let mut before: Option<Vec<f64>> = None;
    let mut tokens = vec![];
    for (&id, row) in ids.iter().zip(logits.chunks(wide)) {
        let given = before.as_ref().and_then(|p| p.get(id as usize).copied());
        let probabilities = softmax(row);
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b)));
        let next = order.into_iter().take(most).map(|id| Next {
            id: id as u32,
            text: shown(tokenizer, id as u32),
            probability: probabilities[id],
        });
        tokens.push(Token {
            id,
            text: shown(tokenizer, id),
            given,
            next: next.collect(),
            experts: vec![],
            parts: vec![],
            looks: vec![],
            exits: vec![],
        });
        before = Some(probabilities);
    }
    tokens
}

/// The text of a token by itself; its name where it has no text.
fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    let text = tokenizer.decode(&[id]);
    match text.is_empty() {
        true => tokenizer.token(id).unwrap_or_else(|| format!("#{id}")),
        false => text,
    }
}

fn softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let raised: Vec<f64> = row.iter().map(|x| f64::from(x - most).exp()).collect();
    let total: f64 = raised.iter().sum();
    raised.into_iter().map(|x| x / total).collect()
}

/// The numbers of an observation about one application.
fn values<T: Element + Default>(
    model: &Model,
    observed: &Observed,
    application: &Application,
) -> Result<Vec<T>, ModelError> {
    let elements = model.compiled().plan.buffer(observed.buffer).elements() as usize;
    let mut values = vec![T::default(); elements];
    model.session().read_at(observed.buffer, application.depth, 0, &mut values)?;
    Ok(values)
}

fn chosen(model: &Model, observed: &Observed, tokens: &mut [Token]) -> Result<(), ModelError> {
    for a in &observed.applications {
        let there = candidates(model.compiled(), &observed.component, a.set) as u64;
        let all: Vec<i32> = values(model, observed, a)?;
        let each = (all.len() / tokens.len().max(1)).max(1);
        for (token, chosen) in tokens.iter_mut().zip(all.chunks(each)) {
            // A token that skips the component has numbers of no expert.
            let known = chosen.iter().filter_map(|e| u64::try_from(*e).ok());
            let experts: Vec<u64> = known.filter(|e| *e < there).collect();
            if !experts.is_empty() {
                let component = observed.component.clone();
                token.experts.push(Chosen { component, depth: a.depth, experts });
            }
        }
    }
    Ok(())
}

fn looked(model: &Model, spec: &Spec, observed: &Observed, tokens: &mut [Token]) -> Result<(), ModelError> {
    let (form, keys) = Form::of(model, spec, observed)?;
    let mut alone = vec![false; tokens.len()];
    for a in &observed.applications {
        let queries: Vec<f32> = values(model, observed, a)?;
        for (at, token) in tokens.iter_mut().enumerate() {
            let mut scores = vec![0.0; a.row as usize + 1];
            alone[at] = true;
            form.add(&queries, &keys, a.row as usize, &alone, &mut scores);
            alone[at] = false;
            if scores.iter().any(|s| *s > 0.0) {
                token.looks.push(Looked { component: observed.component.clone(), depth: a.depth, scores });
            }
        }
    }
    Ok(())
}

fn exits(model: &Model, observed: &Observed, tokens: &mut [Token]) -> Result<(), ModelError> {
    for a in &observed.applications {
        let shares: Vec<f32> = values(model, observed, a)?;
        tokens.iter_mut().zip(shares).for_each(|(token, share)| token.exits.push(f64::from(share)));
    }
    for token in tokens {
        let left: f64 = token.exits.iter().sum();
        token.exits.push((1.0 - left).max(0.0));
    }
    Ok(())
}

/// Decisions to skip: 2 for a token that takes part, 1 for one that does not, 0 for one that never
/// came to it.
fn parts(model: &Model, spec: &Spec, tokens: &mut [Token]) -> Result<(), ModelError> {
    for part in wrapped(&spec.model, None)? {
        let owner = (Owner::Skip(part.number as u32), Observation::Taking);
        let found = model.compiled().observed.iter().find(|o| (o.owner, o.what) == owner).cloned();
        let Some(observed) = found else { continue };
        let mut taking = vec![0f32; tokens.len()];
        model.session().read_at(observed.buffer, part.depth, 0, &mut taking)?;
        for (token, taking) in tokens.iter_mut().zip(taking).filter(|(_, taking)| *taking > 0.5) {
            token.parts.push(Processed { part: part.number, depth: part.depth, taken: taking > 1.5 });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likely_tokens_come_first_and_probabilities_add_up() {
        let tokenizer = Tokenizer::bytes();
        let mut logits = vec![0f32; 2 * 256];
        logits[98] = 2f32.ln();
        let tokens = likeliest(&logits, &tokenizer, &[97, 98], 3);
        let [first, second] = &tokens[..] else { panic!("{tokens:?}") };
        assert_eq!((first.text.as_str(), first.given, first.next[0].text.as_str()), ("a", None, "b"));
        let two = 2.0 / 257.0;
        assert!((first.next[0].probability - two).abs() < 1e-6, "{tokens:?}");
        assert!((second.given.unwrap() - two).abs() < 1e-6, "{tokens:?}");
        // Equal ones stand in the order of their numbers.
        assert_eq!(second.next.iter().map(|n| n.id).collect::<Vec<_>>(), [0, 1, 2]);
        assert!((softmax(&[1.0, -3.0, 0.5]).iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }
}
