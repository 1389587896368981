//! The generated kernels, interpreted, against the CPU device and the reference: gradients,
//! training steps, generation.

use crate::support::losses::losses_apart;
use crate::support::run::{Run, options};
use crate::support::{Golden, distance, error, every_golden, golden, goldens, load, models, specs};
use dreamc_compiler::codegen::Limits;
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::ir::{Attention, DType, Mask, interpret};
use dreamc_compiler::op::Bits;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{
    Affine, AttentionShape, Buffer, BufferId, DepthShape, Kernel, KernelId, Launch, Matrix, Operand, Plan,
    Program, ProgramKey, RowInput, RowKernel, RowOp, RowOutput, RowStore, Space, Step, kernel,
};
use dreamc_compiler::{Cache, Compiled, Options, compile};
use dreamc_device::agree::{Agreement, apart, compare, number};
use dreamc_device::cpu::CpuDevice;
use dreamc_device::cuda::CudaDevice;
use dreamc_device::ptx::{self, Checks, PtxDevice, Schedule};
use dreamc_device::statements::StatementDevice;
use dreamc_device::{Device, DeviceError, Element, Group, Instrument, Session};
use dreamc_dsl::spec::Stream;
use dreamc_skip::skip;

/// The device, or a skipped test.
fn device(options: ptx::Options) -> Option<PtxDevice> {
    dreamc_skip::need(PtxDevice::new(options))
}

fn fast() -> ptx::Options {
    ptx::Options { checks: Checks::NONE, ..ptx::Options::default() }
}

#[test]
fn logits_losses_and_gradients_agree_with_the_cpu_and_the_reference() {
    let Some(device) = device(fast()) else { return };
    let cpu = CpuDevice::default();
    for golden in every_golden() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let begun = std::time::Instant::now();
        let mut run = Run::new(&golden, &options(b, n), &device);
        let loaded = begun.elapsed().as_secs_f64();
        let mut other = Run::new(&golden, &options(b, n), &cpu);
        let loss = run.backward(&golden, ids.ints(), b, n);
        println!("{}: loaded in {loaded:.2} s, all {:.2} s", golden.name, begun.elapsed().as_secs_f64());
        other.backward(&golden, ids.ints(), b, n);
        let bound = golden.bounds(20.0);
        let e = error(&run.read("logits"), golden.tensors["logits"].floats());
        assert!(e < 1e-5, "{}: logits differ by {e}", golden.name);
        let e = error(&[loss], golden.tensors["loss"].floats());
        assert!(e < 1e-5, "{}: loss differs by {e}", golden.name);
        for ((name, found), (_, expected)) in run.gradients().into_iter().zip(other.gradients()) {
            let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            // Gradients that are zero by nature hold rounding noise.
            let e = if largest(&expected) < 1e-8 { largest(&found) } else { distance(&found, &expected) };
            assert!(e < bound(&name), "{}: gradient of {name} differs by {e}", golden.name);
        }
    }
}

/// Writes the numbers of a buffer, made of their places.
pub(crate) fn write(
    session: &mut dyn Session,
    id: BufferId,
    b: &Buffer,
    value: impl Fn(u64) -> f32,
    int: impl Fn(u64) -> i32,
) -> Result<(), DeviceError> {
    let count = b.elements();
    match b.dtype {
        DType::Bf16 => {
            let all: Vec<_> = (0..count).map(|j| half::bf16::from_f32(value(j))).collect();
            session.write_at(id, 0, 0, &all)
        }
        DType::F32 | DType::E4m3 | DType::Packed(_) => {
            session.write_at(id, 0, 0, &(0..count).map(value).collect::<Vec<_>>())
        }
        DType::I32 => session.write_at(id, 0, 0, &(0..count).map(int).collect::<Vec<_>>()),
    }
}

/// Weights and one batch of a golden case.
fn fill(golden: &Golden, compiled: &Compiled, session: &mut dyn Session) -> Result<(), DeviceError> {
    for tensor in &compiled.tensors {
        let values = golden.tensors[&format!("weights.{}", tensor.name)].floats();
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        session.write_at(tensor.weight, tensor.instance, 0, &values)?;
    }
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let (inputs, targets) = golden.batch(ids.ints(), n);
    fn put<T: Element>(
        compiled: &Compiled,
        session: &mut dyn Session,
        name: &str,
        values: &[T],
    ) -> Result<(), DeviceError> {
        compiled.plan.find(name).map_or(Ok(()), |id| session.write_at(id, 0, 0, values))
    }
    put(compiled, session, "ids", &inputs)?;
    put(compiled, session, "targets", &targets)?;
    put(compiled, session, "positions", &(0..b * n).map(|i| (i % n) as i32).collect::<Vec<_>>())?;
    put(compiled, session, "loss_scale", &[1.0 / (b * n) as f32])?;
    put(compiled, session, "aux_scale", &[1.0f32])?;
    let scalars = [
        ("learning_rate", 1e-3f32),
        ("first_correction", 10.0),
        ("second_correction", 1000.0),
        ("clip", 1.0),
    ];
    scalars.into_iter().try_for_each(|(name, value)| put(compiled, session, name, &[value]))
}

/// Every launch of a golden case's programs on two devices, each from the same memory.
fn side_by_side(golden: &Golden, a: &dyn Device, b: &dyn Device) -> Vec<Agreement> {
    let ids = &golden.tensors["ids"];
    let compiled = compile(&golden.spec, &options(ids.dims[0], ids.dims[1] - 1)).unwrap();
    let of = |program: ProgramKey| {
        compare(&compiled.plan, program, a, b, &|session| fill(golden, &compiled, session))
            .unwrap_or_else(|e| panic!("{}: {e}", golden.name))
    };
    [ProgramKey::BACKWARD, ProgramKey::NORM, ProgramKey::UPDATE, ProgramKey::EVALUATE]
        .into_iter()
        .flat_map(of)
        .collect()
}

#[test]
fn every_launch_agrees_with_the_cpu_from_the_same_memory() {
    let Some(device) = device(fast()) else { return };
    let (mut launches, mut equal) = (0, 0);
    // After twenty normalisations a cotangent of `mhc` is zero but for rounding, whose relative
    // difference says nothing; its gradients are compared above.
    for golden in every_golden().into_iter().filter(|golden| golden.name != "mhc") {
        for launch in side_by_side(&golden, &CpuDevice::default(), &device) {
            let Agreement { origin, kernel, difference, buffer, .. } = &launch;
            // A launch rounds as often as its sums are long; none of these is longer than some
            // hundred terms.
            let at = format!("{}, {origin}, {kernel}: {buffer} differs by {difference}", golden.name);
            // Of lanes, whose reading weights have a gradient near zero, one kernel is forward and
            // back.
            let lanes = matches!(golden.spec.model.stream, Stream::Lanes { .. });
            let bound = if lanes { 5e-3 } else { 2e-5 };
            assert!(*difference < bound, "{at}");
            launches += 1;
            equal += usize::from(launch.equal);
        }
    }
    println!("{launches} launches, {equal} of them equal to the last bit");
    assert!(launches > 1000 && equal > launches / 4, "{launches} launches, {equal} equal");
}

/// Where there is a GPU: the PTX that the device interprets, translated by the driver, launch by
/// launch. Differences may be in the last bits of `.approx` functions and of tensor cores' sums.
#[test]
fn a_gpu_does_the_same_with_the_same_ptx() {
    let Some(device) = device(fast()) else { return };
    let gpu = match CudaDevice::from_ptx(0, false) {
        Ok(gpu) => gpu,
        Err(error) => return skip(error),
    };
    let mut worst = Worst::default();
    for golden in goldens() {
        side_by_side(&golden, &device, &gpu).iter().for_each(|launch| enter(&mut worst, launch));
    }
    report(worst);
}

/// The same of what Hopper alone runs: `wgmma`, and operands that the copy engine brings.
#[test]
fn a_gpu_does_the_same_with_hoppers_own_ptx() {
    let (device, gpu) = match (PtxDevice::hopper(fast()), CudaDevice::from_ptx(0, true)) {
        (Ok(device), Ok(gpu)) => (device, gpu),
        (Err(error), _) | (_, Err(error)) => return skip(error),
    };
    let (products, fill) = large_products(false);
    let products = compare(&products, ProgramKey::ALONE, &device, &gpu, &fill).unwrap();
    let (attention, fill) = large_attention(false);
    let attention = compare(&attention, ProgramKey::ALONE, &device, &gpu, &fill).unwrap();
    let mut worst = Worst::default();
    products.iter().chain(&attention).for_each(|launch| enter(&mut worst, launch));
    report(worst);
}

/// Launches of each kind, how many of them are equal, and how far the others are apart.
type Worst = std::collections::BTreeMap<String, (usize, usize, f64)>;

fn enter(worst: &mut Worst, launch: &Agreement) {
    let kind = launch.kernel.split(' ').next().unwrap_or_default();
    let entry = worst.entry(kind.into()).or_default();
    *entry = (entry.0 + 1, entry.1 + usize::from(launch.equal), entry.2.max(launch.difference));
}

fn report(worst: Worst) {
    for (kind, (count, equal, difference)) in &worst {
        println!("{kind:<24} {count:>6} launches  {equal:>6} equal  differ by {difference:.1e} at most");
    }
    for (kind, (_, _, difference)) in worst {
        // Two roundings to bf16 of sums that differ in their last bits are one unit of bf16 apart,
        // 2^-7 of a number at most.
        let bound = if kind.contains("attention") { 1.0 / 64.0 } else { 1.0 / 127.0 };
        assert!(difference < bound, "{kind} differs by {difference}");
    }
}

/// Loss by step, and the weights at the end.
fn train(golden: &Golden, narrow: Narrow, device: &dyn Device, steps: usize) -> (Vec<f64>, Vec<f64>) {
    let all = &golden.tensors["steps.ids"];
    let (b, n) = (all.dims[1], all.dims[2] - 1);
    let mut run = Run::new(golden, &Options { narrow, ..options(b, n) }, device);
    let batches = all.ints().chunks_exact(b * (n + 1)).take(steps).enumerate();
    let losses = batches.map(|(step, ids)| run.step(golden, ids, b, n, step as i32)).collect();
    (losses, run.tensors().into_values().flatten().collect())
}

#[test]
fn training_steps_agree_with_the_reference() {
    let Some(device) = device(fast()) else { return };
    for golden in every_golden() {
        let (losses, _) = train(&golden, Narrow::Nothing, &device, 4);
        let expected = golden.tensors["steps.losses"].floats();
        for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
            let e = error(&[*loss], &[*expected]);
            // AdamW magnifies rounding from step to step; the CPU has the same bound.
            assert!(e < 1e-3, "{}: loss of step {step} differs by {e}", golden.name);
        }
    }
}

#[test]
fn no_schedule_finds_anything_or_changes_a_bit() {
    if device(fast()).is_none() {
        return;
    }
    // In bf16 those that have what others have not: soft-caps and windows, one expert of several,
    // attention along depth.
    let narrow = goldens().into_iter().filter(|g| ["gemma", "switch", "dr_da"].contains(&g.name.as_str()));
    let all = goldens().into_iter().map(|g| (g, Narrow::Nothing)).chain(narrow.map(|g| (g, Narrow::Storage)));
    for (golden, narrow) in all {
        let mut seen: Option<(Vec<f64>, Vec<f64>)> = None;
        for (schedule, threads) in [(Schedule::Forward, 2), (Schedule::Reverse, 1), (Schedule::Random(7), 1)]
        {
            let options = ptx::Options { schedule, threads, ..ptx::Options::default() };
            let Some(device) = device(options) else { return };
            let found = train(&golden, narrow, &device, 1);
            match &seen {
                None => seen = Some(found),
                Some(first) => {
                    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(found.0, first.0, "{}: {narrow:?}, {schedule:?}", golden.name);
                    assert_eq!(bits(&found.1), bits(&first.1), "{}: {narrow:?}, {schedule:?}", golden.name);
                }
            }
        }
    }
}

