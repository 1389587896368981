//! Formulas of scores and masks: what attention computes of a pair of a query and a key between its
//! two products.
//!
//! *In*: numbers, the scaled product `s`, the positions `i` and `j`, the head, and operands that
//! are read at the query, at the key, by head or by index. *Out*: a score, or whether the pair
//! exists. *Promise*: a formula is a list of steps in one canonical order, so that equal formulas
//! are equal; every device and [`interpret`](crate::ir::interpret()) run the same steps, its
//! derivative is a list of the same kind ([`Partials`]), and its range over a block of pairs
//! ([`Formula::over`]) contains the value of each.

pub(crate) mod code;
mod derivative;
mod range;
mod text;

use crate::op::Bits;
use std::collections::HashMap;

pub use derivative::{Partial, Partials};
pub use range::{Block, Part, Range};

/// Operands that a program may read.
pub const MOST_READS: usize = 16;
/// Steps that a formula may have.
pub const MOST_STEPS: usize = 256;

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unary {
    /// `-x`
    Neg,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `sqrt(x)`
    Sqrt,
    /// `|x|`
    Abs,
    /// `tanh x`
    Tanh,
    /// `sin x`
    Sin,
    /// `cos x`
    Cos,
    /// The largest whole number that is not above `x`; no gradient.
    Floor,
    /// `x`; no gradient.
    Stop,
}

/// A function of two numbers. Comparisons give 1 or 0, and have no gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// The smaller one.
    Min,
    /// The larger one.
    Max,
    /// Whether `a < b`.
    Less,
    /// Whether `a <= b`.
    AtMost,
    /// Whether `a = b`.
    Equal,
}

impl Unary {
    /// All of them.
    pub const ALL: [Unary; 10] = [
        Unary::Neg,
        Unary::Exp,
        Unary::Log,
        Unary::Sqrt,
        Unary::Abs,
        Unary::Tanh,
        Unary::Sin,
        Unary::Cos,
        Unary::Floor,
        Unary::Stop,
    ];

    /// Its word in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Neg => "neg",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Abs => "abs",
            Unary::Tanh => "tanh",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Floor => "floor",
            Unary::Stop => "stop",
        }
    }

    /// Its value.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Unary::Neg => -x,
            Unary::Exp => x.exp(),
            Unary::Log => x.ln(),
            Unary::Sqrt => x.sqrt(),
            Unary::Abs => x.abs(),
            Unary::Tanh => x.tanh(),
            Unary::Sin => x.sin(),
            Unary::Cos => x.cos(),
            Unary::Floor => x.floor(),
            Unary::Stop => x,
        }
    }
}

impl Binary {
    /// All of them.
    pub const ALL: [Binary; 9] = [
        Binary::Add,
        Binary::Sub,
        Binary::Mul,
        Binary::Div,
        Binary::Min,
        Binary::Max,
        Binary::Less,
        Binary::AtMost,
        Binary::Equal,
    ];

    /// Its word in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Min => "min",
            Binary::Max => "max",
            Binary::Less => "less",
            Binary::AtMost => "at_most",
            Binary::Equal => "equal",
        }
    }

    /// Its value.
    pub fn apply(self, a: f64, b: f64) -> f64 {
        let truth = |x: bool| f64::from(u8::from(x));
        match self {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Min => a.min(b),
            Binary::Max => a.max(b),
            Binary::Less => truth(a < b),
            Binary::AtMost => truth(a <= b),
            Binary::Equal => truth(a == b),
        }
    }
}

/// A step of a formula, which names those before it by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// A number.
    Number(Bits),
    /// The product of query and key, scaled.
    Score,
    /// The query's position.
    Query,
    /// The key's position.
    Key,
    /// The query head's number.
    Head,
    /// The number that the operand has for the pair.
    Read(usize),
    /// The number of an operand, a table, at an index: rounded down, and the nearest that there is.
    Lookup(usize, usize),
    /// A function of one step.
    Unary(Unary, usize),
    /// A function of two.
    Binary(Binary, usize, usize),
    /// The second where the first is above zero, else the third.
    Where(usize, usize, usize),
}

