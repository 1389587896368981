//! Sums over the tokens so far.

pub(crate) mod cuda;
pub mod kernel;

use super::conv::{SEGMENTS, SLOTS, marks, random_segments, random_slots};
use super::*;

/// `(x[b, t, ..], segments i32[b, t]?) -> y[b, t, ..]`: `y[i] = Σ_{j≤i} x[j]`, or over `j ≥ i`
/// where it is reversed. A sum begins where the [`Sequence`] does.
///
/// With a state: `(x, sum[b, ..], slots i32[b, t]) -> y, sum`, where the sum of each text goes on.
///
/// In blocks, the last operand is `positions i32[b, t]`, and a sum begins again where the position
/// divided by `block` is another one. Its state is `sum[b, 2, ..]`: the sums, then for each the
/// number of its block and one, 0 before the first token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Running {
    /// Sums over later tokens.
    pub reverse: bool,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
    /// The tokens of a block, where sums are those of the token's own.
    pub block: Option<u64>,
}

const POSITIONS: &str = "positions i32[b, t]";

impl Running {
    /// How many operands stand before the positions.
    fn marked(&self) -> usize {
        match self.tokens {
            Tokens::All => 1,
            Tokens::Segments => 2,
            Tokens::Kept => 3,
        }
    }
}

impl Payload for Running {
    fn blanks() -> Vec<Self> {
        let of = |tokens| Running { reverse: false, tokens, block: None };
        let reversed = Running { reverse: true, ..of(Tokens::Segments) };
        let inside = |r: Running| Running { block: Some(2), ..r };
        let all = Tokens::ALL.map(of).into_iter().chain([reversed]);
        all.flat_map(|r| [r, inside(r)]).collect()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.flag("reverse", &mut self.reverse)?;
        self.tokens.attribute(a)?;
        let mut inside = self.block.is_some();
        a.flag("block", &mut inside)?;
        if inside { a.integer(self.block.get_or_insert_default()) } else { Ok(()) }
    }
}

impl Operation for Running {
    fn signature(&self) -> Signature<'_> {
        const X: &str = "x[b, t, ..]";
        Signature {
            name: "running",
            operands: match (self.tokens, self.block) {
                (Tokens::All, None) => &[X],
                (Tokens::Segments, None) => &[X, SEGMENTS],
                (Tokens::Kept, None) => &[X, "sum[b, ..]", SLOTS],
                (Tokens::All, Some(_)) => &[X, POSITIONS],
                (Tokens::Segments, Some(_)) => &[X, SEGMENTS, POSITIONS],
                (Tokens::Kept, Some(_)) => &[X, "sum[b, ..]", SLOTS, POSITIONS],
            },
            results: match self.tokens {
                Tokens::All | Tokens::Segments => &["y[b, t, ..]"],
                Tokens::Kept => &["y[b, t, ..]", "sum[b, ..]"],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: match self.tokens {
                Tokens::Kept => Derivative::Missing("here: nothing is trained through a state of decoding"),
                Tokens::All | Tokens::Segments => Derivative::Rule(self),
            },
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.check(x[0].dims.len() >= 2 && x[0].dtype == DType::F32, "takes f32 x[b, t, ..]")?;
        let (y, marks) = (x[0].clone(), 1 + usize::from(self.tokens == Tokens::Kept));
        self.tokens.check(x, marks, &y.dims[..2], self.reverse)?;
        if let Some(block) = self.block {
            x.check(block > 0, "a block has tokens")?;
            x.check(x[self.marked()] == Type::i32(&y.dims[..2]), "positions are i32[b, t]")?;
        }
        match self.tokens {
            Tokens::All | Tokens::Segments => Ok(vec![y]),
            Tokens::Kept => {
                let halves = match (self.block, x[1].dims.get(1)) {
                    (Some(_), Some(&two)) => {
                        x.check(x.size(two) == 2, "the sum is of sums and of blocks")?;
                        &x[1].dims[1..2]
                    }
                    _ => &[],
                };
                let dims = [&y.dims[..1], halves, &y.dims[2..]].concat();
                x.check(x[1] == Type::f32(&dims), "the sum is f32[b, ..], one row of x for each text")?;
                Ok(vec![y, x[1].clone()])
            }
        }
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, tokens) = (e.floats(0), e.sizes(0)[1]);
        let (batch, channels) = (e.sizes(0)[0], e.sizes(0)[2..].iter().product::<usize>());
        let mut y = vec![0.0; x.len()];
        let row = channels * (1 + usize::from(self.block.is_some()));
        let mut state = match self.tokens {
            Tokens::Kept => e.floats(1).to_vec(),
            Tokens::All | Tokens::Segments => vec![0.0; batch * row],
        };
        for b in 0..batch {
            let sequence = match self.tokens {
                Tokens::All => Sequence::default(),
                Tokens::Segments => Sequence::of_segments(Some(marks(e, 1, b, tokens))),
                Tokens::Kept => Sequence::of_slots(marks(e, 2, b, tokens)),
            };
            let (sum, before) = state[b * row..(b + 1) * row].split_at_mut(channels);
            let mut last = None;
            for n in 0..tokens {
                let i = if self.reverse { tokens - 1 - n } else { n };
                if !sequence.takes_part(i) {
                    continue;
                }
                let goes_on = match last {
                    Some(last) if self.reverse => sequence.continues(i, last),
                    Some(last) => sequence.continues(last, i),
                    None => true,
                };
                if !goes_on {
                    sum.fill(0.0);
                }
                if let Some(block) = self.block {
                    let position = marks(e, self.marked(), b, tokens)[i].max(0) as u64;
                    let number = (position / block + 1) as f64;
                    for (sum, before) in sum.iter_mut().zip(before.iter_mut()) {
                        if *before != number {
                            (*sum, *before) = (0.0, number);
                        }
                    }
                }
                for c in 0..channels {
                    sum[c] += x[(b * tokens + i) * channels + c];
                    y[(b * tokens + i) * channels + c] = sum[c];
                }
                last = Some(i);
            }
        }
        let state = (self.tokens == Tokens::Kept).then_some(Data::Float(state));
        Ok([Data::Float(y)].into_iter().chain(state).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let channels: Dims = ["h", "d"][..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect();
        let mut inputs = vec![case.floats("x", &[&[b, t], &channels[..]].concat())];
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => inputs.push(random_segments(&mut case, b, t)),
            Tokens::Kept => {
                let two = self.block.map(|_| case.sized("two", 2));
                inputs.push(case.state("sum", &[&[b], two.as_slice(), &channels[..]].concat()));
                inputs.push(random_slots(&mut case, b, t));
            }
        }
        if self.block.is_some() {
            inputs.push(case.ints("positions", &[b, t], 8));
        }
        case.finish(*self, &inputs)
    }
}

impl Reverse for Running {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operands());
        let turned = Running { reverse: !self.reverse, ..*self };
        let dx = at.builder().op(turned, &[&[d], &x[1..]].concat());
        at.add(0, dx);
        Ok(())
    }
}
