//! What Mixture-of-Depths saves: step time and decode rate at capacities 1, 1/2, 1/4 and 1/8.
//!
//! ```sh
//! cargo run --release -p dreamc-runtime --example skipping
//! ```
//!
//! Every layer of a small model is wrapped in `skip(capacity C, causal bce)`. It learns random tokens for some steps, so
//! that its routers decide for about a share C of the tokens; then training steps and greedy decoding are timed.

use dreamc_compiler::program::BufferId;
use dreamc_compiler::{Options, compile};
use dreamc_dsl::Spelling;
use dreamc_runtime::device::Device;
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::generate::{Cached, NextLogits, compile_cached};
use dreamc_runtime::model::Model;
use dreamc_runtime::rng::Philox;
use std::error::Error;
use std::time::Instant;

const BATCH: usize = 4;
const TOKENS: usize = 256;
const VOCAB: usize = 256;
const LEARN: usize = 40;
const TIMED: usize = 7;
const DECODED: usize = 160;

fn text(capacity: f64, layers: &str) -> String {
    format!(
        "model:\n  name: skipping\n  vocab: {VOCAB}\n  hidden: 256\n  context: {TOKENS}\n  components:\n    \
         sa: {{sequence: {{heads: 4, head_size: 64}}}}\n    mlp: {{mlp: {{intermediate: 1024}}}}\n  \
         body:\n    - repeat: 2\n      layers: [{layers}, \"skip(capacity {capacity}, causal bce 1) {{ sa > mlp }}\"]\n\
         train: {{steps: 1, batch: {BATCH}, weight_decay: 0}}\n"
    )
}

struct Figures {
    /// Seconds of a training step, the shortest of some.
    step: f64,
    /// Tokens written a second, one sequence at a time.
    rate: f64,
    /// Share of the tokens that the wrapped layers processed while decoding.
    processed: f64,
}

fn measure(device: &dyn Device, capacity: f64, alternate: bool) -> Result<Figures, Box<dyn Error>> {
    let wrapped = format!("\"skip(capacity {capacity}, causal bce 1) {{ sa > mlp }}\"");
    let layers = if alternate { "\"sa > mlp\"".to_string() } else { wrapped };
    let ast = dreamc_dsl::parse("skipping", &text(capacity, &layers), Spelling::Yaml)?;
    let spec = dreamc_dsl::check(&ast, &[])?.0;
    let options = Options { batch: BATCH as u64, sequence: TOKENS as u64, train: true, ..Options::default() };
    let compiled = compile(&spec, &options)?;
    let tensors = compiled.tensors.clone();
    let find = |name: &str| compiled.plan.find(name);
    let names = ["ids", "targets", "positions", "loss_scale", "aux_scale", "scalars"];
    let [ids, targets, positions, loss_scale, aux_scale, scalars] = names.map(find);
    let mut model = Model::load(device, compiled.clone())?;
    model.initialise(0)?;
    let mut random = Philox::new(0, "skipping").stream(0);
    let session = model.session();
    let put = |session: &mut dyn dreamc_runtime::device::Session, id: Option<BufferId>, values: &[i32]| {
        id.map_or(Ok(()), |id| session.write_at(id, 0, 0, values))
    };
    put(session, positions, &(0..BATCH * TOKENS).map(|i| (i % TOKENS) as i32).collect::<Vec<_>>())?;
    for (id, value) in [(loss_scale, 1.0 / (BATCH * TOKENS) as f32), (aux_scale, 1.0)] {
        if let Some(id) = id {
            session.write_at(id, 0, 0, &[value])?;
        }
    }
    let mut best = f64::INFINITY;
    for step in 0..LEARN + TIMED {
        let tokens: Vec<i32> = (0..BATCH * TOKENS).map(|_| (random.unit() * VOCAB as f64) as i32).collect();
        put(session, ids, &tokens)?;
        put(session, targets, &tokens)?;
        if let Some(id) = scalars {
            let correct = |beta: f64| 1.0 / (1.0 - beta.powi(step as i32 + 1));
            let values = [3e-3, correct(0.9), correct(0.999), 1.0, 0.0, 0.0, 0.0, 0.0].map(|x| x as f32);
            session.write_at(id, 0, 0, &values)?;
        }
        let begun = Instant::now();
        for program in ["backward", "norm", "update"] {
            session.run(program)?;
        }
        if step >= LEARN {
            best = best.min(begun.elapsed().as_secs_f64());
        }
    }
    let mut cached = Cached::load(device, compile_cached(&spec, 1, None, None, &Default::default())?)?;
    for t in &tensors {
        let mut values = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
        session.read_at(t.weight, t.instance, 0, &mut values)?;
        cached.model().set(&t.name, &values)?;
    }
    let mut rate = 0.0f64;
    let mut processed = 0.0;
    for _ in 0..3 {
        let prompt = (0..32).map(|_| (random.unit() * VOCAB as f64) as u32).collect();
        cached.start(&[prompt])?;
        let begun = Instant::now();
        for _ in 0..DECODED {
            cached.advance(&[(random.unit() * VOCAB as f64) as u32])?;
        }
        rate = rate.max(DECODED as f64 / begun.elapsed().as_secs_f64());
        let caches = cached.processed()?;
        let counts: Vec<usize> = caches.iter().flat_map(|c| &c.1).map(|rows| rows[0]).collect();
        processed = counts.iter().sum::<usize>() as f64 / (counts.len() * (32 + DECODED)) as f64;
    }
    Ok(Figures { step: best, rate, processed })
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = CpuDevice::new(CpuOptions::default());
    println!("{}, hidden 256, 4 layers, {BATCH} x {TOKENS} tokens a step\n", device.name());
    println!("| layers wrapped | C | step ms | step / C=1 | tokens/s | rate / C=1 | processed |");
    println!("|---|---|---|---|---|---|---|");
    for (what, alternate) in [("every", false), ("every other", true)] {
        let mut first: Option<Figures> = None;
        for capacity in [1.0, 0.5, 0.25, 0.125] {
            let f = measure(&device, capacity, alternate)?;
            let (step, rate) =
                first.as_ref().map_or((1.0, 1.0), |one| (f.step / one.step, f.rate / one.rate));
            println!(
                "| {what} | {capacity} | {:.1} | {step:.2} | {:.0} | {rate:.2} | {:.2} |",
                f.step * 1e3,
                f.rate,
                f.processed
            );
            first.get_or_insert(f);
        }
    }
    Ok(())
}
