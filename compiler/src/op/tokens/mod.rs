//! Tokens taken from their sequence and put back.

pub(crate) mod cuda;
pub mod kernel;

use super::route::{largest, random_score};
use super::*;

/// `(r[b, t]) -> index i32[b, k]`: the places of the `k` largest of each sequence, in increasing
/// order of the places; ties go to the lowest place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopTokens {
    /// How many.
    pub k: Dim,
}

/// `(x[b, k, ..], index i32[b, k]) -> x[b, t, ..]`: the rows put at those places, which differ; the
/// reverse of `TakeTokens`. All other floats are -0, which changes no bit of what it is added to,
/// all other integers -1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PutTokens {
    /// Tokens of a sequence.
    pub tokens: Dim,
}

/// `(x[b, t, ..], index i32[b, k]) -> x[b, k, ..]`: the rows at those places, which differ. Floats
/// or integers.
pub struct TakeTokens;

/// The result's type: `few` of `many` tokens a sequence are moved, and `to` is how many it has.
fn moved(x: &Operands, put: bool, [few, many, to]: [Dim; 3]) -> Result<Vec<Type>, TypeError> {
    let (rows, index) = (&x[0], &x[1]);
    let fits = rows.dims[0] == index.dims[0] && (!put || rows.dims[1] == index.dims[1]);
    x.check(fits, SHAPES)?;
    x.check(x.size(few) <= x.size(many), "there are fewer tokens than places")?;
    Ok(vec![Type { dtype: rows.dtype, dims: [&[rows.dims[0], to], &rows.dims[2..]].concat().into() }])
}

const SHAPES: &str = "takes x[b, t, ..] and index i32[b, k], k for t in what is put back";

fn check_ranks(x: &Operands) -> Result<(), TypeError> {
    x.int(1)?;
    x.check(x[0].dims.len() >= 2 && x[1].dims.len() == 2, SHAPES)
}

/// For each entry of the index, its row number among `tokens` a sequence.
fn token_rows(e: &Evaluation, tokens: usize) -> Result<Vec<usize>, String> {
    let k = e.last(1);
    let row = |(i, &at): (usize, &i32)| Ok(i / k * tokens + checked(at, tokens, "place")?);
    e.ints(1).iter().enumerate().map(row).collect()
}

/// Rows, the number of tokens, and an index that a choice of tokens gave.
fn random_move(mut case: Case, put: bool) -> Instance {
    let (b, t, h) = (case.dim("b"), case.dim("t"), case.dim("h"));
    let k = case.some_of("k", t);
    let scores = case.fill(&[b, t], |rng| rng.between(-1.0, 1.0));
    let scores = Tensor::float(&case.sizes(&[b, t]), scores);
    let [index] = case.made(TopTokens { k }, &[&Type::f32(&[b, t])], &[scores]);
    let dims = [b, if put { k } else { t }, h];
    let x = if case.rng.once_in(3) { case.ints("x", &dims, 9) } else { case.floats("x", &dims) };
    let index = case.tensor("index", Binding::Value, Type::i32(&[b, k]), index);
    let op = if put { Op::PutTokens(PutTokens { tokens: t }) } else { Op::TakeTokens };
    case.finish(op, &[x, index])
}

impl Payload for TopTokens {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("choose")?;
        a.dim(&mut self.k)
    }
}

impl Operation for TopTokens {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "top_tokens",
            operands: &["r[b, t]"],
            results: &["index i32[b, k]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: Derivative::Held(Ties::Scores),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.check(x[0].dims.len() == 2, "takes r[b, t]")?;
        x.check(x.size(self.k) <= x.size(x[0].dims[1]), "cannot choose more than there are")?;
        Ok(vec![Type::i32(&[x[0].dims[0], self.k])])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let k = e.size(self.k);
        let mut index = largest(e, k);
        index.chunks_mut(k.max(1)).for_each(<[i32]>::sort);
        Ok(vec![Data::Int(index)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let k = case.some_of("k", t);
        let r = case.floats_from("r", &[b, t], random_score);
        case.finish(TopTokens { k }, &[r])
    }
}

impl Counted for TopTokens {
    /// A comparison with every score for each choice.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        s.whole(s.operand(0) * s.module.size(self.k))
    }
}

impl Operation for TakeTokens {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "take_tokens",
            operands: &["x[b, t, ..]", "index i32[b, k]"],
            results: &["y[b, k, ..]"],
            class: Class::Anchor(self, Anchor { again: true, ..Anchor::default() }),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check_ranks(x)?;
        let (many, few) = (x[0].dims[1], x[1].dims[1]);
        moved(x, false, [few, many, few])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        fn take<T: Copy>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
            rows.iter().flat_map(|r| &x[r * width..(r + 1) * width]).copied().collect()
        }
        let width = e.sizes(0)[2..].iter().product();
        let rows = token_rows(e, e.sizes(0)[1])?;
        Ok(vec![match &e.operands[0].data {
            Data::Float(x) => Data::Float(take(x, &rows, width)),
            Data::Int(x) => Data::Int(take(x, &rows, width)),
        }])
    }

    fn random(&self, case: Case) -> Instance {
        random_move(case, false)
    }
}

impl Counted for TakeTokens {
    /// Rows read and written, the rest of `x` left alone.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let read = s.operand_bytes(0, s.result(0)) + s.operand_bytes(1, s.operand(1));
        Counts { read, ..s.whole(Count::ZERO) }
    }
}

impl Reverse for TakeTokens {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, index, tokens) = (at.d()?, at.operand(1), at.ty(0).dims[1]);
        let dx = at.builder().op(PutTokens { tokens }, &[d, index]);
        at.add(0, dx);
        Ok(())
    }
}

impl Payload for PutTokens {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("tokens")?;
        a.dim(&mut self.tokens)
    }
}

impl Operation for PutTokens {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "put_tokens",
            operands: &["x[b, k, ..]", "index i32[b, k]"],
            results: &["y[b, t, ..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check_ranks(x)?;
        moved(x, true, [x[0].dims[1], self.tokens, self.tokens])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        fn put<T: Copy>(x: &[T], rows: &[usize], width: usize, mut out: Vec<T>) -> Vec<T> {
            for (i, r) in rows.iter().enumerate() {
                out[r * width..(r + 1) * width].copy_from_slice(&x[i * width..(i + 1) * width]);
            }
            out
        }
        let tokens = e.size(self.tokens);
        let width: usize = e.sizes(0)[2..].iter().product();
        let (rows, n) = (token_rows(e, tokens)?, e.sizes(0)[0] * tokens * width);
        Ok(vec![match &e.operands[0].data {
            Data::Float(x) => Data::Float(put(x, &rows, width, vec![-0.0; n])),
            Data::Int(x) => Data::Int(put(x, &rows, width, vec![-1; n])),
        }])
    }

    fn random(&self, case: Case) -> Instance {
        random_move(case, true)
    }
}

impl Reverse for PutTokens {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, index) = (at.d()?, at.operand(1));
        let dx = at.builder().op(Op::TakeTokens, &[d, index]);
        at.add(0, dx);
        Ok(())
    }
}
