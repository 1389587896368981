//! Expressions: names, arithmetic, and the rule by which dimensions of two values fit.

use super::*;
use crate::define::syntax::{ExprKind, Operator};

impl<'a> Elaborator<'a> {
    /// The value of an expression; `None` where a mistake was reported.
    pub(super) fn expr(&mut self, expr: &Expr) -> Option<Got> {
        if self.full {
            return None;
        }
        match &expr.kind {
            ExprKind::Invalid => None,
            ExprKind::Number(_) => self.number(expr).map(|number| Got::Number(number.real())),
            ExprKind::Name(name) => self.name(name, expr.span),
            ExprKind::Group(inner) => self.expr(inner),
            ExprKind::Negate(inner) => {
                let value = self.expr(inner)?;
                self.unary(Unary::Neg, value, expr.span)
            }
            ExprKind::Not(inner) => {
                let value = self.expr(inner)?;
                self.unary(Unary::Not, value, expr.span)
            }
            ExprKind::Binary(..) => self.chain(expr),
            ExprKind::Call(call) => self.call(call, expr.span),
            ExprKind::Value(component, value) => self.value_of(component, value, expr.span),
            ExprKind::Index(of, places) => self.index(of, places, expr.span),
        }
    }

    /// `a + b + c`, from its first term on.
    fn chain(&mut self, expr: &Expr) -> Option<Got> {
        let mut joins = Vec::new();
        let mut first = expr;
        while let ExprKind::Binary(operator, left, right) = &first.kind {
            joins.push((*operator, &**left, &**right, first.span));
            first = left;
        }
        let mut value = self.expr(first);
        for (operator, left, right, span) in joins.into_iter().rev() {
            let other = self.expr(right);
            value = match (value, other) {
                (Some(a), Some(b)) => {
                    self.two(binary_of(operator), operator.sign(), (a, left), (b, right), span)
                }
                _ => None,
            };
        }
        value
    }

    /// A function of one number.
    pub(super) fn unary(&mut self, f: Unary, value: Got, span: Span) -> Option<Got> {
        match value {
            Got::Number(number) => self.finite(unary(f, number), span),
            Got::Value(id) => {
                let ty = Type { places_of: None, ..self.ty(id).clone() };
                Some(Got::Value(self.push(Function::Unary(f), vec![id], ty, span)))
            }
        }
    }

    fn finite(&mut self, number: f64, span: Span) -> Option<Got> {
        if number.is_finite() {
            return Some(Got::Number(number));
        }
        self.error("bad-number", span, format!("this is {number}"), "write a finite number");
        None
    }

    /// A function of two numbers, element by element.
    pub(super) fn two(
        &mut self,
        f: Binary,
        sign: &str,
        left: (Got, &Expr),
        right: (Got, &Expr),
        span: Span,
    ) -> Option<Got> {
        if let (Got::Number(a), Got::Number(b)) = (left.0, right.0) {
            return self.finite(binary(f, a, b), span);
        }
        let (a, b) = (self.id(left.0, left.1.span), self.id(right.0, right.1.span));
        let ty = self.fit(sign, (a, left.1), (b, right.1), span)?;
        Some(Got::Value(self.push(Function::Binary(f), vec![a, b], ty, span)))
    }

