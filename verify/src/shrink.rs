//! Making a specification small without making it another one.
//!
//! *In*: a specification. *Out*: one whose f64 interpretation takes milliseconds. *Promise*:
//! components, their keys, how they are composed, nested and repeated stay. Sizes become the
//! smallest that keep what matters of them (those of components by `Described::shrink`):
//!
//! | size | becomes | keeps |
//! |---|---|---|
//! | hidden, intermediate, query, vocabulary | at most 12, 6, 4, 17 | odd ones odd, ones one |
//! | heads, kv heads | at most 2 kv heads of 3 queries | one kv head for several queries, several kv heads |
//! | lanes, outputs of a source | at most 3 | several lanes, runs that end in the middle of a layer |
//! | head size | at most 4 | two rotary pairs, so that a reversed half is there |
//! | window | at most 3 | shorter than the sequence, where it was |
//! | experts | at most 5, 2 of them active; 2 shared | all active, one expert, no-ops, shared ones |
//! | groups of experts | 2 or 3 of 2 experts | one group for several of them, all groups |
//! | `repeat`, `recur` | at most 2, 3 | loops, several depths of each body |
//! | layers between streams of the past | at most 2, in as many copies as two such streams take | streams that are left out, several that are read |
//! | capacity of `skip` | between 0.3 and 0.8 | some tokens take part and some do not |
//! | context, batch, steps | 12, 4, 6 | |
//! | learning rate, weight decay | at least 1e-2, 0.1 where there is any | what they do is more than rounding |

use dreamc_dsl::Spec;
use dreamc_dsl::spec::*;
use indexmap::IndexMap;

/// Tokens of a sequence.
pub const SEQUENCE: u64 = 9;

/// A model of at most this many parameters is taken as it is where its own weights are used.
pub const WHOLE: u64 = 300_000;

/// A specification made small.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// It, small.
    pub spec: Spec,
    /// Changes, for people.
    pub changes: Vec<String>,
    /// Whether the model was taken as it is.
    pub whole: bool,
}

/// Makes a specification small; one that is to be taken with its own weights, only its batches,
/// where it is small already.
pub fn shrink(spec: &Spec, weights: bool) -> Shrunk {
    let mut small = Spec { weights: None, matching: None, ..spec.clone() };
    let count = dreamc_compiler::count::figures(&spec.model, Precision::F32, 1);
    let whole = weights && count.is_ok_and(|f| f.parameters <= WHOLE.into());
    let mut changes = vec![];
    if whole {
        recipe(&mut small, u64::MAX);
        return Shrunk { spec: small, changes, whole };
    }
    let model = &mut small.model;
    {
        let mut less = |what: &str, value: &mut u64, most: u64| {
            if *value > most {
                changes.push(format!("{what} {value} -> {most}"));
                *value = most;
            }
        };
        less("vocab", &mut model.vocab, 17);
        less("hidden", &mut model.hidden, 12);
        less("context", &mut model.context, SEQUENCE + 3);
        match &mut model.stream {
            Stream::Sum => {}
            // Runs that end and begin within the few layers that are left.
            Stream::Attend { block } => less("stream.attend.block", block, 3),
            Stream::Lanes { count, .. } => less("stream.lanes", count, 3),
        }
        let (sequence, hidden) = (SEQUENCE.min(model.context), model.hidden);
        for (name, component) in &mut model.components {
            let lower: Less = &mut |path, size, most| less(&format!("{name}.{path}"), size, most);
            component.shrink(&mut Small { hidden, context: spec.model.context, sequence, lower });
        }
        let turns = model.has_turns();
        items(&mut model.body, turns, &mut less);
    }
    // Keys that one attention reads of another are of one size.
    let sizes = |c: &Component| c.attention().map(|a| (a.kv_heads, a.head_size));
    let made: Vec<(String, Option<(u64, u64)>)> =
        model.components.iter().map(|(name, c)| (name.clone(), sizes(c))).collect();
    for component in model.components.values_mut() {
        if let Component::Sequence(a) = component
            && let Some((_, Some(size))) = made.iter().find(|(name, _)| a.kv_from.as_ref() == Some(name))
        {
            (a.kv_heads, a.head_size) = *size;
        }
    }
    // So are those of the depth stream.
    let first = model.depth_reader().map(|a| (a.kv_heads, a.head_size));
    for component in model.components.values_mut() {
        if let (Component::Sequence(a), Some(size)) = (component, first)
            && a.depth_stream.is_some()
        {
            let group = a.heads / a.kv_heads.max(1);
            (a.kv_heads, a.head_size) = size;
            a.heads = a.kv_heads * group;
        }
    }
    let outer = model.body.iter().filter_map(|i| match i {
        Item::Recur { count, .. } => Some(*count),
        _ => None,
    });
    let outer = outer.max().unwrap_or(1);
    recipe(&mut small, outer);
    Shrunk { spec: small, changes, whole: false }
}

type Less<'a> = &'a mut dyn FnMut(&str, &mut u64, u64);

