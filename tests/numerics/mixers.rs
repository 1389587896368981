//! The mixers of the library against their authors' code (`tests/hf/mixers.py`): logits, every
//! gradient, and generation from a cache token by token.

use crate::export::{Expected, python, real, write};
use crate::support::cpu;
use dreamc_compiler::program::{Kernel, Plan};
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_data::rng::Philox;
use dreamc_dsl::define::library::LIBRARY;
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_runtime::checkpoint::safetensors::Dtype;
use dreamc_runtime::generate::{Cached, Next, NextLogits, Writing, compile_cached};
use dreamc_runtime::model::{Model, Scale};
use std::path::Path;

const ROWS: usize = 2;
/// Tokens of a row: more than a chunk, and no number of chunks.
const TOKENS: usize = 70;
/// Tokens of a prompt; a text goes on after it token by token.
const PROMPT: usize = 66;
const VOCAB: u64 = 32;

/// Mixers that may be refused, since a function of theirs is not lowered everywhere, and the words.
const REFUSED: [(&str, &str); 3] = [
    ("alibi", "a value of a region outside it"),
    ("lightning", "a value of a region outside it"),
    ("retnet", "a value of a region outside it"),
];

/// Whether it is refused, in those words.
fn is_refused(name: &str) -> bool {
    let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == name) else { return false };
    match compile(&spec(name), &Options::default()) {
        Ok(_) => false,
        Err(error) => {
            assert!(error.to_string().contains(why), "{name}: {error}");
            true
        }
    }
}

/// Sizes of a mixer, where they are not its own.
fn sizes(name: &str) -> &'static str {
    match name {
        "falcon_h1" => {
            "heads 4  kv_heads 2  head 4  base 500  size 4  groups 2  members 4  state 6  read 1.25  gate 0.7  values 0.5  keys 0.9 \
             queries 1.4  steps 1.2  mixed 0.6  seen 1.3  key 0.7  attended 0.9"
        }
        "moba" => "block 8  blocks 3",
        "dsa" => "indexers 3  index 8  tokens 24",
        "nsa" => "groups 2  block 8  blocks 4  window 11",
        "mamba2" => "size 4  groups 2  state 6",
        "scaled_mlp" => "wide 24  gate 0.8  down 0.6",
        "rwkv7" => "size 4  decay_rank 3  rate_rank 3  value_rank 2  gate_rank 5",
        _ => "",
    }
}

fn spec(name: &str) -> Spec {
    let sizes = sizes(name);
    let text = format!(
        "model m {{
           vocab {VOCAB}  hidden 16  context 80
           own = {name} {{ {sizes} }}
           repeat 3 {{ own }}
         }}
         train {{ batch {ROWS}  sequence {TOKENS}  precision f32 }}"
    );
    let ast = parse("m.dream", &text, Spelling::Dream).unwrap_or_else(|e| panic!("{name}: {e}"));
    check(&ast, &[]).unwrap_or_else(|e| panic!("{name}: {e}")).0
}

/// Weights that show where a gain, a bias or a decay is another.
fn fill(model: &mut Model) {
    model.initialise(7).unwrap();
    for (name, shape) in model.entries() {
        let mut random = Philox::new(7, &name).stream(1);
        let width = if shape.len() > 1 { 0.6 / (*shape.last().unwrap() as f64).sqrt() } else { 0.6 };
        // Input gates of an mLSTM that are not near zero, so that its running maximum moves.
        let more = if name.ends_with(".i.weight2") { 8.0 } else { 0.0 };
        let near = |x: &f32| x + more + (width * (random.unit() - 0.5)) as f32;
        let values: Vec<f32> = model.get(&name).unwrap().iter().map(near).collect();
        model.set(&name, &values).unwrap();
    }
}

/// The logits after each token from the last of the prompts on.
fn cached(spec: &Spec, texts: &[Vec<u32>]) -> Vec<f32> {
    let writing = Writing { rows: ROWS as u64, ..Writing::default() };
    let mut cached = Cached::load(&cpu(2), compile_cached(spec, &writing).unwrap()).unwrap();
    fill(cached.model());
    let prompts: Vec<Vec<u32>> = texts.iter().map(|text| text[..PROMPT].to_vec()).collect();
    let mut found = vec![cached.start(&prompts).unwrap()];
    for t in PROMPT..TOKENS {
        let next: Vec<Next> =
            texts.iter().enumerate().map(|(row, text)| Next::written(row, &text[t])).collect();
        found.push(cached.step(&next).unwrap());
    }
    (0..ROWS).flat_map(|row| found.iter().flat_map(move |step| step[row].clone())).collect()
}

