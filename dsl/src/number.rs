//! Checked arithmetic: whole numbers in `i128`, others in finite `f64`.

use std::cell::Cell;

use indexmap::IndexMap;

use crate::ast::{Arith, ArithKind, Operator};
use crate::diagnostic::Diagnostic;
use crate::source::Span;
use crate::suggest::closest;

/// A number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Number {
    /// Whole.
    Int(i128),
    /// Not known to be whole.
    Real(f64),
}

impl Number {
    pub(crate) fn real(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Real(value) => value,
        }
    }

    /// The number where it is whole; a real is, where it has no fraction and every whole number of
    /// its size is one.
    pub(crate) fn whole(self) -> Option<i128> {
        match self {
            Number::Int(value) => Some(value),
            Number::Real(value) if value.fract() == 0.0 && value.abs() < 9.0e15 => Some(value as i128),
            Number::Real(_) => None,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Int(value) => value.fmt(f),
            Number::Real(value) => write!(f, "{value:?}"),
        }
    }
}

/// Units of memory, the largest first.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

/// Bytes of an amount of memory: a number above 0 and its unit, such as `8GB`.
pub(crate) fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
    let (_, size) = UNITS.iter().find(|(name, _)| *name == unit.trim_start())?;
    let bytes = digits.parse::<f64>().ok()? * *size as f64;
    // As for whole numbers of other keys.
    (1.0..(1u64 << 48) as f64).contains(&bytes).then_some(bytes as u64)
}

/// Bytes as they are written: in the largest unit that gives a whole number.
pub(crate) fn in_units(bytes: u64) -> String {
    let whole = |(_, size): &&(&str, u64)| bytes.is_multiple_of(*size);
    let (unit, size) = UNITS.iter().find(whole).unwrap_or(&("B", 1));
    format!("{}{unit}", bytes / size)
}

/// The `let` names defined so far.
#[derive(Debug, Default)]
pub(crate) struct Lets {
    names: IndexMap<String, Let>,
}

#[derive(Debug)]
struct Let {
    /// `None` where the definition is wrong, which was reported there.
    value: Option<Number>,
    used: Cell<bool>,
}

impl Lets {
    pub(crate) fn define(&mut self, name: &str, value: Option<Number>) {
        self.names.insert(name.to_string(), Let { value, used: Cell::new(false) });
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// The names that no expression used.
    pub(crate) fn unused(&self) -> impl Iterator<Item = &str> {
        self.names.iter().filter(|(_, known)| !known.used.get()).map(|(name, _)| name.as_str())
    }
}

/// The value of a literal such as `128_256`, `1e-3` or `0.5%`.
pub(crate) fn literal(text: &str) -> Option<Number> {
    let plain = text.replace('_', "");
    if let Ok(value) = plain.parse::<i128>() {
        return Some(Number::Int(value));
    }
    let (digits, divisor) = match plain.strip_suffix('%') {
        Some(digits) => (digits, 100.0),
        None => (plain.as_str(), 1.0),
    };
    digits.parse::<f64>().ok().map(|value| value / divisor).filter(|v| v.is_finite()).map(Number::Real)
}

/// The value of an expression. Errors go to `found`; `None` where there is one, here or in a name's
/// definition.
pub(crate) fn evaluate(arith: &Arith, lets: &Lets, found: &mut Vec<Diagnostic>) -> Option<Number> {
    match &arith.kind {
        ArithKind::Literal(text) => {
            let value = literal(text);
            if value.is_none() {
                found.push(Diagnostic::error("number-too-large", "this number is too large").on(arith.span));
            }
            value
        }
        ArithKind::Name(name) => named(name, arith.span, lets, found),
        ArithKind::Group(inner) => evaluate(inner, lets, found),
        ArithKind::Negate(inner) => {
            let value = match evaluate(inner, lets, found)? {
                Number::Int(value) => value.checked_neg().map(Number::Int),
                Number::Real(value) => Some(Number::Real(-value)),
            };
            finite(value, arith, found)
        }
        ArithKind::Binary(operator, left, right) => {
            let left = evaluate(left, lets, found);
            let divisor = evaluate(right, lets, found);
            let (left, divisor) = (left?, divisor?);
            if *operator == Operator::Divide && divisor.real() == 0.0 {
                found.push(Diagnostic::error("division-by-zero", "this is zero").on(right.span));
                return None;
            }
            finite(apply(*operator, left, divisor), arith, found)
        }
        ArithKind::Invalid => None,
    }
}

/// The value of a name.
pub(crate) fn named(name: &str, span: Span, lets: &Lets, found: &mut Vec<Diagnostic>) -> Option<Number> {
    if let Some(known) = lets.names.get(name) {
        known.used.set(true);
        return known.value;
    }
    let error = Diagnostic::error("unknown-name", format!("no number is called `{name}`")).on(span);
    found.push(match closest(name, lets.names()) {
        Some(known) => error.help(format!("did you mean `{known}`?")),
        None => error.help(format!("write a number, or define the name above: `let {name} = 16`")),
    });
    None
}

fn apply(operator: Operator, left: Number, right: Number) -> Option<Number> {
    if let (Number::Int(a), Number::Int(b)) = (left, right) {
        let whole = match operator {
            Operator::Add => a.checked_add(b),
            Operator::Subtract => a.checked_sub(b),
            Operator::Multiply => a.checked_mul(b),
            // A division that leaves a rest is a real number, so that `1 / 2` is a half.
            Operator::Divide if a.checked_rem(b)? == 0 => a.checked_div(b),
            Operator::Divide => return Some(Number::Real(a as f64 / b as f64)),
        };
        return whole.map(Number::Int);
    }
    let (a, b) = (left.real(), right.real());
    let value = match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
    };
    value.is_finite().then_some(Number::Real(value))
}

fn finite(value: Option<Number>, arith: &Arith, found: &mut Vec<Diagnostic>) -> Option<Number> {
    if value.is_none() {
        found.push(Diagnostic::error("number-too-large", "this is too large to compute").on(arith.span));
    }
    value
}
