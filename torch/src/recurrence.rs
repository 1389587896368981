//! Recurrences as loops over tokens.

use crate::TorchError;
use crate::body::{At, Body, Method, read_in};
use crate::scope::{Made, Names, statements};
use crate::shape::{integer, listed};
use crate::tree::{Expr, Stmt};
use dreamc_compiler::build::Marks;
use dreamc_compiler::ir::{Binding, Dim, Function, Type, Value};
use dreamc_compiler::op::{Recurrence, Tokens};

/// A loop that is being written.
struct Loop {
    /// The variable of the token.
    t: String,
    /// The variables of the states.
    held: Vec<String>,
    /// Statements before it.
    before: Vec<Stmt>,
    /// Texts of the values that the step takes.
    params: Vec<(Value, Expr)>,
}

/// The statements of a recurrence, and its outputs.
pub fn written(
    body: &Body,
    at: &At,
    r: &Recurrence,
    x: &[Expr],
    outside: &Names,
) -> Result<Made, TorchError> {
    let first = match r.tokens {
        Tokens::All => 0,
        Tokens::Segments => 1,
        Tokens::Kept => return Err(TorchError::Unsupported("a recurrence that goes on from a state")),
    };
    let segments = x.first().filter(|_| first == 1);
    let unnamed = Marks::default();
    let marks = body.marks.steps.get(&at.first).unwrap_or(&unnamed);
    let step = batched(r.step.function(), at.input(first)[0]);
    let outputs = r.step.outputs().count();
    let mut names = outside.held();
    let mut l = begin(body, at, r, (&x[first..], &at.inputs[first..]), marks, &mut names);
    let lists: Vec<String> = (0..outputs).map(|k| names.take(if k == 0 { "o" } else { "more" })).collect();
    let empty = |list: &String| Stmt::Assign(vec![list.clone()], Expr::name("[]"), String::new());
    l.before.extend(lists.iter().map(empty));
    let marked = segments.map(|segments| (segments, names.take("marks")));
    let starts: Vec<String> = l.held.iter().map(|own| names.take(&format!("{own}0"))).collect();
    let wanted: Vec<Value> = step.results.iter().map(|(_, v)| *v).collect();
    let inner = Body { f: &step, marks, other: None, ..*body };
    let items = inner.items(0..step.nodes.len(), &read_in(&step, 0..step.nodes.len(), &wanted));
    let (mut inside, results) = statements(&items, &l.params, names, &wanted, &mut Method { body: &inner })?;
    let (given, left) = results.split_at(outputs);
    for (list, value) in lists.iter().zip(given) {
        inside.push(Stmt::Line(format!("{list}.append({})", value.text())));
    }
    let left = match &marked {
        None => left.to_vec(),
        Some((segments, mark)) => documents(&mut l, &mut inside, left, &starts, (segments, mark)),
    };
    let moved = l.held.iter().zip(left.iter().map(Expr::text)).filter(|(own, value)| **own != *value);
    let (to, from): (Vec<String>, Vec<String>) = moved.map(|(own, value)| (own.clone(), value)).unzip();
    if !to.is_empty() {
        inside.push(Stmt::Line(format!("{} = {}", to.join(", "), from.join(", "))));
    }
    l.before.push(Stmt::Block(format!("for {} in range({}.shape[1])", l.t, x[first].text()), inside));
    let stack = |list: &String| Expr::call("torch.stack", vec![Expr::name(list), integer(1)]);
    let stacked = lists.iter().map(|list| match segments {
        None => stack(list),
        Some(segments) => Expr::call("keep", vec![stack(list), segments.clone()]),
    });
    Ok(Made::Block(l.before, stacked.collect()))
}

/// The values that a step takes: rows stand first among the operands, states last; of the step
/// states stand first.
fn begin(
    body: &Body,
    at: &At,
    r: &Recurrence,
    (x, values): (&[Expr], &[Value]),
    marks: &Marks,
    names: &mut Names,
) -> Loop {
    let (states, rows) = (r.step.states().count(), r.step.row_count());
    let mut l = Loop { t: names.take("t"), held: vec![], before: vec![], params: vec![] };
    let others = x.len() - states;
    for (k, operand) in x[..others].iter().enumerate() {
        let row = operand.clone().index(format!(":, {}", l.t));
        l.params.push((Value((states + k) as u32), if k < rows { row } else { operand.clone() }));
    }
    for (k, (ty, initial)) in r.step.states().zip(&x[others..]).enumerate() {
        let value = Value(k as u32);
        let uses = body.f.nodes.iter().flat_map(|n| &n.inputs).filter(|v| **v == values[others + k]);
        let own = match initial {
            // Nothing else reads the initial state: the variable is the state's.
            Expr::Atom(name) if uses.count() == 1 && !at.inputs.is_empty() => name.clone(),
            _ => {
                let hint = marks.names.get(&value).cloned().unwrap_or_else(|| format!("state{}", k + 1));
                let own = names.take(&hint);
                l.before.push(Stmt::Assign(
                    vec![own.clone()],
                    initial.clone(),
                    listed(&ty.dims, body.module),
                ));
                own
            }
        };
        l.params.push((value, Expr::name(own.clone())));
        l.held.push(own);
    }
    l
}

/// A document begins on the initial states, and tokens of none pass them by: the states that a step
/// leaves.
fn documents(
    l: &mut Loop,
    inside: &mut Vec<Stmt>,
    left: &[Expr],
    starts: &[String],
    (segments, mark): (&Expr, &str),
) -> Vec<Expr> {
    let assign = |name: &str, x: Expr| Stmt::Assign(vec![name.to_string()], x, String::new());
    l.before.push(assign(mark, Expr::call("document_marks", vec![segments.clone()])));
    for (own, start) in l.held.iter().zip(starts) {
        // A batch of one, which each sequence has a copy of.
        l.before.push(assign(start, Expr::name(own).index("None")));
        l.before.push(assign(own, Expr::name(start)));
    }
    let chosen = |which: &str, a: Expr, b: &str| {
        let condition = Expr::name(format!("{mark}.{which}[:, {}]", l.t));
        Expr::call("choose", vec![condition, a, Expr::name(b)])
    };
    let begins = l.held.iter().zip(starts);
    let begins = begins.map(|(own, start)| assign(own, chosen("begins", Expr::name(start), own)));
    inside.splice(0..0, begins.collect::<Vec<_>>());
    l.held.iter().zip(left).map(|(own, value)| chosen("taking", value.clone(), own)).collect()
}

/// A step with the batch as the first dimension of everything that rows or states go into.
fn batched(step: &Function, batch: Dim) -> Function {
    let mut f = step.clone();
    let mut of_batch: Vec<bool> = f.params.iter().map(|p| p.binding != Binding::Weight).collect();
    for node in &f.nodes {
        let any = node.inputs.iter().any(|v| of_batch[v.index()]);
        of_batch.extend(node.results().map(|_| any));
    }
    for (ty, of_batch) in f.types.iter_mut().zip(of_batch) {
        if of_batch {
            *ty = Type::f32(&[&[batch], &ty.dims[..]].concat());
        }
    }
    f
}