/// How far the logits of each token that a model writes with caches, in chunks and one by one, are
/// from the reference's.
fn cached(golden: &Golden, narrow: Narrow, device: &dyn Device) -> (Vec<f64>, Compiled) {
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let (inputs, _) = golden.batch(ids.ints(), n);
    let expected = golden.written();
    let vocab = expected.len() / (b * n);
    let (places, chunk) = (n + 2, 3);
    let cache =
        Some(Cache { places: places as u64, chunk: chunk as u64, slack: f64::INFINITY, every: false });
    let mut run = Run::new(golden, &Options { train: false, cache, narrow, ..options(b, n) }, device);
    if run.compiled.plan.programs.contains_key(&ProgramKey::PREPARE) {
        run.run(ProgramKey::PREPARE);
    }
    run.empty_caches();
    let mut errors = vec![];
    let mut done = 0;
    while done < n {
        let (program, width) = if done == 0 { (ProgramKey::PREFILL, chunk) } else { (ProgramKey::DECODE, 1) };
        let at = |row: usize, i: usize| (row * width + i, done + i);
        let (mut tokens, mut positions) = (vec![0; b * width], vec![0; b * width]);
        let mut keys = vec![-1; b * places];
        for row in 0..b {
            for i in 0..width {
                let (slot, position) = at(row, i);
                tokens[slot] = inputs[row * n + position];
                positions[slot] = position as i32;
            }
            (0..done + width).for_each(|key| keys[row * places + key] = key as i32);
        }
        run.write(&format!("{program}.ids"), &tokens);
        run.write(&format!("{program}.positions"), &positions);
        run.write(&format!("{program}.slots"), &positions);
        run.write("key_positions", &keys);
        // Of a chunk each row asks for another token.
        let asked: Vec<i32> = (0..b).map(|row| (row % width) as i32).collect();
        if program == ProgramKey::PREFILL {
            run.write("prefill.asked", &asked);
        }
        run.run(program);
        let logits = run.read(&format!("{program}.logits"));
        assert_eq!(logits.len(), b * vocab);
        for row in 0..b {
            let (_, position) = at(row, asked[row] as usize);
            let expected = &expected[(row * n + position) * vocab..][..vocab];
            errors.push(error(&logits[row * vocab..][..vocab], expected));
        }
        done += width;
    }
    errors.sort_by(f64::total_cmp);
    (errors, run.compiled)
}

#[test]
fn cached_generation_equals_uncached() {
    let Some(device) = device(fast()) else { return };
    for golden in every_golden() {
        let (errors, _) = cached(&golden, Narrow::Nothing, &device);
        let worst = errors[errors.len() - 1];
        // `nested` magnifies what goes in, as the tests of the CPU say.
        let bound = if golden.name == "nested" { 5e-5 } else { 1e-5 };
        assert!(worst < bound, "{}: cached logits differ by {worst}", golden.name);
    }
}

/// Weights that products read, and caches of keys and values or latents, are bf16, and logits are
/// off by what that rounds.
#[test]
fn writing_in_bf16_follows_f32() {
    let Some(device) = device(fast()) else { return };
    for golden in goldens().into_iter().chain([golden("latent")]) {
        let (errors, compiled) = cached(&golden, Narrow::Storage, &device);
        let (middle, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        println!("{}: logits written in bf16 are off by {middle:.1e}, at worst {worst:.1e}", golden.name);
        // Caches of attention along the sequence outlive a program; those along depth do not, and
        // are f32.
        let kept = |b: &&Buffer| {
            let cached = [".keys", ".values", ".latents"];
            b.space == Space::State && cached.iter().any(|part| b.name.ends_with(part))
        };
        let wide = |b: &&Buffer| b.dtype != DType::Bf16;
        let wide: Vec<_> = compiled.plan.buffers.iter().filter(kept).filter(wide).map(|b| &b.name).collect();
        assert!(wide.is_empty(), "{}: {wide:?} are not bf16", golden.name);
        // A token that an expert or a router chose differently has other logits; most tokens do
        // not. In `prelude_core_coda` nearly half have.
        assert!(middle > 1e-5 && middle < 7e-2, "{}: logits differ by {middle}", golden.name);
    }
}

#[test]
fn multiply_adds_are_those_that_the_cpu_counts() {
    let Some(device) = device(fast()) else { return };
    let golden = goldens().into_iter().find(|g| g.name == "dr_da").unwrap();
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let count = |device: &dyn Device| {
        let mut run = Run::new(&golden, &options(b, n), device);
        run.session.instrument(Instrument { count: true, time: false });
        run.backward(&golden, ids.ints(), b, n);
        let stats = run.run(ProgramKey::BACKWARD);
        stats.by_launch.iter().map(|l| (l.origin.clone(), l.count, l.multiply_adds)).collect::<Vec<_>>()
    };
    assert_eq!(count(&device), count(&CpuDevice::default()));
}

fn bf16(b: usize, n: usize) -> Options {
    Options { narrow: Narrow::Storage, ..options(b, n) }
}

#[test]
fn steps_in_bf16_follow_those_in_f32() {
    let Some(device) = device(fast()) else { return };
    for golden in goldens() {
        let all = &golden.tensors["steps.ids"];
        let (b, n) = (all.dims[1], all.dims[2] - 1);
        let mut run = Run::new(&golden, &bf16(b, n), &device);
        let expected = golden.tensors["steps.losses"].floats();
        let batches = all.ints().chunks_exact(b * (n + 1)).take(4).enumerate();
        for (step, ids) in batches {
            let loss = run.step(&golden, ids, b, n, step as i32);
            let e = error(&[loss], &[expected[step]]);
            println!("{} step {step}: {loss:.6}, f64 {:.6}, off by {e:.1e}", golden.name, expected[step]);
            // An operand is off by 2^-9 of itself, a sum of many by less; an expert chosen
            // otherwise by more.
            assert!(e > 0.0 && e < 5e-2, "{}: loss of step {step} differs by {e}", golden.name);
        }
    }
}

/// A gradient by tensor, of a batch, with every choice (experts, tokens) as `chosen` says; where
/// that is empty, it is filled with what was chosen. Every weight is off by a share of itself,
/// drawn from a seed, of `noise` at most.
fn gradient_of_choices(
    golden: &Golden,
    narrow: Narrow,
    device: &dyn Device,
    (noise, seed): (f64, u64),
    chosen: &mut Vec<Vec<i32>>,
) -> Vec<(String, Vec<f64>)> {
    let choice = |kernel: &Kernel| match kernel {
        Kernel::Route(_) | Kernel::TopTokens(_) | Kernel::Decide(_) => Some(1usize),
        _ => None,
    };
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let compiled = compile(&golden.spec, &Options { narrow, ..options(b, n) }).unwrap();
    let (apart, launches) = apart(&compiled.plan, ProgramKey::BACKWARD).unwrap();
    let mut session = device.load(&apart, &Group::alone()).unwrap();
    fill(golden, &compiled, session.as_mut()).unwrap();
    let mut random = dreamc_compiler::ir::random::Rng::new(seed);
    for t in &compiled.tensors {
        let mut w = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
        session.read_at(t.weight, t.instance, 0, &mut w).unwrap();
        w.iter_mut().for_each(|w| *w *= (1.0 + random.between(-noise, noise)) as f32);
        session.write_at(t.weight, t.instance, 0, &w).unwrap();
    }
    let record = chosen.is_empty();
    let mut before = std::mem::take(chosen).into_iter();
    for (i, launch) in launches.iter().enumerate() {
        session.run(number(i)).unwrap();
        let Some(operand) = choice(compiled.plan.kernel(launch.kernel)) else { continue };
        let Operand::Tensor { buffer, instance, offset, .. } = &launch.operands[operand] else { continue };
        let count = (compiled.plan.buffer(*buffer).elements() - offset) as usize;
        let mut values = vec![0i32; count];
        session.read_at(*buffer, instance.at(&[]), *offset, &mut values).unwrap();
        if !record {
            values = before.next().expect("as many choices");
            session.write_at(*buffer, instance.at(&[]), *offset, &values).unwrap();
        }
        chosen.push(values);
    }
    let mut all = vec![];
    for t in &compiled.tensors {
        let Some(gradient) = t.gradient else { continue };
        let mut g = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
        session.read_at(gradient, t.instance, 0, &mut g).unwrap();
        all.push((t.name.clone(), g.into_iter().map(f64::from).collect()));
    }
    all
}

fn flat(gradients: &[(String, Vec<f64>)]) -> Vec<f64> {
    gradients.iter().flat_map(|(_, g)| g).copied().collect()
}

/// The cosine of the gradients in bf16 and in f32 on the CPU where both choose as f32 did.
fn cosine_of_equal_choices(golden: &Golden, device: &dyn Device) -> f64 {
    let (cpu, mut chosen) = (&CpuDevice::default(), vec![]);
    let expected = gradient_of_choices(golden, Narrow::Nothing, cpu, (0.0, 0), &mut chosen);
    let found = gradient_of_choices(golden, Narrow::Storage, device, (0.0, 0), &mut chosen);
    cosine(&flat(&found), &flat(&expected))
}

/// How far a gradient moves, relative to its length, where weights are off as bf16 ones may be and
/// all else is f32, choices being equal: `nested` magnifies that as no other model does, and so it
/// does what bf16 rounds.
#[test]
#[ignore = "an experiment that takes a minute"]
fn nested_magnifies_what_rounding_does_to_weights() {
    let cpu = &CpuDevice::default();
    let mut moved: Vec<(f64, String)> = vec![];
    for golden in goldens() {
        let mut chosen = vec![];
        let expected = gradient_of_choices(&golden, Narrow::Nothing, cpu, (0.0, 0), &mut chosen);
        let mut by = |bits| {
            let mut draws: Vec<(f64, f64, String)> = (1..=9)
                .map(|seed| {
                    let noise = (0.5f64.powi(bits), seed);
                    let found = gradient_of_choices(&golden, Narrow::Nothing, cpu, noise, &mut chosen);
                    let each = found.iter().zip(&expected);
                    let far = each.map(|((name, a), (_, b))| (distance(a, b), name.clone()));
                    let (_, name) = far.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
                    let (found, expected) = (flat(&found), flat(&expected));
                    (distance(&found, &expected), cosine(&found, &expected), name)
                })
                .collect();
            draws.sort_by(|a, b| a.0.total_cmp(&b.0));
            draws.swap_remove(4)
        };
        for bits in [7, 8, 12, 9] {
            let (far, cosine, name) = by(bits);
            println!("{}: 2^-{bits}: moved by {far:.1e}, cosine {cosine:.4}, most {name}", golden.name);
            if bits == 9 {
                moved.push((far, golden.name.clone()));
            }
        }
    }
    moved.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (middle, (most, name)) = (moved[moved.len() / 2].0, &moved[moved.len() - 1]);
    println!("the median model is moved by {middle:.1e}, {name} by {most:.1e}");
    assert!(name == "nested" && *most > 4.0 * middle, "{moved:?}");
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// How often each expert was chosen since the last step.
fn choices(run: &Run) -> Vec<f32> {
    let counts: std::collections::BTreeSet<_> =
        run.compiled.tensors.iter().filter_map(|t| t.counts).collect();
    counts.into_iter().flat_map(|id| run.session.read_all::<f32>(id).unwrap()).collect()
}

#[test]
fn gradients_in_bf16_point_where_those_in_f32_do() {
    let Some(device) = device(fast()) else { return };
    let mut alike = 0;
    for golden in goldens() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let mut run = Run::new(&golden, &bf16(b, n), &device);
        let mut other = Run::new(&golden, &options(b, n), &CpuDevice::default());
        run.backward(&golden, ids.ints(), b, n);
        other.backward(&golden, ids.ints(), b, n);
        let cosine = cosine(&flat(&run.gradients()), &flat(&other.gradients()));
        // Where two logits are closer than bf16 tells, another expert is chosen, and the gradient
        // is another one; `nested` magnifies what goes in, as the tests of the CPU say.
        let same = choices(&run) == choices(&other);
        println!("{}: cosine {cosine:.5}, experts {}", golden.name, if same { "the same" } else { "differ" });
        alike += usize::from(same);
        if !same || golden.name == "nested" {
            println!("  with equal choices {:.5}", cosine_of_equal_choices(&golden, &device));
        }
        assert!(
            cosine > if same && golden.name != "nested" { 0.985 } else { 0.7 },
            "{}: cosine {cosine}",
            golden.name
        );
    }
    assert!(alike >= 4, "{alike} models choose the same experts");
}

/// A model whose rows are multiples of 16 bytes, so that copies are asynchronous: checked, under
/// three schedules.
#[test]
fn bf16_with_wide_copies_is_right_and_clean() {
    if device(fast()).is_none() {
        return;
    }
    let spec = load("examples/tiny-dr-da.yaml");
    let (b, n) = (1, 24);
    let values = |count: u64, seed: u64| -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2027) as f32 / 20270.0 - 0.05).collect()
    };
    let run = |options: &Options, device: &dyn Device| {
        let compiled = compile(&spec, options).unwrap();
        let mut session = device.load(&compiled.plan, &Group::alone()).unwrap();
        for (i, t) in compiled.tensors.iter().enumerate() {
            let mut w = values(t.shape.iter().product(), i as u64);
            // Gains are about one.
            if t.shape.len() == 1 {
                w.iter_mut().for_each(|w| *w += 1.0);
            }
            session.write_at(t.weight, t.instance, 0, &w).unwrap();
        }
        let ids = |offset: usize| (0..b * n).map(|i| ((i + offset) * 37 % 256) as i32).collect::<Vec<_>>();
        let mut put = |name: &str, values: &[i32]| {
            if let Some(id) = compiled.plan.find(name) {
                session.write_at(id, 0, 0, values).unwrap();
            }
        };
        put("ids", &ids(0));
        put("targets", &ids(1));
        put("positions", &(0..b * n).map(|i| (i % n) as i32).collect::<Vec<_>>());
        session.write_at(compiled.plan.find("loss_scale").unwrap(), 0, 0, &[1.0 / (b * n) as f32]).unwrap();
        if let Some(id) = compiled.plan.find("aux_scale") {
            session.write_at(id, 0, 0, &[1.0f32]).unwrap();
        }
        session.run(ProgramKey::BACKWARD).unwrap_or_else(|e| panic!("{e}"));
        let loss = session.read_all::<f32>(compiled.plan.find("loss").unwrap()).unwrap()[0];
        let mut gradients: Vec<f32> = vec![];
        for t in &compiled.tensors {
            let mut g = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
            if let Some(gradient) = t.gradient {
                session.read_at(gradient, t.instance, 0, &mut g).unwrap();
            }
            gradients.extend(g);
        }
        (loss, gradients)
    };
    let (loss, expected) = run(&options(b, n), &CpuDevice::default());
    let mut seen: Option<Vec<u32>> = None;
    for (schedule, threads) in [(Schedule::Forward, 2), (Schedule::Reverse, 1), (Schedule::Random(3), 1)] {
        let Some(device) = device(ptx::Options { schedule, threads, ..ptx::Options::default() }) else {
            return;
        };
        let compiled = compile(&spec, &bf16(b, n)).unwrap();
        let texts = dreamc_device::gpu::sources(&compiled.plan, "sm_80", Limits::default()).unwrap();
        assert!(
            texts.iter().filter(|t| t.text.contains("Matrices<") && t.text.contains(", true>")).count() > 5
        );
        let (found, gradients) = run(&bf16(b, n), &device);
        assert!((found - loss).abs() < 1e-2 * loss, "{found} where f32 gives {loss}");
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let lengths = dot(&gradients, &gradients) * dot(&expected, &expected);
        let cosine = dot(&gradients, &expected) / lengths.sqrt();
        println!("{schedule:?}: loss {found}, f32 {loss}, cosine of gradients {cosine:.5}");
        assert!(cosine > 0.98, "cosine {cosine}");
        let bits: Vec<u32> = gradients.iter().map(|g| g.to_bits()).collect();
        assert!(seen.get_or_insert_with(|| bits.clone()) == &bits, "{schedule:?} gives other bits");
    }
}

