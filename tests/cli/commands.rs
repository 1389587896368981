//! The command line as its users meet it: the whole program, its output, its exit codes.

use crate::support::sandbox::{Sandbox, bits, metrics, texts};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A model that trains in a second.
const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 16
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    da: {depth: {heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 16, query: 8}}
  body:
    - recur: 2
      layers: [\"(da | sa) > ea\"]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 8, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32,
        evaluate: {every: 4, batches: 1}, checkpoint: {every: 2, keep: 2}}
eval: {examples: 4, max_tokens: 8}
";

fn sandbox() -> Sandbox {
    Sandbox::with(&[("tiny.yaml", TINY)])
}

#[test]
fn help_has_examples_everywhere() {
    let sandbox = sandbox();
    let help = sandbox.good(&["--help"]);
    assert!(help.contains("dreamc train examples/quickstart.yaml"));
    let commands =
        ["check", "fmt", "show", "draw", "schema", "compile", "train", "resume", "generate", "eval", "probe"];
    let nested = [["data", "inspect"], ["data", "show"], ["tokenizer", "train"]];
    let lines = commands.iter().map(|c| vec![*c]).chain(nested.iter().map(|c| c.to_vec()));
    for mut line in lines.chain([vec!["completions"]]) {
        line.push("--help");
        let help = sandbox.good(&line);
        assert!(help.contains("Examples:"), "{line:?} has no examples:\n{help}");
    }
}

#[test]
fn a_run_keeps_its_rewriting_rules() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run", "--no-rewrite", "--set", "train.steps=4"]);
    let ledger = || -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(sandbox.path("run/ledger.json")).unwrap()).unwrap()
    };
    assert_eq!(ledger()["rewriting"], serde_json::json!({"rules": "none", "target": "cpu"}));
    sandbox.good(&["resume", "run", "--set", "train.steps=6"]);
    assert_eq!(ledger()["rewriting"]["rules"], "none");
    let (code, err) = sandbox.bad(&["resume", "run", "--only", "merge-shared,stack"]);
    assert!(code == 2 && err.contains("the run began with no rewriting"), "{err}");
    sandbox.good(&["resume", "run", "--only", "merge-shared,stack", "--allow-changes"]);
    assert_eq!(ledger()["rewriting"]["rules"], "merge-shared,stack");
    let (code, err) = sandbox.bad(&["eval", "run", "--only", "merge-shard"]);
    assert!(code == 1 && err.contains("merge-shard") && err.contains("merge-shared"), "{err}");
    assert_eq!(sandbox.bad(&["generate", "run", "a", "--no-rewrite", "--only", "stack"]).0, 2);
    assert_eq!(
        sandbox.good(&["generate", "run", "a", "-n", "8", "--no-rewrite"]),
        sandbox.good(&["generate", "run", "a", "-n", "8"])
    );
}

#[test]
fn bad_usage_is_2_and_a_failed_check_is_1() {
    let sandbox = sandbox();
    assert_eq!(sandbox.bad(&["trian"]).0, 2);
    assert_eq!(sandbox.bad(&["train"]).0, 2);
    assert_eq!(sandbox.bad(&["train", "tiny.yaml", "--data", "none.txt"]).0, 2);
    assert_eq!(sandbox.bad(&["train", "tiny.yaml", "--threads", "0"]).0, 2);
    sandbox.write("wrong.yaml", &TINY.replace("heads: 2", "haeds: 2"));
    let output = sandbox.run(&["check", "wrong.yaml", "tiny.yaml"]);
    let (out, _) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(out.contains("haeds") && out.contains("heads") && out.contains("tiny.yaml: no errors"), "{out}");
    let (code, err) = sandbox.bad(&["train", "wrong.yaml"]);
    assert!(code == 1 && err.contains("wrong.yaml:7"), "{err}");
    assert_eq!(sandbox.bad(&["train", "none.yaml"]).0, 2);
}

