//! Devices do the same: the CPU as the interpreter, others as the CPU, one thread as several.

use super::formulas::{loops, share_to_leave};
use super::steps::Law;
use super::subject::{Subject, backward, streams};
use super::{Checks, Place, Proof, VerifyError, blame, error, transfer, widen};
use dreamc_compiler::architecture::components;
use dreamc_compiler::bind::{Input, Output, Owner};
use dreamc_compiler::compiled::{Compiled, Entry, Tensor, TensorKind};
use dreamc_compiler::lower::{Form, attention};
use dreamc_compiler::op::attention::drawn;
use dreamc_compiler::program::{ProgramKey, Task};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, matches};
use dreamc_device::agree::compare;
use dreamc_device::poison::Poisoned;
use dreamc_device::{Device, DeviceError, Session};
use dreamc_dsl::spec::{Balance, BalanceLaw, BalanceTarget, Item, Precision, depth_choice};
use dreamc_runtime::generate::NextLogits;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::schedule;
use indexmap::IndexMap;

/// A launch from the same memory rounds as often as its sums are long.
const LAUNCH: f64 = 5e-5;

/// How far an optimizer step may be off, relative to the longest move.
const STEP: f64 = 1e-3;

/// How far a number stored in bf16 may be off: half of its last bit.
const BF16: f64 = 1.02 / 256.0;

/// Devices agree.
pub struct Devices;

impl Proof for Devices {
    fn name(&self) -> &'static str {
        "devices"
    }

    fn claim(&self) -> &'static str {
        "devices agree"
    }

    fn how(&self) -> &'static str {
        "logits of training and evaluation on the CPU against f64, two optimizer steps against their formulas; the device \
         asked for against the CPU launch by launch, in every program, and its logits with unwritten memory poisoned"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let device = s.cpu(1);
        let mut model = s.load(&device, &s.options())?;
        optimizer(s, &mut model, checks)?;
        for (name, asked) in s.devices {
            // Where tokens can leave their loop, they do.
            let plain = s.cached_options(&Rewriting::default());
            let writing = Options { exit: share_to_leave(s), ..plain };
            let training = s.compile(&Options { depths: vec![], ..s.options() })?;
            let mut programs = vec![(
                &training,
                vec![ProgramKey::BACKWARD, ProgramKey::NORM, ProgramKey::UPDATE, ProgramKey::EVALUATE],
            )];
            let writing = if s.samples() { Some(s.compile(&writing)?) } else { None };
            if let Some(writing) = &writing {
                let all = [ProgramKey::PREPARE, ProgramKey::PREFILL, ProgramKey::DECODE];
                let there = |p: &ProgramKey| writing.plan.programs.contains_key(p);
                programs.push((writing, all.into_iter().filter(there).collect()));
            }
            for (compiled, names) in programs {
                for program in names {
                    let fill = |session: &mut dyn Session| fill(s, compiled, program, session);
                    for launch in compare(&compiled.plan, program, device.0.as_ref(), *asked, &fill)? {
                        let what = format!("{name}, {program}, {}, {}", launch.origin, launch.buffer);
                        let place = blame::of_origin(s, &launch.origin);
                        checks.check(what, launch.difference, LAUNCH, place);
                    }
                }
            }
        }
        s.conditioned()?;
        let tolerance = s.logits_tolerance()?;
        for (form, what) in [(Form::Inference, "evaluation"), (Form::Training, "training")] {
            let expected = s.forward(&s.oracle(None, &Rewriting::off(), form)?, &s.batch)?;
            let found = if form == Form::Inference {
                model.evaluate(&s.batch)?;
                widen(&model.all_logits()?)
            } else {
                backward(&mut model, &s.batch, None)?.logits
            };
            let e = error(&found, expected.logits.floats());
            let mut place = Place::default();
            if e > tolerance {
                let expected: Vec<Vec<f64>> = expected.streams.iter().map(|x| x.floats().to_vec()).collect();
                place = blame::first_stream(s, &streams(&mut model, Entry::Whole)?, &expected, tolerance);
            }
            checks.check(format!("logits of {what}"), e, tolerance, place);
        }
        for (name, asked) in s.devices {
            let expected = evaluated(s, &device)?;
            let found = evaluated(s, &Poisoned(Box::new(*asked)))?;
            checks.check(format!("{name}, logits"), error(&found, &expected), tolerance, Place::default());
        }
        Ok(None)
    }
}

