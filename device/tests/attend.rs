//! Attention with scores and masks that are programs: devices against the interpreter in f64, and
//! what users of FlexAttention report.

use dreamc_compiler::codegen::Limits;
use dreamc_compiler::ir::{DType, Function, Module, Tensor, interpret, parse};
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, BufferId, KernelId, Launch, Operand, Plan, Program, ProgramKey, Space, Step,
};
use dreamc_compiler::schedule::{Bind, LocalOperand, Place, Scheduled, schedule};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::ptx::{Checks, Options, PtxDevice};
use dreamc_device::{Device, Group, Session};
use half::bf16;
use std::time::Instant;

/// An attention, forward and back.
#[derive(Clone)]
struct Case {
    /// Sequences, tokens, query heads, key heads, head size.
    sizes: [u64; 5],
    /// Tokens of keys, and positions, where they are not those of queries.
    cached: Option<u64>,
    /// `window 5` and such.
    words: String,
    score: Option<&'static str>,
    mask: Option<&'static str>,
    /// Types of what the program reads.
    reads: Vec<&'static str>,
    /// Those of them that the score moves by.
    moved: Vec<usize>,
    segments: bool,
    dropout: bool,
    dtype: &'static str,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            sizes: [2, 133, 4, 2, 16],
            cached: None,
            words: String::new(),
            score: None,
            mask: None,
            reads: vec![],
            moved: vec![],
            segments: false,
            dropout: false,
            dtype: "f32",
        }
    }
}

impl Case {
    fn text(&self) -> String {
        let Case { sizes: [b, t, n, g, d], dtype, .. } = self;
        let s = if self.cached.is_some() { "s" } else { "t" };
        let (q, k) = (format!("{dtype}[b, t, n, d]"), format!("{dtype}[b, {s}, g, d]"));
        let lse = "f32[b, t, n]";
        let mut inputs = format!("  input %q : {q}\n  input %k : {k}\n  input %v : {k}\n  input %do : {q}\n");
        let (mut masks, mut reads) = (String::new(), String::new());
        let mut operand = |list: &mut String, name: &str, ty: &str| {
            inputs += &format!("  input %{name} : {ty}\n");
            *list += &format!(", %{name}");
        };
        if self.cached.is_some() {
            operand(&mut masks, "query_positions", "i32[b, t]");
            operand(&mut masks, "key_positions", "i32[b, s]");
        }
        if self.segments {
            operand(&mut masks, "segments", "i32[b, t]");
        }
        if self.dropout {
            operand(&mut masks, "draws", "i32[b, t]");
        }
        for (n, ty) in self.reads.iter().enumerate() {
            operand(&mut reads, &format!("x{n}"), &format!("f32{ty}"));
        }
        inputs += &format!("  input %dlse : {lse}\n");
        let flag = |there: bool, word: &str| if there { format!(" {word}") } else { String::new() };
        let formula =
            |word: &str, text: Option<&str>| text.map_or(String::new(), |t| format!(" {word} \"{t}\""));
        let words = format!(
            "scale 0.3{} mask {}{}{}{}{}",
            self.words,
            if self.cached.is_some() { "positions" } else { "causal" },
            flag(self.segments, "segments"),
            flag(self.dropout, "dropout 0.25"),
            formula("score", self.score),
            formula("sees", self.mask)
        );
        let moved: String = self.moved.iter().map(|n| format!(", %{}", 5 + self.place(*n))).collect();
        let types: String = self.moved.iter().map(|n| format!(", f32{}", self.reads[*n])).collect();
        let results: String =
            self.moved.iter().map(|n| format!(", dx{n} = %{}", 5 + self.place(*n))).collect();
        let cached = self.cached.map_or(String::new(), |s| format!("  s {s}"));
        format!(
            "dims {{ b {b}  t {t}  n {n}  g {g}  d {d}  m 9{cached} }}\n\
             func @f {{\n{inputs}  \
             %0, %1 = attention %q, %k, %v{masks}{reads} {words} : {q}, {lse}\n  \
             %2, %3, %4{moved} = attention_grad %q, %k, %v, %0, %1, %do{masks}, %dlse{reads} {words} : {q}, {k}, {k}{types}\n  \
             return o = %0, lse = %1, dq = %2, dk = %3, dv = %4{results}\n}}\n"
        )
    }

    fn place(&self, read: usize) -> usize {
        self.moved.iter().position(|&n| n == read).unwrap_or(0)
    }

