//! Attention along the sequence.

mod among;
pub(crate) mod cuda;
pub mod formula;
pub mod kernel;
pub(in crate::op) mod keys;
mod listed;
mod parts;
mod scored;

use super::*;
pub use among::{Among, Chosen};
use formula::{Place, Program, Read};
use keys::{K, LSE, Masked, Q, lists};
pub(crate) use scored::{Scored, Scoring};
use std::sync::{Arc, LazyLock};

/// Which keys a query sees, before the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mask {
    /// Keys and queries are the same tokens in order: query `i` sees keys `j <= i`.
    #[default]
    Causal,
    /// Two more operands, `query_positions[b, t]` and `key_positions[b, s]`: the query sees keys of
    /// its position or earlier; a negative key position is no key.
    Positions,
}

/// `(q[b, t, H, d], k[b, s, G, d], v[b, s, G, d], mask operands, x0, …) -> o[b, t, H, d], lse[b, t,
/// H]`. Query head `i` reads key head `i / (H/G)`. A query that sees nothing gives zero, and -inf
/// as `lse`.
///
/// Operands of the mask stand in this order, those that there are: `query_positions i32[b, t]` and
/// `key_positions i32[b, s]` of [`Mask::Positions`], `segments i32[b, t]`, `draws i32[b, t]` of
/// dropout, `chosen i32[b, t, C, n]` of [`Among`]. Operands of the program follow in the order of
/// [`Program::reads`], f32: `[b, t]` or `[b, t, H]` of [`Place::Query`], `[b, s]` or `[b, s, H]` of
/// [`Place::Key`], `[]` or `[H]` of [`Place::All`], `[n]` or `[H, n]` of [`Place::Table`]. A value
/// read at the query and at the key is two operands; where keys are cached, those of [`Place::Key`]
/// are cached as keys are. `i` and `j` of a program are positions where the mask has them.
#[derive(Clone, Debug, Default)]
pub struct Attention {
    /// Factor on `q·k`.
    pub scale: f64,
    /// `c·tanh(s/c)` on the scaled scores.
    pub softcap: Option<f64>,
    /// A query sees keys less than this many positions before it.
    pub window: Option<u64>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Whether the last operand is `segments[b, t]`: only keys of the query's own segment are seen.
    pub segments: bool,
    /// A score in the place of the scaled product, and a mask besides; they read the operands after
    /// those of the mask.
    pub program: Option<Arc<Program>>,
    /// The probability that a weight is zero; the others are scaled up for it. The mask's last
    /// operand is `draws[b, t]`, a random number of every query, from which [`kept`] is computed.
    pub dropout: Option<f64>,
    /// Only keys at the ends of blocks of this many tokens are seen: of position `p` with
    /// `(p + 1) mod every = 0`.
    pub every: Option<u64>,
    /// Only keys of blocks that were chosen are seen.
    pub among: Option<Among>,
}

by_bits!(
    Attention,
    Attention { scale, softcap, window, mask, segments, ref program, dropout, every, among } =>
        (Bits(scale), softcap.map(Bits), window, mask, segments, program, dropout.map(Bits), every, among)
);

/// `(q, k, v, o, lse, do, mask operands, dlse) -> dq, dk, dv`; without the last operand the
/// logarithm of the denominators has no cotangent. With a program `dlse` is always there and the
/// program's operands follow; the results then include the cotangents of the operands that the
/// score can be differentiated by ([`Program::moved`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttentionGrad(pub Attention);

const V: &str = "v[b, s, G, d]";
const O: &str = "o[b, t, H, d]";
const DO: &str = "do[b, t, H, d]";
const DLSE: &str = "dlse[b, t, H]?";
const ALWAYS: &str = "dlse[b, t, H]";
const X: &str = "x0";
const DQ: &str = "dq[b, t, H, d]";
const DK: &str = "dk[b, s, G, d]";
const DV: &str = "dv[b, s, G, d]";

static FORWARD: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| lists(&[Q, K, V], [&[], &[X, "…"]]));
static BACKWARD: LazyLock<Vec<Vec<&'static str>>> =
    LazyLock::new(|| lists(&[Q, K, V, O, LSE, DO], [&[DLSE], &[ALWAYS, X, "…"]]));

impl AttentionGrad {
    /// The first operand of the mask.
    pub const MASK: usize = 6;

    /// Which of `operands` operands is the cotangent of the logarithm of the denominators.
    pub fn log(&self, operands: usize) -> Option<usize> {
        let log = AttentionGrad::MASK + self.0.masks();
        (log < operands).then_some(log)
    }

    /// The first operand of the program.
    pub fn reads(&self) -> usize {
        self.0.reads_at(AttentionGrad::MASK)
    }
}