/// Devices that run row kernels as GPUs do: on PTX where NVRTC is there, and as statements.
fn of_rows(options: ptx::Options) -> Vec<Box<dyn Device>> {
    let statements: Box<dyn Device> = Box::new(StatementDevice::of_blocks());
    let ptx = device(options).map(|device| Box::new(device) as Box<dyn Device>);
    ptx.into_iter().chain([statements]).collect()
}

/// Rows too long for a block: statistics in scratch memory, sums by column, results by element.
#[test]
fn rows_of_any_length() {
    use dreamc_compiler::ir::DType;
    use dreamc_compiler::program::{
        Affine, Broadcast, Buffer, BufferId, Kernel, KernelId, Launch, Operand, Plan, Program, RowInput,
        RowKernel, RowOp, RowOutput, RowStore, Space, Step,
    };
    let devices = of_rows(fast());
    // Passes; a warp for a row, in shares of a block that sums; the last share is not full; a block
    // for a row.
    for (rows, length, passes) in [(66, 50_000, 3), (3, 70_000, 3), (1101, 1000, 2), (40, 1000, 2)] {
        let row = |dtype| RowInput::Row { length, dtype };
        let broadcast = Broadcast { outer: 1, size: length, inner: 1 };
        let kernel = RowKernel {
            rows,
            inputs: vec![row(DType::F32), RowInput::Shared { length, dtype: DType::F32 }],
            ops: vec![
                RowOp::Load { input: 0 },
                RowOp::Rms { x: 0, size: length, eps: Bits(1e-6) },
                RowOp::Load { input: 1 },
                RowOp::Binary {
                    op: dreamc_compiler::ir::Binary::Mul,
                    a: 1,
                    b: 2,
                    broadcast,
                    small_first: false,
                },
            ],
            lengths: vec![length; 4],
            outputs: vec![
                RowOutput { array: 3, dtype: DType::F32, store: RowStore::Row },
                RowOutput { array: 1, dtype: DType::F32, store: RowStore::AddSum },
            ],
        };
        let mut plan = Plan { kernels: vec![Kernel::Rows(kernel)], ..Plan::default() };
        for (name, shape) in
            [("x", vec![rows, length]), ("g", vec![length]), ("y", vec![rows, length]), ("s", vec![length])]
        {
            let offset = plan.arena;
            plan.arena += (shape.iter().product::<u64>() * 4).next_multiple_of(256);
            let name = name.to_string();
            plan.buffers.push(Buffer {
                name,
                space: Space::Io,
                dtype: DType::F32,
                shape,
                instances: 1,
                offset,
            });
        }
        let at = |i: u32, stride| Operand::Tensor {
            buffer: BufferId(i),
            instance: Affine::default(),
            offset: 0,
            stride,
        };
        let operands = vec![at(0, length), at(1, 0), at(2, length), at(3, 0)];
        let steps = vec![Step::Launch(Launch {
            kernel: KernelId(0),
            operands,
            places: None,
            origin: "long rows".into(),
        })];
        plan.programs.insert(ProgramKey::ALONE, Program { steps, variables: 0 });
        let fill = |session: &mut dyn Session| {
            let values = |count: u64, seed: u64| -> Vec<f32> {
                (0..count).map(|i| ((i * 7919 + seed) % 1013) as f32 / 506.5 - 1.0).collect()
            };
            session.write_at(BufferId(0), 0, 0, &values(rows * length, 1))?;
            session.write_at(BufferId(1), 0, 0, &values(length, 2))?;
            session.write_at(BufferId(3), 0, 0, &values(length, 3))
        };
        for device in &devices {
            // Statements take a second for each 100,000 elements.
            if rows * length > 250_000 && device.name().starts_with("statements") {
                continue;
            }
            let found =
                compare(&plan, ProgramKey::ALONE, &CpuDevice::default(), device.as_ref(), &fill).unwrap();
            assert!(found[0].difference < 1e-5, "{}: {found:?}", device.name());
        }
        let texts = dreamc_device::gpu::sources(&plan, "sm_80", Limits::default()).unwrap();
        assert_eq!(texts[0].passes.len(), passes, "{}", texts[0].text);
    }
}

/// Rows whose elements a thread takes four or eight at a time, at any address and for any
/// operation: groups that no such number divides, slices that begin between, operands that are not
/// aligned to 16 bytes, results over operands.
#[test]
fn adjacent_elements_are_those_of_one_at_a_time() {
    use DType::{Bf16, F32};
    use dreamc_compiler::ir::{Binary, Positions, Reduce, Rope, Unary};
    use dreamc_compiler::program::Broadcast;
    let devices = of_rows(ptx::Options::default());
    let kernel = |rows: u64, n: u64, size: u64, start: u64, dtype: DType| {
        let groups = n / size;
        let rope =
            Rope { base: 100.0, positions: Positions::Tokens, scaling: None, inverse: false, chosen: None };
        let same = |n| Broadcast { outer: 1, size: n, inner: 1 };
        let mul = |a, b, broadcast| RowOp::Binary { op: Binary::Mul, a, b, broadcast, small_first: false };
        let add = |a, b, broadcast| RowOp::Binary { op: Binary::Add, a, b, broadcast, small_first: false };
        let (across, along) =
            (Broadcast { outer: groups, size, inner: 1 }, Broadcast { outer: 1, size: groups, inner: size });
        let ops = vec![
            (RowOp::Load { input: 0 }, n),
            (RowOp::Load { input: 1 }, n),
            (RowOp::Load { input: 2 }, n),
            (mul(0, 2, same(n)), n),
            (RowOp::Rms { x: 3, size, eps: Bits(1e-6) }, n),
            (RowOp::Rope { x: 4, size, rope, position: 3, depths: 0 }, n),
            (RowOp::Slice { x: 5, size, start: 0 }, groups * start),
            (RowOp::Slice { x: 5, size, start }, n - groups * start),
            (RowOp::Concat { parts: vec![7, 6], groups }, n),
            (RowOp::Softmax { x: 8, size }, n),
            (
                RowOp::Reduce {
                    op: Reduce::Sum,
                    x: 1,
                    over: Broadcast { outer: 1, size: groups, inner: size },
                },
                size,
            ),
            (
                RowOp::Reduce { op: Reduce::Mean, x: 1, over: Broadcast { outer: groups, size, inner: 1 } },
                groups,
            ),
            (mul(9, 10, across), n),
            (add(12, 11, along), n),
            (RowOp::Pick { table: 13, chosen: 4 }, 4),
            (RowOp::PickGrad { d: 14, chosen: 4 }, n),
            (RowOp::Unary(Unary::Silu, 13), n),
            (add(16, 15, same(n)), n),
            (RowOp::SoftmaxGrad { y: 9, dy: 1, size }, n),
            (RowOp::RmsGrad { x: 3, dy: 18, size, eps: Bits(1e-6) }, n),
        ];
        let (ops, lengths) = ops.into_iter().unzip();
        let row = |dtype| RowInput::Row { length: n, dtype };
        Kernel::Rows(RowKernel {
            rows,
            inputs: vec![
                row(dtype),
                row(dtype),
                RowInput::Shared { length: n, dtype: F32 },
                RowInput::RowInts { length: 1 },
                RowInput::RowInts { length: 4 },
            ],
            ops,
            lengths,
            outputs: vec![
                RowOutput { array: 17, dtype, store: RowStore::Row },
                RowOutput { array: 19, dtype, store: RowStore::AddRow },
                RowOutput { array: 8, dtype: F32, store: RowStore::Sum },
            ],
        })
    };
    // Each element alone: no statistics, no sums.
    let plain = |rows, n, dtype| {
        let mul = RowOp::Binary {
            op: Binary::Mul,
            a: 0,
            b: 1,
            broadcast: Broadcast { outer: 1, size: n, inner: 1 },
            small_first: false,
        };
        Kernel::Rows(RowKernel {
            rows,
            inputs: vec![RowInput::Row { length: n, dtype }, RowInput::Row { length: n, dtype: Bf16 }],
            ops: vec![RowOp::Load { input: 0 }, RowOp::Load { input: 1 }, mul],
            lengths: vec![n; 3],
            outputs: vec![RowOutput { array: 2, dtype, store: RowStore::Row }],
        })
    };
    let mut widths = [0; 3];
    for (rows, n, size, start) in
        [(5, 64, 16, 4), (9, 48, 12, 6), (3, 40, 8, 3), (1100, 24, 6, 4), (5, 30, 10, 4)]
    {
        // Rows apart, and where they begin in a buffer that is longer.
        for (dtype, apart, first) in
            [(F32, n, 0), (Bf16, n, 0), (F32, n + 8, 4), (Bf16, n + 8, 8), (F32, n + 1, 0), (Bf16, n + 4, 2)]
        {
            let all = rows * (n + 8) + 8;
            let at = |name: &str| format!("{name}:{first}:{apart}");
            let (x, dy, y, z) = (at("x"), at("dy"), at("y"), at("z"));
            let half = at("half");
            let launches = vec![
                (
                    kernel(rows, n, size, start, dtype),
                    vec![&*x, &dy, "w", "positions:0:1", "chosen:0:4", &y, &z, "s"],
                    None,
                ),
                (plain(rows, n, dtype), vec![&x, &half, &y], None),
                (plain(rows, n, dtype), vec![&z, &half, &z], None),
                (
                    kernel(rows, n, size, start, dtype),
                    vec![&*x, &dy, "w", "positions:0:1", "chosen:0:4", &dy, &z, "s"],
                    None,
                ),
            ];
            let buffers: &[(&str, DType, &[u64])] = &[
                ("x", dtype, &[all]),
                ("dy", dtype, &[all]),
                ("w", F32, &[n]),
                ("positions", DType::I32, &[rows]),
                ("chosen", DType::I32, &[rows, 4]),
                ("y", dtype, &[all]),
                ("z", dtype, &[all]),
                ("half", Bf16, &[all]),
                ("s", F32, &[n]),
            ];
            let plan = by_hand(buffers, launches);
            let id = |name: &str| plan.find(name).unwrap();
            let fill = |session: &mut dyn Session| {
                for (seed, (name, dtype, shape)) in buffers.iter().enumerate() {
                    let count = shape.iter().product::<u64>();
                    let values =
                        (0..count).map(|i| ((i * 7919 + seed as u64 * 31) % 1013) as f32 / 506.5 - 0.9);
                    match dtype {
                        F32 | DType::E4m3 | DType::Packed(_) => {
                            session.write_at(id(name), 0, 0, &values.collect::<Vec<_>>())?;
                        }
                        Bf16 => {
                            let values: Vec<_> = values.map(half::bf16::from_f32).collect();
                            session.write_at(id(name), 0, 0, &values)?;
                        }
                        DType::I32 => {
                            let values: Vec<i32> = (0..count).map(|i| (i * 7 % n) as i32).collect();
                            session.write_at(id(name), 0, 0, &values)?;
                        }
                    }
                }
                Ok(())
            };
            let bound = if dtype == F32 { 1e-5 } else { 1e-2 };
            for device in &devices {
                for agreement in
                    compare(&plan, ProgramKey::ALONE, &CpuDevice::default(), device.as_ref(), &fill).unwrap()
                {
                    assert!(
                        agreement.difference < bound,
                        "{n} in groups of {size}, {apart} apart from {first}, {dtype:?}: {agreement:?}, {}",
                        device.name()
                    );
                }
            }
            let texts = dreamc_device::gpu::sources(&plan, "sm_80", Limits::default()).unwrap();
            for text in texts {
                let kind =
                    if text.text.contains("floats8") { 2 } else { text.text.contains("floats4") as usize };
                widths[kind] += 1;
                let on_16 = |elements: u64| (elements * dtype.bytes()).is_multiple_of(16);
                assert!(kind == 0 || (on_16(apart) && on_16(first)), "{}", text.text);
            }
        }
    }
    assert!(widths.iter().all(|&count| count >= 10), "{widths:?}");
}

