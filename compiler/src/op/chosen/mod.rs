//! Chosen keys as losses read them: how much attention reads of each, and the scores of their
//! choice.
//!
//! *Promise*: memory and work are in proportion to the keys of a list, not to all keys.

pub mod kernel;

use super::attention::keys::{K, LSE, Masked, Q, WEIGHTS, lists};
use super::attention::{Among, Chosen, Mask, Visible};
use super::*;
use std::sync::LazyLock;

/// The score of a token that no list has: its exponential is zero.
pub use dreamc_dsl::define::graph::ABSENT;

/// `(q[b, t, H, d], k[b, s, G, d], lse[b, t, H], mask operands) -> mass[b, t, C, n]`: the weights
/// by which the heads of a list read each of its blocks, `Σ_h Σ_j e^(scale · q_h · k_j - lse_h)`
/// over the keys `j` of the block that the query sees; zero of a number that is no block. `lse` is
/// that of the attention, whose `among` there is; it has no program, soft-cap or dropout.
///
/// No gradient passes: it is what a loss compares with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyMass(pub Attention);

/// `(q[b, t, H, d], k[b, s, G, d], mask operands, weights[b, t, H]?) -> scores[b, t, C, n]`: the
/// scores by which [`ChooseKeys`] gave lists of tokens, `Σ_h w_h · m(scale · q_h · k_j)` over the
/// heads of a list, `m` being `max(s, 0)` or nothing; [`ABSENT`] where a list has no key that the
/// query sees. Lists are in increasing order, -1 for the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyScores {
    /// How keys are seen, the lists, and the scale of products.
    pub seen: Attention,
    /// Whether products below zero count as zero.
    pub relu: bool,
    /// Whether heads have weights in the sum.
    pub weighed: bool,
}

/// The operands of [`KeyScores`] and `d[b, t, C, n]`, the cotangent of its result, `-> dq, dk,
/// dweights?`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyScoresGrad(pub KeyScores);

const D: &str = "d[b, t, C, n]";

static MASS: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| lists(&[Q, K, LSE], [&[], &[]]));
static SCORES: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| lists(&[Q, K], [&[], &[WEIGHTS]]));
static BACKWARD: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| lists(&[Q, K], [&[D], &[WEIGHTS, D]]));

impl KeyMass {
    /// The first operand of the mask.
    pub const MASK: usize = 3;
}

impl KeyScores {
    /// The first operand of the mask.
    pub const MASK: usize = 2;

    /// The number of the weights among the operands.
    pub fn weights(&self) -> usize {
        KeyScores::MASK + self.seen.masks()
    }
}

/// A key that a list reads: the row of the query's list among all, the place in it, and the rows of
/// a head's query and key.
struct Read {
    entry: usize,
    head: usize,
    key: usize,
}

/// The keys that queries read, the mask's operands being those from number `mask` on.
fn reads(seen: &Attention, x: &[&Tensor], mask: usize) -> Vec<Read> {
    let (q, k) = (&x[0].dims, &x[1].dims);
    let [batch, t, heads, s, groups] = [q[0], q[1], q[2], k[1], k[2]];
    let Some(among) = seen.among else { return vec![] };
    let [lists, count] = [among.heads as usize, among.count as usize];
    let mut found = vec![];
    for (b, i) in (0..batch).flat_map(|b| (0..t).map(move |i| (b, i))) {
        let visible = Visible::new(seen, [t, s], |n, size| &x[mask + n].ints()[b * size..][..size]);
        let chosen = Chosen::of_sequence(among, [b, t], heads, x[mask + seen.chosen()].ints());
        for h in 0..heads {
            let (c, list) = (chosen.number(h), chosen.list(i, h));
            for (n, &block) in list.iter().enumerate().filter(|(_, block)| **block >= 0) {
                let of_block = |j: &usize| {
                    visible.sees(i, *j) && visible.position(*j) as u64 / among.block == block as u64
                };
                for j in (0..s).filter(of_block) {
                    found.push(Read {
                        entry: ((b * t + i) * lists + c) * count + n,
                        head: (b * t + i) * heads + h,
                        key: (b * s + j) * groups + h / (heads / groups),
                    });
                }
            }
        }
    }
    found
}

/// Queries, keys and the mask's operands fit; the type of a number for each block of each list.
fn check(seen: &Attention, x: &Operands, mask: usize) -> Result<Type, TypeError> {
    seen.check_keys(x, mask)?;
    let plain = seen.program.is_none() && seen.softcap.is_none() && seen.dropout.is_none();
    x.check(plain, "chosen keys have neither a program, a soft-cap nor dropout")?;
    x.check(seen.among.is_some(), "takes keys that were chosen")?;
    Ok(Type::f32(&x[mask + seen.chosen()].dims))
}