impl Attention {
    /// The first operand of the mask.
    pub const MASK: usize = 3;

    /// The mask's operands by their numbers among themselves: positions of queries and of keys,
    /// segments.
    pub fn mask_operands(&self) -> (Option<[usize; 2]>, Option<usize>) {
        let positioned = self.mask == Mask::Positions;
        (positioned.then_some([0, 1]), self.segments.then_some(2 * usize::from(positioned)))
    }

    /// How many operands the mask has.
    pub fn masks(&self) -> usize {
        self.chosen() + usize::from(self.among.is_some())
    }

    /// The number of the chosen blocks among the operands of the mask.
    pub fn chosen(&self) -> usize {
        self.draws() + usize::from(self.dropout.is_some())
    }

    /// Whether keys are read one by one: few of them are seen, wherever they are.
    pub fn listed(&self) -> bool {
        self.among.is_some() || self.every.is_some()
    }

    /// The number of the random numbers among the operands of the mask.
    pub fn draws(&self) -> usize {
        2 * usize::from(self.mask == Mask::Positions) + usize::from(self.segments)
    }

    /// The first operand of the program.
    pub fn reads(&self) -> usize {
        self.reads_at(Attention::MASK)
    }

    /// The same where the mask's begin at number `mask`: the gradient's have a cotangent between.
    pub(crate) fn reads_at(&self, mask: usize) -> usize {
        mask + self.masks() + usize::from(mask == AttentionGrad::MASK)
    }

    /// The operands of the program.
    pub fn read(&self) -> &[Read] {
        self.program.as_ref().map_or(&[], |p| &p.reads)
    }

    /// The operands of the program that the score can be differentiated by, in order.
    pub fn moved(&self) -> Vec<usize> {
        self.program.as_ref().map_or(vec![], |p| p.moved())
    }

    /// Whether operands decide which pairs of a query and a key exist.
    pub fn by_operands(&self) -> bool {
        let program = self.program.as_ref().is_some_and(|p| p.masks_by_operands());
        self.mask == Mask::Positions || self.segments || program || self.among.is_some()
    }

    /// Whether the program hides other keys from some heads than from others: pairs are then
    /// counted over all heads, else for one.
    pub fn by_head(&self) -> bool {
        self.among.is_some() || self.program.as_ref().is_some_and(|p| p.masks_by_head())
    }

    /// How often a pair is counted that all of `heads` heads see.
    pub fn times(&self, heads: u64) -> u64 {
        if self.by_head() { heads } else { 1 }
    }

    /// For how many of `heads` heads a counted pair stands.
    pub fn each(&self, heads: u64) -> u64 {
        if self.by_head() { 1 } else { heads }
    }

    /// Pairs of one sequence that order, window and a mask of positions leave, which no operand
    /// decides; the most there can be where operands of the program do.
    pub fn pairs(&self, tokens: u64, heads: u64) -> u128 {
        let all = match (self.every, self.among) {
            (Some(every), _) => among::ends(tokens, self.most_keys(tokens), every),
            (None, Some(among)) => {
                let window = self.window.unwrap_or(tokens);
                (0..tokens).map(|i| u128::from(among.keys(i).min(window))).sum()
            }
            (None, None) => Attention::causal_pairs(tokens, self.window),
        };
        let all = all * u128::from(self.times(heads));
        let Some(program) = self.program.as_ref().filter(|p| !p.masks_by_operands()) else { return all };
        program.pairs(tokens, self.window, self.times(heads)).unwrap_or(all)
    }

    /// The most keys, of `keys`, that the window and a choice leave a query; the ends of blocks are
    /// not counted separately.
    pub fn most_keys(&self, keys: u64) -> u64 {
        let window = self.window.unwrap_or(keys).min(keys);
        self.among.map_or(window, |among| window.min(among.block.saturating_mul(among.count)))
    }

    /// Pairs of a query and a key it sees where no operand decides, of one sequence:
    /// `Σ_i min(i, window)` for `i` from 1 to `tokens`.
    pub fn causal_pairs(tokens: u64, window: Option<u64>) -> u128 {
        let full = u128::from(window.unwrap_or(tokens).min(tokens));
        full * (full + 1) / 2 + (u128::from(tokens) - full) * full
    }

    /// The cap of a scaled score: none of a key that is not there.
    fn cap(&self, score: f64) -> Option<f64> {
        self.softcap.filter(|_| score >= ABSENT)
    }

    /// Scaled products of a query with its keys.
    fn products(&self, e: &mut Evaluation, at: &Query) -> Vec<f64> {
        let product = |&key: &usize| self.scale * e.dot(at.q, &at.k[key..key + at.q.len()]);
        at.keys.iter().map(product).collect()
    }

