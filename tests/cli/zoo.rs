//! The zoo: its files, its drawings and its page; and published models at their full size.
//!
//! `BLESS=1 cargo test --test cli zoo` writes `docs/zoo.md` and `docs/zoo/*.svg` from
//! `examples/zoo/*.dream`, and `docs/published.md` from `examples/published`, by `dreamc count` and
//! `dreamc draw`.

use crate::support::root;
use crate::support::sandbox::Sandbox;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

const PAGE: &str = "\
# The zoo

Architectures that people compare, each in a file of `examples/zoo` that is small enough to train on a CPU. The first comment of a file names the paper and the code it
was compared with, and every part of it that the file leaves out or says otherwise. [Published models](published.md) are those of full size. Golden files from an independent implementation hold what each
computes (`tests/reference`), and each passes `dreamc verify`.

`BLESS=1 cargo test --test cli zoo` writes this page and its drawings, from `dreamc count` and `dreamc draw`. Parameters are all there are; FLOPs are
those of a token that is generated, the mean over a sequence as long as the context; caches are those of one sequence of that
length, for its tokens and for depth. *Layered* is `layered.dream` with as many layers as the model applies: what the same depth costs
without sharing anything.

";

/// Parts of authors' models apart from the built-in components, and the text that says each.
const PARTS: &str = "
## Parts

Parts of authors' models that no built-in component has, and the text that says each. `cargo test --test numerics authors` compares each with
its authors' formula, and `cargo test --test numerics whole` the files of nanochat (`x0-scaled`), Parcae and YOCO with their authors' whole models. [Definitions](definitions.md) begins with the ideas.

| part | text | in the zoo |
|---|---|---|
| LayerNorm | `layer_norm(x, over hidden, gain) + weight([hidden], zero)` | denseformer, moeut |
| LayerNorm before the head | a last layer that adds `0 * x - mean(x, over hidden)` | denseformer |
| GELU by the error function | `0.5 * (a + abs(a) * (1 - p * exp(-z * z)))`, `p` a polynomial | denseformer |
| a norm without a gain | `norm plain`; in a definition `rms(x, over hidden)` | x0-scaled |
| first values by depth | `weight([], ramp 1.15 1.05)` | x0-scaled |
| one gain of two norms | `g = weight([hidden], one)`, read twice | |
| one gain of two statements | `norm final`, `norm g` | huginn |
| a dilation of the history | `mix history weighted apart 4` | |
| a bias of the head | `head_bias true` | moeut |
| the entropy of a router as a loss | `loss 0.01 * sum(p * log(p), over count)`, `p` an `average` | moeut |
| frequencies that reach `1 / base` (YOCO) | `rope` of `base * exp(log(base) / (size / 2 - 1))` | yoco |
| free frequencies of a rotation | `cos(position * …)`, of an expression of `places(half)` | |
| embeddings of values, with a gate | `v = linear(n, [heads, value]) + gate * embedding([heads, value])` | parcae, x0-scaled |
| the smear of the token before | `weight([], zero) * sigmoid(linear(few, [])) * shift(x)` | x0-scaled |
| queries and keys normed after the rotation | `1.2 * rms(rope(linear(n, [heads, size]), 100000), over size)` | parcae, x0-scaled |
| the stream of the middle taken back | `-weight([], 0.2) * middle.here` | x0-scaled |
| both factors of value residuals | `weight([], 0.5) * own + weight([], 0.5) * first` | value-residual |
| value residuals by shares of tokens | `own + sigmoid(linear(n, [heads], bias)) * (first - own)` | |
| experts of values and outputs alone | `sum(pick(all, best) * pick(scores, best), over active)` | moeut |
| networks of the stream that scores of its norm choose | `sum(pick(outs, best) * pick(scores, best), over active)` | moeut |
| half a head that turns | `join(rope(slice(…)), slice(…), along size)` | moeut |
| gated retention | `S = keep * S + outer(v, k)` in a `recurrence` | yoco |
| keys that one layer makes for others | `kv_from`, or `COMPONENT.value` | yoco |
| embeddings of lanes (hyper-connections) | `stream { lanes 4  embed true }` | |
| the loss of the logits that a loop expects (Ouro) | `exit expected 0.1` | |
| keys of a pass for its tokens, of the first for others (Mixture-of-Recursions) | `recur 3 kv replaced` | |
| a temperature, a network and a z-loss of the routers of passes (Mixture-of-Recursions) | `skip(…, temperature 2, network 128, z_loss 1e-3)` | mixture-of-recursions-token |
| keys and values that networks leave for attentions at later depths (Mixture-of-Depths Attention) | `mlp { …  depth_stream }` | moda |