/// Kernels that sort, move and add up, where a thread takes 16 bytes: with elements left over, a
/// row that most ids are of, more groups than shared memory counts, and rows of odd length.
#[test]
fn what_is_moved_in_words_of_16_bytes_arrives() {
    use DType::{Bf16, F32, I32};
    let Some(device) = device(ptx::Options::default()) else { return };
    let (rows, vocab) = (700, 600);
    let buffers: &[(&str, DType, &[u64])] = &[
        ("ids", I32, &[rows]),
        ("d", F32, &[rows, 20]),
        ("d_odd", F32, &[rows, 7]),
        ("table", F32, &[vocab, 20]),
        ("table_odd", F32, &[vocab, 7]),
        ("embedded", F32, &[rows, 20]),
        ("order", I32, &[rows]),
        ("offsets", I32, &[9001]),
        ("inverse", I32, &[rows]),
        ("a", F32, &[1003]),
        ("b", F32, &[1003]),
        ("c", F32, &[1003]),
        ("v", F32, &[1003]),
        ("half", Bf16, &[1003]),
        ("half_copy", Bf16, &[1003]),
        ("norm", F32, &[1]),
        ("logits", Bf16, &[3, 2400]),
        ("logits_odd", F32, &[30, 21]),
        ("targets", I32, &[30]),
        ("nll", F32, &[30]),
        ("lse", F32, &[30]),
        ("d_nll", F32, &[30]),
        ("d_logits", Bf16, &[3, 2400]),
    ];
    let grad = |width, accumulate| Kernel::EmbedGrad(kernel::EmbedGrad { rows, vocab, width, accumulate });
    let launches = vec![
        (grad(20, false), vec!["d", "ids", "table"], None),
        (grad(20, true), vec!["d", "ids", "table"], None),
        (grad(7, true), vec!["d_odd", "ids", "table_odd"], None),
        (Kernel::Embed(kernel::Embed { rows, vocab, width: 20 }), vec!["table", "ids", "embedded"], None),
        (
            Kernel::Group(kernel::Group { slots: rows, experts: 500 }),
            vec!["ids", "order", "offsets", "inverse"],
            None,
        ),
        (
            Kernel::Group(kernel::Group { slots: rows, experts: 9000 }),
            vec!["ids", "order", "offsets", "inverse"],
            None,
        ),
        (Kernel::Copy(kernel::Copy { elements: 1003, accumulate: false }), vec!["half", "half_copy"], None),
        (Kernel::Copy(kernel::Copy { elements: 1003, accumulate: true }), vec!["a", "b"], None),
        (Kernel::Norm(kernel::Norm { elements: 1003 }), vec!["b", "norm"], None),
        (Kernel::Zero(kernel::Zero { elements: 1003 }), vec!["half"], None),
        (
            Kernel::CrossEntropy(kernel::CrossEntropy { rows: 3, vocab: 2400 }),
            vec!["logits", "targets", "nll", "lse"],
            None,
        ),
        (
            Kernel::CrossEntropyGrad(kernel::CrossEntropyGrad { rows: 3, vocab: 2400 }),
            vec!["logits", "targets", "lse", "d_nll", "d_logits"],
            None,
        ),
        (
            Kernel::CrossEntropy(kernel::CrossEntropy { rows: 30, vocab: 21 }),
            vec!["logits_odd", "targets", "nll", "lse"],
            None,
        ),
    ];
    let plan = by_hand(buffers, launches);
    let fill = |session: &mut dyn Session| {
        for (seed, (name, dtype, shape)) in buffers.iter().enumerate() {
            let count = shape.iter().product::<u64>();
            let values = (0..count).map(|i| ((i * 7919 + seed as u64 * 31) % 1013) as f32 / 506.5 - 0.9);
            let id = plan.find(name).unwrap();
            match (dtype, *name) {
                (F32, "v") => session.write_at(id, 0, 0, &values.map(f32::abs).collect::<Vec<_>>())?,
                (F32 | DType::E4m3 | DType::Packed(_), _) => {
                    session.write_at(id, 0, 0, &values.collect::<Vec<_>>())?
                }
                (Bf16, _) => {
                    session.write_at(id, 0, 0, &values.map(half::bf16::from_f32).collect::<Vec<_>>())?
                }
                // Most rows are of one id.
                (I32, "ids") => {
                    let id_of = |i: u64| if i.is_multiple_of(3) { (i * 7 % vocab) as i32 } else { 77 };
                    session.write_at(id, 0, 0, &(0..count).map(id_of).collect::<Vec<_>>())?
                }
                (I32, _) => {
                    session.write_at(id, 0, 0, &(0..count).map(|i| i as i32 % 21 - 1).collect::<Vec<_>>())?
                }
            }
        }
        Ok(())
    };
    for agreement in compare(&plan, ProgramKey::ALONE, &CpuDevice::default(), &device, &fill).unwrap() {
        let bound = if agreement.buffer == "d_logits" { 1e-2 } else { 1e-5 };
        assert!(agreement.difference < bound, "{agreement:?}");
    }
}

#[test]
fn an_index_out_of_range_names_its_launch() {
    let Some(device) = device(fast()) else { return };
    let golden = goldens().into_iter().find(|g| g.name == "la").unwrap();
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let mut run = Run::new(&golden, &options(b, n), &device);
    run.write("ids", &vec![1_000_000; b * n]);
    let error = run.session.run(ProgramKey::BACKWARD).unwrap_err().to_string();
    assert!(error.contains("embed") && error.contains("out of range"), "{error}");
    // The session goes on.
    run.backward(&golden, ids.ints(), b, n);
}

/// Rows that nobody needs cost nothing: the causal rule of `skip` under a router that lets through
/// what its offset says, on both devices from the same weights.
#[test]
fn tokens_that_skip_do_no_work() {
    let Some(device) = device(fast()) else { return };
    let (batch, tokens) = (4usize, 64usize);
    let text = format!(
        "model:\n  name: skipping\n  vocab: 64\n  hidden: 32\n  context: {tokens}\n  components:\n    \
         sa: {{sequence: {{heads: 2, kv_heads: 1, head_size: 16}}}}\n    mlp: {{mlp: {{intermediate: 64}}}}\n    \
         da: {{depth: {{heads: 2, kv_heads: 1, head_size: 16}}}}\n  \
         body: [\"da > sa > mlp\", \"skip(capacity 0.5, causal bce 0.1, norm_only) {{ da > sa > mlp }}\"]\n\
         train: {{steps: 1, batch: {batch}}}\n"
    );
    let ast = dreamc_dsl::parse("test", &text, dreamc_dsl::Spelling::Yaml).unwrap_or_else(|e| panic!("{e}"));
    let spec = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0;
    let compiled = compile(&spec, &options(batch, tokens)).unwrap();
    let some = dreamc_device::gpu::sources(&compiled.plan, "sm_80", Limits::default()).unwrap();
    let some: Vec<_> = some.into_iter().filter(|s| s.text.contains("places")).collect();
    for kind in ["product_tiles", "rows", "depth_attention_tokens"] {
        assert!(some.iter().any(|s| s.passes[0].entry == kind), "no {kind} takes places");
    }
    let text: Vec<_> = ["product_tiles", "depth_attention_tokens", "rows"]
        .map(|kind| some.iter().find(|s| s.passes[0].entry == kind).unwrap().text.clone())
        .into();
    insta::assert_snapshot!(text.join("\n"));

    let mut sessions: Vec<Box<dyn Session>> = [&device as &dyn Device, &CpuDevice::default()]
        .map(|d| d.load(&compiled.plan, &Group::alone()).unwrap())
        .into();
    for session in &mut sessions {
        session.instrument(Instrument { count: true, time: false });
        for t in &compiled.tensors {
            let count: u64 = t.shape.iter().product();
            let seed = t.name.bytes().fold(7u64, |s, b| s.wrapping_mul(31).wrapping_add(u64::from(b)));
            let mut rng = dreamc_compiler::ir::random::Rng::new(seed);
            let middle = if t.name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            let w: Vec<f32> = (0..count).map(|_| (middle + rng.between(-0.3, 0.3)) as f32).collect();
            session.write_at(t.weight, t.instance, 0, &w).unwrap();
        }
        for (name, values) in [
            ("ids", (0..batch * tokens).map(|i| (i * 37 % 64) as i32).collect::<Vec<_>>()),
            ("targets", vec![1; batch * tokens]),
            ("positions", (0..batch * tokens).map(|i| (i % tokens) as i32).collect()),
        ] {
            if let Some(id) = compiled.plan.find(name) {
                session.write_at(id, 0, 0, &values).unwrap();
            }
        }
    }
    let mut costs = vec![];
    for offset in [10.0f32, -4.8, -5.4, -6.0, -7.0, -8.0, -20.0] {
        let mut found = vec![];
        for session in &mut sessions {
            for t in compiled.tensors.iter().filter(|t| t.name.contains("router")) {
                let value = if t.name.contains("offset") { offset } else { 1.0 };
                session.write_at(t.weight, t.instance, 0, &[value]).unwrap();
            }
            let stats = session.run(ProgramKey::EVALUATE).unwrap_or_else(|e| panic!("{e}"));
            let wrapped = |l: &&dreamc_device::LaunchStats| l.origin.contains("layer1");
            let logits = session.read_all::<f32>(compiled.plan.find("logits").unwrap()).unwrap();
            let instructions: u64 = stats.by_launch.iter().filter(wrapped).map(|l| l.instructions).sum();
            let counts: Vec<u64> = stats.by_launch.iter().map(|l| l.multiply_adds).collect();
            found.push((logits.into_iter().map(f64::from).collect::<Vec<_>>(), counts, instructions));
        }
        let e = error(&found[0].0, &found[1].0);
        assert!(e < 1e-5, "offset {offset}: logits differ by {e}");
        assert_eq!(found[0].1, found[1].1, "offset {offset}");
        let multiply_adds: u64 = found[0].1.iter().sum();
        println!("offset {offset}: {multiply_adds} multiply-adds, {} instructions", found[0].2);
        costs.push((multiply_adds, found[0].2));
    }
    assert!(costs.windows(2).all(|c| c[0].0 >= c[1].0 && c[0].1 >= c[1].1), "{costs:?}");
    let least = costs.len() - 1;
    assert!(costs[least].1 < costs[0].1 / 3, "{costs:?}");
    let distinct: std::collections::BTreeSet<_> = costs.iter().map(|c| c.1).collect();
    assert!(distinct.len() >= 4, "{costs:?}");
}

