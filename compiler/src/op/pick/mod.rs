//! The entries chosen.

use super::*;

/// `(d[.., k], chosen[.., k]) -> [.., e]`: `d` at the chosen entries, zero elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PickGrad {
    /// The experts.
    pub experts: Dim,
}

/// `(table[.., e], chosen[.., k]) -> [.., k]`: the entries chosen.
pub struct Pick;

/// Rows, experts, and `k` different choices a row.
fn random_choices(case: &mut Case) -> (Dims, Dim, Dim, Tensor) {
    let rows = case.rows();
    let e = case.dim("e");
    let k = case.some_of("k", e);
    let dims = with(&rows, e);
    let data = case.fill(&dims, |rng| rng.between(-1.0, 1.0));
    let z = Tensor::float(&case.sizes(&dims), data);
    let [chosen] = case.made(Route { k }, &[&Type::f32(&dims)], &[z]);
    (rows, e, k, chosen)
}

impl Operation for Pick {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "pick",
            operands: &["table[.., e]", "chosen i32[.., k]"],
            results: &["y[.., k]"],
            class: Class::Row { again: true, row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        x.last(0)?;
        x.last(1)?;
        x.check(x.rows(0) == x.rows(1), "table and choice must have the same rows")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: x[1].dims.clone() }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (table, chosen) = (e.floats(0), e.ints(1));
        let (experts, k) = (e.last(0), e.last(1));
        let mut out = vec![];
        for (table, chosen) in table.chunks(experts).zip(chosen.chunks(k)) {
            for &c in chosen {
                out.push(table[checked(c, experts, "choice")?]);
            }
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (rows, e, k, chosen) = random_choices(&mut case);
        let table = case.floats("table", &with(&rows, e));
        let chosen = case.tensor("chosen", Binding::Value, Type::i32(&with(&rows, k)), chosen);
        case.finish(Op::Pick, &[table, chosen])
    }
}

impl Reverse for Pick {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, chosen) = (at.d()?, at.operand(1));
        let Some(&experts) = at.ty(0).dims.last() else { return at.missing("of a scalar") };
        let dx = at.builder().op(PickGrad { experts }, &[d, chosen]);
        at.add(0, dx);
        Ok(())
    }
}

impl RowWork for Pick {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let (table, chosen) = (r.array(node.inputs[0])?, r.ints(node.inputs[1])?);
        let n = r.length_of(node.first)?;
        Ok(Some(r.op(RowOp::Pick { table, chosen }, n)))
    }
}

impl Payload for PickGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("experts")?;
        a.dim(&mut self.experts)
    }
}

impl Operation for PickGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "pick_grad",
            operands: &["d[.., k]", "chosen i32[.., k]"],
            results: &["dtable[.., e]"],
            class: Class::Row { again: false, row: self },
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        x.last(0)?;
        x.check(x[0].dims == x[1].dims, "gradient and choice must have the same dimensions")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: with(x.rows(0), self.experts) }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (d, chosen) = (e.floats(0), e.ints(1));
        let (k, experts) = (e.last(0), e.size(self.experts));
        let mut out = vec![0.0; d.len() / k * experts];
        for ((out, d), chosen) in out.chunks_mut(experts).zip(d.chunks(k)).zip(chosen.chunks(k)) {
            for (d, &c) in d.iter().zip(chosen) {
                out[checked(c, experts, "choice")?] += d;
            }
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (rows, e, k, chosen) = random_choices(&mut case);
        let d = case.floats("d", &with(&rows, k));
        let chosen = case.tensor("chosen", Binding::Value, Type::i32(&with(&rows, k)), chosen);
        case.finish(PickGrad { experts: e }, &[d, chosen])
    }
}

impl Reverse for PickGrad {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, chosen) = (at.d()?, at.operand(1));
        let dx = at.builder().op(Op::Pick, &[d, chosen]);
        at.add(0, dx);
        Ok(())
    }
}

impl RowWork for PickGrad {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let (d, chosen) = (r.array(node.inputs[0])?, r.ints(node.inputs[1])?);
        let n = r.length_of(node.first)?;
        Ok(Some(r.op(RowOp::PickGrad { d, chosen }, n)))
    }
}
