//! Linear attention: recurrences whose step is linear in a matrix of state.

mod chunks;
pub(crate) mod cuda;
pub mod kernel;
pub mod outside;
mod recognise;

pub use recognise::{Found, Obstacle, Term, recognise};

use super::conv::{SEGMENTS, SLOTS, marks, random_segments, random_slots};
use super::*;
use crate::ir::Module;
use std::ops::Range;

/// `(q[b, t, .., d], k[b, t, .., d], v[b, t, .., e], u[b, t, .., d]?, w[b, t, .., d]?,
/// decay[b, t, ..]?, segments i32[b, t]?) -> o[b, t, heads.., e]`, in this order: for each head a
/// state `S[e, d]` in f32, zero before the first token of a [`Sequence`], and at each token
///
/// `S_t = S_{t-1} (diag(exp(decay_t)) + u_t w_tᵀ) + v_t k_tᵀ`, `o_t = S_t q_t`, or `S_{t-1} q_t`.
///
/// `u` is there with a delta. Of [`Delta::Key`] `w` is `k`, of [`Delta::Pair`] it is an operand:
/// the delta rule that takes `β (S k)` from `β v` is `k: β k`, `u: -exp(decay) k`. Logarithms of
/// decays are f32, at most 0, and may be -inf, for a head and token or for a channel (`d` last).
///
/// Heads are the dimensions of the state but its last two. Operands have those of them that they
/// have, in the state's order, and are the same for all heads along one that they lack. `q`, `k`,
/// `v`, `u`, `w` and `o` are all f32 or all bf16.
///
/// With a state: `(q, k, v, u?, w?, decay?, state[b, n], slots i32[b, t]) -> o, state`. The state
/// of a text is the number of its tokens so far and then `S`, as that of [`Recurrence`] is; where
/// that number is zero the text begins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinearAttention(pub Form);

/// `(q, k, v, u?, w?, do[b, t, heads.., e], decay?, segments?) -> dq, dk, dv, du?, dw?, ddecay?`,
/// of the types of the operands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinearAttentionGrad(pub Form);

/// Which recurrence it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Form {
    /// Dimensions of the state: heads, then `e` and `d` in any order.
    pub state: Dims,
    /// The dimension `d` of keys.
    pub size: Dim,
    /// Decay of the state.
    pub decay: Decay,
    /// The product that the state is multiplied by.
    pub delta: Delta,
    /// Whether the output reads the state before the token.
    pub before: bool,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
}

/// Decay of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Decay {
    /// None.
    #[default]
    None,
    /// One of a head.
    Head,
    /// One of each channel of keys.
    Channel,
}

/// Whether there is a product `u wᵀ`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Delta {
    /// None.
    #[default]
    None,
    /// `w` is `k`.
    Key,
    /// `w` is an operand.
    Pair,
}

impl Decay {
    /// All of them.
    pub const ALL: [Decay; 3] = [Decay::None, Decay::Head, Decay::Channel];
}

impl Delta {
    /// All of them.
    pub const ALL: [Delta; 3] = [Delta::None, Delta::Key, Delta::Pair];

    /// Operands that it has.
    pub fn operands(self) -> usize {
        match self {
            Delta::None => 0,
            Delta::Key => 1,
            Delta::Pair => 2,
        }
    }
}

/// Where the numbers of a head are in the rows of an operand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Part {
    /// Numbers of a row.
    pub row: u64,
    /// Numbers of a head.
    pub width: u64,
    /// From head to head, for each dimension of heads; 0 where it is the same.
    pub strides: Vec<u64>,
}

impl Part {
    /// The first number of a head, whose dimensions have these sizes.
    pub fn first(&self, heads: &[u64], head: usize) -> usize {
        let (mut rest, mut first) = (head as u64, 0);
        for (size, stride) in heads.iter().zip(&self.strides).rev() {
            first += rest % size * stride;
            rest /= size;
        }
        first as usize
    }

    fn range(&self, heads: &[u64], token: usize, head: usize) -> Range<usize> {
        let first = token * self.row as usize + self.first(heads, head);
        first..first + self.width as usize
    }
}

