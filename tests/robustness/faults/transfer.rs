//! Faults in rates that carry: in what a rule reads off a model, in what it warns of, in trials of
//! a ladder, in multipliers that are folded.
//!
//! Factors are compared with those of the papers' tables for a model whose fans, layers and passes
//! are known by hand; findings with the list of what the model does; a ladder with what its ledgers
//! say; a folded model with the logits of the one that it was.

use crate::support::sandbox::Sandbox;
use dreamc_compiler::transfer::{findings, table};
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::spec::{Component, OptimizerKind, Stream, TransferRule};
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_hf::hugging_face;
use dreamc_runtime::checkpoint::Weights;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare::forward;
use libtest_mimic::Failed;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A fault.
pub struct Fault {
    pub name: &'static str,
    of: Of,
}

enum Of {
    /// The model that the rule reads.
    Factors(fn(&mut Spec)),
    /// The same, of one whose head is the embedding.
    Tied(fn(&mut Spec)),
    /// The model that findings are of.
    Findings(fn(&mut Spec)),
    /// The account of a ladder.
    Ladder(fn(&mut Value)),
    /// Tensors of a folded model: by name, their numbers, and what was folded into them.
    Fold(fn(&str, &mut [f32], f32)),
}

pub fn faults() -> Vec<Fault> {
    let mut all = vec![];
    let mut add = |name, of| all.push(Fault { name, of });
    add(
        "a fan in that does not see heads grow",
        Of::Factors(|s| {
            transfer(s).sizes.insert("sa.heads".into(), 4);
            transfer(s).sizes.insert("sa.kv_heads".into(), 2);
        }),
    );
    add(
        "a fan in of a network as large as here",
        Of::Factors(|s| {
            transfer(s).sizes.insert("mlp.intermediate".into(), 48);
        }),
    );
    add(
        "a fan in of experts as large as here",
        Of::Factors(|s| {
            transfer(s).sizes.insert("ea.intermediate".into(), 24);
        }),
    );
    add(
        "a fan in of all experts together",
        Of::Factors(|s| {
            // Those of the base for one of them: a fourth of what a sum is of.
            transfer(s).sizes.insert("ea.intermediate".into(), 24 / 2 / 4);
        }),
    );
    add("branches of half as many layers", Of::Factors(|s| transfer(s).depth *= 2));
    add(
        "branches as if the stream were a mean",
        Of::Factors(|s| s.model.stream = Stream::Attend { block: 1 }),
    );
    add(
        "branches by the depth and not by its root",
        Of::Factors(|s| transfer(s).rule = TransferRule::Completep),
    );
    add("branches without a factor", Of::Factors(|s| transfer(s).rule = TransferRule::Spectral));
    add("passes of a loop taken for layers", Of::Factors(|s| transfer(s).passes = None));
    add("passes of a loop forgotten", Of::Factors(|s| transfer(s).passes = Some(4)));
    add(
        "the exponent of gradients for an optimizer without",
        Of::Factors(|s| {
            s.train.optimizer = OptimizerKind::Sgd(0.9);
        }),
    );
    add("no rule at all", Of::Factors(|s| transfer(s).rule = TransferRule::Standard));
    add("a tied head taken for one of its own", Of::Tied(|s| s.model.tie = false));
    add("logits of a tied head that grow", Of::Tied(|s| s.model.logit_scale = Some(1.0)));
    add(
        "scores by the root of the size of heads",
        Of::Tied(|s| {
            if let Some(Component::Sequence(a)) = s.model.components.get_mut("sa") {
                a.scale = None;
            }
        }),
    );
    add(
        "a scale that is written, not seen",
        Of::Findings(|s| {
            if let Some(Component::Sequence(a)) = s.model.components.get_mut("sa") {
                a.scale = None;
                s.carry();
            }
        }),
    );
    add("a base of another topology, not seen", Of::Findings(|s| transfer(s).depth = 2));
    add(
        "a branch without an end, not seen",
        Of::Findings(|s| {
            if s.model.components.len() == 1 {
                transfer(s).depth = 4;
            }
        }),
    );
    add(
        "sums of gates that grow, not seen",
        Of::Findings(|s| {
            if let Some(Component::Experts(ea)) = s.model.components.get_mut("ea") {
                ea.router.normalise = true;
            }
        }),
    );
    add(
        "experts that grow in number, not seen",
        Of::Findings(|s| {
            transfer(s).sizes.shift_remove("ea.count");
        }),
    );
    add("a mean of sources that moves together, not seen", Of::Findings(|s| s.model.stream = Stream::Sum));
    add(
        "a scale that a definition writes, not seen",
        Of::Findings(|s| {
            transfer(s).sizes.insert("own.size".into(), 16);
        }),
    );
    add(
        "a trial that goes on and is not the best",
        Of::Ladder(|m| {
            let of = m["halved"][0]["trials"][0].as_array_mut().unwrap();
            let left = (0..3).find(|k| !of.contains(&Value::from(*k))).unwrap();
            of[0] = left.into();
        }),
    );
    add("a trial that is not halved away", Of::Ladder(|m| m["halved"][0]["trials"][0] = (0..3).collect()));
    add(
        "a trial that is hidden",
        Of::Ladder(|m| {
            m["trials"][0].as_array_mut().unwrap().pop();
        }),
    );
    add(
        "an arm that goes on with another trial",
        Of::Ladder(|m| {
            let own = m["chosen"][0].as_u64().unwrap();
            let of = m["halved"][0]["trials"][0].as_array().unwrap();
            m["chosen"][0] = of.iter().find(|k| k.as_u64() != Some(own)).unwrap().clone();
        }),
    );
    add(
        "a rate that is tried again, and was not carried",
        Of::Ladder(|m| {
            let rate = m["recheck"]["rates"][0].as_f64().unwrap();
            m["recheck"]["rates"][0] = (rate * 4.0).into();
        }),
    );
    add(
        "a rate that is tried again at the size of its tuning",
        Of::Ladder(|m| {
            m["recheck"]["cell"] = m["cells"][0]["name"].clone();
        }),
    );
    add(
        "a scale of scores that is not folded",
        Of::Fold(|name, x, by| multiplied(name, "q_norm.weight", x, 1.0 / by)),
    );
    add(
        "a scale of scores that is folded twice",
        Of::Fold(|name, x, by| multiplied(name, "q_norm.weight", x, by)),
    );
    add(
        "a scale of scores that is folded into one layer",
        Of::Fold(|name, x, by| multiplied(name, "layers.1.self_attn.q_norm.weight", x, 1.0 / by)),
    );
    add(
        "a scale of logits that is not folded",
        Of::Fold(|name, x, _| multiplied(name, "model.norm.weight", x, 3.0)),
    );
    all
}