The language does not say these:

- fractions and views of lanes;
- depth for each sequence;
- losses of built-in components other than those of routers;
- shares of Mixture-of-Recursions that fall over the first steps;
- a recurrent width other than `hidden`.
";

/// Counts of a model, as the page has them.
struct Counted {
    depth: u64,
    parameters: f64,
    flops: f64,
    caches: f64,
}

fn counted(sandbox: &Sandbox, line: &[&str]) -> Counted {
    let out = sandbox.good(&[&["count", "--json"], line].concat());
    let json: Value = serde_json::from_str(&out).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let memory = &json["memory_bytes"];
    Counted {
        depth: json["depth"].as_u64().unwrap(),
        parameters: number(&json["parameters"]["total"]),
        flops: number(&json["flops_per_token"]["decode"]),
        caches: number(&memory["sequence_cache_context"]) + number(&memory["depth_cache"]),
    }
}

const PUBLISHED: &str = "\
# Published models

Models as their authors published them, at full size, each in a file of `examples/published`. The first comment of a file names the paper, the code it was compared
with, and what it leaves out. Theirs are the parameters that the authors' class has for the published configuration, every weight once; ours are those of
`dreamc count`. Where the two differ, the last column says by what.

`BLESS=1 cargo test --test cli zoo` writes this page. The test holds both columns.

| file | parameters, ours | theirs | ours less theirs | namely |
|---|--:|--:|--:|---|
";

/// A file of `examples/published`, the parameters of its authors' model, and each part of what ours
/// has more, or less.
struct Published {
    file: &'static str,
    theirs: i64,
    parts: &'static [(i64, &'static str)],
}

const fn exact(file: &'static str, theirs: i64) -> Published {
    Published { file, theirs, parts: &[] }
}

/// Theirs were counted by making each class on PyTorch's device `meta`, but for Ouro, whose layers
/// are added up.
const MODELS: [Published; 22] = [
    exact("bamba-9b.dream", 9_780_235_392),
    exact("deepseek-v2-lite.dream", 15_706_484_224),
    // 671,026,419,200 with the biases that choose, 256 in each of 58 layers, which are state here.
    exact("deepseek-v3.dream", 671_026_419_200 - 58 * 256),
    exact("falcon-h1-0.5b.dream", 521_411_104),
    exact("gemma-2-2b.yaml", 2_614_341_888),
    exact("gpt-oss-120b.dream", 116_829_156_672),
    exact("gpt-oss-20b.dream", 20_914_757_184),
    exact("granite-4.0-h-tiny.dream", 6_939_037_248),
    exact("huginn-3.5b.dream", 3_564_976_800),
    exact("kimi-linear-48b-a3b.dream", 49_122_675_072),
    exact("llama-3.2-1b.yaml", 1_235_814_400),
    exact("mixtral-8x7b.yaml", 46_702_792_704),
    Published {
        file: "moeut-1b.dream",
        theirs: 1_040_319_296,
        parts: &[
            // 4 layers, 2 · 72 experts of 1536 · 128 with rows of a router, for 2 matrices.
            (-4 * (2 * 72 * (1536 * 128 + 1536) - 2 * 1536 * 768), "experts of values and outputs"),
            (-(4 * 2 + 1) * 1536, "biases of norms"),
            (-8000, "the bias of the head"),
        ],
    },
    exact("nemotron-3-nano-30b-a3b.dream", 31_577_937_344),
    exact("nemotron-h-8b.dream", 8_100_852_736),
    exact("olmoe-1b-7b.yaml", 6_919_161_856),
    exact("ouro-1.4b.dream", 1_434_652_673),
    exact("ouro-2.6b.dream", 2_667_974_657),
    exact("parcae-1.3b.dream", 1_338_591_744),
    exact("qwen1.5-moe-a2.7b.dream", 14_315_784_192),
    exact("qwen3-30b-a3b.dream", 30_532_122_624),
    exact("qwen3-next-80b-a3b.dream", 79_674_391_296),
];