impl Form {
    /// The number of its operands that are floats and no state.
    fn floats(&self) -> usize {
        3 + self.delta.operands() + usize::from(self.decay != Decay::None)
    }

    /// Dimensions of heads.
    pub fn heads(&self) -> &[Dim] {
        &self.state[..self.state.len().saturating_sub(2)]
    }

    /// The dimension `e` of values.
    pub fn value(&self) -> Option<Dim> {
        let last = &self.state[self.state.len().saturating_sub(2)..];
        last.iter().copied().find(|d| *d != self.size)
    }

    /// Whether keys are the first of the last two dimensions of the state.
    pub fn size_first(&self) -> bool {
        self.state.len() >= 2 && self.state[self.state.len() - 2] == self.size
    }

    /// Products of `d` and `e` for each token and head, and element-wise operations. Backward,
    /// states are made again.
    fn amounts(&self, gradient: bool) -> (u64, u64) {
        let (delta, decay) = (self.delta.operands() as u64, u64::from(self.decay != Decay::None));
        match gradient {
            false => (2 + delta, decay),
            true => (5 + 3 * delta, 4 * decay),
        }
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.dims(&mut self.state)?;
        a.word("over")?;
        a.dim(&mut self.size)?;
        let mut decay = Decay::ALL.iter().position(|d| *d == self.decay).unwrap_or_default();
        a.word("decay")?;
        a.choice(&["none", "head", "channel"], &mut decay)?;
        self.decay = Decay::ALL[decay];
        let mut delta = Delta::ALL.iter().position(|d| *d == self.delta).unwrap_or_default();
        a.word("delta")?;
        a.choice(&["none", "key", "pair"], &mut delta)?;
        self.delta = Delta::ALL[delta];
        a.flag("before", &mut self.before)?;
        self.tokens.attribute(a)
    }

    /// That the dimensions of an operand from the third on are heads and then `last`.
    fn check_part(&self, x: &Operands, k: usize, last: Option<Dim>, dtype: DType) -> Result<(), TypeError> {
        let ty = &x[k];
        let own = match last {
            None => ty.dims.get(2..),
            Some(last) => ty.dims.get(2..).and_then(|d| d.strip_suffix(&[last])),
        };
        let fits = ty.dtype == dtype
            && ty.dims.get(..2) == x[0].dims.get(..2)
            && own.is_some_and(|own| is_subsequence(own, self.heads()));
        x.check(
            fits,
            "takes q, k, v, u, w of one type of floats, each [b, t, heads.., d] or of values [b, t, heads.., e], and a decay f32[b, t, heads..] or f32[b, t, heads.., d]",
        )
    }

    /// That operands fit; `middle` stand between `u`, `w` and the decay.
    fn check(&self, x: &Operands, middle: usize) -> Result<(), TypeError> {
        let Some(value) = self.value().filter(|_| self.state.len() >= 2) else {
            return x.fail("the state has at least two dimensions, of which the last are of values and keys");
        };
        let keys = self.state[self.state.len() - 2..].contains(&self.size) && value != self.size;
        x.check(
            keys && repeated(&self.state).is_none(),
            "the last two dimensions of the state are of values and keys",
        )?;
        x.check(x[0].dims.len() >= 3 && x[0].dtype.is_float(), "takes q[b, t, heads.., d]")?;
        let (dtype, size) = (x[0].dtype, Some(self.size));
        for k in [0, 1].into_iter().chain(3..3 + self.delta.operands()) {
            self.check_part(x, k, size, dtype)?;
        }
        self.check_part(x, 2, Some(value), dtype)?;
        let decay = 3 + self.delta.operands() + middle;
        match self.decay {
            Decay::None => Ok(()),
            Decay::Head => self.check_part(x, decay, None, DType::F32),
            Decay::Channel => self.check_part(x, decay, size, DType::F32),
        }
    }

    /// The type of the output.
    fn output(&self, x: &Type) -> Type {
        let value = self.value().into_iter().collect::<Dims>();
        Type { dtype: x.dtype, dims: [&x.dims[..2], self.heads(), &value].concat().into() }
    }