impl Step {
    /// The steps that it names.
    pub fn operands(self) -> impl DoubleEndedIterator<Item = usize> {
        let list = match self {
            Step::Number(_) | Step::Score | Step::Query | Step::Key | Step::Head | Step::Read(_) => [None; 3],
            Step::Lookup(_, x) | Step::Unary(_, x) => [Some(x), None, None],
            Step::Binary(_, a, b) => [Some(a), Some(b), None],
            Step::Where(c, a, b) => [Some(c), Some(a), Some(b)],
        };
        list.into_iter().flatten()
    }

    /// The same with other numbers for the steps that it names.
    fn renamed(self, name: impl Fn(usize) -> usize) -> Step {
        match self {
            Step::Number(_) | Step::Score | Step::Query | Step::Key | Step::Head | Step::Read(_) => self,
            Step::Lookup(read, x) => Step::Lookup(read, name(x)),
            Step::Unary(f, x) => Step::Unary(f, name(x)),
            Step::Binary(f, a, b) => Step::Binary(f, name(a), name(b)),
            Step::Where(c, a, b) => Step::Where(name(c), name(a), name(b)),
        }
    }

    /// The operand that it reads.
    pub fn read(self) -> Option<usize> {
        match self {
            Step::Read(read) | Step::Lookup(read, _) => Some(read),
            Step::Number(_)
            | Step::Score
            | Step::Query
            | Step::Key
            | Step::Head
            | Step::Unary(..)
            | Step::Binary(..)
            | Step::Where(..) => None,
        }
    }
}

/// For which pairs an operand has a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A number for each query: `[batch, queries]`.
    Query,
    /// A number for each key: `[batch, keys]`.
    Key,
    /// One number.
    All,
    /// A table of numbers, by index.
    Table,
}

/// An operand that a program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Read {
    /// For which pairs it has numbers.
    pub place: Place,
    /// Whether each query head has its own: a dimension of heads, the last of an operand for each
    /// query or key, and the first of a table.
    pub heads: bool,
}

/// A pair of a query and a key, for formulas.
pub struct Pair<'a> {
    /// The scaled product.
    pub score: f64,
    /// The query's position.
    pub query: f64,
    /// The key's position.
    pub key: f64,
    /// The query head.
    pub head: f64,
    /// The number of an operand, of a table at an index.
    pub read: &'a dyn Fn(usize, Option<f64>) -> f64,
}

/// A formula: its steps; the last is its value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Formula(Vec<Step>);

/// The index into a table of `length` numbers that a formula's index means.
pub fn index(at: f64, length: usize) -> usize {
    // NaN is 0.
    (at.floor().max(0.0) as usize).min(length.saturating_sub(1))
}

/// The values of steps at a pair.
pub fn evaluate(steps: &[Step], at: &Pair) -> Vec<f64> {
    let mut values: Vec<f64> = Vec::with_capacity(steps.len());
    for step in steps {
        values.push(match *step {
            Step::Number(x) => x.0,
            Step::Score => at.score,
            Step::Query => at.query,
            Step::Key => at.key,
            Step::Head => at.head,
            Step::Read(read) => (at.read)(read, None),
            Step::Lookup(read, x) => (at.read)(read, Some(values[x])),
            Step::Unary(f, x) => f.apply(values[x]),
            Step::Binary(f, a, b) => f.apply(values[a], values[b]),
            Step::Where(c, a, b) => values[if values[c] > 0.0 { a } else { b }],
        });
    }
    values
}

impl Formula {
    /// Its steps; the last is its value.
    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    /// Its value at a pair.
    pub fn evaluate(&self, at: &Pair) -> f64 {
        evaluate(&self.0, at).last().copied().unwrap_or(0.0)
    }

    /// Whether some step is as the function says.
    fn any(&self, of: impl Fn(Step) -> bool) -> bool {
        self.0.iter().any(|&step| of(step))
    }
}

/// The formulas of pairs: a score in the place of the scaled product, and which pairs
/// exist of those that are left by order, window, positions and segments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Program {
    /// The operands, in order.
    pub reads: Vec<Read>,
    /// The score; the scaled product where there is none.
    pub score: Option<Formula>,
    /// Above zero where the pair exists; all do where there is none.
    pub mask: Option<Formula>,
}

