//! Docstrings: the definition of a component as it was written, or the formula of a built-in one
//! with its paper.

use dreamc_compiler::architecture::{Architecture, Work};
use dreamc_dsl::spec::Expr;

/// That of a component.
pub fn of_component(architecture: &Architecture, name: &str) -> String {
    let Some(component) = architecture.model.components.get(name) else { return String::new() };
    component.formula(component.kind().mixes())
}

/// That of a layer or a statement.
pub fn of_body(architecture: &Architecture, body: usize) -> String {
    match &architecture.bodies[body].work {
        Work::Layer(expr) => format!("layer {{ {} }}", composition(expr)),
        Work::Statement(_) => "A statement on the stream.".into(),
        Work::Embed => "The vector that a pass of a loop adds to the stream where it begins.".into(),
        Work::Enter => "The place before a loop whose passes share out the loss.".into(),
        Work::Exit(_) => "The loss of a pass that is not the last.".into(),
        Work::Choose(_) => "Where every token chooses how many passes of the loop it makes.".into(),
        Work::Chosen => "The streams of a loop's passes, weighed for each token.".into(),
        Work::Remember(_) => "Keeps the stream for later statements.".into(),
        Work::History(_) => "Mixes streams that were kept.".into(),
    }
}

/// A composition as the text has it: `a > b` reads what `a` wrote, `a | b` read the same.
fn composition(expr: &Expr) -> String {
    match expr {
        Expr::Component(name) => name.clone(),
        Expr::Norm => "norm".into(),
        Expr::Sequential(terms) => terms.iter().map(term).collect::<Vec<_>>().join(" > "),
        Expr::Parallel(terms) => terms.iter().map(term).collect::<Vec<_>>().join(" | "),
        Expr::Skip(_, inner) => format!("skip {{ {} }}", composition(inner)),
    }
}

fn term(expr: &Expr) -> String {
    match expr {
        Expr::Sequential(_) | Expr::Parallel(_) => format!("({})", composition(expr)),
        Expr::Component(_) | Expr::Norm | Expr::Skip(..) => composition(expr),
    }
}