    /// Where an operand's heads are in its rows.
    fn part(&self, module: &Module, ty: &Type) -> Part {
        let row = &ty.dims[2..];
        let own = |d: &&Dim| !self.heads().contains(d);
        let width: Dims = row.iter().filter(own).copied().collect();
        let strides = strides(module, row, self.heads()).iter().map(|&n| n as u64).collect();
        Part { row: module.elements(row), width: module.elements(&width), strides }
    }

    /// A form of some sizes and its operands, with the cotangent of the output where it is wanted.
    fn random(&self, case: &mut Case, gradient: bool) -> (Form, Vec<Value>) {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let heads: Dims = ["g", "h"][..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect();
        let (e, d) = (case.dim("e"), case.dim("d"));
        let last = if case.rng.once_in(3) { [d, e] } else { [e, d] };
        let form = Form {
            state: [&heads[..], &last].concat().into(),
            size: d,
            before: case.rng.once_in(3),
            ..self.clone()
        };
        let mut part = |name: &str, last: Option<Dim>, low: f64, high: f64| {
            let every = name == "do";
            let own: Dims = heads.iter().copied().filter(|_| every || !case.rng.once_in(4)).collect();
            let dims: Dims = [b, t].into_iter().chain(own).chain(last).collect();
            case.floats_from(name, &dims, |rng| rng.between(low, high))
        };
        let mut inputs =
            vec![part("q", Some(d), -1.0, 1.0), part("k", Some(d), -1.0, 1.0), part("v", Some(e), -1.5, 1.5)];
        for name in ["u", "w"].into_iter().take(self.delta.operands()) {
            inputs.push(part(name, Some(d), -0.7, 0.7));
        }
        inputs.extend(gradient.then(|| part("do", Some(e), -1.5, 1.5)));
        match self.decay {
            Decay::None => {}
            Decay::Head => inputs.push(part("decay", None, -1.5, 0.0)),
            Decay::Channel => inputs.push(part("decay", Some(d), -1.5, 0.0)),
        }
        (form, inputs)
    }

    fn blanks(kept: bool) -> Vec<Form> {
        let mut all = vec![];
        for delta in Delta::ALL {
            for decay in Decay::ALL {
                for tokens in Tokens::ALL.into_iter().filter(|t| kept || *t != Tokens::Kept) {
                    all.push(Form { decay, delta, tokens, ..Form::default() });
                }
            }
        }
        all
    }
}

const Q: &str = "q[b, t, .., d]";
const K: &str = "k[b, t, .., d]";
const V: &str = "v[b, t, .., e]";
const U: &str = "u[b, t, .., d]";
const W: &str = "w[b, t, .., d]";
const DO: &str = "do[b, t, .., e]";
const DECAY: &str = "decay[b, t, ..]";
const STATE: &str = "state[b, n]";

/// The operands of a form, with further ones after `u` and `w` and at the end.
macro_rules! operands {
    ($form:expr, [$($middle:ident)?], [$($last:ident),*]) => {
        match ($form.delta, $form.decay != Decay::None) {
            (Delta::None, false) => &[Q, K, V $(, $middle)? $(, $last)*],
            (Delta::None, true) => &[Q, K, V $(, $middle)?, DECAY $(, $last)*],
            (Delta::Key, false) => &[Q, K, V, U $(, $middle)? $(, $last)*],
            (Delta::Key, true) => &[Q, K, V, U $(, $middle)?, DECAY $(, $last)*],
            (Delta::Pair, false) => &[Q, K, V, U, W $(, $middle)? $(, $last)*],
            (Delta::Pair, true) => &[Q, K, V, U, W $(, $middle)?, DECAY $(, $last)*],
        }
    };
}

/// The operands of a form at work, in f64.
struct Heads<'e> {
    form: &'e Form,
    sizes: Vec<u64>,
    size: usize,
    value: usize,
    tokens: usize,
    batch: usize,
    /// `q`, `k`, `v`, `u`, `w`.
    data: Vec<(&'e [f64], Part)>,
    decay: Option<(&'e [f64], Part)>,
}

/// The operands of a head at a token.
struct At<'e> {
    q: &'e [f64],
    k: &'e [f64],
    v: &'e [f64],
    u: Option<&'e [f64]>,
    w: Option<&'e [f64]>,
    /// Factors of channels.
    decay: Vec<f64>,
}

impl<'e> Heads<'e> {
    fn new(form: &'e Form, e: &Evaluation<'e>, middle: usize) -> Self {
        let module = e.module;
        let of = |k: usize| (e.floats(k), form.part(module, e.types[k]));
        let decay = 3 + form.delta.operands() + middle;
        Heads {
            form,
            sizes: form.heads().iter().map(|&d| module.size(d)).collect(),
            size: e.size(form.size),
            value: form.value().map_or(1, |d| e.size(d)),
            batch: e.sizes(0)[0],
            tokens: e.sizes(0)[1],
            data: (0..3 + form.delta.operands()).map(of).collect(),
            decay: (form.decay != Decay::None).then(|| of(decay)),
        }
    }

