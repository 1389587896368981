//! Queries, keys and the operands of a mask, which attention, the choice of keys and losses of
//! chosen keys have in common.

use super::*;

pub(in crate::op) const Q: &str = "q[b, t, H, d]";
pub(in crate::op) const K: &str = "k[b, s, G, d]";
pub(in crate::op) const LSE: &str = "lse[b, t, H]";
pub(in crate::op) const WEIGHTS: &str = "weights[b, t, H]";
const POSITIONS: [&str; 2] = ["query_positions i32[b, t]", "key_positions i32[b, s]"];
const SEGMENTS: &str = "segments i32[b, t]";
const DRAWS: &str = "draws i32[b, t]";
const CHOSEN: &str = "chosen i32[b, t, C, n]";

/// Lists of operands by [`Attention::list`]: some, those of the mask, and one of two last parts.
pub(in crate::op) fn lists(first: &[&'static str], last: [&[&'static str]; 2]) -> Vec<Vec<&'static str>> {
    let list = |number: usize| {
        let [positions, segments, draws, chosen, more] = [1, 2, 4, 8, 16].map(|bit| number & bit != 0);
        let mut list = first.to_vec();
        list.extend(if positions { &POSITIONS[..] } else { &[] });
        list.extend(segments.then_some(SEGMENTS));
        list.extend(draws.then_some(DRAWS));
        list.extend(chosen.then_some(CHOSEN));
        list.extend(last[usize::from(more)]);
        list
    };
    (0..32).map(list).collect()
}

impl Attention {
    /// Which of the [`lists`] an operation has whose keys are seen so; `more`: that of the second
    /// last part.
    pub(in crate::op) fn list(&self, more: bool) -> usize {
        let positions = self.mask == Mask::Positions;
        let flags = [positions, self.segments, self.dropout.is_some(), self.among.is_some(), more];
        flags.iter().rev().fold(0, |number, &flag| 2 * number + usize::from(flag))
    }

    /// Queries, keys, and the mask's operands from number `mask` on.
    pub(in crate::op) fn check_keys(&self, x: &Operands, mask: usize) -> Result<(), TypeError> {
        let (q, k) = (&x[0], &x[1]);
        let fits = q.dims.len() == 4
            && k.dims.len() == 4
            && q.dtype.is_float()
            && q.dtype == k.dtype
            && q.dims[0] == k.dims[0]
            && q.dims[3] == k.dims[3];
        x.check(fits, "takes q[b, t, heads, d] and k[b, s, kv_heads, d] of one float type")?;
        let same_tokens = x.size(q.dims[1]) == x.size(k.dims[1]);
        x.check(
            self.mask != Mask::Causal || same_tokens,
            "a causal mask needs as many keys as queries; give their positions",
        )?;
        x.check(!self.segments || same_tokens, "segments need as many keys as queries")?;
        x.check(self.every != Some(0), "blocks of no token have no end")?;
        let tokens = Type::i32(&q.dims[..2]);
        let mut expected = vec![];
        if self.mask == Mask::Positions {
            expected.extend([tokens.clone(), Type::i32(&k.dims[..2])]);
        }
        expected.extend(self.segments.then(|| tokens.clone()));
        expected.extend(self.dropout.map(|_| tokens.clone()));
        if (mask..).zip(&expected).any(|(k, expected)| x[k] != *expected) {
            let expected: Vec<String> = expected.iter().map(|t| x.module.show(t)).collect();
            return x.fail(format!("the mask's operands must be {}", expected.join(", ")));
        }
        if let Some(among) = self.among {
            let chosen = &x[mask + self.chosen()];
            let fits = matches!(chosen.dims[..], [b, t, c, n]
                if [b, t] == tokens.dims[..] && x.size(c) == among.heads && x.size(n) == among.count);
            x.check(fits && chosen.dtype == DType::I32, "the choice is i32[b, t, lists, count]")?;
            let each = among.heads > 0 && x.size(q.dims[2]).is_multiple_of(among.heads);
            x.check(each && among.block > 0, "each list is of as many heads, and of blocks of tokens")?;
        }
        self.check_heads(x, q.dims[2], k.dims[2])
    }

    pub(in crate::op) fn check_heads(
        &self,
        x: &Operands,
        heads: Dim,
        kv_heads: Dim,
    ) -> Result<(), TypeError> {
        let each = x.size(heads).is_multiple_of(x.size(kv_heads));
        x.check(each, "heads must be a multiple of kv_heads")
    }

    /// Visits what the mask of a choice, or of a loss of one, may have.
    pub(in crate::op) fn visit_mask(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        let mut positions = self.mask == Mask::Positions;
        a.flag("positions", &mut positions)?;
        self.mask = if positions { Mask::Positions } else { Mask::Causal };
        a.flag("segments", &mut self.segments)
    }
}

/// Query heads and key heads; each key head serves the same number of query heads.
pub(in crate::op) fn random_heads(case: &mut Case) -> (Dim, Dim) {
    let groups = 1 + case.rng.below(2);
    let each = 1 + case.rng.below(3);
    (case.sized("heads", groups * each), case.sized("kv_heads", groups))
}

/// Queries and keys of a random instance: which there are, and their dimensions.
#[derive(Clone, Copy)]
pub(in crate::op) struct Masked {
    pub mask: Mask,
    pub segments: bool,
    pub b: Dim,
    pub t: Dim,
    pub s: Dim,
    pub heads: Dim,
    pub groups: Dim,
}

impl Masked {
    pub fn random(case: &mut Case) -> Masked {
        let mask = if case.rng.once_in(2) { Mask::Causal } else { Mask::Positions };
        let segments = case.rng.once_in(3);
        let (b, t) = (case.dim("b"), case.dim("t"));
        let s = if mask == Mask::Causal || segments { t } else { case.dim("s") };
        let (heads, groups) = random_heads(case);
        Masked { mask, segments, b, t, s, heads, groups }
    }

    /// The dimension of lists: one for each head, for each key head, or one.
    pub fn lists(&self, case: &mut Case) -> Dim {
        match case.rng.below(3) {
            0 => self.heads,
            1 => self.groups,
            _ => case.sized("one", 1),
        }
    }

    /// Positions and segments, those that there are.
    pub fn operands(&self, case: &mut Case) -> Vec<Value> {
        let mut list = vec![];
        if self.mask == Mask::Positions {
            list.push(case.ints("query_positions", &[self.b, self.t], 8));
            list.push(case.ints_from("key_positions", &[self.b, self.s], |rng| rng.below(9) as i32 - 1));
        }
        if self.segments {
            list.push(case.ints("segments", &[self.b, self.t], 2));
        }
        list
    }
}
