//! Elements of an array, as an expression of their index.

use super::Generator;
use super::text::{At, Value, load, numbers};
use super::turns::Step;
use crate::codegen::text::float;
use crate::ir::DType;
use crate::program::{RowInput, RowOp};

impl Generator<'_> {
    /// Elements of an array, as a variable or a short expression.
    pub(super) fn value(&mut self, array: u32, at: &At) -> Value {
        let i = array as usize;
        // All elements of an array of one are the same.
        let one = At::one("0");
        let at = if self.length(i) == 1 { &one } else { at };
        if let Some(kept) = &self.plans[i].own
            && at.width == 1
        {
            return Value::one(Self::kept(kept, at));
        }
        if let RowOp::Constant(c) = self.kernel.ops[i] {
            return Value::one(float(c.0));
        }
        if let RowOp::Index { input } = self.kernel.ops[i] {
            return Value::one(format!("float(x{input})"));
        }
        if let RowOp::Zeros = self.kernel.ops[i] {
            return Value::one("0.0f");
        }
        let key = (array, at.clone());
        if let Some(value) = self.known(&key) {
            return value;
        }
        let value = match self.plans[i].own.clone() {
            Some(kept) => self.define(&Self::kept(&kept, at), at.width),
            None => self.compute(i, at),
        };
        self.remember(key, &value);
        value
    }

    pub(super) fn define(&mut self, expression: &str, width: u64) -> Value {
        let name = self.fresh("v");
        self.line(&format!("const {} {name} = {expression};", numbers(width)));
        Value { text: name, width }
    }

    /// Cosines (0) or sines (1) of a rotation, which several rotations may have in common.
    pub(super) fn angle(&mut self, i: usize, number: usize, at: &At) -> String {
        let text = self.stat(i, number, at);
        if at.width == 1 {
            return text;
        }
        let key = (u32::MAX, At { index: text, width: at.width });
        if let Some(value) = self.known(&key) {
            return value.text;
        }
        let value = self.define(&key.1.index, at.width);
        self.remember(key, &value);
        value.text
    }

    /// Elements one after another.
    pub(super) fn one_by_one(&mut self, at: &At, value: &dyn Fn(&mut Self, &At) -> Value) -> Value {
        let parts: Vec<String> = (0..at.width)
            .map(|lane| {
                let index = if lane == 0 { at.index.clone() } else { format!("{} + {lane}", at.index) };
                let at = At::one(self.index(index));
                value(self, &at).text
            })
            .collect();
        self.define(&format!("{}({})", numbers(at.width), parts.join(", ")), at.width)
    }

    /// Whether adjacent elements of the result come of adjacent or equal elements of the operands.
    pub(super) fn adjacent(&self, i: usize, width: u64) -> bool {
        let fits = |size: u64| size.is_multiple_of(width);
        let operand = |x: u32| self.length(x as usize);
        match &self.kernel.ops[i] {
            RowOp::Binary { broadcast: b, .. } => {
                b.size <= 1 || fits(b.inner) || (b.inner == 1 && (b.outer <= 1 || fits(b.size)))
            }
            RowOp::Rms { size, .. }
            | RowOp::RmsGrad { size, .. }
            | RowOp::Softmax { size, .. }
            | RowOp::SoftmaxGrad { size, .. } => self.length(i) == *size || fits(*size),
            RowOp::Rope { size, .. } => fits(size / 2),
            RowOp::Slice { x, size, start } => {
                let groups = (operand(*x) / size.max(&1)).max(1);
                fits(*start) && (groups == 1 || (fits(*size) && fits(self.length(i) / groups)))
            }
            RowOp::Concat { parts, groups } => parts.iter().all(|&part| fits(operand(part) / groups)),
            RowOp::Pick { .. } => false,
            _ => true,
        }
    }

    pub(super) fn compute(&mut self, i: usize, at: &At) -> Value {
        if at.width > 1 && !self.adjacent(i, at.width) {
            return self.one_by_one(at, &|g, at| g.value(i as u32, at));
        }
        let mut width = at.width;
        let expression = match self.kernel.ops[i].clone() {
            RowOp::Load { input } => {
                let (dtype, row) = match self.kernel.inputs[input as usize] {
                    RowInput::Row { dtype, .. } => (dtype, true),
                    RowInput::Shared { dtype, .. } => (dtype, false),
                    _ => (DType::F32, false),
                };
                if self.storing && at.index != "i" && row {
                    self.shifted = true;
                }
                let aligned = width > 1 && self.variant.is_wide(input as usize);
                if row {
                    self.steps.push(Step::Load(input as usize));
                }
                if let Some((_, _, _, words)) = self.loops.last_mut() {
                    *words += if aligned { (width * dtype.bytes()).div_ceil(4) } else { width };
                }
                match width {
                    1 => format!("value(x{input}[{}])", at.index),
                    _ if aligned => load(&format!("x{input}"), 0, at),
                    _ => {
                        let element = |lane| format!("value(x{input}[{} + {lane}])", at.index);
                        format!(
                            "{}({})",
                            numbers(width),
                            (0..width).map(element).collect::<Vec<_>>().join(", ")
                        )
                    }
                }
            }
            RowOp::Constant(c) => return Value::one(float(c.0)),
            RowOp::Index { input } => return Value::one(format!("float(x{input})")),
            RowOp::Zeros => return Value::one("0.0f"),
            // Of one element each; others are kept.
            RowOp::Reduce { x, .. } => return self.value(x, at),
            RowOp::Unary(op, x) => {
                let x = self.value(x, at);
                width = x.width;
                op.statement(&x.text)
            }
            RowOp::Binary { op, a, b, broadcast, small_first } => {
                let small = self.small(at, broadcast);
                let (a_at, b_at) = if small_first { (&small, at) } else { (at, &small) };
                let (a, b) = (self.value(a, a_at), self.value(b, b_at));
                width = a.width.max(b.width);
                op.statement(&a.text, &b.text)
            }
            RowOp::Rms { x, size, .. } => {
                let group = At::one(self.group(at, i, size));
                let x = self.value(x, at);
                width = x.width;
                format!("{} * {}", x.text, self.stat(i, 0, &group))
            }
            RowOp::RmsGrad { x, dy, size, .. } => {
                let group = At::one(self.group(at, i, size));
                let (x, dy) = (self.value(x, at), self.value(dy, at));
                width = x.width.max(dy.width);
                let (first, second) = (self.stat(i, 0, &group), self.stat(i, 1, &group));
                format!("fmaf(-{second}, {}, {} * {first})", x.text, dy.text)
            }
            RowOp::Softmax { x, size } => {
                let group = At::one(self.group(at, i, size));
                let x = self.value(x, at);
                width = x.width;
                format!("expf({} - {}) * {}", x.text, self.stat(i, 0, &group), self.stat(i, 1, &group))
            }
            RowOp::SoftmaxGrad { y, dy, size } => {
                let group = At::one(self.group(at, i, size));
                let (y, dy) = (self.value(y, at), self.value(dy, at));
                width = y.width.max(dy.width);
                format!("{} * ({} - {})", y.text, dy.text, self.stat(i, 0, &group))
            }
            RowOp::Rope { x, size, rope, .. } => {
                // An odd last element stays as it is; sizes are even.
                let half = size / 2;
                let within = self.within(at, i, size);
                let first = &at.index;
                let pair = self.index(format!("{within} < {half} ? {within} : {within} - {half}"));
                let other = self.index(format!("{within} < {half} ? {first} + {half} : {first} - {half}"));
                let (pair, other) = (At { index: pair, width }, At { index: other, width });
                let (mine, other) = (self.value(x, at), self.value(x, &other));
                let (cosine, sine) = (self.angle(i, 0, &pair), self.angle(i, 1, &pair));
                let (low, high) = if rope.inverse { ("", "-") } else { ("-", "") };
                let (mine, other) = (mine.text, other.text);
                format!("fmaf({mine}, {cosine}, ({within} < {half} ? {low}{sine} : {high}{sine}) * {other})")
            }
            RowOp::Slice { x, size, start } => {
                let (groups, taken) = {
                    let groups = (self.length(x as usize) / size.max(1)).max(1);
                    (groups, self.length(i) / groups)
                };
                let first = &at.index;
                let from = match (groups, start) {
                    (1, 0) => first.clone(),
                    (1, _) => format!("{first} + {start}"),
                    _ => format!("{first} / {taken} * {size} + {first} % {taken} + {start}"),
                };
                let index = self.index(from);
                return self.value(x, &At { index, width });
            }
            RowOp::Concat { parts, groups } => return self.concat(i, &parts, groups, at),
            RowOp::Pick { table, chosen } => {
                self.indices = true;
                let length = self.length(table as usize);
                let raw = self.fresh("i");
                self.line(&format!("const int {raw} = x{chosen}[{}];", at.index));
                self.line(&format!("if (u32({raw}) >= {length}u) report(status, launch);"));
                let place = self.index(format!("u32({raw}) < {length}u ? {raw} : 0"));
                return self.value(table, &At::one(place));
            }
            RowOp::PickGrad { d, chosen } => {
                self.indices = true;
                let (name, k, c) = (self.fresh("v"), self.fresh("k"), self.fresh("i"));
                let count = match self.kernel.inputs[chosen as usize] {
                    RowInput::RowInts { length } => length,
                    _ => 0,
                };
                let first = &at.index;
                self.line(&format!("{} {name} = 0.0f;", numbers(width)));
                self.open_loop(&format!("for (int {k} = 0; {k} < {count}; ++{k}) {{"), count);
                self.line(&format!("const int {c} = x{chosen}[{k}];"));
                self.line(&format!("if (u32({c}) >= {}u) report(status, launch);", self.length(i)));
                self.open(&match width {
                    1 => format!("if ({c} == {first}) {{"),
                    _ => format!("if (u32({c} - {first}) < {width}u) {{"),
                });
                let d = self.value(d, &At::one(k)).text;
                match width {
                    1 => self.line(&format!("{name} = {d};")),
                    _ => self.line(&format!("{name} = with_lane({name}, {c} - {first}, {d});")),
                }
                self.close();
                self.close_loop();
                return Value { text: name, width };
            }
        };
        self.define(&expression, width)
    }

    pub(super) fn concat(&mut self, i: usize, parts: &[u32], groups: u64, at: &At) -> Value {
        let total = self.length(i) / groups;
        let within = self.within(at, i, total);
        let group = self.group(at, i, total);
        let name = self.fresh("v");
        self.line(&format!("{} {name} = 0.0f;", numbers(at.width)));
        let mut first = 0;
        for &part in parts {
            let size = self.length(part as usize) / groups;
            let end = first + size;
            self.open(&format!("if ({within} >= {first} && {within} < {end}) {{"));
            let mut from = if group == "0" { within.clone() } else { format!("{group} * {size} + {within}") };
            if first > 0 {
                from += &format!(" - {first}");
            }
            let index = self.index(from);
            let value = self.value(part, &At { index, width: at.width });
            self.line(&format!("{name} = {};", value.text));
            self.close();
            first = end;
        }
        Value { text: name, width: at.width }
    }
}
