//! Causal convolutions over the sequence, a filter of its own for each channel.

pub(crate) mod cuda;
pub mod kernel;

use super::*;

/// `(x[b, t, ..], w[m, ..], segments i32[b, t]?) -> y[b, t, ..]`: `y[i] = Σ_k w[k] ⊙ x[i-k]`, or
/// `Σ_k w[k] ⊙ x[i+k]` where it is reversed. A sum ends where the [`Sequence`] does.
///
/// With history: `(x, w, history[b, m-1, ..], slots i32[b, t]) -> y, history`. The history has the
/// last tokens of each text, the oldest first, and stands before `x`; of a text that begins it is
/// zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Conv {
    /// Sums over later tokens.
    pub reverse: bool,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
}

/// `(x[b, t, ..], dy[b, t, ..], segments i32[b, t]?) -> dw[m, ..]`: the gradient of the filters of
/// a [`Conv`] that is not reversed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConvGrad {
    /// The dimension of the filters.
    pub width: Dim,
    /// Whether there are segments.
    pub segments: bool,
}

/// Where the tokens of an operation over the sequence come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tokens {
    /// All are of one sequence.
    #[default]
    All,
    /// An operand says which are of one document, as [`Sequence::of_segments`] reads it.
    Segments,
    /// They follow those of a state, and an operand says which take part, as
    /// [`Sequence::of_slots`] reads it.
    Kept,
}

impl Tokens {
    /// Visits it as an attribute: nothing, `segments` or `kept`.
    pub(crate) fn attribute(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        let (mut segments, mut kept) = (*self == Tokens::Segments, *self == Tokens::Kept);
        a.flag("segments", &mut segments)?;
        if !segments {
            a.flag("kept", &mut kept)?;
        }
        *self = match (segments, kept) {
            (true, _) => Tokens::Segments,
            (_, true) => Tokens::Kept,
            _ => Tokens::All,
        };
        Ok(())
    }

    /// All of them.
    pub const ALL: [Tokens; 3] = [Tokens::All, Tokens::Segments, Tokens::Kept];

    /// The shape rule of all operations over a sequence: operand `k`, where tokens are marked, has
    /// an integer for each of them, and what has a state goes forward.
    pub(super) fn check(
        self,
        x: &Operands,
        k: usize,
        tokens: &[Dim],
        reverse: bool,
    ) -> Result<(), TypeError> {
        x.check(!(reverse && self == Tokens::Kept), "what has a state is not reversed")?;
        match self {
            Tokens::All => Ok(()),
            Tokens::Segments | Tokens::Kept => check_marks(x, k, tokens),
        }
    }
}

/// The order of a sequence's tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sequence<'a> {
    marks: Option<&'a [i32]>,
    documents: bool,
}

impl<'a> Sequence<'a> {
    /// Tokens by their segments, where there are any. One of a negative segment takes no part. The
    /// others are of one document with the one before them that takes part where their segments are
    /// equal.
    pub fn of_segments(segments: Option<&'a [i32]>) -> Self {
        Sequence { marks: segments, documents: true }
    }

    /// Tokens by their slots, all of one text. One of a negative slot takes no part.
    pub fn of_slots(slots: &'a [i32]) -> Self {
        Sequence { marks: Some(slots), documents: false }
    }

    /// Whether integers say which tokens take part.
    #[inline(always)]
    pub fn is_marked(&self) -> bool {
        self.marks.is_some()
    }

    /// Whether a token takes part.
    #[inline(always)]
    pub fn takes_part(&self, token: usize) -> bool {
        self.marks.is_none_or(|marks| marks[token] >= 0)
    }

    /// Whether the second of two tokens continues the first. Both take part, and no token between
    /// them does.
    #[inline(always)]
    pub fn continues(&self, first: usize, second: usize) -> bool {
        !self.documents || self.marks.is_none_or(|m| m[first] == m[second])
    }

    /// The token before a token that takes part.
    #[inline(always)]
    pub fn before(&self, token: usize) -> Option<usize> {
        let Some(_) = self.marks else { return token.checked_sub(1) };
        let before = (0..token).rev().find(|&i| self.takes_part(i))?;
        self.continues(before, token).then_some(before)
    }

    /// The token after a token that takes part, of `tokens` tokens.
    #[inline(always)]
    pub fn after(&self, token: usize, tokens: usize) -> Option<usize> {
        let after = (token + 1..tokens).find(|&i| self.takes_part(i))?;
        self.continues(token, after).then_some(after)
    }

    /// The next token of the sum of a convolution.
    #[inline(always)]
    pub fn next(&self, token: usize, tokens: usize, reverse: bool) -> Option<usize> {
        if reverse { self.after(token, tokens) } else { self.before(token) }
    }
}

