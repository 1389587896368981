//! Tokens that decide for themselves: places, -1 where a token takes no part.

pub(crate) mod cuda;
pub mod kernel;

use super::*;
use smallvec::smallvec;

/// `(z[b, t]) -> places i32[b, t]`: each token's own place where `z > 0`, or `z >= 0` where
/// `inclusive`; -1 elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decide {
    /// Whether 0 decides for the token.
    pub inclusive: bool,
}

/// `(x i32[b, t, ..], places i32[b, t]) -> x`: the rows of tokens that take part; all others are
/// `otherwise`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeepInts {
    /// The integer in the other rows.
    pub otherwise: i32,
}

/// `(x i32[..]) -> y[..]`: integers as numbers.
pub struct Numbers;

/// `(places i32[b, t], documents i32[b, t]) -> runs i32[b, t]`: the number of the run that each
/// token is in. A token that takes part begins a run, or ends one; so does a change of documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Runs {
    /// Whether tokens that take part begin runs rather than end them.
    pub begins: bool,
}

/// `(x[b, t, ..], places i32[b, t]) -> x`: the rows of tokens that take part, bit for bit; all
/// others are -0, whatever they were.
pub struct Keep;

/// `(cached i32[b, s], positions i32[b, t], places i32[b, t]) -> cached, slots i32[b, t]`: gives
/// every token that takes part the next free entry of its sequence's cache and writes its position
/// there. Free entries are negative and stand after all others. `slots` is the entry, -1 for tokens
/// that take no part. A cache with no free entry left is an error.
pub struct Admit;

/// The rows of tokens that take part, and `otherwise` in all others.
fn kept<T: Copy>(x: &[T], places: &[i32], otherwise: T) -> Vec<T> {
    let width = x.len() / places.len().max(1);
    let kept = |(i, &x): (usize, &T)| if places[i / width] >= 0 { x } else { otherwise };
    x.iter().enumerate().map(kept).collect()
}

/// Rows of tokens that take no part are not read.
fn rows(at: &Asked, k: usize) -> Need {
    if k == 0 { Need::Places(at.node.inputs[1]) } else { Need::All }
}

fn check_kept(x: &Operands) -> Result<Vec<Type>, TypeError> {
    let fits = x[1].dims.len() == 2 && x[0].dims.starts_with(&x[1].dims);
    x.check(fits, "takes x[b, t, ..], places i32[b, t]")?;
    Ok(vec![x[0].clone()])
}

/// Each token's own place, or none.
fn random_places(case: &mut Case, b: Dim, t: Dim) -> Value {
    let tokens = case.module.size(t);
    let mut next = 0;
    case.ints_from("places", &[b, t], |rng| {
        next += 1;
        if rng.once_in(3) { -1 } else { ((next - 1) % tokens) as i32 }
    })
}

/// Dimensions of tokens with or without elements.
fn random_dims(case: &mut Case) -> Dims {
    let (b, t, h) = (case.dim("b"), case.dim("t"), case.dim("h"));
    if case.rng.once_in(3) { smallvec![b, t] } else { smallvec![b, t, h] }
}

impl Payload for Decide {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.flag("inclusive", &mut self.inclusive)
    }
}

impl Operation for Decide {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "decide",
            operands: &["z[b, t]"],
            results: &["places i32[b, t]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::Held(Ties::Zero),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.check(x[0].dims.len() == 2, "takes z[b, t]")?;
        Ok(vec![Type::i32(&x[0].dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let t = e.last(0);
        let place = |(i, &z): (usize, &f64)| {
            if z > 0.0 || (self.inclusive && z == 0.0) { (i % t) as i32 } else { -1 }
        };
        Ok(vec![Data::Int(e.floats(0).iter().enumerate().map(place).collect())])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let z = case.floats_from("z", &[b, t], |rng| rng.below(3) as f64 - 1.0);
        let inclusive = case.rng.once_in(2);
        case.finish(Decide { inclusive }, &[z])
    }
}

impl Operation for Keep {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "keep",
            operands: &["x[b, t, ..]", "places i32[b, t]"],
            results: &["y[b, t, ..]"],
            class: Class::anchored(self),
            rows: Rows::Of(rows),
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(1)?;
        x.float(0)?;
        check_kept(x)
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![Data::Float(kept(e.floats(0), e.ints(1), -0.0))])
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = random_dims(&mut case);
        let x = case.floats("x", &dims);
        let places = random_places(&mut case, dims[0], dims[1]);
        case.finish(Op::Keep, &[x, places])
    }
}

impl Reverse for Keep {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, places) = (at.d()?, at.operand(1));
        let dx = at.builder().op(Op::Keep, &[d, places]);
        at.add(0, dx);
        Ok(())
    }
}

