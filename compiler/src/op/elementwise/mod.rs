//! Element by element: numbers, functions of one or two operands, casts.

use super::*;
use std::f64::consts::FRAC_2_PI;

/// `() -> f32[]`: a number.
#[derive(Clone, Copy, Debug, Default)]
pub struct Constant(pub f64);

by_bits!(Constant, Constant(x) => Bits(x));

/// An enumeration and the list of its variants; the first is the default.
macro_rules! listed {
    ($(#[$of:meta])* $name:ident: $(#[$first_doc:meta])* $first:ident, $($(#[$doc:meta])* $variant:ident,)*) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $(#[$first_doc])*
            #[default]
            $first,
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$name::$first, $($name::$variant),*];
        }
    };
}

listed! {
    /// `(x) -> x`: an element-wise function.
    Unary:
    /// `-x`
    Neg,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `tanh x`
    Tanh,
    /// `x · sigmoid(x)`
    Silu,
    /// Derivative of `Silu`.
    SiluGrad,
    /// `x/2 · (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`
    Gelu,
    /// Derivative of `Gelu`.
    GeluGrad,
    /// `max(x, 0)`
    Relu,
    /// `ln(1 + e^x)`
    Softplus,
    /// `1 / sqrt(x)`
    Rsqrt,
    /// `sqrt(x)`
    Sqrt,
    /// `1 / x`
    Recip,
    /// `x²`
    Square,
    /// 1 where `x > 0`, else 0; no gradient.
    Positive,
    /// `sin x`
    Sin,
    /// `cos x`
    Cos,
    /// The largest whole number that is not above `x`; no gradient.
    Floor,
}

listed! {
    /// `(a, b) -> a or b`: an element-wise function of two operands. The operand that lacks a
    /// dimension of the other is broadcast along it; the result has the dimensions of the operand
    /// that has them all.
    Binary:
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// `max(a, b)`
    Max,
    /// `a` where `b` is not 0, else 0, whatever `a` is; no gradient of `b`.
    Where,
}

/// `(x) -> x` with the gradient stopped.
pub struct StopGradient;

/// `(x) -> x` stored as another type; values are rounded to nearest even.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cast(pub DType);

/// The number that every element of the result is, where every element of each operand is one: the
/// few cases that rewrite rules look at.
pub(crate) fn fold(op: &Op, x: &[f64]) -> Option<f64> {
    if let (Op::Unary(Unary::Neg), [a]) = (op, x) {
        return Some(-a);
    }
    let (Op::Binary(f @ (Binary::Add | Binary::Sub | Binary::Mul)), &[a, b]) = (op, x) else { return None };
    Some(f.apply(a, b))
}

impl Payload for Constant {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.float(&mut self.0)
    }
}

impl Operation for Constant {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "constant",
            operands: &[],
            results: &["y[]"],
            class: Class::Number(RowOp::Constant(Bits(self.0))),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Nothing,
            derivative: Derivative::Blocked("it has no operands"),
        }
    }

    fn infer(&self, _: &Operands) -> Result<Vec<Type>, TypeError> {
        Ok(vec![Type::f32(&[])])
    }

    fn interpret(&self, _: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![Data::Float(vec![self.0])])
    }

    fn random(&self, mut case: Case) -> Instance {
        let x = case.rng.between(-3.0, 3.0);
        case.finish(Constant(x), &[])
    }
}

/// All that the compiler knows of a function; the CPU's is in its device, PyTorch's in `torch`.
struct Facts {
    /// Its word in the text form.
    name: &'static str,
    /// The function.
    apply: fn(f64) -> f64,
    /// Its kernel statement, with `#` for the element or the adjacent ones.
    statement: &'static str,
    /// Instructions of one element, roughly.
    price: u64,
    /// Elements of random operands.
    random: fn(&mut Rng) -> f64,
    /// The operand's cotangent, from the result's, the operand and the result; or why it has none.
    back: Result<Back, Derivative<'static>>,
}

type Back = fn(&mut Builder, Value, Value, Value) -> Value;

/// No derivative: the function is one.
const SECOND: Result<Back, Derivative<'static>> = Err(Derivative::SECOND_ORDER);
/// No derivative: steps have none.
const STEPS: Result<Back, Derivative<'static>> = Err(Derivative::Blocked("it is constant but for its steps"));

/// `sqrt(2/π) (x + 0.044715 x³)`
fn gelu_inner(x: f64) -> f64 {
    FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)
}

fn gelu_grad(x: f64) -> f64 {
    let s = sigmoid(2.0 * gelu_inner(x));
    let slope = FRAC_2_PI.sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
    s + 2.0 * x * s * (1.0 - s) * slope
}

