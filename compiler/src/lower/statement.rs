//! Statements on the stream.
//!
//! A statement is a function of its own, from the stream to a stream. `save` keeps the stream as a
//! state of lifetime [`Lifetime::Saved`], one for each time it is saved; `mix` reads the latest.

use super::*;
use smallvec::smallvec;

/// Tensors and states of statements.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("statement", path)
    }

    /// The matrix of the statement `linear`.
    pub const LINEAR: Part = own("linear.weight");
    /// The matrix of a `mix`.
    pub const MIX: Part = own("mix.weight");
    /// The factor of the stream in a `mix`.
    pub const LAMBDA: Part = own("mix.lambda");
    /// The factor of the saved stream.
    pub const MU: Part = own("mix.mu");
    /// The step sizes of a diagonal `mix`, before softplus.
    pub const DELTA: Part = own("mix.delta");
    /// The logarithms of its rates of decay.
    pub const DECAY: Part = own("mix.decay");
    /// A saved stream.
    pub const STREAM: Part = own("stream").whole(false);
}

impl Lower<'_> {
    pub(super) fn statement(&mut self, statement: &Statement) {
        let x = self.stream();
        let y = match statement {
            Statement::Norm(NormGain::Own) => self.norm(x, Owner::Stream, ends::part::FINAL_NORM, 1),
            Statement::Norm(NormGain::Plain) => self.norm_plain(x),
            Statement::Norm(NormGain::Named(name)) => self.norm_of_gain(name, x),
            Statement::Linear(beginning) => self.square(x, part::LINEAR, *beginning, TensorKind::Matrix),
            Statement::StartZeros => {
                let ty = self.b.ty(x).clone();
                self.b.zeros(&ty)
            }
            Statement::StartNormal(deviation) => {
                let dims = [self.stream_rows(), smallvec![self.hidden()]].concat();
                let noise = self.b.param(Input::Noise.name(), Binding::Batch(Input::Noise), Type::f32(&dims));
                let noise = self.b.scale(noise, *deviation);
                wiring(&self.architecture.model).replaced_by(self, noise)
            }
            Statement::Save(name) => {
                self.save(name, x);
                x
            }
            Statement::Mix { name, how } => {
                let e = self.saved(name);
                self.mix(*how, x, e)
            }
            // It is a work of its own.
            Statement::History(_) => x,
        };
        let y = self.of_staying(x, y);
        self.b.result(Port::new("y", Binding::Stream), y);
    }

    /// Keeps the stream after `depth` layer applications.
    pub(super) fn remember(&mut self, depth: u64) {
        let x = self.stream();
        self.save(&remembered_as(depth), x);
        self.b.result(Port::new("y", Binding::Stream), x);
    }

    /// `Σ_j a_j x_j` over streams that were kept, and the one here.
    pub(super) fn history(&mut self, depths: &[u64]) {
        let x = self.stream();
        let (one, all) = (self.one(), depths.len() as u64 + 1);
        let dims = [self.dim(&format!("applications{all}"), all)];
        // One for the stream here.
        let init = Some(Init::Identity { columns: all, from: all - 1 });
        let a = self.weight(Owner::Stream, part::MIX, &dims, TensorKind::Steady, init);
        let factors = self.b.ops(Split(smallvec![one; depths.len() + 1]), &[a]);
        let mut sources: Vec<Value> = depths.iter().map(|depth| self.saved(&remembered_as(*depth))).collect();
        sources.push(x);
        let mut sum = None;
        for (source, factor) in sources.into_iter().zip(factors) {
            let factor = self.b.reshape(factor, &[]);
            let term = self.b.mul(source, factor);
            sum = Some(sum.map_or(term, |sum| self.b.add(sum, term)));
        }
        self.b.result(Port::new("y", Binding::Stream), sum.unwrap_or(x));
    }

    fn saved_port(&mut self, name: &str) -> Port {
        let number = self.architecture.saved.iter().position(|s| s == name).unwrap_or(0);
        let owner = Owner::Saved(number as u32);
        let port = Port::new(self.architecture.label(owner), Binding::State(Lifetime::Saved));
        self.facts.states.insert(port.name.clone(), State { owner, part: part::STREAM });
        port
    }

    fn save(&mut self, name: &str, x: Value) {
        let port = self.saved_port(name);
        self.b.result(port, x);
    }

    fn saved(&mut self, name: &str) -> Value {
        let port = self.saved_port(name);
        let ty = self.stream_type();
        self.b.param(&port.name, port.binding, ty)
    }

    /// `W x` with a matrix `[hidden, width of x]`, whose identity is of its last columns.
    fn square(&mut self, x: Value, part: Part, beginning: Beginning, kind: TensorKind) -> Value {
        let hidden = self.architecture.model.hidden;
        let (out, all) = (self.dim("stream", hidden), self.b.dims(x));
        let Some((&width, rows)) = all.split_last() else { return x };
        let columns = self.b.module.size(width);
        let init = match beginning {
            Beginning::Identity => Some(Init::Identity { columns, from: columns - hidden }),
            Beginning::Normal => None,
        };
        let w = self.weight(Owner::Stream, part, &[out, width], kind, init);
        let y = self.b.contract(x, w, &[width]);
        let dims = [rows, &[self.hidden()]].concat();
        self.b.reshape(y, &dims)
    }

    fn mix(&mut self, how: Mixing, x: Value, e: Value) -> Value {
        match how {
            Mixing::Add => self.b.add(x, e),
            Mixing::Linear(beginning) => {
                let both = self.dim("streams", 2 * self.architecture.model.hidden);
                let joined = self.b.op(Concat(both), &[x, e]);
                self.square(joined, part::MIX, beginning, TensorKind::Matrix)
            }
            Mixing::Scaled => {
                let mut times = |x: Value, part, begins| {
                    let one = self.one();
                    let init = Some(Init::Constant(begins));
                    let w = self.weight(Owner::Stream, part, &[one], TensorKind::Steady, init);
                    let w = self.b.reshape(w, &[]);
                    self.b.mul(x, w)
                };
                let (x, e) = (times(x, part::LAMBDA, 1.0), times(e, part::MU, 0.0));
                self.b.add(x, e)
            }
            Mixing::Diagonal => {
                let hidden = [self.hidden()];
                let mut vector = |part, begins| {
                    let init = Some(Init::Constant(begins));
                    self.weight(Owner::Stream, part, &hidden, TensorKind::Steady, init)
                };
                // At the start a step keeps sqrt(1/5) of the stream.
                let (a, decay) = (vector(part::DELTA, (5f64.sqrt() - 1.0).ln()), vector(part::DECAY, 0.0));
                let step = self.b.unary(Unary::Softplus, a);
                let rate = self.b.unary(Unary::Exp, decay);
                let gone = self.b.mul(step, rate);
                let gone = self.b.unary(Unary::Neg, gone);
                let kept = self.b.unary(Unary::Exp, gone);
                let x = self.b.mul(x, kept);
                let read = self.square(e, part::MIX, Beginning::Identity, TensorKind::Steady);
                let read = self.b.mul(read, step);
                self.b.add(x, read)
            }
        }
    }
}
