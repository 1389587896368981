//! Attention over sources in depth by one query of a unit's own, and indices as numbers.

pub(crate) mod cuda;
pub mod kernel;

use super::*;

/// `(sources[R, .., h], x[.., h], q[h], row[]) -> u[.., h]`: every token reads `Σ_j p_j v_j` over
/// rows `0..row` of itself and then `x`, `p = softmax_j(q · v_j · rsqrt(mean(v_j²) + eps))`. With a
/// query `w ⊙ g` this is `softmax_j(w · RMSNorm(v_j; g))` (Attention Residuals, Equations 2 to 4).
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadSources {
    /// Added to the mean square.
    pub eps: f64,
}

by_bits!(ReadSources, ReadSources { eps } => Bits(eps));

/// `(sources, x, q, row[], du, dsources) -> dx, dq[.., h], dsources`: adds to the cotangent of the
/// sources; `dq` is that of each token.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadSourcesGrad {
    /// As in [`ReadSources`].
    pub eps: f64,
}

by_bits!(ReadSourcesGrad, ReadSourcesGrad { eps } => Bits(eps));

/// `(index i32[]) -> f32[]`: an index as a number.
pub struct Number;

/// No mask apart from the row: for [`Work::Row`].
const PLAIN: Attention = Attention {
    scale: 1.0,
    softcap: None,
    window: None,
    mask: Mask::Causal,
    segments: false,
    program: None,
    dropout: None,
    every: None,
    among: None,
};

fn check(x: &Operands) -> Result<(), TypeError> {
    let (sources, own, q) = (&x[0], &x[1], &x[2]);
    let fits = !own.dims.is_empty()
        && sources.dims.get(1..) == Some(&own.dims[..])
        && own.dtype == DType::F32
        && sources.dtype == own.dtype
        && q.dtype == own.dtype
        && q.dims[..] == own.dims[own.dims.len() - 1..];
    x.check(fits, "takes sources[rows, .., h], x[.., h], q[h]")?;
    x.scalar(3)
}

/// The sources of a token, and their weights.
struct Token {
    /// The offset of each in `sources`; the last is in `x`.
    from: Vec<usize>,
    /// `rsqrt(mean(v²) + eps)`
    root: Vec<f64>,
    /// `q · v`
    along: Vec<f64>,
    p: Vec<f64>,
}

/// The vector that begins there; the last is that of `x`.
fn source<'a>(e: &'a Evaluation, token: &Token, at: usize, i: usize) -> &'a [f64] {
    let h = e.last(1);
    match i + 1 == token.from.len() {
        true => &e.floats(1)[at * h..][..h],
        false => &e.floats(0)[token.from[i]..][..h],
    }
}

fn token(e: &Evaluation, eps: f64, at: usize) -> Result<Token, String> {
    let (h, all) = (e.last(1), e.floats(1).len());
    let rows = checked(e.ints(3)[0], e.sizes(0)[0], "row of sources")?;
    let mut found = Token {
        from: (0..=rows).map(|r| r * all + at * h).collect(),
        root: vec![],
        along: vec![],
        p: vec![],
    };
    for i in 0..=rows {
        let v = source(e, &found, at, i);
        let (root, along) =
            (1.0 / (inner_product(v, v) / h as f64 + eps).sqrt(), inner_product(e.floats(2), v));
        found.root.push(root);
        found.along.push(along);
    }
    let scores: Vec<f64> = found.root.iter().zip(&found.along).map(|(r, a)| r * a).collect();
    let sum = log_sum_exp(&scores);
    found.p = scores.iter().map(|s| (s - sum).exp()).collect();
    Ok(found)
}

/// Counts for all tokens and their sources, from [`kernel::work`].
fn cost(s: &Shapes, extents: &Extents, gradient: bool) -> Counts {
    let (rows, h) = (s.size(0, 0), s.size(1, LAST));
    let before = extents.row.unwrap_or(u64::MAX).min(rows.saturating_sub(1));
    let tokens = Count(s.operand(1).0.and_then(|n| n.checked_div(u128::from(h.max(1)))));
    let seen = tokens * (before + 1);
    let wide = seen * h;
    let (products, elementwise, outputs) = kernel::work(gradient);
    let all = s.whole(wide * elementwise.0 + seen * elementwise.1 + s.operand(1) * outputs);
    let sources = s.operand_bytes(0, tokens * before * h);
    let own = s.operand_bytes(1, s.operand(1));
    let read = sources + own + s.operand_bytes(2, s.operand(2)) + Count::from(4);
    let counts = Counts { multiply_adds: wide * products, ..all };
    if !gradient {
        return Counts { read, written: own, ..counts };
    }
    Counts { repeated: wide, read: read + own + sources, written: own * 2 + sources, ..counts }
}

