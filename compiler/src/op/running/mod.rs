//! Sums over the tokens so far.

pub(crate) mod cuda;
pub mod kernel;

use super::conv::{SEGMENTS, SLOTS, marks, random_segments, random_slots};
use super::*;

/// `(x[b, t, ..], segments i32[b, t]?) -> y[b, t, ..]`: `y[i] = Σ_{j≤i} x[j]`, or over `j ≥ i`
/// where it is reversed. A sum begins where the [`Sequence`] does.
///
/// With a state: `(x, sum[b, ..], slots i32[b, t]) -> y, sum`, where the sum of each text goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Running {
    /// Sums over later tokens.
    pub reverse: bool,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
}

impl Payload for Running {
    fn blanks() -> Vec<Self> {
        let of = |tokens| Running { reverse: false, tokens };
        let reversed = Running { reverse: true, tokens: Tokens::Segments };
        Tokens::ALL.map(of).into_iter().chain([reversed]).collect()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.flag("reverse", &mut self.reverse)?;
        self.tokens.attribute(a)
    }
}

impl Operation for Running {
    fn signature(&self) -> Signature<'_> {
        const X: &str = "x[b, t, ..]";
        Signature {
            name: "running",
            operands: match self.tokens {
                Tokens::All => &[X],
                Tokens::Segments => &[X, SEGMENTS],
                Tokens::Kept => &[X, "sum[b, ..]", SLOTS],
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
        match self.tokens {
            Tokens::All | Tokens::Segments => Ok(vec![y]),
            Tokens::Kept => {
                let dims = [&y.dims[..1], &y.dims[2..]].concat();
                x.check(x[1] == Type::f32(&dims), "the sum is f32[b, ..], one row of x for each text")?;
                Ok(vec![y, x[1].clone()])
            }
        }
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, tokens) = (e.floats(0), e.sizes(0)[1]);
        let (batch, channels) = (e.sizes(0)[0], e.sizes(0)[2..].iter().product::<usize>());
        let mut y = vec![0.0; x.len()];
        let mut sums = match self.tokens {
            Tokens::Kept => e.floats(1).to_vec(),
            Tokens::All | Tokens::Segments => vec![0.0; batch * channels],
        };
        for b in 0..batch {
            let sequence = match self.tokens {
                Tokens::All => Sequence::default(),
                Tokens::Segments => Sequence::of_segments(Some(marks(e, 1, b, tokens))),
                Tokens::Kept => Sequence::of_slots(marks(e, 2, b, tokens)),
            };
            let sum = &mut sums[b * channels..(b + 1) * channels];
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
                for c in 0..channels {
                    sum[c] += x[(b * tokens + i) * channels + c];
                    y[(b * tokens + i) * channels + c] = sum[c];
                }
                last = Some(i);
            }
        }
        let sums = (self.tokens == Tokens::Kept).then_some(Data::Float(sums));
        Ok([Data::Float(y)].into_iter().chain(sums).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let channels: Dims = ["h", "d"][..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect();
        let mut inputs = vec![case.floats("x", &[&[b, t], &channels[..]].concat())];
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => inputs.push(random_segments(&mut case, b, t)),
            Tokens::Kept => {
                inputs.push(case.state("sum", &[&[b], &channels[..]].concat()));
                inputs.push(random_slots(&mut case, b, t));
            }
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
