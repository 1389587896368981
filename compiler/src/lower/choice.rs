//! Tokens that choose how many passes of a loop they make (Mixture-of-Recursions, token choice).
//!
//! Before the loop stands a function with the one router. It leaves two states of lifetime
//! [`Lifetime::Saved`], which all passes read: each token's last pass, an integer without gradient,
//! and the factor on the update there. A pass is a function of its own, so that it knows its number
//! and the share of tokens that should reach it; from the choice it takes places, as every `skip`
//! does.

use super::*;
use crate::architecture::Choosing;
use crate::op::PickGrad;

impl Lower<'_> {
    /// Before the first pass: `z = W x`, the last pass `argmax(z + b)`, and `softmax(z)` there.
    pub(super) fn choose(&mut self, choosing: &Choosing) {
        let x = self.stream();
        self.b.result(Port::new("y", Binding::Stream), x);
        let (hidden, rows, one) = (self.hidden(), self.stream_rows(), self.one());
        let owner = Owner::Choice;
        let e = self.passes_chosen(choosing.passes);
        let w = self.weight(owner, Part::ChoiceTable, &[e, hidden], TensorKind::Router, None);
        let z = self.b.contract(x, w, &[hidden]);
        let zero = Some(Init::Constant(0.0));
        let bias = self.weight(owner, Part::ChoiceBias, &[e], TensorKind::Balance, zero);
        let counts = self.architecture.name_of(owner, Part::ChoiceCounts);
        let law = spec::Balance {
            rate: choosing.balance,
            target: spec::BalanceTarget::Median,
            law: spec::BalanceLaw::Sign,
        };
        for w in self.weights.iter_mut().filter(|w| w.part == Part::ChoiceBias) {
            w.balancing = Some(Balancing { counts: counts.clone(), law });
        }
        let selection = self.b.stop_gradient(z);
        let selection = self.b.add(selection, bias);
        let last = self.b.op(Route { k: one }, &[selection]);
        let p = self.b.op(Op::Softmax, &[z]);
        let gate = self.b.op(Op::Pick, &[p, last]);
        for (part, value) in [(Part::ChoiceLast, last), (Part::ChoiceGate, gate)] {
            let port = self.choice_port(part);
            self.b.result(port, value);
        }
        let slots = self.b.module.elements(&rows);
        let slots = self.dim(&format!("tokens{}", self.here(&rows)), slots);
        let offsets = self.dim_of(owner, &format!("passes{}+1", choosing.passes), choosing.passes + 1);
        let chosen = self.b.ops(Group { experts: e, offsets, slots }, &[last])[1];
        let (port, counts) = self.state(owner, Part::ChoiceCounts, Lifetime::Set, Type::f32(&[e]));
        let counts = self.b.op(Op::AddCounts, &[counts, chosen]);
        self.b.result(port, counts);
    }

    /// The numbers of passes to choose among, of which two loops may have others.
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
        let (rows, one) = (self.b.rows(x), self.one());
        let each = [&rows[..], &[one]].concat();
        let port = self.choice_port(Part::ChoiceLast);
        let last = self.b.param(&port.name, port.binding, Type::i32(&each));
        let port = self.choice_port(Part::ChoiceGate);
        let gate = self.b.param(&port.name, port.binding, Type::f32(&each));
        let gate = self.b.reshape(gate, &rows);
        // 1 at the last pass of each token, a column for each pass.
        let e = self.passes_chosen(passes);
        let ones = self.ones(&each);
        let ends = self.b.op(PickGrad { experts: e }, &[ones, last]);
        let columns = self.b.ops(Split(vec![one; passes as usize]), &[ends]);
        let columns: Vec<Value> = columns.into_iter().map(|column| self.b.reshape(column, &rows)).collect();
        let behind =
            columns[pass as usize + 1..].iter().copied().reduce(|sum, column| self.b.add(sum, column));
        let ending = columns[pass as usize];
        let own = self.b.mul(ending, gate);
        let (running, factor) = match behind {
            Some(behind) => (self.b.add(behind, ending), self.b.add(behind, own)),
            None => (ending, own),
        };
        if pass == 0 {
            // No token chooses to make no pass.
            self.observe_skip(owner, x, gate, |_, ones| ones);
            let f = self.expr(inner, x)?;
            return Ok(self.b.mul(f, factor));
        }
        if self.form == Form::Declared {
            let tokens = self.b.module.size(rows[1]);
            let index = self.top_tokens(running, capacity, tokens);
            let taken = self.b.op(Op::TakeTokens, &[x, index]);
            let f = self.within(Inside::Gathered { index, of: rows[1], ints: vec![] }, inner, taken)?;
            let factor = self.b.op(Op::TakeTokens, &[factor, index]);
            let update = self.b.mul(f, factor);
            return Ok(self.b.op(PutTokens { tokens: rows[1] }, &[update, index]));
        }
        let decision = self.b.stop_gradient(running);
        let places = self.b.op(Decide { inclusive: false }, &[decision]);
        let places = self.taking_part(places);
        self.observe_skip(owner, x, gate, |lower, ones| lower.b.op(Op::Keep, &[ones, places]));
        let f = self.within(self.masked(places, capacity, false), inner, x)?;
        let update = self.b.mul(f, factor);
        Ok(self.b.op(Op::Keep, &[update, places]))
    }
}
