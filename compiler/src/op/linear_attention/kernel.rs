//! Linear attention: a state of each head, which all its tokens pass by.

use super::{Decay, Delta, Form, Part};
use crate::CompileError;
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Tokens;
use crate::op::kernel::{
    Amount, KernelKind, Of, Slot, Work, input, ints, need, result, times, updated, wide,
};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};

/// Sizes of a linear attention.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Sizes of the dimensions of heads.
    pub heads: Vec<u64>,
    /// Size `d` of keys.
    pub size: u64,
    /// Size `e` of values.
    pub value: u64,
    /// Heads of `q`, `k`, `v`, `u` and `w` in their rows.
    pub parts: Vec<Part>,
    /// Heads of the decay in its rows.
    pub decay: Option<Part>,
}

/// `S_t = S_{t-1} (diag(exp(decay_t)) + u_t w_tᵀ) + v_t k_tᵀ`, `o_t = S_t q_t` or `S_{t-1} q_t`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinearAttention {
    /// Sizes.
    pub shape: LinearShape,
    /// Whether `w` is `k`, or an operand, or there is neither `u` nor `w`.
    pub delta: Delta,
    /// Whether the output reads the state before the token.
    pub before: bool,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
    /// Whether keys are the first dimension of a text's state.
    pub size_first: bool,
}

/// The gradient of [`LinearAttention`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinearAttentionGrad {
    /// Sizes.
    pub shape: LinearShape,
    /// Whether `w` is `k`, or an operand, or there is neither `u` nor `w`.
    pub delta: Delta,
    /// Whether the output read the state before the token.
    pub before: bool,
    /// Whether there are segments.
    pub segments: bool,
}

const NAMES: [&str; 5] = ["q", "k", "v", "u", "w"];
const GRADIENTS: [&str; 5] = ["dq", "dk", "dv", "du", "dw"];

impl LinearShape {
    /// All heads.
    pub fn head_count(&self) -> u64 {
        times(&self.heads)
    }

    /// Numbers of a head's state.
    pub fn state(&self) -> u64 {
        times(&[self.size, self.value])
    }

    /// Decays of a token and head.
    pub fn decays(&self) -> u64 {
        self.decay.as_ref().map_or(0, |part| part.width)
    }

    /// The kind of decay.
    pub fn decay_kind(&self) -> Decay {
        match self.decays() {
            0 => Decay::None,
            n if n == self.size && n > 1 => Decay::Channel,
            _ => Decay::Head,
        }
    }

    /// Whether several heads read the same numbers of an operand.
    pub fn is_shared(&self, part: &Part) -> bool {
        self.heads.iter().zip(&part.strides).any(|(size, stride)| *size > 1 && *stride == 0)
    }

    fn row(&self, name: &'static str, part: &Part) -> Slot {
        input(name, &[self.batch, self.tokens, part.row]).rows(2)
    }

    fn output(&self, name: &'static str) -> Slot {
        let row = times(&[self.head_count(), self.value]);
        input(name, &[self.batch, self.tokens, row]).float(0)
    }

    fn floats(&self) -> impl Iterator<Item = Slot> {
        self.parts.iter().zip(NAMES).map(|(part, name)| self.row(name, part).float(0))
    }

    fn marks(&self, name: &'static str) -> Slot {
        ints(name, &[self.batch, self.tokens])
    }

    fn check(&self, delta: Delta) -> Result<(), String> {
        need(self.size > 0 && self.value > 0, "heads of size 0")?;
        need(self.parts.len() == 3 + delta.operands(), "as many operands as the delta has")?;
        let mut widths = self.parts.iter().enumerate();
        let fits = |(k, part): (usize, &Part)| part.width == if k == 2 { self.value } else { self.size };
        need(widths.all(fits), "operands of the sizes of keys and values")?;
        need([0, 1, self.size].contains(&self.decays()), "a decay of each head or of each channel")
    }

    fn summary(&self, delta: Delta) -> String {
        let kind = match (self.decay_kind(), delta) {
            (Decay::None, Delta::None) => "",
            (Decay::None, Delta::Key) => ", delta",
            (Decay::None, Delta::Pair) => ", pair",
            (Decay::Head, Delta::None) => ", decay",
            (Decay::Head, Delta::Key) => ", decay, delta",
            (Decay::Head, Delta::Pair) => ", decay, pair",
            (Decay::Channel, Delta::None) => ", decays",
            (Decay::Channel, Delta::Key) => ", decays, delta",
            (Decay::Channel, Delta::Pair) => ", decays, pair",
        };
        let heads = self.head_count();
        format!("{}×{}, {heads} heads of {}×{}{kind}", self.batch, self.tokens, self.value, self.size)
    }

