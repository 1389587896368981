//! Programs of attention, evaluated in f64 and counted.

use super::formula::{
    Binary, Block, Formula, Pair, Part, Partials, Place, Program, Range, Step, evaluate, index,
};
use super::*;

/// Pairs that are looked at to count those of a mask, at most.
const MOST_LOOKS: u64 = 1 << 24;

/// A program with its operands.
pub(crate) struct Scoring<'a> {
    program: &'a Program,
    partials: Option<Partials>,
    reads: Vec<&'a Tensor>,
    /// Queries, keys and heads.
    sizes: [usize; 3],
    positions: Option<[&'a [i32]; 2]>,
}

impl<'a> Scoring<'a> {
    /// That of an attention whose mask operands begin at `mask` and the program's at `reads`; none
    /// where it has no program.
    pub fn new(a: &'a Attention, operands: &[&'a Tensor], mask: usize, reads: usize) -> Option<Self> {
        let program = a.program.as_deref()?;
        let [q, k] = [operands[0], operands[1]];
        let positions = a.mask_operands().0.map(|at| at.map(|k| operands[mask + k].ints()));
        Some(Scoring {
            program,
            partials: program.score.as_ref().map(Formula::partials),
            reads: operands[reads..].to_vec(),
            sizes: [q.dims[1], k.dims[1], q.dims[2]],
            positions,
        })
    }

    /// Where the number is that an operand has for sequence `b`, query `i`, key `j` and head `h`.
    fn offset(&self, read: usize, [b, i, j, h]: [usize; 4], at: Option<f64>) -> usize {
        let (of, [queries, keys, heads]) = (self.program.reads[read], self.sizes);
        let (heads, h) = if of.heads { (heads, h) } else { (1, 0) };
        match of.place {
            Place::Query => (b * queries + i) * heads + h,
            Place::Key => (b * keys + j) * heads + h,
            Place::All => h,
            Place::Table => {
                let length = self.reads[read].dims.last().copied().unwrap_or(1);
                h * length + index(at.unwrap_or(0.0), length)
            }
        }
    }

    fn at<T>(&self, pair: [usize; 4], score: f64, f: impl FnOnce(&Pair) -> T) -> T {
        let [b, i, j, h] = pair;
        let read = |read: usize, at: Option<f64>| self.reads[read].floats()[self.offset(read, pair, at)];
        let [query, key] = match self.positions {
            None => [i as f64, j as f64],
            Some([q, k]) => [q[b * self.sizes[0] + i].into(), k[b * self.sizes[1] + j].into()],
        };
        f(&Pair { score, query, key, head: h as f64, read: &read })
    }

    /// Whether its mask leaves a pair: sequence, query, key and head.
    pub fn sees(&self, pair: [usize; 4]) -> bool {
        self.program.mask.as_ref().is_none_or(|mask| self.at(pair, 0.0, |at| mask.evaluate(at)) > 0.0)
    }
}

/// A program at a query and the keys that it sees.
pub(crate) struct Scored<'a> {
    scoring: &'a Scoring<'a>,
    /// Sequence, query and head.
    query: [usize; 3],
    keys: Vec<usize>,
}

impl<'a> Scored<'a> {
    pub fn new(scoring: &'a Scoring<'a>, query: [usize; 3], keys: Vec<usize>) -> Self {
        Scored { scoring, query, keys }
    }

    fn pair(&self, n: usize) -> [usize; 4] {
        let [b, i, h] = self.query;
        [b, i, self.keys[n], h]
    }

    /// The score of the `n`th key from its scaled product.
    pub fn score(&self, n: usize, s: f64) -> f64 {
        let score = self.scoring.program.score.as_ref();
        score.map_or(s, |score| self.scoring.at(self.pair(n), s, |at| score.evaluate(at)))
    }

    /// Adds what the cotangent of that score gives to those of the program's operands; the slope of
    /// the scaled product.
    pub fn back(&self, n: usize, s: f64, cotangent: f64, dx: &mut [Vec<f64>]) -> f64 {
        let Some(partials) = &self.scoring.partials else { return 1.0 };
        let pair = self.pair(n);
        let values = self.scoring.at(pair, s, |at| evaluate(&partials.steps, at));
        for partial in &partials.of {
            let at = match partials.steps[partial.leaf] {
                Step::Lookup(_, x) => Some(values[x]),
                _ => None,
            };
            // A pair of no probability gives nothing, whatever the slope is there.
            if cotangent != 0.0 {
                dx[partial.read][self.scoring.offset(partial.read, pair, at)] +=
                    cotangent * values[partial.by];
            }
        }
        values[partials.by_score]
    }
}