    fn heads(&self) -> usize {
        self.sizes.iter().product::<u64>() as usize
    }

    /// Where the numbers of operand `k` are.
    fn range(&self, k: usize, token: usize, head: usize) -> Range<usize> {
        self.data[k].1.range(&self.sizes, token, head)
    }

    fn decay_range(&self, token: usize, head: usize) -> Range<usize> {
        self.decay.as_ref().map_or(0..0, |(_, part)| part.range(&self.sizes, token, head))
    }

    fn at(&self, token: usize, head: usize) -> At<'e> {
        let of = |k: usize| self.data.get(k).map(|(data, _)| &data[self.range(k, token, head)]);
        let row = |k: usize| of(k).unwrap_or_default();
        let decay = match &self.decay {
            None => vec![1.0; self.size],
            Some((data, _)) => {
                let logs = &data[self.decay_range(token, head)];
                (0..self.size).map(|c| logs[if logs.len() == 1 { 0 } else { c }].exp()).collect()
            }
        };
        let w = of(4).or(of(3).map(|_| row(1)));
        At { q: row(0), k: row(1), v: row(2), u: of(3), w, decay }
    }

    /// The next state, and `S u`.
    fn step(&self, e: &mut Evaluation, at: &At, s: &mut [f64]) -> Vec<f64> {
        let mut products = vec![0.0; self.value];
        for (i, s) in s.chunks_mut(self.size).enumerate() {
            if let Some(u) = at.u {
                products[i] = e.dot(s, u);
            }
            s.iter_mut().zip(&at.decay).for_each(|(s, a)| *s *= a);
            match (self.form.delta, at.w) {
                (Delta::Pair, Some(w)) => {
                    e.add_scaled(s, at.v[i], at.k);
                    e.add_scaled(s, products[i], w);
                }
                _ => e.add_scaled(s, at.v[i] + products[i], at.k),
            }
        }
        products
    }

    /// `S q`.
    fn read(&self, e: &mut Evaluation, q: &[f64], s: &[f64]) -> Vec<f64> {
        s.chunks(self.size).map(|s| e.dot(s, q)).collect()
    }

    /// The multiply-adds of a token that takes no part: devices compute with it.
    fn pass(&self, e: &mut Evaluation, gradient: bool) {
        e.multiply_adds += self.form.amounts(gradient).0 * (self.size * self.value) as u64;
    }
}

impl Payload for LinearAttention {
    fn blanks() -> Vec<Self> {
        Form::blanks(true).into_iter().map(LinearAttention).collect()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.0.attributes(a)
    }
}