/// Multiplies a tensor whose name ends so.
fn multiplied(name: &str, end: &str, x: &mut [f32], by: f32) {
    if name.ends_with(end) {
        x.iter_mut().for_each(|x| *x *= by);
    }
}

fn transfer(spec: &mut Spec) -> &mut dreamc_dsl::spec::Transfer {
    spec.train.transfer.as_mut().expect("a rule")
}

fn spec(text: &str) -> Spec {
    let ast = parse("m.yaml", text, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}"));
    check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// Twice as wide; layers and passes together one and a half times as many, passes twice.
const FACTORS: &str = "
model:
  name: m
  vocab: 9
  hidden: 32
  context: 8
  components:
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 8}}
    mlp: {mlp: {intermediate: 48}}
    ea: {experts: {count: 4, active: 2, intermediate: 24, router: {form: linear}}}
  body: [{repeat: 4, layers: [\"sa > mlp\"]}, {recur: 4, layers: [\"ea\"]}]
train: {transfer: {rule: mup, width: 16, depth: 4, passes: 2}}
";

/// Weights with the factors on their rate, and the deviations of first values.
fn expected_factors() -> Vec<(&'static str, f64, f64)> {
    // Defaults of the base: table 3 of the paper of SEMANTICS, section 9.
    let (plain, end) = ((1.0f64 / 80.0).sqrt(), (1.0f64 / (2.5 * 16.0 * 4.0 * 2.0)).sqrt());
    // Layers and half of the passes, over those of the base.
    let layers = (4.0 + 4.0 / 2.0) / 4.0f64;
    let (root, passes, half) = (layers.powf(-0.5), 0.5, 0.5f64);
    vec![
        ("embed.weight", 1.0, plain),
        ("head.weight", half, plain * half),
        ("layers.0.sa.norm.weight", root, 0.0),
        ("layers.0.sa.qkv.weight", half * root, plain * half.sqrt()),
        ("layers.0.sa.out.weight", half * root * root, end * half.sqrt() * root),
        ("layers.0.mlp.up.weight", half * root, plain * half.sqrt()),
        ("layers.0.mlp.down.weight", half * root * root, end * half.sqrt() * root),
        ("layers.4.ea.router.weight", half * root, plain * half),
        ("layers.4.ea.gate.weight", half * root, plain * half.sqrt()),
        ("layers.4.ea.down.weight", half * root * root * passes, end * half.sqrt() * root * passes),
    ]
}

fn apart(a: f64, b: f64) -> bool {
    (a - b).abs() > 1e-9 * b.abs().max(1e-9)
}

fn factors(spec: &Spec) -> Result<Option<String>, Failed> {
    let table = table(spec).map_err(|e| e.to_string())?;
    for (weight, rate, deviation) in expected_factors() {
        let Some(line) = table.lines.iter().find(|line| line.weight == weight) else {
            return Ok(Some(format!("there is no {weight}")));
        };
        if apart(line.rate, rate) {
            return Ok(Some(format!("{weight} has the rate {}, not {rate}", line.rate)));
        }
        if apart(line.deviation.unwrap_or_default(), deviation) {
            return Ok(Some(format!("{weight} begins with {:?}, not {deviation}", line.deviation)));
        }
    }
    Ok(None)
}

/// A head that is the embedding, and heads of twice the size.
const TIED: &str = "
model:
  name: m
  vocab: 9
  hidden: 32
  context: 8
  tie: true
  components:
    sa: {sequence: {heads: 2, kv_heads: 2, head_size: 16}}
  body: [{repeat: 2, layers: [sa]}]
train: {transfer: {rule: mup, width: 16, depth: 2, sizes: {sa.heads: 2, sa.kv_heads: 2, sa.head_size: 8}}}
";

fn tied(spec: &Spec) -> Option<String> {
    let scale = spec.model.components["sa"].attention().and_then(|a| a.scale);
    let logits = spec.model.logit_scale.filter(|_| spec.model.tie);
    match (logits, scale) {
        (Some(logits), Some(scale)) if !apart(logits, 0.5) && !apart(scale, 8f64.sqrt() / 16.0) => None,
        found => Some(format!("logits and scores have {found:?}")),
    }
}

/// One part of each kind that a rule says nothing of.
const FINDINGS: &str = "
define:
  product:
    settings: {size: 16}
    code: |
      q = linear(x, [size])
      k = linear(x, [size])
      return linear(x, [hidden]) * dot(q, k, over size) * rsqrt(size)
model:
  name: m
  vocab: 9
  hidden: 32
  context: 8
  stream: {attend: {block: 1}}
  components:
    sa: {sequence: {heads: 2, kv_heads: 2, head_size: 16, scale: 0.3}}
    ea: {experts: {count: 4, active: 2, intermediate: 24, router: {form: linear, normalise: false}}}
    own: {product: {size: 16}}
  body: [{repeat: 2, layers: [\"sa > ea\", own]}]
train:
  transfer: {rule: completep, width: 16, depth: 3, sizes: {sa.heads: 2, sa.kv_heads: 2, sa.head_size: 8, ea.count: 2, ea.active: 1, own.size: 8}}
";

/// A part that ends in no weight.
const UNENDED: &str = "
define:
  bounded:
    settings: {}
    code: |
      return tanh(linear(x, [hidden]))
model:
  name: m
  vocab: 9
  hidden: 32
  context: 8
  components:
    own: {bounded: {}}
  body: [{repeat: 4, layers: [own]}]
train: {transfer: {rule: mup, width: 16, depth: 2}}
";

const FOUND: [(&str, &str); 7] = [
    ("`sa.scale`", "it is written as 0.3"),
    ("`train.transfer.depth`", "another topology"),
    ("`own", "by a scale that it writes itself"),
    ("`ea.active`", "no rule is known for the sum"),
    ("`ea.count`", "how many share the tokens"),
    ("`model.stream`", "move together"),
    ("`own", "no weight is in proportion"),
];

fn found(fault: fn(&mut Spec)) -> Option<String> {
    let mut said: Vec<String> = vec![];
    for text in [FINDINGS, UNENDED] {
        let mut spec = spec(text);
        fault(&mut spec);
        let found = findings(&spec);
        if let Some(nowhere) = found.iter().find(|d| d.span.is_none()) {
            return Some(format!("`{}` has no token", nowhere.message));
        }
        said.extend(found.into_iter().map(|d| d.message));
    }
    let missing =
        FOUND.iter().find(|(weight, why)| !said.iter().any(|s| s.contains(weight) && s.contains(why)));
    missing.map(|(weight, why)| format!("of {weight} nobody says `{why}`"))
}

/// A ladder of three values that are halved once, one arm.
struct Climbed {
    sandbox: Sandbox,
}

const ARM: &str = "\
let: {h: 16}
model:
  name: one
  vocab: 256
  hidden: h
  context: 64
  components:
    mlp: {mlp: {intermediate: 2 * h}}
  body: [{repeat: 2, layers: [mlp]}]
";

const SUITE: &str = "\
name: rise
baseline: one.yaml
variants: [{spec: two.yaml}]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 20, batch: 2, sequence: 32, warmup: 2, schedule: cosine, precision: f32, evaluate: {every: 10, batches: 1}}
eval: {examples: 4, max_tokens: 8}
sweep: {train.learning_rate: [1e-3, 4e-3, 1.6e-2]}
sweep_edge: allow
ladder: {sizes: {small: {h: 16}, large: {h: 32}}, budgets: [2e8], transfer: mup, halving: 2, recheck: true}
equal: {flops: 90%, parameters: 90%}
seeds: [0]
";

fn climbed() -> &'static Climbed {
    static ONCE: OnceLock<Climbed> = OnceLock::new();
    ONCE.get_or_init(|| {
        let two = ARM.replace("name: one", "name: two").replace("repeat: 2", "repeat: 3");
        let sandbox = Sandbox::with(&[("one.yaml", ARM), ("two.yaml", &two), ("rise.suite.yaml", SUITE)]);
        sandbox.good(&["compare", "rise.suite.yaml", "--out", "out", "--threads", "1"]);
        Climbed { sandbox }
    })
}

/// The first entry of a ladder that its ledgers do not bear out.
fn audited(fault: Option<fn(&mut Value)>) -> Option<String> {
    let out = climbed().sandbox.path("out");
    let mut manifest: Value =
        serde_json::from_str(&fs::read_to_string(out.join("ladder.json")).unwrap()).unwrap();
    if let Some(fault) = fault {
        fault(&mut manifest);
    }
    let loss = |folder: &str, trial: &str| -> Option<f64> {
        let path = out.join(folder).join(format!("{trial}-seed0/ledger.json"));
        let ledger: Value = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
        ledger["validation_loss"].as_f64()
    };
    let trained = |folder: &str| -> Vec<String> {
        let all = fs::read_dir(out.join(folder)).map(|all| all.flatten().collect()).unwrap_or(vec![]);
        let runs = all.into_iter().filter(|entry| entry.path().join("ledger.json").is_file());
        runs.map(|entry| entry.file_name().to_string_lossy().replace("-seed0", "")).collect()
    };
    let names = |arm: usize| -> Vec<String> {
        let all = manifest["trials"][arm].as_array().unwrap();
        all.iter().map(|trial| trial["name"].as_str().unwrap().to_string()).collect()
    };
    let arms: Vec<&str> = manifest["arms"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
    let listed: Vec<String> = (0..arms.len()).flat_map(names).collect();
    if let Some(hidden) = trained("sweep").into_iter().find(|run| !listed.contains(run)) {
        return Some(format!("{hidden} is in no list"));
    }
    let halved = &manifest["halved"][0];
    let cell = halved["cell"].as_str().unwrap();
    for (arm, name) in arms.iter().enumerate() {
        let own = names(arm);
        let best = |folder: &str, of: &[usize]| -> Vec<usize> {
            let mut order: Vec<usize> =
                of.iter().copied().filter(|k| loss(folder, &own[*k]).is_some()).collect();
            order.sort_by(|a, b| loss(folder, &own[*a]).partial_cmp(&loss(folder, &own[*b])).unwrap());
            order
        };
        let mut expected = best("sweep", &(0..own.len()).collect::<Vec<_>>());
        expected.truncate(own.len().div_ceil(2));
        expected.sort_unstable();
        let left: Vec<usize> =
            halved["trials"][arm].as_array().unwrap().iter().map(|k| k.as_u64().unwrap() as usize).collect();
        if left != expected {
            return Some(format!("of {name} {left:?} go on, the best are {expected:?}"));
        }
        let chosen = manifest["chosen"][arm].as_u64().unwrap() as usize;
        if best(&format!("sweep.{cell}"), &left).first() != Some(&chosen) {
            return Some(format!("{name} goes on with {chosen}, which is not the best at {cell}"));
        }
        let carried = manifest["trials"][arm][chosen]["values"][0][1].as_f64().unwrap();
        let again = manifest["recheck"]["rates"][arm].as_f64().unwrap();
        if apart(carried, again) {
            return Some(format!("{name} carries {carried}, and {again} is tried again"));
        }
        let folder = format!("recheck.{}", manifest["recheck"]["cell"].as_str().unwrap());
        for by in [0.5, 2.0] {
            let trial = format!("{name}.learning_rate-{:e}", carried * by);
            if loss(&folder, &trial).is_none() {
                return Some(format!("{folder} has no {trial}"));
            }
        }
    }
    None
}

/// A run whose class has no multipliers.
struct Folded {
    sandbox: Sandbox,
    logits: Vec<f32>,
    by: f32,
}

const FOLDED: &str = "
model:
  name: m
  vocab: 256
  hidden: 48
  context: 32
  tie: true
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 24, qk_norm: rms}}
    mlp: {mlp: {intermediate: 64}}
  body: [{repeat: 2, layers: [\"sa > mlp\"]}]
data: {task: permutation, max_steps: 2}
train: {steps: 2, batch: 2, learning_rate: 1e-2, transfer: {rule: mup, width: 16, depth: 2,
  sizes: {sa.heads: 2, sa.kv_heads: 1, sa.head_size: 8, mlp.intermediate: 32}}}
";

fn logits(folder: &Path, spec: &Spec) -> Vec<f32> {
    const TOKENS: usize = 12;
    let device = CpuDevice::new(CpuOptions { threads: Some(1) });
    let options = Options { logits: true, ..forward(1, TOKENS as u64) };
    let mut model = Model::load(&device, compile(spec, &options).unwrap()).unwrap();
    model.restore(&Weights::open(folder, None).unwrap()).unwrap();
    let mut batch = Batch::new(TOKENS);
    batch.ids = (0..TOKENS as i32).map(|i| 97 + (i * 7) % 23).collect();
    batch.targets = vec![0; TOKENS];
    batch.positions = (0..TOKENS as i32).collect();
    batch.segments = vec![0; TOKENS];
    model.evaluate(&batch).unwrap();
    model.all_logits().unwrap()
}

fn folded() -> &'static Folded {
    static ONCE: OnceLock<Folded> = OnceLock::new();
    ONCE.get_or_init(|| {
        let sandbox = Sandbox::with(&[("m.yaml", FOLDED)]);
        sandbox.good(&["train", "m.yaml", "--out", "run"]);
        sandbox.good(&["export", "hf", "run", "-o", "hf"]);
        let spec = spec(FOLDED);
        let logits = logits(&sandbox.path("run/checkpoints/step-00000002"), &spec);
        let scale = spec.model.components["sa"].attention().and_then(|a| a.scale).unwrap();
        Folded { sandbox, logits, by: (scale * 24f64.sqrt()) as f32 }
    })
}

/// By how much logits of the class are off.
fn off(fault: Option<fn(&str, &mut [f32], f32)>) -> Option<String> {
    let folded = folded();
    let place = tempfile::tempdir().unwrap();
    let (from, to): (PathBuf, PathBuf) = (place.path().join("hf"), place.path().join("back"));
    fs::create_dir(&from).unwrap();
    for entry in fs::read_dir(folded.sandbox.path("hf")).unwrap().flatten() {
        fs::copy(entry.path(), from.join(entry.file_name())).unwrap();
    }
    if let Some(fault) = fault {
        edit(&from.join("model.safetensors"), &|name, x| fault(name, x, folded.by));
    }
    let back = hugging_face(&from, &to, "m", false, &[]).unwrap();
    let found = logits(&to, &back.spec);
    let largest = folded.logits.iter().fold(0f32, |m, x| m.max(x.abs()));
    let off = found.iter().zip(&folded.logits).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
    (off > 1e-5).then(|| format!("logits are off by {off:.1e}"))
}

/// Changes numbers of a file of f32.
fn edit(path: &Path, change: &dyn Fn(&str, &mut [f32])) {
    let mut bytes = fs::read(path).unwrap();
    let head = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let names: Value = serde_json::from_slice(&bytes[8..8 + head]).unwrap();
    for (name, about) in names.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        assert_eq!(about["dtype"], "F32", "{name}");
        let at = |k: usize| 8 + head + about["data_offsets"][k].as_u64().unwrap() as usize;
        let place = at(0)..at(1);
        let read = bytes[place.clone()].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        let mut values: Vec<f32> = read.collect();
        change(name, &mut values);
        let written: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        bytes[place].copy_from_slice(&written);
    }
    fs::write(path, bytes).unwrap();
}

fn noticed_in(of: &Of) -> Result<Option<String>, Failed> {
    Ok(match of {
        Of::Factors(fault) => {
            let mut spec = spec(FACTORS);
            fault(&mut spec);
            factors(&spec)?
        }
        Of::Tied(fault) => {
            let mut spec = spec(TIED);
            fault(&mut spec);
            tied(&spec)
        }
        Of::Findings(fault) => found(*fault),
        Of::Ladder(fault) => audited(Some(*fault)),
        Of::Fold(fault) => off(Some(*fault)),
    })
}

/// How a fault is noticed.
pub fn noticed(fault: &Fault) -> Result<String, Failed> {
    noticed_in(&fault.of)?.ok_or_else(|| "nobody notices".into())
}

/// Without a fault nothing is noticed.
pub fn sound() -> Result<(), Failed> {
    let all = [
        noticed_in(&Of::Factors(|_| {}))?,
        noticed_in(&Of::Tied(|_| {}))?,
        found(|_| {}),
        audited(None),
        off(None),
    ];
    match all.into_iter().flatten().next() {
        Some(how) => Err(how.into()),
        None => Ok(()),
    }
}
