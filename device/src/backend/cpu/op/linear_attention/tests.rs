//! Chunks against the sequential form in f64, at the edges, and faults in chunks.

use super::chunk::{CHUNK, FAULT, Fault};
use crate::backend::cpu::tests::Value::{self, F, I};
use crate::backend::cpu::tests::{check_instance, check_instance_by, launch, plan_of, session};
use crate::ptx::{Checks, Options, PtxDevice};
use crate::{Device, Group};
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::ir::random::{Instance, Rng};
use dreamc_compiler::ir::{Attention as Scoring, DType, Type, parse};
use dreamc_compiler::op::linear_attention::Part;
use dreamc_compiler::op::linear_attention::kernel::LinearShape;
use dreamc_compiler::op::{Delta, Tokens};
use dreamc_compiler::program::kernel::{Attention, AttentionGrad, LinearAttention, LinearAttentionGrad};
use dreamc_compiler::program::{AttentionShape, BufferId, Kernel, KernelKind, ProgramKey, Slot, Storage};

/// Decays of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Decays {
    /// Near 1, as models have them.
    Weak,
    /// Far from it: products of a few are no numbers any more.
    Strong,
    /// 1, 0 and anything.
    Edges,
}

const DECAYS: [Decays; 3] = [Decays::Weak, Decays::Strong, Decays::Edges];

fn number(name: &str, [size, at]: [u64; 2], decays: Decays, rng: &mut Rng, segment: &mut f64) -> f64 {
    match name {
        "segments" => {
            *segment = if at == 0 { 0.0 } else { *segment + f64::from(u8::from(rng.once_in(25))) };
            if rng.once_in(12) { -1.0 } else { *segment }
        }
        "slots" => f64::from(u8::from(!rng.once_in(6))) - 1.0,
        "decay" => match decays {
            Decays::Weak => rng.between(-0.1, 0.0),
            Decays::Strong => rng.between(-40.0, -1.0),
            Decays::Edges => match rng.below(4) {
                0 => 0.0,
                1 => f64::NEG_INFINITY,
                2 => rng.between(-90.0, 0.0),
                _ => rng.between(-1.0, 0.0),
            },
        },
        "u" | "w" => rng.between(-0.8, 0.8) / (size as f64).sqrt(),
        "k" => rng.between(-1.5, 1.5) / (size as f64).sqrt(),
        _ => rng.between(-1.5, 1.5),
    }
}