    fn module(&self) -> Module {
        let text = self.text();
        parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    /// Numbers for every operand.
    fn args(&self, module: &Module) -> Vec<Tensor> {
        let f = &module.functions["f"];
        let mut seed = 7u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as f64 / f64::from(1u32 << 31)
        };
        let mut args = vec![];
        for (param, ty) in f.params.iter().zip(&f.types) {
            let dims: Vec<usize> = ty.dims.iter().map(|&d| module.size(d) as usize).collect();
            let count: usize = dims.iter().product();
            let last = dims.last().copied().unwrap_or(1);
            args.push(match param.name.as_str() {
                "segments" => Tensor::int(&dims, (0..count).map(|i| (i % last / 37) as i32).collect()),
                "draws" => Tensor::int(
                    &dims,
                    (0..count).map(|_| (random() * f64::from(u32::MAX)) as u32 as i32).collect(),
                ),
                "query_positions" => {
                    let first = self.cached.map_or(0, |s| s as usize - last);
                    Tensor::int(&dims, (0..count).map(|i| (first + i % last) as i32).collect())
                }
                "key_positions" => {
                    let hole = |i: usize| if i % last % 7 == 3 { -1 } else { (i % last) as i32 };
                    Tensor::int(&dims, (0..count).map(hole).collect())
                }
                _ => {
                    let narrow = ty.dtype == DType::Bf16;
                    let number =
                        |x: f64| if narrow { bf16::from_f64(x).to_f64() } else { f64::from(x as f32) };
                    Tensor::float(&dims, (0..count).map(|_| number(2.0 * random() - 1.0)).collect())
                }
            });
        }
        args
    }
}

/// A plan with one program, the launches of a function. Every value has a buffer of its own.
fn plan_of(module: &Module, f: &Function) -> Plan {
    let bind: Vec<Bind> = vec![Bind::Store; f.results.len()];
    let Scheduled { launches, temps } = schedule(module, f, &bind).unwrap_or_else(|e| panic!("{e}"));
    let mut plan = Plan::default();
    let mut buffer = |name: String, dtype: DType, elements: u64| {
        let offset = plan.arena;
        plan.arena += (elements * dtype.bytes()).next_multiple_of(ALIGNMENT);
        let buffer = Buffer { name, space: Space::Io, dtype, shape: vec![elements], instances: 1, offset };
        plan.buffers.push(buffer);
        BufferId(plan.buffers.len() as u32 - 1)
    };
    let mut value = |name: &str, v| {
        let ty = f.ty(v);
        buffer(name.into(), ty.dtype, module.elements(&ty.dims))
    };
    let params: Vec<BufferId> =
        (0..f.params.len()).map(|i| value(&f.params[i].name, dreamc_compiler::ir::Value(i as u32))).collect();
    let results: Vec<BufferId> = f.results.iter().map(|(port, v)| value(&port.name, *v)).collect();
    let temps: Vec<BufferId> =
        temps.iter().map(|t| buffer("t".into(), t.dtype, t.bytes / t.dtype.bytes())).collect();
    let operand = |operand: &LocalOperand| match operand {
        LocalOperand::Index(_) => Operand::Index(Affine::constant(0)),
        LocalOperand::View(view) => {
            let buffer = match view.place {
                Place::Param(i) => params[i as usize],
                Place::Result(i) => results[i as usize],
                Place::Temp(i) => temps[i as usize],
            };
            let instance = Affine::constant(0);
            Operand::Tensor { buffer, instance, offset: view.offset, stride: view.stride }
        }
    };
    let mut steps = vec![];
    for (i, launch) in launches.iter().enumerate() {
        steps.push(Step::Launch(Launch {
            kernel: KernelId(i as u32),
            operands: launch.operands.iter().map(operand).collect(),
            places: launch.places.as_ref().map(operand),
            origin: launch.origin.clone(),
        }));
    }
    plan.kernels = launches.into_iter().map(|launch| launch.kernel).collect();
    plan.programs.insert(ProgramKey::ALONE, Program { steps, variables: 0 });
    plan
}

fn fill(session: &mut dyn Session, plan: &Plan, args: &[Tensor]) {
    for (i, (arg, buffer)) in args.iter().zip(&plan.buffers).enumerate() {
        let id = BufferId(i as u32);
        let floats = |arg: &Tensor| arg.floats().to_vec();
        let written = match buffer.dtype {
            DType::I32 => session.write_at(id, 0, 0, arg.ints()),
            DType::F32 => {
                session.write_at(id, 0, 0, &floats(arg).iter().map(|&x| x as f32).collect::<Vec<_>>())
            }
            DType::Bf16 => session.write_at(
                id,
                0,
                0,
                &floats(arg).iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>(),
            ),
            DType::E4m3 | DType::Packed(_) => panic!("{}: an attention reads no weights", buffer.name),
        };
        written.unwrap_or_else(|e| panic!("{e}"));
    }
}