#[test]
fn a_run_leaves_what_it_says_and_nothing_is_overwritten() {
    let sandbox = sandbox();
    let out = sandbox.good(&["train", "tiny.yaml"]);
    let run = sandbox.path("runs/tiny-001");
    for name in ["spec.yaml", "metrics.jsonl", "events.out.tfevents.dreamc", "samples.jsonl", "ledger.json"] {
        assert!(run.join(name).is_file(), "{name}");
    }
    assert!(out.contains("finished after 8 steps") && out.contains("dreamc eval runs/tiny-001"), "{out}");
    assert_eq!(metrics(&run).len(), 8 + 2);
    let checkpoints: Vec<_> = fs::read_dir(run.join("checkpoints")).unwrap().collect();
    assert_eq!(checkpoints.len(), 2);
    let ledger: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(run.join("ledger.json")).unwrap()).unwrap();
    assert_eq!(ledger["tokens"], 8 * 4 * 32);
    assert_eq!(ledger["status"], "finished");
    assert!(ledger["executed_flops"].as_u64().unwrap() > 0);

    sandbox.good(&["train", "tiny.yaml"]);
    assert!(sandbox.path("runs/tiny-002").is_dir());
    let (code, err) = sandbox.bad(&["train", "tiny.yaml", "--out", "runs/tiny-001"]);
    assert!(code == 2 && err.contains("exists already") && err.contains("--force"), "{err}");
    sandbox.good(&["train", "tiny.yaml", "--out", "runs/tiny-001", "--force"]);
    assert_eq!(metrics(&run), metrics(&sandbox.path("runs/tiny-002")));
    assert_eq!(bits(&run, 8), bits(&sandbox.path("runs/tiny-002"), 8));

    // The run that it left can be used.
    let eval = sandbox.good(&["eval", "runs/tiny-001"]);
    assert!(eval.contains("exact match, permutation"), "{eval}");
    let text = sandbox.good(&["generate", "runs/tiny-001", "abcd 1-2 = ", "-n", "4", "--json"]);
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(line["prompt"], "abcd 1-2 = ");
    let uncached = ["generate", "runs/tiny-001", "abcd 1-2 = ", "-n", "4", "--json", "--no-cache"];
    assert_eq!(sandbox.good(&uncached), text);
}

#[test]
fn a_killed_run_goes_on_to_the_same_bits() {
    let sandbox = sandbox();
    let longer =
        ["--set", "train.steps=24", "--set", "train.random_depth.min=1", "--set", "train.random_depth.max=3"];
    let train = |out: &'static str| [&["train", "tiny.yaml", "--out", out], &longer[..]].concat();
    sandbox.good(&train("whole"));
    // Each round is killed at random moments until it ends, and as many rounds are made as it
    // takes.
    let wanted = std::env::var("DREAMC_KILLS").map_or(20, |n| n.parse().unwrap());
    let seed = std::env::var("DREAMC_SEED").map_or(1, |n| n.parse().unwrap());
    println!("DREAMC_KILLS={wanted} DREAMC_SEED={seed}");
    let mut random = dreamc_data::rng::Philox::new(seed, "kills").stream(0);
    let mut killed = 0;
    while killed < wanted {
        let folder = sandbox.path("cut");
        let _ = fs::remove_dir_all(&folder);
        let mut line = train("cut");
        loop {
            let mut command = sandbox.command(&line);
            let mut process = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_micros(random.below(300_000)));
            let ended = process.try_wait().unwrap().is_some();
            process.kill().unwrap();
            let output = process.wait_with_output().unwrap();
            if ended {
                assert!(output.status.success(), "{line:?}: {}", String::from_utf8_lossy(&output.stderr));
                break;
            }
            killed += 1;
            if killed >= wanted {
                // The last one is left alone.
                line = train("cut");
                let rest = if folder.join("spec.yaml").exists() { &["resume", "cut"][..] } else { &line };
                sandbox.good(rest);
                break;
            }
            // Killed before there was a folder, it begins again.
            line = if folder.join("spec.yaml").exists() { vec!["resume", "cut"] } else { train("cut") };
        }
        assert_eq!(bits(&folder, 24), bits(&sandbox.path("whole"), 24));
        assert_eq!(metrics(&folder), metrics(&sandbox.path("whole")));
        let events =
            |run: &str| fs::metadata(sandbox.path(run).join("events.out.tfevents.dreamc")).unwrap().len();
        assert_eq!(events("cut"), events("whole"));
    }
}

/// Use of a process at this moment: bytes in memory of its own, open files, threads.
fn held(process: u32) -> Option<(u64, usize, u64)> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let files = fs::read_dir(format!("/proc/{process}/fd")).ok()?.count();
    Some((field("RssAnon")? * 1024, files, field("Threads")?))
}

