//! Sizes: settings, arithmetic that is known when the model is built, and dimensions.

use super::*;
use crate::define::syntax::{DimExpr, ExprKind, Operator};
use crate::number;

/// Sizes are below this.
const MAX_SIZE: i128 = 1 << 48;

impl<'a> Elaborator<'a> {
    /// The value of every setting: as it is set, else what its default gives.
    pub(super) fn settings(&mut self, given: &IndexMap<String, component::Setting>) {
        for setting in &self.definition.settings {
            let name = setting.name.text.as_str();
            let set = given.get(name).copied().unwrap_or(component::Setting::Derived);
            let value = match (set, &setting.default) {
                (component::Setting::Size(size), _) => Some(Number::Int(size.into())),
                (component::Setting::Number(number), _) => Some(Number::Real(number)),
                (component::Setting::Derived, Some(default)) => self.number(default),
                (component::Setting::Derived, None) => {
                    let message = format!("`{name}` has no value");
                    let help = format!(
                        "write it where `{}` is used, or give it a default: `{name} 4`",
                        self.definition.name.text
                    );
                    self.error("missing-setting", setting.name.span, message, help);
                    None
                }
            };
            self.settings.insert(name, value);
        }
    }

    /// A number that is known when the model is built; reports one that is not.
    pub(super) fn number(&mut self, expr: &Expr) -> Option<Number> {
        match &expr.kind {
            ExprKind::Invalid => None,
            ExprKind::Number(text) => {
                let number = number::literal(text);
                if number.is_none() {
                    self.error(
                        "number-too-large",
                        expr.span,
                        "this is no number that can be computed with",
                        "write one such as `16`, `1e-6` or `50%`",
                    );
                }
                number
            }
            ExprKind::Group(inner) => self.number(inner),
            ExprKind::Negate(inner) => {
                let value = match self.number(inner)? {
                    Number::Int(value) => Number::Int(-value),
                    Number::Real(value) => Number::Real(-value),
                };
                Some(value)
            }
            ExprKind::Binary(operator, left, right) => {
                let (a, b) = (self.number(left), self.number(right));
                self.arithmetic(*operator, a?, b?, expr.span, right.span)
            }
            ExprKind::Name(name) => self.known(name, expr.span),
            ExprKind::Call(_) | ExprKind::Not(_) => {
                let got = self.expr_known(expr)?;
                Some(Number::Real(got))
            }
            ExprKind::Value(..) | ExprKind::Index(..) => {
                self.not_known(expr.span, "this");
                None
            }
        }
    }

    fn not_known(&mut self, span: Span, value: &str) {
        let message = format!("{value} is not known when the model is built");
        self.error("not-constant", span, message, "write a number, or arithmetic over settings");
    }

    /// A call that is a number.
    fn expr_known(&mut self, expr: &Expr) -> Option<f64> {
        match self.expr(expr)? {
            Got::Number(number) => Some(number),
            Got::Value(_) => {
                self.not_known(expr.span, "this value");
                None
            }
        }
    }

    /// A name that is a number.
    fn known(&mut self, name: &str, span: Span) -> Option<Number> {
        if let Some(setting) = self.settings.get(name) {
            return *setting;
        }
        if name == "hidden" {
            return Some(Number::Int(self.context.hidden.into()));
        }
        if let Some(dim) = self.dims.get(name)
            && !self.scope.contains_key(name)
        {
            return Some(Number::Int(self.graph.size(*dim).into()));
        }
        match self.name(name, span)? {
            Got::Number(number) => Some(Number::Real(number)),
            Got::Value(_) => {
                self.not_known(span, &format!("`{name}`"));
                None
            }
        }
    }