/// `products` products and `elementwise` operations for each key that a head reads.
fn counts(seen: &Attention, s: &Shapes, extents: &Extents, products: u64, elementwise: u64) -> Counts {
    let (batch, queries, keys, heads) = (s.size(0, 0), s.size(0, 1), s.size(1, 1), s.size(0, 2));
    let pairs = match extents.pairs {
        Some(pairs) => Count::from(pairs),
        None if seen.mask == Mask::Causal => Count(Some(seen.pairs(queries, heads))) * batch,
        None => Count::from(seen.most_keys(keys)) * queries * batch * seen.times(heads),
    };
    Counts { multiply_adds: pairs * s.size(0, LAST) * products, ..s.whole(pairs * elementwise) }
}

/// A list of keys and its operands, those of the mask apart.
struct Random {
    seen: Attention,
    q: Value,
    k: Value,
    masks: Vec<Value>,
    /// Dimensions of queries without their size, and those of lists.
    rows: Dims,
    lists: Dims,
}

/// Queries, keys, and what `more` adds before the operands of the mask.
fn random(case: &mut Case, block: u64, more: impl Fn(&mut Case, &[Dim])) -> Random {
    let masked = Masked::random(case);
    let Masked { mask, segments, b, t, s, heads, groups } = masked;
    let (d, count) = (case.dim("d"), case.dim("n"));
    let list = masked.lists(case);
    let of = |dim: Dim, case: &Case| case.module.size(dim);
    let among = Among { block, count: of(count, case), heads: of(list, case), own: false };
    let seen = Attention {
        scale: case.rng.between(0.3, 1.2),
        mask,
        segments,
        window: case.rng.once_in(3).then_some(3),
        among: Some(among),
        ..Attention::default()
    };
    let (q, k) = (case.floats("q", &[b, t, heads, d]), case.floats("k", &[b, s, groups, d]));
    more(case, &[b, t, heads]);
    let mut masks = masked.operands(case);
    // Lists in increasing order: each number is as likely as the others, and -1 comes last.
    let lists: Dims = [b, t, list, count].into_iter().collect();
    let mut numbers: Vec<i32> = vec![];
    let (sizes, room) = (case.sizes(&lists), case.module.size(count) as usize);
    for _ in 0..sizes[..3].iter().product() {
        let mut list: Vec<i32> = (0..8).filter(|_| case.rng.once_in(2)).take(room).collect();
        list.resize(room, -1);
        numbers.extend(list);
    }
    let chosen = Tensor::int(&sizes, numbers);
    masks.push(case.tensor("chosen", Binding::Value, Type::i32(&lists), chosen));
    Random { seen, q, k, masks, rows: [b, t, heads].into_iter().collect(), lists }
}

fn attributes(seen: &mut Attention, a: &mut dyn Attributes) -> Parsed<()> {
    let among = seen.among.get_or_insert_default();
    a.word("blocks")?;
    among.attributes(a)?;
    a.word("scale")?;
    a.float(&mut seen.scale)?;
    let (mut windowed, mut ends) = (seen.window.is_some(), seen.every.is_some());
    a.flag("window", &mut windowed)?;
    if windowed {
        a.integer(seen.window.get_or_insert_default())?;
    }
    a.flag("every", &mut ends)?;
    if ends {
        a.integer(seen.every.get_or_insert_default())?;
    }
    seen.visit_mask(a)
}

impl Payload for KeyMass {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        attributes(&mut self.0, a)
    }
}

impl Operation for KeyMass {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "key_mass",
            operands: &MASS[self.0.list(false)],
            results: &["mass[b, t, C, n]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Pairs(self, &self.0, KeyMass::MASK),
            derivative: Derivative::Held(Ties::Copies),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let mass = check(&self.0, x, KeyMass::MASK)?;
        x.check(x[2] == Type::f32(&x[0].dims[..3]), "lse is f32 with the dimensions of q but the last")?;
        Ok(vec![mass])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (q, k, lse, d) = (e.floats(0), e.floats(1), e.floats(2), e.last(0));
        let mut mass = vec![0.0; e.operands[KeyMass::MASK + self.0.chosen()].ints().len()];
        for read in reads(&self.0, e.operands, KeyMass::MASK) {
            let s = self.0.scale * e.dot(&q[read.head * d..][..d], &k[read.key * d..][..d]);
            mass[read.entry] += (s - lse[read.head]).exp();
        }
        Ok(vec![Data::Float(mass)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let block = 1 + case.rng.below(3);
        let random = random(&mut case, block, |case, rows| {
            case.floats("lse", rows);
        });
        let lse = Value(random.k.0 + 1);
        case.finish(KeyMass(random.seen), &[&[random.q, random.k, lse], &random.masks[..]].concat())
    }
}

impl Counted for KeyMass {
    /// Scale, difference, exponential and sum.
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        counts(&self.0, s, extents, 1, 4)
    }
}

impl Payload for KeyScores {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        attributes(&mut self.seen, a)?;
        a.flag("relu", &mut self.relu)?;
        a.flag("weighed", &mut self.weighed)
    }
}

impl KeyScores {
    fn check(&self, x: &Operands) -> Result<Type, TypeError> {
        let scores = check(&self.seen, x, KeyScores::MASK)?;
        let tokens = self.seen.among.is_some_and(|among| among.block == 1);
        x.check(tokens, "scores are of tokens, which are blocks of one")?;
        if self.weighed {
            let weights = x[self.weights()] == Type::f32(&x[0].dims[..3]);
            x.check(weights, "weights are f32[b, t, heads]")?;
        }
        Ok(scores)
    }