/// Losses of twenty steps on the CPU and another device, of examples made small, in f32 and in
/// bf16.
///
/// AdamW divides by the size of gradients, and magnifies from step to step what rounding did to
/// small ones. In bf16 the two devices round sums that differ in their last bits to different
/// numbers, and learn less at a step, because at more so small a model learns its few tokens by
/// heart and is far away from itself.
fn examples_train_alike(examples: Vec<(String, dreamc_dsl::Spec)>, device: &dyn Device) {
    let cpu = &CpuDevice::default();
    let (mut table, mut failed) = (vec![], vec![]);
    for (name, spec) in &examples {
        let begun = std::time::Instant::now();
        let apart = |rate, on| losses_apart(spec, 20, rate, on);
        let wide = apart(1e-2, [(cpu, Narrow::Nothing), (device, Narrow::Nothing)]);
        let narrow = apart(1e-3, [(cpu, Narrow::Storage), (device, Narrow::Storage)]);
        let rounding = apart(1e-3, [(cpu, Narrow::Nothing), (cpu, Narrow::Storage)]);
        // Layers that are applied again and again magnify most.
        let again = ["tiny-prelude-core-coda", "tiny-recurrent-group"].iter().any(|n| name.contains(n));
        let line = format!(
            "{name:<40} f32 {wide:.1e}   bf16 {narrow:.1e}   bf16 and f32 on the CPU {rounding:.1e}   {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        println!("{line}");
        if wide > 1e-3 || narrow > if again { 1.5e-1 } else { 5e-2 } {
            failed.push(line.clone());
        }
        table.push((wide, narrow, rounding));
    }
    let worst = |of: fn(&(f64, f64, f64)) -> f64| table.iter().map(of).fold(0.0, f64::max);
    println!(
        "worst: f32 {:.1e}, bf16 {:.1e}, rounding {:.1e}",
        worst(|t| t.0),
        worst(|t| t.1),
        worst(|t| t.2)
    );
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn some_examples_train_alike() {
    let Some(device) = device(fast()) else { return };
    let some = ["tiny-dr-da", "tiny-mod-dr"].map(|name| format!("examples/{name}.yaml"));
    examples_train_alike(some.map(|name| (name.clone(), load(&name))).into(), &device);
}

#[test]
#[ignore = "takes minutes"]
fn all_examples_train_alike() {
    let Some(device) = device(fast()) else { return };
    examples_train_alike(models(specs("examples")), &device);
}

/// Where there is a GPU.
#[test]
fn all_examples_train_alike_on_a_gpu() {
    match CudaDevice::new(0) {
        Ok(gpu) => examples_train_alike(models(specs("examples")), &gpu),
        Err(error) => skip(error),
    }
}

/// Buffers and launches of a plan made by hand: every launch with its operands by the buffers'
/// names, and where rows are not all of a buffer, `name:offset:stride`.
pub(crate) fn by_hand(
    buffers: &[(&str, DType, &[u64])],
    launches: Vec<(Kernel, Vec<&str>, Option<&str>)>,
) -> Plan {
    let mut plan = Plan::default();
    for (name, dtype, shape) in buffers {
        let offset = plan.arena;
        plan.arena += (shape.iter().product::<u64>() * dtype.bytes()).next_multiple_of(256);
        let (name, shape) = (name.to_string(), shape.to_vec());
        plan.buffers.push(Buffer { name, space: Space::Io, dtype: *dtype, shape, instances: 1, offset });
    }
    let mut steps = vec![];
    for (i, (kernel, operands, places)) in launches.into_iter().enumerate() {
        let at = |name: &&str| {
            if let Some(index) = name.strip_prefix('=') {
                return Operand::Index(Affine { base: index.parse().unwrap(), ..Affine::default() });
            }
            let mut parts = name.split(':');
            let buffer = plan.find(parts.next().unwrap()).unwrap_or_else(|| panic!("no buffer {name}"));
            let mut number = || parts.next().map_or(0, |n| n.parse().unwrap());
            Operand::Tensor { buffer, instance: Affine::default(), offset: number(), stride: number() }
        };
        steps.push(Step::Launch(Launch {
            kernel: KernelId(i as u32),
            operands: operands.iter().map(at).collect(),
            places: places.as_ref().map(at),
            origin: kernel.to_string(),
        }));
        plan.kernels.push(kernel);
    }
    plan.programs.insert(ProgramKey::ALONE, Program { steps, variables: 0 });
    plan
}

/// Elements whose number does not fit in 31 bits, in every kind of kernel that goes far: operands
/// in two buffers of 13 GB together, mostly untouched. A system with less memory than that may not
/// give the addresses.
#[test]
fn elements_beyond_two_thousand_million_are_reached() {
    use DType::{Bf16, F32, I32};
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    if total.is_none_or(|kib| kib < 15 << 20) {
        return skip("less than 15 GiB of memory");
    }
    let Some(device) = device(fast()) else { return };
    const FAR: u64 = 1 << 31;
    const WIDTH: u64 = 4096;
    const ROWS: u64 = FAR / WIDTH + 1024;
    let far = |name: &str| format!("{name}:0:{FAR}");
    let (big_far, half_far) = (far("big"), far("half"));
    let (big_far, half_far) = (big_far.as_str(), half_far.as_str());
    let product = |row| {
        Kernel::Product(kernel::Product {
            m: 2,
            n: 16,
            k: 16,
            a: Matrix { row, column: 1 },
            b: Matrix { row: 16, column: 1 },
            accumulate: false,
            stored: false,
        })
    };
    let plain = Attention { scale: 1.0, ..Attention::default() };
    let shape = AttentionShape { batch: 1, queries: 2, keys: 2, heads: 1, kv_heads: 1, size: 16 };
    let attention = Kernel::Attention(kernel::Attention {
        shape,
        attention: plain.clone(),
        shared: false,
        lengths: vec![],
    });
    let depth = DepthShape { depths: FAR / 64 + 100, rows: 4, heads: 1, kv_heads: 1, size: 16 };
    let depth = Kernel::DepthAttention(kernel::DepthAttention {
        shape: depth,
        attention: Attention { window: Some(1), ..plain.clone() },
    });
    let rows = Kernel::Rows(RowKernel {
        rows: 2,
        inputs: vec![RowInput::Row { length: 16, dtype: F32 }],
        ops: vec![RowOp::Load { input: 0 }],
        lengths: vec![16],
        outputs: vec![RowOutput { array: 0, dtype: F32, store: RowStore::Row }],
    });
    let (last, before) = (format!("={}", ROWS - 1), format!("={}", ROWS - 2));
    let deep = format!("={}", FAR / 64 + 10);
    let append = Kernel::Append(kernel::Append { rows: 2, tokens: 1, places: ROWS / 2, width: WIDTH });
    let buffers: &[(&str, DType, &[u64])] = &[
        ("big", F32, &[ROWS, WIDTH]),
        ("half", Bf16, &[ROWS, WIDTH]),
        ("near", F32, &[2, 16]),
        ("near_half", Bf16, &[2, 16]),
        ("one", F32, &[16, 16]),
        ("one_half", Bf16, &[16, 16]),
        ("ids", I32, &[2]),
        ("slots", I32, &[2]),
        ("product", F32, &[2, 16]),
        ("product_half", F32, &[2, 16]),
        ("rows", F32, &[2, 16]),
        ("o", F32, &[2, 16]),
        ("o_near", F32, &[2, 16]),
        ("o_half", Bf16, &[2, 16]),
        ("o_half_near", Bf16, &[2, 16]),
        ("lse", F32, &[2]),
        ("q", F32, &[4, 16]),
        ("deep", F32, &[4, 16]),
        ("embedded", F32, &[2, WIDTH]),
        ("taken", F32, &[WIDTH]),
        ("x", F32, &[2, WIDTH]),
    ];
    let embed = Kernel::Embed(kernel::Embed { rows: 2, vocab: ROWS, width: WIDTH });
    let embed_grad =
        Kernel::EmbedGrad(kernel::EmbedGrad { rows: 2, vocab: ROWS, width: WIDTH, accumulate: true });
    let launches = vec![
        (product(FAR), vec!["big", "one", "product"], None),
        (product(FAR), vec!["half", "one_half", "product_half"], None),
        (rows, vec![big_far, "rows"], None),
        (attention.clone(), vec![big_far, big_far, big_far, "o", "lse"], None),
        (attention.clone(), vec!["near:0:16", "near:0:16", "near:0:16", "o_near", "lse"], None),
        (attention.clone(), vec![half_far, half_far, half_far, "o_half", "lse"], None),
        (attention, vec!["near_half:0:16", "near_half:0:16", "near_half:0:16", "o_half_near", "lse"], None),
        (depth, vec!["q:0:16", "big", "big", &deep, "deep"], None),
        (embed, vec!["big", "ids", "embedded"], None),
        (Kernel::CacheTake(kernel::CacheTake { width: WIDTH, parts: 1 }), vec![&last, "big", "taken"], None),
        (
            Kernel::CacheWrite(kernel::CacheWrite { width: WIDTH, parts: 1 }),
            vec!["taken", &before, "big"],
            None,
        ),
        (append, vec!["x:0:4096", "slots", "big"], None),
        (embed_grad, vec!["x", "ids", "big"], None),
    ];
    let plan = by_hand(buffers, launches);
    let at = |name: &str| plan.find(name).unwrap();
    let mut session = device.load(&plan, &Group::alone()).unwrap();
    let near: Vec<f32> = (0..32).map(|i| (i % 7) as f32 - 3.0 + i as f32 / 32.0).collect();
    let narrow = |x: &[f32]| x.iter().map(|&x| half::bf16::from_f32(x)).collect::<Vec<_>>();
    let one: Vec<f32> = (0..256).map(|i| f32::from(u8::from(i % 17 == 0))).collect();
    for (row, place) in [(0, 0), (1, FAR)] {
        let values = &near[16 * row..16 * (row + 1)];
        session.write_at(at("big"), 0, place, values).unwrap();
        session.write_at(at("half"), 0, place, &narrow(values)).unwrap();
    }
    session.write_at(at("near"), 0, 0, &near).unwrap();
    session.write_at(at("near_half"), 0, 0, &narrow(&near)).unwrap();
    session.write_at(at("one"), 0, 0, &one).unwrap();
    session.write_at(at("one_half"), 0, 0, &narrow(&one)).unwrap();
    session.write_at(at("big"), 0, FAR + 640, &[7.0f32; 64]).unwrap();
    session.write_at(at("big"), 0, (ROWS - 1) * WIDTH, &[9.0f32; WIDTH as usize]).unwrap();
    session.write_at(at("ids"), 0, 0, &[0, (ROWS - 1) as i32]).unwrap();
    session.write_at(at("slots"), 0, 0, &[5, (ROWS / 2 - 3) as i32]).unwrap();
    let x: Vec<f32> = (0..2 * WIDTH).map(|i| if i < WIDTH { 0.25 } else { 0.5 }).collect();
    session.write_at(at("x"), 0, 0, &x).unwrap();
    session.run(ProgramKey::ALONE).unwrap();
    let read = |name: &str, place: u64, count: usize| {
        let mut values = vec![0f32; count];
        session.read_at(at(name), 0, place, &mut values).unwrap();
        values
    };
    let rounded: Vec<f32> = narrow(&near).iter().map(|x| x.to_f32()).collect();
    assert_eq!(read("product", 0, 32), near);
    assert_eq!(read("product_half", 0, 32), rounded);
    assert_eq!(read("rows", 0, 32), near);
    assert_eq!(read("o", 0, 32), read("o_near", 0, 32));
    assert!(read("o", 16, 16).iter().any(|x| *x != 0.0));
    let halves = |name: &str| session.read_all::<half::bf16>(at(name)).unwrap();
    assert_eq!(halves("o_half"), halves("o_half_near"));
    assert!(halves("o_half")[16..].iter().any(|x| x.to_f32() != 0.0));
    assert_eq!(read("deep", 0, 64), [7.0; 64]);
    assert_eq!(read("embedded", WIDTH, 16), [9.0; 16]);
    assert_eq!(read("taken", 0, 16), [9.0; 16]);
    assert_eq!(read("big", (ROWS - 2) * WIDTH, 16), [9.0; 16]);
    assert_eq!(read("big", (ROWS - 3) * WIDTH, 16), [0.5; 16]);
    assert_eq!(read("big", (ROWS - 1) * WIDTH, 16), [0.5; 16]);
    assert_eq!(read("big", 0, 16), near[..16].iter().map(|x| x + 0.25).collect::<Vec<_>>());
}

/// Products large enough for Hopper's warpgroups, in every layout, in groups and gathered, of some
/// rows, and fused with the loss; and what fills their buffers. `few`: one of a kind.
fn large_products(few: bool) -> (Plan, impl Fn(&mut dyn Session) -> Result<(), DeviceError>) {
    use DType::{Bf16, F32, I32};
    let (m, n, k) = (1536, 1408, 136);
    let (experts, slots, out) = (4, 600, 384);
    let matrix = |row, column| Matrix { row, column };
    let product =
        |n, a, b, accumulate| Kernel::Product(kernel::Product { m, n, k, a, b, accumulate, stored: false });
    let grouped = |transposed, gather| match transposed {
        false => Kernel::Grouped(kernel::Grouped {
            slots: m,
            experts,
            out: n,
            inner: k,
            transposed,
            gather,
            stored: false,
        }),
        true => Kernel::Grouped(kernel::Grouped {
            slots: m,
            experts,
            out: k,
            inner: n,
            transposed,
            gather,
            stored: false,
        }),
    };
    let outer = |gather| {
        Kernel::GroupedOuter(kernel::GroupedOuter {
            slots,
            experts,
            out,
            inner: n,
            gather,
            accumulate: gather.is_some(),
        })
    };
    let (vocab, softcap) = (n, Some(3.0));
    let buffers: &[(&str, DType, &[u64])] = &[
        ("x", Bf16, &[m, k]),
        ("w", Bf16, &[experts * n, k]),
        ("y", Bf16, &[slots, out]),
        ("z", Bf16, &[slots, n]),
        ("offsets", I32, &[experts + 1]),
        ("order", I32, &[m]),
        ("few_offsets", I32, &[experts + 1]),
        ("few_order", I32, &[slots]),
        ("places", I32, &[m]),
        ("targets", I32, &[m]),
        ("d", F32, &[m]),
        ("plain", F32, &[m, n]),
        ("wide", Bf16, &[m, 2 * n]),
        ("columns", F32, &[m, n]),
        ("mixed", F32, &[m, n]),
        ("some", F32, &[m, n]),
        ("grouped", Bf16, &[m, n]),
        ("gathered", Bf16, &[m, n]),
        ("transposed", Bf16, &[m, n]),
        ("outer", F32, &[experts, out, n]),
        ("outer_gathered", F32, &[experts, out, n]),
        ("nll", F32, &[m]),
        ("lse", F32, &[m]),
        ("dx", F32, &[m, k]),
        ("dw", F32, &[vocab, k]),
    ];
    let mut launches = vec![
        (product(n, matrix(k, 1), matrix(1, k), false), vec!["x", "w", "plain"], None),
        (product(2 * n, matrix(k, 1), matrix(1, k), false), vec!["x", "w", "wide"], None),
        (product(n, matrix(1, m), matrix(n, 1), true), vec!["x", "w", "columns"], None),
        (product(n, matrix(1, m), matrix(1, k), false), vec!["x", "w", "mixed"], None),
        (product(n, matrix(k, 1), matrix(n, 1), false), vec!["x", "w", "some"], Some("places")),
        (grouped(false, None), vec!["x", "w", "offsets", "grouped"], None),
        (grouped(false, Some(2)), vec!["x", "w", "offsets", "order", "gathered"], None),
        (grouped(true, None), vec!["x", "w", "offsets", "transposed"], None),
        (outer(None), vec!["y", "z", "few_offsets", "outer"], None),
        (outer(Some(1)), vec!["y", "z", "few_offsets", "few_order", "outer_gathered"], None),
        (
            Kernel::HeadLoss(kernel::HeadLoss {
                rows: m,
                vocab,
                width: k,
                softcap: softcap.map(Bits),
                stored: false,
            }),
            vec!["x", "w", "targets", "nll", "lse"],
            None,
        ),
        (
            Kernel::HeadLossGrad(kernel::HeadLossGrad {
                rows: m,
                vocab,
                width: k,
                softcap: softcap.map(Bits),
                accumulate: false,
            }),
            vec!["x", "w", "targets", "lse", "d", "dx", "dw"],
            None,
        ),
    ];
    if few {
        let kept = ["columns", "some", "gathered", "outer_gathered", "lse"];
        launches.retain(|(_, operands, _)| kept.contains(operands.last().unwrap()));
    }
    let plan = by_hand(buffers, launches);
    let buffers = plan.buffers.clone();
    let fill = move |session: &mut dyn Session| {
        for (i, b) in buffers.iter().enumerate() {
            let (id, count) = (BufferId(i as u32), b.elements());
            let value = |j: u64| ((j * 7919 + i as u64 * 131) % 1013) as f32 / 1013.0 - 0.5;
            match (b.dtype, b.name.as_str()) {
                (Bf16, _) => {
                    let values: Vec<half::bf16> =
                        (0..count).map(|j| half::bf16::from_f32(value(j))).collect();
                    session.write_at(id, 0, 0, &values)
                }
                (F32, _) => session.write_at(id, 0, 0, &(0..count).map(value).collect::<Vec<_>>()),
                // Groups of uneven sizes, one empty, and rows in none.
                (_, "offsets") => session.write_at(id, 0, 0, &[0, 700, 700, 1301, 1500]),
                (_, "few_offsets") => session.write_at(id, 0, 0, &[0, 130, 463, 463, 590]),
                (_, "order") => {
                    session.write_at(id, 0, 0, &(0..count).map(|j| (j * 5 % m) as i32).collect::<Vec<_>>())
                }
                (_, "few_order") => session.write_at(
                    id,
                    0,
                    0,
                    &(0..count).map(|j| (j * 7 % slots) as i32).collect::<Vec<_>>(),
                ),
                (_, "places") => session.write_at(
                    id,
                    0,
                    0,
                    &(0..count).map(|j| if j % 3 == 0 || j > 1000 { -1 } else { 5 }).collect::<Vec<_>>(),
                ),
                (_, _) => session.write_at(
                    id,
                    0,
                    0,
                    &(0..count)
                        .map(|j| (j * 11 % vocab) as i32 - (j % 9 == 0) as i32 * 2000)
                        .collect::<Vec<_>>(),
                ),
            }?;
        }
        Ok(())
    };
    (plan, fill)
}

/// Attention of enough blocks for Hopper's warpgroups, forward and back: heads of 64 and 128, odd
/// lengths, several queries to a key, rows apart from one another, every mask, keys that nobody
/// sees; and what fills its buffers. `few`: one of a kind.
fn large_attention(few: bool) -> (Plan, impl Fn(&mut dyn Session) -> Result<(), DeviceError>) {
    let shape = |batch, queries, keys, heads, kv_heads, size| AttentionShape {
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        size,
    };
    let causal = Attention { scale: 0.7, ..Attention::default() };
    let mut cases = vec![
        (
            shape(17, 149, 149, 4, 4, 128),
            Attention { window: Some(70), softcap: Some(3.0), ..causal.clone() },
        ),
        (shape(22, 203, 203, 6, 3, 64), causal.clone()),
        (
            shape(17, 140, 333, 4, 4, 64),
            Attention { mask: Mask::Positions, window: Some(200), ..causal.clone() },
        ),
        (shape(34, 130, 130, 2, 2, 128), Attention { segments: true, ..causal.clone() }),
        (shape(11, 300, 300, 4, 4, 64), Attention { window: Some(16), ..causal.clone() }),
        (
            shape(34, 150, 150, 2, 1, 256),
            Attention { window: Some(140), softcap: Some(3.0), ..causal.clone() },
        ),
    ];
    if few {
        cases.truncate(1);
    }
    attention_of(cases, DType::Bf16)
}

/// Each of these attentions, forward and back, of rows of a type, and what fills their buffers: the
/// same numbers in both types.
fn attention_of(
    cases: Vec<(AttentionShape, Attention)>,
    dtype: DType,
) -> (Plan, impl Fn(&mut dyn Session) -> Result<(), DeviceError>) {
    use DType::{F32, I32};
    let mut buffers: Vec<(String, DType, Vec<u64>)> = vec![];
    let mut launches = vec![];
    for (i, (s, attention)) in cases.into_iter().enumerate() {
        let (queries, keys) = (s.batch * s.queries, s.batch * s.keys);
        let (wide, narrow) = (s.heads * s.size, s.kv_heads * s.size);
        let row = wide + 2 * narrow;
        let mut buffer = |name: &str, dtype, rows, width| {
            buffers.push((format!("{name}{i}"), dtype, vec![rows, width]));
            format!("{name}{i}")
        };
        // As the projections leave them: a row of queries, keys, values where there are as many of
        // each.
        let mut three = |name: &str| match queries == keys {
            true => {
                let all = buffer(&format!("{name}qkv"), dtype, queries, row);
                [0, wide, wide + narrow].map(|at| format!("{all}:{at}:{row}"))
            }
            false => [("q", queries, wide), ("k", keys, narrow), ("v", keys, narrow)]
                .map(|(part, rows, width)| buffer(&format!("{name}{part}"), dtype, rows, width)),
        };
        let (operands, gradients) = (three(""), three("d"));
        let (o, lse) = (buffer("o", dtype, queries, wide), buffer("lse", F32, queries, s.heads));
        let cotangent = buffer("cotangent", dtype, queries, wide);
        let mut masks = vec![];
        if attention.mask == Mask::Positions {
            masks.push(buffer("query_positions", I32, s.batch, s.queries));
            masks.push(buffer("key_positions", I32, s.batch, s.keys));
        }
        if attention.segments {
            masks.push(buffer("segments", I32, s.batch, s.queries));
        }
        let forward: Vec<String> = operands.iter().chain(&masks).chain([&o, &lse]).cloned().collect();
        // Of some something follows from the logarithm of the denominators, too.
        let log = attention.segments || attention.softcap.is_some();
        let dlse = log.then(|| buffer("dlse", F32, queries, s.heads));
        let back = operands.iter().chain([&o, &lse, &cotangent]).chain(&masks).chain(&dlse);
        let back = back.chain(&gradients).cloned().collect();
        launches.push((
            Kernel::Attention(kernel::Attention {
                shape: s,
                attention: attention.clone(),
                shared: false,
                lengths: vec![],
            }),
            forward,
        ));
        launches.push((
            Kernel::AttentionGrad(kernel::AttentionGrad { shape: s, attention, log, lengths: vec![] }),
            back,
        ));
    }
    let buffers: Vec<_> = buffers.iter().map(|(n, d, s)| (n.as_str(), *d, s.as_slice())).collect();
    let launches = launches.iter().map(|(k, l)| (k.clone(), l.iter().map(String::as_str).collect(), None));
    let plan = by_hand(&buffers, launches.collect());
    let buffers = plan.buffers.clone();
    let fill = move |session: &mut dyn Session| {
        for (i, b) in buffers.iter().enumerate() {
            let (id, row) = (BufferId(i as u32), b.shape[1]);
            let value = |j: u64| {
                let value = ((j * 7919 + i as u64 * 131) % 1013) as f32 / 1013.0 - 0.5;
                half::bf16::from_f32(value).to_f32()
            };
            let int = |j: u64| match b.name.trim_end_matches(char::is_numeric) {
                "segments" => segment(j, row),
                // The last tokens of a cache whose places are in some order, a part of them empty.
                "query_positions" => (190 + j % row) as i32,
                _ if (100..230).contains(&(j % row)) => -1,
                _ => (j % row * 5 % row) as i32,
            };
            write(session, id, b, value, int)?;
        }
        Ok(())
    };
    (plan, fill)
}

/// The document of a token among all rows; each row has `row` tokens.
fn segment(token: u64, row: u64) -> i32 {
    // Of long sequences the first document is most.
    let each = if row > 400 { 290 } else { 31 + token / row };
    (token % row / each) as i32
}

/// Every float that a plan leaves in memory, by buffer.
pub(crate) fn results<F>(plan: &Plan, fill: &F, device: &dyn Device) -> Vec<(String, Vec<f32>)>
where
    F: Fn(&mut dyn Session) -> Result<(), DeviceError>,
{
    use DType::{Bf16, F32, I32};
    let mut session = device.load(plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}"));
    fill(session.as_mut()).unwrap();
    session.run(ProgramKey::ALONE).unwrap_or_else(|e| panic!("{e}"));
    let read = |(i, b): (usize, &Buffer)| {
        let id = BufferId(i as u32);
        let values = match b.dtype {
            F32 => session.read_all::<f32>(id).unwrap(),
            Bf16 => session.read_all::<half::bf16>(id).unwrap().into_iter().map(f32::from).collect(),
            I32 | DType::E4m3 | DType::Packed(_) => vec![],
        };
        (b.name.clone(), values)
    };
    plan.buffers.iter().enumerate().map(read).collect()
}

/// As on `sm_80` from the same memory, with nothing found and equal bits under these schedules.
fn warpgroups<F>((plan, fill): (Plan, F), schedules: &[(Schedule, usize)]) -> Option<Plan>
where
    F: Fn(&mut dyn Session) -> Result<(), DeviceError>,
{
    let floor = device(fast())?;
    let texts = dreamc_device::gpu::sources(&plan, "sm_90a", Limits::default()).unwrap();
    assert!(texts.iter().all(|t| t.text.contains("Warpgroups<")), "the floor's tiles are used");
    let results = |device: &dyn Device| results(&plan, &fill, device);
    let expected = results(&floor);
    let mut first: Option<Vec<(String, Vec<u32>)>> = None;
    for &(schedule, threads) in schedules {
        let options = ptx::Options { schedule, threads, ..ptx::Options::default() };
        let found = results(&PtxDevice::hopper(options).unwrap());
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let e = distance(&wide(found), &wide(expected));
            println!("{schedule:?}: {name} differs by {e:.1e}");
            assert!(e < 1.0 / 256.0, "{schedule:?}: {name} differs by {e}");
        }
        let bits: Vec<(String, Vec<u32>)> =
            found.into_iter().map(|(n, v)| (n, v.into_iter().map(f32::to_bits).collect())).collect();
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{schedule:?} gives other bits");
    }
    Some(plan)
}

/// Schedules that order everything differently.
pub(crate) const SCHEDULES: [(Schedule, usize); 3] =
    [(Schedule::Forward, 2), (Schedule::Reverse, 1), (Schedule::Random(5), 1)];

#[test]
fn products_of_warpgroups_are_right_and_clean() {
    let Some(plan) = warpgroups(large_products(true), &[(Schedule::Random(5), 2)]) else { return };
    let texts = dreamc_device::gpu::sources(&plan, "sm_90a", Limits::default()).unwrap();
    insta::assert_snapshot!(texts.iter().map(|t| t.text.as_str()).collect::<Vec<_>>().join("\n"));
}

/// The last tile of the head has one row, and the number after its target is out of range.
#[test]
fn a_tile_of_one_row_looks_at_no_other() {
    use DType::{Bf16, F32, I32};
    let (rows, vocab, width) = (129, 8448, 136);
    let buffers: &[(&str, DType, &[u64])] = &[
        ("x", Bf16, &[rows, width]),
        ("w", Bf16, &[vocab, width]),
        ("targets", I32, &[rows + 1]),
        ("lse", F32, &[rows]),
        ("d", F32, &[rows]),
        ("dx", F32, &[rows, width]),
        ("dw", F32, &[vocab, width]),
    ];
    let grad = kernel::HeadLossGrad { rows, vocab, width, softcap: None, accumulate: false };
    let operands = vec!["x", "w", "targets", "lse", "d", "dx", "dw"];
    let plan = by_hand(buffers, vec![(Kernel::HeadLossGrad(grad), operands, None)]);
    let all = plan.buffers.clone();
    let fill = move |session: &mut dyn Session| {
        for (i, b) in all.iter().enumerate() {
            let (id, numbers) = (BufferId(i as u32), 0..b.elements());
            let value = |j: u64| ((j * 7919 + i as u64 * 131) % 1013) as f32 / 1013.0 - 0.5;
            match (b.dtype, b.name.as_str()) {
                (Bf16, _) => {
                    let values: Vec<_> = numbers.map(|j| half::bf16::from_f32(value(j))).collect();
                    session.write_at(id, 0, 0, &values)
                }
                (F32, "lse") => session.write_at(id, 0, 0, &numbers.map(|_| 9.0f32).collect::<Vec<_>>()),
                (F32, _) => session.write_at(id, 0, 0, &numbers.map(value).collect::<Vec<_>>()),
                (_, _) => {
                    let target = |j: u64| if j < rows { (j * 61) as i32 } else { i32::MAX };
                    session.write_at(id, 0, 0, &numbers.map(target).collect::<Vec<_>>())
                }
            }?;
        }
        Ok(())
    };
    warpgroups((plan, fill), &[(Schedule::Forward, 2)]);
}

#[test]
fn attention_of_warpgroups_is_right_and_clean() {
    let Some(plan) = warpgroups(large_attention(true), &[(Schedule::Random(5), 2)]) else { return };
    let texts = dreamc_device::gpu::sources(&plan, "sm_90a", Limits::default()).unwrap();
    insta::assert_snapshot!(texts.iter().map(|t| t.text.as_str()).collect::<Vec<_>>().join("\n"));
}

/// Tiles of 128 x 256, several to a block where the copy engine brings both operands, with edges in
/// every direction: as the tiles of every GPU have them.
#[test]
fn wide_tiles_follow_one_another() {
    use DType::{Bf16, F32, I32};
    let Some(floor) = device(fast()) else { return };
    let (m, n, k) = (328, 504, 520);
    // Results that are added to memory want longer sums.
    let (experts, slots, out, long) = (2, 2112, 136, 2088);
    let matrix = |row, column| Matrix { row, column };
    let product =
        |k, a, b, accumulate| Kernel::Product(kernel::Product { m, n, k, a, b, accumulate, stored: false });
    let grouped = |gather| {
        Kernel::Grouped(kernel::Grouped {
            slots: m,
            experts,
            out: n,
            inner: k,
            transposed: false,
            gather,
            stored: false,
        })
    };
    let outer = |gather| {
        let experts = 1;
        Kernel::GroupedOuter(kernel::GroupedOuter { slots, experts, out, inner: n, gather, accumulate: true })
    };
    let buffers: &[(&str, DType, &[u64])] = &[
        ("x", Bf16, &[m, long]),
        ("w", Bf16, &[n, long]),
        ("y", Bf16, &[slots, out]),
        ("z", Bf16, &[slots, n]),
        ("offsets", I32, &[experts + 1]),
        ("order", I32, &[m]),
        ("long_offsets", I32, &[2]),
        ("long_order", I32, &[slots]),
        ("plain", F32, &[m, n]),
        ("added", F32, &[m, n]),
        ("grouped", Bf16, &[m, n]),
        ("gathered", Bf16, &[m, n]),
        ("outer", F32, &[out, n]),
        ("outer_gathered", F32, &[out, n]),
    ];
    let plan = by_hand(
        buffers,
        vec![
            (product(k, matrix(k, 1), matrix(1, k), false), vec!["x", "w", "plain"], None),
            (product(long, matrix(1, m), matrix(n, 1), true), vec!["x", "w", "added"], None),
            (grouped(None), vec!["x", "w", "offsets", "grouped"], None),
            (grouped(Some(2)), vec!["x", "w", "offsets", "order", "gathered"], None),
            (outer(None), vec!["y", "z", "long_offsets", "outer"], None),
            (outer(Some(1)), vec!["y", "z", "long_offsets", "long_order", "outer_gathered"], None),
        ],
    );
    let fill = |session: &mut dyn Session| {
        for (i, b) in plan.buffers.iter().enumerate() {
            let id = BufferId(i as u32);
            let value = |j: u64| ((j * 7919 + i as u64 * 131) % 1013) as f32 / 1013.0 - 0.5;
            let int = |j: u64| match b.name.as_str() {
                "offsets" => [0, 133, 300][j as usize],
                "long_offsets" => [0, 2071][j as usize],
                "order" => (j * 5 % m) as i32,
                _ => (j * 7 % slots) as i32,
            };
            write(session, id, b, value, int)?;
        }
        Ok(())
    };
    // Two blocks fill it, and have three tiles each.
    let small = Limits { processors: 2, ..Limits::default() };
    let texts = dreamc_device::gpu::sources(&plan, "sm_90a", small).unwrap();
    assert!(texts.iter().all(|t| t.text.contains("Warpgroups<256")), "{texts:?}");
    let expected = results(&plan, &fill, &floor);
    let device = PtxDevice::hopper(ptx::Options::default()).unwrap().with_limits(small);
    for ((name, found), (_, expected)) in results(&plan, &fill, &device).iter().zip(&expected) {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let e = distance(&wide(found), &wide(expected));
        println!("{name} differs by {e:.1e}");
        assert!(e < 1.0 / 256.0, "{name} differs by {e}");
    }
}

/// Tiles of 128 x 256 in clusters of two blocks, which bring the right operand to each other: of
/// every layout, several to a block, with an edge in both directions, under three schedules.
#[test]
fn wide_tiles_come_in_clusters() {
    use DType::{Bf16, F32};
    let Some(floor) = device(fast()) else { return };
    let (m, n, k, long) = (488, 504, 520, 2056);
    let matrix = |row, column| Matrix { row, column };
    let product =
        |k, a, b, accumulate| Kernel::Product(kernel::Product { m, n, k, a, b, accumulate, stored: false });
    let buffers: &[(&str, DType, &[u64])] = &[
        ("x", Bf16, &[m, long]),
        ("w", Bf16, &[n, long]),
        ("plain", F32, &[m, n]),
        ("narrow", Bf16, &[m, n]),
        ("added", F32, &[m, n]),
    ];
    let plan = by_hand(
        buffers,
        vec![
            (product(k, matrix(k, 1), matrix(1, k), false), vec!["x", "w", "plain"], None),
            (product(k, matrix(1, m), matrix(1, k), false), vec!["x", "w", "narrow"], None),
            (product(long, matrix(1, m), matrix(n, 1), true), vec!["x", "w", "added"], None),
        ],
    );
    let fill = |session: &mut dyn Session| {
        for (i, b) in plan.buffers.iter().enumerate() {
            let value = |j: u64| ((j * 7919 + i as u64 * 131) % 1013) as f32 / 1013.0 - 0.5;
            write(session, BufferId(i as u32), b, value, |_| 0)?;
        }
        Ok(())
    };
    // Two clusters fill it, and have two tiles of each block.
    let small = Limits { processors: 5, ..Limits::default() };
    let texts = dreamc_device::gpu::sources(&plan, "sm_90a", small).unwrap();
    assert!(texts.iter().all(|t| t.text.contains("__cluster_dims__(2, 1, 1)")), "{texts:?}");
    assert!(texts.iter().all(|t| t.passes[0].grid == 4), "{texts:?}");
    let expected = results(&plan, &fill, &floor);
    let mut bits: Option<Vec<Vec<u32>>> = None;
    for (schedule, threads) in SCHEDULES {
        let options = ptx::Options { schedule, threads, ..ptx::Options::default() };
        let found = results(&plan, &fill, &PtxDevice::hopper(options).unwrap().with_limits(small));
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let e = distance(&wide(found), &wide(expected));
            println!("{name} differs by {e:.1e}");
            assert!(e < 1.0 / 256.0, "{name} differs by {e}");
        }
        let now: Vec<Vec<u32>> =
            found.iter().map(|(_, values)| values.iter().map(|x| x.to_bits()).collect()).collect();
        assert!(bits.get_or_insert_with(|| now.clone()) == &now, "{schedule:?} has other bits");
    }
}

