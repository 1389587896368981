//! The tree of a definition, as it is written. Nothing is resolved here.

use std::sync::Arc;

use indexmap::IndexMap;
use serde::{Serialize, Serializer};

use crate::ast::Map;
use crate::source::Span;

/// A definition as it was written.
#[derive(Clone, Debug)]
pub struct Definition {
    /// Its name.
    pub name: Name,
    /// Its settings, in order.
    pub settings: Vec<Setting>,
    /// Its statements.
    pub body: Vec<Statement>,
    /// The lines of its body as they were written, comments included.
    pub text: String,
    /// From its name to its last brace.
    pub span: Span,
    /// The definitions that it applies, by name.
    pub uses: IndexMap<String, Arc<Definition>>,
    /// Whether it is of the library: its spans are of its own text.
    pub library: bool,
}

/// Two definitions are equal where their texts are, wherever they stand.
impl PartialEq for Definition {
    fn eq(&self, other: &Definition) -> bool {
        self.name.text == other.name.text
            && self.settings.len() == other.settings.len()
            && self.settings.iter().zip(&other.settings).all(|(a, b)| a.name.text == b.name.text)
            && self.settings.iter().zip(&other.settings).all(|(a, b)| a.text == b.text)
            && self.text == other.text
            && self.uses == other.uses
    }
}

impl Serialize for Definition {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.name.text)
    }
}

/// A name at its token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Its text.
    pub text: String,
    /// Its token.
    pub span: Span,
}

/// A setting of a definition.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Its name.
    pub name: Name,
    /// Its default: arithmetic over settings before it.
    pub default: Option<Expr>,
    /// The default as it was written.
    pub text: String,
}

/// A statement.
#[derive(Clone, Debug)]
pub enum Statement {
    /// `name = value`
    Assign(Name, Expr),
    /// `recurrence S [dims] from 0 { … }`
    Recurrence(Recurrence),
    /// `loss value`
    Loss(Expr),
    /// `return value`
    Return(Expr),
}

/// Statements that run once a token, and the states that they keep.
#[derive(Clone, Debug)]
pub struct Recurrence {
    /// Its states.
    pub states: Vec<State>,
    /// Its statements.
    pub body: Vec<Statement>,
    /// The word `recurrence`.
    pub span: Span,
}

/// A state of a recurrence.
#[derive(Clone, Debug)]
pub struct State {
    /// Its name.
    pub name: Name,
    /// Its dimensions.
    pub dims: Vec<DimExpr>,
    /// Its value before the first token; zero where nothing is written.
    pub from: Option<Expr>,
}

/// An expression.
#[derive(Clone, Debug)]
pub struct Expr {
    /// The expression itself.
    pub kind: ExprKind,
    /// Its token.
    pub span: Span,
}

/// The kinds of expressions.
#[derive(Clone, Debug)]
pub enum ExprKind {
    /// A number as it was written.
    Number(String),
    /// A value, a setting, or a number of the token such as `position`.
    Name(String),
    /// `-a`
    Negate(Box<Expr>),
    /// `not a`
    Not(Box<Expr>),
    /// `a + b`
    Binary(Operator, Box<Expr>, Box<Expr>),
    /// `(a)`
    Group(Box<Expr>),
    /// A function, or another component, applied: `f(a, over d)`.
    Call(Call),
    /// `component.value`
    Value(Name, Name),
    /// `c[i]`
    Index(Box<Expr>, Vec<Expr>),
    /// Something that was reported when it was read.
    Invalid,
}

/// A function applied.
#[derive(Clone, Debug)]
pub struct Call {
    /// Its name.
    pub name: Name,
    /// Its arguments.
    pub arguments: Vec<Argument>,
    /// The keys of a component, between braces after the arguments.
    pub keys: Option<Map>,
}

/// An argument.
#[derive(Clone, Debug)]
pub struct Argument {
    /// The argument itself.
    pub kind: ArgumentKind,
    /// Its tokens.
    pub span: Span,
}

