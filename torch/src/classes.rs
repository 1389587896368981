//! Tensors as attributes of classes, under the names that checkpoints have.

use crate::scope::identifier;
use crate::shape::listed;
use crate::tree::{Expr, Stmt};
use dreamc_compiler::bind::{Factor, Slice};
use dreamc_compiler::compiled::{Init, TensorKind};
use dreamc_compiler::ir::Module;
use dreamc_compiler::lower::Weight;
use std::collections::BTreeSet;

/// Attributes that modules of PyTorch have already.
const MODULE: [&str; 24] = [
    "forward",
    "train",
    "eval",
    "half",
    "float",
    "double",
    "type",
    "to",
    "cpu",
    "cuda",
    "apply",
    "children",
    "modules",
    "parameters",
    "buffers",
    "training",
    "compile",
    "share_memory",
    "state_dict",
    "register_buffer",
    "zero_grad",
    "dump_patches",
    "bfloat16",
    "extra_repr",
];

/// A word of a name as an attribute.
pub fn attribute(word: &str) -> String {
    if word.chars().all(|c| c.is_ascii_digit()) {
        return word.into();
    }
    let name = identifier(word);
    // A helper's name is no attribute's.
    let name = if crate::helpers::is_helper(word) { word.to_string() } else { name };
    if MODULE.contains(&name.as_str()) { name + "_" } else { name }
}

/// The name that a tensor has in the module.
pub fn renamed(name: &str) -> String {
    name.split('.').map(attribute).collect::<Vec<_>>().join(".")
}

/// `self.a.b["0"].c` of `a.b.0.c`.
pub fn path(name: &str) -> Expr {
    name.split('.').fold(Expr::name("self"), |at, word| match attribute(word) {
        word if word.starts_with(|c: char| c.is_ascii_digit()) => at.index(format!("\"{word}\"")),
        word => at.attribute(&word),
    })
}

/// The lines that make tensors; names are those inside the class.
pub fn declared(tensors: &[(String, &Weight)], module: &Module) -> Vec<Stmt> {
    let (mut stmts, mut after) = (vec![], vec![]);
    let mut made: BTreeSet<String> = BTreeSet::new();
    for (name, weight) in tensors {
        let shape = weight.shape(module);
        let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
        let mut comment = listed(&weight.dims, module);
        if weight.passes.is_some() {
            comment = format!("passes, {comment}");
        }
        if let Init::Ramp(first, last) = weight.init {
            comment = format!("{comment}: {first} in the first layer, {last} in the last");
        }
        let (above, last) = name.rsplit_once('.').unwrap_or(("", name));
        containers(above, last == "weight" && weight.kind != TensorKind::Balance, &mut made, &mut stmts);
        if last == "weight"
            && weight.kind != TensorKind::Balance
            && !above.is_empty()
            && made.insert(above.into())
        {
            let value = Expr::call("Weight", vec![beginning(weight.init, &sizes)]);
            stmts.push(assigned(above, value, comment));
            continue;
        }
        if let Some(norms) = norms(name, weight, module) {
            containers(above, false, &mut made, &mut stmts);
            after.push(assigned(name, Expr::call("nn.Parameter", vec![norms]), comment));
            continue;
        }
        let begins = beginning(weight.init, &sizes);
        if weight.kind == TensorKind::Balance {
            let of = if above.is_empty() { Expr::name("self") } else { path(above) };
            let call = of.method("register_buffer", vec![Expr::name(format!("\"{last}\"")), begins]);
            stmts.push(Stmt::Line(format!("{}  # {comment}", call.text())));
        } else {
            stmts.push(assigned(name, Expr::call("nn.Parameter", vec![begins]), comment));
        }
    }
    // Matrices are there by then.
    stmts.extend(after);
    stmts
}

/// The norms of an adapted matrix's rows, as which an adapter's magnitudes begin.
fn norms(name: &str, weight: &Weight, module: &Module) -> Option<Expr> {
    let Some((matrix, Factor::Magnitude | Factor::Norm)) = weight.part.adapter() else { return None };
    let of = format!("{}{}", name.strip_suffix(weight.part.path())?, matrix.path());
    let rows = weight.dims.last().map_or(0, |&d| module.size(d));
    let own = match matrix.rows() {
        Slice::All => String::new(),
        Slice::First(_) => format!("[..., :{rows}, :]"),
        Slice::Last(_, 1) => format!("[..., -{rows}:, :]"),
        Slice::Last(_, n) => format!("[..., -{}:-{}, :]", n * rows, (n - 1) * rows),
    };
    let matrix = Expr::name(format!("{}{own}", path(&of).text()));
    Some(matrix.method("detach", vec![]).method("norm", vec![Expr::name("dim=-1")]))
}

/// How a tensor of these sizes begins.
fn beginning(init: Init, sizes: &[String]) -> Expr {
    let all = || sizes.iter().map(Expr::name).collect();
    let shape = || Expr::name(format!("({},)", sizes.join(", ")));
    let uniform = |a: f64, b: f64| {
        Expr::call("torch.empty", all()).method("uniform_", vec![Expr::number(a), Expr::number(b)])
    };
    match init {
        Init::Normal(deviation) => {
            let deviation = (deviation * 1e6).round() / 1e6;
            Expr::infix("*", Expr::call("torch.randn", all()), Expr::number(deviation))
        }
        Init::Constant(0.0) => Expr::call("torch.zeros", all()),
        Init::Constant(1.0) => Expr::call("torch.ones", all()),
        Init::Constant(c) | Init::Ramp(c, _) => Expr::call("torch.full", vec![shape(), Expr::number(c)]),
        Init::Identity { columns, from } => picked(shape(), columns, from, 1),
        Init::Pick { place, step, columns } => picked(shape(), columns, place, step),
        Init::Uniform(a, b) => uniform(a, b),
        Init::LogUniform(a, b) => uniform(a, b).method("log", vec![]),
        Init::InverseSoftplusUniform(a, b) => {
            let steps = uniform(a.ln(), b.ln()).method("exp", vec![]);
            steps.method("expm1", vec![]).method("log", vec![])
        }
    }
}

/// Rows, each with a 1 at its place.
fn picked(shape: Expr, columns: u64, place: u64, step: u64) -> Expr {
    let numbers = [columns, place, step].map(|n| crate::shape::integer(n as i64));
    Expr::call("picked", [shape].into_iter().chain(numbers).collect())
}

fn assigned(name: &str, value: Expr, comment: String) -> Stmt {
    match name.rsplit_once('.') {
        Some((above, word)) if word.chars().all(|c| c.is_ascii_digit()) => {
            Stmt::Assign(vec![path(above).index(format!("\"{word}\"")).text()], value, comment)
        }
        _ => Stmt::Assign(vec![path(name).text()], value, comment),
    }
}

/// Modules above a tensor; the last is left to the tensor where `own`.
fn containers(above: &str, own: bool, made: &mut BTreeSet<String>, stmts: &mut Vec<Stmt>) {
    let words: Vec<&str> = above.split('.').filter(|w| !w.is_empty()).collect();
    for n in 1..=words.len() {
        let name = words[..n].join(".");
        if made.contains(&name) || (own && n == words.len()) {
            continue;
        }
        let numbered = words.get(n).is_some_and(|w| w.chars().all(|c| c.is_ascii_digit()));
        made.insert(name.clone());
        let value = Expr::call(if numbered { "nn.ModuleDict" } else { "nn.Module" }, vec![]);
        stmts.push(assigned(&name, value, String::new()));
    }
}