impl Operation for LinearAttention {
    fn signature(&self) -> Signature<'_> {
        let form = &self.0;
        Signature {
            name: "linear_attention",
            operands: match form.tokens {
                Tokens::All => operands!(form, [], []),
                Tokens::Segments => operands!(form, [], [SEGMENTS]),
                Tokens::Kept => operands!(form, [], [STATE, SLOTS]),
            },
            results: match form.tokens {
                Tokens::All | Tokens::Segments => &["o[b, t, .., e]"],
                Tokens::Kept => &["o[b, t, .., e]", STATE],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: match form.delta {
                Delta::None => Bf16::Reads(&[0, 1, 2]),
                Delta::Key => Bf16::Reads(&[0, 1, 2, 3]),
                Delta::Pair => Bf16::Reads(&[0, 1, 2, 3, 4]),
            },
            work: Work::Counted(self),
            derivative: match form.tokens {
                Tokens::Kept => Derivative::Missing("here: nothing is trained through a state of decoding"),
                Tokens::All | Tokens::Segments => Derivative::Rule(self),
            },
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let form = &self.0;
        form.check(x, 0)?;
        let (o, at) = (form.output(&x[0]), form.floats());
        let marks = Type::i32(&x[0].dims[..2]);
        match form.tokens {
            Tokens::All => Ok(vec![o]),
            Tokens::Segments => {
                x.check(x[at] == marks, "segments and slots are i32[b, t]")?;
                Ok(vec![o])
            }
            Tokens::Kept => {
                let state = &x[at];
                let fits = state.dtype == DType::F32
                    && state.dims.len() == 2
                    && state.dims[0] == x[0].dims[0]
                    && x.size(state.dims[1]) == x.elements(&form.state).saturating_add(1);
                x.check(fits, "the state is f32[b, n], n one more than the elements of the state")?;
                x.check(x[at + 1] == marks, "segments and slots are i32[b, t]")?;
                Ok(vec![o, state.clone()])
            }
        }
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let form = &self.0;
        let heads = Heads::new(form, e, 0);
        let (at, each) = (form.floats(), heads.size * heads.value);
        let kept_each = heads.heads() * each + 1;
        let mut out = vec![0.0; heads.batch * heads.tokens * heads.heads() * heads.value];
        let mut kept = if form.tokens == Tokens::Kept { e.floats(at).to_vec() } else { vec![] };
        for b in 0..heads.batch {
            let sequence = match form.tokens {
                Tokens::All => Sequence::default(),
                Tokens::Segments => Sequence::of_segments(Some(marks(e, at, b, heads.tokens))),
                Tokens::Kept => Sequence::of_slots(marks(e, at + 1, b, heads.tokens)),
            };
            let taking = (0..heads.tokens).filter(|&i| sequence.takes_part(i)).count();
            for h in 0..heads.heads() {
                // A row of the state to and from its place.
                let place = |i: usize, c: usize| {
                    let within = if form.size_first() { c * heads.value + i } else { i * heads.size + c };
                    b * kept_each + 1 + h * each + within
                };
                let mut s = vec![0.0; each];
                if kept.get(b * kept_each).is_some_and(|count| *count > 0.0) {
                    s = (0..each).map(|n| kept[place(n / heads.size, n % heads.size)]).collect();
                }
                let mut last = None;
                for i in 0..heads.tokens {
                    if !sequence.takes_part(i) {
                        heads.pass(e, false);
                        continue;
                    }
                    if last.is_some_and(|last| !sequence.continues(last, i)) {
                        s.fill(0.0);
                    }
                    last = Some(i);
                    let token = heads.at(b * heads.tokens + i, h);
                    let first = ((b * heads.tokens + i) * heads.heads() + h) * heads.value;
                    let mut o = vec![];
                    if form.before {
                        o = heads.read(e, token.q, &s);
                    }
                    heads.step(e, &token, &mut s);
                    if !form.before {
                        o = heads.read(e, token.q, &s);
                    }
                    out[first..first + heads.value].copy_from_slice(&o);
                }
                if form.tokens == Tokens::Kept && taking > 0 {
                    (0..each).for_each(|n| kept[place(n / heads.size, n % heads.size)] = s[n]);
                }
            }
            if let Some(count) = kept.get_mut(b * kept_each) {
                *count += taking as f64;
            }
        }
        let kept = (form.tokens == Tokens::Kept).then_some(Data::Float(kept));
        Ok([Data::Float(out)].into_iter().chain(kept).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (form, mut inputs) = self.0.random(&mut case, false);
        let dims = case.function.ty(inputs[0]).dims.clone();
        let (b, t) = (dims[0], dims[1]);
        match form.tokens {
            Tokens::All => {}
            Tokens::Segments => inputs.push(random_segments(&mut case, b, t)),
            Tokens::Kept => {
                let elements = case.module.elements(&form.state) + 1;
                let n = case.sized("n", elements);
                let (mut at, begins) = (0, case.rng.once_in(2));
                let state = case.floats_from("state", &[b, n], |rng| {
                    at += 1;
                    match ((at - 1) % elements == 0, begins) {
                        (true, true) => 0.0,
                        (true, false) => 3.0,
                        (false, _) => rng.between(-1.5, 1.5),
                    }
                });
                case.function.params[state.index()].binding = Binding::State(Lifetime::Depth);
                inputs.push(state);
                inputs.push(random_slots(&mut case, b, t));
            }
        }
        case.finish(LinearAttention(form), &inputs)
    }
}

impl Form {
    fn cost(&self, s: &Shapes, gradient: bool) -> Counts {
        let tokens = Count::from(s.size(0, 0)) * s.size(0, 1);
        let entries = self.state.iter().fold(tokens, |n, &d| n * s.module.size(d));
        let (products, elementwise) = self.amounts(gradient);
        let repeated = if gradient { entries * (self.amounts(false).0 - 1) } else { Count::ZERO };
        Counts { multiply_adds: entries * products, repeated, ..s.whole(entries * elementwise) }
    }
}

impl Counted for LinearAttention {
    /// The step at each token: what enters the state, what a delta reads, and the output.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        self.0.cost(s, false)
    }
}

impl Reverse for LinearAttention {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, mut operands) = (at.d()?, at.operands());
        let middle = 3 + self.0.delta.operands();
        operands.insert(middle, d);
        let found = at.builder().ops(LinearAttentionGrad(self.0.clone()), &operands);
        for (k, d) in found.into_iter().enumerate() {
            at.add(k, d);
        }
        Ok(())
    }
}

