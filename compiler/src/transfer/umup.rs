//! Unit-scaled µP (Blake and others, *u-μP: The Unit-Scaled Maximal Update Parametrization*,
//! 2407.17465) for optimizers that do not look at the size of gradients. Numbers of operations are
//! those of the authors' package `unit-scaling` 0.3.5.
//!
//! The rule has no base: with `i` what a weight sums over and `l` layers,
//!
//! | weight | multiplier | rate |
//! |---|---|---|
//! | the embedding, rows of `o` numbers | `1` | `o^-1/2` |
//! | a matrix | `i^-1/2` | `i^-1/2` |
//! | the head, and what goes to a size that stays | `1/i` | `1` |
//! | gains, biases | `1` | `1` |
//!
//! and rates in components have `l^-1/2` besides. A weight of deviation 1 with a multiplier and a
//! rate is the weight times the multiplier with the product of both (the paper's abc-symmetry), and
//! that is how it is kept: no reader of a model has to know multipliers.
//!
//! Attentions, gated networks and branches have a number that brings their output to a deviation of
//! 1 ([`unit`]). It stands in the weight that reads it. The output of a component has `l^-1/2`, so
//! that all applications of it add as much as the embedding has (appendix G).

use super::place::still;
use super::{Growth, Rule, Seen, Share, Use, mup};
use crate::ir::{Binary, Function, Module, Node, Op, Unary, Value};

pub(super) struct Umup;

impl Rule for Umup {
    fn share(&self, seen: &Seen, growth: Growth) -> Share {
        let (i, o) = (seen.fan_in.here, seen.fan_out.here);
        let stays = seen.fan_out.ratio() == 1.0 && seen.fan_in.ratio() != 1.0;
        let (deviation, rate) = match seen.of {
            Use::Product { normed: false, .. } if stays || seen.head => (1.0 / i, 1.0 / i),
            Use::Product { .. } => (i.powf(-0.5), 1.0 / i),
            Use::Lookup { .. } => (1.0, o.powf(-0.5)),
            Use::Factor | Use::Term | Use::Unread => (seen.begins, 1.0),
            Use::Taps | Use::Unknown(_) => return Share::NONE,
        };
        let unit = seen.reads.unwrap_or(1.0);
        let width = Share { init: Some(deviation / seen.begins * unit), rate: rate * unit, eps: 1.0 };
        mup::depth(0.5, seen, growth, width)
    }
}

/// A number that brings a value to a deviation of 1, where its operands have one: of what a weight
/// multiplies. `None` where none is known; its operation is the error.
pub(super) fn unit(m: &Module, f: &Function, weight: &str, tokens: u64) -> Result<f64, &'static str> {
    let Some(at) = f.params.iter().position(|p| p.name == weight) else { return Ok(1.0) };
    let still = still(f);
    let mut along = vec![false; f.types.len()];
    along[at] = true;
    for node in &f.nodes {
        if !node.inputs.iter().any(|v| along[v.index()]) {
            continue;
        }
        if node.inputs.iter().all(|v| still[v.index()]) {
            node.results().for_each(|v| along[v.index()] = true);
            continue;
        }
        let product = matches!(node.op, Op::Contract(_) | Op::Grouped(_) | Op::ByHead(_));
        let read = node.inputs.iter().find(|v| !still[v.index()]);
        return match read {
            Some(read) if product => of(m, f, *read, tokens),
            _ => Ok(1.0),
        };
    }
    Ok(1.0)
}

fn of(m: &Module, f: &Function, v: Value, tokens: u64) -> Result<f64, &'static str> {
    let Some(node) = made(f, v) else { return Ok(1.0) };
    match &node.op {
        Op::Reshape(_) | Op::Cast(_) | Op::Arrange(_) | Op::Split(_) | Op::StopGradient | Op::Gather => {
            of(m, f, node.inputs[0], tokens)
        }
        // Each is of deviation 1, or what it reads is.
        Op::Rms(_) | Op::Contract(_) | Op::Grouped(_) | Op::ByHead(_) | Op::Rope(_) | Op::Embed => Ok(1.0),
        Op::Attention(a) if a.program.is_none() => {
            let head = f.ty(node.inputs[0]).dims.last().map_or(1.0, |d| m.size(*d) as f64);
            let seen = a.window.map_or(tokens, |window| window.min(tokens)).max(1) as f64;
            Ok(attention(head, seen) * (1.0 - a.dropout.unwrap_or_default()).sqrt())
        }
        Op::Binary(Binary::Mul) if node.inputs.iter().any(|v| silu(f, *v)) => Ok(NETWORK),
        // A gain; the norm before it decides.
        Op::Binary(Binary::Mul) => match node.inputs.iter().find(|v| f.params.get(v.index()).is_none()) {
            Some(v) if made(f, *v).is_some_and(|n| matches!(n.op, Op::Rms(_))) => Ok(1.0),
            _ => Err(node.op.name()),
        },
        other => Err(other.name()),
    }
}

fn made(f: &Function, v: Value) -> Option<&Node> {
    f.nodes.iter().find(|node| node.results().any(|r| r == v))
}

fn silu(f: &Function, v: Value) -> bool {
    made(f, v).is_some_and(|node| matches!(node.op, Op::Unary(Unary::Silu)))
}

/// Of `a · silu(b)`: `2^3/4`, between 2 where the gate is flat and `√2` where it is a step.
const NETWORK: f64 = 1.681_792_830_507_429;

/// Of an attention over `tokens` tokens with scores by 1/d: one over a number between `√(ln t / t)`
/// (means) and 1 (choices).
fn attention(head: f64, tokens: f64) -> f64 {
    let sharp = 1.0 / (1.0 + 4.0 * head);
    let mean = (tokens.ln().max(f64::MIN_POSITIVE) / tokens).sqrt();
    if tokens <= 1.0 { 1.0 } else { 1.0 / ((1.0 - sharp) * mean.ln()).exp() }
}