/// A number with a comma before every three digits.
fn grouped(n: i64) -> String {
    let digits = n.unsigned_abs().to_string();
    let from_the_end = |i: usize| digits.len() - i;
    let each =
        digits.chars().enumerate().map(|(i, digit)| match i > 0 && from_the_end(i).is_multiple_of(3) {
            true => format!(",{digit}"),
            false => digit.to_string(),
        });
    format!("{}{}", if n < 0 { "-" } else { "" }, each.collect::<String>())
}

/// Every published model has its authors' parameters, or differs by what is said of it, to the
/// digit.
#[test]
fn published_models_have_their_authors_parameters() {
    let sandbox = Sandbox::with(&[]);
    let mut page = String::from(PUBLISHED);
    for Published { file, theirs, parts } in &MODELS {
        let path = root(&format!("examples/published/{file}")).to_string_lossy().into_owned();
        let json: Value = serde_json::from_str(&sandbox.good(&["count", "--json", &path])).unwrap();
        let ours = json["parameters"]["total"].as_i64().unwrap();
        let more: i64 = parts.iter().map(|(n, _)| n).sum();
        assert_eq!(ours - theirs, more, "{file} has {ours} parameters, its authors' model {theirs}");
        let why: Vec<String> = parts.iter().map(|(n, why)| format!("{}: {why}", grouped(*n))).collect();
        let row = [file.to_string(), grouped(ours), grouped(*theirs), grouped(more), why.join("; ")];
        let _ = writeln!(page, "| {} |", row.join(" | "));
    }
    let mut files: Vec<String> = fs::read_dir(root("examples/published"))
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, MODELS.map(|model| model.file), "every file has its authors' number");
    if std::env::var_os("BLESS").is_some() {
        fs::write(root("docs/published.md"), &page).unwrap();
    }
    let there = fs::read_to_string(root("docs/published.md")).unwrap_or_default();
    assert!(there == page, "docs/published.md is not current: BLESS=1 cargo test --test cli zoo");
}

/// Thousands, to three digits.
fn thousands(n: f64) -> String {
    let k = n / 1000.0;
    if k < 100.0 { format!("{k:.1} k") } else { format!("{k:.0} k") }
}

/// A number, and its share of the layered model's.
fn beside(own: f64, layered: f64) -> String {
    format!("{} | {:.0} %", thousands(own), 100.0 * own / layered)
}

/// The names of the zoo's files, in order.
fn names() -> Vec<String> {
    let entries = fs::read_dir(root("examples/zoo")).unwrap().flatten();
    let file = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<String> =
        entries.map(file).filter_map(|name| name.strip_suffix(".dream").map(String::from)).collect();
    names.sort();
    names
}

#[test]
fn files_are_short_and_name_their_source() {
    for name in names() {
        let text = fs::read_to_string(root(&format!("examples/zoo/{name}.dream"))).unwrap();
        // Apart from definitions, which are as long as their formulas.
        let defines = text.split("\n\n").filter(|block| block.trim_start().starts_with("define "));
        let lines = text.lines().count() - defines.map(|block| block.lines().count() + 1).sum::<usize>();
        assert!(lines <= 40, "{name} has {lines} lines");
        let comment: String = text.lines().map_while(|line| line.strip_prefix("//")).collect();
        assert!(comment.contains("arXiv") || comment.contains('/'), "{name} names no source: {comment}");
        assert!(text.contains(&format!("model {name} {{")), "{name} has another name inside");
    }
}