    /// Scores from them: capped, or as the program says.
    fn scores(&self, at: &Query, products: &[f64]) -> Vec<f64> {
        let of = |(n, &s): (usize, &f64)| match &at.scored {
            Some(scored) => scored.score(n, s),
            None => softcap(self.cap(s), s),
        };
        products.iter().enumerate().map(of).collect()
    }

    /// Adds one query's output to `out`; its log-sum-exp.
    pub(super) fn attend(&self, e: &mut Evaluation, at: &Query, out: &mut [f64]) -> f64 {
        let products = self.products(e, at);
        let scores = self.scores(at, &products);
        let lse = log_sum_exp(&scores);
        for (n, (s, &key)) in scores.iter().zip(&at.keys).enumerate() {
            e.add_scaled(out, (s - lse).exp() * at.factor(n), &at.v[key..key + at.q.len()]);
        }
        lse
    }

    /// Adds one query's gradients to `dq` (its own), `dk` and `dv` (whole), and to those of what
    /// the program reads. `kept` has its output and log-sum-exp, where the forward operation gave
    /// them; cotangents are of both.
    pub(super) fn attend_grad(
        &self,
        e: &mut Evaluation,
        at: &Query,
        kept: Option<(&[f64], f64)>,
        (dout, dlse): (&[f64], f64),
        [dq, dk, dv]: [&mut [f64]; 3],
        dx: &mut [Vec<f64>],
    ) {
        let d = at.q.len();
        let products = self.products(e, at);
        let scores = self.scores(at, &products);
        let lse = kept.map_or_else(|| log_sum_exp(&scores), |(_, lse)| lse);
        let p: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
        let of_value = |(n, &key): (usize, &usize)| at.factor(n) * e.dot(dout, &at.v[key..key + d]);
        let dp: Vec<f64> = at.keys.iter().enumerate().map(of_value).collect();
        let mean = kept.map_or_else(|| inner_product(&p, &dp), |(out, _)| inner_product(out, dout));
        for (j, &key) in at.keys.iter().enumerate() {
            let of_score = p[j] * (dp[j] - mean + dlse);
            let slope = match &at.scored {
                Some(scored) => scored.back(j, products[j], of_score, dx),
                None => softcap_slope(self.cap(scores[j]), scores[j]),
            };
            let ds = of_score * slope * self.scale;
            e.add_scaled(&mut dv[key..key + d], p[j] * at.factor(j), dout);
            e.add_scaled(dq, ds, &at.k[key..key + d]);
            e.add_scaled(&mut dk[key..key + d], ds, at.q);
        }
    }

