//! Figures of a training: numbers that are of all that is held out, checkpoints by the
//! clock, the health of routers.

use crate::support::sandbox::{Sandbox, bits, metrics, texts};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A model that trains in a moment, on a text that holds out more than its evaluations take.
const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 1, intermediate: 4, query: 4}}
  body: [{recur: 2, layers: [\"sa > ea\"]}]
data: {text: book.txt, validation: 0.2}
train: {steps: 6, batch: 2, sequence: 16, precision: f32, random_depth: {min: 1, max: 2},
        evaluate: {every: 2, batches: 2}}
";

/// The same with a part that tokens skip.
const SKIPS: &str = "\
model:
  name: skips
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    mlp: {mlp: {intermediate: 16}}
  body: [\"sa > mlp\", \"skip(threshold, capacity 0.05, penalty 0.1) { sa } > mlp\"]
data: {text: book.txt, validation: 0.2}
train: {steps: 20, batch: 2, sequence: 16, precision: f32}
";

const SUITE: &str = "\
name: pair
baseline: tiny.yaml
variants:
  - {name: wide, spec: tiny.yaml, set: {ea.intermediate: 8}}
equal: {flops: 50%, parameters: 50%, tokens}
seeds: [0]
";

fn sandbox() -> Sandbox {
    let line =
        |i: u64| format!("line {i}: the quick brown fox jumps over {} lazy dogs\n", i * 7919 % 104_729);
    let book: String = (0..80).map(line).collect();
    Sandbox::with(&[
        ("tiny.yaml", TINY),
        ("skips.yaml", SKIPS),
        ("pair.suite.yaml", SUITE),
        ("book.txt", &book),
    ])
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn ledger(run: &Path) -> Value {
    json(&fs::read_to_string(run.join("ledger.json")).unwrap())
}

/// Within less memory than a run would take, layers are computed again to the same bits; where that
/// is not enough nothing is begun.
#[test]
fn memory_has_a_limit() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "all"]);
    let all = ledger(&sandbox.path("all"))["peak_memory"].as_u64().unwrap();
    let limit = format!("train.memory={}B", all - 1);
    let plan = sandbox.good(&["train", "tiny.yaml", "--dry-run", "--set", &limit]);
    assert!(plan.contains("computed again") && plan.contains("layer0, to stay within"), "{plan}");
    sandbox.good(&["train", "tiny.yaml", "--out", "less", "--set", &limit]);
    assert!(ledger(&sandbox.path("less"))["peak_memory"].as_u64().unwrap() < all);
    // The header of a file has the specification, which differs.
    let numbers = |run: &str| -> Vec<Vec<u8>> {
        let header = |file: &[u8]| 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        bits(&sandbox.path(run), 6).iter().map(|file| file[header(file)..].to_vec()).collect()
    };
    assert_eq!(numbers("all"), numbers("less"));
    assert_eq!(metrics(&sandbox.path("all")), metrics(&sandbox.path("less")));
    let counted = |memory: &str| {
        let set = format!("train.memory={memory}");
        json(&sandbox.good(&["count", "tiny.yaml", "--executed", "--json", "--set", &set]))["executed"]
            .clone()
    };
    let whole = counted("none");
    let less = counted(&format!("{}B", whole["arena_bytes"].as_u64().unwrap() - 1));
    assert_eq!((&whole["computed_again"], &less["computed_again"]), (&Value::Null, &vec!["layer0"].into()));
    let work = |counts: &Value| counts["multiply_adds"]["backward"].as_u64().unwrap();
    assert!(work(&less) > work(&whole));
    let error = sandbox.error(&["train", "tiny.yaml", "--out", "none", "--set", "train.memory=20kB"]);
    assert!(error.contains("even single sequences are too large"), "{error}");
    assert!(!sandbox.path("none").exists());
}

/// The last line of a run's metrics.
fn last(sandbox: &Sandbox, run: &str) -> Value {
    json(sandbox.read(&format!("{run}/metrics.jsonl")).lines().last().unwrap())
}

#[test]
fn every_command_finds_the_loss_of_all_that_is_held_out() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let ledger = ledger(&sandbox.path("run"));
    let figures = json(&sandbox.good(&["eval", "run", "--json"]));
    let targets = figures[0]["loss"]["targets"].as_u64().unwrap();
    assert!(targets > 2 * 2 * 16, "{targets} targets are no more than an evaluation takes");
    assert_eq!(ledger["validation_targets"], targets);
    let mean = figures[0]["loss"]["nats"].as_f64().unwrap() / targets as f64;
    let same = |found: &Value| {
        let found = found.as_f64().unwrap();
        assert!(
            (found - mean).abs() < 1e-6 && format!("{found:.4}") == format!("{mean:.4}"),
            "{found} {mean}"
        );
    };
    same(&ledger["validation_loss"]);
    let conclusion = last(&sandbox, "run");
    assert_eq!((&conclusion["complete"], &conclusion["targets"]), (&Value::Bool(true), &targets.into()));
    same(&conclusion["validation_loss"]);
    assert!(conclusion["health"]["mixtures"].is_array(), "{conclusion}");
    assert_eq!(figures[0]["health"], conclusion["health"]);
    let analysis = json(&sandbox.good(&["analyze", "run", "--json", "--sequences", "1"]));
    let own = analysis["depths"].as_array().unwrap().iter().find(|d| d["trained"] == true).unwrap();
    assert_eq!(own["targets"], targets);
    same(&own["loss"]);
    // The curve's points are over one sample, the last of them, too.
    let points: Vec<Value> = sandbox
        .read("run/metrics.jsonl")
        .lines()
        .map(json)
        .filter(|l| l.get("validation_loss").is_some() && l.get("complete").is_none())
        .collect();
    assert_eq!(points.iter().map(|p| p["step"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 4, 6]);
    assert!(
        points.iter().all(|p| p["targets"] == points[0]["targets"] && p["targets"].as_u64() < Some(targets))
    );
    // How much an evaluation during training takes changes nothing of the last.
    sandbox.good(&["train", "tiny.yaml", "--out", "other", "--set", "train.evaluate.batches=1000"]);
    same(&last(&sandbox, "other")["validation_loss"]);
    // Neither does the size of a batch.
    sandbox.good(&["train", "tiny.yaml", "--out", "parts", "--set", "train.accumulate=2"]);
    assert_eq!(last(&sandbox, "parts")["targets"], targets);

    let out = sandbox.good(&["compare", "pair.suite.yaml", "--out", "both"]);
    assert!(out.contains(&format!("(of {targets} targets)")), "{out}");
    let report = sandbox.read("both/report.md");
    assert!(report.contains(&format!("of {targets} held-out targets")), "{report}");
    assert!(report.contains(&format!(
        "{:.4}",
        self::ledger(&sandbox.path("both/tiny-seed0"))["validation_loss"].as_f64().unwrap()
    )));
}

#[test]
fn an_ablation_is_of_the_sequences_asked_for() {
    let sandbox = sandbox();
    sandbox.good(&["train", "skips.yaml", "--out", "run"]);
    for sequences in [3, 5] {
        let n = sequences.to_string();
        let found = json(&sandbox.good(&["analyze", "routing", "run", "--sequences", &n, "--json"]));
        assert_eq!(found["ablation"]["targets"], sequences * 16);
        assert_eq!(found["sequences"], sequences);
    }
}

#[test]
fn routers_health_is_a_metric() {
    let sandbox = sandbox();
    let output = sandbox.run(&["train", "skips.yaml", "--out", "run"]);
    let (out, err) = texts(&output);
    let health = &last(&sandbox, "run")["health"];
    let part = &health["parts"][0];
    assert_eq!((&part["name"], &part["asked"]), (&"layers.1.skip.0".into(), &0.05.into()));
    let processed = part["processed"].as_f64().unwrap();
    // A router that was hardly trained keeps far more than a twentieth.
    assert!(processed > 0.1, "{processed}");
    let words = format!(
        "layers.1.skip.0 processes {:.1} % of its tokens in evaluation, and 5.0 %, its capacity, in training",
        100.0 * processed
    );
    assert!(err.contains(&format!("warning: {words}")), "{err}");
    assert!(out.contains(&format!("{:.1} % of 5.0 % asked for", 100.0 * processed)), "{out}");
    let watched = sandbox.good(&["watch", "run", "--once"]);
    assert!(watched.contains("layers.1.skip.0 processes"), "{watched}");
    let events = fs::read(sandbox.path("run/events.out.tfevents.dreamc")).unwrap();
    let has = |tag: &str| assert!(events.windows(tag.len()).any(|w| w == tag.as_bytes()), "{tag}");
    ["routers/layers.1.skip.0/processed", "samples/0", "_hparams_/session_start_info"]
        .iter()
        .for_each(|t| has(t));
    ["tokens_per_second", "held_out/loss", "held_out/targets", "train.learning_rate"]
        .iter()
        .for_each(|t| has(t));

    sandbox.good(&["train", "tiny.yaml", "--out", "experts"]);
    let mixture = &last(&sandbox, "experts")["health"]["mixtures"][0];
    assert_eq!((&mixture["name"], &mixture["experts"]), (&"layers.0.ea".into(), &4.into()));
    assert!(mixture["busiest"].as_f64().unwrap() >= 1.0);
    let first = json(sandbox.read("experts/metrics.jsonl").lines().next().unwrap());
    assert!([1, 2].contains(&first["depth"].as_u64().unwrap()), "{first}");
    let watched = sandbox.good(&["watch", "experts", "--once"]);
    assert!(watched.contains("layers.0.ea busiest") && watched.contains("depth "), "{watched}");
}

/// Wrapped parts are found where the model is applied, at any number of passes.
#[test]
fn routers_health_is_of_the_passes_that_were_made() {
    let sandbox = sandbox();
    for (rule, depths) in [("depth_choice", vec![2, 3]), ("capacity 0.5, causal bce 0.01", vec![2, 3, 4])] {
        let body = format!(
            "[{{recur: 3, residual_norm: false, layers: [\"skip({rule}) {{ sa > ea }}\"]}}, \"sa > ea\"]"
        );
        let spec = TINY.replace("[{recur: 2, layers: [\"sa > ea\"]}]", &body);
        sandbox.write("other.yaml", &spec.replace("random_depth: {min: 1, max: 2},", ""));
        let run = format!("run {rule}");
        sandbox.good(&["train", "other.yaml", "--out", &run]);
        for depth in depths {
            let figures = json(&sandbox.good(&["eval", &run, "--depth", &depth.to_string(), "--json"]));
            let part = &figures.as_array().unwrap().last().unwrap()["health"]["parts"][0];
            let shares: Vec<f64> =
                part["depths"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
            assert_eq!(shares.len(), depth + 1, "{rule}: {part}");
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{rule}: {part}");
            // A chosen depth is at least one pass.
            assert!(rule != "depth_choice" || shares[0] == 0.0, "{rule}: {part}");
        }
    }
}

/// Starts a training that takes far longer than a test.
fn long(sandbox: &Sandbox, more: &[&str]) -> Child {
    let line = [
        "train",
        "tiny.yaml",
        "--out",
        "run",
        "--set",
        "train.steps=10000000",
        "--set",
        "train.evaluate.every=0",
    ];
    let mut command: Command = sandbox.command(&[&line[..], more].concat());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until something holds; a training that has ended before is a failure.
fn wait(child: &mut Child, what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(child.try_wait().unwrap().is_none(), "the training has ended before {what}");
        assert!(begun.elapsed() < Duration::from_secs(300), "{what} takes too long");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_checkpoint_by_the_clock_is_there_after_a_kill() {
    let sandbox = sandbox();
    let mut child = long(&sandbox, &["--set", "train.checkpoint.minutes=0.0001"]);
    let checkpoint = || {
        fs::read_dir(sandbox.path("run/checkpoints"))
            .is_ok_and(|d| d.flatten().any(|e| e.file_name().to_string_lossy().starts_with("step-")))
    };
    wait(&mut child, "the first checkpoint", checkpoint);
    child.kill().unwrap();
    child.wait().unwrap();
    let (_, err) = texts(&sandbox.run(&["resume", "run", "--set", "train.steps=1"]));
    assert!(err.contains("found ") && err.contains("the run is at its end, after "), "{err}");
}

#[test]
fn a_run_without_a_checkpoint_says_so() {
    let sandbox = sandbox();
    let mut child = long(&sandbox, &[]);
    let steps = || fs::read_to_string(sandbox.path("run/metrics.jsonl")).is_ok_and(|t| t.lines().count() > 3);
    wait(&mut child, "the first steps", steps);
    child.kill().unwrap();
    child.wait().unwrap();
    let (_, err) = texts(&sandbox.run(&["resume", "run", "--set", "train.steps=1"]));
    assert!(err.contains("before its first checkpoint (there is one every ten minutes"), "{err}");
}

#[test]
fn a_run_whose_folder_is_removed_stops_and_says_so() {
    let sandbox = sandbox();
    let mut child = long(&sandbox, &[]);
    let steps = || fs::read_to_string(sandbox.path("run/metrics.jsonl")).is_ok_and(|t| t.lines().count() > 3);
    wait(&mut child, "the first steps", steps);
    fs::remove_dir_all(sandbox.path("run")).unwrap();
    let output = child.wait_with_output().unwrap();
    let (_, err) = texts(&output);
    assert!(
        !output.status.success() && err.contains("was removed or replaced while the run trained in it"),
        "{err}"
    );
    assert!(!err.contains("nothing is lost") && !sandbox.path("run").exists(), "{err}");
}

#[test]
fn a_folder_whose_lock_file_was_deleted_is_still_locked() {
    let sandbox = sandbox();
    let mut child = long(&sandbox, &["--set", "train.checkpoint.minutes=0.0001"]);
    let lock = || sandbox.path("run/run.lock").is_file() && sandbox.path("run/checkpoints").is_dir();
    wait(&mut child, "the lock", lock);
    fs::remove_file(sandbox.path("run/run.lock")).unwrap();
    let err = sandbox.error(&["resume", "run"]);
    assert!(err.contains("is training in this folder"), "{err}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_depth_that_no_single_recur_has_is_refused() {
    let sandbox = sandbox();
    let bodies = [
        ("[{recur: 2, layers: [\"sa > ea\"]}, {recur: 2, layers: [\"sa > ea\"]}]", "this body has 2"),
        ("[{repeat: 2, layers: [{recur: 2, layers: [\"sa > ea\"]}]}]", "this body has none, only inner ones"),
    ];
    for (body, expected) in bodies {
        let spec = TINY.replace("[{recur: 2, layers: [\"sa > ea\"]}]", body);
        sandbox.write("other.yaml", &spec);
        let check = || {
            let output = sandbox.run(&["check", "other.yaml"]);
            assert!(!output.status.success());
            let (out, err) = texts(&output);
            out + &err
        };
        let err = check();
        assert!(err.contains("error[ambiguous-depth]") && err.contains(expected), "{err}");
        sandbox.write("other.yaml", &spec.replace("random_depth: {min: 1, max: 2},", ""));
        sandbox.good(&["check", "other.yaml"]);
        sandbox.write(
            "other.yaml",
            &(spec.replace("random_depth: {min: 1, max: 2},", "") + "eval: {depths: [2]}\n"),
        );
        assert!(check().contains("error[ambiguous-depth]"));
    }
}

#[test]
fn a_comparison_reports_what_there_is_where_a_run_has_no_metrics() {
    let sandbox = sandbox();
    sandbox.good(&["compare", "pair.suite.yaml", "--out", "both"]);
    fs::remove_file(sandbox.path("both/wide-seed0/metrics.jsonl")).unwrap();
    sandbox.good(&["report", "both"]);
    assert!(sandbox.read("both/report.md").contains("wide"));
}

#[test]
fn the_next_command_is_one_that_works() {
    let sandbox = Sandbox::with(&[("book.txt", &"the quick brown fox\n".repeat(200))]);
    sandbox.write(
        "ahead.yaml",
        "model:\n  name: ahead\n  vocab: 256\n  hidden: 8\n  context: 32\n  components:\n    \
         sa: {sequence: {heads: 1, head_size: 8}}\n    ea: {experts: {count: 4, active: 2, intermediate: 8, query: 4}}\n  \
         body: [\"skip(capacity 0.5) { sa > ea }\"]\ndata: {text: book.txt}\n\
         train: {steps: 4, batch: 2, sequence: 16, precision: f32, checkpoint: {every: 2}}\n",
    );
    let said = sandbox.good(&["train", "ahead.yaml", "--out", "run"]);
    let next = said.lines().last().unwrap().trim().strip_prefix("dreamc ").unwrap();
    sandbox.good(&next.split(' ').collect::<Vec<_>>());
    // One or two depths are a fifth of all there are: nobody is a specialist of them.
    let twice =
        sandbox.read("ahead.yaml").replace("skip(capacity 0.5) { sa > ea }\"", "sa > ea\", \"sa > ea\"");
    sandbox.write("twice.yaml", &twice);
    sandbox.good(&["train", "twice.yaml", "--out", "twice"]);
    sandbox.good(&["analyze", "twice"]);
    let page = sandbox.read("twice/analysis/analysis.html");
    assert!(page.contains("are generalists") && !page.contains("specialists"), "{page}");
    // A checkpoint that is damaged is said where an older one is read.
    let newest = sandbox.path("run/checkpoints/step-00000004/model.safetensors");
    fs::File::options().write(true).open(newest).unwrap().set_len(100).unwrap();
    let (out, err) = texts(&sandbox.run(&["eval", "run"]));
    assert!(out.contains("ahead, step 2"), "{out}");
    assert!(
        err.contains("warning: ") && err.contains("step-00000004") && err.contains("is read instead"),
        "{err}"
    );
}

/// A run takes losses from logits that are never rounded; so does `eval`, whatever the precision.
#[test]
fn a_loss_measured_again_is_that_of_the_ledger() {
    let sandbox = sandbox();
    for precision in ["f32", "bf16"] {
        let set = format!("train.precision={precision}");
        sandbox.good(&["train", "tiny.yaml", "--out", precision, "--set", &set]);
        let ledger: Value = serde_json::from_str(&sandbox.read(&format!("{precision}/ledger.json"))).unwrap();
        let report: Value = serde_json::from_str(&sandbox.good(&["eval", precision, "--json"])).unwrap();
        let loss = &report[0]["loss"];
        let mean = loss["nats"].as_f64().unwrap() / loss["targets"].as_f64().unwrap();
        let apart = (mean - ledger["validation_loss"].as_f64().unwrap()).abs();
        assert!(apart < 1e-6, "{precision}: {apart}");
        assert_eq!(report[0]["precision"], ledger["precision"]);
        let words = format!("targets, in {}", ledger["precision"].as_str().unwrap());
        assert!(sandbox.good(&["eval", precision]).contains(&words));
    }
}

#[test]
fn the_folder_of_a_run_is_trained_further_and_its_specification_anew() {
    let sandbox = sandbox();
    let fast = ["--set", "train.learning_rate=1e-1", "--set", "train.warmup=1"];
    sandbox.good(&[&["train", "tiny.yaml", "--out", "run"], &fast[..]].concat());
    sandbox.write("more.txt", &"and then the fox came back\n".repeat(60));
    let line = ["--data", "more.txt", "--set", "train.learning_rate=1e-12", "--set", "train.steps=1"];
    let said = sandbox.good(&[&["train", "run", "--out", "further"], &line[..]].concat());
    assert!(said.contains("begins from the weights of ") && said.contains("/run"), "{said}");
    let said = sandbox.good(&[&["train", "run/spec.yaml", "--out", "anew"], &line[..]].concat());
    assert!(!said.contains("begins from"), "{said}");
    let embed = |run: &str, step: u64| {
        let file = sandbox.path(&format!("{run}/checkpoints/step-{step:08}/model.safetensors"));
        Tensors::open(&file).unwrap().get("embed.weight").unwrap().unwrap().1.to_vec()
    };
    let apart = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let trained = embed("run", 6);
    assert!(apart(&trained, &embed("further", 1)) < 1e-6);
    assert!(apart(&trained, &embed("anew", 1)) > 1e-4);

    // Without a checkpoint there is nothing to begin from.
    fs::remove_dir_all(sandbox.path("run/checkpoints")).unwrap();
    let error = sandbox.error(&["train", "run", "--data", "more.txt", "--out", "none"]);
    assert!(error.contains("run has no checkpoint yet"), "{error}");
    assert!(!sandbox.path("none").exists());
}

#[test]
fn prompts_of_any_length_are_written_after_without_caches() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let line = ["generate", "run", "a", "the quick", "line 12", "-n", "9", "--greedy", "--json"];
    let with = sandbox.good(&line);
    // A row ends before the others, and its place stays empty.
    let stopped = ["--stop", "e", "--stop", " "];
    let without = sandbox.good(&[&line[..], &["--no-cache"]].concat());
    assert_eq!(with, without);
    let with = sandbox.good(&[&line[..], &stopped].concat());
    assert_eq!(with, sandbox.good(&[&line[..], &stopped, &["--no-cache"]].concat()));
    // Texts are longer than the rows of the recipe: as long as the context.
    let long = "x".repeat(28);
    let line = ["generate", "run", &long, "the", "qu", "-n", "9", "--greedy", "--json"];
    assert_eq!(sandbox.good(&line), sandbox.good(&[&line[..], &["--no-cache"]].concat()));
}

#[test]
fn a_drawing_has_the_name_of_what_it_is() {
    let sandbox = sandbox();
    let error = sandbox.error(&["draw", "tiny.yaml", "-o", "tiny.png"]);
    assert!(error.contains("a drawing is SVG") && error.contains(".svg, not .png"), "{error}");
    assert!(!sandbox.path("tiny.png").exists());
    sandbox.good(&["draw", "tiny.yaml", "-o", "tiny.svg"]);
}