fn around_zero(rng: &mut Rng) -> f64 {
    rng.between(-3.0, 3.0)
}

fn above_zero(rng: &mut Rng) -> f64 {
    rng.between(0.2, 3.0)
}

fn between_steps(rng: &mut Rng) -> f64 {
    rng.below(5) as f64 - 2.0 + rng.between(0.2, 0.8)
}

impl Unary {
    fn facts(self) -> Facts {
        let facts = |name, apply, statement, price, random, back| Facts {
            name,
            apply,
            statement,
            price,
            random,
            back,
        };
        match self {
            Unary::Neg => facts("neg", |x| -x, "-#", 1, around_zero, Ok(|b, d, _, _| b.unary(Unary::Neg, d))),
            Unary::Exp => facts("exp", f64::exp, "expf(#)", 12, around_zero, Ok(|b, d, _, y| b.mul(d, y))),
            Unary::Log => facts("log", f64::ln, "logf(#)", 12, above_zero, Ok(|b, d, x, _| b.div(d, x))),
            Unary::Sigmoid => facts(
                "sigmoid",
                sigmoid,
                "sigmoid(#)",
                12,
                around_zero,
                Ok(|b, d, _, y| {
                    let square = b.mul(y, y);
                    let slope = b.sub(y, square);
                    b.mul(d, slope)
                }),
            ),
            Unary::Tanh => facts(
                "tanh",
                f64::tanh,
                "tanhf(#)",
                12,
                around_zero,
                Ok(|b, d, _, y| {
                    let square = b.unary(Unary::Square, y);
                    let scaled = b.mul(d, square);
                    b.sub(d, scaled)
                }),
            ),
            Unary::Silu => facts(
                "silu",
                |x| x * sigmoid(x),
                "silu(#)",
                12,
                around_zero,
                Ok(|b, d, x, _| {
                    let slope = b.unary(Unary::SiluGrad, x);
                    b.mul(d, slope)
                }),
            ),
            Unary::SiluGrad => facts(
                "silu_grad",
                |x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
                "silu_grad(#)",
                12,
                around_zero,
                SECOND,
            ),
            // `(1 + tanh u) / 2` without its cancellation where `u` is far below 0.
            Unary::Gelu => facts(
                "gelu",
                |x| x * sigmoid(2.0 * gelu_inner(x)),
                "gelu(#)",
                12,
                around_zero,
                Ok(|b, d, x, _| {
                    let slope = b.unary(Unary::GeluGrad, x);
                    b.mul(d, slope)
                }),
            ),
            Unary::GeluGrad => facts("gelu_grad", gelu_grad, "gelu_grad(#)", 12, around_zero, SECOND),
            Unary::Relu => facts(
                "relu",
                |x| x.max(0.0),
                "relu(#)",
                1,
                away_from_zero,
                Ok(|b, d, x, _| {
                    let on = b.unary(Unary::Positive, x);
                    b.mul(d, on)
                }),
            ),
            Unary::Softplus => facts(
                "softplus",
                |x| x.max(0.0) + (-x.abs()).exp().ln_1p(),
                "softplus(#)",
                12,
                around_zero,
                Ok(|b, d, x, _| {
                    let slope = b.unary(Unary::Sigmoid, x);
                    b.mul(d, slope)
                }),
            ),
            Unary::Rsqrt => facts(
                "rsqrt",
                |x| 1.0 / x.sqrt(),
                "1.0f / sqrtf(#)",
                6,
                above_zero,
                Ok(|b, d, _, y| {
                    let square = b.unary(Unary::Square, y);
                    let cube = b.mul(square, y);
                    let scaled = b.mul(d, cube);
                    b.scale(scaled, -0.5)
                }),
            ),
            Unary::Sqrt => facts(
                "sqrt",
                f64::sqrt,
                "sqrtf(#)",
                6,
                above_zero,
                Ok(|b, d, _, y| {
                    let q = b.div(d, y);
                    b.scale(q, 0.5)
                }),
            ),
            Unary::Recip => facts(
                "recip",
                |x| 1.0 / x,
                "1.0f / #",
                6,
                away_from_zero,
                Ok(|b, d, _, y| {
                    let square = b.unary(Unary::Square, y);
                    let scaled = b.mul(d, square);
                    b.unary(Unary::Neg, scaled)
                }),
            ),
            Unary::Square => facts(
                "square",
                |x| x * x,
                "square(#)",
                1,
                around_zero,
                Ok(|b, d, x, _| {
                    let scaled = b.mul(d, x);
                    b.scale(scaled, 2.0)
                }),
            ),
            Unary::Positive => {
                facts("positive", |x| f64::from(u8::from(x > 0.0)), "positive(#)", 1, away_from_zero, STEPS)
            }
            Unary::Sin => facts(
                "sin",
                f64::sin,
                "sine(#)",
                12,
                around_zero,
                Ok(|b, d, x, _| {
                    let slope = b.unary(Unary::Cos, x);
                    b.mul(d, slope)
                }),
            ),
            Unary::Cos => facts(
                "cos",
                f64::cos,
                "cosine(#)",
                12,
                around_zero,
                Ok(|b, d, x, _| {
                    let slope = b.unary(Unary::Sin, x);
                    let scaled = b.mul(d, slope);
                    b.unary(Unary::Neg, scaled)
                }),
            ),
            Unary::Floor => facts("floor", f64::floor, "floorf(#)", 1, between_steps, STEPS),
        }
    }