impl Program {
    /// Why it is not well formed: a mask of scores, or reads that no formula may have.
    pub fn check(&self) -> Result<(), String> {
        let formulas = || self.score.iter().chain(&self.mask);
        if self.reads.len() > MOST_READS {
            return Err(format!("a program reads {} operands, at most {MOST_READS}", self.reads.len()));
        }
        if formulas().any(|f| f.0.len() > MOST_STEPS) {
            return Err(format!("a formula has at most {MOST_STEPS} steps"));
        }
        if self.mask.as_ref().is_some_and(|m| m.any(|step| step == Step::Score)) {
            return Err("a mask cannot depend on the product `s`".into());
        }
        for step in formulas().flat_map(|f| &f.0) {
            let Some(read) = step.read() else { continue };
            let Some(of) = self.reads.get(read) else {
                return Err(format!("x{read} is read, and there are {} operands", self.reads.len()));
            };
            if (of.place == Place::Table) != matches!(step, Step::Lookup(..)) {
                return Err(format!("x{read} is a table, which is read by index, or it is not"));
            }
        }
        Ok(())
    }

    /// Whether a formula has a value for each head.
    fn varies(&self, formula: &Formula) -> bool {
        let of = |step: Step| step == Step::Head || step.read().is_some_and(|r| self.reads[r].heads);
        formula.any(of)
    }

    /// Whether the mask hides other keys from some heads than from others.
    pub fn masks_by_head(&self) -> bool {
        self.mask.as_ref().is_some_and(|mask| self.varies(mask))
    }

    /// Whether the mask depends on operands.
    pub fn masks_by_operands(&self) -> bool {
        self.mask.as_ref().is_some_and(|mask| mask.any(|step| step.read().is_some()))
    }

    /// Element-wise operations on each pair, forward and back.
    pub fn work(&self, gradient: bool) -> u64 {
        let counted = |steps: &[Step]| {
            let free = |step: &&Step| {
                !matches!(
                    step,
                    Step::Number(_) | Step::Score | Step::Query | Step::Key | Step::Head | Step::Read(_)
                )
            };
            steps.iter().filter(free).count() as u64
        };
        let mask = self.mask.as_ref().map_or(0, |m| counted(&m.0));
        let score = self.score.as_ref().map_or(0, |score| match gradient {
            true => {
                let partials = score.partials();
                // A product with the cotangent of the score, and a sum.
                counted(&partials.steps) + 1 + 2 * partials.of.len() as u64
            }
            false => counted(&score.0),
        });
        mask + score
    }
}

/// Builds formulas: equal steps are one, numbers are folded, and what multiplies by one or adds
/// zero is left out.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    steps: Vec<Step>,
    known: HashMap<Step, usize>,
}

impl Builder {
    /// The number of a step.
    pub fn step(&mut self, step: Step) -> usize {
        if let Some(same) = self.simpler(step) {
            return same;
        }
        let next = self.steps.len();
        let at = *self.known.entry(step).or_insert(next);
        if at == next {
            self.steps.push(step);
        }
        at
    }

    /// A number.
    pub fn number(&mut self, x: f64) -> usize {
        self.step(Step::Number(Bits(x)))
    }

    /// A function of one step.
    pub fn unary(&mut self, f: Unary, x: usize) -> usize {
        self.step(Step::Unary(f, x))
    }

    /// A function of two.
    pub fn binary(&mut self, f: Binary, a: usize, b: usize) -> usize {
        self.step(Step::Binary(f, a, b))
    }

    /// One of two steps, by whether a third is above zero.
    pub fn choose(&mut self, c: usize, a: usize, b: usize) -> usize {
        self.step(Step::Where(c, a, b))
    }

    /// 1 where a step is not zero, else 0.
    pub fn truth(&mut self, x: usize) -> usize {
        if self.is_truth(x) {
            return x;
        }
        let (zero, one) = (self.number(0.0), self.number(1.0));
        let equal = self.binary(Binary::Equal, x, zero);
        self.binary(Binary::Sub, one, equal)
    }

