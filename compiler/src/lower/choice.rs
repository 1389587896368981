//! Tokens that choose how many passes of a loop they make (Mixture-of-Recursions, token choice).
//!
//! Before the loop stands a function with the one router. It leaves states of lifetime
//! [`Lifetime::Saved`]: each token's last pass, an integer without gradient, which all passes read;
//! the share of that choice, and the stream there, which the function after the loop reads. A pass
//! is a function of its own, so that it knows its number and the share of tokens that should reach
//! it; from the choice it takes places, as every `skip` does. Tokens that have made their passes
//! keep their stream, so that after the loop every token has the result of its own passes.

use super::*;
use crate::architecture::Choosing;
use crate::op::PickGrad;
use smallvec::smallvec;

/// Tensors and states of the choice.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("choice", path)
    }

    /// The matrix by which tokens choose how many passes they make.
    pub const TABLE: Part = own("weight");
    /// The first matrix of a network that chooses.
    pub const NETWORK_UP: Part = own("network.up.weight");
    /// Its last.
    pub const NETWORK_DOWN: Part = own("network.down.weight");
    /// The bias that balances these choices.
    pub const BIAS: Part = own("bias");
    /// How often each number of passes was chosen.
    pub const COUNTS: Part = own("counts");
    /// The last pass of every token: i32.
    pub const LAST: Part = own("last");
    /// The share of that choice.
    pub const GATE: Part = own("gate").with_rows(0);
    /// The stream where the loop begins.
    pub const START: Part = own("start").with_rows(0);
}