    /// The type of two values that are combined element by element: one has all dimensions of the
    /// other.
    pub(super) fn fit(
        &mut self,
        sign: &str,
        (a, left): (ValueId, &Expr),
        (b, right): (ValueId, &Expr),
        span: Span,
    ) -> Option<Type> {
        let (of_a, of_b) = (self.ty(a).clone(), self.ty(b).clone());
        let per_token = of_a.per_token || of_b.per_token;
        let holds = |a: &Type, b: &Type| b.dims.iter().all(|dim| a.dims.contains(dim));
        if holds(&of_a, &of_b) {
            return Some(Type { dims: of_a.dims, per_token, places_of: None });
        }
        if holds(&of_b, &of_a) {
            return Some(Type { dims: of_b.dims, per_token, places_of: None });
        }
        let (shown_a, shown_b) = (self.shown(&of_a.dims), self.shown(&of_b.dims));
        let message = format!("the sides of `{sign}` do not fit: `{shown_a}` and `{shown_b}`");
        let extra: Vec<&str> = of_b
            .dims
            .iter()
            .filter(|dim| !of_a.dims.contains(dim))
            .map(|dim| self.graph.name(*dim))
            .collect();
        let (l, r) = (short(left.bare()), short(right.bare()));
        let help = match sign {
            "*" => format!("one side has all dimensions of the other; `outer({l}, {r})` has those of both"),
            _ => format!(
                "one side has all dimensions of the other: sum `{r}` over {}, or make it of other dimensions",
                extra.join(" ")
            ),
        };
        let (left, right) = (self.origin(left.bare(), a), self.origin(right.bare(), b));
        let error = Diagnostic::error("dimensions", message).on(span);
        self.found.push(error.related(left.0, left.1).related(right.0, right.1).help(help));
        None
    }

    /// `a * b` summed over dimensions.
    pub(super) fn dot(&mut self, a: ValueId, b: ValueId, over: Vec<DimId>, span: Span) -> Option<Got> {
        let (of_a, of_b) = (self.ty(a).clone(), self.ty(b).clone());
        let both = union(&of_a.dims, &of_b.dims);
        let dims = both.into_iter().filter(|dim| !over.contains(dim)).collect();
        let ty = Type { dims, per_token: of_a.per_token || of_b.per_token, places_of: None };
        Some(Got::Value(self.push(Function::Dot(over), vec![a, b], ty, span)))
    }
}

/// The dimensions of both, those of the larger first.
pub(super) fn union(a: &[DimId], b: &[DimId]) -> Vec<DimId> {
    let (first, second) =
        if b.len() > a.len() && a.iter().all(|dim| b.contains(dim)) { (b, a) } else { (a, b) };
    let more = second.iter().filter(|dim| !first.contains(dim));
    first.iter().chain(more).copied().collect()
}

/// The function of an operator.
pub(super) fn binary_of(operator: Operator) -> Binary {
    match operator {
        Operator::Or => Binary::Or,
        Operator::And => Binary::And,
        Operator::Less => Binary::Less,
        Operator::LessEqual => Binary::LessEqual,
        Operator::Greater => Binary::Greater,
        Operator::GreaterEqual => Binary::GreaterEqual,
        Operator::Equal => Binary::Equal,
        Operator::NotEqual => Binary::NotEqual,
        Operator::Add => Binary::Add,
        Operator::Subtract => Binary::Sub,
        Operator::Multiply => Binary::Mul,
        Operator::Divide => Binary::Div,
    }
}

/// A function of one number that is known.
fn unary(f: Unary, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let softplus = |x: f64| if x > 30.0 { x } else { x.exp().ln_1p() };
    match f {
        Unary::Neg => -x,
        Unary::Not => f64::from(x == 0.0),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Abs => x.abs(),
        Unary::Square => x * x,
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => sigmoid(x),
        Unary::Silu => x * sigmoid(x),
        Unary::Gelu => {
            0.5 * x * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Unary::Relu => x.max(0.0),
        Unary::Relu2 => x.max(0.0).powi(2),
        Unary::Softplus => softplus(x),
        Unary::LogSigmoid => -softplus(-x),
        Unary::Floor => x.floor(),
    }
}

/// A function of two numbers that are known.
pub(super) fn binary(f: Binary, a: f64, b: f64) -> f64 {
    match f {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Min => a.min(b),
        Binary::Max => a.max(b),
        Binary::Less => f64::from(a < b),
        Binary::LessEqual => f64::from(a <= b),
        Binary::Greater => f64::from(a > b),
        Binary::GreaterEqual => f64::from(a >= b),
        Binary::Equal => f64::from(a == b),
        Binary::NotEqual => f64::from(a != b),
        Binary::And => f64::from(a != 0.0 && b != 0.0),
        Binary::Or => f64::from(a != 0.0 || b != 0.0),
        Binary::Mod => a - b * (a / b).floor(),
    }
}
