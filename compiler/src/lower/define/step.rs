//! Recurrences: the statements of a body as the function of one step.
//!
//! Operands of a body that no token before it made are computed outside, for all tokens at once:
//! numbers of the token, weights. States, what is read of the token, and what is constant are the
//! operands of the step.

use super::*;
use crate::op::linear_attention::outside::{self, Place};
use crate::op::linear_attention::recognise;
use crate::op::recurrence::Program;
use crate::op::{LinearAttention, Recurrence, Step, Tokens};
use dreamc_dsl::define::graph::From as Begins;
use smallvec::smallvec;

/// The dimensions of a recurrence's body.
struct Inside<'g> {
    graph: &'g Graph,
    /// The recurrence.
    node: &'g Node,
    body: &'g Region,
    dims: &'g [Dim],
}

impl Inside<'_> {
    /// The weight that a value of the body is: written in it, or read of the operands.
    fn weight(&self, value: ValueId) -> Option<&graph::Weight> {
        let found = match &self.body.node(value).function {
            Of::Read(k) => &self.graph.region.node(*self.node.args.get(*k as usize)?).function,
            function => function,
        };
        match found {
            Of::Weight(id) => self.graph.weights.get(id.0 as usize),
            _ => None,
        }
    }
}

/// The operands of a step: values of the function around, by where the body reads them.
#[derive(Default)]
struct Operands {
    /// Of each token.
    rows: Vec<(Source, Value)>,
    /// The same for all.
    constants: Vec<(Source, Value)>,
}

/// Where a body reads an operand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// That operand of the recurrence.
    Read(u32),
    /// That value of the body, which is computed outside.
    Node(ValueId),
    /// The numbers 0, 1, … along that dimension.
    Places(DimId),
    /// Nowhere: a step has a row.
    Nothing,
}

