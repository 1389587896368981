//! Names of a definition and where they stand, for editors.

use super::syntax::*;
use crate::ast::{Ast, ValueKind};
use crate::source::Span;

/// The things that names are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// A value, a setting or a dimension of this definition.
    Value,
    /// A definition.
    Definition,
}

/// A name where it is given or used.
#[derive(Clone, Debug, PartialEq)]
pub struct Use {
    /// The thing that it names.
    pub of: Of,
    /// The name.
    pub name: String,
    /// Its token.
    pub span: Span,
    /// Whether it is given here.
    pub gives: bool,
}

/// The definitions of a file as they are written.
pub fn definitions(ast: &Ast) -> Vec<Definition> {
    match ast.root.get("define").map(|pair| &pair.value.kind) {
        Some(ValueKind::Map(map)) => super::read::definitions(map, &ast.source, &mut Vec::new()),
        _ => Vec::new(),
    }
}

/// The names of a definition, those that it gives and their uses.
pub fn names(definition: &Definition) -> Vec<Use> {
    let mut finder = Finder { all: Vec::new() };
    finder.add(Of::Definition, &definition.name, true);
    for setting in &definition.settings {
        finder.add(Of::Value, &setting.name, true);
        setting.default.iter().for_each(|default| finder.expr(default));
    }
    finder.statements(&definition.body);
    let given: Vec<String> = finder.all.iter().filter(|own| own.gives).map(|own| own.name.clone()).collect();
    finder.all.retain(|own| own.of == Of::Definition || given.contains(&own.name));
    finder.all
}

struct Finder {
    all: Vec<Use>,
}

impl Finder {
    fn add(&mut self, of: Of, name: &Name, gives: bool) {
        // A state is given where it is declared, and a name of a recurrence where it is first.
        let before = self.all.iter().any(|own| own.of == of && own.gives && own.name == name.text);
        self.all.push(Use { of, name: name.text.clone(), span: name.span, gives: gives && !before });
    }

    fn statements(&mut self, statements: &[Statement]) {
        for statement in statements {
            match statement {
                Statement::Assign(name, value) => {
                    self.add(Of::Value, name, true);
                    self.expr(value);
                }
                Statement::Loss(value) | Statement::Return(value) => self.expr(value),
                Statement::Recurrence(recurrence) => {
                    for state in &recurrence.states {
                        self.add(Of::Value, &state.name, true);
                        self.dims(&state.dims);
                        state.from.iter().for_each(|from| self.expr(from));
                    }
                    self.statements(&recurrence.body);
                }
            }
        }
    }

    fn dims(&mut self, dims: &[DimExpr]) {
        for dim in dims {
            self.add(Of::Value, &dim.name, dim.size.is_some());
            dim.size.iter().for_each(|size| self.expr(size));
        }
    }

    fn expr(&mut self, expr: &Expr) {
        match &expr.kind {
            ExprKind::Number(_) | ExprKind::Value(..) | ExprKind::Invalid => {}
            ExprKind::Name(name) => self.add(Of::Value, &Name { text: name.clone(), span: expr.span }, false),
            ExprKind::Negate(a) | ExprKind::Not(a) | ExprKind::Group(a) => self.expr(a),
            ExprKind::Binary(_, a, b) => {
                self.expr(a);
                self.expr(b);
            }
            ExprKind::Index(of, places) => {
                self.expr(of);
                places.iter().for_each(|place| self.expr(place));
            }
            ExprKind::Call(call) => {
                if super::functions::function(&call.name.text).is_none() {
                    self.add(Of::Definition, &call.name, false);
                }
                for argument in &call.arguments {
                    match &argument.kind {
                        ArgumentKind::Value(value) | ArgumentKind::Named(_, value) => self.expr(value),
                        ArgumentKind::Word(_, values) => values.iter().for_each(|value| self.expr(value)),
                        ArgumentKind::Dims(dims) => self.dims(dims),
                    }
                }
            }
        }
    }
}
