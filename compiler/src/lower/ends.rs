//! Functions outside the layers: embedding, head, and the penalty of pooled thresholds.

use super::*;

/// Tensors of the embedding and the head.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("ends", path)
    }

    /// The matrix of embedding or head.
    pub const TABLE: Part = own("weight");
    /// The vector that the head adds to its logits.
    pub const HEAD_BIAS: Part = own("bias");
    /// The norm of the stream before the head.
    pub const FINAL_NORM: Part = own("norm.weight");
}

pub(super) fn embed(
    architecture: &Architecture,
    module: &mut Module,
    globals: &mut Vec<Weight>,
) -> Result<(Function, Facts), CompileError> {
    let shape = Shape::default();
    let mut lower = Lower::new(architecture, None, shape, module, EMBED);
    let dims = [lower.dim("vocab", architecture.model.vocab), lower.hidden()];
    let table = lower.weight(Owner::Embedding, part::TABLE, &dims, TensorKind::Embedding, None);
    let rows = lower.stream_rows();
    let ids = lower.b.param(Input::Ids.name(), Binding::Batch(Input::Ids), Type::i32(&rows));
    let x = lower.b.op(Op::Embed, &[table, ids]);
    let x = match architecture.model.embed_scale {
        None => x,
        Some(EmbedScale::SqrtHidden) => lower.b.scale(x, (architecture.model.hidden as f64).sqrt()),
        Some(EmbedScale::Value(c)) => lower.b.scale(x, c),
    };
    lower.b.point("out".into(), x);
    let x = wiring(&architecture.model).begin(&mut lower, x);
    lower.b.result(Port::new("x", Binding::Stream), x);
    let (function, read, known) = lower.finish()?;
    globals.extend(read);
    Ok((function, known))
}

/// `Σ_pools λ·ReLU(mean - c*)`.
pub(super) fn pool(architecture: &Architecture, module: &mut Module) -> Result<Function, CompileError> {
    let mut lower = Lower::new(architecture, None, Shape::default(), module, POOL);
    let mut sum: Option<Value> = None;
    for (i, pool) in architecture.pools.iter().enumerate() {
        let ty = lower.pool_type(i);
        let (_, means) = lower.state(Owner::Pool(i as u32), skip::part::POOLED, Lifetime::Depth, ty.clone());
        let all = lower.b.reduce(Reduce::Sum, means, &ty.dims);
        let mean = lower.b.scale(all, 1.0 / pool.parts.max(1) as f64);
        let loss = lower.penalty(mean, pool.capacity, pool.penalty);
        sum = Some(sum.map_or(loss, |s| lower.b.add(s, loss)));
    }
    if let Some(sum) = sum {
        lower.b.result(Output::Aux, sum);
    }
    Ok(lower.finish()?.0)
}

pub(super) fn head(
    architecture: &Architecture,
    (shape, form): (Shape, Form),
    module: &mut Module,
    globals: &mut Vec<Weight>,
) -> Result<(Function, Facts), CompileError> {
    let mut lower = Lower::new(architecture, None, shape, module, HEAD);
    lower.form = form;
    let rows = lower.stream_rows();
    let x = lower.stream();
    lower.b.point("stream".into(), x);
    let x = wiring(&architecture.model).end(&mut lower, x);
    lower.b.point("in".into(), x);
    if let Some(Places { every: false, .. }) = shape.cache {
        let one = [rows[0], lower.dim("asked", 1)];
        let asked = lower.b.param(Input::Asked.name(), Binding::Batch(Input::Asked), Type::i32(&one));
        // Before the norm and the product with the vocabulary, which are the work of the head.
        let x = lower.b.op(Op::TakeTokens, &[x, asked]);
        let n = lower.read_by_head(x);
        let (logits, _) = lower.logits(n);
        lower.b.result(Output::Logits, logits);
        return finish_head(lower, globals);
    }
    let n = lower.read_by_head(x);
    let (n, left) = lower.expected(n);
    let (logits, vocab) = lower.logits(n);
    let mut given = |input: Input, ty| lower.b.param(input.name(), Binding::Batch(input), ty);
    let targets = given(Input::Targets, Type::i32(&rows));
    let scale = given(Input::LossScale, Type::f32(&[]));
    let nll = lower.b.ops(Op::CrossEntropy, &[logits, targets])[0];
    let each = lower.last_share(nll, targets, left);
    let mut sum = match shape.dpo {
        None => lower.b.reduce(Reduce::Sum, each, &rows),
        Some(dpo) => lower.preferences(each, &rows, dpo)?,
    };
    if shape.z_loss != 0.0 {
        // Where a token has no target, its logits are nobody's.
        let lse = lower.log_sum_exp(logits, vocab);
        let square = lower.b.unary(Unary::Square, lse);
        let square = lower.b.op(Op::Keep, &[square, targets]);
        let squares = lower.b.reduce(Reduce::Sum, square, &rows);
        let squares = lower.b.scale(squares, shape.z_loss);
        sum = lower.b.add(sum, squares);
    }
    let loss = lower.b.mul(sum, scale);
    lower.b.result(Output::Loss, loss);
    lower.b.result(Output::Nll, nll);
    lower.b.result(Output::Logits, logits);
    finish_head(lower, globals)
}