pub(super) const SEGMENTS: &str = "segments i32[b, t]";
pub(super) const SLOTS: &str = "slots i32[b, t]";
const X: &str = "x[b, t, ..]";
const W: &str = "w[m, ..]";

/// That operand `k` has an integer for each token.
pub(super) fn check_marks(x: &Operands, k: usize, tokens: &[Dim]) -> Result<(), TypeError> {
    x.check(x[k] == Type::i32(tokens), "segments and slots are i32[b, t]")
}

/// The integers of a sequence among those of operand `k`.
pub(super) fn marks<'a>(e: &Evaluation<'a>, k: usize, sequence: usize, tokens: usize) -> &'a [i32] {
    &e.ints(k)[sequence * tokens..][..tokens]
}

/// Segments of a few documents, and now and then a token that takes no part.
pub(super) fn random_segments(case: &mut Case, b: Dim, t: Dim) -> Value {
    let mut segment = 0;
    case.ints_from("segments", &[b, t], |rng| {
        segment += i32::from(rng.once_in(3));
        if rng.once_in(5) { -1 } else { segment }
    })
}

/// Slots of tokens, now and then of one that takes no part.
pub(super) fn random_slots(case: &mut Case, b: Dim, t: Dim) -> Value {
    case.ints_from("slots", &[b, t], |rng| rng.below(6) as i32 - 1)
}

impl Payload for Conv {
    fn blanks() -> Vec<Self> {
        let of = |tokens| Conv { reverse: false, tokens };
        Tokens::ALL.map(of).into_iter().chain([Conv { reverse: true, tokens: Tokens::Segments }]).collect()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.flag("reverse", &mut self.reverse)?;
        self.tokens.attribute(a)
    }
}

impl Operation for Conv {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "conv",
            operands: match self.tokens {
                Tokens::All => &[X, W],
                Tokens::Segments => &[X, W, SEGMENTS],
                Tokens::Kept => &[X, W, "history[b, n, ..]", SLOTS],
            },
            results: match self.tokens {
                Tokens::All | Tokens::Segments => &["y[b, t, ..]"],
                Tokens::Kept => &["y[b, t, ..]", "history[b, n, ..]"],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: match self.tokens {
                Tokens::Kept => Derivative::Missing("here: nothing is trained through a state of decoding"),
                Tokens::All | Tokens::Segments => Derivative::Rule(self),
            },
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let (v, w) = (&x[0], &x[1]);
        let fits = v.dims.len() >= 2 && !w.dims.is_empty() && v.dims[2..] == w.dims[1..];
        x.check(fits, "takes x[b, t, ..] and w[m, ..], the channels in the same order")?;
        x.check(v.dtype == DType::F32 && w.dtype == DType::F32, "x and w are f32")?;
        let (y, marks) = (v.clone(), 2 + usize::from(self.tokens == Tokens::Kept));
        self.tokens.check(x, marks, &v.dims[..2], self.reverse)?;
        match self.tokens {
            Tokens::All | Tokens::Segments => Ok(vec![y]),
            Tokens::Kept => {
                let history = &x[2];
                let fits = history.dims.len() == v.dims.len()
                    && history.dtype == DType::F32
                    && history.dims[0] == v.dims[0]
                    && history.dims[2..] == v.dims[2..]
                    && x.size(history.dims[1]).checked_add(1) == Some(x.size(w.dims[0]));
                x.check(fits, "history is f32[b, n, ..] with one row fewer than the filters have")?;
                Ok(vec![y, history.clone()])
            }
        }
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, w, tokens) = (e.floats(0), e.floats(1), e.sizes(0)[1]);
        let (width, channels) = (e.sizes(1)[0], e.sizes(1)[1..].iter().product::<usize>());
        let mut y = vec![0.0; x.len()];
        if self.tokens == Tokens::Kept {
            return Ok(continued(e, width, channels));
        }
        for b in 0..e.sizes(0)[0] {
            let segments = (self.tokens == Tokens::Segments).then(|| marks(e, 2, b, tokens));
            let sequence = Sequence::of_segments(segments);
            for i in (0..tokens).filter(|&i| sequence.takes_part(i)) {
                let mut at = Some(i);
                for k in 0..width {
                    let Some(j) = at else { break };
                    for c in 0..channels {
                        y[(b * tokens + i) * channels + c] +=
                            w[k * channels + c] * x[(b * tokens + j) * channels + c];
                    }
                    at = sequence.next(j, tokens, self.reverse);
                }
            }
        }
        Ok(vec![Data::Float(y)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let channels: Dims = ["h", "d"][..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect();
        let width = match self.tokens {
            Tokens::Kept => 2 + case.rng.below(3),
            Tokens::All | Tokens::Segments => 1 + case.rng.below(5),
        };
        let m = case.sized("m", width);
        let x = case.floats("x", &[&[b, t], &channels[..]].concat());
        let w = case.floats("w", &[&[m], &channels[..]].concat());
        let mut inputs = vec![x, w];
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => inputs.push(random_segments(&mut case, b, t)),
            Tokens::Kept => {
                let n = case.sized("n", width - 1);
                inputs.push(case.state("history", &[&[b, n], &channels[..]].concat()));
                inputs.push(random_slots(&mut case, b, t));
            }
        }
        case.finish(*self, &inputs)
    }
}

/// The convolution of a history and the tokens that follow it.
fn continued(e: &Evaluation, width: usize, channels: usize) -> Vec<Data> {
    let (x, w, tokens) = (e.floats(0), e.floats(1), e.sizes(0)[1]);
    let mut y = vec![0.0; x.len()];
    let mut history = e.floats(2).to_vec();
    for b in 0..e.sizes(0)[0] {
        let slots = marks(e, 3, b, tokens);
        let history = &mut history[b * (width - 1) * channels..][..(width - 1) * channels];
        for i in (0..tokens).filter(|&i| slots[i] >= 0) {
            let own = (b * tokens + i) * channels..(b * tokens + i + 1) * channels;
            let rows = [&*history, &x[own.clone()]].concat();
            for k in 0..width {
                for c in 0..channels {
                    y[own.start + c] += w[k * channels + c] * rows[(width - 1 - k) * channels + c];
                }
            }
            history.copy_from_slice(&rows[channels..]);
        }
    }
    vec![Data::Float(y), Data::Float(history)]
}

impl Counted for Conv {
    /// A product and a sum for each entry of a filter.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        s.whole(s.operand(0) * s.size(1, 0) * 2)
    }
}

