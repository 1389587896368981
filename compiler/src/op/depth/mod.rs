//! Attention along depth.

pub(crate) mod cuda;
pub mod kernel;

use super::attention::Query;
use super::attention::keys::random_heads;
use super::*;

/// Scaled scores of depth attention below this are those of keys that are not there.
pub const ABSENT: f64 = -1e20;

/// `(q[.., H, d], k[D, .., G, d], v[D, .., G, d], row[]) -> o[.., H, d]`: each position attends to
/// rows `0..=row` of itself. A scaled score below [`ABSENT`] is that of a key which is not there:
/// no soft-cap raises it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DepthAttention(pub Attention);

/// `(q, k, v, row[], do, dk, dv) -> dq, dk, dv`: adds to the cotangents of the caches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DepthAttentionGrad(pub Attention);

/// Rows of the cache that a query of row `row` sees.
pub fn rows_seen(a: &Attention, row: u64) -> u64 {
    let rows = row.saturating_add(1);
    a.window.map_or(rows, |w| w.min(rows))
}

fn check(a: &Attention, x: &Operands) -> Result<(), TypeError> {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let (n, m) = (q.dims.len(), k.dims.len());
    let fits = n >= 2
        && m == n + 1
        && k == v
        && q.dtype.is_float()
        && q.dtype == k.dtype
        && q.dims[..n - 2] == k.dims[1..m - 2]
        && q.dims[n - 1] == k.dims[m - 1];
    x.check(fits, "takes q[.., heads, d], k[depths, .., kv_heads, d], v of k's type")?;
    let plain = a.mask == Mask::Causal && !a.segments && a.program.is_none() && a.dropout.is_none();
    x.check(plain, "depths are seen causally and have neither positions, segments, dropout nor a program")?;
    a.check_heads(x, q.dims[n - 2], k.dims[m - 2])?;
    x.scalar(3)
}

/// Where the keys begin that the query of this number sees.
fn keys(a: &Attention, e: &Evaluation, query: usize) -> Result<Vec<usize>, String> {
    let (q, k) = (e.sizes(0), e.sizes(1));
    let depth = checked(e.ints(3)[0], k[0], "cache row")?;
    let [.., heads, d] = *q else { return Ok(vec![]) };
    let groups = k[k.len() - 2];
    let positions: usize = q[..q.len() - 2].iter().product();
    let (position, group) = (query / heads, query % heads / (heads / groups));
    let first = depth + 1 - rows_seen(a, depth as u64) as usize;
    Ok((first..=depth).map(|r| ((r * positions + position) * groups + group) * d).collect())
}

fn cost(a: &Attention, s: &Shapes, extents: &Extents, gradient: bool) -> Counts {
    let rows = s.size(1, 0);
    let seen = rows_seen(a, extents.row.unwrap_or(u64::MAX).min(rows.saturating_sub(1)));
    // One query a head of every position.
    let d = u128::from(s.size(0, LAST));
    let queries = Count(s.operand(0).0.and_then(|n| n.checked_div(d)));
    let row = Count(s.operand(1).0.and_then(|n| n.checked_div(u128::from(rows))));
    let cached = |i: usize| s.operand_bytes(i, row * seen);
    let own = s.operand_bytes(0, s.operand(0));
    let counts = a.pairwise(s, queries * seen, gradient);
    let read = own + cached(1) + cached(2) + Count::from(4);
    if !gradient {
        return Counts { read, written: own, ..counts };
    }
    // The cotangents of the rows seen are updated in place.
    let updated = cached(5) + cached(6);
    Counts { read: read + own + updated, written: own + updated, ..counts }
}

/// Options, dimensions of queries and caches, and the operands up to the row.
fn random(case: &mut Case) -> (Attention, [Dims; 2], Vec<Value>) {
    let rows = case.rows();
    let depths = case.dim("depths");
    let (heads, groups) = random_heads(case);
    let d = case.dim("d");
    let row = case.rng.below(case.module.size(depths));
    let a = Attention::random_options(case, Mask::Causal, false);
    let query = [&rows[..], &[heads, d]].concat();
    let cache = [&[depths], &rows[..], &[groups, d]].concat();
    let mut inputs = vec![case.floats("q", &query), case.floats("k", &cache), case.floats("v", &cache)];
    inputs.push(case.index("row", row));
    (a, [query.into(), cache.into()], inputs)
}