    /// The term of a product in a score before its weight, and its slope.
    fn term(&self, s: f64) -> (f64, f64) {
        if self.relu && s <= 0.0 { (0.0, 0.0) } else { (s, 1.0) }
    }

    /// The weight of a head of a query.
    fn weight(&self, e: &Evaluation, head: usize) -> f64 {
        if self.weighed { e.floats(self.weights())[head] } else { 1.0 }
    }

    fn instance(&self, case: &mut Case) -> (KeyScores, Vec<Value>, Random) {
        let random = random(case, 1, |_, _| {});
        let (relu, weighed) = (case.rng.once_in(2), case.rng.once_in(2));
        let mut inputs = [&[random.q, random.k], &random.masks[..]].concat();
        inputs.extend(weighed.then(|| case.floats("weights", &random.rows)));
        (KeyScores { seen: random.seen.clone(), relu, weighed }, inputs, random)
    }
}

impl Operation for KeyScores {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "key_scores",
            operands: &SCORES[self.seen.list(self.weighed)],
            results: &["scores[b, t, C, n]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Pairs(self, &self.seen, KeyScores::MASK),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        Ok(vec![self.check(x)?])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (q, k, d) = (e.floats(0), e.floats(1), e.last(0));
        let mut scores = vec![None; e.operands[KeyScores::MASK + self.seen.chosen()].ints().len()];
        for read in reads(&self.seen, e.operands, KeyScores::MASK) {
            let s = self.seen.scale * e.dot(&q[read.head * d..][..d], &k[read.key * d..][..d]);
            *scores[read.entry].get_or_insert(0.0) += self.weight(e, read.head) * self.term(s).0;
        }
        Ok(vec![Data::Float(scores.into_iter().map(|score| score.unwrap_or(ABSENT)).collect())])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (op, inputs, _) = self.instance(&mut case);
        case.finish(op, &inputs)
    }
}

impl Counted for KeyScores {
    /// Scale, comparison, weight and sum.
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        counts(&self.seen, s, extents, 1, 4)
    }
}

impl Reverse for KeyScores {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let operands = [at.operands(), vec![at.d()?]].concat();
        let grads = at.builder().ops(KeyScoresGrad(self.clone()), &operands);
        let moved = [0, 1].into_iter().chain(self.weighed.then(|| self.weights()));
        for (k, grad) in moved.zip(grads) {
            at.add(k, grad);
        }
        Ok(())
    }
}

impl Payload for KeyScoresGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.0.attributes(a)
    }
}

impl KeyScoresGrad {
    /// The number of the cotangent among the operands.
    pub fn cotangent(&self) -> usize {
        self.0.weights() + usize::from(self.0.weighed)
    }
}

impl Operation for KeyScoresGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "key_scores_grad",
            operands: &BACKWARD[self.0.seen.list(self.0.weighed)],
            results: match self.0.weighed {
                true => &["dq[b, t, H, d]", "dk[b, s, G, d]", "dweights[b, t, H]"],
                false => &["dq[b, t, H, d]", "dk[b, s, G, d]"],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Pairs(self, &self.0.seen, KeyScores::MASK),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let scores = self.0.check(x)?;
        x.check(x[self.cotangent()] == scores, "d has the type of the scores")?;
        let weights = self.0.weighed.then(|| x[self.0.weights()].clone());
        Ok([x[0].clone(), x[1].clone()].into_iter().chain(weights).collect())
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (of, scale, size) = (&self.0, self.0.seen.scale, e.last(0));
        let (q, k, d) = (e.floats(0), e.floats(1), e.floats(self.cotangent()));
        let [mut dq, mut dk] = [q, k].map(|x| vec![0.0; x.len()]);
        let mut dweights = vec![0.0; q.len() / size.max(1)];
        for read in reads(&of.seen, e.operands, KeyScores::MASK) {
            let [head, key] = [read.head, read.key].map(|row| row * size..(row + 1) * size);
            let (term, slope) = of.term(scale * e.dot(&q[head.clone()], &k[key.clone()]));
            let ds = d[read.entry] * of.weight(e, read.head) * slope * scale;
            e.add_scaled(&mut dq[head.clone()], ds, &k[key.clone()]);
            e.add_scaled(&mut dk[key], ds, &q[head]);
            dweights[read.head] += d[read.entry] * term;
        }
        let dweights = of.weighed.then_some(dweights);
        Ok([dq, dk].into_iter().chain(dweights).map(Data::Float).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (op, mut inputs, random) = self.0.instance(&mut case);
        inputs.push(case.floats("d", &random.lists));
        case.finish(KeyScoresGrad(op), &inputs)
    }
}

impl Counted for KeyScoresGrad {
    /// The scores again, and the gradients of queries and keys.
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        let all = counts(&self.0.seen, s, extents, 3, 6);
        Counts { repeated: counts(&self.0.seen, s, extents, 1, 0).multiply_adds, ..all }
    }
}
