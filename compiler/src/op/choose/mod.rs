//! The blocks of keys that queries read: a choice by scores.

mod cuda;
pub mod kernel;

use super::attention::keys::{K, Masked, Q, WEIGHTS, lists};
use super::attention::{Mask, Visible};
use super::*;
use std::cmp::Ordering;
use std::sync::LazyLock;

/// `(q[b, t, H, d], k[b, s, G, d], mask operands, weights[b, t, H]?) -> chosen i32[b, t, C, n]`:
/// for each list of `H/C` adjacent heads the numbers of at most `n` blocks in increasing order, -1
/// for the rest; what [`Among`](super::attention::Among) reads. Operands of the mask are those of
/// [`Attention`], whose `every` is the tokens of a block: only keys at ends of blocks have a score,
/// of the block that ends there, which is complete.
///
/// The last `near` blocks up to the query's own are chosen whatever their scores, then the `first`
/// ones, then those of the largest scores; ties go to the lower number. A query that sees nothing
/// chooses nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChooseKeys {
    /// How keys are seen, and the scale of products.
    pub seen: Attention,
    /// How products of heads become the score of a list.
    pub measure: Measure,
    /// Whether heads have weights in the sum.
    pub weighed: bool,
    /// Blocks up to the query's own that are always chosen.
    pub near: u64,
    /// Blocks from the beginning on that are always chosen.
    pub first: u64,
    /// The dimension of lists.
    pub lists: Dim,
    /// The dimension of the blocks of a list.
    pub count: Dim,
}

/// How scaled products of heads become terms of a score, which is their sum over the heads of a
/// list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Measure {
    /// As they are.
    #[default]
    Products,
    /// `max(s, 0)`
    Relu,
    /// The softmax over all keys that have a score.
    Softmax,
}

impl Measure {
    const ALL: [Measure; 3] = [Measure::Products, Measure::Relu, Measure::Softmax];

    /// Its number, which kernels have.
    fn number(self) -> usize {
        Measure::ALL.iter().position(|m| *m == self).unwrap_or(0)
    }
}

static OPERANDS: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| lists(&[Q, K], [&[], &[WEIGHTS]]));

/// Blocks that one query chooses from.
struct Scored {
    /// Complete blocks and their scores, in the order of their numbers.
    blocks: Vec<(i32, f64)>,
    /// The query's own block, where it sees something.
    own: Option<i32>,
}

/// A block with a score, among others.
pub trait Ranked: Copy {
    /// Its number.
    fn number(&self) -> i32;

    /// The larger score comes first, then the smaller number.
    fn order(&self, other: &Self) -> Ordering;
}

impl Ranked for (i32, f64) {
    fn number(&self) -> i32 {
        self.0
    }

    fn order(&self, other: &Self) -> Ordering {
        other.1.total_cmp(&self.1).then(self.0.cmp(&other.0))
    }
}

/// A block with a score in f32, one number that is the larger the earlier it comes: a choice among
/// thousands compares nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank(u64);

impl Rank {
    /// Of the number of a block, and its score.
    pub fn new(number: i32, score: f32) -> Self {
        // Ordered as `f32::total_cmp` does it.
        let bits = score.to_bits();
        let ordered = bits ^ if bits >> 31 == 0 { 1 << 31 } else { u32::MAX };
        Rank((u64::from(ordered) << 32) | u64::from(!(number as u32)))
    }
}

impl Ranked for Rank {
    fn number(&self) -> i32 {
        !(self.0 as u32) as i32
    }

    fn order(&self, other: &Self) -> Ordering {
        other.0.cmp(&self.0)
    }
}

/// The blocks that are chosen of `count`: forced ones, then the largest scores.
pub fn chosen_of<R: Ranked>(own: i32, near: u64, first: u64, count: usize, blocks: &[R]) -> Vec<i32> {
    let mut list: Vec<i32> = (0..=own).rev().take(near as usize).take(count).collect();
    for block in (0..=own).take(first as usize) {
        if list.len() < count && !list.contains(&block) {
            list.push(block);
        }
    }
    let mut rest: Vec<R> = blocks.iter().filter(|block| !list.contains(&block.number())).copied().collect();
    let left = count - list.len();
    if left < rest.len() {
        // The order among those that are chosen is no matter, so that nothing is sorted.
        rest.select_nth_unstable_by(left, R::order);
        rest.truncate(left);
    }
    list.extend(rest.into_iter().map(|block| block.number()));
    list.sort_unstable();
    list
}

