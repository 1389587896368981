//! The examples of `--help`, of the README and of the book's recipes run as they are printed.
//!
//! Every line is run by a shell in a folder that has what the lines name: small models, texts and
//! runs under those names. Lines that would train or measure for minutes get more than is printed:
//! `--dry-run`, or one step.

use crate::support::sandbox::{Sandbox, texts};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const MINI: &str = "\
model:
  name: mini
  vocab: 256
  hidden: 32
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    da: {depth: {heads: 1, head_size: 4}}
    ea: {experts: {count: 4, active: 2, intermediate: 8, query: 4}}
  body:
    - recur: 2
      layers: [\"(da | sa) > ea\"]
data: {task: permutation, size: 8, max_steps: 2}
train: {steps: 2, batch: 1, sequence: 48, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

const DREAM: &str = "\
model mini {
  vocab 256  hidden 8  context 64
  gdn = gated_delta { heads 2  size 4 }
  repeat 2 { gdn }
}
";

const LORA: &str = "\
base: imports/llama-1b
model: {adapt: {components: [sa], rank: 2}}
data: {text: book.txt}
train: {steps: 2, batch: 1, sequence: 16, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

const SUITE: &str = "\
name: mine
baseline: model.yaml
variants: [{name: other, spec: model.yaml, set: {ea.count: 8}}]
equal: {flops: none, parameters: none}
seeds: [0]
";

/// The examples of a help text, in order.
fn examples(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| !line.starts_with("Examples:")).skip(1);
    let lines = lines.take_while(|line| line.starts_with("  "));
    // A remark is two blanks away.
    lines.map(|line| line.trim().split("   ").next().unwrap().trim().to_string()).collect()
}

/// Names of subcommands in a help text.
fn commands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let names = lines.take_while(|line| line.starts_with("  ")).filter(|line| !line.starts_with("   "));
    names.map(|line| line.split_whitespace().next().unwrap().to_string()).filter(|n| n != "help").collect()
}