#[test]
#[cfg(target_os = "linux")]
fn step_1000_holds_what_the_first_steps_held() {
    let sandbox = sandbox();
    let line = ["train", "tiny.yaml", "--out", "run", "--set", "train.steps=1000"];
    let more = ["--set", "train.evaluate.every=50", "--set", "train.checkpoint.every=50"];
    let mut command = sandbox.command(&[&line[..], &more].concat());
    let mut process = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let steps = || fs::read_to_string(sandbox.path("run/metrics.jsonl")).map_or(0, |t| t.lines().count());
    let mut seen = vec![];
    while process.try_wait().unwrap().is_none() {
        if let (n @ 1.., Some(held)) = (steps(), held(process.id())) {
            seen.push((n, held));
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(process.wait().unwrap().success() && steps() >= 1000);
    // The first evaluations and checkpoints are part of the first steps.
    let most = |of: &dyn Fn(&(u64, usize, u64)) -> u64, when: &dyn Fn(usize) -> bool| {
        seen.iter().filter(|(n, _)| when(*n)).map(|(_, h)| of(h)).max().expect("seen in time")
    };
    // Files are open and buffers are there while something is written: the least of several moments
    // is compared.
    let least = |of: &dyn Fn(&(u64, usize, u64)) -> u64, when: &dyn Fn(usize) -> bool| {
        seen.iter().filter(|(n, _)| when(*n)).map(|(_, h)| of(h)).min().expect("seen in time")
    };
    // A process that ends holds less and less.
    let (early, late) = (&|n: usize| n <= 400, &|n: usize| n > 800 && n < 1000);
    let (memory, files, threads) =
        (&|h: &(u64, usize, u64)| h.0, &|h: &(u64, usize, u64)| h.1 as u64, &|h: &(u64, usize, u64)| h.2);
    println!("bytes {} {}", most(memory, early), least(memory, late));
    assert!(least(memory, late) <= most(memory, early) + (1 << 20), "memory grows");
    assert_eq!(least(files, late), least(files, early), "open files");
    assert_eq!(least(threads, late), least(threads, early), "threads");
}

#[test]
fn infinities_stop_a_run_with_step_and_tensor_and_leave_the_last_good_checkpoint() {
    let sandbox = sandbox();
    let set =
        ["--set", "train.learning_rate=1e38", "--set", "train.warmup=0", "--set", "train.checkpoint.every=1"];
    let (code, err) = sandbox.bad(&[&["train", "tiny.yaml", "--out", "run"], &set[..]].concat());
    assert!(code == 1 && err.contains("error: step "), "{err}");
    assert!(err.contains("first in ") && err.contains("learning_rate"), "{err}");
    let ledger: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(sandbox.path("run/ledger.json")).unwrap()).unwrap();
    assert_eq!(ledger["status"], "failed");
    // The checkpoint of the last step whose loss was finite is whole.
    let checkpoint =
        dreamc_runtime::checkpoint::Checkpoints::new(sandbox.path("run/checkpoints")).latest().unwrap().0;
    assert_eq!(ledger["steps"], checkpoint.state.step);
}

#[test]
fn a_signal_is_a_checkpoint() {
    let sandbox = sandbox();
    let line = [
        "train",
        "tiny.yaml",
        "--out",
        "run",
        "--set",
        "train.steps=100000",
        "--set",
        "train.evaluate.every=0",
    ];
    let process = sandbox.command(&line).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let metrics = sandbox.path("run/metrics.jsonl");
    while !fs::metadata(&metrics).is_ok_and(|m| m.len() > 1000) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // A second process is refused meanwhile.
    let (code, err) = sandbox.bad(&["resume", "run"]);
    assert!(code == 1 && err.contains("another process"), "{err}");
    let id = process.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    // SLURM sends it twice; the run may have ended meanwhile.
    let _ = Command::new("kill").args(["-TERM", &id]).stderr(Stdio::null()).status();
    let output = process.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    let (out, _) = texts(&output);
    assert!(out.contains("SIGTERM: stopped after step") && out.contains("dreamc resume run"), "{out}");
    let lines = fs::read_to_string(&metrics).unwrap().lines().count() as u64;
    assert!(sandbox.path(&format!("run/checkpoints/step-{lines:08}")).is_dir());
}

#[test]
fn a_signal_a_second_after_the_first_ends_a_run_at_once() {
    let sandbox = sandbox();
    // A step of many seconds.
    let line = "train tiny.yaml --out run --threads 1 --set train.batch=200000 --set train.accumulate=2000";
    let line: Vec<&str> = line.split(' ').collect();
    let mut process = sandbox.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !sandbox.path("run/ledger.json").exists() {
        assert!(process.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    let id = process.id().to_string();
    for _ in 0..2 {
        assert!(process.try_wait().unwrap().is_none(), "the first signal lets the step end");
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        std::thread::sleep(Duration::from_millis(1500));
    }
    let ended = process.try_wait().unwrap();
    let _ = process.kill();
    assert_eq!(ended.and_then(|status| status.signal()), Some(15));
}

#[test]
fn a_changed_specification_is_refused_with_the_difference() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    sandbox.write("other.yaml", &TINY.replace("1e-3", "2e-3"));
    let line = ["train", "other.yaml", "--out", "run", "--resume"];
    let (code, err) = sandbox.bad(&line);
    assert_eq!(code, 1);
    assert!(
        err.contains("- ") && err.contains("learning_rate: 0.002") && err.contains("--allow-changes"),
        "{err}"
    );
    sandbox.good(&[&line[..], &["--allow-changes"]].concat());
    let out = sandbox.good(&["resume", "run", "--set", "train.steps=10"]);
    assert!(out.contains("finished after 10 steps"), "{out}");
}

/// A run that goes on with another recipe says from which step on, and what the steps before were
/// trained with stays in its folder.
#[test]
fn a_run_that_goes_on_with_another_recipe_keeps_its_history() {
    let sandbox = sandbox();
    let line =
        ["train", "tiny.yaml", "--out", "run", "--set", "train.schedule=cosine", "--set", "train.warmup=1"];
    sandbox.good(&line);
    let (old, lines) = (sandbox.read("run/spec.yaml"), metrics(&sandbox.path("run")));
    let json = |name: &str| -> serde_json::Value { serde_json::from_str(&sandbox.read(name)).unwrap() };
    assert!(json("run/ledger.json").get("changes").is_none());
    let output = sandbox.run(&["resume", "run", "--set", "train.steps=12"]);
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{err}");
    assert!(err.contains("from step 9 on the run has another recipe (train.steps=12)"), "{err}");
    assert!(err.contains("the learning rate of step 9 is"), "{err}");
    assert!(out.contains("changed after step 8"), "{out}");
    let changes = json("run/ledger.json")["changes"].clone();
    assert_eq!(changes.as_array().unwrap().len(), 1);
    assert_eq!(changes[0]["after_step"], 8);
    let difference = changes[0]["difference"].as_str().unwrap();
    assert!(difference.contains("- ") && difference.contains("steps: 8") && difference.contains("steps: 12"));
    assert_eq!(changes[0]["spec_hash"], blake3::hash(old.as_bytes()).to_hex().as_str());
    assert_eq!(sandbox.read("run/earlier/spec-to-00000008.yaml"), old);
    assert!(sandbox.read("run/spec.yaml").contains("steps: 12"));
    // Steps before have the rates they were taken with.
    let steps = |all: &[serde_json::Value]| -> Vec<serde_json::Value> {
        all.iter().filter(|l| l["step"].as_u64() <= Some(8) && l.get("loss").is_some()).cloned().collect()
    };
    assert_eq!(steps(&metrics(&sandbox.path("run"))), steps(&lines));
    // The account goes on with the run, through checkpoints that know nothing of another change.
    sandbox.good(&["resume", "run", "--set", "train.steps=14"]);
    assert_eq!(json("run/ledger.json")["changes"].as_array().unwrap().len(), 2);
    sandbox.good(&["resume", "run"]);
    assert_eq!(json("run/ledger.json")["changes"].as_array().unwrap().len(), 2);
    let (code, err) = sandbox.bad(&["resume", "run", "--set", "train.steps=5"]);
    assert!(code == 2 && err.contains("has taken 14 steps, more than train.steps=5"), "{err}");
}

/// The data is opened by --dry-run, too, and says how often it will be read.
#[test]
fn a_dry_run_opens_the_data_and_counts_epochs() {
    let sandbox = sandbox();
    sandbox.write("short.txt", &"a line of a short text\n".repeat(20));
    let line = ["train", "tiny.yaml", "--data", "short.txt", "--out", "run"];
    let out = sandbox.good(&[&line[..], &["--dry-run"]].concat());
    assert!(out.contains("short.txt: 1 document,") && out.contains(": the data is repeated"), "{out}");
    assert!(!sandbox.path("run").exists());
    let planned: f64 = {
        let words = out.lines().find_map(|l| l.trim().strip_prefix("epochs")).unwrap().trim();
        words.split(':').next().unwrap().parse().unwrap()
    };
    let out = sandbox.good(&line);
    assert!(out.lines().filter(|l| l.trim_start().starts_with("epochs")).count() == 2, "{out}");
    let ledger: serde_json::Value = serde_json::from_str(&sandbox.read("run/ledger.json")).unwrap();
    let read = ledger["epochs"].as_f64().unwrap();
    assert!(read > 1.0 && (read / planned - 1.0).abs() < 0.2, "{read} {planned}");
    // A task has no end.
    assert!(!sandbox.good(&["train", "tiny.yaml", "--dry-run"]).contains("epochs"));
    // A dry run refuses as training would.
    sandbox.write("bad.jsonl", "{\"text\": \"a\"}\nno json\n");
    let (_, err) = sandbox.bad(&["train", "tiny.yaml", "--data", "bad.jsonl", "--dry-run"]);
    assert!(err.contains("bad.jsonl") && err.contains("not a JSON object"), "{err}");
    sandbox.write("bare.yaml", TINY.split("data:").next().unwrap());
    let (code, err) = sandbox.bad(&["train", "bare.yaml", "--dry-run"]);
    assert!(code == 2 && err.contains("has no data"), "{err}");
}

/// Where training decides by another rule than evaluation, both losses and both logits are given.
#[test]
fn probe_gives_both_rules_by_name() {
    let sandbox = sandbox();
    sandbox.write("ids.json", "[[1, 2, 3, 4, 9, 8, 7, 6, 5], [5, 6, 7, 8, 1, 2, 3, 4, 9]]");
    let model = |rule: &str| {
        format!(
            "model m {{\n vocab 32 hidden 16 context 32\n sa = sequence {{ heads 2 }}\n mlp = mlp {{ intermediate 24 }}\n layer {{ sa > mlp }}\n \
             layer {{ skip(capacity 0.5{rule}) {{ sa > mlp }} }}\n}}\ntrain {{ precision f32 }}\n"
        )
    };
    let found = |rule: &str, name: &str| {
        let (spec, out) = (format!("{name}.dream"), format!("{name}.safetensors"));
        sandbox.write(&spec, &model(rule));
        let said = sandbox.good(&["probe", &spec, "--ids", "ids.json", "-o", &out, "--seed", "3"]);
        let tensors = dreamc_runtime::checkpoint::safetensors::Tensors::open(&sandbox.path(&out)).unwrap();
        let values = move |name: &str| tensors.get(name).unwrap().map(|(_, values)| values);
        (said, values)
    };
    let (said, causal) = found(", causal bce 0.01", "causal");
    assert!(said.contains("by the rule of training") && said.contains("by that of evaluation"), "{said}");
    let of = |name: &str| causal(name).unwrap_or_else(|| panic!("{name}"));
    // Each loss is the one of its own logits.
    let ids: Vec<Vec<u64>> = serde_json::from_str(&sandbox.read("ids.json")).unwrap();
    let targets: Vec<u64> = ids.iter().flat_map(|row| row[1..].to_vec()).collect();
    let loss = |logits: &[f32]| {
        let one = |(row, target): (&[f32], &u64)| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum.ln() - f64::from(row[*target as usize])
        };
        logits.chunks(32).zip(&targets).map(one).sum::<f64>() / targets.len() as f64
    };
    let (evaluated, trained) = (loss(&of("logits")), loss(&of("logits.training")));
    assert!((evaluated - trained).abs() > 1e-5, "{evaluated} {trained}");
    assert!((evaluated - f64::from(of("loss.evaluation")[0])).abs() < 1e-5);
    assert!((trained - f64::from(of("loss")[0])).abs() < 1e-5);
    // A model of one rule has one of each: that of training, of the same weights.
    let (said, plain) = found("", "plain");
    assert!(!said.contains("rule"), "{said}");
    assert!(plain("logits.training").is_none_or(|same| Some(same) == plain("logits")));
    assert_eq!(plain("logits"), causal("logits.training"));
}

#[test]
fn damaged_checkpoints_fall_back_to_the_last_good_one() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let whole = bits(&sandbox.path("run"), 8);
    let newest = sandbox.path("run/checkpoints/step-00000008/model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&newest, &bytes).unwrap();
    let output = sandbox.run(&["resume", "run"]);
    let (_, err) = texts(&output);
    assert!(
        output.status.success() && err.contains("BLAKE3 differs") && err.contains("after step 6"),
        "{err}"
    );
    assert_eq!(bits(&sandbox.path("run"), 8), whole);
}

#[test]
fn text_of_the_users_is_learned_in_bits_per_byte() {
    let sandbox = sandbox();
    sandbox.write("book.txt", &"the quick brown fox jumps over the lazy dog\n".repeat(200));
    let set =
        ["--set", "train.learning_rate=1e-2", "--set", "train.steps=60", "--set", "train.evaluate.every=20"];
    let line = [&["train", "tiny.yaml", "--data", "book.txt", "--out", "run"], &set[..]].concat();
    sandbox.good(&line);
    let bits: Vec<f64> =
        metrics(&sandbox.path("run")).iter().filter_map(|m| m["bits_per_byte"].as_f64()).collect();
    assert!(bits.len() == 4 && bits[3] < bits[0] && bits[3] < 5.0, "{bits:?}");
    let report = sandbox.good(&["eval", "run", "--data", "book.txt", "--stride", "8", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report[0]["loss"]["targets"], 44 * 200);
    assert!(report[0]["conventions"].as_str().unwrap().contains("stride 8"));
}

#[test]
fn answers_of_a_jsonl_file_and_choices_are_scored() {
    let sandbox = sandbox();
    let rows: String =
        (0..40).map(|i| format!("{{\"question\": \"{i}\", \"answer\": \"#### {}\"}}\n", i % 3)).collect();
    sandbox.write("rows.jsonl", &rows);
    sandbox.good(&["train", "tiny.yaml", "--data", "rows.jsonl", "--out", "run"]);
    sandbox.write(
        "choices.jsonl",
        "{\"prompt\": \"1\\n\", \"choices\": [\"#### 1\", \"zzzz\"], \"answer\": 0}\n",
    );
    let line =
        ["eval", "run", "--data", "rows.jsonl", "--examples", "6", "--choices", "choices.jsonl", "--json"];
    let report: serde_json::Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
    assert_eq!(report[0]["answers"]["asked"], 6);
    assert_eq!(report[0]["choices"]["asked"], 1);
}

#[test]
fn probe_writes_the_agreed_names() {
    let sandbox = sandbox();
    sandbox.write("ids.json", "[[1, 2, 3, 4], [5, 6, 7, 8]]");
    let line =
        ["probe", "tiny.yaml", "--ids", "ids.json", "-o", "out.safetensors", "--seed", "3", "--weights"];
    sandbox.good(&line);
    let tensors =
        dreamc_runtime::checkpoint::safetensors::Tensors::open(&sandbox.path("out.safetensors")).unwrap();
    let shape = |name: &str| tensors.get(name).unwrap().map(|(shape, _)| shape.to_vec());
    assert_eq!(shape("logits"), Some(vec![2, 3, 256]));
    assert_eq!(shape("loss"), Some(vec![1]));
    assert_eq!(shape("gradients.embed.weight"), Some(vec![256, 16]));
    assert_eq!(shape("weights.layers.0.ea.gate.weight"), Some(vec![4, 16, 16]));
    let first = fs::read(sandbox.path("out.safetensors")).unwrap();
    sandbox.good(&line);
    assert_eq!(fs::read(sandbox.path("out.safetensors")).unwrap(), first);
    for (ids, problem) in [
        ("[[1, 2], [3]]", "row 2 has 1 ids and row 1 has 2"),
        ("[[1, 256]]", "id 256 of row 1, place 2"),
        ("{}", "list of lists"),
        ("[[1]]", "at least two ids"),
    ] {
        sandbox.write("bad.json", ids);
        let (code, err) = sandbox.bad(&["probe", "tiny.yaml", "--ids", "bad.json", "-o", "x.safetensors"]);
        assert!(code == 2 && err.contains(problem), "{err}");
    }
}

/// Names are listed; a capture is of a text or of ids; what is wrong is refused, and no file left.
#[test]
fn probe_looks_inside_by_name() {
    let sandbox = sandbox();
    sandbox.write("ids.json", "[[1, 2, 3, 4], [5, 6, 7, 8]]");
    let listed = sandbox.good(&["probe", "tiny.yaml", "--list"]);
    assert!(listed.contains("layers.0@1.ea.gates") && listed.contains("head.logits"), "{listed}");
    let line = ["probe", "tiny.yaml", "--ids", "ids.json", "--seed", "3", "-o", "in.safetensors"];
    let said = sandbox.good(&[&line[..], &["--capture", "layers.0.out", "--capture", "*.gates"]].concat());
    assert!(said.contains("in.safetensors: "), "{said}");
    let tensors = Tensors::open(&sandbox.path("in.safetensors")).unwrap();
    let (shape, stream) = tensors.get("layers.0@1.out").unwrap().unwrap();
    assert_eq!(shape, [2, 3, 16]);
    assert!(stream.iter().any(|x| *x != 0.0));
    assert_eq!(tensors.get("losses").unwrap().unwrap().0, [2, 3]);
    sandbox.good(&["probe", "tiny.yaml", "--ids", "ids.json", "-o", "plain.safetensors", "--seed", "3"]);
    let plain = Tensors::open(&sandbox.path("plain.safetensors")).unwrap();
    let logits = |of: &Tensors| of.get("logits").unwrap().unwrap().1;
    let apart =
        logits(&tensors).iter().zip(logits(&plain)).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(apart < 1e-5, "{apart}");

    let gone = [
        (&["--capture", "layers.0.ot"][..], 2, "nearest are `layers.0@0.out`"),
        (&["--patch", "layers.0.out=none.safetensors"], 2, "none.safetensors"),
        (&["--patch", "layers.0.ea.chosen=in.safetensors"], 2, "lacks `layers.0@0.ea.chosen`"),
        (&["--patch", "layers.0.out"], 2, "as layers.3.out=a.safetensors"),
        (
            &["--patch", "layers.0.out=in.safetensors", "--tokens", "3"],
            2,
            "there is no token 3, the last is 2",
        ),
        (&["--tokens", "1"], 2, "--tokens and --difference are of --patch"),
        (&["--capture", "layers.0.out", "--weights"], 2, "cannot be used with"),
        (&["--linear", "ids.json"], 2, "--capture"),
        (&["--capture", "layers.0.out", "--linear", "ids.json"], 2, "has 4 classes, and 3 tokens are read"),
        (&["--text", "abc"], 2, "cannot be used with"),
    ];
    for (more, code, problem) in gone {
        let line = ["probe", "tiny.yaml", "--ids", "ids.json", "-o", "gone.safetensors"];
        let (found, err) = sandbox.bad(&[&line[..], more].concat());
        assert!(found == code && err.contains(problem), "{more:?}: {found} {err}");
        assert!(!sandbox.path("gone.safetensors").exists(), "{more:?}");
    }
    let (code, err) = sandbox.bad(&["probe", "tiny.yaml", "--text", "abc", "--lens"]);
    assert!(code == 2 && err.contains("no tokenizer"), "{err}");
    let lens = sandbox.good(&["probe", "tiny.yaml", "--ids", "ids.json", "--lens"]);
    assert!(lens.contains("layers.0@0.out") && lens.contains("100.0 %"), "{lens}");
}

#[test]
fn data_can_be_looked_at() {
    let sandbox = sandbox();
    let out = sandbox.good(&["data", "inspect", "tiny.yaml", "--rows", "1"]);
    assert!(out.contains("⟦") && out.contains("¶") && out.contains("abcd"), "{out}");
    let out = sandbox.good(&["data", "inspect", "tiny.yaml", "--rows", "2", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(rows[1]["ids"].as_array().unwrap().len(), 32);
    sandbox.write("rows.jsonl", "{\"question\": \"1+1\", \"answer\": \"2\"}\n{\"question\": 3}\n");
    let (code, err) = sandbox.bad(&["data", "inspect", "tiny.yaml", "--data", "rows.jsonl"]);
    assert!(code == 1 && err.contains("rows.jsonl:2: has no field \"answer\""), "{err}");
}

/// Every task of the page is shown with what it asks, and the two halves of its problems differ.
#[test]
fn every_task_is_shown() {
    let sandbox = sandbox();
    let page = include_str!("../../docs/tasks.md");
    let names: Vec<&str> = page.lines().filter_map(|l| l.strip_prefix("| `")?.split('`').next()).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in &names {
        // The grammar of one has six levels.
        let number: u64 = if *name == "lano" { 6 } else { 12 };
        let steps = ["data", "show", name, "--steps", &number.to_string(), "-n", "3"];
        let out = sandbox.good(&steps);
        let begin = format!("{number:>6}  ");
        assert_eq!(out.lines().filter(|l| l.contains('⟦') && l.starts_with(&begin)).count(), 3, "{out}");
        assert_eq!(out, sandbox.good(&steps), "{name}");
        let json = |more: &[&str]| -> serde_json::Value {
            serde_json::from_str(&sandbox.good(&[&steps[..], &["--json"], more].concat())).unwrap()
        };
        let (learned, held) = (json(&[]), json(&["--held-out"]));
        assert_eq!((&learned[0]["task"], &learned[0]["steps"]), (&(*name).into(), &number.into()));
        assert!(!learned[0]["asked"].as_array().unwrap().is_empty());
        let texts = |of: &serde_json::Value| -> Vec<String> {
            of.as_array().unwrap().iter().map(|p| format!("{}{}", p["prompt"], p["answer"])).collect()
        };
        assert!(texts(&learned).iter().all(|t| !texts(&held).contains(t)), "{name}");
    }
    assert!(sandbox.good(&["data", "show", "tiny.yaml"]).starts_with("permutation: state tracking"));
    let (code, error) = sandbox.bad(&["data", "show", "mqr"]);
    assert!(code == 2 && names.iter().all(|name| error.contains(name)), "{error}");
    let (_, error) = sandbox.bad(&["data", "show", "mqar", "--steps", "40"]);
    assert!(error.contains("use length 160 or at most 16 pairs"), "{error}");
    let (_, error) = sandbox.bad(&["data", "show", "sorting", "--length", "4"]);
    assert!(error.contains("sorting has no length"), "{error}");
}

/// A task with several answers in a text is learned and asked, also of lengths that are never
/// learned; numbers that do not fit are refused with what would.
#[test]
fn longer_problems_are_asked_than_those_learned() {
    let sandbox = sandbox();
    let of = |data: &str| TINY.replace("{task: permutation, size: 4, max_steps: 2}", data);
    let flips = "{task: flip_flop, min_steps: 4, max_steps: 6, longer: [12, 24]}";
    sandbox.write("flips.yaml", &of(flips));
    sandbox.good(&["train", "flips.yaml", "--out", "flips"]);
    let last = metrics(&sandbox.path("flips")).pop().unwrap();
    let asked: Vec<u64> =
        last["by_difficulty"].as_array().unwrap().iter().map(|d| d[0].as_u64().unwrap()).collect();
    assert_eq!(asked, [4, 5, 6, 12, 24], "{last}");
    // Several reads in one text are several answers.
    let report: serde_json::Value =
        serde_json::from_str(&sandbox.good(&["eval", "flips", "--json", "--examples", "8"])).unwrap();
    let of_24 = &report[0]["by_difficulty"][0][1][4];
    assert!(of_24["asked"].as_u64() > Some(8) && of_24["steps"] == 24, "{of_24}");
    let refused = |data: &str, line: &[&str]| {
        sandbox.write("bad.yaml", &of(data));
        let (out, error) = texts(&sandbox.run(line));
        out + &error
    };
    let (check, train) = (["check", "bad.yaml"], ["train", "bad.yaml", "--out", "bad"]);
    let error = refused("{task: permutation, size: 27}", &check);
    assert!(
        error.contains("`size` of permutation is out of range: 27") && error.contains("elements: 2 to 26"),
        "{error}"
    );
    let error = refused("{task: modular_sum, max_steps: 8, longer: [6]}", &check);
    assert!(error.contains("`longer` has 6 after 8"), "{error}");
    let error = refused("{task: sorting, length: 3}", &check);
    assert!(error.contains("`length` goes with tasks that have a length"), "{error}");
    let error = refused("{task: copying, max_steps: 40}", &train);
    assert!(error.contains("a sequence has 32; use sequence 128, or at most 15 steps"), "{error}");
    let error =
        refused("{task: copying, max_steps: 8, longer: [400]}", &[&train[..], &["--dry-run"]].concat());
    assert!(
        error.contains("takes 802 tokens, the model's context has 64; use context 1024, or at most 31 steps"),
        "{error}"
    );
}

#[test]
fn a_tokenizer_is_learned_and_used() {
    let sandbox = sandbox();
    sandbox.write("book.txt", &"the cat sat on the mat and the cat sat on the hat\n".repeat(50));
    let out = sandbox.good(&["tokenizer", "train", "book.txt", "--vocab", "270", "-o", "tok.json"]);
    assert!(out.contains("tok.json: 270 tokens"), "{out}");
    let spec = TINY.replace("vocab: 256", "vocab: 270").replace(
        "data: {task: permutation, size: 4, max_steps: 2}",
        "data: {text: book.txt, tokenizer: tok.json}",
    );
    sandbox.write("text.yaml", &spec);
    sandbox.good(&["train", "text.yaml", "--out", "run"]);
    assert!(sandbox.path("run/tokenizer.json").is_file());
    fs::remove_file(sandbox.path("tok.json")).unwrap();
    sandbox.good(&["generate", "run", "the cat", "-n", "3"]);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let sandbox = sandbox();
    let mut process =
        sandbox.command(&["schema"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(process.stdout.take());
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{:?}", texts(&output));
}
