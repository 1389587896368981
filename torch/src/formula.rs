//! Scores and masks of attention as lambdas.

use crate::TorchError;
use crate::tree::Expr;
use dreamc_compiler::op::attention::formula::{Binary, Formula, Place, Program, Step, Unary};

/// The value of a formula, whose operands are those of the attention after its mask.
pub fn expression(formula: &Formula, program: &Program, reads: &[Expr]) -> Result<Expr, TorchError> {
    let mut made: Vec<Expr> = vec![];
    for step in formula.steps() {
        let of = |k: usize| made[k].clone();
        made.push(match *step {
            Step::Number(x) => Expr::number(x.0),
            Step::Score => Expr::name("s"),
            Step::Query => Expr::name("i"),
            Step::Key => Expr::name("j"),
            Step::Head => Expr::name("head"),
            Step::Read(k) => read(program, reads, k),
            Step::Lookup(k, at) => look_up(program, reads, k, of(at)),
            Step::Unary(f, x) => unary(f, of(x)),
            Step::Binary(f, a, b) => binary(f, of(a), of(b)),
            Step::Where(c, a, b) => {
                let condition = Expr::infix(">", of(c), Expr::name("0"));
                Expr::call("torch.where", vec![condition, of(a), of(b)])
            }
        });
    }
    made.pop().ok_or(TorchError::Unsupported("an empty formula"))
}

/// An operand where the pair reads it.
fn read(program: &Program, reads: &[Expr], k: usize) -> Expr {
    let (of, x) = (program.reads[k], reads[k].clone());
    match (of.place, of.heads) {
        (Place::Query, _) => Expr::call("at_query", vec![x]),
        (Place::Key, _) => Expr::call("at_key", vec![x]),
        (Place::All, true) => x.index("head"),
        (Place::All | Place::Table, _) => x,
    }
}

fn look_up(program: &Program, reads: &[Expr], k: usize, at: Expr) -> Expr {
    let head = program.reads[k].heads.then(|| Expr::name("head"));
    let args = [reads[k].clone(), at].into_iter().chain(head).collect();
    Expr::call("look_up", args)
}

fn unary(f: Unary, x: Expr) -> Expr {
    match f {
        Unary::Neg => Expr::Neg(Box::new(x)),
        Unary::Exp => function("torch.exp", x),
        Unary::Log => function("torch.log", x),
        Unary::Sqrt => function("torch.sqrt", x),
        Unary::Abs => function("abs", x),
        Unary::Tanh => function("torch.tanh", x),
        Unary::Sin => function("torch.sin", x),
        Unary::Cos => function("torch.cos", x),
        Unary::Floor => function("torch.floor", x),
        Unary::Stop => x.method("detach", vec![]),
    }
}

fn function(name: &str, x: Expr) -> Expr {
    Expr::call(name, vec![x])
}

fn binary(f: Binary, a: Expr, b: Expr) -> Expr {
    let truth = |op| function("truth", Expr::infix(op, a.clone(), b.clone()));
    match f {
        Binary::Add => Expr::infix("+", a, b),
        Binary::Sub => Expr::infix("-", a, b),
        Binary::Mul => Expr::infix("*", a, b),
        Binary::Div => Expr::infix("/", a, b),
        Binary::Min => Expr::call("smaller", vec![a, b]),
        Binary::Max => Expr::call("larger", vec![a, b]),
        Binary::Less => truth("<"),
        Binary::AtMost => truth("<="),
        Binary::Equal => truth("=="),
    }
}
