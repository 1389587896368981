//! Where the time of a training step goes on the CPU device.
//!
//! `cargo run --release -p dreamc-runtime --example profile -- SPEC|a|b|c|d [batch] [sequence] [threads] [bf16]`
//!
//! `a` to `d` are the four models that dreamc's speed on the CPU is measured by. Prints tokens per second, the share of
//! the machine's product ceiling (a large square product, measured first), and the launches that take most time.

use dreamc_compiler::compiled::Init;
use dreamc_compiler::program::{Kernel, Space};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::spec::Precision;
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::device::{Device, Instrument};
use std::collections::HashMap;
use std::error::Error;

/// The measured models: text, batch, sequence.
fn model(name: &str) -> Option<(String, u64, u64)> {
    let attention = |heads: u64, kv: u64, size: u64| {
        format!("sa: {{sequence: {{heads: {heads}, kv_heads: {kv}, head_size: {size}, qk_norm: rms}}}}")
    };
    let experts = |count: u64, active: u64, size: u64, query: u64| {
        format!("ea: {{experts: {{count: {count}, active: {active}, intermediate: {size}, query: {query}}}}}")
    };
    let text = |vocab: u64, hidden: u64, context: u64, components: &[String], body: &str| {
        let components = components.iter().map(|c| format!("    {c}\n")).collect::<String>();
        format!(
            "model:\n  name: measured\n  vocab: {vocab}\n  hidden: {hidden}\n  context: {context}\n  components:\n{components}  body:\n{body}"
        )
    };
    let da = |size: u64| {
        format!("da: {{depth: {{heads: 1, head_size: {size}, rope: {{base: 500, half_reversed: true}}}}}}")
    };
    Some(match name {
        "a" => {
            let parts = [attention(4, 2, 32), da(32), experts(64, 4, 64, 32)];
            (text(256, 128, 256, &parts, "    - recur: 8\n      layers: [\"(da | sa) > ea\"]\n"), 8, 256)
        }
        "b" => {
            let parts = [attention(4, 2, 32), experts(8, 4, 64, 32)];
            (text(256, 128, 256, &parts, "    - repeat: 8\n      layers: [\"sa > ea\"]\n"), 8, 256)
        }
        "c" => {
            let parts = [attention(8, 4, 64), da(64), experts(96, 8, 256, 64)];
            (text(256, 512, 512, &parts, "    - recur: 12\n      layers: [\"(da | sa) > ea\"]\n"), 4, 512)
        }
        "d" => {
            let mlp = "mlp: {mlp: {intermediate: 2048}}".to_string();
            let parts = [attention(12, 12, 64), mlp];
            (text(50257, 768, 1024, &parts, "    - repeat: 12\n      layers: [\"sa > mlp\"]\n"), 1, 1024)
        }
        _ => return None,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let narrow = arguments.iter().any(|a| a == "bf16");
    arguments.retain(|a| a != "bf16");
    let name = arguments.first().map_or("a", |n| n);
    let number = |i: usize| arguments.get(i).and_then(|n| n.parse::<u64>().ok());
    let (ast, batch, sequence) = match model(name) {
        Some((text, batch, sequence)) => (
            dreamc_dsl::parse(name, &text, dreamc_dsl::Spelling::Yaml).map_err(|e| format!("{e:?}"))?,
            batch,
            sequence,
        ),
        None => (dreamc_dsl::parse_file(name).map_err(|e| format!("{e:?}"))?, 8, 128),
    };
    let (spec, _) = dreamc_dsl::check(&ast, &[]).map_err(|e| format!("{e:?}"))?;
    let (batch, sequence) = (number(1).unwrap_or(batch), number(2).unwrap_or(sequence));
    let device = CpuDevice::new(CpuOptions { threads: number(3).map(|n| n as usize) });
    let narrow = device.narrow(if narrow { Precision::Bf16 } else { Precision::F32 });
    let options = Options { batch, sequence, train: true, narrow, ..Options::default() };
    let compiled = compile(&spec, &options)?;
    let plan = &compiled.plan;
    let mut session = device.load(plan)?;
    println!(
        "{}; {:.1} MB planned and {:.1} MB scratch",
        device.name(),
        plan.arena as f64 / 1e6,
        session.scratch_bytes() as f64 / 1e6
    );

    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    for tensor in &compiled.tensors {
        let n = tensor.shape.iter().product::<u64>() as usize;
        let values: Vec<f32> = match tensor.init {
            Init::Constant(c) => vec![c as f32; n],
            Init::Normal(deviation) => (0..n).map(|_| (random() * deviation * 12f64.sqrt()) as f32).collect(),
        };
        session.write_at(tensor.weight, tensor.instance, 0, &values)?;
    }
    let tokens = batch * sequence;
    for (name, below) in [("ids", spec.model.vocab as f64), ("targets", spec.model.vocab as f64)] {
        let values: Vec<i32> = (0..tokens).map(|_| ((random() + 0.5) * below) as i32).collect();
        if let Some(buffer) = plan.find(name) {
            session.write_at(buffer, 0, 0, &values)?;
        }
    }
    if let Some(buffer) = plan.find("positions") {
        let values: Vec<i32> = (0..tokens).map(|i| (i % sequence) as i32).collect();
        session.write_at(buffer, 0, 0, &values)?;
    }
    let find = |name: &str| plan.find(name).ok_or(format!("no buffer `{name}`"));
    session.write_at(find("loss_scale")?, 0, 0, &[1.0 / tokens as f32])?;
    session.write_at(find("scalars")?, 0, 0, &[1e-4f32, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])?;

    let mut best = f64::INFINITY;
    let programs = ["backward", "norm", "update"];
    for _ in 0..6 {
        let mut seconds = 0.0;
        for program in programs {
            seconds += session.run(program)?.seconds;
        }
        best = best.min(seconds);
    }
    session.instrument(Instrument { count: true, time: true });
    // The least of several runs, launch by launch: other people's work comes and goes.
    let mut by_origin: HashMap<String, (f64, u64, u64)> = HashMap::new();
    for program in programs {
        let mut least = session.run(program)?.by_launch;
        for _ in 0..5 {
            for (least, launch) in least.iter_mut().zip(session.run(program)?.by_launch) {
                least.seconds = least.seconds.min(launch.seconds);
            }
        }
        for launch in least {
            let kernel = describe(plan.kernel(launch.kernel));
            let entry = by_origin.entry(format!("{kernel:18} {}", launch.origin)).or_default();
            entry.0 += launch.seconds;
            entry.1 += launch.multiply_adds;
            entry.2 += launch.count;
        }
    }
    let seconds: f64 = by_origin.values().map(|e| e.0).sum();
    let multiply_adds: u64 = by_origin.values().map(|e| e.1).sum();
    let ceiling = ceiling(&device)?;
    println!(
        "{:.0} tokens/s: {:.1} ms a step, {:.1} GFLOP/s of {ceiling:.1}",
        tokens as f64 / best,
        best * 1e3,
        2e-9 * multiply_adds as f64 / best
    );
    let weights: u64 = plan.buffers.iter().filter(|b| b.space == Space::Weights).map(|b| b.bytes()).sum();
    println!("{:.1} MB of weights; {:.1} ms in launches", weights as f64 / 1e6, seconds * 1e3);
    let mut list: Vec<_> = by_origin.into_iter().collect();
    list.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    let mut by_kernel: HashMap<String, f64> = HashMap::new();
    for (origin, (s, _, _)) in &list {
        *by_kernel.entry(origin.split(' ').next().unwrap_or("").into()).or_default() += s;
    }
    let mut kernels: Vec<_> = by_kernel.into_iter().collect();
    kernels.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (kernel, s) in kernels {
        println!("{:6.2} ms {:4.1} %  {kernel}", s * 1e3, s / seconds * 100.0);
    }
    println!();
    for (origin, (s, m, count)) in list.iter().take(number(4).unwrap_or(40) as usize) {
        let speed = if *m > 0 { format!("{:5.0} GFLOP/s", 2e-9 * *m as f64 / s) } else { " ".repeat(13) };
        println!("{:7.3} ms {:4.1} % {speed} x{count:<4} {origin}", s * 1e3, s / seconds * 100.0);
    }
    Ok(())
}

/// A kernel in a few words.
fn describe(kernel: &Kernel) -> String {
    match kernel {
        Kernel::Rows(k) => {
            let mut ops = String::new();
            for (op, length) in k.ops.iter().zip(&k.lengths) {
                let name = format!("{op:?}");
                let name = name.trim_start_matches("Unary(").trim_start_matches("Binary { op: ");
                ops += &format!(" {}{length}", name.split([' ', '(', ',']).next().unwrap_or(""));
            }
            let stores: Vec<_> = k.outputs.iter().map(|o| format!("{:?}", o.store)).collect();
            format!("Rows {}:{ops} -> {}", k.rows, stores.join(" "))
        }
        Kernel::Product { m, n, k, a, b, .. } => {
            let side = |x: u64| if x == 1 { "" } else { "t" };
            format!("Product {m}x{n}x{k} {}{}", side(a.column), side(b.column))
        }
        Kernel::Grouped { out, inner, transposed, gather, .. } => {
            format!("Grouped {out}x{inner} {transposed} {gather:?}")
        }
        Kernel::GroupedOuter { out, inner, gather, .. } => format!("GroupedOuter {out}x{inner} {gather:?}"),
        other => format!("{other:?}").split([' ', '(']).next().unwrap_or("").into(),
    }
}

/// GFLOP/s of a product large enough to hide everything else.
fn ceiling(device: &CpuDevice) -> Result<f64, Box<dyn Error>> {
    use dreamc_compiler::ir::DType;
    use dreamc_compiler::program::{
        Affine, Buffer, BufferId, KernelId, Launch, Matrix, Operand, Plan, Program, Step,
    };
    let n = 1024u64;
    let buffer = |i: u64| Buffer {
        name: i.to_string(),
        space: Space::Io,
        dtype: DType::F32,
        shape: vec![n, n],
        instances: 1,
        offset: i * 4 * n * n,
    };
    let operands = [0, 1, 2].map(|i| Operand::Tensor {
        buffer: BufferId(i),
        instance: Affine::default(),
        offset: 0,
        stride: 0,
    });
    let layout = Matrix { row: n, column: 1 };
    let kernel = Kernel::Product { m: n, n, k: n, a: layout, b: layout, accumulate: false };
    let launch =
        Launch { kernel: KernelId(0), operands: operands.to_vec(), places: None, origin: "ceiling".into() };
    let program = Program { steps: vec![Step::Launch(launch)], variables: 0 };
    let plan = Plan {
        buffers: (0..3).map(buffer).collect(),
        kernels: vec![kernel],
        programs: [("main".to_string(), program)].into_iter().collect(),
        arena: 12 * n * n,
    };
    let mut session = device.load(&plan)?;
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        best = best.min(session.run("main")?.seconds);
    }
    Ok(2e-9 * (n * n * n) as f64 / best)
}