/// Mixers whose recurrence is linear attention.
const CHUNKED: [&str; 10] = [
    "deltanet",
    "falcon_h1",
    "gated_delta",
    "gla",
    "kda",
    "lightning",
    "linear_attention",
    "mamba2",
    "retnet",
    "rwkv7",
];

/// How many kernels of a plan are linear attention, and how many go token by token.
fn recurrences(plan: &Plan) -> [usize; 2] {
    let chunks = |k: &&Kernel| matches!(k, Kernel::LinearAttention(_) | Kernel::LinearAttentionGrad(_));
    let steps = |k: &&Kernel| matches!(k, Kernel::Recurrence(_) | Kernel::RecurrenceGrad(_));
    [plan.kernels.iter().filter(chunks).count(), plan.kernels.iter().filter(steps).count()]
}

#[test]
fn mixers_train_and_write_in_chunks() {
    for (name, _) in LIBRARY.iter().filter(|(name, _)| !is_refused(name)) {
        let spec = spec(name);
        let options = Options { batch: 2, sequence: 80, train: true, ..Options::default() };
        let training = recurrences(&compile(&spec, &options).unwrap().plan);
        let writing = Writing { rows: 2, ..Writing::default() };
        let writing = recurrences(&compile_cached(&spec, &writing).unwrap().plan);
        let (chunked, steps) = (CHUNKED.contains(name), *name == "mlstm");
        for (what, [chunks, alone]) in [("training", training), ("generation", writing)] {
            assert_eq!((chunks > 0, alone > 0), (chunked, steps), "{name}: {what}");
        }
    }
}

fn write_mixer(name: &str, at: &Path) {
    let spec = spec(name);
    let (rows, n) = (ROWS as u64, TOKENS as u64);
    let mut random = Philox::new(3, name).stream(0);
    let texts: Vec<Vec<u32>> =
        (0..ROWS).map(|_| (0..=TOKENS).map(|_| random.below(VOCAB) as u32).collect()).collect();
    let options = Options { batch: rows, sequence: n, train: true, logits: true, ..Options::default() };
    let mut model = Model::load(&cpu(1), compile(&spec, &options).unwrap()).unwrap();
    fill(&mut model);
    let of = |from: usize| texts.iter().flat_map(move |t| t[from..from + TOKENS].iter().map(|&id| id as i32));
    let mut batch = Batch::new(TOKENS);
    batch.ids = of(0).collect();
    batch.targets = of(1).collect();
    batch.positions = (0..ROWS).flat_map(|_| 0..TOKENS as i32).collect();
    batch.segments = vec![0; ROWS * TOKENS];
    model.begin_step().unwrap();
    model.backward(&batch, Scale { loss: 1.0 / (ROWS * TOKENS) as f32, auxiliary: 1.0 }, None).unwrap();
    let mut list: Vec<Expected> = vec![];
    for tensor in model.compiled().tensors.iter() {
        let (name, shape) = (&tensor.name, &tensor.shape);
        list.push(real(&format!("weights.{name}"), shape, &model.get(name).unwrap()));
        let zeros = || vec![0.0; shape.iter().product::<u64>() as usize];
        let gradient = model.gradient(tensor).unwrap().unwrap_or_else(zeros);
        list.push(real(&format!("gradients.{name}"), shape, &gradient));
    }
    model.evaluate(&batch).unwrap();
    list.push(real("logits", &[rows, n, VOCAB], &model.all_logits().unwrap()));
    let behind = (TOKENS - PROMPT + 1) as u64;
    list.push(real("cached", &[rows, behind, VOCAB], &cached(&spec, &texts)));
    let ids = texts.iter().flatten().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    list.push(("ids".into(), vec![rows, n + 1], Dtype::I64, ids));
    write(&at.join(format!("{name}.safetensors")), &[], &list);
}

#[test]
fn mixers_of_the_library_are_their_authors() {
    if dreamc_skip::transformers().is_none() {
        return;
    }
    let only = std::env::var("DREAMC_MIXER").ok();
    let place = tempfile::tempdir().unwrap();
    for (name, _) in LIBRARY.iter().filter(|(name, _)| only.as_ref().is_none_or(|o| o == name)) {
        if !is_refused(name) {
            write_mixer(name, place.path());
        }
    }
    println!("{}", python("mixers.py", &["all", place.path().to_str().unwrap()]).unwrap());
}