impl ChooseKeys {
    /// The first operand of the mask.
    pub const MASK: usize = 2;

    /// The number of the weights among the operands.
    pub fn weights(&self) -> usize {
        ChooseKeys::MASK + self.seen.masks()
    }

    fn block(&self) -> u64 {
        self.seen.every.unwrap_or(1).max(1)
    }

    /// The scores of sequence `b`, query `i`, list `c` of `lists`; `dot` makes a product.
    fn scored(
        &self,
        x: &[&Tensor],
        [b, i, c, lists]: [usize; 4],
        dot: &mut dyn FnMut(&[f64], &[f64]) -> f64,
    ) -> Scored {
        let (q, k) = (x[0], x[1]);
        let [t, heads, s, groups, d] = [q.dims[1], q.dims[2], k.dims[1], k.dims[2], q.dims[3]];
        let visible =
            Visible::new(&self.seen, [t, s], |n, size| &x[ChooseKeys::MASK + n].ints()[b * size..][..size]);
        let keys: Vec<usize> = (0..s).filter(|&j| visible.sees(i, j)).collect();
        let mut sums = vec![0.0; keys.len()];
        for h in c * heads / lists..(c + 1) * heads / lists {
            let row = (b * t + i) * heads + h;
            let key = |j: usize| ((b * s + j) * groups + h / (heads / groups)) * d;
            let of =
                |j: usize| self.seen.scale * dot(&q.floats()[row * d..][..d], &k.floats()[key(j)..][..d]);
            let products: Vec<f64> = keys.iter().copied().map(of).collect();
            let lse = log_sum_exp(&products);
            let weight = if self.weighed { x[self.weights()].floats()[row] } else { 1.0 };
            for (sum, s) in sums.iter_mut().zip(products) {
                *sum += weight
                    * match self.measure {
                        Measure::Products => s,
                        Measure::Relu => s.max(0.0),
                        Measure::Softmax => (s - lse).exp(),
                    };
            }
        }
        let block = |position: i64| i32::try_from(position as u64 / self.block()).unwrap_or(i32::MAX);
        let mut blocks: Vec<(i32, f64)> =
            keys.iter().map(|&j| block(visible.position(j))).zip(sums).collect();
        blocks.sort_by_key(|(block, _)| *block);
        blocks.dedup_by_key(|(block, _)| *block);
        let query = visible.positions.map_or(i as i64, |(q, _)| q[i].into());
        Scored { blocks, own: (query >= 0).then(|| block(query)) }
    }

    /// By how much the last score that was chosen is above the next, for each list; `chosen` are
    /// the sizes of the result.
    pub(crate) fn margins(&self, x: &[&Tensor], chosen: &[usize]) -> Vec<f64> {
        let &[batch, tokens, lists, count] = chosen else { return vec![] };
        let mut margins = vec![];
        for row in 0..batch * tokens * lists {
            let at = [row / lists / tokens, row / lists % tokens, row % lists, lists];
            let Scored { blocks, own } = self.scored(x, at, &mut inner_product);
            let Some(own) = own else { continue };
            let list = chosen_of(own, self.near, self.first, count, &blocks);
            let free = |block: i32| {
                i64::from(block) + (self.near as i64) <= i64::from(own)
                    && i64::from(block) >= self.first as i64
            };
            let taken = blocks.iter().filter(|(block, _)| free(*block) && list.contains(block));
            let left = blocks.iter().filter(|(block, _)| free(*block) && !list.contains(block));
            let least = taken.map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
            let most = left.map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
            if least.is_finite() && most.is_finite() {
                margins.push(least - most);
            }
        }
        margins
    }
}

impl Payload for ChooseKeys {
    fn blanks() -> Vec<Self> {
        let of = |measure| ChooseKeys { measure, ..ChooseKeys::default() };
        Measure::ALL.map(of).into()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("blocks")?;
        a.integer(self.seen.every.get_or_insert_default())?;
        a.word("choose")?;
        a.dim(&mut self.count)?;
        a.word("lists")?;
        a.dim(&mut self.lists)?;
        a.word("near")?;
        a.integer(&mut self.near)?;
        a.word("first")?;
        a.integer(&mut self.first)?;
        a.word("scale")?;
        a.float(&mut self.seen.scale)?;
        a.word("score")?;
        let mut measure = self.measure.number();
        a.choice(&["products", "relu", "softmax"], &mut measure)?;
        self.measure = Measure::ALL[measure];
        a.flag("weighed", &mut self.weighed)?;
        self.seen.visit_mask(a)
    }
}