/// Logits of evaluation on a device.
fn evaluated(s: &Subject, device: &dyn Device) -> Result<Vec<f64>, VerifyError> {
    let mut model = s.load(device, &s.options())?;
    model.evaluate(&s.batch)?;
    Ok(widen(&model.all_logits()?))
}

/// Weights and inputs of every program.
fn fill(
    s: &Subject,
    compiled: &Compiled,
    program: ProgramKey,
    session: &mut dyn Session,
) -> Result<(), DeviceError> {
    for t in &compiled.tensors {
        if let Some(tensor) = s.weights.get(&t.name) {
            let values: Vec<f32> = tensor.floats().iter().map(|&x| x as f32).collect();
            session.write_at(t.weight, t.instance, 0, &values)?;
            if let (Some(gradient), Task::Norm | Task::Update) = (t.gradient, program.task) {
                let values: Vec<f32> = values.iter().rev().map(|x| 0.1 * x).collect();
                session.write_at(gradient, t.instance, 0, &values)?;
            }
        }
    }
    let plan = &compiled.plan;
    let ints = |session: &mut dyn Session, entry, input, values: &dyn Fn(u64, u64) -> i32| {
        let Some(id) = compiled.input(entry, input) else { return Ok(()) };
        let [rows, n] = plan.buffer(id).shape[..] else { return Ok(()) };
        let values: Vec<i32> =
            (0..rows).flat_map(|r| (0..n).map(move |i| (r, i))).map(|(r, i)| values(r, i)).collect();
        session.write_at(id, 0, 0, &values)
    };
    let t = s.sequence() as u64;
    let of = |values: &[i32], row: u64, i: u64| values[((row * t + i) as usize) % values.len().max(1)];
    for (input, values) in [
        (Input::Ids, &s.batch.ids),
        (Input::Targets, &s.batch.targets),
        (Input::Positions, &s.batch.positions),
        (Input::Segments, &s.batch.segments),
    ] {
        ints(session, Entry::Whole, input, &|r, i| of(values, r, i))?;
    }
    // Generation goes on after two tokens that are in the caches as zeros.
    for entry in [Entry::Prefill, Entry::Decode] {
        ints(session, entry, Input::Asked, &|r, _| (r % 2) as i32)?;
        ints(session, entry, Input::Ids, &|r, i| of(&s.plain.ids, r, i))?;
        ints(session, entry, Input::Positions, &|_, i| i as i32 + 2)?;
        ints(session, entry, Input::Slots, &|_, i| i as i32 + 2)?;
        if entry.task() == program.task {
            let width = compiled.input(entry, Input::Ids).map_or(1, |id| plan.buffer(id).shape[1]);
            ints(session, entry, Input::KeyPositions, &|_, i| if i < 2 + width { i as i32 } else { -1 })?;
        }
    }
    for entry in Entry::ALL {
        let Some(id) = compiled.input(entry, Input::Noise) else { continue };
        let [rows, n, hidden] = plan.buffer(id).shape[..] else { continue };
        let positions: Vec<i32> = (0..rows * n).map(|i| (i % n) as i32).collect();
        let noise = dreamc_runtime::noise::of_positions(compiled.seed, &positions, hidden as usize);
        session.write_at(id, 0, 0, &noise)?;
    }
    if let Some(id) = compiled.input(Entry::Whole, Input::Draws) {
        let draws = super::subject::draws(&s.spec, &s.batch);
        for instance in 0..plan.buffer(id).instances {
            let (application, number) = (instance / compiled.draws.max(1), instance % compiled.draws.max(1));
            let values: Vec<i32> = draws.iter().map(|&x| drawn(x, application, number)).collect();
            session.write_at(id, instance, 0, &values)?;
        }
    }
    for cache in compiled.caches(Entry::Prefill, attention::part::CACHED) {
        let b = plan.buffer(cache.buffer);
        let none = vec![-1; (b.elements() * b.instances) as usize];
        session.write_at(cache.buffer, 0, 0, &none)?;
    }
    let scales = [(Input::LossScale, 1.0 / s.batch.learned().max(1) as f32), (Input::AuxScale, 1.0)];
    for (input, value) in scales.into_iter().chain(schedule::scalars(&s.spec.train, 1)) {
        if let Some(id) = compiled.input(Entry::Whole, input) {
            session.write_at(id, 0, 0, &[value])?;
        }
    }
    match compiled.output(Entry::Whole, Output::Norm) {
        Some(id) => session.write_at(id, 0, 0, &[1.5f32]),
        None => Ok(()),
    }
}