    /// The query of sequence attention that `row` numbers, in the order of `q`'s rows, with the
    /// keys that it sees; `mask` is the number of the first mask operand.
    fn query<'a>(
        &self,
        e: &Evaluation<'a>,
        scoring: Option<&'a Scoring<'a>>,
        mask: usize,
        row: usize,
    ) -> Query<'a> {
        let (q, k, v, d) = (e.floats(0), e.floats(1), e.floats(2), e.last(0));
        let [t, heads, s, groups] = [e.sizes(0)[1], e.sizes(0)[2], e.sizes(1)[1], e.sizes(1)[2]];
        let (b, i, h) = (row / heads / t, row / heads % t, row % heads);
        let visible = Visible::new(self, [t, s], |k, n| &e.ints(mask + k)[b * n..][..n]);
        let chosen = self.among.map(|a| Chosen::of_sequence(a, [b, t], heads, e.ints(mask + self.chosen())));
        let picked = |j: usize| chosen.as_ref().is_none_or(|c| c.sees(i, h, visible.position(j)));
        let group = h / (heads / groups);
        let sees =
            |j: &usize| visible.sees(i, *j) && picked(*j) && scoring.is_none_or(|s| s.sees([b, i, *j, h]));
        let numbers: Vec<usize> = (0..s).filter(sees).collect();
        let keys = numbers.iter().map(|j| ((b * s + j) * groups + group) * d).collect();
        let factors = self.dropout.map(|p| {
            let draw = e.ints(mask + self.draws())[b * t + i];
            let of = |&j: &usize| if kept(draw, h, j, threshold(p)) { 1.0 / (1.0 - p) } else { 0.0 };
            numbers.iter().map(of).collect()
        });
        let scored = scoring.map(|scoring| Scored::new(scoring, [b, i, h], numbers));
        Query { q: &q[row * d..][..d], k, v, keys, scored, factors }
    }

    /// Counts of products for `pairs` pairs of a query and a key, each of size `d`, all heads
    /// together: two forward (scores, output), five backward (scores again, and the gradients of
    /// scores, queries, keys and values).
    pub(super) fn pairwise(&self, s: &Shapes, pairs: Count, gradient: bool) -> Counts {
        let product = pairs * s.size(0, LAST);
        let capped = u64::from(self.softcap.is_some());
        // Forward: scale, maximum, difference, exponential, sum, and a quotient for each output.
        // Backward: scale, difference, exponential, `p·(dp - c)`, scale, and the inner product of
        // output and cotangent. A cap is a quotient, a tanh and a product, and its slope a product
        // each of three.
        let (work, each_output) = if gradient { (6 + 6 * capped, 2) } else { (5 + 3 * capped, 1) };
        let work = work + self.program.as_ref().map_or(0, |p| p.work(gradient));
        Counts {
            multiply_adds: product * if gradient { 5 } else { 2 },
            repeated: if gradient { product } else { Count::ZERO },
            ..s.whole(pairs * work + s.operand(0) * each_output)
        }
    }

    fn counts(&self, s: &Shapes, extents: &Extents, gradient: bool) -> Counts {
        let (batch, queries, keys, heads) = (s.size(0, 0), s.size(0, 1), s.size(1, 1), s.size(0, 2));
        let pairs = match extents.pairs {
            Some(pairs) => Count::from(pairs),
            None if self.mask == Mask::Causal => Count(Some(self.pairs(queries, heads))) * batch,
            None => {
                let seen = self.most_keys(keys).min(keys.div_ceil(self.every.unwrap_or(1)));
                Count::from(seen) * queries * batch * self.times(heads)
            }
        };
        // A key that no query sees is not read: with one query a key and a pair are the same thing.
        let key_vectors = (Count::from(keys) * batch).min(pairs);
        let key_elements = key_vectors * s.size(1, 2) * s.size(1, 3);
        let mut read = s.operand_bytes(1, key_elements) + s.operand_bytes(2, key_elements);
        for i in (0..s.operands.len()).filter(|i| !(1..3).contains(i)) {
            read = read + s.operand_bytes(i, s.operand(i));
        }
        Counts { read, ..self.pairwise(s, pairs * self.each(heads), gradient) }
    }

    /// The type of what the program reads, the `n`th; tables are as long as they are.
    fn read_type(&self, x: &Operands, read: Read, operand: usize) -> Type {
        let (q, k) = (&x[0].dims, &x[1].dims);
        let head = if read.heads { &q[2..3] } else { &[] };
        let table = x[operand].dims.last().into_iter().copied().collect::<Dims>();
        let dims = match read.place {
            Place::Query => [&q[..2], head].concat(),
            Place::Key => [&k[..2], head].concat(),
            Place::All => head.to_vec(),
            Place::Table => [head, &table].concat(),
        };
        Type::f32(&dims)
    }

    /// The operands of the program, from number `first` on, which are the last ones.
    fn check_reads(&self, x: &Operands, first: usize) -> Result<(), TypeError> {
        if let Some(program) = &self.program {
            program.check().or_else(|problem| x.fail(problem))?;
            x.check(self.softcap.is_none(), "a program has no soft-cap besides: its score says it")?;
        }
        let expected = first + self.read().len();
        if self.program.is_some() && x.len() != expected {
            return x.fail(format!("takes {expected} operands, has {}", x.len()));
        }
        for (n, &read) in self.read().iter().enumerate() {
            let expected = self.read_type(x, read, first + n);
            let table = read.place != Place::Table || !x[first + n].dims.is_empty();
            if x[first + n] != expected || !table {
                return x.fail(format!("x{n} must be {}", x.module.show(&expected)));
            }
        }
        Ok(())
    }

    fn check(&self, x: &Operands, mask: usize) -> Result<(), TypeError> {
        self.check_keys(x, mask)?;
        x.check(x[1] == x[2], "v has the type of k")?;
        if let Some(p) = self.dropout {
            x.check((0.0..1.0).contains(&p), "drops weights with a probability from 0 to 1, not 1")?;
        }
        let plain = self.softcap.is_none() && self.program.is_none();
        x.check(plain || !self.listed(), "keys that are chosen have neither a soft-cap nor a program")
    }

    pub(super) fn random_options(case: &mut Case, mask: Mask, segments: bool) -> Attention {
        Attention {
            scale: case.rng.between(0.3, 1.2),
            softcap: case.rng.once_in(2).then_some(2.0),
            window: case.rng.once_in(2).then_some(1 + case.rng.below(4)),
            mask,
            segments,
            program: None,
            dropout: None,
            every: None,
            among: None,
        }
    }
}

