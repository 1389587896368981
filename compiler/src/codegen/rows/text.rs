//! Lines of a row kernel: indices and values, loops and branches, variables that are known.

use super::Generator;
use super::plan::{Kept, LOADS};
use super::turns::Step;
use crate::program::Broadcast;
use std::collections::HashMap;

/// Adjacent elements of an array: an expression that is the index of the first, a multiple of how
/// many there are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct At {
    pub(super) index: String,
    pub(super) width: u64,
}

impl At {
    /// One element.
    pub(super) fn one(index: impl Into<String>) -> Self {
        At { index: index.into(), width: 1 }
    }
}

/// A variable or a short expression: `width` numbers, or one that all elements share.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) text: String,
    pub(super) width: u64,
}

impl Value {
    pub(super) fn one(text: impl Into<String>) -> Self {
        Value { text: text.into(), width: 1 }
    }

    /// As many numbers as are wanted.
    pub(super) fn spread(&self, width: u64) -> String {
        if self.width == width { self.text.clone() } else { format!("{}({})", numbers(width), self.text) }
    }
}

/// How a reduction joins numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Join {
    Sum,
    Largest,
}

impl Join {
    /// A number that changes nothing.
    pub(super) fn nothing(self) -> &'static str {
        match self {
            Join::Sum => "0.0f",
            Join::Largest => "-infinity()",
        }
    }

    /// Two numbers joined; NaN is passed over by the larger.
    pub(super) fn two(self, a: &str, b: &str) -> String {
        match self {
            Join::Sum => format!("{a} + {b}"),
            Join::Largest => format!("larger({a}, {b})"),
        }
    }

    /// The end of the names of functions that join.
    pub(super) fn word(self) -> &'static str {
        match self {
            Join::Sum => "sum",
            Join::Largest => "largest",
        }
    }
}

/// The term of a sum: a factor or two.
pub(super) type Term = (Value, Option<Value>);

/// The type of `width` numbers.
pub(super) fn numbers(width: u64) -> String {
    if width == 1 { "float".into() } else { format!("floats{width}") }
}

/// `width` numbers from an address, the first of them at `index`.
pub(super) fn load(from: &str, start: u64, at: &At) -> String {
    let index = match (start, at.index.as_str()) {
        (0, index) => index.to_string(),
        (_, "0") => start.to_string(),
        (_, index) => format!("{start} + {index}"),
    };
    match at.width {
        1 => format!("{from}[{index}]"),
        width => format!("load{width}({from} + {index})"),
    }
}

impl Generator<'_> {
    pub(super) fn line(&mut self, line: &str) {
        for _ in 0..self.indent {
            self.text.push_str("    ");
        }
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// A branch, to be ended by [`Self::close`].
    pub(super) fn open(&mut self, line: &str) {
        self.begin(line, Step::Open { turns: 1, of_loop: false });
    }

    /// A loop that is never unrolled, to be ended by [`Self::close`].
    pub(super) fn open_rolled(&mut self, line: &str, turns: u64) {
        self.begin(line, Step::Open { turns, of_loop: true });
    }

    pub(super) fn begin(&mut self, line: &str, step: Step) {
        self.steps.push(step);
        self.line(line);
        self.indent += 1;
        self.scopes.push(HashMap::new());
    }

    pub(super) fn close(&mut self) {
        self.scopes.pop();
        self.indent -= 1;
        self.steps.push(Step::Close);
        self.line("}");
    }

    /// A loop that a thread goes through `trips` times at most, to be ended by
    /// [`Self::close_loop`].
    pub(super) fn open_loop(&mut self, line: &str, trips: u64) {
        self.loops.push((self.text.len(), self.steps.len(), trips, 0));
        self.open_rolled(line, trips);
    }

    /// Ends a loop, and says how far it is unrolled: as far as loads of several elements should be
    /// under way, and no further, for most of what a row takes to compile is loops unrolled.
    pub(super) fn close_loop(&mut self) {
        self.close();
        if let Some((begin, step, trips, loads)) = self.loops.pop() {
            let times = (LOADS / loads.max(1)).clamp(1, 4).min(trips);
            self.text.insert_str(begin + 4 * self.indent, &format!("unroll({times}) "));
            if let Some(Step::Open { turns, .. }) = self.steps.get_mut(step) {
                *turns = turns.div_ceil(times.max(1));
            }
        }
    }

    /// The loop of a row's threads over elements `variable` = `first`, `first + step` and so on,
    /// below `length`, or for `width` at a time from each of `width` times as much; ended by
    /// [`Self::close_each`].
    pub(super) fn open_each(&mut self, variable: &str, first: &str, length: u64, step: u64, width: u64) {
        let (mut begin, step) = (first.to_string(), step.saturating_mul(width));
        if width > 1 {
            begin = if first.contains(' ') {
                format!("({first}) * {width}")
            } else {
                format!("{first} * {width}")
            };
        }
        if step >= length {
            self.open(&format!("if ({begin} < {length}) {{"));
            self.line(&format!("const int {variable} = {begin};"));
        } else {
            let line =
                format!("for (int {variable} = {begin}; {variable} < {length}; {variable} += {step}) {{");
            self.open_loop(&line, length.div_ceil(step));
        }
    }

    pub(super) fn close_each(&mut self, length: u64, step: u64, width: u64) {
        if step.saturating_mul(width) >= length { self.close() } else { self.close_loop() }
    }

    pub(super) fn fresh(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}{}", self.next)
    }

    pub(super) fn known(&self, key: &(u32, At)) -> Option<Value> {
        self.scopes.iter().rev().find_map(|scope| scope.get(key).cloned())
    }

    pub(super) fn remember(&mut self, key: (u32, At), value: &Value) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(key, value.clone());
        }
    }

    /// An index in a variable, unless it is one or a number already.
    pub(super) fn index(&mut self, expression: String) -> String {
        if expression.chars().all(|c| c.is_ascii_alphanumeric()) {
            return expression;
        }
        let key = (u32::MAX, At::one(expression));
        if let Some(name) = self.known(&key) {
            return name.text;
        }
        let name = self.fresh("i");
        self.line(&format!("const int {name} = {};", key.1.index));
        self.remember(key, &Value::one(name.as_str()));
        name
    }

    /// Elements of the small operand of a broadcast for those of the large one.
    pub(super) fn small(&mut self, at: &At, b: Broadcast) -> At {
        let index = &at.index;
        let quotient = if b.inner == 1 { index.clone() } else { format!("{index} / {}", b.inner) };
        let index = match (b.size, b.outer) {
            (0 | 1, _) => return At::one("0"),
            (_, 0 | 1) => self.index(quotient),
            (size, _) => self.index(format!("{quotient} % {size}")),
        };
        At { index, width: if b.inner == 1 { at.width } else { 1 } }
    }

    pub(super) fn group(&mut self, at: &At, array: usize, size: u64) -> String {
        if self.length(array) == size { "0".into() } else { self.index(format!("{} / {size}", at.index)) }
    }

    pub(super) fn within(&mut self, at: &At, array: usize, size: u64) -> String {
        if self.length(array) == size {
            at.index.clone()
        } else {
            self.index(format!("{} % {size}", at.index))
        }
    }

    pub(super) fn kept(kept: &Kept, at: &At) -> String {
        match kept {
            Kept::Register(name) => name.clone(),
            Kept::Shared(start) => load("kept", *start, at),
            Kept::Common(start) => load("common", *start, at),
        }
    }

    pub(super) fn stat(&self, array: usize, number: usize, at: &At) -> String {
        self.plans[array].stats.get(number).map_or(String::new(), |s| Self::kept(s, at))
    }
}