impl Lower<'_> {
    /// The results of a recurrence that something reads: first the states, then the values.
    pub(super) fn recurrence(
        &mut self,
        d: &mut Defining,
        node: &Node,
        r: &graph::Recurrence,
    ) -> Result<Vec<Value>, CompileError> {
        let here = d.values.len() as u32;
        let wanted: Vec<usize> = (0..r.body.results.len())
            .filter(|k| {
                let reads = |n: &Node| {
                    matches!(n.function, Of::Emitted(number) if number as usize == *k)
                        && n.args.first() == Some(&ValueId(here))
                };
                d.graph.region.nodes.iter().any(reads)
            })
            .collect();
        if wanted.is_empty() {
            return Ok(vec![d.input; r.body.results.len().max(1)]);
        }
        let operands = self.step_operands(d, node, &r.body)?;
        let (step, marks_of_step) = self.step(d, (node, r), &operands, &wanted)?;
        Program::forward(self.b.module, &step).map_err(|_| {
            CompileError::Unsupported(
                "a function in a recurrence that is no function of elements, sum, product, norm, softmax or change of shape or order",
            )
        })?;
        let given = operands.rows.iter().chain(&operands.constants).map(|(_, v)| *v).collect();
        let mut results = match self.sequence(&d.rows) {
            (Tokens::Kept, Some(slots)) => self.of_texts(d, node, r, (&step, given), slots)?,
            (tokens, marks) => {
                let initial = self.initial_states(d, node, r)?;
                for (&value, state) in initial.iter().zip(&r.states) {
                    self.b.call(value, &state.name);
                }
                let all = [marks.into_iter().collect(), given, initial].concat();
                self.b.ops(Recurrence { step, tokens }, &all)
            }
        };
        if let Some(&first) = results.first() {
            self.b.explain(first, marks_of_step);
        }
        let mut all = vec![d.input; r.body.results.len()];
        for (k, value) in wanted.into_iter().zip(results.drain(..)) {
            all[k] = value;
        }
        Ok(all)
    }

    /// The results of a step on the states of texts. Where it is linear attention it runs as that:
    /// no rule of rewriting makes an operation with state.
    fn of_texts(
        &mut self,
        d: &mut Defining,
        node: &Node,
        r: &graph::Recurrence,
        (step, given): (&Step, Vec<Value>),
        slots: Value,
    ) -> Result<Vec<Value>, CompileError> {
        let elements = step.state_elements(self.b.module).saturating_add(1);
        let (part, n) = (d.text_state(), self.dim_of(d.owner, &format!(".state{elements}"), elements));
        let (port, state) = self.text_state(d.owner, part, &[n]);
        let from_zero = r.states.iter().all(|s| matches!(s.from, Begins::Number(0.0)));
        if let Some(found) = recognise(step).ok().filter(|_| from_zero) {
            let made = self.b.attempt(|b| {
                let moved = outside::operands(b, step, &found, Tokens::Kept, &given)?;
                let inputs = [&moved.inputs[..], &[state, slots]].concat();
                let read = b.make(LinearAttention(moved.form.clone()).into(), &inputs)?;
                Some((moved.outputs(b, read)?, Value(read.0 + 1)))
            });
            if let Some((results, state)) = made {
                self.b.result(port, state);
                return Ok(results);
            }
        }
        let initial = self.initial_states(d, node, r)?;
        let recurrence = Recurrence { step: step.clone(), tokens: Tokens::Kept };
        let mut results = self.b.ops(recurrence, &[vec![state, slots], given, initial].concat());
        self.b.result(port, results.remove(0));
        Ok(results)
    }

    /// The operands that a body reads.
    fn step_operands(
        &mut self,
        d: &mut Defining,
        node: &Node,
        body: &Region,
    ) -> Result<Operands, CompileError> {
        let mut operands = Operands::default();
        let mut seen = vec![];
        for dim in numbered(body) {
            let of = d.dim(dim);
            let places = self.formulas(&d.rows).places(of);
            operands.constants.push((Source::Places(dim), places));
        }
        for (i, n) in body.nodes.iter().enumerate() {
            let (source, value, per_token) = match &n.function {
                Of::Read(k) => {
                    let ty = d.made(node, *k as usize).map(|made| made.ty.per_token);
                    (Source::Read(*k), d.arg(node, *k as usize)?, ty.unwrap_or(false))
                }
                Of::Weight(weight) => {
                    (Source::Node(ValueId(i as u32)), self.own_weight(d, *weight, false), false)
                }
                Of::Fact(fact) => {
                    (Source::Node(ValueId(i as u32)), self.fact(*fact)?, *fact == Fact::Position)
                }
                Of::Noise(deviation) => {
                    let dims = [&d.rows[..], &[self.hidden()]].concat();
                    let noise = self.noise(&dims);
                    (Source::Node(ValueId(i as u32)), self.b.scale(noise, *deviation), true)
                }
                Of::Input => (Source::Node(ValueId(i as u32)), d.input, true),
                // A body makes these itself, or refuses them.
                Of::Number(_)
                | Of::Unary(_)
                | Of::Binary(_)
                | Of::Where
                | Of::Outer
                | Of::Reduce(..)
                | Of::Softmax(_)
                | Of::Norm { .. }
                | Of::Dot(_)
                | Of::Linear(_)
                | Of::Split(..)
                | Of::Merge(..)
                | Of::Join(..)
                | Of::Slice { .. }
                | Of::Top { .. }
                | Of::Pick
                | Of::Stop
                | Of::Embedding
                | Of::Rope { .. }
                | Of::Shift(_)
                | Of::Conv(_)
                | Of::Running(_)
                | Of::Average { .. }
                | Of::Choose(_)
                | Of::Scores
                | Of::Mass
                | Of::Attend(_)
                | Of::Recurrence(_)
                | Of::Emitted(_)
                | Of::DepthAttend { .. }
                | Of::Earlier(_)
                | Of::ValueOf(..)
                | Of::Apply(_)
                | Of::State(_)
                | Of::Score
                | Of::QueryPlace
                | Of::KeyPlace
                | Of::Head(_)
                | Of::AtQuery(_)
                | Of::AtKey(_)
                | Of::Look(_) => continue,
            };
            if seen.contains(&source) {
                continue;
            }
            seen.push(source);
            if per_token {
                let mut value = self.each_token(d, value);
                // A position is that of the token in every pass.
                if !matches!(n.function, Of::Fact(_) | Of::Noise(_)) {
                    value = self.of_last_token(d, value);
                }
                operands.rows.push((source, value));
            } else {
                operands.constants.push((source, value));
            }
        }
        if operands.rows.is_empty() {
            let zeros = self.b.zeros(&Type::f32(&d.rows));
            operands.rows.push((Source::Nothing, zeros));
        }
        Ok(operands)
    }

    /// The states before the first token.
    fn initial_states(
        &mut self,
        d: &Defining,
        node: &Node,
        r: &graph::Recurrence,
    ) -> Result<Vec<Value>, CompileError> {
        let mut all = vec![];
        for state in &r.states {
            let dims = d.dims(&state.dims);
            let value = match state.from {
                Begins::Number(x) => self.b.constant(x),
                Begins::Operand(k) => d.arg(node, k as usize)?,
            };
            all.push(self.formulas(&d.rows).spread(value, &dims, false));
        }
        // A number is not a tensor.
        let ones = |l: &mut Self, v: Value| match l.b.dims(v).is_empty() {
            true => {
                let zeros = l.b.zeros(&Type::f32(&[]));
                l.b.add(zeros, v)
            }
            false => v,
        };
        Ok(all.into_iter().map(|v| ones(self, v)).collect())
    }

    /// The function of one step, whose outputs are these results of the body.
    fn step(
        &mut self,
        d: &Defining,
        (node, r): (&Node, &graph::Recurrence),
        operands: &Operands,
        wanted: &[usize],
    ) -> Result<(Step, Marks), CompileError> {
        let type_of = |v: Value, rows: usize| Dims::from_slice(&self.b.dims(v)[rows..]);
        let rows: Vec<(Source, Dims)> =
            operands.rows.iter().map(|&(source, v)| (source, type_of(v, d.rows.len()))).collect();
        let constants: Vec<(Source, Dims)> =
            operands.constants.iter().map(|&(source, v)| (source, type_of(v, 0))).collect();
        let inside = Inside { graph: d.graph, node, body: &r.body, dims: &d.dims };
        let mut b = Builder::new(self.b.module, "step");
        let state = Binding::State(Lifetime::Depth);
        let states: Vec<Value> = r
            .states
            .iter()
            .enumerate()
            .map(|(i, s)| b.param(&format!("s{i}"), state, Type::f32(&d.dims(&s.dims))))
            .collect();
        let mut sources: Vec<(Source, Value)> = vec![];
        for (kind, binding, list) in [("x", Binding::Value, &rows), ("c", Binding::Weight, &constants)] {
            for (i, (source, dims)) in list.iter().enumerate() {
                sources.push((*source, b.param(&format!("{kind}{i}"), binding, Type::f32(dims))));
            }
        }
        let places = sources.iter().filter_map(|(source, v)| match source {
            Source::Places(dim) => Some((d.dim(*dim), *v)),
            Source::Read(_) | Source::Node(_) | Source::Nothing => None,
        });
        let places = places.collect();
        let mut values = Values { b: &mut b, rows: smallvec![], places };
        let mut made: Vec<Value> = vec![];
        for (i, n) in r.body.nodes.iter().enumerate() {
            let found = |wanted: Source| sources.iter().find(|(s, _)| *s == wanted).map(|(_, v)| *v);
            let value = match &n.function {
                Of::State(k) => states.get(*k as usize).copied().ok_or(MALFORMED)?,
                Of::Read(k) => found(Source::Read(*k)).ok_or(MALFORMED)?,
                Of::Weight(_) | Of::Fact(_) | Of::Noise(_) | Of::Input => {
                    found(Source::Node(ValueId(i as u32))).ok_or(MALFORMED)?
                }
                Of::Number(_)
                | Of::Unary(_)
                | Of::Binary(_)
                | Of::Where
                | Of::Outer
                | Of::Reduce(..)
                | Of::Softmax(_)
                | Of::Norm { .. }
                | Of::Dot(_)
                | Of::Linear(_)
                | Of::Split(..)
                | Of::Merge(..)
                | Of::Join(..)
                | Of::Slice { .. }
                | Of::Top { .. }
                | Of::Pick
                | Of::Stop
                | Of::Embedding
                | Of::Rope { .. }
                | Of::Shift(_)
                | Of::Conv(_)
                | Of::Running(_)
                | Of::Average { .. }
                | Of::Choose(_)
                | Of::Scores
                | Of::Mass
                | Of::Attend(_)
                | Of::Recurrence(_)
                | Of::Emitted(_)
                | Of::DepthAttend { .. }
                | Of::Earlier(_)
                | Of::ValueOf(..)
                | Of::Apply(_)
                | Of::Score
                | Of::QueryPlace
                | Of::KeyPlace
                | Of::Head(_)
                | Of::AtQuery(_)
                | Of::AtKey(_)
                | Of::Look(_) => values.in_step(n, &made, &inside)?,
            };
            made.push(value);
        }
        for (n, &value) in r.body.nodes.iter().zip(&made) {
            n.name.iter().for_each(|name| values.b.call(value, name));
        }
        let result = |k: usize| r.body.results.get(k).map(|v| made[v.0 as usize]).ok_or(MALFORMED);
        let mut results = vec![];
        for &k in wanted {
            results.push((Port::new(format!("y{k}"), Binding::Value), result(k)?));
        }
        for (i, s) in r.states.iter().enumerate() {
            let left = values.spread(result(i)?, &d.dims(&s.dims), true);
            results.push((Port::new(format!("s{i}"), state), left));
        }
        for (port, value) in results {
            b.result(port, value);
        }
        let marks = b.marks();
        Ok((Step::from(b.finish()?), marks))
    }
}