/// Whether dropout keeps the weight of a query and a key for one head: a hash of the query's random
/// number, the head and the key's number against `p · 2³²` ([`threshold`]).
pub fn kept(draw: i32, head: usize, key: usize, threshold: u32) -> bool {
    let mut x = draw as u32 ^ (head as u32).wrapping_mul(0x9e37_79b9);
    x = x.wrapping_add((key as u32).wrapping_mul(0x85eb_ca6b));
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16 >= threshold
}

/// The random number of a query for the attention of that number in an application, from the one
/// that its token has.
pub fn drawn(token: i32, application: u64, number: u64) -> i32 {
    let which = (application as u32).wrapping_mul(0xc2b2_ae35).wrapping_add(number as u32);
    let mut x = token as u32 ^ which.wrapping_add(1).wrapping_mul(0x27d4_eb2f);
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    (x ^ x >> 16) as i32
}

/// The least hash that is kept, for a probability of being dropped.
pub fn threshold(dropout: f64) -> u32 {
    (dropout * 4_294_967_296.0) as u32
}

/// Visits a soft-cap.
pub(super) fn visit_softcap(cap: &mut Option<f64>, a: &mut dyn Attributes) -> Parsed<()> {
    let mut capped = cap.is_some();
    a.flag("softcap", &mut capped)?;
    if capped { a.float(cap.get_or_insert_default()) } else { Ok(()) }
}

/// One query at work.
pub(super) struct Query<'a> {
    pub q: &'a [f64],
    /// All keys and values.
    pub k: &'a [f64],
    pub v: &'a [f64],
    /// Offsets in them of those that the query sees.
    pub keys: Vec<usize>,
    /// Scores of them by the program.
    pub scored: Option<Scored<'a>>,
    /// Factors of the weights by dropout.
    pub factors: Option<Vec<f64>>,
}

impl Query<'_> {
    fn factor(&self, n: usize) -> f64 {
        self.factors.as_ref().map_or(1.0, |factors| factors[n])
    }
}

/// Which pairs of a query and a key of one sequence exist.
#[derive(Clone, Copy, Debug)]
pub struct Visible<'a> {
    /// A query sees keys less than this many positions before it.
    pub window: Option<u64>,
    /// Positions of queries and keys, where they are not their numbers.
    pub positions: Option<(&'a [i32], &'a [i32])>,
    /// Segments of the tokens, where a query sees those of its own alone.
    pub segments: Option<&'a [i32]>,
    /// A query sees only keys at the ends of blocks of this many.
    pub every: Option<u64>,
}

impl<'a> Visible<'a> {
    /// Pairs of `queries` queries and `keys` keys; `mask` gives the integers of a mask operand for
    /// this sequence, and how many.
    pub fn new(
        attention: &Attention,
        [queries, keys]: [usize; 2],
        mask: impl Fn(usize, usize) -> &'a [i32],
    ) -> Self {
        let (positions, segments) = attention.mask_operands();
        Visible {
            window: attention.window,
            positions: positions.map(|[q, k]| (mask(q, queries), mask(k, keys))),
            segments: segments.map(|k| mask(k, queries)),
            every: attention.every,
        }
    }

    /// The position of a key, negative where there is none.
    #[inline(always)]
    pub fn position(&self, key: usize) -> i64 {
        self.positions.map_or(key as i64, |(_, k)| k[key].into())
    }

    /// Whether each pair must be looked at.
    #[inline(always)]
    pub fn by_pair(&self) -> bool {
        self.positions.is_some() || self.segments.is_some()
    }

    /// Whether a query sees a key, by their numbers in the sequence.
    #[inline(always)]
    pub fn sees(&self, query: usize, key: usize) -> bool {
        let (q, k) = match self.positions {
            None => (query as i64, key as i64),
            Some((q, k)) => (q[query].into(), k[key].into()),
        };
        let near = k >= 0 && k <= q && self.window.is_none_or(|w| ((q - k) as u64) < w);
        let end = self.every.is_none_or(|e| (k + 1).unsigned_abs().is_multiple_of(e));
        near && end && self.segments.is_none_or(|s| s[query] == s[key])
    }

    /// Pairs of `queries` queries and `keys` keys.
    pub fn pairs(&self, queries: u64, keys: u64) -> u64 {
        if let (false, None) = (self.by_pair(), self.every) {
            return Attention::causal_pairs(queries, self.window) as u64;
        }
        let seen = |i: u64| (0..keys).filter(|&j| self.sees(i as usize, j as usize)).count() as u64;
        (0..queries).map(seen).sum()
    }