/// Ends the head. Its weights are the model's: no body owns them.
fn finish_head(lower: Lower, globals: &mut Vec<Weight>) -> Result<(Function, Facts), CompileError> {
    let (function, read, known) = lower.finish()?;
    globals.extend(read.into_iter().filter(|w| w.owner != Owner::Embedding));
    Ok((function, known))
}

impl Lower<'_> {
    /// `Σ -(1 - ε) ln σ(z) - ε ln σ(-z)` over pairs of sequences (DPO, 2305.18290, equation 7).
    ///
    /// `z = β·(ln π(first) - ln π(second) - reference)`.
    fn preferences(&mut self, nll: Value, rows: &[Dim], dpo: spec::Dpo) -> Result<Value, CompileError> {
        let count = self.b.module.size(rows[0]);
        if !count.is_multiple_of(2) {
            return Err(CompileError::Unsupported("preferences over an odd number of sequences"));
        }
        let tokens = self.b.module.size(rows[1]);
        let pairs = self.dim("pairs", count / 2);
        let (both, one) = (self.dim("answers", 2 * tokens), self.dim("answer", tokens));
        let answers = self.b.reshape(nll, &[pairs, both]);
        let answers = self.b.ops(Split([one, one][..].into()), &[answers]);
        let input = Input::Reference;
        let reference = self.b.param(input.name(), Binding::Batch(input), Type::f32(&[pairs]));
        // Losses of tokens are log probabilities with the other sign.
        let margin = self.b.sub(answers[1], answers[0]);
        let margin = self.b.reduce(Reduce::Sum, margin, &[one]);
        let margin = self.b.sub(margin, reference);
        let z = self.b.scale(margin, -dpo.beta);
        let mut each = self.b.unary(Unary::Softplus, z);
        if dpo.smoothing != 0.0 {
            let back = self.b.scale(margin, dpo.beta);
            let back = self.b.unary(Unary::Softplus, back);
            let (right, wrong) = (self.b.scale(each, 1.0 - dpo.smoothing), self.b.scale(back, dpo.smoothing));
            each = self.b.add(right, wrong);
        }
        Ok(self.b.reduce(Reduce::Sum, each, &[pairs]))
    }

    /// The stream that leaves, after the final norm.
    pub(super) fn read_by_head(&mut self, mut x: Value) -> Value {
        if self.architecture.final_norm {
            x = self.norm(x, Owner::Stream, part::FINAL_NORM, 1);
        }
        self.b.point("norm".into(), x);
        x
    }

    /// Logits of what the head reads; and their dimension.
    pub(super) fn logits(&mut self, x: Value) -> (Value, Dim) {
        let (architecture, hidden) = (self.architecture, self.hidden());
        let model = &architecture.model;
        let (owner, kind) = if model.tie {
            (Owner::Embedding, TensorKind::Embedding)
        } else {
            (Owner::Head, TensorKind::Head)
        };
        let vocab = self.dim("vocab", model.vocab);
        let w = self.weight(owner, part::TABLE, &[vocab, hidden], kind, None);
        let mut logits = self.b.contract(x, w, &[hidden]);
        if model.head_bias {
            let zero = Some(Init::Constant(0.0));
            let bias = self.weight(Owner::Head, part::HEAD_BIAS, &[vocab], TensorKind::Gain, zero);
            logits = self.b.add(logits, bias);
        }
        let logits = self.b.scaled(logits, model.logit_scale);
        let logits = self.b.softcap(logits, model.logit_softcap);
        self.b.point("logits".into(), logits);
        (logits, vocab)
    }
}