/// The dimensions of whose places a body chooses or speaks.
fn numbered(body: &Region) -> Vec<DimId> {
    let mut all = vec![];
    for n in &body.nodes {
        if let Of::Top { over, choices } = n.function {
            all.extend([over, choices]);
        } else if let Of::Head(dim) = n.function {
            all.push(dim);
        } else if n.function == Of::Pick {
            all.extend(n.args.get(1).and_then(|&places| body.node(places).ty.places_of));
        }
    }
    all.sort();
    all.dedup();
    all
}

impl Values<'_, '_> {
    /// A value of a step.
    fn in_step(&mut self, n: &Node, made: &[Value], inside: &Inside) -> Result<Value, CompileError> {
        let dim = |d: &DimId| inside.dims[d.0 as usize];
        let arg = |k: usize| n.args.get(k).map(|v| made[v.0 as usize]).ok_or(MALFORMED);
        let own: Dims = n.ty.dims.iter().map(dim).collect();
        match &n.function {
            Of::Linear(over) => {
                let over: Dims = over.iter().map(dim).collect();
                let weight = n.args.get(1).and_then(|&w| inside.weight(w)).ok_or(MALFORMED)?;
                let outs = &weight.dims[..weight.dims.len() - weight.inputs];
                let outs: Dims = outs.iter().map(dim).collect();
                let y = self.product(arg(0)?, arg(1)?, &over, (&outs, &own));
                Ok(match n.args.get(2) {
                    Some(_) => self.binary(ir::Binary::Add, y, arg(2)?, &own),
                    None => y,
                })
            }
            Of::Slice { of, from, to } => {
                let (all, size) = (inside.graph.size(*of), inside.graph.size(*to));
                let x = self.last(arg(0)?, &[dim(of)]);
                let mut parts = vec![];
                let rest = all.saturating_sub(from + size);
                for (n, part) in [(*from, None), (size, Some(dim(to))), (rest, None)] {
                    match part {
                        Some(part) => parts.push(part),
                        None if n > 0 => parts.push(self.b.module.dim(format!("left{n}"), n)),
                        None => {}
                    }
                }
                let at = usize::from(*from > 0);
                let y = if parts.len() == 1 {
                    let left = self.own(x);
                    self.reshaped(x, &[&left[..left.len() - 1], &parts].concat())
                } else {
                    self.b.ops(Split(parts.into()), &[x])[at]
                };
                Ok(self.ordered(y, &own))
            }
            Of::Head(of) => Ok(self.places(dim(of))),
            function => match function.reads() {
                Reads::Nothing | Reads::Token => {
                    let args: Vec<Value> = n.args.iter().map(|v| made[v.0 as usize]).collect();
                    self.node(n, &args, inside.body, inside.dims)
                }
                Reads::Place | Reads::Losses | Reads::Tokens | Reads::Depths => {
                    Err(CompileError::Unsupported("a function of other tokens, or of depth, in a recurrence"))
                }
                Reads::Region => Err(MALFORMED),
            },
        }
    }
}