/// The results of a device, by their names.
fn run(device: &dyn Device, plan: &Plan, args: &[Tensor]) -> Vec<(String, Vec<f64>)> {
    let mut session = device.load(plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}"));
    fill(session.as_mut(), plan, args);
    session.run(ProgramKey::ALONE).unwrap_or_else(|e| panic!("{e}"));
    let read = |(i, buffer): (usize, &Buffer)| {
        let id = BufferId(i as u32);
        let values = match buffer.dtype {
            DType::F32 => session.read_all::<f32>(id).map(|x| x.into_iter().map(f64::from).collect()),
            DType::Bf16 => session.read_all::<bf16>(id).map(|x| x.iter().map(|x| x.to_f64()).collect()),
            DType::I32 | DType::E4m3 | DType::Packed(_) => Ok(vec![]),
        };
        (buffer.name.clone(), values.unwrap_or_else(|e| panic!("{e}")))
    };
    plan.buffers.iter().enumerate().skip(args.len()).map(read).collect()
}

/// Asserts that a device computes what the operations mean; its results.
#[track_caller]
fn holds(device: &dyn Device, case: &Case) -> Vec<(String, Vec<f64>)> {
    let module = case.module();
    let f = &module.functions["f"];
    let args = case.args(&module);
    let found = run(device, &plan_of(&module, f), &args);
    let expected = interpret(&module, f, &args).unwrap_or_else(|e| panic!("{e}"));
    let tolerance = if case.dtype == "bf16" { 3e-2 } else { 2e-5 };
    for (name, expected) in &expected {
        let expected = expected.floats();
        let found = &found.iter().find(|(n, _)| n == name).expect("a buffer of every result").1;
        let largest = expected.iter().filter(|x| x.is_finite()).fold(1e-2f64, |m, x| m.max(x.abs()));
        for (i, (&a, &b)) in found.iter().zip(expected).enumerate() {
            let near = a == b || (a - b).abs() <= tolerance * largest;
            assert!(near, "{name}[{i}] is {a}, should be {b}\n{}", case.text());
        }
    }
    found
}

fn cpu() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(2) })
}

fn alibi() -> Case {
    Case {
        score: Some("sub(s, mul(x0[head], sub(i, j)))"),
        reads: vec!["[n]"],
        moved: vec![0],
        ..Case::default()
    }
}

fn soft_cap() -> Case {
    Case { score: Some("mul(2, tanh(div(s, 2)))"), ..Case::default() }
}

/// The Forgetting Transformer's score.
fn forgetting() -> Case {
    Case {
        score: Some("sub(add(s, x0[i, head]), x1[j, head])"),
        reads: vec!["[b, t, n]", "[b, t, n]"],
        moved: vec![0, 1],
        ..Case::default()
    }
}

/// A learned bias by distance.
fn relative() -> Case {
    Case {
        score: Some("add(s, x0[head, min(sub(i, j), 7)])"),
        reads: vec!["[n, m]"],
        moved: vec![0],
        ..Case::default()
    }
}

/// Scores, masks, and both, with everything that goes with them.
fn cases() -> Vec<Case> {
    let masked = |mask, case: Case| Case { mask: Some(mask), ..case };
    vec![
        alibi(),
        soft_cap(),
        forgetting(),
        relative(),
        // A slope of every query without heads, a key's factor, one number for all.
        Case {
            score: Some("add(mul(s, exp(x0[i])), mul(x1[j], sin(x2)))"),
            reads: vec!["[b, t]", "[b, t]", "[]"],
            moved: vec![0, 1, 2],
            ..Case::default()
        },
        Case {
            score: Some("where(less(sub(i, j), 3), s, add(mul(s, 0.5), x0[sub(i, j)]))"),
            reads: vec!["[m]"],
            moved: vec![0],
            ..Case::default()
        },
        // Windows, prefixes, dilated patterns, blocks.
        masked("less(sub(i, j), 40)", Case::default()),
        masked("max(less(j, 9), less(sub(i, j), 70))", alibi()),
        masked("equal(sub(sub(i, j), mul(3, floor(div(sub(i, j), 3)))), 0)", forgetting()),
        masked("equal(floor(div(i, 64)), floor(div(j, 64)))", relative()),
        masked(
            "less(x0[i], add(x1[j, head], 0.5))",
            Case { reads: vec!["[b, t]", "[b, t, n]"], ..Case::default() },
        ),
        // Documents, a window, dropout, a cache.
        Case { segments: true, words: " window 50".into(), ..alibi() },
        Case { dropout: true, ..forgetting() },
        Case { dropout: true, segments: true, ..masked("less(sub(i, j), 90)", relative()) },
        Case { cached: Some(150), sizes: [2, 40, 4, 2, 16], ..alibi() },
        Case {
            cached: Some(90),
            sizes: [2, 3, 4, 2, 16],
            reads: vec!["[b, t, n]", "[b, s, n]"],
            ..masked("less(sub(i, j), 60)", forgetting())
        },
    ]
}

