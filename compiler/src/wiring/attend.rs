//! Attention Residuals: a unit reads a mixture of the embedding and of all outputs before it.
//!
//! There is no sum. The stream `[b, t, h]` is the run of outputs so far (`block` of them make a
//! run, the embedding is a run of its own), and a state of the model has the runs that are
//! complete, one row each. A reading is one kernel over these rows in place and then the stream
//! (Attention Residuals, Section 3: full with runs of one output, and Block AttnRes). After every
//! output the run before it is written to its row. For a run that still grows that is too early,
//! but the row is written again before it is read.

use super::Wiring;
use crate::CompileError;
use crate::architecture::{readers, units};
use crate::bind::Owner;
use crate::compiled::{Init, TensorKind};
use crate::ir::{Index, Lifetime, Op, Port, Type, Value};
use crate::lower::Lower;
use crate::op::ReadSources;
use dreamc_dsl::spec::Expr;

/// Tensors and states of readings over sources.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("attend", path)
    }

    /// The query of a reading.
    pub const QUERY: Part = own("read.weight");
    /// The gain of its keys.
    pub const NORM: Part = own("read.norm.weight");
    /// The sources so far.
    pub const SOURCES: Part = own("sources").whole(true);
}

/// Readings over runs of `block` outputs.
pub(crate) struct Attend {
    pub block: u32,
}

/// The stream and the state in the middle of a layer.
struct Runs {
    port: Port,
    sources: Value,
    /// The run so far.
    last: Value,
    /// Outputs of the layer so far.
    outputs: u32,
}

impl Wiring for Attend {
    fn begin(&self, _: &mut Lower, x: Value) -> Value {
        x
    }

    fn layer(&self, lower: &mut Lower, x: Value, expr: &Expr) -> Result<Value, CompileError> {
        let mut runs = self.runs(lower, x);
        for unit in units(expr) {
            let mut outputs = vec![];
            for reader in readers(unit) {
                let owner = lower.reader(reader)?;
                let read = self.read(lower, &runs, owner);
                outputs.push(lower.expr(reader, read)?);
            }
            for output in outputs {
                self.write(lower, &mut runs, output);
            }
        }
        lower.b.result(runs.port, runs.sources);
        Ok(runs.last)
    }

    fn end(&self, lower: &mut Lower, x: Value) -> Value {
        let runs = self.runs(lower, x);
        let read = self.read(lower, &runs, Owner::Output);
        // Handed on, so that the gradient of the rows is.
        lower.b.result(runs.port, runs.sources);
        read
    }
}

impl Attend {
    fn runs(&self, lower: &mut Lower, x: Value) -> Runs {
        let rows = lower.outputs().div_ceil(u64::from(self.block.max(1))) + 1;
        let rows = lower.dim("sources", rows);
        let ty = Type::f32(&[&[rows], &lower.b.dims(x)[..]].concat());
        let (port, sources) = lower.state(Owner::Sources, part::SOURCES, Lifetime::Depth, ty);
        Runs { port, sources, last: x, outputs: 0 }
    }

    fn run(&self, lower: &mut Lower, runs: &Runs) -> Value {
        let (cache, offset, block) = (lower.cache_number(Owner::Sources), runs.outputs, self.block);
        lower.b.index(&format!("run{offset}"), Index::Run { cache, offset, block })
    }

    /// `Σ_j p_j v_j`, `p = softmax_j(w · RMSNorm(v_j; g))`.
    fn read(&self, lower: &mut Lower, runs: &Runs, owner: Owner) -> Value {
        let hidden = lower.hidden();
        let init = Some(Init::Constant(0.0));
        let w = lower.weight(owner, part::QUERY, &[hidden], TensorKind::Gain, init);
        let g = lower.gain(owner, part::NORM, runs.last, 1, TensorKind::Gain);
        let q = lower.b.mul(w, g);
        let row = self.run(lower, runs);
        let eps = lower.eps();
        lower.b.op(ReadSources { eps }, &[runs.sources, runs.last, q, row])
    }

    fn write(&self, lower: &mut Lower, runs: &mut Runs, output: Value) {
        let row = self.run(lower, runs);
        runs.sources = lower.b.op(Op::CacheWrite, &[runs.sources, runs.last, row]);
        runs.last = match self.block {
            0 | 1 => output,
            block => {
                let (cache, offset) = (lower.cache_number(Owner::Sources), runs.outputs);
                let index = Index::Continues { cache, offset, block };
                let continues = lower.b.index(&format!("continues{offset}"), index);
                let continues = lower.b.op(Op::Number, &[continues]);
                let before = lower.b.mul(runs.last, continues);
                lower.b.add(before, output)
            }
        };
        runs.outputs += 1;
    }
}