impl Lower<'_> {
    /// Before the first pass: `z = W x`, `p = softmax(z)`, and the last pass `argmax(p + b)`.
    pub(super) fn choose(&mut self, choosing: &Choosing) {
        let x = self.stream();
        self.b.result(Port::new("y", Binding::Stream), x);
        let (hidden, rows, one) = (self.hidden(), self.stream_rows(), self.one());
        let owner = Owner::Choice;
        let e = self.passes_chosen(choosing.passes);
        let read = self.cooled(&choosing.scorer, x);
        let router = TensorKind::Router;
        let z = match choosing.scorer.network {
            None => {
                let w = self.weight(owner, part::TABLE, &[e, hidden], router, None);
                self.b.contract(read, w, &[hidden])
            }
            Some(size) => {
                let inner = self.network_size(size);
                let up = self.weight(owner, part::NETWORK_UP, &[inner, hidden], router, None);
                let down = self.weight(owner, part::NETWORK_DOWN, &[e, inner], router, None);
                let a = self.b.contract(read, up, &[hidden]);
                let a = self.gelu_by_error_function(a);
                self.b.contract(a, down, &[inner])
            }
        };
        if self.form.trains() && choosing.scorer.z_loss != 0.0 {
            let lse = self.log_sum_exp(z, e);
            let squares = self.b.unary(Unary::Square, lse);
            self.mean_of_asked(squares, (None, None), choosing.scorer.z_loss);
            self.leave_auxiliary();
        }
        let p = self.b.op(Op::Softmax, &[z]);
        let zero = Some(Init::Constant(0.0));
        let bias = self.weight(owner, part::BIAS, &[e], TensorKind::Balance, zero);
        let counts = self.architecture.name_of(owner, part::COUNTS);
        let law = spec::Balance {
            rate: choosing.balance,
            target: spec::BalanceTarget::Median,
            law: spec::BalanceLaw::Sign,
        };
        for w in self.weights.iter_mut().filter(|w| w.part == part::BIAS) {
            w.balancing = Some(Balancing { counts: counts.clone(), law });
        }
        let selection = self.b.stop_gradient(p);
        let selection = self.b.add(selection, bias);
        let last = self.b.op(Route { k: one }, &[selection]);
        let gate = self.b.op(Op::Pick, &[p, last]);
        for (part, value) in [(part::LAST, last), (part::GATE, gate), (part::START, x)] {
            let port = self.choice_port(part);
            self.b.result(port, value);
        }
        let slots = self.b.module.elements(&rows);
        let slots = self.dim(&format!("tokens{}", self.here(&rows)), slots);
        let offsets = self.dim_of(owner, &format!("passes{}+1", choosing.passes), choosing.passes + 1);
        let chosen = self.b.ops(Group { experts: e, offsets, slots }, &[last])[1];
        let (port, counts) = self.state(owner, part::COUNTS, Lifetime::Set, Type::f32(&[e]));
        let counts = self.b.op(Op::AddCounts, &[counts, chosen]);
        self.b.result(port, counts);
    }

    /// The numbers of passes to choose among; they may differ between loops.
    fn passes_chosen(&mut self, passes: u64) -> Dim {
        let e = self.dim_of(Owner::Choice, &format!("passes{passes}"), passes);
        self.routing(e)
    }

    fn choice_port(&mut self, part: Part) -> Port {
        let name = self.architecture.name_of(Owner::Choice, part);
        let port = Port::new(name, Binding::State(Lifetime::Saved));
        self.facts.states.insert(port.name.clone(), State { owner: Owner::Choice, part });
        port
    }

    /// After the last pass: the stream where the loop began, plus the result of each token's passes
    /// times the share of its choice.
    pub(super) fn weigh(&mut self) {
        let (x, ty) = (self.stream(), self.stream_type());
        let port = self.choice_port(part::START);
        let start = self.b.param(&port.name, port.binding, ty);
        let gate = self.choice_gate();
        let made = self.b.mul(x, gate);
        let y = self.b.add(start, made);
        self.b.result(Port::new("y", Binding::Stream), y);
    }

    /// The share of each token's choice.
    fn choice_gate(&mut self) -> Value {
        let (rows, one) = (self.stream_rows(), self.one());
        let port = self.choice_port(part::GATE);
        let gate = self.b.param(&port.name, port.binding, Type::f32(&[&rows[..], &[one]].concat()));
        self.b.reshape(gate, &rows)
    }

    /// The update of the tokens that make this pass, -0 for all others.
    pub(super) fn chosen(
        &mut self,
        owner: Owner,
        capacity: f64,
        inner: &Expr,
        x: Value,
    ) -> Result<Value, CompileError> {
        let Some([pass, passes]) = self.body.and_then(|body| body.chosen) else {
            return Err(CompileError::Unsupported("a choice of depth outside a loop"));
        };
        if pass == 0 {
            // No token chooses to make no pass.
            self.observe_choice(owner, x, |_, ones| ones);
            return self.expr(inner, x);
        }
        let running = self.running(x, pass, passes);
        let rows = self.b.rows(x);
        if self.form == Form::Declared {
            let tokens = self.b.module.size(rows[1]);
            let index = self.top_tokens(running, capacity, tokens);
            let taken = self.b.op(Op::TakeTokens, &[x, index]);
            let f = self.within(Inside::Gathered { index, of: rows[1], ints: vec![] }, inner, taken)?;
            return Ok(self.b.op(PutTokens { tokens: rows[1] }, &[f, index]));
        }
        let decision = self.b.stop_gradient(running);
        let places = self.b.op(Decide { inclusive: false }, &[decision]);
        let places = self.taking_part(places);
        self.observe_choice(owner, x, |lower, ones| lower.b.op(Op::Keep, &[ones, places]));
        let f = self.within(self.masked(places, capacity, false), inner, x)?;
        Ok(self.b.op(Op::Keep, &[f, places]))
    }

    /// 1 for the tokens whose last pass is this one or a later one, 0 for the others.
    fn running(&mut self, x: Value, pass: u64, passes: u64) -> Value {
        let (rows, one) = (self.b.rows(x), self.one());
        let each = [&rows[..], &[one]].concat();
        let port = self.choice_port(part::LAST);
        let last = self.b.param(&port.name, port.binding, Type::i32(&each));
        // 1 at the last pass of each token, a column for each pass.
        let e = self.passes_chosen(passes);
        let ones = self.ones(&each);
        let ends = self.b.op(PickGrad { experts: e }, &[ones, last]);
        let columns = self.b.ops(Split(smallvec![one; passes as usize]), &[ends]);
        let columns = columns.into_iter().skip(pass as usize);
        let columns: Vec<Value> = columns.map(|column| self.b.reshape(column, &rows)).collect();
        let running = columns.into_iter().reduce(|sum, column| self.b.add(sum, column));
        running.unwrap_or_else(|| self.b.zeros(&Type::f32(&rows)))
    }

    /// Leaves what a pass decided, scored by the share of each token's choice.
    fn observe_choice(&mut self, owner: Owner, x: Value, taking: impl FnOnce(&mut Self, Value) -> Value) {
        if self.shape.observe {
            let gate = self.choice_gate();
            self.observe_skip(owner, x, gate, taking);
        }
    }
}
