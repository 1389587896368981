//! Faults in a loss by which a choice of keys follows attention.

use super::{Edit, Fault, Stage, bypass, insert, lower, nodes, redirect};
use dreamc_compiler::ir::{Binary, Function, Op, Value};
use dreamc_compiler::op::{ChooseKeys, KeyScores, KeyScoresGrad};

/// An indexer with weights of heads, which reads tokens that its loss does not reach; then more
/// sections.
macro_rules! followed {
    ($more:literal) => {
        concat!(
            "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - mlp > own
define:
  mixer:
    settings: {heads: 2, size: 3, few: 4}
    code: |
      q = linear(x, [heads, size])
      k = linear(x, [heads, size])
      v = linear(x, [heads, wide: 4])
      t = stop(x)
      c = choose(linear(t, [three: 3, size]), linear(t, [size]), few, relu, weights = linear(t, [three]), over three)
      y = attend(q, k, v, among = c, window = 6)
      p = mass(y) / heads
      l = scores(c) - stop(maximum(scores(c), over few))
      loss sum(p * (log(max(p, 1e-20)) - l + log(sum(exp(l), over few))), over few)
      return linear(y, [hidden])
",
            $more
        )
    };
}

pub const FOLLOWED: &str = followed!("");

/// The same over documents, one after another in a sequence.
pub const DOCUMENTS: &str = followed!(
    "data: {text: read.txt, tokenizer: read.json}
train: {steps: 6, batch: 4, weight_decay: 0.1, learning_rate: 0.01}
"
);

/// Edits the scores of what was chosen.
fn scores(f: &mut Function, edit: impl Fn(&mut KeyScores, &mut Vec<Value>)) -> bool {
    let mut found = false;
    for node in &mut f.nodes {
        if let Op::KeyScores(scores) = &mut node.op {
            edit(scores, &mut node.inputs);
            found = true;
        }
    }
    found
}

pub fn faults() -> Vec<Fault> {
    let derive = |name, edit: Edit| Fault {
        name,
        spec: FOLLOWED,
        stage: Stage::Derive(edit),
        caught: "gradients",
        place: ["layers.0", "own"],
    };
    vec![
        lower("weights of attention that are not normalised", FOLLOWED, |module, f| {
            let Some(&at) = nodes(f, |op| matches!(op, Op::KeyMass(_))).first() else { return false };
            let mass = f.nodes[at].first;
            let twice = insert(module, f, at + 1, Op::Binary(Binary::Add), vec![mass, mass])[0];
            redirect(f, at + 2, mass, twice);
            true
        }),
        lower("weights of keys before the window", FOLLOWED, |_, f| {
            f.nodes.iter_mut().fold(false, |done, node| match &mut node.op {
                Op::KeyMass(mass) => {
                    mass.0.window = None;
                    true
                }
                _ => done,
            })
        }),
        lower("scores of the nearest tokens alone", FOLLOWED, |_, f| {
            scores(f, |scores, _| scores.seen.window = Some(2))
        }),
        lower("scores of another document's tokens", DOCUMENTS, |_, f| {
            scores(f, |scores, inputs| {
                if scores.seen.segments {
                    inputs.remove(KeyScores::MASK + scores.seen.draws() - 1);
                    scores.seen.segments = false;
                }
            })
        }),
        lower("a loss of keys that were not chosen", FOLLOWED, |module, f| {
            let Some(&at) = nodes(f, |op| matches!(op, Op::ChooseKeys(_))).first() else { return false };
            let Op::ChooseKeys(choice) = &f.nodes[at].op else { return false };
            let (other, inputs) = (ChooseKeys { near: 2, ..choice.clone() }, f.nodes[at].inputs.to_vec());
            let other = insert(module, f, at + 1, Op::ChooseKeys(other), inputs)[0];
            scores(f, |scores, inputs| inputs[KeyScores::MASK + scores.seen.chosen()] = other)
        }),
        lower("scores below zero in a loss", FOLLOWED, |_, f| scores(f, |scores, _| scores.relu = false)),
        lower("an indexer that moves the token it reads", FOLLOWED, |_, f| {
            // The indexer's own stop: that of a value that products with weights read.
            let read = |f: &Function, v: Value| {
                f.nodes.iter().filter(|n| matches!(n.op, Op::Contract(_)) && n.inputs.contains(&v)).count()
            };
            let stops = nodes(f, |op| matches!(op, Op::StopGradient));
            let Some(at) = stops.into_iter().find(|&i| read(f, f.nodes[i].first) > 1) else { return false };
            bypass(f, at, 0)
        }),
        derive("heads of an indexer whose weights stay", |module, f| {
            let Some(&at) = nodes(f, |op| matches!(op, Op::KeyScoresGrad(_))).first() else { return false };
            let dweights = Value(f.nodes[at].first.0 + 2);
            let none = insert(module, f, at + 1, Op::Binary(Binary::Sub), vec![dweights, dweights])[0];
            redirect(f, at + 2, dweights, none);
            true
        }),
        derive("a gradient of scores below zero", |_, f| {
            f.nodes.iter_mut().fold(false, |done, node| match &mut node.op {
                Op::KeyScoresGrad(KeyScoresGrad(scores)) => {
                    scores.relu = false;
                    true
                }
                _ => done,
            })
        }),
    ]
}