    /// Whether a step is 0 or 1 by its making.
    fn is_truth(&self, x: usize) -> bool {
        match self.steps[x] {
            Step::Number(x) => x.0 == 0.0 || x.0 == 1.0,
            Step::Binary(Binary::Less | Binary::AtMost | Binary::Equal, ..) => true,
            Step::Binary(Binary::Sub, a, b) => self.constant(a) == Some(1.0) && self.is_truth(b),
            Step::Binary(Binary::Mul | Binary::Min | Binary::Max, a, b) => {
                self.is_truth(a) && self.is_truth(b)
            }
            Step::Where(_, a, b) => self.is_truth(a) && self.is_truth(b),
            Step::Binary(Binary::Add | Binary::Div, ..)
            | Step::Score
            | Step::Query
            | Step::Key
            | Step::Head
            | Step::Read(_)
            | Step::Lookup(..)
            | Step::Unary(..) => false,
        }
    }

    /// The number that a step is, where it is one.
    fn constant(&self, step: usize) -> Option<f64> {
        if let Step::Number(x) = self.steps[step] { Some(x.0) } else { None }
    }

    /// A step of before, or a number, that is the same.
    fn simpler(&mut self, step: Step) -> Option<usize> {
        let is = |b: &Self, x: usize, n: f64| b.constant(x) == Some(n);
        match step {
            Step::Number(_) | Step::Score | Step::Query | Step::Key | Step::Head | Step::Read(_) => None,
            Step::Lookup(..) => None,
            Step::Unary(f, x) => match (f, self.constant(x), self.steps[x]) {
                (_, Some(x), _) => Some(self.number(f.apply(x))),
                (Unary::Neg, _, Step::Unary(Unary::Neg, y)) => Some(y),
                _ => None,
            },
            Step::Binary(f, a, b) => {
                if let (Some(a), Some(b)) = (self.constant(a), self.constant(b)) {
                    return Some(self.number(f.apply(a, b)));
                }
                match f {
                    Binary::Add if is(self, a, 0.0) => Some(b),
                    Binary::Add | Binary::Sub if is(self, b, 0.0) => Some(a),
                    Binary::Sub if is(self, a, 0.0) => Some(self.unary(Unary::Neg, b)),
                    Binary::Mul if is(self, a, 1.0) => Some(b),
                    Binary::Mul | Binary::Div if is(self, b, 1.0) => Some(a),
                    Binary::Mul if is(self, a, -1.0) => Some(self.unary(Unary::Neg, b)),
                    Binary::Mul | Binary::Div if is(self, b, -1.0) => Some(self.unary(Unary::Neg, a)),
                    Binary::Mul | Binary::Div if is(self, a, 0.0) => Some(a),
                    Binary::Mul if is(self, b, 0.0) => Some(b),
                    Binary::Add
                    | Binary::Sub
                    | Binary::Mul
                    | Binary::Div
                    | Binary::Min
                    | Binary::Max
                    | Binary::Less
                    | Binary::AtMost
                    | Binary::Equal => None,
                }
            }
            Step::Where(_, a, b) if a == b => Some(a),
            Step::Where(c, a, b) => self.constant(c).map(|c| if c > 0.0 { a } else { b }),
        }
    }

    /// The steps that some of them need, in the order in which the first of them asks for them, and
    /// the new numbers of those.
    fn needed(&self, roots: &[usize]) -> (Vec<Step>, Vec<usize>) {
        let mut names: HashMap<usize, usize> = HashMap::new();
        let mut steps = vec![];
        // A list of its own rather than recursion: formulas may be deep.
        let mut open: Vec<(usize, bool)> = roots.iter().rev().map(|&r| (r, false)).collect();
        while let Some((step, ready)) = open.pop() {
            if names.contains_key(&step) {
                continue;
            }
            if ready {
                steps.push(self.steps[step].renamed(|x| names[&x]));
                names.insert(step, steps.len() - 1);
                continue;
            }
            open.push((step, true));
            open.extend(self.steps[step].operands().rev().map(|x| (x, false)));
        }
        let roots = roots.iter().map(|r| names[r]).collect();
        (steps, roots)
    }

    /// The formula whose value is a step.
    pub fn formula(&self, value: usize) -> Formula {
        Formula(self.needed(&[value]).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at<'a>(score: f64, query: f64, key: f64, read: &'a dyn Fn(usize, Option<f64>) -> f64) -> Pair<'a> {
        Pair { score, query, key, head: 1.0, read }
    }