impl Payload for LinearAttentionGrad {
    fn blanks() -> Vec<Self> {
        Form::blanks(false).into_iter().map(LinearAttentionGrad).collect()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.0.attributes(a)
    }
}

impl Operation for LinearAttentionGrad {
    fn signature(&self) -> Signature<'_> {
        let form = &self.0;
        Signature {
            name: "linear_attention_grad",
            operands: match form.tokens {
                Tokens::All | Tokens::Kept => operands!(form, [DO], []),
                Tokens::Segments => operands!(form, [DO], [SEGMENTS]),
            },
            results: match (form.delta, form.decay != Decay::None) {
                (Delta::None, false) => &["dq", "dk", "dv"],
                (Delta::None, true) => &["dq", "dk", "dv", "ddecay"],
                (Delta::Key, false) => &["dq", "dk", "dv", "du"],
                (Delta::Key, true) => &["dq", "dk", "dv", "du", "ddecay"],
                (Delta::Pair, false) => &["dq", "dk", "dv", "du", "dw"],
                (Delta::Pair, true) => &["dq", "dk", "dv", "du", "dw", "ddecay"],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: match form.delta {
                Delta::None => Bf16::Reads(&[0, 1, 2, 3]),
                Delta::Key => Bf16::Reads(&[0, 1, 2, 3, 4]),
                Delta::Pair => Bf16::Reads(&[0, 1, 2, 3, 4, 5]),
            },
            work: Work::Counted(self),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let form = &self.0;
        form.check(x, 1)?;
        x.check(form.tokens != Tokens::Kept, "nothing is trained through a state of decoding")?;
        let d = 3 + form.delta.operands();
        x.check(x[d] == form.output(&x[0]), "do is [b, t, heads.., e] with all heads")?;
        if form.tokens == Tokens::Segments {
            let marks = Type::i32(&x[0].dims[..2]);
            x.check(x[form.floats() + 1] == marks, "segments and slots are i32[b, t]")?;
        }
        Ok((0..=form.floats()).filter(|k| *k != d).map(|k| x[k].clone()).collect())
    }

    /// States of all tokens are kept, and the adjoint of the step runs on them from the last.
    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let form = &self.0;
        let heads = Heads::new(form, e, 1);
        let (d, at) = (3 + form.delta.operands(), form.floats() + 1);
        let wanted = (0..at).filter(|k| *k != d);
        let mut found: Vec<Vec<f64>> = wanted.map(|k| vec![0.0; e.floats(k).len()]).collect();
        for b in 0..heads.batch {
            let segments = (form.tokens == Tokens::Segments).then(|| marks(e, at, b, heads.tokens));
            let sequence = Sequence::of_segments(segments);
            for h in 0..heads.heads() {
                heads.back(e, &sequence, [b, h], e.floats(d), &mut found);
            }
        }
        Ok(found.into_iter().map(Data::Float).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (form, mut inputs) = self.0.random(&mut case, true);
        if form.tokens == Tokens::Segments {
            let dims = case.function.ty(inputs[0]).dims.clone();
            inputs.push(random_segments(&mut case, dims[0], dims[1]));
        }
        case.finish(LinearAttentionGrad(form), &inputs)
    }
}

impl Counted for LinearAttentionGrad {
    /// The step at each token again, and its adjoint.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        self.0.cost(s, true)
    }
}