/// A folder that has everything the examples name.
fn prepared() -> Sandbox {
    let sandbox = Sandbox::with(&[("model.yaml", MINI), ("model.dream", DREAM), ("my.suite.yaml", SUITE)]);
    for name in ["la", "dr"] {
        // An exam asks problems of up to 256 tokens.
        let long = MINI.replace("context: 64", "context: 256");
        sandbox.write(&format!("{name}.yaml"), &long.replace("name: mini", &format!("name: {name}")));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    symlink(root.join("examples"), sandbox.path("examples")).unwrap();
    symlink(root.join("benches"), sandbox.path("benches")).unwrap();
    sandbox.write(
        "looped.dream",
        &DREAM.replace("repeat 2 {", "recur 2 { layer {").replace("gdn }\n", "gdn } }\n"),
    );
    symlink(root.join("tests/import/gemma2_new"), sandbox.path("gemma-2-2b")).unwrap();
    fs::copy(root.join("examples/dr-da-16.yaml"), sandbox.path("my.yaml")).unwrap();
    fs::copy(root.join("examples/la-16.yaml"), sandbox.path("la-16.yaml")).unwrap();
    for folder in
        ["docs/results", ".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"]
    {
        fs::create_dir_all(sandbox.path(folder)).unwrap();
    }
    let text = "once upon a time there was a quick brown fox that jumped over a lazy dog\n".repeat(60);
    for name in ["book.txt", "more.txt", "other.txt", "wiki.txt"] {
        sandbox.write(name, &text);
    }
    sandbox.write("prompts.txt", "once upon\na quick\n");
    sandbox.write("a.json", "[[1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9, 10, 11]]");
    sandbox.write("b.json", "[[3, 2, 3, 4, 9, 6, 7], [9, 6, 7, 5, 9, 10, 11]]");
    let row = |i: usize| {
        format!(
            "{{\"question\": \"{i} + 1?\", \"answer\": \"{}\", \"prompt\": \"{i}\", \"text\": \"{i}\"}}\n",
            i + 1
        )
    };
    let rows: String = (0..40).map(row).collect();
    sandbox.write("train.jsonl", &rows);
    sandbox.write("gsm8k-test.jsonl", &rows);
    let answers = MINI.replace(
        "{task: permutation, size: 8, max_steps: 2}",
        "{jsonl: train.jsonl, prompt: question, answer: answer}",
    );
    sandbox.write("answers.yaml", &answers);
    sandbox
        .write("text.yaml", &MINI.replace("{task: permutation, size: 8, max_steps: 2}", "{text: book.txt}"));
    let skips = MINI.replace("(da | sa) > ea", "skip(capacity 0.5, causal bce 0.01) { sa > ea }");
    sandbox.write(
        "skips.yaml",
        &skips.replace("{task: permutation, size: 8, max_steps: 2}", "{text: book.txt}"),
    );
    // Donors of one depth, and models of another.
    let dense = MINI.replace("(da | sa) > ea", "sa > mlp").replace("recur: 2", "repeat: 2");
    let dense = dense.replace("    da: {depth: {heads: 1, head_size: 4}}\n", "");
    let network = dense.replace(
        "ea: {experts: {count: 4, active: 2, intermediate: 8, query: 4}}",
        "mlp: {mlp: {intermediate: 8}}",
    );
    sandbox.write("dense.yaml", &network);
    sandbox.write("moe.yaml", &dense.replace("sa > mlp", "sa > ea"));
    let latent = "sa: {sequence: {heads: 2, head_size: 4, qk_norm: none, latent: {kv: 4, turned: 2, value: 4, norm: none, pairs: high}}}";
    sandbox.write(
        "latent.yaml",
        &network.replace("sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}", latent),
    );
    sandbox.write("deeper.yaml", &network.replace("repeat: 2", "repeat: 4"));
    sandbox.write("shorter.yaml", &network.replace("repeat: 2", "repeat: 1"));
    let runs = [
        ("dense.yaml", "runs/dense"),
        ("model.yaml", "runs/quickstart-001"),
        ("text.yaml", "runs/book-001"),
        ("text.yaml", "run"),
        ("answers.yaml", "runs/gsm8k-001"),
        ("skips.yaml", "runs/mod-001"),
        ("skips.yaml", "runs/tuned-001"),
    ];
    for (spec, run) in runs {
        sandbox.good(&["train", spec, "--out", run]);
    }
    sandbox.good(&["train", "model.yaml", "--out", "runs/book"]);
    sandbox.good(&["quantize", "runs/quickstart-001", "--format", "q8_0", "-o", "quick-q8"]);
    sandbox.good(&["import", "hf", "gemma-2-2b", "-o", "imports/smollm2"]);
    // llama.cpp has its class, and a tokenizer fits.
    for folder in ["llama-1b", "qwen3-0.6b"] {
        fs::create_dir(sandbox.path(folder)).unwrap();
        for file in ["llama3_new/config.json", "llama3_new/model.safetensors", "gemma2_new/tokenizer.json"] {
            let name = file.rsplit('/').next().unwrap();
            fs::copy(root.join("tests/import").join(file), sandbox.path(folder).join(name)).unwrap();
        }
        sandbox.good(&["import", "hf", folder, "-o", &format!("imports/{folder}")]);
    }
    sandbox.good(&["export", "gguf", "imports/qwen3-0.6b", "-o", "qwen3-0.6b-q8_0.gguf"]);
    sandbox.write("lora.yaml", LORA);
    sandbox.good(&["train", "lora.yaml", "--out", "runs/lora-001"]);
    sandbox.good(&["export", "peft", "runs/lora-001", "-o", "my-lora"]);
    sandbox.good(&["compare", "my.suite.yaml", "--out", "runs/reasoning"]);
    // A label for each token, as many as are read.
    let line = ["analyze", "routing", "runs/mod-001", "--data", "book.txt", "--write-tokens", "tokens.jsonl"];
    sandbox.good(&line);
    sandbox.write("tags.txt", &"word\n".repeat(sandbox.read("tokens.jsonl").lines().count()));
    sandbox
}

/// Runs a line as a shell does; gives what is wrong with it.
fn wrong(sandbox: &Sandbox, line: &str) -> Option<String> {
    let bin = Path::new(env!("CARGO_BIN_EXE_dreamc")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-c", &format!("set -o pipefail; {line}")]).current_dir(sandbox.path(""));
    command.env("PATH", path).env("HOME", sandbox.path("")).env("DREAMC_CACHE", sandbox.path("cache"));
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let (_, err) = texts(&output);
    (!output.status.success() || err.contains("panicked"))
        .then(|| format!("{line}\n  {:?} {err}", output.status.code()))
}

#[test]
fn every_example_runs() {
    let sandbox = prepared();
    let help = sandbox.good(&["--help"]);
    let mut lines = examples(&help);
    for command in commands(&help) {
        let help = sandbox.good(&[&command, "--help"]);
        lines.extend(examples(&help));
        for inner in commands(&help) {
            lines.extend(examples(&sandbox.good(&[&command, &inner, "--help"])));
        }
    }
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let printed = readme.lines().filter(|line| line.starts_with("dreamc "));
    lines.extend(printed.map(|line| line.split("  #").next().unwrap().trim().to_string()));
    let recipes = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/recipes.md")).unwrap();
    let scripts = crate::book::blocks(&recipes).into_iter().filter(|block| block.language == "sh");
    lines.extend(scripts.map(|block| block.text.trim_end().replace('\n', "; ")));
    assert!(lines.len() > 80, "{lines:?}");
    // An editor starts the server, and the shell's own test is in tests/cli/lsp.rs.
    for command in commands(&help).iter().filter(|name| *name != "lsp") {
        let begins = format!("dreamc {command}");
        let shown = |line: &String| line == &begins || line.contains(&format!("{begins} "));
        assert!(lines.iter().any(shown), "{command} has no example");
    }
    // No other command of the README goes untried; the second is this program's tests.
    let readme_lines = crate::book::blocks(&readme).into_iter().filter(|block| block.language == "sh");
    for line in readme_lines.flat_map(|block| block.text.lines().map(String::from).collect::<Vec<_>>()) {
        let tried = line.starts_with("dreamc ") || line == "cargo test --workspace";
        assert!(tried, "README.md: nobody tries `{line}`");
    }
    let (nvrtc, jq) =
        (std::env::var_os("DREAMC_NVRTC").is_some(), Command::new("jq").arg("--version").output().is_ok());
    let mut failed = vec![];
    for line in &lines {
        if !nvrtc && (line.contains("--device ptx") || line.contains("cubin")) {
            println!("skipped without NVRTC: {line}");
            continue;
        }
        if line == "dreamc doctor --gpu" {
            println!("asks a GPU: {line}");
            continue;
        }
        if line.starts_with("curl ") || line.starts_with("lm_eval ") {
            println!("asks a server, as tests/cli/serve.rs does: {line}");
            continue;
        }
        let line = match line.split_once(" | jq") {
            Some((line, _)) if !jq => line,
            _ => line,
        };
        let trains = line.starts_with("dreamc train ") && !line.contains("--resume");
        let compares = line.starts_with("dreamc compare examples/") && !line.contains("--dry-run");
        let sits = line.starts_with("dreamc exam ") && !line.contains("--dry-run");
        let line = match line.split_once(" | ") {
            _ if trains || compares || sits => match line.split_once("; ") {
                Some((first, rest)) => format!("{first} --dry-run; {rest}"),
                None => format!("{line} --dry-run"),
            },
            Some((bench, rest)) if bench.starts_with("dreamc bench ") => {
                format!("{bench} --steps 1 --tokens 0 | {rest}")
            }
            // A server runs until somebody stops it.
            None if line.starts_with("dreamc serve ") || line.starts_with("dreamc studio") => {
                format!("timeout -s INT 5 {line}; [ $? = 124 ]")
            }
            None if line.starts_with("dreamc bench ") && line.ends_with(" --decode") => {
                format!("{line} --tokens 2")
            }
            None if line.starts_with("dreamc bench ") => format!("{line} --steps 1 --tokens 0"),
            _ => line.to_string(),
        };
        let begun = std::time::Instant::now();
        failed.extend(wrong(&sandbox, &line));
        println!("{:6.2} s  {line}", begun.elapsed().as_secs_f64());
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
