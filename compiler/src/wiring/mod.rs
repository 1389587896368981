//! How the stream is wired: what a component reads, and where its output goes.
//!
//! *In*: a stream, and the units of a layer in order. *Out*: what each of them reads, and the
//! stream after them all. *Promise*: components are maps from what they read to an output; nothing
//! but a wiring adds an output to a stream.
//!
//! The units of a layer are the terms of its sequence ([`units`](crate::architecture::units)).
//! Every wiring stands between units; inside a unit that is a composition (a parallel group, a
//! wrapped part) terms are on a [`Wire`], which is a sum: each reads it, has its output written to
//! it, and what has been written leaves it as the output of the composition.

pub mod attend;
pub mod lanes;
mod sum;

pub(crate) use attend::Attend;
pub(crate) use lanes::{Lanes, lane_type};
pub(crate) use sum::{Sum, Wire};

use crate::CompileError;
use crate::ir::Value;
use crate::lower::Lower;
use dreamc_dsl::spec::{Expr, Model, Stream};

/// Tensors of every wiring.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("wiring", path)
    }

    /// The gain of a norm among the terms of a layer.
    pub const GAIN: Part = own("weight");
}

/// A way to wire the stream.
pub(crate) trait Wiring {
    /// The stream before the first layer, of the embedding.
    fn begin(&self, lower: &mut Lower, x: Value) -> Value;

    /// The stream that is `x` and nothing else: the embedding leaves nothing in it.
    fn replaced_by(&self, lower: &mut Lower, x: Value) -> Value {
        self.begin(lower, x)
    }

    /// The stream after a layer.
    fn layer(&self, lower: &mut Lower, x: Value, expr: &Expr) -> Result<Value, CompileError>;

    /// The value that the final norm reads, from the stream after the last layer.
    fn end(&self, lower: &mut Lower, x: Value) -> Value;
}

/// The wiring of a model.
pub(crate) fn wiring(model: &Model) -> Box<dyn Wiring> {
    match model.stream {
        Stream::Sum => Box::new(Sum),
        Stream::Attend { block } => Box::new(Attend { block: block as u32 }),
        Stream::Lanes { count, kind, embed } => Box::new(Lanes { count, kind, embed }),
    }
}
