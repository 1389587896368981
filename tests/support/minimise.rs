//! A smaller specification that still fails.

use dreamc_dsl::spec::*;
use dreamc_dsl::{Spec, Spelling, check, parse, show};

/// Leaves out whatever can be left out, one thing after another, as long as `fails` says that it
/// still does; asked at most `tries` times.
pub fn minimise(spec: &Spec, mut tries: usize, fails: &dyn Fn(&Spec) -> bool) -> Spec {
    let mut best = spec.clone();
    loop {
        let mut still = |spec: &Spec| {
            tries = tries.saturating_sub(1);
            tries > 0 && stands(spec) && fails(spec)
        };
        let Some(smaller) = candidates(&best).into_iter().find(|s| still(s)) else { break best };
        best = smaller;
    }
}

/// Whether the checker accepts a specification: a `mix` needs its `save`.
fn stands(spec: &Spec) -> bool {
    let text = show(spec, Spelling::Yaml);
    parse("smaller.yaml", &text, Spelling::Yaml).is_ok_and(|ast| check(&ast, &[]).is_ok())
}

fn candidates(spec: &Spec) -> Vec<Spec> {
    let mut all = vec![];
    let mut with = |edit: &dyn Fn(&mut Spec)| {
        let mut other = spec.clone();
        edit(&mut other);
        if other != *spec {
            all.push(other);
        }
    };
    for body in bodies(&spec.model.body) {
        if !body.is_empty() {
            with(&|s| s.model.body = body.clone());
        }
    }
    let used = format!("{:?}", spec.model.body);
    for name in spec.model.components.keys() {
        if !used.contains(&format!("{name:?}")) {
            with(&|s| {
                s.model.components.shift_remove(name);
            });
        }
        for edit in COMPONENT {
            with(&|s| edit(&mut s.model.components[name]));
        }
    }
    for edit in SPEC {
        with(&|s| edit(s));
    }
    all
}

const SPEC: [fn(&mut Spec); 15] = [
    |s| s.train.z_loss = 0.0,
    |s| s.data = None,
    |s| s.data.iter_mut().for_each(|d| d.document_mask = false),
    |s| s.model.tie = false,
    |s| s.model.embed_scale = None,
    |s| s.model.logit_softcap = None,
    |s| s.model.norm = Norm::default(),
    |s| s.train.groups = vec![],
    |s| s.train.random_depth = None,
    |s| s.train.clip = None,
    |s| s.train.schedule = Schedule::Constant,
    |s| s.train.sequence = None,
    |s| s.train.accumulate = 1,
    |s| s.model.hidden = s.model.hidden.min(2),
    |s| s.model.context = 16,
];

fn attention(c: &mut Component, edit: impl Fn(&mut Attention)) {
    if let Component::Sequence(a) | Component::Depth(a) = c {
        edit(a);
    }
}

fn router(c: &mut Component, edit: impl Fn(&mut Router)) {
    match c {
        Component::Sequence(a) | Component::Depth(a) => {
            a.projection.iter_mut().for_each(|p| edit(&mut p.router));
        }
        Component::Experts(e) => edit(&mut e.router),
        Component::Mlp(_) | Component::Defined(_) => {}
    }
}

const COMPONENT: [fn(&mut Component); 38] = [
    |c| attention(c, |a| a.kv_from = None),
    |c| attention(c, |a| a.value_residual = false),
    |c| attention(c, |a| a.latent = None),
    |c| attention(c, |a| a.depth_keys = false),
    |c| match c {
        Component::Sequence(a) | Component::Depth(a) => a.depth_stream = None,
        Component::Experts(e) => e.depth_stream = false,
        Component::Mlp(m) => m.depth_stream = false,
        Component::Defined(_) => {}
    },
    |c| attention(c, |a| a.projection = None),
    |c| attention(c, |a| a.projection.iter_mut().for_each(|p| p.shared = false)),
    |c| attention(c, |a| a.projection.iter_mut().for_each(|p| p.count = None)),
    |c| attention(c, |a| a.rope = None),
    |c| attention(c, |a| a.rope.iter_mut().for_each(|r| r.scaling = None)),
    |c| attention(c, |a| a.rope.iter_mut().for_each(|r| r.share = 1.0)),
    |c| attention(c, |a| a.sink = false),
    |c| attention(c, |a| a.gate = None),
    |c| attention(c, |a| a.bias = None),
    |c| attention(c, |a| a.window = None),
    |c| attention(c, |a| a.softcap = None),
    |c| attention(c, |a| a.scale = None),
    |c| attention(c, |a| a.qk_norm = QkNorm::None),
    |c| attention(c, |a| a.post_norm = false),
    |c| match c {
        Component::Sequence(a) | Component::Depth(a) => a.pre_norm = true,
        Component::Experts(e) => e.pre_norm = true,
        Component::Mlp(m) => m.pre_norm = true,
        Component::Defined(d) => d.pre_norm = true,
    },
    |c| {
        if let Component::Experts(e) = c {
            e.biased = false;
            e.round = None;
        }
    },
    |c| attention(c, |a| (a.heads, a.kv_heads) = (1, 1)),
    |c| attention(c, |a| (a.head_size, a.latent) = (2, None)),
    |c| router(c, |r| r.form = RouterForm::Linear),
    |c| router(c, |r| r.balance = None),
    |c| router(c, |r| r.load_balance_loss = 0.0),
    |c| router(c, |r| r.z_loss = 0.0),
    |c| router(c, |r| r.normalise = false),
    |c| router(c, |r| r.scale = 1.0),
    |c| router(c, |r| r.score = Score::Sigmoid),
    |c| router(c, |r| r.select = Select::Logit),
    |c| router(c, |r| (r.groups, r.topk_groups) = (1, 1)),
    |c| {
        if let Component::Experts(e) = c {
            e.shared_gate = false;
        }
    },
    |c| {
        if let Component::Experts(e) = c {
            (e.shared, e.shared_gate) = (0, false);
        }
    },
    |c| {
        if let Component::Experts(e) = c {
            (e.noop, e.active) = (0, e.active.min(e.count));
        }
    },
    |c| {
        if let Component::Experts(e) = c {
            (e.count, e.active) = (2, 1);
            (e.router.groups, e.router.topk_groups) = (1, 1);
        }
    },
    |c| match c {
        Component::Experts(e) => (e.intermediate, e.post_norm) = (1, false),
        Component::Mlp(m) => (m.intermediate, m.post_norm) = (1, false),
        _ => {}
    },
    |c| match c {
        Component::Experts(Experts { activation, .. }) | Component::Mlp(Mlp { activation, .. }) => {
            *activation = Activation::Gelu;
        }
        _ => {}
    },
];