/// `turns` says whether passes of every loop have weights of their own.
fn items(all: &mut [Item], turns: bool, less: Less) {
    for item in all {
        match item {
            Item::Layer(e) => expr(e, less),
            Item::Statement(Statement::History(Steps::Every(step) | Steps::Apart(step))) => {
                less("mix history", step, 2);
            }
            Item::Statement(_) => {}
            Item::Repeat { count, items: inner } => {
                items(inner, turns, less);
                less("repeat", count, copies(inner));
            }
            Item::Recur { count, items: inner, looping, .. } => {
                less("recur", count, 3);
                let passes = looping.has_passes() || has_passes(inner) || turns;
                fewer_passes(inner, *count);
                if let Some(rank) = &mut looping.lora {
                    less("lora", rank, 2);
                }
                if let Some(backprop) = &mut looping.backprop {
                    *backprop = (*backprop).min((*count - 1).max(1));
                }
                if let Some(depths) = &mut looping.depth {
                    less("depth.max", &mut depths.max, if passes { *count } else { 4 });
                    depths.min = depths.min.min(depths.max);
                }
                items(inner, turns, less);
            }
        }
    }
}

/// Copies that are kept of items: two, or as many as it takes until a statement in the last of them
/// reads two streams of the past.
fn copies(inner: &[Item]) -> u64 {
    fn layers(items: &[Item]) -> u64 {
        let each = items.iter().map(|item| match item {
            Item::Layer(_) => 1,
            Item::Statement(_) => 0,
            Item::Repeat { count, items } | Item::Recur { count, items, .. } => count * layers(items),
        });
        each.sum()
    }
    fn farthest(items: &[Item]) -> u64 {
        let each = items.iter().map(|item| match item {
            Item::Statement(Statement::History(Steps::Every(step) | Steps::Apart(step))) => 2 * step,
            Item::Layer(_) | Item::Statement(_) => 0,
            Item::Repeat { items, .. } | Item::Recur { items, .. } => farthest(items),
        });
        each.max().unwrap_or(0)
    }
    farthest(inner).div_ceil(layers(inner).max(1)).max(2)
}

/// Leaves out the capacities of passes that there are no more.
fn fewer_passes(all: &mut [Item], count: u64) {
    fn expr(e: &mut Expr, count: u64) {
        match e {
            Expr::Component(_) | Expr::Norm => {}
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter_mut().for_each(|t| expr(t, count)),
            Expr::Skip(skip, inner) => {
                skip.capacities.truncate(count as usize);
                if skip.rule.chosen() {
                    skip.capacities = Skip::chosen_shares(count);
                }
                expr(inner, count);
            }
        }
    }
    for item in all {
        match item {
            Item::Layer(e) => expr(e, count),
            Item::Statement(_) => {}
            Item::Repeat { items, .. } | Item::Recur { items, .. } => fewer_passes(items, count),
        }
    }
}

fn expr(e: &mut Expr, less: Less) {
    match e {
        Expr::Component(_) | Expr::Norm => {}
        Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter_mut().for_each(|t| expr(t, less)),
        Expr::Skip(skip, inner) => {
            if let Some(network) = &mut skip.scorer.network {
                less("network", network, 5);
            }
            match &mut skip.rule {
                SkipRule::TopK { capacity, causal } => {
                    share(capacity);
                    if let Some(CausalRule::Predictor { hidden, .. }) = causal {
                        less("predictor", hidden, 5);
                    }
                }
                SkipRule::Threshold { capacity, .. } => share(capacity),
                SkipRule::DepthChoice { .. } => {}
            }
            if !skip.rule.chosen() {
                skip.capacities.iter_mut().for_each(share);
            }
            expr(inner, less);
        }
    }
}

fn share(capacity: &mut f64) {
    if *capacity < 1.0 {
        *capacity = capacity.clamp(0.34, 0.8);
    }
}

/// A recipe of a few steps that trains everything.
fn recipe(spec: &mut Spec, outer: u64) {
    let train = &mut spec.train;
    train.steps = 6;
    (train.batch, train.accumulate) = (4, 2);
    train.sequence = Some(SEQUENCE.min(spec.model.context));
    train.precision = Precision::F32;
    (train.only, train.freeze) = (vec![], vec![]);
    train.warmup = train.warmup.min(2);
    train.learning_rate = train.learning_rate.max(1e-2);
    if train.weight_decay > 0.0 {
        train.weight_decay = train.weight_decay.max(0.1);
    }
    train.patience = None;
    // The base has the sizes of what is left in proportion; where these are no whole numbers, what
    // is left is the base.
    if let Some(transfer) = &mut train.transfer {
        (transfer.sizes, transfer.passes) = (IndexMap::new(), None);
        if transfer.bad(&spec.model).is_some() {
            transfer.width = spec.model.hidden;
        }
    }
    train.parallel = Parallel::default();
    train.evaluate = Evaluate { every: 0, batches: 1 };
    train.checkpoint = Checkpoint { every: 3, minutes: 0.0, keep: 4, keep_every: 0, best: false };
    if let Some((low, high)) = &mut train.random_depth {
        *high = (*high).min(outer);
        *low = (*low).min(*high);
    }
}
