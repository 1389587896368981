//! The value of an earlier token, in a whole sequence or on a state of the text.

pub mod kernel;

use super::*;

/// `(v[b, t, ..], places i32[b, t], segments i32[b, t]) -> y`, the last two where it names them:
/// each token's row is that of the token `by` before it; zero where the sequence, or the document
/// of `segments`, has no such token.
///
/// With `places`, tokens of negative place take no part: they are not counted, and their own rows
/// are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shift {
    /// How many tokens back; at least one.
    pub by: u64,
    /// Whether it is the token after, not the one before: the reverse.
    pub ahead: bool,
    /// Whether there is an operand of places.
    pub places: bool,
    /// Whether there is an operand of segments.
    pub segments: bool,
}

/// The token just before, of those of the whole sequence.
impl Default for Shift {
    fn default() -> Self {
        Shift { by: 1, ahead: false, places: false, segments: false }
    }
}

/// `(v[b, t, ..], history[b, n, ..], slots i32[b, t]) -> y, history`: the row of the token `n`
/// before, where `history` has the last `n` rows of the text, the oldest first.
///
/// A token of negative slot takes no part: its row is zero, and the history stays as it was. The
/// history of a text that begins is zero.
pub struct ShiftState;

impl Shift {
    /// The number of the operand of segments, where there is one.
    fn segments_at(self) -> Option<usize> {
        self.segments.then_some(1 + usize::from(self.places))
    }

    /// How many operands there are.
    fn operands(self) -> usize {
        1 + usize::from(self.places) + usize::from(self.segments)
    }
}

const SHAPES: &str = "takes v[b, t, ..] and integers [b, t]";

/// Tokens that take part, or none, in half of the cases.
fn random_taking(case: &mut Case, name: &str, b: Dim, t: Dim) -> Value {
    case.ints_from(name, &[b, t], |rng| if rng.once_in(3) { -1 } else { rng.below(5) as i32 })
}

impl Payload for Shift {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("by")?;
        a.integer(&mut self.by)?;
        a.flag("ahead", &mut self.ahead)?;
        a.flag("places", &mut self.places)?;
        a.flag("segments", &mut self.segments)
    }
}

impl Operation for Shift {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "shift",
            operands: match (self.places, self.segments) {
                (false, false) => &["v[b, t, ..]"],
                (true, false) => &["v[b, t, ..]", "places i32[b, t]"],
                (false, true) => &["v[b, t, ..]", "segments i32[b, t]"],
                (true, true) => &["v[b, t, ..]", "places i32[b, t]", "segments i32[b, t]"],
            },
            results: &["y[b, t, ..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.check(self.by > 0, "shifts by at least one token")?;
        x.check(x[0].dims.len() >= 2, SHAPES)?;
        for k in 1..x.len() {
            x.int(k)?;
            x.check(x[k].dims[..] == x[0].dims[..2], SHAPES)?;
        }
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (rows, tokens) = (e.sizes(0)[0] * e.sizes(0)[1], e.sizes(0)[1]);
        let v = e.floats(0);
        let width = v.len() / rows.max(1);
        let takes = |i: usize| !self.places || e.ints(1)[i] >= 0;
        let document = |i: usize| self.segments_at().map_or(0, |k| e.ints(k)[i]);
        let mut y = vec![0.0; v.len()];
        for i in (0..rows).filter(|&i| takes(i)) {
            let first = i / tokens * tokens;
            let others: Vec<usize> = match self.ahead {
                true => (i + 1..first + tokens).filter(|&j| takes(j)).collect(),
                false => (first..i).rev().filter(|&j| takes(j)).collect(),
            };
            let nearest = others.get(..self.by as usize).unwrap_or_default();
            let Some(&from) = nearest.last().filter(|_| nearest.iter().all(|&j| document(j) == document(i)))
            else {
                continue;
            };
            y[i * width..][..width].copy_from_slice(&v[from * width..][..width]);
        }
        Ok(vec![Data::Float(y)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t, h) = (case.dim("b"), case.dim("t"), case.dim("h"));
        let dims = if case.rng.once_in(3) { vec![b, t] } else { vec![b, t, h] };
        let mut inputs = vec![case.floats("v", &dims)];
        let shift = Shift {
            by: 1 + case.rng.below(3),
            ahead: case.rng.once_in(3),
            places: case.rng.once_in(2),
            segments: case.rng.once_in(2),
        };
        if shift.places {
            inputs.push(random_taking(&mut case, "places", b, t));
        }
        if shift.segments {
            inputs.push(case.ints("segments", &[b, t], 2));
        }
        case.finish(shift, &inputs)
    }
}

impl Reverse for Shift {
    /// The cotangent that a token gave to the one after it comes back to it.
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let mut operands = vec![at.d()?];
        operands.extend((1..self.operands()).map(|k| at.operand(k)));
        let dv = at.builder().op(Shift { ahead: !self.ahead, ..*self }, &operands);
        at.add(0, dv);
        Ok(())
    }
}

impl Operation for ShiftState {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "shift_state",
            operands: &["v[b, t, ..]", "history[b, n, ..]", "slots i32[b, t]"],
            results: &["y[b, t, ..]", "history[b, n, ..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Missing("here: nothing is trained through a state of decoding"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(2)?;
        x.float(0)?;
        x.same_dtype(0, 1)?;
        let (v, history) = (&x[0].dims, &x[1].dims);
        let fits = v.len() >= 2
            && history.len() == v.len()
            && history[0] == v[0]
            && history[2..] == v[2..]
            && x[2].dims[..] == v[..2];
        x.check(fits, "takes v[b, t, ..], history[b, n, ..], slots i32[b, t]")?;
        x.check(x.size(history[1]) > 0, "a history has at least one row")?;
        Ok(vec![x[0].clone(), x[1].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let ([batch, tokens], n) = ([e.sizes(0)[0], e.sizes(0)[1]], e.sizes(1)[1]);
        let (v, history) = (e.floats(0), e.floats(1));
        let width = v.len() / (batch * tokens).max(1);
        let (mut y, mut kept) = (vec![0.0; v.len()], vec![]);
        for b in 0..batch {
            let mut rows: Vec<&[f64]> = (0..n).map(|j| &history[(b * n + j) * width..][..width]).collect();
            for i in (b * tokens..(b + 1) * tokens).filter(|&i| e.ints(2)[i] >= 0) {
                y[i * width..][..width].copy_from_slice(rows[rows.len() - n]);
                rows.push(&v[i * width..][..width]);
            }
            kept.extend(rows[rows.len() - n..].concat());
        }
        Ok(vec![Data::Float(y), Data::Float(kept)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t, n, h) = (case.dim("b"), case.dim("t"), case.dim("n"), case.dim("h"));
        let v = case.floats("v", &[b, t, h]);
        let history = case.state("history", &[b, n, h]);
        let slots = random_taking(&mut case, "slots", b, t);
        case.finish(Op::ShiftState, &[v, history, slots])
    }
}