/// Bodies with something less.
fn bodies(items: &[Item]) -> Vec<Vec<Item>> {
    let mut all = vec![];
    for i in 0..items.len() {
        let with = |new: Vec<Item>| [&items[..i], &new, &items[i + 1..]].concat();
        all.push(with(vec![]));
        match &items[i] {
            Item::Statement(_) => {}
            Item::Layer(e) => all.extend(exprs(e).into_iter().map(|e| with(vec![Item::Layer(e)]))),
            Item::Repeat { count, items } => {
                all.push(with(items.clone()));
                let again = |items| Item::Repeat { count: *count, items };
                all.extend(bodies(items).into_iter().filter(|b| !b.is_empty()).map(|b| with(vec![again(b)])));
                if *count > 1 {
                    all.push(with(vec![Item::Repeat { count: count - 1, items: items.clone() }]));
                }
            }
            Item::Recur { count, residual_norm, items, looping } => {
                all.push(with(items.clone()));
                let recur = |count, residual_norm, items| Item::Recur {
                    count,
                    residual_norm,
                    items,
                    looping: looping.clone(),
                };
                if !looping.is_plain() {
                    let looping = Default::default();
                    let (count, residual_norm, items) = (*count, *residual_norm, items.clone());
                    all.push(with(vec![Item::Recur { count, residual_norm, items, looping }]));
                }
                let inner = bodies(items).into_iter().filter(|b| !b.is_empty());
                all.extend(inner.map(|b| with(vec![recur(*count, *residual_norm, b)])));
                if *residual_norm {
                    all.push(with(vec![recur(*count, false, items.clone())]));
                }
                if *count > 1 {
                    all.push(with(vec![recur(count - 1, *residual_norm, items.clone())]));
                }
            }
        }
    }
    all
}

/// Compositions with something less.
fn exprs(e: &Expr) -> Vec<Expr> {
    match e {
        Expr::Component(_) | Expr::Norm => vec![],
        Expr::Sequential(terms) | Expr::Parallel(terms) => {
            let sequential = matches!(e, Expr::Sequential(_));
            let join = |terms: Vec<Expr>| {
                let mut flat = vec![];
                for term in terms {
                    match term {
                        Expr::Sequential(inner) if sequential => flat.extend(inner),
                        Expr::Parallel(inner) if !sequential => flat.extend(inner),
                        term => flat.push(term),
                    }
                }
                match flat.len() {
                    1 => flat.remove(0),
                    _ if sequential => Expr::Sequential(flat),
                    _ => Expr::Parallel(flat),
                }
            };
            let mut all = terms.clone();
            for i in 0..terms.len() {
                all.push(join([&terms[..i], &terms[i + 1..]].concat()));
                for smaller in exprs(&terms[i]) {
                    all.push(join([&terms[..i], &[smaller], &terms[i + 1..]].concat()));
                }
            }
            all
        }
        Expr::Skip(skip, inner) => {
            let mut all = vec![(**inner).clone()];
            let around = |e: Expr| Expr::Skip(skip.clone(), Box::new(e));
            all.extend(exprs(inner).into_iter().map(around));
            let plainer = [
                Skip { input: SkipInput::Hidden, level: SkipLevel::Token, ..(**skip).clone() },
                Skip { merge: false, ..(**skip).clone() },
                Skip { kv: SkipKv::Processed, ..(**skip).clone() },
                Skip {
                    each_pass: false,
                    gate: SkipGate::Score,
                    gate_scale: 1.0,
                    whole: false,
                    ..(**skip).clone()
                },
                Skip { scorer: Scorer::PLAIN, ..(**skip).clone() },
                Skip { nested: false, capacities: vec![], ..(**skip).clone() },
            ];
            let plainer = plainer.into_iter().filter(|plainer| *plainer != **skip);
            all.extend(plainer.map(|plainer| Expr::Skip(Box::new(plainer), inner.clone())));
            all
        }
    }
}