    fn work(&self, delta: Delta, gradient: bool) -> Work {
        let decay = if self.decay.is_some() { Decay::Head } else { Decay::None };
        let (products, elementwise) = Form { delta, decay, ..Form::default() }.amounts(gradient);
        let entries = [self.batch, self.tokens, self.head_count(), self.size, self.value];
        let of = |n: u64| wide(&entries).saturating_mul(n.into());
        let fixed = Amount { multiply_adds: of(products), elementwise: of(elementwise) };
        Work { fixed, ..Work::default() }
    }
}

impl LinearAttention {
    /// Floats of a text's state: the number of its tokens, and the states of its heads.
    pub fn kept(&self) -> u64 {
        times(&[self.shape.head_count(), self.shape.state()]).saturating_add(1)
    }
}

impl KernelKind for LinearAttention {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list: Vec<Slot> = s.floats().collect();
        list.extend(s.decay.as_ref().map(|part| s.row("decay", part)));
        let state = list.len();
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => list.push(s.marks("segments")),
            Tokens::Kept => list.push(s.marks("slots").of(Of::Operand(state + 1))),
        }
        list.push(s.output("o").written());
        if self.tokens == Tokens::Kept {
            list.push(updated("state", &[s.batch, self.kept()]).state(state, 1));
        }
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check(self.delta)
    }

    fn summary(&self) -> String {
        format!("linear_attention {}", self.shape.summary(self.delta))
    }

    fn work(&self) -> Work {
        self.shape.work(self.delta, false)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        match super::chunks::forward(self, variant)? {
            Some(source) => Ok(Some(source)),
            None => super::cuda::forward(self, variant),
        }
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::forward(self, variant)
    }
}

impl LinearAttentionGrad {
    /// Operands in order: their names, those of their gradients, and where heads are in both.
    pub fn operands(&self) -> impl Iterator<Item = (&'static str, &'static str, &Part)> {
        let floats = self.shape.parts.iter().zip(NAMES).zip(GRADIENTS);
        let decay = self.shape.decay.as_ref().map(|part| ("decay", "ddecay", part));
        floats.map(|((part, name), gradient)| (name, gradient, part)).chain(decay)
    }

    /// Tokens from one whose states are kept to the next: about as many as are kept.
    pub fn stretch(&self) -> u64 {
        self.shape.tokens.isqrt().max(1)
    }
}

impl KernelKind for LinearAttentionGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list: Vec<Slot> = s.floats().collect();
        list.push(Slot { name: "do", ..s.output("do").rows(2) });
        list.extend(s.decay.as_ref().map(|part| s.row("decay", part)));
        list.extend(self.segments.then(|| s.marks("segments")));
        for (part, name) in s.parts.iter().zip(GRADIENTS) {
            list.push(result(name, &[s.batch, s.tokens, part.row]).float(0));
        }
        list.extend(s.decay.as_ref().map(|part| result("ddecay", &[s.batch, s.tokens, part.row])));
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check(self.delta)
    }

    fn summary(&self) -> String {
        format!("linear_attention_grad {}", self.shape.summary(self.delta))
    }

    fn work(&self) -> Work {
        self.shape.work(self.delta, true)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        match super::chunks::backward(self, variant)? {
            Some(source) => Ok(Some(source)),
            None => super::cuda::backward(self, variant),
        }
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::backward(self, variant)
    }
}

fn shape(s: &Select, form: &Form, middle: usize) -> LinearShape {
    let part = |k: usize| form.part(s.module(), &crate::ir::Type::f32(s.dims(k)));
    let floats = 3 + form.delta.operands();
    LinearShape {
        batch: s.size(s.dims(0)[0]),
        tokens: s.size(s.dims(0)[1]),
        heads: form.heads().iter().map(|&d| s.size(d)).collect(),
        size: s.size(form.size),
        value: form.value().map_or(1, |d| s.size(d)),
        parts: (0..floats).map(part).collect(),
        decay: (form.decay != Decay::None).then(|| part(floats + middle)),
    }
}

impl Choose for super::LinearAttention {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let form = &self.0;
        Ok(Kernel::LinearAttention(LinearAttention {
            shape: shape(s, form, 0),
            delta: form.delta,
            before: form.before,
            tokens: form.tokens,
            size_first: form.size_first(),
        }))
    }
}

impl Choose for super::LinearAttentionGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let form = &self.0;
        Ok(Kernel::LinearAttentionGrad(LinearAttentionGrad {
            shape: shape(s, form, 1),
            delta: form.delta,
            before: form.before,
            segments: form.tokens == Tokens::Segments,
        }))
    }
}