/// Visits a program: a text for its score, and one for its mask.
pub(super) fn visit(program: &mut Option<Arc<Program>>, a: &mut dyn Attributes) -> Parsed<()> {
    let shown = |formula: fn(&Program) -> Option<&Formula>| {
        let program = program.as_deref()?;
        formula(program).map(|f| program.show(f))
    };
    let (mut score, mut mask) = (shown(|p| p.score.as_ref()), shown(|p| p.mask.as_ref()));
    for (word, text) in [("score", &mut score), ("sees", &mut mask)] {
        let mut there = text.is_some();
        a.flag(word, &mut there)?;
        if there {
            a.text(text.get_or_insert_default())?;
        }
    }
    *program = match (&score, &mask) {
        (None, None) => None,
        (score, mask) => match Program::parse(score.as_deref(), mask.as_deref()) {
            Ok(program) => Some(Arc::new(program)),
            Err(problem) => return a.refuse(problem),
        },
    };
    Ok(())
}

/// A random program that is smooth in what it reads.
pub(super) fn random(rng: &mut Rng) -> Program {
    const SCORES: [&str; 6] = [
        "sub(s, mul(x0[head], sub(i, j)))",
        "mul(2, tanh(div(s, 2)))",
        "sub(add(s, x0[i, head]), x1[j, head])",
        "add(s, x0[head, min(sub(i, j), 2)])",
        "add(mul(s, exp(x0[i])), mul(x1[j], sin(x2)))",
        "where(less(sub(i, j), 2), s, add(mul(s, 0.5), x0[sub(i, j)]))",
    ];
    // Reads of the mask are numbered after those of the score.
    const MASKS: [&str; 4] = [
        "less(sub(i, j), 2)",
        "max(equal(floor(div(i, 2)), floor(div(j, 2))), less(j, 1))",
        "less(x@[i], add(x#[j, head], 1))",
        "less(sub(0.5, head), x@[head, sub(i, j)])",
    ];
    let score = SCORES[rng.below(SCORES.len() as u64) as usize];
    let score = (!rng.once_in(4)).then_some(score);
    let mask = MASKS[rng.below(MASKS.len() as u64) as usize];
    let first = Program::parse(score, None).map_or(0, |p| p.reads.len());
    let mask = mask.replace('@', &first.to_string()).replace('#', &(first + 1).to_string());
    let mask = (score.is_none() || rng.once_in(2)).then_some(mask);
    Program::parse(score, mask.as_deref()).expect("the texts are formulas")
}

impl Program {
    /// The operands that the score can be differentiated by, in order.
    pub fn moved(&self) -> Vec<usize> {
        let of = self.score.as_ref().map_or(vec![], |score| score.partials().of);
        let mut reads: Vec<usize> = of.iter().map(|partial| partial.read).collect();
        reads.sort_unstable();
        reads.dedup();
        reads
    }

