//! The embedding of tokens.

pub(crate) mod cuda;
pub mod kernel;

use super::*;
use smallvec::smallvec;

/// `(d[.., h], ids[..]) -> [V, h]`: the sum of the rows of each id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EmbedGrad {
    /// The vocabulary.
    pub vocab: Dim,
}

/// `(table[V, h], ids[..]) -> [.., h]`, in f32 whatever the table is stored in.
pub struct Embed;

impl Operation for Embed {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "embed",
            operands: &["table[V, h]", "ids i32[..]"],
            results: &["x[.., h]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Stored(&[0]),
            work: Work::Counted(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        x.check(x[0].dims.len() == 2, "the table is [vocabulary, hidden]")?;
        Ok(vec![Type::f32(&with(&x[1].dims, x[0].dims[1]))])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (table, ids) = (e.floats(0), e.ints(1));
        let (vocab, h) = (e.sizes(0)[0], e.last(0));
        let mut out = vec![];
        for &id in ids {
            let id = checked(id, vocab, "id")?;
            out.extend(&table[id * h..(id + 1) * h]);
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let rows = case.rows();
        let (vocab, h) = (case.dim("vocab"), case.dim("h"));
        let table = case.floats("table", &[vocab, h]);
        let bound = case.module.size(vocab);
        let ids = case.ints("ids", &rows, bound);
        case.finish(Op::Embed, &[table, ids])
    }
}

impl Counted for Embed {
    /// Rows read, the rest of the table left alone.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let read = s.operand_bytes(0, s.result(0)) + s.operand_bytes(1, s.operand(1));
        Counts { read, ..s.whole(Count::ZERO) }
    }
}

impl Reverse for Embed {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, ids, vocab) = (at.d()?, at.operand(1), at.ty(0).dims[0]);
        let dx = at.builder().op(EmbedGrad { vocab }, &[d, ids]);
        at.add(0, dx);
        Ok(())
    }
}

impl Payload for EmbedGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("vocab")?;
        a.dim(&mut self.vocab)
    }
}

impl Operation for EmbedGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "embed_grad",
            operands: &["d[.., h]", "ids i32[..]"],
            results: &["dtable[V, h]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        let h = x.last(0)?;
        x.check(*x.rows(0) == *x[1].dims, "one row an id")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: smallvec![self.vocab, h] }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (d, ids) = (e.floats(0), e.ints(1));
        let (vocab, h) = (e.size(self.vocab), e.last(0));
        let mut out = vec![0.0; vocab * h];
        for (d, &id) in d.chunks(h).zip(ids) {
            let id = checked(id, vocab, "id")?;
            out[id * h..(id + 1) * h].iter_mut().zip(d).for_each(|(out, d)| *out += d);
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let rows = case.rows();
        let (vocab, h) = (case.dim("vocab"), case.dim("h"));
        let d = case.floats("d", &with(&rows, h));
        let bound = case.module.size(vocab);
        let ids = case.ints("ids", &rows, bound);
        case.finish(EmbedGrad { vocab }, &[d, ids])
    }
}
