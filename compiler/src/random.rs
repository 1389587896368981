//! A small random model over all axes of the language, for tests of whatever must hold for every spec.
//!
//! *In*: a seed. *Out*: a [`Model`] that the checker would accept, with tiny sizes, sizes of one and odd ones included.
//! A seed means one model for ever; tests print it.

use crate::ir::random::Rng;
use dreamc_dsl::spec::*;
use indexmap::IndexMap;

/// The model of that seed.
pub fn model(seed: u64) -> Model {
    let mut r = Rng::new(seed ^ 0x6d6f_6465_6c00);
    let mut components = IndexMap::new();
    let hidden = r.below(12) + 1;
    for name in ["sa", "local", "da", "ea", "mlp"] {
        components.insert(name.to_string(), component(&mut r, name));
    }
    let mut budget = 9;
    let items = 1 + r.below(3);
    let body = (0..items).map(|_| item(&mut r, 2, &mut budget)).collect();
    Model {
        name: format!("random-{seed}"),
        vocab: 2 + r.below(12),
        hidden,
        context: 16,
        tie: r.once_in(3),
        embed_scale: [None, None, Some(EmbedScale::SqrtHidden), Some(EmbedScale::Value(0.7))]
            [r.below(4) as usize],
        logit_softcap: r.once_in(4).then_some(3.0),
        norm: Norm { eps: 1e-6, unit_offset: r.once_in(4) },
        components,
        body,
    }
}

fn component(r: &mut Rng, name: &str) -> Component {
    match name {
        "ea" => {
            let count = 1 + r.below(5);
            let noop = if r.once_in(4) { 1 + r.below(2) } else { 0 };
            Component::Experts(Experts {
                count,
                active: 1 + r.below(count + noop),
                intermediate: 1 + r.below(6),
                activation: activation(r),
                noop,
                router: router(r, true),
                post_norm: r.once_in(5),
            })
        }
        "mlp" => Component::Mlp(Mlp {
            intermediate: 1 + r.below(7),
            activation: activation(r),
            post_norm: r.once_in(4),
        }),
        _ => {
            let kv_heads = 1 + r.below(2);
            let rope = (!r.once_in(5)).then(|| Rope {
                base: [500.0, 10000.0][r.below(2) as usize],
                half_reversed: name == "da",
                scaling: (name != "da" && r.once_in(4)).then_some(RopeScaling {
                    factor: 8.0,
                    low: 1.0,
                    high: 4.0,
                    original_context: 32.0,
                }),
            });
            let attention = Attention {
                heads: kv_heads * (1 + r.below(3)),
                kv_heads,
                head_size: 2 * (1 + r.below(3)),
                rope,
                qk_norm: [QkNorm::None, QkNorm::Rms, QkNorm::RmsAll][r.below(3) as usize],
                window: (name == "local").then(|| 1 + r.below(5)),
                softcap: r.once_in(4).then_some(2.0),
                scale: r.once_in(4).then_some(0.3),
                post_norm: r.once_in(4),
                projection: (!r.once_in(4)).then(|| Projection {
                    count: r.once_in(3).then(|| 1 + r.below(4)),
                    shared: !r.once_in(3),
                    router: router(r, false),
                }),
            };
            if name == "da" { Component::Depth(attention) } else { Component::Sequence(attention) }
        }
    }
}

fn activation(r: &mut Rng) -> Activation {
    // Relu has kinks, which finite differences meet too often.
    [Activation::Swiglu, Activation::Geglu, Activation::Gelu][r.below(3) as usize]
}

fn router(r: &mut Rng, normalise: bool) -> Router {
    let rope = Rope { base: 500.0, half_reversed: true, scaling: None };
    Router {
        form: if r.once_in(3) {
            RouterForm::Linear
        } else {
            RouterForm::LowRank { query: 2 * (1 + r.below(3)), rope: (!r.once_in(3)).then_some(rope) }
        },
        score: if r.once_in(3) { Score::Softmax } else { Score::Sigmoid },
        select: if r.once_in(3) { Select::Score } else { Select::Logit },
        normalise: normalise && !r.once_in(3),
        scale: if r.once_in(4) { 2.5 } else { 1.0 },
        balance: (!r.once_in(4)).then(|| Balance {
            rate: 1e-2,
            target: if r.once_in(2) { BalanceTarget::Median } else { BalanceTarget::Mean },
            law: if r.once_in(3) { BalanceLaw::Proportional } else { BalanceLaw::Sign },
        }),
        load_balance_loss: if r.once_in(4) { 0.02 } else { 0.0 },
        z_loss: if r.once_in(4) { 0.01 } else { 0.0 },
    }
}

/// An item of at most `budget` applications.
fn item(r: &mut Rng, depth: u64, budget: &mut u64) -> Item {
    if depth == 0 || *budget < 2 || r.once_in(2) {
        *budget = budget.saturating_sub(1);
        let mut names = vec!["sa", "local", "da", "ea", "mlp"];
        return Item::Layer(expr(r, &mut names, 3, None));
    }
    let count = 1 + r.below(3).min(*budget - 1);
    let mut inside = *budget / count;
    let items = (0..1 + r.below(2)).map(|_| item(r, depth - 1, &mut inside)).collect();
    *budget = budget.saturating_sub(count);
    if r.once_in(2) {
        Item::Repeat { count, items }
    } else {
        Item::Recur { count, residual_norm: !r.once_in(4), items }
    }
}

/// A composition over some of the names, each used at most once; not of the kind `outer` at the top.
fn expr(r: &mut Rng, names: &mut Vec<&str>, depth: u64, outer: Option<bool>) -> Expr {
    if depth == 0 || names.len() < 2 || r.once_in(3) {
        return Expr::Component(names.remove(r.below(names.len() as u64) as usize).to_string());
    }
    let parallel = outer.map_or_else(|| r.once_in(2), |o| !o);
    let mut terms = vec![];
    for _ in 0..2 + r.below(2) {
        if !names.is_empty() {
            terms.push(expr(r, names, depth - 1, Some(parallel)));
        }
    }
    match (terms.len(), parallel) {
        (1, _) => terms.remove(0),
        (_, true) => Expr::Parallel(terms),
        (_, false) => Expr::Sequential(terms),
    }
}
