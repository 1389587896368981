//! Derivatives of formulas, as steps.

use super::{Binary, Builder, Formula, Step, Unary};

/// The derivative of a formula by one of its reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// The operand.
    pub read: usize,
    /// The step that reads it.
    pub leaf: usize,
    /// The step that is the derivative.
    pub by: usize,
}

/// A formula with its derivatives by everything it reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partials {
    /// Steps of all of it.
    pub steps: Vec<Step>,
    /// The step that is the formula's value.
    pub value: usize,
    /// The step that is its derivative by the scaled product.
    pub by_score: usize,
    /// Derivatives by operands; none where one is zero everywhere.
    pub of: Vec<Partial>,
}

impl Formula {
    /// Its derivatives: backwards through its steps, as through a function.
    pub fn partials(&self) -> Partials {
        let mut b = Builder::default();
        for &step in self.steps() {
            // Canonical steps are simple: each keeps its number.
            b.step(step);
        }
        let value = self.steps().len() - 1;
        let mut cotangents: Vec<Option<usize>> = vec![None; self.steps().len()];
        cotangents[value] = Some(b.number(1.0));
        for at in (0..self.steps().len()).rev() {
            let Some(d) = cotangents[at] else { continue };
            for (x, part) in parts(&mut b, at, d) {
                let sum = cotangents[x].map_or(part, |known| b.binary(Binary::Add, known, part));
                cotangents[x] = Some(sum);
            }
        }
        let zero = b.number(0.0);
        let mut by_score = zero;
        let mut found = vec![];
        for (leaf, step) in self.steps().iter().enumerate() {
            let Some(by) = cotangents[leaf].filter(|&by| by != zero) else { continue };
            if *step == Step::Score {
                by_score = by;
            } else if let Some(read) = step.read() {
                found.push((read, leaf, by));
            }
        }
        let leaves = found.iter().flat_map(|&(_, leaf, by)| [leaf, by]);
        let roots: Vec<usize> = [value, by_score].into_iter().chain(leaves).collect();
        let (steps, names) = b.needed(&roots);
        let of = found.iter().zip(names[2..].chunks(2));
        let of = of.map(|(&(read, ..), at)| Partial { read, leaf: at[0], by: at[1] }).collect();
        Partials { steps, value: names[0], by_score: names[1], of }
    }
}

/// A cotangent times a slope. Where the cotangent is chosen the product is: a branch that was not
/// taken gives zero even where its slope is infinite.
fn times(b: &mut Builder, d: usize, slope: usize) -> usize {
    through(b, d, &mut |b, d| b.binary(Binary::Mul, d, slope))
}

fn through(b: &mut Builder, d: usize, f: &mut dyn FnMut(&mut Builder, usize) -> usize) -> usize {
    if let Step::Where(c, x, y) = b.steps[d] {
        let (x, y) = (through(b, x, f), through(b, y, f));
        return b.choose(c, x, y);
    }
    if b.constant(d) == Some(0.0) { d } else { f(b, d) }
}

/// Cotangents that a step with this one gives to the steps that it names.
fn parts(b: &mut Builder, at: usize, d: usize) -> Vec<(usize, usize)> {
    let zero = b.number(0.0);
    match b.steps[at] {
        Step::Number(_) | Step::Score | Step::Query | Step::Key | Step::Head | Step::Read(_) => vec![],
        // An index is a choice.
        Step::Lookup(..) => vec![],
        Step::Unary(f, x) => unary(b, f, (x, at), d).map_or_else(Vec::new, |part| vec![(x, part)]),
        Step::Binary(f, x, y) => match f {
            Binary::Add => vec![(x, d), (y, d)],
            Binary::Sub => vec![(x, d), (y, b.unary(Unary::Neg, d))],
            Binary::Mul => vec![(x, times(b, d, y)), (y, times(b, d, x))],
            Binary::Div => {
                let of_x = through(b, d, &mut |b, d| b.binary(Binary::Div, d, y));
                let of_y = times(b, of_x, at);
                vec![(x, of_x), (y, b.unary(Unary::Neg, of_y))]
            }
            Binary::Min | Binary::Max => {
                let (low, high) = if f == Binary::Min { (x, y) } else { (y, x) };
                // Of two equal ones the first.
                let first = if f == Binary::Min { Binary::AtMost } else { Binary::Less };
                let first = b.binary(first, low, high);
                let (to_low, to_high) = (b.choose(first, d, zero), b.choose(first, zero, d));
                if f == Binary::Min {
                    vec![(x, to_low), (y, to_high)]
                } else {
                    // `y < x` is the second one below the first.
                    vec![(x, to_low), (y, to_high)]
                }
            }
            Binary::Less | Binary::AtMost | Binary::Equal => vec![],
        },
        Step::Where(c, x, y) => vec![(x, b.choose(c, d, zero)), (y, b.choose(c, zero, d))],
    }
}

/// The cotangent of `x` from that of a function of it, which is step `at`.
fn unary(b: &mut Builder, f: Unary, (x, at): (usize, usize), d: usize) -> Option<usize> {
    Some(match f {
        Unary::Neg => b.unary(Unary::Neg, d),
        Unary::Exp => times(b, d, at),
        Unary::Log => through(b, d, &mut |b, d| b.binary(Binary::Div, d, x)),
        Unary::Sqrt => {
            let twice = b.binary(Binary::Add, at, at);
            through(b, d, &mut |b, d| b.binary(Binary::Div, d, twice))
        }
        Unary::Abs => {
            let zero = b.number(0.0);
            let (below, back) = (b.binary(Binary::Less, x, zero), b.unary(Unary::Neg, d));
            b.choose(below, back, d)
        }
        Unary::Tanh => {
            let (one, square) = (b.number(1.0), b.binary(Binary::Mul, at, at));
            let slope = b.binary(Binary::Sub, one, square);
            times(b, d, slope)
        }
        Unary::Sin => {
            let slope = b.unary(Unary::Cos, x);
            times(b, d, slope)
        }
        Unary::Cos => {
            let sin = b.unary(Unary::Sin, x);
            let slope = b.unary(Unary::Neg, sin);
            times(b, d, slope)
        }
        Unary::Floor | Unary::Stop => return None,
    })
}