    /// Pairs of one sequence that the mask keeps among those that order and window allow, over
    /// `heads` heads; `None` where that takes too long to find. The mask reads no operand.
    pub fn pairs(&self, tokens: u64, window: Option<u64>, heads: u64) -> Option<u128> {
        let window = window.unwrap_or(tokens).min(tokens);
        let Some(mask) = &self.mask else {
            return Some(Attention::causal_pairs(tokens, Some(window)) * u128::from(heads));
        };
        let value = |query: u64, key: u64, head: u64| {
            let (query, key) = (query as f64, key as f64);
            mask.evaluate(&Pair { score: 0.0, query, key, head: head as f64, read: &|_, _| 0.0 }) > 0.0
        };
        if by_distance(mask) {
            let of = |head, far: u64| if value(far, 0, head) { u128::from(tokens - far) } else { 0 };
            return Some((0..heads).map(|head| (0..window).map(|far| of(head, far)).sum::<u128>()).sum());
        }
        let mut looks = 0;
        let mut pairs = 0;
        for head in 0..heads {
            let mut open = vec![[0, tokens, 0, tokens]];
            while let Some([query, queries, key, keys]) = open.pop() {
                // Pairs that order and the window leave of the block.
                let seen = |i: u64| {
                    let first = key.max((i + 1).saturating_sub(window));
                    (i + 1).min(keys).saturating_sub(first)
                };
                if keys == key || queries == query || key >= queries || keys + window <= query {
                    continue;
                }
                let range = |low: u64, high: u64| Range::new(low as f64, (high - 1) as f64);
                let block = Block {
                    query: range(query, queries),
                    key: range(key, keys.min(queries)),
                    head: range(head, head + 1),
                    read: &|_, _| Range::ALL,
                };
                match mask.part(&block) {
                    Part::Empty => {}
                    Part::Full => pairs += (query..queries).map(|i| u128::from(seen(i))).sum::<u128>(),
                    Part::Mixed if (queries - query) * (keys - key) <= 64 => {
                        looks += (queries - query) * (keys - key);
                        let near = |i: u64, j: u64| j <= i && i - j < window;
                        let left = |i: u64| (key..keys).filter(|&j| near(i, j) && value(i, j, head)).count();
                        pairs += (query..queries).map(|i| left(i) as u128).sum::<u128>();
                    }
                    Part::Mixed => {
                        let (q, k) = ((query + queries).div_ceil(2), (key + keys).div_ceil(2));
                        for (query, queries) in [(query, q), (q, queries)] {
                            open.extend([[query, queries, key, k], [query, queries, k, keys]]);
                        }
                    }
                }
                if looks > MOST_LOOKS {
                    return None;
                }
            }
        }
        Some(pairs)
    }
}

/// Whether a formula asks for positions only to subtract the key's from the query's.
fn by_distance(formula: &Formula) -> bool {
    let steps = formula.steps();
    let last = steps.last().is_some_and(|s| !matches!(s, Step::Query | Step::Key));
    last && steps.iter().all(|step| match *step {
        Step::Binary(Binary::Sub, a, b) if steps[a] == Step::Query && steps[b] == Step::Key => true,
        step => step.operands().all(|x| !matches!(steps[x], Step::Query | Step::Key)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By blocks, by distance, or one by one: the same pairs.
    #[test]
    fn pairs_of_a_mask_are_those_that_it_leaves() {
        for text in [
            "less(sub(i, j), 5)",
            "less(j, 20)",
            "equal(floor(div(i, 16)), floor(div(j, 16)))",
            "max(less(j, 4), less(sub(i, j), 9))",
            "equal(sub(sub(i, j), mul(3, floor(div(sub(i, j), 3)))), 0)",
            "less(mul(j, add(head, 1)), i)",
            "less(i, 0)",
        ] {
            let program = Program::parse(None, Some(text)).unwrap();
            let mask = program.mask.as_ref().unwrap();
            let heads = if program.masks_by_head() { 3 } else { 1 };
            for (tokens, window) in [(1, None), (67, None), (128, Some(19)), (100, Some(1))] {
                let mut expected = 0;
                for (head, i) in (0..heads).flat_map(|h| (0..tokens).map(move |i| (h, i))) {
                    for j in 0..=i {
                        let pair = Pair {
                            score: 0.0,
                            query: i as f64,
                            key: j as f64,
                            head: head as f64,
                            read: &|_, _| 0.0,
                        };
                        let near = window.is_none_or(|w| i - j < w);
                        expected += u128::from(near && mask.evaluate(&pair) > 0.0);
                    }
                }
                assert_eq!(
                    program.pairs(tokens, window, heads),
                    Some(expected),
                    "{text}, {tokens}, {window:?}"
                );
            }
        }
    }

    /// Nothing of a long sequence is walked pair by pair.
    #[test]
    fn long_masks_are_counted_by_blocks() {
        let tokens: u64 = 96 << 10;
        for (text, each) in [("less(sub(i, j), 100)", 100), ("max(less(j, 3), less(sub(i, j), 97))", 100)] {
            let program = Program::parse(None, Some(text)).unwrap();
            let pairs = program.pairs(tokens, None, 1).unwrap();
            assert!(
                pairs < u128::from(tokens * each) && pairs > u128::from(tokens * (each - 4)),
                "{text}: {pairs}"
            );
        }
    }
}