/// Two optimizer steps by the formulas, from the device's own gradients.
fn optimizer(s: &Subject, model: &mut Model, checks: &mut Checks) -> Result<(), VerifyError> {
    let train = &s.spec.train;
    let tensors = model.compiled().tensors.clone();
    let mut expected: IndexMap<&str, [Vec<f64>; 3]> = IndexMap::new();
    for t in &tensors {
        let w = widen(&model.get(&t.name)?);
        expected.insert(&t.name, [w.clone(), vec![0.0; w.len()], vec![0.0; w.len()]]);
    }
    model.drop_step()?;
    let base = transfer::shapes(&s.spec, &s.options(), s.pipeline)?;
    for step in 1..=2u64 {
        model.begin_step()?;
        model.backward(
            &s.batch,
            Scale { loss: 1.0 / s.batch.learned().max(1) as f32, auxiliary: 1.0 },
            None,
        )?;
        let mut gradients: IndexMap<&str, Vec<f64>> = IndexMap::new();
        let mut counts: IndexMap<&str, Vec<f64>> = IndexMap::new();
        for t in &tensors {
            if let Some(g) = model.gradient(t)? {
                gradients.insert(&t.name, widen(&g));
            }
            if t.counts.is_some() {
                counts.insert(&t.name, widen(&model.get(&format!("{}.counts", t.name))?));
            }
        }
        let norm = gradients.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
        if !norm.is_finite() {
            // A fault of gradients, for proofs that say where.
            return s.fill(model);
        }
        let found = f64::from(model.norm()?);
        checks.check(
            format!("gradient norm of step {step}"),
            (found - norm).abs() / norm.max(1e-9),
            1e-5,
            Place::default(),
        );
        model.update(&schedule::scalars(train, step))?;
        let clip = train.clip.map_or(1.0, |c| (c / norm).min(1.0));
        let lr = schedule::learning_rate(train, step);
        for t in &tensors {
            let Some(all) = expected.get_mut(t.name.as_str()) else { continue };
            let began = all[0].clone();
            let mut unsure = vec![];
            if let Some(g) = gradients.get(t.name.as_str()) {
                let Some((decay, rate, eps)) = recipe(s, &base, t) else {
                    all[0] = widen(&model.get(&t.name)?);
                    continue;
                };
                let clipped: Vec<f64> = g.iter().map(|g| g * clip).collect();
                let law = Law { train, step: step as i32, rate: lr * rate, decay, eps };
                unsure = law.apply(t, &clipped, all);
            } else if let (Some(n), Some(law)) = (counts.get(t.name.as_str()), balance(s, t)) {
                balanced(&mut all[0], n, law);
            }
            let w = &mut all[0];
            let found = widen(&model.get(&t.name)?);
            unsure.into_iter().for_each(|i| w[i] = found[i]);
            // A NaN is larger than any number.
            let larger = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b.abs()) };
            let largest = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0f64, larger);
            let moved = largest(&mut w.iter().zip(&began).map(|(a, b)| a - b));
            // Two bits of the largest weight are no move: a matrix that keeps its length rounds
            // twice.
            let bit = largest(&mut w.iter().copied()) * 2.4e-7;
            let off = largest(&mut found.iter().zip(w.iter()).map(|(a, b)| a - b));
            let e = off / moved.max(bit / STEP).max(1e-30);
            checks.check(format!("{} after step {step}", t.name), e, STEP, Place::of_tensor(&t.name));
            // Each step starts from equal weights, so that rounding is not magnified by the next.
            w.copy_from_slice(&found);
            if train.moments == Precision::Bf16 {
                for ((state, _), kept) in t.states.iter().zip(&mut all[1..]) {
                    let found = widen(&model.get(&format!("{}.{state}", t.name))?);
                    // A mean of numbers that cancel has few of their digits.
                    let least = largest(&mut kept.iter().copied()) * 1e-4;
                    let off = |(a, b): (&f64, &f64)| (a - b) / b.abs().max(least).max(1e-30);
                    let off = largest(&mut found.iter().zip(kept.iter()).map(off));
                    let name = format!("{}.{state} after step {step}", t.name);
                    checks.check(name, off, BF16, Place::of_tensor(&t.name));
                    kept.copy_from_slice(&found);
                }
            }
        }
    }
    s.fill(model)
}