/// Rows, the width, and the operands up to the row.
fn random(case: &mut Case) -> (Dims, Dims, Vec<Value>) {
    let all = case.dim("sources");
    let own = case.row_dims("h");
    let row = case.rng.below(case.module.size(all));
    let sources = [&[all], &own[..]].concat();
    let width = own[own.len() - 1..].to_vec();
    let inputs = vec![
        case.floats("sources", &sources),
        case.floats("x", &own),
        case.floats("q", &width),
        case.index("row", row),
    ];
    (sources.into(), own, inputs)
}

impl Payload for ReadSources {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("eps")?;
        a.float(&mut self.eps)
    }
}

impl Operation for ReadSources {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "read_sources",
            operands: &["sources[R, .., h]", "x[.., h]", "q[h]", "row i32[]"],
            results: &["u[.., h]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Row(self, &PLAIN, 3),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check(x)?;
        Ok(vec![x[1].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let h = e.last(1);
        let mut out = vec![0.0; e.floats(1).len()];
        let mut count = 0;
        for (at, out) in out.chunks_mut(h).enumerate() {
            let token = token(e, self.eps, at)?;
            for (i, p) in token.p.iter().enumerate() {
                out.iter_mut().zip(source(e, &token, at, i)).for_each(|(u, v)| *u += p * v);
                count += 2 * h as u64;
            }
        }
        e.multiply_adds += count;
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (_, _, inputs) = random(&mut case);
        case.finish(ReadSources { eps: 1e-3 }, &inputs)
    }
}

impl Counted for ReadSources {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        cost(s, extents, false)
    }
}

impl Reverse for ReadSources {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operands());
        // The cotangent of the sources so far goes through the operation, which adds to it.
        let so_far = at.so_far(0);
        let operands = [x[0], x[1], x[2], x[3], d, so_far];
        let grads = at.builder().ops(ReadSourcesGrad { eps: self.eps }, &operands);
        at.add(1, grads[0]);
        at.add_fitted(2, grads[1]);
        at.replace(0, grads[2]);
        Ok(())
    }
}

impl Payload for ReadSourcesGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("eps")?;
        a.float(&mut self.eps)
    }
}

impl Operation for ReadSourcesGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "read_sources_grad",
            operands: &[
                "sources[R, .., h]",
                "x[.., h]",
                "q[h]",
                "row i32[]",
                "du[.., h]",
                "dsources[R, .., h]",
            ],
            results: &["dx[.., h]", "dq[.., h]", "dsources[R, .., h]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Row(self, &PLAIN, 3),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check(x)?;
        x.check(x[4] == x[1], "du has the type of x")?;
        x.check(x[5] == x[0], "dsources has the type of sources")?;
        Ok(vec![x[1].clone(), x[1].clone(), x[5].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let h = e.last(1);
        let (mut dx, mut dq) = (vec![0.0; e.floats(1).len()], vec![0.0; e.floats(1).len()]);
        let mut dsources = e.floats(5).to_vec();
        let mut count = 0;
        for at in 0..dx.len() / h {
            let token = token(e, self.eps, at)?;
            let (q, du) = (e.floats(2), &e.floats(4)[at * h..][..h]);
            let dp: Vec<f64> =
                (0..token.p.len()).map(|i| inner_product(du, source(e, &token, at, i))).collect();
            let mean: f64 = token.p.iter().zip(&dp).map(|(p, d)| p * d).sum();
            for i in 0..token.p.len() {
                let (v, p, root) = (source(e, &token, at, i), token.p[i], token.root[i]);
                let ds = p * (dp[i] - mean);
                let back = ds * token.along[i] * root * root * root / h as f64;
                let to = match i + 1 == token.p.len() {
                    true => &mut dx[at * h..][..h],
                    false => &mut dsources[token.from[i]..][..h],
                };
                for c in 0..h {
                    to[c] += p * du[c] + ds * root * q[c] - back * v[c];
                    dq[at * h + c] += ds * root * v[c];
                }
                count += 6 * h as u64;
            }
        }
        e.multiply_adds += count;
        Ok(vec![Data::Float(dx), Data::Float(dq), Data::Float(dsources)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (sources, own, mut inputs) = random(&mut case);
        inputs.push(case.floats("du", &own));
        inputs.push(case.state("dsources", &sources));
        case.finish(ReadSourcesGrad { eps: 1e-3 }, &inputs)
    }
}

impl Counted for ReadSourcesGrad {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        cost(s, extents, true)
    }
}

impl Operation for Number {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "number",
            operands: &["index i32[]"],
            results: &["y[]"],
            class: Class::Row { again: true, row: self },
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Blocked("an index does not change by little"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.scalar(0)?;
        Ok(vec![Type::f32(&[])])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![Data::Float(vec![f64::from(e.ints(0)[0])])])
    }

    fn random(&self, mut case: Case) -> Instance {
        let index = case.rng.below(5);
        let index = case.index("index", index);
        case.finish(Op::Number, &[index])
    }
}

impl RowWork for Number {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let input = r.index(node.inputs[0])?;
        Ok(Some(r.op(RowOp::Index { input }, 1)))
    }
}