    #[test]
    fn formulas_print_and_parse_back() {
        for text in [
            "s",
            "sub(s, mul(x0[head], sub(i, j)))",
            "mul(30, tanh(div(s, 30)))",
            "add(sub(s, x1[j, head]), x0[i, head])",
            "add(s, x0[head, min(max(sub(i, j), 0), 127)])",
            "t0 = exp(s); div(t0, add(1, t0))",
            "where(less(x0[i], x1[j]), s, x2)",
        ] {
            let program = Program::parse(Some(text), None).unwrap_or_else(|e| panic!("{text}: {e}"));
            let score = program.score.as_ref().unwrap();
            assert_eq!(program.show(score), text);
            program.check().unwrap_or_else(|e| panic!("{text}: {e}"));
        }
    }

    #[test]
    fn a_formula_that_is_wrong_is_refused_with_the_reason() {
        let of = |text| Program::parse(Some(text), None).unwrap_err();
        assert_eq!(of("sub(s"), "`,` or `)` expected at the end of `sub(s`");
        assert_eq!(of("su(s, 1)"), "`su` is no function of a formula");
        assert_eq!(of("add(s)"), "`add` takes 2 operands, has 1");
        assert_eq!(of("add(x0[i], x0[j])"), "x0 is read in two ways");
        assert_eq!(of("add(s, x1[j])"), "x1 is read and x0 is not");
        let mask = Program::parse(None, Some("less(s, 1)")).unwrap();
        assert_eq!(mask.check().unwrap_err(), "a mask cannot depend on the product `s`");
    }

    #[test]
    fn numbers_are_folded_and_dead_steps_left_out() {
        let mut b = Builder::default();
        let (s, one) = (b.step(Step::Score), b.number(1.0));
        let dead = b.unary(Unary::Exp, s);
        let two = b.binary(Binary::Add, one, one);
        let same = b.binary(Binary::Mul, one, s);
        assert_eq!(same, s);
        let value = b.binary(Binary::Mul, two, same);
        let formula = b.formula(value);
        assert_eq!(formula.steps().len(), 3, "{formula:?}, without step {dead}");
        assert_eq!(formula.evaluate(&at(3.0, 0.0, 0.0, &|_, _| 0.0)), 6.0);
    }

    /// Partial derivatives equal finite differences in everything a formula reads.
    #[test]
    fn partials_are_derivatives() {
        for text in [
            "sub(s, mul(x0[head], sub(i, j)))",
            "mul(x0, tanh(div(s, x0)))",
            "add(sub(s, x1[j, head]), x0[i, head])",
            "add(s, x0[head, sub(i, j)])",
            "where(less(2, i), mul(s, exp(x0[i])), log(x1[j]))",
            "add(abs(neg(x0[i])), add(sqrt(x1[j]), mul(sin(s), cos(x1[j]))))",
            "add(min(s, x0[i]), max(x1[j], floor(s)))",
            "add(add(s, less(s, x0[i])), add(at_most(s, 3), equal(s, 3)))",
        ] {
            let program = Program::parse(Some(text), None).unwrap();
            let score = program.score.as_ref().unwrap();
            let values = [0.7, 1.3, 0.4, 2.1];
            let eval = |s: f64, values: [f64; 4]| {
                score.evaluate(&at(s, 3.0, 1.0, &|r, index| values[r] * (1.0 + index.unwrap_or(0.0))))
            };
            let partials = score.partials();
            let read = |r: usize, index: Option<f64>| values[r] * (1.0 + index.unwrap_or(0.0));
            let all = evaluate(&partials.steps, &at(0.3, 3.0, 1.0, &read));
            assert_eq!(all[partials.value], eval(0.3, values), "{text}");
            let h = 1e-6;
            let by_s = (eval(0.3 + h, values) - eval(0.3 - h, values)) / (2.0 * h);
            assert!((all[partials.by_score] - by_s).abs() < 1e-6, "{text}: {by_s}");
            for r in 0..program.reads.len() {
                let moved = |h: f64| {
                    let mut moved = values;
                    moved[r] += h;
                    eval(0.3, moved)
                };
                let numeric = (moved(h) - moved(-h)) / (2.0 * h);
                let factor = |p: &Partial| match partials.steps[p.leaf] {
                    Step::Lookup(_, x) => 1.0 + all[x],
                    _ => 1.0,
                };
                let of = |p: &&Partial| p.read == r;
                let found: f64 = partials.of.iter().filter(of).map(|p| all[p.by] * factor(p)).sum();
                assert!((found - numeric).abs() < 1e-6, "{text}: x{r} {found} {numeric}");
            }
        }
    }