    /// Pairs of a whole batch, of all heads where the program's mask differs by head; `mask` gives
    /// the integers of a mask operand for all of it.
    pub(crate) fn pairs_of_batch(
        attention: &Attention,
        [batch, queries, keys, heads]: [u64; 4],
        mask: impl Fn(usize) -> &'a [i32],
        scoring: Option<&Scoring>,
        chosen: Option<&'a [i32]>,
    ) -> u64 {
        let of = |b: usize| {
            let tokens = [queries as usize, keys as usize];
            let visible = Visible::new(attention, tokens, |k, n| &mask(k)[b * n..][..n]);
            let chosen = attention.among.zip(chosen);
            let chosen = chosen.map(|(a, all)| Chosen::of_sequence(a, [b, tokens[0]], heads as usize, all));
            if scoring.is_none() && chosen.is_none() {
                return visible.pairs(queries, keys);
            }
            let of_head = |h: u64| {
                let h = h as usize;
                let sees = |i: usize, j: usize| {
                    visible.sees(i, j)
                        && chosen.as_ref().is_none_or(|c| c.sees(i, h, visible.position(j)))
                        && scoring.is_none_or(|s| s.sees([b, i, j, h]))
                };
                let seen = |i: usize| (0..tokens[1]).filter(|&j| sees(i, j)).count() as u64;
                (0..tokens[0]).map(seen).sum::<u64>()
            };
            (0..attention.times(heads)).map(of_head).sum()
        };
        (0..batch as usize).map(of).sum()
    }
}

/// The forward operation's options and operands, and the mask's, which are made for the gradient
/// after its own.
struct Random {
    a: Attention,
    qkv: [Value; 3],
    q: Dims,
    masks: Vec<(String, Type, Tensor)>,
    reads: Vec<(String, Type, Tensor)>,
    forward: Vec<Tensor>,
}

/// An instance with a program where the blank has one.
fn random(case: &mut Case, blank: &Attention) -> Random {
    let of = Masked::random(case);
    let Masked { b, t, s, heads, groups, .. } = of;
    let d = case.dim("d");
    let mut a = Attention::random_options(case, of.mask, of.segments);
    if blank.program.is_some() {
        (a.softcap, a.program) = (None, Some(Arc::new(scored::random(&mut case.rng))));
        a.dropout = case.rng.once_in(3).then_some(0.25);
    }
    if blank.listed() {
        a.softcap = None;
        a.dropout = case.rng.once_in(3).then_some(0.25);
    }
    a.every = blank.every.map(|_| 1 + case.rng.below(3));
    let q = vec![b, t, heads, d];
    let qkv = [("q", q.clone()), ("k", vec![b, s, groups, d]), ("v", vec![b, s, groups, d])]
        .map(|(name, dims)| case.floats(name, &dims));
    let mut forward = case.clone();
    let mut masks = of.operands(&mut forward);
    if a.dropout.is_some() {
        masks.push(forward.ints_from("draws", &[b, t], |rng| rng.below(1 << 32) as u32 as i32));
    }
    if blank.among.is_some() {
        let each = if forward.rng.once_in(2) { heads } else { groups };
        let count = forward.dim("n");
        let [choices, count_of] = [each, count].map(|dim| forward.module.size(dim));
        let block = 1 + forward.rng.below(3);
        a.among = Some(Among { block, count: count_of, heads: choices, own: false });
        let block = |rng: &mut Rng| rng.below(8) as i32 - 1;
        masks.push(forward.ints_from("chosen", &[b, t, each, count], block));
    }
    let mut reads = vec![];
    for (n, read) in a.read().iter().enumerate() {
        let head = if read.heads { &[heads][..] } else { &[] };
        let dims = match read.place {
            Place::Query => [&[b, t], head].concat(),
            Place::Key => [&[b, s], head].concat(),
            Place::All => head.to_vec(),
            Place::Table => [head, &[forward.dim(&format!("n{n}"))]].concat(),
        };
        reads.push(forward.floats(&format!("x{n}"), &dims));
    }
    case.module = forward.module.clone();
    let results = forward.forward(&Op::Attention(a.clone()), &[&qkv[..], &masks, &reads].concat());
    // The random numbers go on after those of the mask.
    case.rng = forward.rng.clone();
    let mask = |v: &Value| {
        let name = forward.function.params[v.index()].name.clone();
        (name, forward.function.ty(*v).clone(), forward.args[v.index()].clone())
    };
    let [masks, reads] = [masks, reads].map(|list| list.iter().map(mask).collect());
    Random { a, qkv, q: q.into(), masks, reads, forward: results }
}