    fn arithmetic(
        &mut self,
        operator: Operator,
        a: Number,
        b: Number,
        span: Span,
        right: Span,
    ) -> Option<Number> {
        if operator == Operator::Divide && b.real() == 0.0 {
            self.error("division-by-zero", right, "this is zero", "divide by another number");
            return None;
        }
        let whole = match (a, b) {
            (Number::Int(a), Number::Int(b)) => match operator {
                Operator::Add => a.checked_add(b),
                Operator::Subtract => a.checked_sub(b),
                Operator::Multiply => a.checked_mul(b),
                // A division that leaves a rest is a real number, as everywhere in a specification.
                Operator::Divide => (a % b == 0).then(|| a / b),
                _ => None,
            },
            _ => None,
        };
        if let Some(whole) = whole {
            return Some(Number::Int(whole));
        }
        let value = expr::binary(expr::binary_of(operator), a.real(), b.real());
        if !value.is_finite() {
            self.error("number-too-large", span, "this is too large to compute", "write smaller numbers");
            return None;
        }
        Some(Number::Real(value))
    }

    /// A whole number from `least` on; `role` names it.
    pub(super) fn size(&mut self, expr: &Expr, role: &str, least: u64) -> Option<u64> {
        let number = self.number(expr)?;
        let (message, help) = match number.whole() {
            Some(whole) if whole < i128::from(least) => {
                (format!("{role} is {number}"), format!("it is at least {least}"))
            }
            Some(whole) if whole >= MAX_SIZE => {
                (format!("{role} is too large: {number}"), "sizes are below 2^48".to_string())
            }
            Some(whole) => return u64::try_from(whole).ok(),
            None => {
                let help = match &expr.bare().kind {
                    ExprKind::Binary(Operator::Divide, a, b) => {
                        let (a, b) = (self.number(a)?, self.number(b)?);
                        format!("{a} is no multiple of {b}: choose settings so that it is")
                    }
                    _ => "sizes are whole numbers".into(),
                };
                (format!("{role} is not a whole number: {number}"), help)
            }
        };
        self.error("bad-size", expr.span, message, help);
        None
    }

    /// The dimension of the stream.
    pub(super) fn hidden_dim(&mut self, span: Span) -> DimId {
        let hidden = self.context.hidden;
        self.intern("hidden", hidden, span)
    }

    /// The dimension of that name, which is made where it is new. Its size is checked before.
    pub(super) fn intern(&mut self, name: &str, size: u64, span: Span) -> DimId {
        if let Some(dim) = self.dims.get(name) {
            return *dim;
        }
        let dim = DimId(self.graph.dims.len() as u32);
        self.graph.dims.push(Dimension { name: name.into(), size, span });
        self.dims.insert(name.into(), dim);
        dim
    }

    /// A dimension that the compiler names: `name`, or with its size where another has that name.
    pub(super) fn own_dim(&mut self, name: &str, size: u64, span: Span) -> DimId {
        let free = |name: &str, own: &Self| match own.dims.get(name) {
            Some(dim) => own.graph.size(*dim) == size,
            None => {
                !matches!(own.settings.get(name), Some(other) if other.and_then(Number::whole) != Some(size.into()))
            }
        };
        if free(name, self) {
            return self.intern(name, size, span);
        }
        let mut numbered = format!("{name}{size}");
        while !free(&numbered, self) {
            numbered.push('_');
        }
        self.intern(&numbered, size, span)
    }

    /// The size that a name has without its own: of a dimension, of the stream, or of a setting.
    fn named_size(&self, name: &str) -> Option<Option<u64>> {
        if let Some(dim) = self.dims.get(name) {
            return Some(Some(self.graph.size(*dim)));
        }
        if name == "hidden" {
            return Some(Some(self.context.hidden));
        }
        let setting = self.settings.get(name)?;
        Some(setting.and_then(Number::whole).and_then(|whole| u64::try_from(whole).ok()))
    }