/// Kernels of latents in caches, in both types and with everything looked at: products by head of
/// all rows and of some, on both sides of the first row, and attention whose values are its keys.
#[test]
fn latents_are_right_and_clean() {
    use DType::{Bf16, F32, I32};
    let (rows, heads, out, inner, part, places) = (18, 5, 40, 72, 16, 70);
    let size = inner + 8;
    for dtype in [F32, Bf16] {
        let by_head = |first, part, transposed| {
            Kernel::ByHead(kernel::ByHead { rows, heads, out, inner, first, part, transposed, stored: false })
        };
        let shape = AttentionShape { batch: 2, queries: rows / 2, keys: places, heads, kv_heads: 1, size };
        let attention = Attention { scale: 0.3, mask: Mask::Positions, ..Attention::default() };
        let buffers: &[(&str, DType, &[u64])] = &[
            ("x", dtype, &[rows, heads * part]),
            ("c", dtype, &[rows, heads * inner]),
            ("w", dtype, &[heads * out, inner]),
            ("places", I32, &[rows]),
            ("absorbed", dtype, &[rows, heads * inner]),
            ("some", F32, &[rows, heads * inner]),
            ("values", dtype, &[rows, heads * (out - part)]),
            ("odd", F32, &[rows, heads * 3]),
            ("q", dtype, &[rows, heads * size]),
            ("latents", dtype, &[2 * places, size]),
            ("query_positions", I32, &[2, rows / 2]),
            ("key_positions", I32, &[2, places]),
            ("o", dtype, &[rows, heads * size]),
            ("lse", F32, &[rows, heads]),
        ];
        let operands = vec!["q", "latents", "latents", "query_positions", "key_positions", "o", "lse"];
        let plan = by_hand(
            buffers,
            vec![
                (by_head(0, part, true), vec!["x", "w", "absorbed"], None),
                (by_head(0, part, true), vec!["x", "w", "some"], Some("places")),
                (by_head(part, out - part, false), vec!["c", "w", "values"], None),
                (by_head(7, 3, false), vec!["c", "w", "odd"], Some("places")),
                (
                    Kernel::Attention(kernel::Attention {
                        shape,
                        attention: attention.clone(),
                        shared: true,
                        lengths: vec![],
                    }),
                    operands,
                    None,
                ),
            ],
        );
        let fill = |session: &mut dyn Session| {
            for (i, b) in plan.buffers.iter().enumerate() {
                let value = |j: u64| ((j * 7919 + i as u64 * 131) % 1013) as f32 / 1013.0 - 0.5;
                let int = |j: u64| match b.name.as_str() {
                    "places" if j % 3 == 1 => -1,
                    "key_positions" if (20..33).contains(&(j % places)) => -1,
                    "key_positions" => (j % places) as i32,
                    _ => j as i32 * 3,
                };
                write(session, BufferId(i as u32), b, value, int)?;
            }
            Ok(())
        };
        let expected = results(&plan, &fill, &CpuDevice::default());
        let bound = if dtype == F32 { 1e-5 } else { 1.0 / 128.0 };
        for (schedule, threads) in SCHEDULES {
            let options = ptx::Options { schedule, threads, ..ptx::Options::default() };
            let Some(device) = device(options) else { return };
            for ((name, found), (_, expected)) in results(&plan, &fill, &device).iter().zip(&expected) {
                let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                let e = distance(&wide(found), &wide(expected));
                assert!(e < bound, "{dtype:?} {schedule:?}: {name} differs by {e}");
            }
        }
    }
}