impl Payload for Attention {
    fn blanks() -> Vec<Self> {
        let scored = Attention { program: Some(Arc::default()), ..Attention::default() };
        let chosen = Attention { among: Some(Among::default()), ..Attention::default() };
        let ends = Attention { every: Some(1), ..Attention::default() };
        vec![Attention::default(), scored, chosen, ends]
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        let (mut windowed, mut mask) = (self.window.is_some(), usize::from(self.mask == Mask::Positions));
        a.word("scale")?;
        a.float(&mut self.scale)?;
        visit_softcap(&mut self.softcap, a)?;
        a.flag("window", &mut windowed)?;
        if windowed {
            a.integer(self.window.get_or_insert_default())?;
        }
        a.word("mask")?;
        a.choice(&["causal", "positions"], &mut mask)?;
        self.mask = [Mask::Causal, Mask::Positions][mask];
        a.flag("segments", &mut self.segments)?;
        let mut dropped = self.dropout.is_some();
        a.flag("dropout", &mut dropped)?;
        if dropped {
            a.float(self.dropout.get_or_insert_default())?;
        }
        let (mut ends, mut chosen) = (self.every.is_some(), self.among.is_some());
        a.flag("every", &mut ends)?;
        if ends {
            a.integer(self.every.get_or_insert_default())?;
        }
        a.flag("among", &mut chosen)?;
        if chosen {
            self.among.get_or_insert_default().attributes(a)?;
        }
        scored::visit(&mut self.program, a)
    }
}

impl Operation for Attention {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "attention",
            operands: &FORWARD[self.list(!self.read().is_empty())],
            results: &["o[b, t, H, d]", "lse[b, t, H]"],
            class: Class::anchored(self),
            rows: if self.mask == Mask::Positions { Rows::Of(rows) } else { Rows::All },
            bf16: Bf16::Reads(&[0, 1, 2]),
            work: Work::Pairs(self, self, Attention::MASK),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        self.check(x, Attention::MASK)?;
        self.check_reads(x, self.reads())?;
        Ok(vec![x[0].clone(), Type::f32(&x[0].dims[..3])])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let d = e.last(0);
        let mut out = vec![0.0; e.floats(0).len()];
        let mut lse = vec![];
        let scoring = Scoring::new(self, e.operands, Attention::MASK, self.reads());
        for (row, out) in out.chunks_mut(d).enumerate() {
            let query = self.query(e, scoring.as_ref(), Attention::MASK, row);
            lse.push(self.attend(e, &query, out));
        }
        Ok(vec![Data::Float(out), Data::Float(lse)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let random = random(&mut case, self);
        let mut inputs = random.qkv.to_vec();
        for (name, ty, tensor) in random.masks.into_iter().chain(random.reads) {
            inputs.push(case.tensor(&name, Binding::Value, ty, tensor));
        }
        case.finish(random.a, &inputs)
    }
}

impl Counted for Attention {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        self.counts(s, extents, false)
    }
}

impl Reverse for Attention {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operands());
        let kept = [at.result(0), at.result(1), d];
        let mut log = at.cotangent(1);
        if self.program.is_some() && log.is_none() {
            let lse = at.result(1);
            let ty = Type::f32(&at.builder().dims(lse));
            log = Some(at.builder().zeros(&ty));
        }
        let (masks, reads) = x[Attention::MASK..].split_at(self.masks());
        let operands = [&x[..Attention::MASK], &kept, masks, log.as_slice(), reads].concat();
        let grads = at.builder().ops(AttentionGrad(self.clone()), &operands);
        let moved = self.moved();
        let read = |n: usize| self.reads() + n;
        for (k, grad) in (0..Attention::MASK).chain(moved.into_iter().map(read)).zip(grads) {
            at.add(k, grad);
        }
        Ok(())
    }
}

/// A query before all keys sees nothing, whatever it is.
fn rows(at: &Asked, k: usize) -> Need {
    let positions = at.node.inputs[Attention::MASK];
    match at.maker(positions).filter(|_| k == 0).map(|n| (&n.op, &n.inputs)) {
        Some((Op::KeepInts(kept), x)) if kept.otherwise < 0 => {
            Need::Places(if at.is_param(x[0]) { x[1] } else { positions })
        }
        Some((Op::Decide(_), _)) => Need::Places(positions),
        _ => Need::All,
    }
}

impl Payload for AttentionGrad {
    fn blanks() -> Vec<Self> {
        Attention::blanks().into_iter().map(AttentionGrad).collect()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.0.attributes(a)
    }
}