impl Heads<'_> {
    /// Adds the cotangents of what a head of a sequence reads.
    fn back(
        &self,
        e: &mut Evaluation,
        sequence: &Sequence,
        [b, h]: [usize; 2],
        d: &[f64],
        found: &mut [Vec<f64>],
    ) {
        let taking: Vec<usize> = (0..self.tokens).filter(|&i| sequence.takes_part(i)).collect();
        (taking.len()..self.tokens).for_each(|_| self.pass(e, true));
        let begins = |n: usize| n == 0 || !sequence.continues(taking[n - 1], taking[n]);
        let (mut s, mut held) = (vec![0.0; self.size * self.value], vec![]);
        for (n, &i) in taking.iter().enumerate() {
            if begins(n) {
                s.fill(0.0);
            }
            let before = s.clone();
            let products = self.step(e, &self.at(b * self.tokens + i, h), &mut s);
            held.push((before, products, s.clone()));
        }
        let mut ds = vec![0.0; s.len()];
        for (n, &i) in taking.iter().enumerate().rev() {
            let token = b * self.tokens + i;
            let first = (token * self.heads() + h) * self.value;
            self.step_back(e, [token, h], &held[n], &d[first..first + self.value], &mut ds, found);
            if begins(n) {
                ds.fill(0.0);
            }
        }
    }

    /// The adjoint of a step and of what is read of it; `ds` becomes the cotangent of the state
    /// before.
    fn step_back(
        &self,
        e: &mut Evaluation,
        [token, h]: [usize; 2],
        (before, products, after): &(Vec<f64>, Vec<f64>, Vec<f64>),
        d: &[f64],
        ds: &mut [f64],
        found: &mut [Vec<f64>],
    ) {
        let (at, size, form) = (self.at(token, h), self.size, self.form);
        let place = |k: usize| self.range(k, token, h);
        if !form.before {
            for (i, (s, ds)) in after.chunks(size).zip(ds.chunks_mut(size)).enumerate() {
                e.add_scaled(&mut found[0][place(0)], d[i], s);
                e.add_scaled(ds, d[i], at.q);
            }
        }
        let decays = self.decay_range(token, h);
        for (i, ds) in ds.chunks_mut(size).enumerate() {
            let s = &before[i * size..(i + 1) * size];
            let dv = e.dot(ds, at.k);
            found[2][place(2).start + i] += dv;
            let mut product = dv;
            match (form.delta, at.w) {
                (Delta::Pair, Some(w)) => {
                    e.add_scaled(&mut found[1][place(1)], at.v[i], ds);
                    e.add_scaled(&mut found[4][place(4)], products[i], ds);
                    product = e.dot(ds, w);
                }
                _ => e.add_scaled(&mut found[1][place(1)], at.v[i] + products[i], ds),
            }
            if let (false, Some(to)) = (decays.is_empty(), found.last_mut()) {
                for c in 0..size {
                    to[decays.start + if decays.len() == 1 { 0 } else { c }] += ds[c] * s[c] * at.decay[c];
                }
            }
            ds.iter_mut().zip(&at.decay).for_each(|(d, a)| *d *= a);
            if let Some(u) = at.u {
                e.add_scaled(&mut found[3][place(3)], product, s);
                e.add_scaled(ds, product, u);
            }
            if form.before {
                e.add_scaled(&mut found[0][place(0)], d[i], s);
                e.add_scaled(ds, d[i], at.q);
            }
        }
    }
}