/// Tiles of other documents are passed over, tiles of one document take no mask, and tiles of two
/// are looked at by element: on the tensor cores and by warpgroups as in f32 on the ordinary cores,
/// which the naive kernels are compared with elsewhere.
#[test]
fn documents_are_apart_in_every_tile() {
    let Some(ordinary) = device(fast()) else { return };
    let shape = |tokens, heads, kv_heads, size| AttentionShape {
        batch: 1,
        queries: tokens,
        keys: tokens,
        heads,
        kv_heads,
        size,
    };
    let all = Attention { scale: 0.7, segments: true, ..Attention::default() };
    let cases = vec![
        (shape(420, 2, 1, 64), all.clone()),
        (shape(410, 1, 1, 128), Attention { window: Some(150), softcap: Some(2.0), ..all.clone() }),
        (shape(150, 2, 2, 64), all.clone()),
        // Two warpgroups share the rows of a head of 256, each with half of their gradients.
        (shape(140, 2, 1, 256), Attention { softcap: Some(2.0), segments: false, ..all.clone() }),
    ];
    let (plan, fill) = attention_of(cases.clone(), DType::Bf16);
    // Two blocks fill it.
    let small = Limits { processors: 2, ..Limits::default() };
    let texts = dreamc_device::gpu::sources(&plan, "sm_90a", small).unwrap();
    assert!(texts.iter().all(|t| t.text.contains("FlashWarpgroups<")), "{texts:?}");
    let (exact, fill_exact) = attention_of(cases, DType::F32);
    let expected = results(&exact, &fill_exact, &ordinary);
    let options = ptx::Options::default();
    let devices = [PtxDevice::new(options).unwrap(), PtxDevice::hopper(options).unwrap().with_limits(small)];
    for device in devices {
        for ((name, found), (_, expected)) in results(&plan, &fill, &device).iter().zip(&expected) {
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let e = distance(&wide(found), &wide(expected));
            println!("{}: {name} differs by {e:.1e}", device.name());
            assert!(e < 1.0 / 64.0, "{}: {name} differs by {e}", device.name());
        }
    }
}

