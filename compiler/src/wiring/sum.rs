//! The residual sum: a component reads the stream, and its output is added to it.

use super::Wiring;
use crate::CompileError;
use crate::bind::Owner;
use crate::build::Builder;
use crate::ir::Value;
use crate::lower::Lower;
use dreamc_dsl::spec::Expr;

/// `x + Σ y`
pub(crate) struct Sum;

impl Wiring for Sum {
    fn begin(&self, _: &mut Lower, x: Value) -> Value {
        x
    }

    fn layer(&self, lower: &mut Lower, x: Value, expr: &Expr) -> Result<Value, CompileError> {
        let terms = match expr {
            Expr::Sequential(terms) if terms.contains(&Expr::Norm) => terms.as_slice(),
            _ => std::slice::from_ref(expr),
        };
        let (mut wire, mut norms) = (Wire::enter(x), 0);
        for term in terms {
            let read = wire.read(&mut lower.b);
            if *term == Expr::Norm {
                wire = Wire::enter(lower.norm(read, Owner::Norm(norms), super::part::GAIN, 1));
                norms += 1;
            } else {
                let output = lower.expr(term, read)?;
                wire.write(&mut lower.b, output);
            }
        }
        Ok(wire.read(&mut lower.b))
    }

    fn end(&self, _: &mut Lower, x: Value) -> Value {
        x
    }
}

/// A composition under way. Outputs are added up first, in order, and the stream comes last: an
/// output that is -0 everywhere leaves the bits of the stream as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    /// The stream before the composition.
    stream: Value,
    /// The sum of what has been written.
    written: Option<Value>,
}

impl Wire {
    /// Begins a composition on a stream.
    pub fn enter(stream: Value) -> Wire {
        Wire { stream, written: None }
    }

    /// The stream that the next term reads; after the last term, the stream as it is then.
    pub fn read(&self, b: &mut Builder) -> Value {
        self.written.map_or(self.stream, |sum| b.add(self.stream, sum))
    }

    /// Takes the output of a term.
    pub fn write(&mut self, b: &mut Builder, output: Value) {
        self.written = Some(self.written.map_or(output, |sum| b.add(sum, output)));
    }

    /// The output of the composition; none where nothing was written.
    pub fn leave(self) -> Option<Value> {
        self.written
    }
}