    /// Its word in the text form.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Its value, in f64.
    pub fn apply(self, x: f64) -> f64 {
        (self.facts().apply)(x)
    }

    /// Its kernel statement, of the elements that a value holds, one or more.
    pub(crate) fn statement(self, x: &str) -> String {
        self.facts().statement.replace('#', x)
    }

    /// Instructions of one element, roughly.
    pub(crate) fn price(self) -> u64 {
        self.facts().price
    }

    fn back(self) -> Result<Back, Derivative<'static>> {
        self.facts().back
    }
}

fn sigmoid(x: f64) -> f64 {
    // Both forms are exact; each overflows where the other does not.
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// A number whose size is from 0.2 to 2, of either sign: away from 0, where some functions have a
/// kink or a pole.
fn away_from_zero(rng: &mut Rng) -> f64 {
    rng.between(0.2, 2.0) * if rng.once_in(2) { -1.0 } else { 1.0 }
}

impl Payload for Unary {
    fn blanks() -> Vec<Self> {
        Unary::ALL.to_vec()
    }

    fn attributes(&mut self, _: &mut dyn Attributes) -> Parsed<()> {
        Ok(())
    }
}

impl Operation for Unary {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: Unary::name(*self),
            operands: &["x"],
            results: &["y"],
            class: Class::Element(self),
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Result(1),
            derivative: self.back().map_or_else(|none| none, |_| Derivative::Rule(self)),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(e.map(0, |x| self.apply(x)))
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = case.rows();
        let x = case.floats_from("x", &dims, self.facts().random);
        case.finish(*self, &[x])
    }
}

impl Reverse for Unary {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x, y) = (at.d()?, at.operand(0), at.result(0));
        if let Ok(back) = self.back() {
            let dx = back(at.builder(), d, x, y);
            at.add(0, dx);
        }
        Ok(())
    }
}

impl RowWork for Unary {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let a = r.array(node.inputs[0])?;
        let n = r.length_of(node.first)?;
        Ok(Some(r.op(RowOp::Unary(*self, a), n)))
    }
}

impl Binary {
    /// Its kernel statement, of the elements that two values hold.
    pub(crate) fn statement(self, a: &str, b: &str) -> String {
        match self {
            Binary::Add => format!("{a} + {b}"),
            Binary::Sub => format!("{a} - {b}"),
            Binary::Mul => format!("{a} * {b}"),
            Binary::Div => format!("{a} / {b}"),
            Binary::Max => format!("larger({a}, {b})"),
            Binary::Where => format!("unless_zero({a}, {b})"),
        }
    }

    /// Instructions of one element, roughly.
    pub(crate) fn price(self) -> u64 {
        if self == Binary::Div { 6 } else { 1 }
    }

    /// Its word in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Max => "max",
            Binary::Where => "where",
        }
    }

    fn apply(self, a: f64, b: f64) -> f64 {
        match self {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Max => a.max(b),
            Binary::Where => {
                if b != 0.0 {
                    a
                } else {
                    0.0
                }
            }
        }
    }
}

impl Payload for Binary {
    fn blanks() -> Vec<Self> {
        Binary::ALL.to_vec()
    }

    fn attributes(&mut self, _: &mut dyn Attributes) -> Parsed<()> {
        Ok(())
    }
}