/// An instance of `tokens` tokens.
fn instance(seed: u64, tokens: u64, gradient: bool) -> Instance {
    let rng = &mut Rng::new(seed);
    let pick = |rng: &mut Rng, of: &[u64]| of[rng.below(of.len() as u64) as usize];
    let (size, value) = (pick(rng, &[1, 3, 8, 16, 20, 33]), pick(rng, &[1, 5, 16, 17, 40]));
    let (decay, delta) = (rng.below(3), rng.below(3));
    let decays = DECAYS[rng.below(3) as usize];
    let kind = rng.below(if gradient { 2 } else { 3 });
    let turned = rng.once_in(2);
    let mut heads = || if rng.once_in(3) { "h" } else { "g, h" };
    let [q, k, v, u, w, d] = [(); 6].map(|()| heads());
    let flags = [["", " segments", " kept"][kind as usize], if rng.once_in(3) { " before" } else { "" }];
    let mut inputs = vec![("q", format!("f32[b, t, {q}, d]")), ("k", format!("f32[b, t, {k}, d]"))];
    inputs.push(("v", format!("f32[b, t, {v}, e]")));
    inputs.extend((delta > 0).then(|| ("u", format!("f32[b, t, {u}, d]"))));
    inputs.extend((delta > 1).then(|| ("w", format!("f32[b, t, {w}, d]"))));
    inputs.extend(gradient.then(|| ("do", "f32[b, t, g, h, e]".into())));
    inputs.extend((decay == 1).then(|| ("decay", format!("f32[b, t, {d}]"))));
    inputs.extend((decay == 2).then(|| ("decay", format!("f32[b, t, {d}, d]"))));
    inputs.extend((kind == 2).then(|| ("state", "f32[b, n]".into())));
    inputs.extend((kind > 0).then(|| (if kind == 1 { "segments" } else { "slots" }, "i32[b, t]".into())));
    let list: Vec<String> = inputs.iter().map(|(name, _)| format!("%{name}")).collect();
    let params: Vec<String> = inputs
        .iter()
        .map(|(name, ty)| format!("{} %{name} : {ty}", if *name == "state" { "state" } else { "input" }))
        .collect();
    let mut results = match gradient {
        true => inputs
            .iter()
            .filter(|(n, ty)| *n != "do" && ty.starts_with("f32"))
            .map(|(_, t)| t.clone())
            .collect(),
        false => vec!["f32[b, t, g, h, e]".to_string()],
    };
    results.extend((kind == 2).then(|| "f32[b, n]".to_string()));
    let values: Vec<String> = (0..results.len()).map(|k| format!("%{k}")).collect();
    let named: Vec<String> = values
        .iter()
        .enumerate()
        .map(|(k, v)| if kind == 2 && k == 1 { format!("state = {v}") } else { format!("r{k} = {v}") })
        .collect();
    let text = format!(
        "dims {{ b 2 t {tokens} g 2 h 2 d {size} e {value} n {} }}\nfunc @f {{\n{}\n{} = {} {} [g, h, {}] over d decay {} delta {}{}{} : {}\nreturn {}\n}}",
        4 * size * value + 1,
        params.join("\n"),
        values.join(", "),
        if gradient { "linear_attention_grad" } else { "linear_attention" },
        list.join(", "),
        if turned { "d, e" } else { "e, d" },
        ["none", "head", "channel"][decay as usize],
        ["none", "key", "pair"][delta as usize],
        flags[1],
        flags[0],
        results.join(", "),
        named.join(", "),
    );
    let module = parse(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
    let function = module.functions["f"].clone();
    let (begun, mut segment) = (!rng.once_in(3), 0.0);
    let mut tensor = |name: &str, ty: &Type| {
        let dims: Vec<usize> = ty.dims.iter().map(|&d| module.size(d) as usize).collect();
        let count: usize = dims.iter().product();
        let each = dims[1..].iter().product::<usize>();
        let of = |i: usize| [size, (i % each) as u64];
        let mut x: Vec<f64> = (0..count).map(|i| number(name, of(i), decays, rng, &mut segment)).collect();
        if name == "state" {
            x.iter_mut().step_by(each).for_each(|count| *count = if begun { 5.0 } else { 0.0 });
        }
        match ty.dtype {
            DType::I32 => Tensor::int(&dims, x.iter().map(|x| *x as i32).collect()),
            DType::F32 | DType::Bf16 | DType::E4m3 | DType::Packed(_) => Tensor::float(&dims, x),
        }
    };
    let args = function.params.iter().zip(&function.types).map(|(p, ty)| tensor(&p.name, ty)).collect();
    Instance { module, function, args }
}

/// Lengths around those of parts and chunks.
const TOKENS: [u64; 12] = [1, 2, 4, 5, 15, 16, 17, 33, 63, 64, 65, 150];

#[test]
fn chunks_are_the_sequential_form() {
    for seed in 0..96 {
        println!("seed {seed}");
        check_instance(&instance(seed, TOKENS[seed as usize % 12], false));
    }
}

#[test]
fn chunks_backward_are_the_sequential_form() {
    for seed in 0..96 {
        println!("seed {seed}");
        check_instance(&instance(seed, TOKENS[seed as usize % 12], true));
    }
}

/// The same in bf16, forward and backward: states and sums stay f32, so that the only error is that
/// of what is stored.
#[test]
fn chunks_in_bf16() {
    for seed in 0..24 {
        println!("seed {seed}");
        let case = instance(seed, TOKENS[(seed as usize / 2 + 6) % 12], seed % 2 == 1);
        check_instance_by(&case, &|kernel, operands| launch(kernel, operands));
    }
}

/// A state grows beyond what bf16 counts to: a text of ones, whose sum is its length.
#[test]
fn states_in_bf16_count_on() {
    let text = "dims { b 1 t 600 d 1 e 1 }
        func @f {
          input %q : f32[b, t, d]
          input %k : f32[b, t, d]
          input %v : f32[b, t, e]
          %0 = linear_attention %q, %k, %v [e, d] over d decay none delta none : f32[b, t, e]
          return o = %0
        }";
    let module = parse(text).unwrap();
    let function = module.functions["f"].clone();
    let ones = || Tensor::float(&[1, 600, 1], vec![1.0; 600]);
    let args = vec![ones(), ones(), ones()];
    let last = std::cell::Cell::new(0.0);
    check_instance_by(&Instance { module, function, args }, &|kernel, operands| {
        let found = launch(kernel, operands);
        last.set(found.0.iter().map(|value| value.f().last().copied().unwrap_or(0.0)).fold(0.0, f32::max));
        found
    });
    assert_eq!(last.get(), 600.0);
}

/// The kernels of GPUs, interpreted, against the same.
#[test]
fn gpus_take_the_sequential_form() {
    let options = Options { checks: Checks::NONE, ..Options::default() };
    let Some(device) = dreamc_skip::need(PtxDevice::new(options)) else { return };
    let run = |kernel: Kernel, operands: &[Value]| {
        let plan = plan_of(&kernel, operands);
        let mut session = device.load(&plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}"));
        for (i, value) in operands.iter().enumerate() {
            match value {
                F(x) => session.write_at(BufferId(i as u32), 0, 0, x).unwrap(),
                I(x) => session.write_at(BufferId(i as u32), 0, 0, x).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        session.run(ProgramKey::ALONE).unwrap();
        let read = |(i, value): (usize, &Value)| match value {
            F(_) => F(session.read_all(BufferId(i as u32)).unwrap()),
            other => other.clone(),
        };
        let found = operands.iter().enumerate().map(read).collect();
        (found, kernel.work().fixed.multiply_adds as u64)
    };
    for seed in 0..16 {
        println!("seed {seed}");
        check_instance_by(&instance(seed, [1, 6, 17][seed as usize % 3], seed % 2 == 1), &run);
    }
}

/// Each fault is noticed.
#[test]
fn faults_in_chunks() {
    let silent = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = vec![];
    let faults = [
        (Fault::LateDecay, false),
        (Fault::LostState, false),
        (Fault::OpenDocument, false),
        (Fault::OpenTriangle, false),
        (Fault::OtherHead, false),
        (Fault::OtherHead, true),
        (Fault::LostHead, true),
    ];
    for (fault, gradient) in faults {
        FAULT.set(fault);
        // Few instances have heads that share both queries and keys.
        let noticed = (0..400).any(|seed| {
            let case = instance(seed, CHUNK as u64 + 20, gradient);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check_instance(&case))).is_err()
        });
        missed.extend((!noticed).then_some(fault));
        FAULT.set(Fault::None);
    }
    std::panic::set_hook(silent);
    assert!(missed.is_empty(), "{missed:?}");
}

/// Seconds of a launch on two threads, the least of a few; operands are small numbers, stored as
/// bf16 where they may be, if that is asked for.
fn seconds(kernel: Kernel, bf16: bool) -> f64 {
    let rng = &mut Rng::new(1);
    let operand = |slot: &Slot| match slot.name {
        "decay" => F((0..slot.elements()).map(|_| rng.between(-0.1, 0.0) as f32).collect()),
        _ => F((0..slot.elements()).map(|_| rng.between(-0.1, 0.1) as f32).collect()),
    };
    let operands: Vec<Value> = kernel.signature().iter().map(operand).collect();
    let slots = kernel.signature();
    let narrow = |i: usize| bf16 && matches!(slots[i].storage, Storage::Float(_));
    let mut plan = plan_of(&kernel, &operands);
    for (_, buffer) in plan.buffers.iter_mut().enumerate().filter(|(i, _)| narrow(*i)) {
        buffer.dtype = DType::Bf16;
    }
    let mut session = session(&plan, 2);
    for (i, value) in operands.iter().enumerate() {
        let (F(x), id) = (value, BufferId(i as u32)) else { continue };
        match narrow(i) {
            true => {
                let x: Vec<half::bf16> = x.iter().map(|x| half::bf16::from_f32(*x)).collect();
                session.write_at(id, 0, 0, &x).unwrap();
            }
            false => session.write_at(id, 0, 0, x).unwrap(),
        }
    }
    let mut least = f64::INFINITY;
    for _ in 0..5 {
        let begin = std::time::Instant::now();
        session.run(ProgramKey::ALONE).unwrap();
        least = least.min(begin.elapsed().as_secs_f64());
    }
    least
}

/// Microseconds of a token, forward and backward, for lines `tokens heads keys values kind` in
/// `DREAMC_SHAPES`, perhaps with `bf16` at the end; `benches/cpu/linear.py` has the other side.
#[test]
#[ignore = "it measures"]
fn rates() {
    let shapes = std::env::var("DREAMC_SHAPES").unwrap_or("1024 4 64 64 delta".into());
    for line in shapes.split(',') {
        let words: Vec<&str> = line.split_whitespace().collect();
        let n = |k: usize| words[k].parse::<u64>().expect("a number");
        let (tokens, heads, size, value) = (n(0), n(1), n(2), n(3));
        let [forward, backward] = kernels([tokens, heads, size, value], words[4])
            .map(|kernel| seconds(kernel, words.get(5) == Some(&"bf16")));
        let micros = |s: f64| s * 1e6 / tokens as f64;
        println!("rate {line}: {:.3} {:.3}", micros(forward), micros(backward));
    }
}

/// The kernels of a shape: `attention`, `delta` (a gated delta rule), `channel` (one whose channels
/// decay), or `state` (a decay of each head and keys of all heads).
fn kernels([tokens, heads, size, value]: [u64; 4], kind: &str) -> [Kernel; 2] {
    if kind == "attention" {
        let shape = AttentionShape { batch: 1, queries: tokens, keys: tokens, heads, kv_heads: heads, size };
        let attention = Scoring { scale: 0.125, ..Scoring::default() };
        return [
            Kernel::Attention(Attention {
                shape,
                attention: attention.clone(),
                lengths: vec![],
                shared: false,
            }),
            Kernel::AttentionGrad(AttentionGrad { shape, attention, lengths: vec![], log: false }),
        ];
    }
    let part = |width: u64, own: bool| match own {
        true => Part { row: heads * width, width, strides: vec![width] },
        false => Part { row: width, width, strides: vec![0] },
    };
    let own = kind != "state";
    let delta = if own { Delta::Key } else { Delta::None };
    let mut parts = vec![part(size, own), part(size, own), part(value, true)];
    parts.extend(own.then(|| part(size, true)));
    let decay = Some(part(if kind == "channel" { size } else { 1 }, true));
    let shape = LinearShape { batch: 1, tokens, heads: vec![heads], size, value, parts, decay };
    let forward = LinearAttention {
        shape: shape.clone(),
        delta,
        before: false,
        tokens: Tokens::All,
        size_first: false,
    };
    let backward = LinearAttentionGrad { shape, delta, before: false, segments: false };
    [Kernel::LinearAttention(forward), Kernel::LinearAttentionGrad(backward)]
}