impl Payload for DepthAttention {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.0.attributes(a)
    }
}

impl Operation for DepthAttention {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "depth_attention",
            operands: &["q[.., H, d]", "k[D, .., G, d]", "v[D, .., G, d]", "row i32[]"],
            results: &["o[.., H, d]"],
            class: Class::anchored(self),
            rows: Rows::Of(rows),
            bf16: Bf16::Own,
            work: Work::Row(self, &self.0, 3),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check(&self.0, x)?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (q, k, v, d) = (e.floats(0), e.floats(1), e.floats(2), e.last(0));
        let mut out = vec![0.0; q.len()];
        for (row, (q, out)) in q.chunks(d).zip(out.chunks_mut(d)).enumerate() {
            let keys = keys(&self.0, e, row)?;
            self.0.attend(e, &Query { q, k, v, keys, scored: None, factors: None }, out);
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (a, _, inputs) = random(&mut case);
        case.finish(DepthAttention(a), &inputs)
    }
}

impl Counted for DepthAttention {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        cost(&self.0, s, extents, false)
    }
}

impl Reverse for DepthAttention {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operands());
        // The cotangents of the caches so far go through the operation, which adds to them.
        let (dk, dv) = (at.so_far(1), at.so_far(2));
        let operands = [x[0], x[1], x[2], x[3], d, dk, dv];
        let grads = at.builder().ops(DepthAttentionGrad(self.0.clone()), &operands);
        at.add(0, grads[0]);
        for k in [1, 2] {
            at.replace(k, grads[k]);
        }
        Ok(())
    }
}

/// A query is of its own token.
fn rows(at: &Asked, k: usize) -> Need {
    let tokens = row_dims(&at.ty(0).dims).len() == 2;
    if k == 0 && tokens { at.own } else { Need::All }
}

impl Payload for DepthAttentionGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.0.attributes(a)
    }
}

impl Operation for DepthAttentionGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "depth_attention_grad",
            operands: &[
                "q[.., H, d]",
                "k[D, .., G, d]",
                "v[D, .., G, d]",
                "row i32[]",
                "do[.., H, d]",
                "dk[D, .., G, d]",
                "dv[D, .., G, d]",
            ],
            results: &["dq[.., H, d]", "dk[D, .., G, d]", "dv[D, .., G, d]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Row(self, &self.0, 3),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check(&self.0, x)?;
        x.check(x[4] == x[0], "do has the type of q")?;
        x.float(5)?;
        x.float(6)?;
        let caches = x[5].dims == x[1].dims && x[6].dims == x[2].dims;
        x.check(caches, "dk and dv have the dimensions of the caches")?;
        Ok(vec![x[0].clone(), x[5].clone(), x[6].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (q, k, v, d) = (e.floats(0), e.floats(1), e.floats(2), e.last(0));
        let dout = e.floats(4);
        let mut dq = vec![0.0; q.len()];
        let [mut dk, mut dv] = [5, 6].map(|i| e.floats(i).to_vec());
        for row in 0..q.len() / d {
            let keys = keys(&self.0, e, row)?;
            let own = row * d..(row + 1) * d;
            let (dq, dout, q) = (&mut dq[own.clone()], &dout[own.clone()], &q[own]);
            let query = Query { q, k, v, keys, scored: None, factors: None };
            self.0.attend_grad(e, &query, None, (dout, 0.0), [dq, &mut dk, &mut dv], &mut []);
        }
        Ok(vec![Data::Float(dq), Data::Float(dk), Data::Float(dv)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (a, [query, cache], mut inputs) = random(&mut case);
        inputs.push(case.floats("do", &query));
        inputs.push(case.state("dk", &cache));
        inputs.push(case.state("dv", &cache));
        case.finish(DepthAttentionGrad(a), &inputs)
    }
}

impl Counted for DepthAttentionGrad {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        cost(&self.0, s, extents, true)
    }
}