/// Forward and gradients of everything that a score reads, in both types; no length is a multiple
/// of a block.
#[test]
fn the_cpu_computes_scores_and_masks() {
    for case in cases() {
        holds(&cpu(), &case);
        holds(&cpu(), &Case { dtype: "bf16", ..case });
    }
}

#[test]
fn the_kernels_of_gpus_compute_scores_and_masks() {
    let options = Options { checks: Checks::NONE, ..Options::default() };
    let Some(device) = dreamc_skip::need(PtxDevice::new(options)) else { return };
    for case in cases() {
        let cached = case.cached.map(|_| 13);
        let sizes = [1, if cached.is_some() { 3 } else { 11 }, 4, 2, 8];
        holds(&device, &Case { sizes, cached, ..case.clone() });
    }
}

/// The same on the tensor cores, and by warpgroups, in bf16: formulas are inlined forward, and
/// backward where the score reads nothing.
#[test]
fn the_tensor_cores_compute_scores_and_masks() {
    let options = Options { checks: Checks::NONE, ..Options::default() };
    let Some(device) = dreamc_skip::need(PtxDevice::new(options)) else { return };
    let few = Limits { processors: 2, ..Limits::default() };
    let hopper = PtxDevice::hopper(options).unwrap().with_limits(few);
    let narrow = |case: Case, sizes| Case { sizes, dtype: "bf16", ..case };
    let cases = [soft_cap(), Case { mask: Some("less(sub(i, j), 20)"), ..soft_cap() }];
    for case in cases
        .into_iter()
        .chain([Case { mask: Some("max(less(j, 9), less(sub(i, j), 20))"), ..Case::default() }])
    {
        holds(&device, &narrow(case.clone(), [1, 67, 2, 1, 16]));
        holds(&hopper, &narrow(case, [1, 131, 2, 1, 64]));
    }
    for case in [alibi(), forgetting()] {
        let case = narrow(case, [1, 40, 2, 1, 16]);
        holds(&device, &case);
    }
}

/// A length that changes with every batch needs nothing built ahead.
#[test]
fn every_length_is_right() {
    for tokens in [1, 2, 63, 64, 65, 127, 128, 200] {
        let sizes = [1, tokens, 2, 1, 8];
        let mask = Some("max(less(j, 3), less(sub(i, j), 30))");
        holds(&cpu(), &Case { sizes, mask, ..forgetting() });
    }
}

/// Threads change no bit of any gradient.
#[test]
fn sums_have_one_order() {
    for case in [alibi(), relative(), forgetting()] {
        let module = case.module();
        let (plan, args) = (plan_of(&module, &module.functions["f"]), case.args(&module));
        let of = |threads| run(&CpuDevice::new(CpuOptions { threads: Some(threads) }), &plan, &args);
        assert_eq!(of(1), of(3));
    }
}

/// A mask that hides a whole row: zero, no NaN, and no gradient.
#[test]
fn hidden_rows_are_zero() {
    let mask = Some("less(4, mul(i, less(8, i)))");
    for case in [
        Case { mask, ..alibi() },
        Case { mask, dtype: "bf16", ..forgetting() },
        Case { mask, ..Case::default() },
    ] {
        let results = holds(&cpu(), &case);
        let of = |name: &str| &results.iter().find(|(n, _)| n == name).expect("a result").1;
        assert!(results.iter().filter(|(n, _)| n != "lse").all(|(_, x)| x.iter().all(|x| x.is_finite())));
        let row = 4 * 16;
        assert!(of("o")[..9 * row].iter().all(|&x| x == 0.0));
        assert!(of("dq")[..9 * row].iter().all(|&x| x == 0.0));
        assert!(of("lse")[..9 * 4].iter().all(|&x| x == f64::NEG_INFINITY));
    }
}