/// The kinds of arguments.
#[derive(Clone, Debug)]
pub enum ArgumentKind {
    /// An expression; a lone name may be a word of the function, such as `gain`.
    Value(Expr),
    /// `name = value`
    Named(Name, Expr),
    /// A word and what follows it: `over heads size`, `log_uniform 1 16`.
    Word(Name, Vec<Expr>),
    /// `[heads, value: 2 * size]`
    Dims(Vec<DimExpr>),
}

/// A dimension where it is named, with its size where it appears first.
#[derive(Clone, Debug)]
pub struct DimExpr {
    /// Its name.
    pub name: Name,
    /// Its size.
    pub size: Option<Expr>,
}

/// An operator between two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// `or`
    Or,
    /// `and`
    And,
    /// `<`
    Less,
    /// `<=`
    LessEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterEqual,
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`
    Divide,
}

impl Operator {
    /// All of them.
    pub const ALL: [Operator; 12] = [
        Operator::Or,
        Operator::And,
        Operator::Less,
        Operator::LessEqual,
        Operator::Greater,
        Operator::GreaterEqual,
        Operator::Equal,
        Operator::NotEqual,
        Operator::Add,
        Operator::Subtract,
        Operator::Multiply,
        Operator::Divide,
    ];

    /// Its sign.
    pub fn sign(self) -> &'static str {
        match self {
            Operator::Or => "or",
            Operator::And => "and",
            Operator::Less => "<",
            Operator::LessEqual => "<=",
            Operator::Greater => ">",
            Operator::GreaterEqual => ">=",
            Operator::Equal => "==",
            Operator::NotEqual => "!=",
            Operator::Add => "+",
            Operator::Subtract => "-",
            Operator::Multiply => "*",
            Operator::Divide => "/",
        }
    }

    /// How tightly it binds.
    pub fn strength(self) -> u8 {
        match self {
            Operator::Or => 1,
            Operator::And => 2,
            Operator::Less
            | Operator::LessEqual
            | Operator::Greater
            | Operator::GreaterEqual
            | Operator::Equal
            | Operator::NotEqual => 3,
            Operator::Add | Operator::Subtract => 4,
            Operator::Multiply | Operator::Divide => 5,
        }
    }
}

impl Statement {
    /// Its first token.
    pub fn span(&self) -> Span {
        match self {
            Statement::Assign(name, _) => name.span,
            Statement::Recurrence(recurrence) => recurrence.span,
            Statement::Loss(value) | Statement::Return(value) => value.span,
        }
    }
}

impl Definition {
    /// Where a value of that name is assigned.
    pub fn assigned(&self, name: &str) -> Option<Span> {
        fn find(statements: &[Statement], name: &str) -> Option<Span> {
            statements.iter().find_map(|statement| match statement {
                Statement::Assign(own, _) => (own.text == name).then_some(own.span),
                Statement::Recurrence(r) => {
                    let state = r.states.iter().find(|state| state.name.text == name);
                    state.map(|state| state.name.span).or_else(|| find(&r.body, name))
                }
                Statement::Loss(_) | Statement::Return(_) => None,
            })
        }
        find(&self.body, name)
    }

    /// The values of other components that it reads: `component.value`.
    pub fn values_of_others(&self) -> Vec<(&Name, &Name)> {
        let mut found = Vec::new();
        self.each(&mut |expr| {
            if let ExprKind::Value(component, value) = &expr.kind {
                found.push((component, value));
            }
        });
        found
    }

    /// The values of its last application that it reads: `earlier(value)`.
    pub fn earlier_values(&self) -> Vec<Name> {
        let mut found = Vec::new();
        self.each(&mut |expr| {
            if let ExprKind::Call(call) = &expr.kind
                && call.name.text == "earlier"
                && let Some(Argument { kind: ArgumentKind::Value(value), .. }) = call.arguments.first()
                && let ExprKind::Name(name) = &value.kind
            {
                found.push(Name { text: name.clone(), span: value.span });
            }
        });
        found
    }

    /// The settings that sizes of dimensions depend on.
    pub fn sizes(&self) -> Vec<&str> {
        fn names<'d>(expr: &'d Expr, found: &mut Vec<&'d str>) {
            expr.each(&mut |inner| {
                if let ExprKind::Name(name) = &inner.kind {
                    found.push(name);
                }
            });
        }
        let mut found: Vec<&str> = Vec::new();
        self.each_dim(&mut |dim| {
            found.push(&dim.name.text);
            dim.size.iter().for_each(|size| names(size, &mut found));
        });
        for call in self.calls() {
            if matches!(call.name.text.as_str(), "conv" | "top" | "slice" | "shift") {
                for argument in &call.arguments {
                    if let ArgumentKind::Value(value) = &argument.kind {
                        names(value, &mut found);
                    }
                }
            }
        }
        // A default that a size depends on depends on settings before it.
        let mut settings: Vec<&str> = Vec::new();
        for setting in self.settings.iter().rev() {
            if found.contains(&setting.name.text.as_str()) {
                settings.push(&setting.name.text);
                setting.default.iter().for_each(|default| names(default, &mut found));
            }
        }
        settings
    }

    /// Every dimension where it is named.
    fn each_dim<'d>(&'d self, with: &mut dyn FnMut(&'d DimExpr)) {
        fn states<'d>(body: &'d [Statement], with: &mut dyn FnMut(&'d DimExpr)) {
            for statement in body {
                if let Statement::Recurrence(recurrence) = statement {
                    recurrence.states.iter().flat_map(|state| &state.dims).for_each(&mut *with);
                    states(&recurrence.body, with);
                }
            }
        }
        states(&self.body, with);
        self.each(&mut |expr| {
            if let ExprKind::Call(call) = &expr.kind {
                for argument in &call.arguments {
                    if let ArgumentKind::Dims(dims) = &argument.kind {
                        dims.iter().for_each(&mut *with);
                    }
                }
            }
        });
    }

    /// Every call.
    pub fn calls(&self) -> Vec<&Call> {
        let mut found = Vec::new();
        self.each(&mut |expr| {
            if let ExprKind::Call(call) = &expr.kind {
                found.push(call);
            }
        });
        found
    }

    /// Calls with every expression of the body.
    pub fn each<'d>(&'d self, with: &mut dyn FnMut(&'d Expr)) {
        fn statements<'d>(body: &'d [Statement], with: &mut dyn FnMut(&'d Expr)) {
            for statement in body {
                match statement {
                    Statement::Assign(_, value) | Statement::Loss(value) | Statement::Return(value) => {
                        value.each(with);
                    }
                    Statement::Recurrence(r) => {
                        for state in &r.states {
                            state.from.iter().for_each(|from| from.each(with));
                            dims(&state.dims, with);
                        }
                        statements(&r.body, with);
                    }
                }
            }
        }
        statements(&self.body, with);
    }
}

fn dims<'d>(dims: &'d [DimExpr], with: &mut dyn FnMut(&'d Expr)) {
    dims.iter().filter_map(|dim| dim.size.as_ref()).for_each(|size| size.each(with));
}

impl Expr {
    /// Calls with it and every expression inside.
    pub fn each<'d>(&'d self, with: &mut dyn FnMut(&'d Expr)) {
        with(self);
        match &self.kind {
            ExprKind::Number(_) | ExprKind::Name(_) | ExprKind::Value(..) | ExprKind::Invalid => {}
            ExprKind::Negate(a) | ExprKind::Not(a) | ExprKind::Group(a) => a.each(with),
            ExprKind::Binary(_, a, b) => {
                a.each(with);
                b.each(with);
            }
            ExprKind::Index(of, places) => {
                of.each(with);
                places.iter().for_each(|place| place.each(with));
            }
            ExprKind::Call(call) => {
                for argument in &call.arguments {
                    match &argument.kind {
                        ArgumentKind::Value(value) | ArgumentKind::Named(_, value) => value.each(with),
                        ArgumentKind::Word(_, values) => values.iter().for_each(|value| value.each(with)),
                        ArgumentKind::Dims(list) => dims(list, with),
                    }
                }
            }
        }
    }

    /// It without parentheses around it.
    pub fn bare(&self) -> &Expr {
        match &self.kind {
            ExprKind::Group(inner) => inner.bare(),
            _ => self,
        }
    }
}