impl Payload for KeepInts {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        let mut otherwise = f64::from(self.otherwise);
        a.word("otherwise")?;
        a.float(&mut otherwise)?;
        self.otherwise = otherwise as i32;
        Ok(())
    }
}

impl Operation for KeepInts {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "keep_ints",
            operands: &["x i32[b, t, ..]", "places i32[b, t]"],
            results: &["y i32[b, t, ..]"],
            class: Class::anchored(self),
            rows: Rows::Of(rows),
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Blocked("its result is of integers"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(1)?;
        x.int(0)?;
        check_kept(x)
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![Data::Int(kept(e.ints(0), e.ints(1), self.otherwise))])
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = random_dims(&mut case);
        let x = case.ints("x", &dims, 9);
        let places = random_places(&mut case, dims[0], dims[1]);
        case.finish(KeepInts { otherwise: 9 }, &[x, places])
    }
}

impl Operation for Numbers {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "numbers",
            operands: &["x i32[..]"],
            results: &["y[..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Blocked("an integer does not change by little"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(0)?;
        Ok(vec![Type::f32(&x[0].dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![Data::Float(e.ints(0).iter().map(|&x| f64::from(x)).collect())])
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = random_dims(&mut case);
        let x = case.ints("x", &dims, 9);
        case.finish(Op::Numbers, &[x])
    }
}

impl Payload for Runs {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.flag("begins", &mut self.begins)
    }
}

impl Operation for Runs {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "runs",
            operands: &["places i32[b, t]", "documents i32[b, t]"],
            results: &["runs i32[b, t]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::Blocked("its result is of integers"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(0)?;
        x.int(1)?;
        let fits = x[0].dims.len() == 2 && x[0] == x[1];
        x.check(fits, "takes places[b, t], documents[b, t]")?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let tokens = e.last(0);
        let (places, documents) = (e.ints(0), e.ints(1));
        let mut runs = vec![0; places.len()];
        for i in (0..places.len()).filter(|i| i % tokens > 0) {
            let taking = if self.begins { places[i] } else { places[i - 1] };
            runs[i] = runs[i - 1] + i32::from(taking >= 0 || documents[i] != documents[i - 1]);
        }
        Ok(vec![Data::Int(runs)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let places = random_places(&mut case, b, t);
        let documents = case.ints("documents", &[b, t], 2);
        let begins = case.rng.once_in(2);
        case.finish(Runs { begins }, &[places, documents])
    }
}

impl Operation for Admit {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "admit",
            operands: &["cached i32[b, s]", "positions i32[b, t]", "places i32[b, t]"],
            results: &["cached i32[b, s]", "slots i32[b, t]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::Blocked("its results are of integers"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        for k in 0..3 {
            x.int(k)?;
        }
        let ranks = x[0].dims.len() == 2 && x[1].dims.len() == 2;
        let fits = ranks && x[1] == x[2] && x[0].dims[0] == x[1].dims[0];
        x.check(fits, "takes cached[b, s], positions[b, t], places[b, t]")?;
        Ok(vec![x[0].clone(), x[2].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (entries, tokens) = (e.last(0), e.last(1));
        let mut cached = e.ints(0).to_vec();
        let mut slots = vec![-1; e.ints(1).len()];
        for (b, cached) in cached.chunks_mut(entries).enumerate() {
            let held = cached.iter().take_while(|p| **p >= 0).count();
            let taking = (b * tokens..(b + 1) * tokens).filter(|&i| e.ints(2)[i] >= 0);
            for (next, i) in (held..).zip(taking) {
                let full = || format!("a cache of {entries} entries is full");
                *cached.get_mut(next).ok_or_else(full)? = e.ints(1)[i];
                slots[i] = next as i32;
            }
        }
        Ok(vec![Data::Int(cached), Data::Int(slots)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        // Room for every token after those that are there.
        let tokens = case.module.size(t);
        let there = case.rng.below(4);
        let entries = there + tokens + case.rng.below(3);
        let s = case.sized("s", entries);
        let mut next = 0;
        let cached = case.ints_from("cached", &[b, s], |_| {
            next += 1;
            let at = (next - 1) % entries;
            if at < there { at as i32 } else { -1 }
        });
        case.function.params[cached.index()].binding = Binding::State(Lifetime::Depth);
        let positions = case.ints_from("positions", &[b, t], |rng| 10 + rng.below(9) as i32);
        let places = random_places(&mut case, b, t);
        case.finish(Op::Admit, &[cached, positions, places])
    }
}