/// Weight decay, and the factors on the learning rate and on AdamW's ε, of a tensor, where they are
/// known without the compiler.
fn recipe(s: &Subject, base: &transfer::Shapes, t: &Tensor) -> Option<(f64, f64, f64)> {
    let train = &s.spec.train;
    let matrix = t.shape.len() >= 2
        && t.kind != TensorKind::Steady
        && (t.kind != TensorKind::Embedding || train.decay_embeddings);
    let router = t.kind == TensorKind::Router;
    let mut chosen = (if matrix { train.weight_decay } else { 0.0 }, 1.0);
    for group in &train.groups {
        if matches(&group.pattern, &t.name) || (group.pattern == "routers" && router) {
            chosen = (group.weight_decay.unwrap_or(chosen.0), group.learning_rate);
        }
    }
    let [share, eps] = transfer::factors(&s.spec, s.depth(), base, t)?;
    Some((chosen.0 / share, chosen.1 * share, eps))
}

/// The balancing of a bias.
fn balance(s: &Subject, t: &Tensor) -> Option<Balance> {
    let model = &s.spec.model;
    if let Owner::Component(i) = t.owner {
        return components(model).get_index(i as usize)?.1.router()?.balance;
    }
    // Of the choices of a loop: the one of that number.
    let chosen = model.body.iter().enumerate().find_map(|(i, item)| match item {
        Item::Recur { items, .. } if t.name == format!("loops.{}.choice.bias", loops(&model.body[..i])) => {
            depth_choice(items).map(|(_, rate)| rate)
        }
        Item::Recur { .. } | Item::Layer(_) | Item::Statement(_) | Item::Repeat { .. } => None,
    });
    chosen.map(|rate| Balance { rate, target: BalanceTarget::Median, law: BalanceLaw::Sign })
}

/// `b += λ·law(target(N) - N)`
fn balanced(bias: &mut [f64], n: &[f64], law: Balance) {
    let mut sorted = n.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mean = n.iter().sum::<f64>() / n.len().max(1) as f64;
    let target = match law.target {
        BalanceTarget::Mean => mean,
        BalanceTarget::Median => (sorted[(n.len() - 1) / 2] + sorted[n.len() / 2]) / 2.0,
    };
    for (b, n) in bias.iter_mut().zip(n) {
        let off = target - n;
        *b += law.rate
            * match law.law {
                BalanceLaw::Sign if off == 0.0 => 0.0,
                BalanceLaw::Sign => off.signum(),
                BalanceLaw::Proportional if mean == 0.0 => 0.0,
                BalanceLaw::Proportional => off / mean,
            };
    }
}

/// The bits are the same on any number of threads.
pub struct Threads;

impl Proof for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn claim(&self) -> &'static str {
        "the same bits on 1, 2 and 3 threads"
    }

    fn how(&self) -> &'static str {
        "losses, gradients, weights after a step and decoded logits on the CPU"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let mut first: Option<Vec<(String, Vec<f32>)>> = None;
        for threads in 1..=3 {
            let device = s.cpu(threads);
            let mut model = s.load(&device, &s.options())?;
            let mut all = vec![("losses of tokens".to_string(), model.evaluate(&s.batch)?)];
            let trained = backward(&mut model, &s.batch, None)?;
            all.push(("loss".into(), vec![trained.loss as f32]));
            for (name, g) in trained.gradients {
                all.push((format!("gradient of {name}"), g.iter().map(|&x| x as f32).collect()));
            }
            model.norm()?;
            model.update(&schedule::scalars(&s.spec.train, 1))?;
            for (name, _) in model.entries() {
                let values = model.get(&name)?;
                all.push((name, values));
            }
            if s.samples() {
                let mut cached = s.cached(&device, &Rewriting::default())?;
                let t = s.sequence();
                let n = 3.min(t);
                let prompts = s.plain.ids.chunks(t).map(|r| r[..n].iter().map(|&i| i as u32).collect());
                let mut logits = cached.start(&prompts.collect::<Vec<_>>())?;
                if t > n {
                    logits.extend(
                        cached.advance(&s.plain.ids.chunks(t).map(|r| r[n] as u32).collect::<Vec<_>>())?,
                    );
                }
                all.push(("decoded logits".into(), logits.concat()));
            }
            let Some(first) = &first else {
                first = Some(all);
                continue;
            };
            for ((name, a), (_, b)) in first.iter().zip(&all) {
                let other = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                let tensor = name.strip_prefix("gradient of ").unwrap_or(name);
                let place = if tensor.contains('.') { Place::of_tensor(tensor) } else { Place::default() };
                checks.check(format!("bits of {name} on {threads} threads"), other as f64, 0.0, place);
            }
        }
        Ok(None)
    }
}