impl Operation for AttentionGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "attention_grad",
            operands: &BACKWARD[self.0.list(!self.0.read().is_empty())],
            results: match self.0.moved().is_empty() {
                true => &[DQ, DK, DV],
                false => &[DQ, DK, DV, "dx0", "…"],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1, 2, 3, 5]),
            work: Work::Pairs(self, &self.0, AttentionGrad::MASK),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        self.0.check(x, AttentionGrad::MASK)?;
        x.check(x[3] == x[0] && x[5] == x[0], "o and do have the type of q")?;
        let lse = x[4] == Type::f32(&x[0].dims[..3]);
        x.check(lse, "lse is f32 with the dimensions of q but the last")?;
        if let Some(log) = self.log(x.len()) {
            x.check(x[log] == x[4], "dlse has the type of lse")?;
        }
        self.0.check_reads(x, self.reads())?;
        let moved = self.0.moved();
        let moved = moved.into_iter().map(|n| x[self.reads() + n].clone());
        Ok((0..3).map(|k| x[k].clone()).chain(moved).collect())
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (q, k, v, d) = (e.floats(0), e.floats(1), e.floats(2), e.last(0));
        let (out, lse, dout) = (e.floats(3), e.floats(4), e.floats(5));
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![0.0; x.len()]);
        let reads = self.reads().min(e.operands.len());
        let mut dx: Vec<Vec<f64>> = e.operands[reads..].iter().map(|x| vec![0.0; x.floats().len()]).collect();
        let scoring = Scoring::new(&self.0, e.operands, AttentionGrad::MASK, reads);
        for (row, &lse) in lse.iter().enumerate() {
            let query = self.0.query(e, scoring.as_ref(), AttentionGrad::MASK, row);
            let own = row * d..(row + 1) * d;
            let kept = Some((&out[own.clone()], lse));
            let log = self.log(e.operands.len()).map_or(0.0, |k| e.floats(k)[row]);
            let (dq, dout) = (&mut dq[own.clone()], &dout[own]);
            self.0.attend_grad(e, &query, kept, (dout, log), [dq, &mut dk, &mut dv], &mut dx);
        }
        let moved = self.0.moved();
        let moved = moved.into_iter().map(|n| std::mem::take(&mut dx[n]));
        Ok([dq, dk, dv].into_iter().chain(moved).map(Data::Float).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let mut random = random(&mut case, &self.0);
        let mut inputs = random.qkv.to_vec();
        let lse = random.forward.remove(1);
        let o = random.forward.remove(0);
        inputs.push(case.tensor("o", Binding::Value, Type::f32(&random.q), o));
        inputs.push(case.tensor("lse", Binding::Value, Type::f32(&random.q[..3]), lse));
        inputs.push(case.floats("do", &random.q));
        for (name, ty, mask) in random.masks {
            inputs.push(case.tensor(&name, Binding::Value, ty, mask));
        }
        if self.0.program.is_some() || case.rng.once_in(2) {
            inputs.push(case.floats("dlse", &random.q[..3]));
        }
        for (name, ty, read) in random.reads {
            inputs.push(case.tensor(&name, Binding::Value, ty, read));
        }
        case.finish(AttentionGrad(random.a), &inputs)
    }
}

impl Counted for AttentionGrad {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        self.0.counts(s, extents, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without positions and segments the pairs are a triangle cut by the window; with them each is
    /// looked at.
    #[test]
    fn pairs_are_those_that_queries_see() {
        let numbers: Vec<i32> = (0..7).collect();
        for window in [None, Some(1), Some(3), Some(9)] {
            let a = Attention { window, ..Attention::default() };
            let causal = Visible::new(&a, [7, 7], |_, _| unreachable!("no mask operands"));
            let positioned = Attention { mask: Mask::Positions, ..a.clone() };
            let numbered = Visible::new(&positioned, [7, 7], |_, n| &numbers[..n]);
            let seen = (0..7).flat_map(|q| (0..7).map(move |k| (q, k))).filter(|&(q, k)| causal.sees(q, k));
            assert_eq!(seen.count() as u64, causal.pairs(7, 7), "{window:?}");
            assert_eq!(numbered.pairs(7, 7), causal.pairs(7, 7), "{window:?}");
        }
        let segments = [0, 0, 0, 1, 1];
        let a = Attention { segments: true, ..Attention::default() };
        assert_eq!(a.mask_operands(), (None, Some(0)));
        assert_eq!(Visible::new(&a, [5, 5], |_, n| &segments[..n]).pairs(5, 5), 6 + 3);
        // A negative position is that of no key.
        let keys = [-1, 0, 1, 2, 3];
        let a = Attention { mask: Mask::Positions, ..Attention::default() };
        let visible = Visible::new(&a, [1, 5], |k, n| if k == 0 { &[2][..n] } else { &keys[..n] });
        assert_eq!(visible.pairs(1, 5), 3);
    }
}