impl Operation for ChooseKeys {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "choose_keys",
            operands: &OPERANDS[self.seen.list(self.weighed)],
            results: &["chosen i32[b, t, C, n]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Pairs(self, &self.seen, ChooseKeys::MASK),
            derivative: Derivative::Held(Ties::Keys),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        self.seen.check_keys(x, ChooseKeys::MASK)?;
        let [b, t, heads] = x[0].dims[..3] else { return x.fail("takes q[b, t, heads, d]") };
        let weights = !self.weighed || x[self.weights()] == Type::f32(&[b, t, heads]);
        x.check(weights, "weights are f32[b, t, heads]")?;
        let each = x.size(heads).is_multiple_of(x.size(self.lists));
        x.check(each, "heads must be a multiple of lists")?;
        x.check(self.seen.every.is_some(), "a choice is of blocks of tokens")?;
        x.check(x.size(self.count) > 0, "a list has blocks")?;
        Ok(vec![Type::i32(&[b, t, self.lists, self.count])])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (operands, lists, count) = (e.operands, e.size(self.lists), e.size(self.count));
        let (batch, tokens) = (e.sizes(0)[0], e.sizes(0)[1]);
        let mut out = vec![-1; batch * tokens * lists * count];
        for (row, out) in out.chunks_mut(count.max(1)).enumerate() {
            let at = [row / lists / tokens, row / lists % tokens, row % lists, lists];
            let Scored { blocks, own } = self.scored(operands, at, &mut |a, b| e.dot(a, b));
            if let Some(own) = own {
                let list = chosen_of(own, self.near, self.first, count, &blocks);
                out[..list.len()].copy_from_slice(&list);
            }
        }
        Ok(vec![Data::Int(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let of = Masked::random(&mut case);
        let (d, count) = (case.dim("d"), case.dim("n"));
        let lists = of.lists(&mut case);
        let seen = Attention {
            scale: case.rng.between(0.3, 1.2),
            mask: of.mask,
            segments: of.segments,
            every: Some(1 + case.rng.below(3)),
            ..Attention::default()
        };
        let (near, first) = (case.rng.below(3), case.rng.below(2));
        let weighed = case.rng.once_in(2);
        let Masked { b, t, s, heads, groups, .. } = of;
        let mut inputs = vec![case.floats("q", &[b, t, heads, d]), case.floats("k", &[b, s, groups, d])];
        inputs.extend(of.operands(&mut case));
        if weighed {
            inputs.push(case.floats("weights", &[b, t, heads]));
        }
        case.finish(ChooseKeys { seen, measure: self.measure, weighed, near, first, lists, count }, &inputs)
    }
}

impl Counted for ChooseKeys {
    /// A product for each pair and head, a comparison with each score for each choice.
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        let (batch, queries, keys, heads) = (s.size(0, 0), s.size(0, 1), s.size(1, 1), s.size(0, 2));
        let pairs = match extents.pairs {
            Some(pairs) => Count::from(pairs),
            None if self.seen.mask == Mask::Causal => Count(Some(self.seen.pairs(queries, heads))) * batch,
            None => Count::from(keys.div_ceil(self.block())) * queries * batch,
        };
        let scores = pairs * heads;
        Counts { multiply_adds: scores * s.size(0, LAST), ..s.whole(scores * 2) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores in f32 choose as those in f64 do: zeros of both signs, equal ones, infinite ones,
    /// NaN.
    #[test]
    fn ranks_choose_as_scores_do() {
        let scores = [0.5, -0.0, 0.0, 0.5, -3.0, f32::INFINITY, f32::NAN, f32::NEG_INFINITY, 1e-40, -1e-40];
        let wide: Vec<(i32, f64)> = (0..).zip(scores.map(f64::from)).collect();
        let narrow: Vec<Rank> = (0..).zip(scores).map(|(n, s)| Rank::new(n, s)).collect();
        for count in 1..=scores.len() {
            assert_eq!(chosen_of(9, 1, 1, count, &wide), chosen_of(9, 1, 1, count, &narrow), "{count}");
        }
    }
}