    /// A branch that is not taken gives nothing, whatever its slope is there.
    #[test]
    fn a_branch_not_taken_gives_no_gradient() {
        let program = Program::parse(Some("where(less(0, x0[i]), log(x0[i]), s)"), None).unwrap();
        let partials = program.score.unwrap().partials();
        let all = evaluate(&partials.steps, &at(0.5, 0.0, 0.0, &|_, _| 0.0));
        assert_eq!(partials.of.iter().map(|p| all[p.by]).sum::<f64>(), 0.0);
        assert_eq!(all[partials.by_score], 1.0);
    }

    /// Masks of all kinds: windows, blocks, dilated patterns, prefixes, and what operands decide.
    const MASKS: [&str; 8] = [
        "less(sub(i, j), 5)",
        "equal(floor(div(i, 4)), floor(div(j, 4)))",
        "sub(sub(i, j), mul(3, floor(div(sub(i, j), 3))))",
        "max(less(j, 4), less(sub(i, j), 3))",
        "mul(at_most(x0, x1[head, j]), less(head, 2))",
        "add(exp(div(neg(j), 9)), mul(abs(sub(i, 7)), cos(j)))",
        "div(tanh(i), add(1, sqrt(log(add(1, j)))))",
        "where(less(i, 6), min(i, j), neg(j))",
    ];

    /// How many blocks a judge decides, or a pair that it judges wrongly.
    fn judged(text: &str, judge: fn(&Formula, &Block) -> Part) -> Result<u32, String> {
        let read = |r: usize, x: Option<f64>| (r as f64 + 1.0) * x.unwrap_or(0.5).sin();
        let program = Program::parse(None, Some(text)).unwrap();
        let mask = program.mask.as_ref().unwrap();
        let mut decided = 0;
        for (q, k) in (0..16).flat_map(|q| (0..16).map(move |k| (q, k))) {
            let (high_q, high_k) = (q + 1, k + 2);
            let block = Block {
                query: Range::new(q as f64, high_q as f64),
                key: Range::new(k as f64, high_k as f64),
                head: Range::new(1.0, 1.0),
                read: &|r, x| match x {
                    None => Range::new(read(r, None), read(r, None)),
                    Some(_) => Range::new(-(r as f64 + 1.0), r as f64 + 1.0),
                },
            };
            let (range, part) = (mask.over(&block), judge(mask, &block));
            decided += u32::from(part != Part::Mixed);
            for (i, j) in (q..=high_q).flat_map(|i| (k..=high_k).map(move |j| (i, j))) {
                let value = mask.evaluate(&at(0.0, i as f64, j as f64, &read));
                let wrong = match part {
                    Part::Empty => value > 0.0,
                    Part::Full => value <= 0.0,
                    Part::Mixed => false,
                };
                if wrong || range.low > value || value > range.high {
                    return Err(format!("{text} at {i}, {j}: {value}, judged {range:?}, {part:?}"));
                }
            }
        }
        Ok(decided)
    }

    /// The range over a block has the value of each of its pairs, and decides where it can.
    #[test]
    fn a_range_has_every_value() {
        for text in MASKS {
            let decided = judged(text, Formula::part).unwrap_or_else(|problem| panic!("{problem}"));
            // Of a remainder, a wave, and a comparison of operands, blocks of this size decide
            // nothing.
            let open = ["x0", "mul(3", "cos"].iter().any(|part| text.contains(part));
            assert!(decided > 0 || open, "{text}");
        }
    }

    /// A seeded fault: a block that keeps some pairs is judged full.
    #[test]
    fn a_mixed_block_that_is_judged_full_is_noticed() {
        let careless: fn(&Formula, &Block) -> Part = |mask, block| match mask.part(block) {
            Part::Mixed => Part::Full,
            sure => sure,
        };
        assert!(MASKS.iter().any(|text| judged(text, careless).is_err()));
    }
}