impl Reverse for Conv {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x, width) = (at.d()?, at.operands(), at.ty(1).dims[0]);
        let segments = &x[2..];
        if at.is_active(0) {
            let turned = Conv { reverse: !self.reverse, ..*self };
            let dx = at.builder().op(turned, &[&[d, x[1]], segments].concat());
            at.add(0, dx);
        }
        if at.is_active(1) {
            let grad = ConvGrad { width, segments: self.tokens == Tokens::Segments };
            // The cotangent sums over earlier tokens what the result sums over later ones.
            let pair = if self.reverse { [d, x[0]] } else { [x[0], d] };
            let dw = at.builder().op(grad, &[&pair, segments].concat());
            at.add(1, dw);
        }
        Ok(())
    }
}

impl Payload for ConvGrad {
    fn blanks() -> Vec<Self> {
        [false, true].map(|segments| ConvGrad { segments, ..ConvGrad::default() }).into()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("width")?;
        a.dim(&mut self.width)?;
        a.flag("segments", &mut self.segments)
    }
}

impl Operation for ConvGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "conv_grad",
            operands: if self.segments { &[X, "dy[b, t, ..]", SEGMENTS] } else { &[X, "dy[b, t, ..]"] },
            results: &["dw[m, ..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let fits = x[0].dims.len() >= 2 && x[0] == x[1] && x[0].dtype == DType::F32;
        x.check(fits, "takes f32 x[b, t, ..], and dy of its type")?;
        if self.segments {
            check_marks(x, 2, &x[0].dims[..2])?;
        }
        Ok(vec![Type::f32(&[&[self.width], &x[0].dims[2..]].concat())])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, dy, tokens) = (e.floats(0), e.floats(1), e.sizes(0)[1]);
        let (width, channels) = (e.size(self.width), e.sizes(0)[2..].iter().product::<usize>());
        let mut dw = vec![0.0; width * channels];
        for b in 0..e.sizes(0)[0] {
            let sequence = Sequence::of_segments(self.segments.then(|| marks(e, 2, b, tokens)));
            for i in (0..tokens).filter(|&i| sequence.takes_part(i)) {
                let mut at = Some(i);
                for k in 0..width {
                    let Some(j) = at else { break };
                    for c in 0..channels {
                        dw[k * channels + c] +=
                            dy[(b * tokens + i) * channels + c] * x[(b * tokens + j) * channels + c];
                    }
                    at = sequence.before(j);
                }
            }
        }
        Ok(vec![Data::Float(dw)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t, m) = (case.dim("b"), case.dim("t"), case.dim("m"));
        let channels: Dims = ["h", "d"][..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect();
        let dims = [&[b, t], &channels[..]].concat();
        let mut inputs = vec![case.floats("x", &dims), case.floats("dy", &dims)];
        if self.segments {
            inputs.push(random_segments(&mut case, b, t));
        }
        case.finish(ConvGrad { width: m, segments: self.segments }, &inputs)
    }
}

impl Counted for ConvGrad {
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        s.whole(s.operand(0) * s.module.size(self.width) * 2)
    }
}