/// The page and the drawings are what the commands give now.
#[test]
fn the_page_is_current() {
    let sandbox = Sandbox::with(&[]);
    let path = |name: &str| root(&format!("examples/zoo/{name}.dream")).to_string_lossy().into_owned();
    let layered = path("layered");
    let mut table = String::from(
        "| model | depth | parameters | of layered | FLOPs | of layered | caches, bytes | of layered |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    let mut sections = String::new();
    let mut files = vec![];
    for name in names() {
        let file = path(&name);
        let own = counted(&sandbox, &[&file]);
        let as_deep = counted(&sandbox, &[&layered, "--set", &format!("model.body[0].repeat={}", own.depth)]);
        let _ = writeln!(
            table,
            "| [{name}](#{name}) | {} | {} | {} | {} |",
            own.depth,
            beside(own.parameters, as_deep.parameters),
            beside(own.flops, as_deep.flops),
            beside(own.caches, as_deep.caches),
        );
        let text = fs::read_to_string(&file).unwrap();
        let comment: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("// ")).collect();
        let model: Vec<&str> = text
            .lines()
            .skip_while(|line| line.starts_with("//"))
            .take_while(|line| !line.starts_with("data ") && !line.starts_with("train "))
            .collect();
        let _ = write!(
            sections,
            "\n## {name}\n\n{}\n\n```text\n{}\n```\n\n![The wiring of {name}](zoo/{name}.svg)\n",
            comment.join("\n"),
            model.join("\n").trim()
        );
        files.push((format!("docs/zoo/{name}.svg"), sandbox.good(&["draw", &file])));
    }
    files.push(("docs/zoo.md".into(), format!("{PAGE}{table}{PARTS}{sections}")));
    let bless = std::env::var_os("BLESS").is_some();
    if bless {
        fs::create_dir_all(root("docs/zoo")).unwrap();
    }
    for (name, text) in &files {
        if bless {
            fs::write(root(name), text).unwrap();
        }
        let there = fs::read_to_string(root(name)).unwrap_or_default();
        assert!(there == *text, "{name} is not current: BLESS=1 cargo test --test cli zoo");
    }
    let drawings = fs::read_dir(root("docs/zoo")).unwrap().count();
    assert_eq!(drawings, files.len() - 1, "docs/zoo holds drawings of models that are gone");
}

/// How often each rewriting rule's result was chosen, in training and in writing.
#[test]
fn rules_fire_where_they_did() {
    let sandbox = Sandbox::with(&[]);
    let mut text = String::new();
    for name in names() {
        let file = root(&format!("examples/zoo/{name}.dream")).to_string_lossy().into_owned();
        for (what, how) in [("training", &["--sequence", "16"][..]), ("writing", &["--writing"][..])] {
            let explain = ["explain", file.as_str(), "--json", "--batch", "2", "--target", "cpu"];
            let line = [&explain[..], how].concat();
            let report: Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
            let mut used: BTreeMap<&str, usize> = BTreeMap::new();
            let functions = report["functions"].as_array().unwrap().iter();
            for firing in functions.flat_map(|f| f["firings"].as_array().unwrap()) {
                if firing["used"] == true {
                    *used.entry(firing["rule"].as_str().unwrap()).or_default() += 1;
                }
            }
            let used: Vec<String> = used.iter().map(|(rule, times)| format!("{rule} {times}")).collect();
            let _ = writeln!(text, "{name}, {what}: {}", used.join(", "));
        }
    }
    insta::assert_snapshot!(text);
}

/// A drawing stands by itself, and a command that refuses writes nothing.
#[test]
fn drawings_stand_by_themselves() {
    let file = root("examples/zoo/depth-recurrent.dream").to_string_lossy().into_owned();
    let sandbox = Sandbox::with(&[("wrong.yaml", "model: {}\n")]);
    sandbox.good(&["draw", &file, "-o", "a.svg"]);
    let svg = sandbox.read("a.svg");
    assert_eq!(svg, sandbox.good(&["draw", &file]));
    assert!(svg.starts_with("<svg") && svg.contains("prefers-color-scheme: dark"), "{svg}");
    assert!(!svg.contains("href") && !svg.contains("<script"), "{svg}");
    let (code, _) = sandbox.bad(&["draw", "wrong.yaml", "-o", "b.svg"]);
    assert!(code == 1 && !sandbox.path("b.svg").exists());
}