/// Results of an attention of `attention_of` and its gradients, by the meaning of the operations in
/// f64, from the numbers that a device has.
fn by_meaning(
    s: &AttentionShape,
    a: &Attention,
    found: &[(String, Vec<f32>)],
) -> Vec<(&'static str, Vec<f64>)> {
    let AttentionShape { batch, queries, heads, kv_heads, size, .. } = *s;
    let masks = if a.segments { ", %segments" } else { "" };
    let log = if a.segments || a.softcap.is_some() { ", %dlse" } else { "" };
    let capped = a.softcap.map_or(String::new(), |cap| format!(" softcap {cap}"));
    let window = a.window.map_or(String::new(), |window| format!(" window {window}"));
    let words =
        format!("scale {}{capped}{window} mask causal{}", a.scale, if a.segments { " segments" } else { "" });
    let (q, k) = ("f32[b, t, n, d]", "f32[b, t, g, d]");
    let module = dreamc_compiler::ir::parse(&format!(
        "dims {{ b {batch}  t {queries}  n {heads}  g {kv_heads}  d {size} }}\n\
         func @f {{\n\
           input %q : {q}\n  input %k : {k}\n  input %v : {k}\n  input %do : {q}\n\
           input %segments : i32[b, t]\n  input %dlse : f32[b, t, n]\n\
           %0, %1 = attention %q, %k, %v{masks} {words} : {q}, f32[b, t, n]\n\
           %2, %3, %4 = attention_grad %q, %k, %v, %0, %1, %do{masks}{log} {words} : {q}, {k}, {k}\n\
           return o = %0, lse = %1, dq = %2, dk = %3, dv = %4\n\
         }}"
    ));
    let module = module.unwrap_or_else(|e| panic!("{e}"));
    let of = |name: &str| -> Vec<f64> {
        let values = found.iter().find(|(n, _)| n == name).map_or(vec![], |(_, values)| values.clone());
        values.into_iter().map(f64::from).collect()
    };
    let (tokens, wide, narrow) =
        ((batch * queries) as usize, (heads * size) as usize, (kv_heads * size) as usize);
    let all = of("qkv0");
    let columns = |from: usize, width: usize| -> Vec<f64> {
        all.chunks(wide + 2 * narrow).flat_map(|row| row[from..from + width].to_vec()).collect()
    };
    let segments = (0..tokens as u64).map(|j| segment(j, queries)).collect();
    let dlse = if log.is_empty() { vec![0.0; tokens * heads as usize] } else { of("dlse0") };
    let sizes = |list: [u64; 4]| list.map(|n| n as usize);
    let (q, k) = (sizes([batch, queries, heads, size]), sizes([batch, queries, kv_heads, size]));
    let args = [
        Tensor::float(&q, columns(0, wide)),
        Tensor::float(&k, columns(wide, narrow)),
        Tensor::float(&k, columns(wide + narrow, narrow)),
        Tensor::float(&q, of("cotangent0")),
        Tensor::int(&q[..2], segments),
        Tensor::float(&q[..3], dlse),
    ];
    let results = interpret(&module, &module.functions["f"], &args).unwrap_or_else(|e| panic!("{e}"));
    let result =
        |name: &str| results.iter().find(|(n, _)| n == name).map(|(_, t)| t.floats().to_vec()).unwrap();
    // Rows of gradients stand as those of queries, keys and values do.
    let parts = [("dq", wide), ("dk", narrow), ("dv", narrow)].map(|(name, width)| (result(name), width));
    let row =
        |i: usize| parts.iter().flat_map(move |(part, width)| part[i * width..(i + 1) * width].to_vec());
    vec![("o0", result("o")), ("lse0", result("lse")), ("dqkv0", (0..tokens).flat_map(row).collect())]
}

/// Gradients of heads of 256, whose rows two warpgroups share, are those of the operation's meaning
/// in f64: under a window and a soft-cap, with documents, and with as many heads of keys as of
/// queries. 147 and 203 tokens are not whole tiles. The naive kernels, which find every score anew
/// for each element, agree where a query sees two keys.
#[test]
fn gradients_of_heads_of_256_are_those_of_their_meaning() {
    let Some(_) = device(fast()) else { return };
    let shape = |batch, tokens, heads, kv_heads| AttentionShape {
        batch,
        queries: tokens,
        keys: tokens,
        heads,
        kv_heads,
        size: 256,
    };
    let all = Attention { scale: 0.4, ..Attention::default() };
    let cases = [
        (shape(1, 147, 2, 1), Attention { window: Some(90), softcap: Some(3.0), ..all.clone() }),
        (shape(2, 147, 1, 1), Attention { segments: true, ..all.clone() }),
        (shape(1, 203, 1, 1), all.clone()),
        (shape(1, 129, 1, 1), Attention { window: Some(2), ..all.clone() }),
    ];
    // Two blocks fill it.
    let small = Limits { processors: 2, ..Limits::default() };
    for (shape, attention) in cases {
        let (plan, fill) = attention_of(vec![(shape, attention.clone())], DType::Bf16);
        let texts = dreamc_device::gpu::sources(&plan, "sm_90a", small).unwrap();
        assert!(texts.iter().all(|t| t.text.contains("FlashWarpgroups<")), "{texts:?}");
        assert!(
            texts.iter().any(|t| t.text.contains("flash_grad_keys<FlashWarpgroups<S, 64, ")),
            "{texts:?}"
        );
        let hopper = PtxDevice::hopper(ptx::Options::default()).unwrap().with_limits(small);
        let naive = PtxDevice::naive(fast()).unwrap();
        let few = attention.window == Some(2);
        for device in [Some(&hopper), few.then_some(&naive)].into_iter().flatten() {
            let found = results(&plan, &fill, device);
            for (name, expected) in by_meaning(&shape, &attention, &found) {
                let values = &found.iter().find(|(n, _)| n == name).unwrap().1;
                let e = distance(&values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), &expected);
                println!("{shape:?}, {}: {name} differs by {e:.1e}", device.name());
                assert!(e < OF_BF16, "{}: {name} differs by {e}", device.name());
            }
        }
    }
}

/// Attention whose rows and probabilities are rounded to bf16, against f64.
const OF_BF16: f64 = 1.0 / 128.0;

#[test]
#[ignore = "takes minutes"]
fn all_products_of_warpgroups_under_three_schedules() {
    warpgroups(large_products(false), &SCHEDULES);
}

#[test]
#[ignore = "takes minutes"]
fn all_attention_of_warpgroups_under_three_schedules() {
    warpgroups(large_attention(false), &SCHEDULES);
}