impl Operation for Binary {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: Binary::name(*self),
            operands: &["a", "b"],
            results: &["y"],
            class: Class::Element(self),
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Result(1),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let (a, b) = (&x[0], &x[1]);
        x.float(0)?;
        x.same_dtype(0, 1)?;
        let dims = if is_subsequence(&b.dims, &a.dims) {
            a.dims.clone()
        } else if is_subsequence(&a.dims, &b.dims) {
            b.dims.clone()
        } else {
            return x.fail("the dimensions of one operand must be among the other's, in the same order");
        };
        Ok(vec![Type { dtype: a.dtype, dims }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (a, b, result) = (e.floats(0), e.floats(1), &e.results[0].dims);
        let along = |i: usize| strides(e.module, &e.types[i].dims, result);
        let mut out = vec![];
        walk(&e.sizes_of(result), [along(0), along(1)], |[i, j]| out.push(self.apply(a[i], b[j])));
        Ok(vec![Data::Float(out)])
    }

    /// One operand has all dimensions, the other some of them, on either side.
    fn random(&self, mut case: Case) -> Instance {
        let all = [case.dim("b"), case.dim("t"), case.dim("h")];
        let some: Dims = all.into_iter().filter(|_| case.rng.once_in(2)).collect();
        let (a, b) = if case.rng.once_in(2) { (&all[..], &some[..]) } else { (&some[..], &all[..]) };
        let a = case.floats("a", a);
        let b = case.floats_from("b", b, away_from_zero);
        case.finish(*self, &[a, b])
    }
}

impl Reverse for Binary {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x, y) = (at.d()?, [at.operand(0), at.operand(1)], at.result(0));
        match self {
            Binary::Add => {
                at.add_fitted(0, d);
                at.add_fitted(1, d);
            }
            Binary::Sub => {
                at.add_fitted(0, d);
                if at.is_active(1) {
                    let n = at.builder().unary(Unary::Neg, d);
                    at.add_fitted(1, n);
                }
            }
            Binary::Mul => {
                for (k, other) in [(0, x[1]), (1, x[0])] {
                    if at.is_active(k) {
                        let p = at.builder().mul(d, other);
                        at.add_fitted(k, p);
                    }
                }
            }
            Binary::Div => {
                let q = at.builder().div(d, x[1]);
                at.add_fitted(0, q);
                if at.is_active(1) {
                    let p = at.builder().mul(q, y);
                    let n = at.builder().unary(Unary::Neg, p);
                    at.add_fitted(1, n);
                }
            }
            Binary::Max => {
                for (k, other) in [(0, 1), (1, 0)] {
                    if at.is_active(k) {
                        let b = at.builder();
                        let difference = b.sub(x[k], x[other]);
                        let on = b.unary(Unary::Positive, difference);
                        let p = b.mul(d, on);
                        at.add_fitted(k, p);
                    }
                }
            }
            Binary::Where => {
                if at.is_active(0) {
                    let kept = at.builder().op(Binary::Where, &[d, x[1]]);
                    at.add_fitted(0, kept);
                }
            }
        }
        Ok(())
    }
}

impl RowWork for Binary {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let (a, b) = (r.array(node.inputs[0])?, r.array(node.inputs[1])?);
        let (da, db) = (&r.ty(node.inputs[0]).dims, &r.ty(node.inputs[1]).dims);
        let small_first = da.len() < db.len();
        let broadcast = if small_first { r.broadcast(db, da)? } else { r.broadcast(da, db)? };
        let n = r.length_of(node.first)?;
        Ok(Some(r.op(RowOp::Binary { op: *self, a, b, broadcast, small_first }, n)))
    }
}

impl Operation for StopGradient {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "stop_gradient",
            operands: &["x"],
            results: &["y"],
            class: Class::Identity,
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Nothing,
            derivative: Derivative::Held(Ties::Copies),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![e.operands[0].data.clone()])
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = case.rows();
        let x = case.floats("x", &dims);
        case.finish(Op::StopGradient, &[x])
    }
}

impl Payload for Cast {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("to")?;
        a.dtype(&mut self.0)
    }
}

impl Operation for Cast {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "cast",
            operands: &["x"],
            results: &["y"],
            class: Class::Element(self),
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Result(1),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.check(self.0.is_float(), "casts between float types only")?;
        Ok(vec![Type { dtype: self.0, dims: x[0].dims.clone() }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(match self.0 {
            DType::Bf16 => e.map(0, round_bf16),
            DType::E4m3 | DType::Packed(_) => return Err("nothing is packed by a cast".into()),
            DType::F32 | DType::I32 => vec![e.operands[0].data.clone()],
        })
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = case.rows();
        let x = case.floats("x", &dims);
        case.finish(Cast(DType::Bf16), &[x])
    }
}

impl Reverse for Cast {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, to) = (at.d()?, at.ty(0).dtype);
        let back = at.builder().op(Cast(to), &[d]);
        at.add(0, back);
        Ok(())
    }
}

impl RowWork for Cast {
    /// Storage is the only difference: arrays of a row kernel are f32.
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        Ok(Some(r.array(node.inputs[0])?))
    }
}