    /// A dimension as it is written; `size` is what it must have where nothing else says it.
    pub(super) fn dim(&mut self, written: &DimExpr, size: Option<u64>) -> Option<DimId> {
        let Name { text: name, span } = &written.name;
        let before = self.named_size(name);
        if let Some(expr) = &written.size {
            let role = format!("the size of `{name}`");
            let own = self.size(expr, &role, 1)?;
            return match before {
                Some(Some(other)) if other != own => {
                    let message = format!("`{name}` is {other}, not {own}");
                    let error = Diagnostic::error("dimensions", message).on(expr.span);
                    let first = self.first_of(name);
                    let error =
                        first.into_iter().fold(error, |error, at| error.related(at, format!("{other} here")));
                    self.found.push(error.help("a name of a dimension has one size: choose another name"));
                    None
                }
                Some(None) if self.settings.get(name.as_str()).is_some_and(Option::is_none) => None,
                _ => Some(self.intern(name, own, *span)),
            };
        }
        match before {
            Some(Some(0)) => {
                let message = format!("`{name}` is 0, and is the size of a dimension");
                let first = self.first_of(name);
                let error = Diagnostic::error("bad-size", message).on(*span).help("it is at least 1");
                self.found.push(first.into_iter().fold(error, |error, at| error.related(at, "set here")));
                None
            }
            Some(Some(known)) => Some(self.intern(name, known, *span)),
            Some(None) => {
                if let Some(Some(number)) = self.settings.get(name.as_str()).copied() {
                    let message = format!("`{name}` is {number}, and is the size of a dimension");
                    let first = self.first_of(name);
                    let error = Diagnostic::error("bad-size", message).on(*span);
                    let error = first.into_iter().fold(error, |error, at| error.related(at, "set here"));
                    self.found.push(error.help("a size is a whole number of at least 1"));
                }
                None
            }
            None => match size {
                Some(size) => Some(self.intern(name, size, *span)),
                None => {
                    self.unknown_dim(name, *span, None);
                    None
                }
            },
        }
    }

    fn first_of(&self, name: &str) -> Option<Span> {
        let setting = self.definition.settings.iter().find(|setting| setting.name.text == name);
        let dim = self.dims.get(name).map(|dim| self.graph.dims[dim.0 as usize].span);
        setting.map(|setting| setting.name.span).or(dim)
    }

    /// Reports a name of a dimension that is none, of all or of a value's.
    pub(super) fn unknown_dim(&mut self, name: &str, span: Span, of: Option<(&Expr, &[DimId])>) {
        let (message, names): (_, Vec<&str>) = match of {
            Some((value, dims)) => {
                let message = match &value.bare().kind {
                    ExprKind::Name(value) => {
                        format!("`{value}` has no dimension `{name}`: it is `{}`", self.shown(dims))
                    }
                    _ => format!("this has no dimension `{name}`: it is `{}`", self.shown(dims)),
                };
                (message, dims.iter().map(|dim| self.graph.name(*dim)).collect())
            }
            None => {
                let names = self.dims.keys().map(String::as_str).chain(self.settings.keys().copied());
                (format!("`{name}` is no dimension yet"), names.chain(["hidden"]).collect())
            }
        };
        let help = match (closest(name, names.iter().copied()), of.is_some()) {
            (Some(known), _) => format!("did you mean `{known}`?"),
            (None, true) => "name one of these".to_string(),
            (None, false) => {
                format!("write its size where it appears first: `[{name}: 2 * hidden]`, or make it a setting")
            }
        };
        let mut error = Diagnostic::error("unknown-dimension", message).on(span).help(help);
        if let Some((value, _)) = of
            && let ExprKind::Name(name) = &value.bare().kind
            && let Some(bound) = self.scope.get(name)
        {
            error = error.related(bound.span, format!("`{name}` is made here"));
        }
        self.found.push(error);
    }

    /// Dimensions as they are written.
    pub(super) fn dims(&mut self, written: &[DimExpr]) -> Option<Vec<DimId>> {
        let mut dims: Vec<DimId> = Vec::new();
        let mut right = true;
        for own in written {
            let Some(dim) = self.dim(own, None) else {
                right = false;
                continue;
            };
            if dims.contains(&dim) {
                let message = format!("`{}` stands twice", own.name.text);
                self.error("dimensions", own.name.span, message, "a value has each dimension once");
                right = false;
            } else {
                dims.push(dim);
            }
        }
        right.then_some(dims)
    }
}
