//! The weights that end a component: those whose size is that of what the component adds.
//!
//! *In*: the function of a body, with the values that lowering marks as outputs of components.
//! *Out*: the names of weights that only sums, copies and factors of tokens follow. *Promise*:
//! nothing is decided by the name or the part of a weight. In a product of two values that tokens
//! give, only one is followed, so that no output has the factor of depth twice.

use crate::build::Marks;
use crate::ir::{Binary, Function, Node, Op, Unary, Value};
use std::collections::HashSet;

/// The weights that end the component of that name in a function.
pub(super) fn ends(f: &Function, marks: &Marks, component: &str, still: &[bool]) -> HashSet<String> {
    let output = format!("{component}.out");
    let again = format!("{output}.");
    let outputs = marks.points.iter().filter(|(name, _)| *name == output || name.starts_with(&again));
    let back = Back { f, still };
    let mut found = HashSet::new();
    for (_, v) in outputs {
        back.from(*v, &mut found);
    }
    found
}

struct Back<'f> {
    f: &'f Function,
    still: &'f [bool],
}

impl Back<'_> {
    fn node(&self, v: Value) -> Option<&Node> {
        self.f.nodes.iter().find(|node| node.results().any(|r| r == v))
    }

    /// All weights that a value is made of.
    fn weights(&self, v: Value, found: &mut HashSet<String>) {
        match (self.f.params.get(v.index()), self.node(v)) {
            (Some(port), _) => {
                found.insert(port.name.clone());
            }
            (None, Some(node)) => node.inputs.iter().for_each(|input| self.weights(*input, found)),
            (None, None) => {}
        }
    }

    /// The weights that end a value, if any; whether there are.
    fn from(&self, v: Value, found: &mut HashSet<String>) -> bool {
        let still = |v: &Value| self.still[v.index()];
        let before = found.len();
        if still(&v) {
            // A term of weights alone: a bias.
            self.weights(v, found);
            return found.len() > before;
        }
        let Some(node) = self.node(v) else { return false };
        let all = |found: &mut HashSet<String>| {
            let each = node.inputs.iter().map(|input| self.from(*input, found));
            each.fold(false, |any, own| any | own)
        };
        // Of factors the first that ends in weights.
        let first = |found: &mut HashSet<String>| {
            let tokens = node.inputs.iter().filter(|input| !still(input));
            tokens.into_iter().any(|input| self.from(*input, found))
        };
        let by_weights = |found: &mut HashSet<String>| {
            node.inputs.iter().filter(|input| still(input)).for_each(|input| self.weights(*input, found));
            found.len() > before
        };
        match &node.op {
            Op::Binary(Binary::Add | Binary::Sub) | Op::Concat(_) => all(found),
            Op::Unary(Unary::Neg)
            | Op::StopGradient
            | Op::Cast(_)
            | Op::Reduce(_)
            | Op::Reshape(_)
            | Op::Split(_)
            | Op::Arrange(_)
            | Op::Shift(_)
            | Op::Running(_)
            | Op::Rope(_)
            | Op::Keep => self.from(node.inputs[0], found),
            // After a norm its gain; else a gain changes nothing about what ends the value.
            Op::Binary(Binary::Mul) => first(found) || by_weights(found),
            Op::Binary(Binary::Div | Binary::Where) => self.from(node.inputs[0], found),
            Op::Contract(_) | Op::Grouped(_) | Op::ByHead(_) | Op::Conv(_) => {
                by_weights(found) || first(found)
            }
            Op::Attention(_) | Op::DepthAttention(_) => {
                node.inputs.get(2).is_some_and(|values| self.from(*values, found))
            }
            Op::Gather | Op::Combine | Op::TakeTokens | Op::PutTokens(_) | Op::CacheTake | Op::Append => {
                first(found)
            }
            // Not in proportion to what they are given, or to one of several.
            Op::Binary(Binary::Max)
            | Op::Unary(_)
            | Op::Rms(_)
            | Op::Softmax
            | Op::LinearAttention(_)
            | Op::Recurrence(_)
            | Op::Embed
            | Op::Pick
            | Op::Constant(_)
            | Op::RmsGrad(_)
            | Op::SoftmaxGrad
            | Op::Zeros(_)
            | Op::GroupedOuter(_)
            | Op::Route(_)
            | Op::Group(_)
            | Op::RoundGroups(_)
            | Op::PickGrad(_)
            | Op::CombineGrad
            | Op::CombineGates
            | Op::AddCounts
            | Op::ChooseKeys(_)
            | Op::KeyMass(_)
            | Op::KeyScores(_)
            | Op::KeyScoresGrad(_)
            | Op::TopTokens(_)
            | Op::Decide(_)
            | Op::KeepInts(_)
            | Op::Numbers
            | Op::Runs(_)
            | Op::Admit
            | Op::ConvGrad(_)
            | Op::RecurrenceGrad(_)
            | Op::LinearAttentionGrad(_)
            | Op::AttentionGrad(_)
            | Op::Number
            | Op::ReadSources(_)
            | Op::ReadSourcesGrad(_)
            | Op::CacheWrite
            | Op::ShiftState
            | Op::Fp8(_)
            | Op::DepthAttentionGrad(_)
            | Op::EmbedGrad(_)
            | Op::CrossEntropy
            | Op::CrossEntropyGrad
            | Op::HeadLoss(_)
            | Op::HeadLossGrad(_) => false,
        }
    }
}