/// Ninety-six thousand tokens with a narrow mask: no mask, and no scores, in memory, and blocks
/// that the mask hides are not computed.
#[test]
fn long_sequences_keep_no_mask_in_memory() {
    let tokens = 96 << 10;
    let case = Case {
        sizes: [1, tokens, 1, 1, 8],
        mask: Some("less(sub(i, j), 32)"),
        score: Some("sub(s, mul(x0[head], sub(i, j)))"),
        reads: vec!["[n]"],
        moved: vec![0],
        ..Case::default()
    };
    let module = case.module();
    let f = &module.functions["f"];
    let (plan, args) = (plan_of(&module, f), case.args(&module));
    let bytes = plan.arena + cpu().scratch_bytes(&plan).unwrap();
    // A mask of a bit for each pair would be 1,152 MiB.
    assert!(bytes < 128 << 20, "{} MiB", bytes >> 20);
    let started = Instant::now();
    let results = run(&cpu(), &plan, &args);
    println!("forward and back in {:.2} s", started.elapsed().as_secs_f64());
    let windowed = Case { words: " window 32".into(), mask: None, ..case };
    let module = windowed.module();
    let expected = run(&cpu(), &plan_of(&module, &module.functions["f"]), &args);
    assert_eq!(results.len(), expected.len());
    for ((name, a), (_, b)) in results.iter().zip(&expected) {
        let largest = b.iter().fold(1e-2f64, |m, x| m.max(x.abs()));
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * largest), "{name}");
    }
}

/// Prints how much longer scores take than plain attention, forward and back, at 1,024 tokens;
/// sides alternate.
/// `cargo test --release -p dreamc-device --test attend -- --ignored --nocapture ratios`
#[test]
#[ignore = "a measurement"]
fn ratios_to_plain_attention() {
    let device = cpu();
    let sizes = [1, 1024, 4, 4, 64];
    let mut sides: Vec<_> = [
        ("plain", Case::default()),
        ("alibi", alibi()),
        ("soft-cap", soft_cap()),
        ("forgetting", forgetting()),
    ]
    .into_iter()
    .map(|(name, case)| {
        let module = Case { sizes, ..case.clone() }.module();
        let plan = plan_of(&module, &module.functions["f"]);
        let args = Case { sizes, ..case }.args(&module);
        let mut session = device.load(&plan, &Group::alone()).unwrap();
        fill(session.as_mut(), &plan, &args);
        (name, session, f64::INFINITY)
    })
    .collect();
    for _ in 0..20 {
        for (_, session, best) in &mut sides {
            let started = Instant::now();
            session.run(ProgramKey::ALONE).unwrap();
            *best = best.min(started.elapsed().as_secs_f64());
        }
    }
    let plain = sides[0].2;
    for (name, _, best) in &sides {
        println!("{name:12} {:8.2} ms, {:.2} times plain", 1e3 * best, best / plain);
    }
}

/// Prints what eight documents take of the time of one text as long, forward and back, and what
/// they take where every block of 64 tokens has tokens of two more, so that none is passed over;
/// sides alternate.
/// `cargo test --release -p dreamc-device --test attend -- --ignored --nocapture documents`
#[test]
#[ignore = "a measurement"]
fn shares_of_documents() {
    let device = cpu();
    for tokens in [1024, 2048, 4096, 8192] {
        let documents = |i: u64| i * 8 / tokens;
        let everywhere = |i: u64| match i % 64 {
            0 => 8,
            63 => 9,
            _ => documents(i),
        };
        let mut sides = [None, Some(&documents as &dyn Fn(u64) -> u64), Some(&everywhere)].map(|of| {
            let case = Case { sizes: [1, tokens, 4, 4, 64], segments: of.is_some(), ..Case::default() };
            let module = case.module();
            let f = &module.functions["f"];
            let mut args = case.args(&module);
            if let (Some(of), Some(n)) = (of, f.params.iter().position(|p| p.name == "segments")) {
                args[n] = Tensor::int(&[1, tokens as usize], (0..tokens).map(|i| of(i) as i32).collect());
            }
            let plan = plan_of(&module, f);
            let mut session = device.load(&plan, &Group::alone()).unwrap();
            fill(session.as_mut(), &plan, &args);
            (session, f64::INFINITY)
        });
        for _ in 0..8 {
            for (session, best) in &mut sides {
                let started = Instant::now();
                session.run(ProgramKey::ALONE).unwrap();
                *best = best.min(started.elapsed().as_secs_f64());
            }
        }
        let [whole, passed, all] = sides.map(|(_, best)| 1e3 * best);
        println!(
            "{tokens} tokens: {whole:8.2} ms, documents {passed:8.2} ms ({:.2}), none passed over {all:8.2} ms ({:.2})",
            passed / whole,
            all / whole
        );
    }
}
