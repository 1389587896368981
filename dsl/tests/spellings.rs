//! The tree of both spellings, formatting, editing, and random trees that go through all of it.

mod common;

use common::Random;
use dreamc_dsl::{Ast, Spelling, check, edit, format, parse, schema, show};

fn read(text: &str, spelling: Spelling) -> Ast {
    parse("text", text, spelling).unwrap_or_else(|diagnostics| panic!("{diagnostics}\n{text}"))
}

fn example(name: &str) -> Ast {
    dreamc_dsl::parse_file(format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn shown() {
    for name in ["dr-da-16.yaml", "published/olmoe-1b-7b.yaml", "mod.yaml"] {
        let (spec, _) = check(&example(name), &[]).unwrap();
        let name = name.trim_start_matches("published/");
        insta::assert_snapshot!(format!("{name}.yaml"), show(&spec, Spelling::Yaml));
        insta::assert_snapshot!(format!("{name}.dream"), show(&spec, Spelling::Dream));
    }
}

#[test]
fn comments_stay_with_what_they_are_about() {
    let text = include_str!("files/comments.yaml");
    let ast = read(text, Spelling::Yaml);
    let yaml = format(&ast, Spelling::Yaml).unwrap();
    let dream = format(&ast, Spelling::Dream).unwrap();
    insta::assert_snapshot!("comments.yaml", yaml);
    insta::assert_snapshot!("comments.dream", dream);
    settled(&ast);
    let comments = |text: &str, marker: &str| {
        let mut comments: Vec<String> = text
            .lines()
            .filter_map(|line| line.split_once(marker))
            .map(|(_, c)| c.trim().to_string())
            .collect();
        comments.sort();
        comments
    };
    assert_eq!(comments(text, "#"), comments(&yaml, "#"));
    assert_eq!(comments(text, "#"), comments(&dream, "//"));
}

/// Formatting settles at once, and each spelling leads back to what the other means.
fn settled(ast: &Ast) {
    let yaml = format(ast, Spelling::Yaml).unwrap();
    let dream = format(ast, Spelling::Dream).unwrap();
    let (from_yaml, from_dream) = (read(&yaml, Spelling::Yaml), read(&dream, Spelling::Dream));
    assert_eq!(format(&from_yaml, Spelling::Yaml).unwrap(), yaml);
    assert_eq!(format(&from_dream, Spelling::Dream).unwrap(), dream);
    assert_eq!(format(&from_dream, Spelling::Yaml).unwrap(), yaml, "\n{dream}");
    assert_eq!(format(&from_yaml, Spelling::Dream).unwrap(), dream, "\n{yaml}");
    assert_eq!(from_yaml.without_spans(), from_dream.without_spans());
}

#[test]
fn streams_have_a_form_of_their_own() {
    let model = "components: {a: {mlp: {intermediate: 4}}}, body: [a]";
    for (yaml, dream) in [
        ("sum", "sum"),
        ("attend", "attend"),
        ("{attend: {block: 8}}", "attend { block 8 }"),
        ("{lanes: 4}", "lanes 4"),
        ("{lanes: 2 * 2, kind: dynamic}", "lanes 2 * 2 dynamic"),
        ("{lanes: 4, kind: mhc}", "lanes 4 mhc"),
        ("{lanes: 4, kind: mhc, embed: true}", "{ lanes 4  kind mhc  embed true }"),
    ] {
        let text = format!("model: {{vocab: 7, hidden: 4, context: 4, stream: {yaml}, {model}}}\n");
        let ast = read(&text, Spelling::Yaml);
        let written = format(&ast, Spelling::Dream).unwrap();
        assert!(written.contains(&format!("stream {dream}\n")), "{written}");
        settled(&ast);
        let (spec, _) = check(&ast, &[]).unwrap_or_else(|e| panic!("{e}"));
        for spelling in [Spelling::Yaml, Spelling::Dream] {
            let shown = read(&show(&spec, spelling), spelling);
            assert_eq!(check(&shown, &[]).unwrap_or_else(|e| panic!("{e}")).0, spec);
        }
    }
    // A component may have the name of a kind, and stands below.
    let text = "model { vocab 7 hidden 4 context 4 stream lanes 2\n  mhc = mlp { intermediate 4 }\n  layer { mhc } }";
    let (spec, _) = check(&read(text, Spelling::Dream), &[]).unwrap_or_else(|e| panic!("{e}"));
    assert!(spec.model.components.contains_key("mhc"));
}

#[test]
fn edits_change_nothing_else() {
    let name = "x.yaml";
    let text = include_str!("files/comments.yaml");
    let cases = [
        ("ea.count", "16", "count: 8, # eight", "count: 16, # eight"),
        ("depth", "32", "depth: 4  # layers", "depth: 32  # layers"),
        ("hidden", "128", "hidden: 64", "hidden: 128"),
        ("model.body[1].recur", "7", "recur: 2 * depth", "recur: 7"),
        ("sa.head_size", "16", "{heads: 4}", "{heads: 4, head_size: 16}"),
        ("da.kv_heads", "1", "head_size: 16\n", "head_size: 16\n        kv_heads: 1\n"),
        ("train.steps", "99", "steps: 10", "steps: 99"),
    ];
    for (path, value, from, to) in cases {
        let edited = edit(name, text, path, value).unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
        assert_eq!(edited, text.replacen(from, to, 1), "{path}");
    }
    let dream = format(&read(text, Spelling::Yaml), Spelling::Dream).unwrap();
    let edited = edit("x.dream", &dream, "ea.count", "16").unwrap();
    assert_eq!(edited, dream.replacen("count 8", "count 16", 1));
    let edited = edit("x.dream", &dream, "model.body[1].recur", "7").unwrap();
    assert_eq!(edited, dream.replacen("recur 2 * depth", "recur 7", 1));
    let edited = edit("x.dream", &dream, "da.kv_heads", "1").unwrap();
    assert_eq!(edited, dream.replacen("head_size 16\n", "head_size 16\n    kv_heads 1\n", 1));
    let edited = edit("x.dream", &dream, "sa.head_size", "16").unwrap();
    assert_eq!(edited, dream.replacen("{ heads 4 }", "{ heads 4  head_size 16 }", 1));
    for path in ["ea.cuont", "nothing.at.all", "eval.stride", "sa..", "ea[3]"] {
        assert!(edit(name, text, path, "1").is_err(), "{path}");
    }
}

#[test]
fn forms_that_mean_the_same() {
    let yaml = "model:\n  name: m\n  vocab: 256\n  hidden: 64\n  context: 64\n  components:\n    sa: {sequence: {heads: 4, rope: 500}}\n    da: {depth: {heads: 1, head_size: 16, rope: {base: 500, half_reversed: true}}}\n  body: da | sa\n";
    let dream = "model m { vocab 256, hidden 64, context 64 sa = sequence {heads 4 rope 500} da = depth { heads 1 head_size 16 rope 500 half_reversed } body { da | sa } }";
    let explicit = "model { name m vocab 256 hidden 64 context 64 components { sa { sequence { heads 4 rope { base 500 } } } da { depth { heads 1 head_size 16 } } } layer { (da | (sa)) } }";
    let spec = |text, spelling| check(&read(text, spelling), &[]).unwrap_or_else(|d| panic!("{d}")).0;
    assert_eq!(spec(yaml, Spelling::Yaml), spec(dream, Spelling::Dream));
    assert_eq!(spec(yaml, Spelling::Yaml), spec(explicit, Spelling::Dream));
}

/// `BLESS=1 cargo test -p dreamc-dsl reference` writes the page anew.
#[test]
fn the_reference_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/language.md");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, dreamc_dsl::reference()).unwrap();
    }
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(page, dreamc_dsl::reference(), "BLESS=1 writes the page");
}

#[test]
fn the_examples_of_the_reference_page_mean_the_same() {
    let page = dreamc_dsl::reference();
    let block = |fence: &str| page.split(fence).nth(1).unwrap().split("```").next().unwrap().to_string();
    let (dream, yaml) =
        (read(&block("```text\n"), Spelling::Dream), read(&block("```yaml\n"), Spelling::Yaml));
    let spec = |ast| check(ast, &[]).unwrap_or_else(|diagnostics| panic!("{diagnostics}")).0;
    assert_eq!(spec(&dream), spec(&yaml));
}

#[test]
fn the_schema_knows_every_key() {
    let schema = schema(dreamc_dsl::FileKind::Spec);
    let definitions = schema["$defs"].as_object().unwrap();
    for section in [
        "model", "sequence", "depth", "experts", "mlp", "router", "rope", "balance", "train", "data", "match",
    ] {
        let body = &definitions[section];
        assert_eq!(body["additionalProperties"], false, "{section}");
    }
    assert_eq!(definitions["experts"]["required"], serde_json::json!(["count", "active", "intermediate"]));
    // Every reference leads somewhere.
    let text = schema.to_string();
    for part in text.split("\"$ref\":\"#/$defs/").skip(1) {
        let name = part.split('"').next().unwrap().replace("%20", " ");
        assert!(definitions.contains_key(&name), "{name}");
    }
}

// Random files ------------------------------------------------------------------------------------

/// Writes a random YAML file of the right shape, with comments and odd spacing.
struct Writer {
    random: Random,
    text: String,
    lets: Vec<String>,
}

impl Writer {
    fn number(&mut self) -> String {
        let size = 1 + self.random.below(64);
        match self.random.below(6) {
            0 if !self.lets.is_empty() => self.random.pick(&self.lets).clone(),
            1 if !self.lets.is_empty() => format!("{size} * ({} + 1)", self.lets[0]),
            2 => format!("{size}_000"),
            3 => format!("{} - {}", 100 + size, size),
            _ => size.to_string(),
        }
    }

    fn comment(&mut self, indent: usize) {
        if self.random.one_in(6) {
            self.text += "\n";
        }
        if self.random.one_in(4) {
            let text = *self.random.pick(&["a remark", "x: 1", "it's \"so\"", "", "// twice"]);
            self.text += &format!("{}# {text}\n", " ".repeat(indent));
        }
    }

    fn trailing(&mut self) {
        if self.random.one_in(5) {
            self.text += *self.random.pick(&["  # behind", " # {x}", "\t# tab"]);
        }
        self.text += "\n";
    }

    fn map(&mut self, indent: usize, pairs: &[(&str, String)], flow: bool) {
        if flow {
            let pairs: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}: {value}")).collect();
            self.text += &format!(" {{{}}}", pairs.join(", "));
            self.trailing();
            return;
        }
        self.trailing();
        for (key, value) in pairs {
            self.comment(indent);
            self.text += &format!("{}{key}: {value}", " ".repeat(indent));
            self.trailing();
        }
        self.comment(indent);
    }

    fn layer(&mut self, depth: usize) -> String {
        let names = ["sa", "da", "ea", "mlp"];
        match self.random.below(if depth > 2 { 1 } else { 6 }) {
            0 => self.random.pick(&names).to_string(),
            1 | 2 => format!("{} > {}", self.term(depth), self.term(depth)),
            3 => format!("{} | {} | {}", self.term(depth), self.term(depth), self.term(depth)),
            4 => format!("skip(capacity 0.5, causal bce 0.01) {{ {} }}", self.layer(depth + 1)),
            _ => format!("skip(threshold,capacity 1/2 penalty 0.1, kv all) {{{}}}", self.layer(depth + 1)),
        }
    }

    fn term(&mut self, depth: usize) -> String {
        let inner = self.layer(depth + 1);
        let alone = !inner.contains(' ')
            || (inner.starts_with("skip") && inner.matches("skip").count() == 1 && inner.ends_with('}'));
        if alone { inner } else { format!("({inner})") }
    }

    fn items(&mut self, indent: usize, depth: usize) {
        for _ in 0..1 + self.random.below(3) {
            self.comment(indent);
            let pad = " ".repeat(indent);
            if depth < 2 && self.random.one_in(3) {
                let key = *self.random.pick(&["repeat", "recur"]);
                let count = self.number();
                self.text += &format!("{pad}- {key}: {count}");
                self.trailing();
                self.comment(indent + 2);
                self.text += &format!("{pad}  layers:");
                if self.random.one_in(3) {
                    let layer = self.layer(0);
                    self.text += &format!(" [\"{layer}\"]");
                    self.trailing();
                } else {
                    self.trailing();
                    self.items(indent + 4, depth + 1);
                }
            } else {
                let layer = self.layer(0);
                self.text += &format!("{pad}- {layer}");
                self.trailing();
            }
        }
    }

    fn file(&mut self) {
        self.comment(0);
        if self.random.one_in(2) {
            let pairs = [("width", "32".to_string()), ("depth", "2 * width".to_string())];
            self.text += "let:";
            let flow = self.random.one_in(2);
            self.map(2, &pairs, flow);
            self.lets = vec!["width".into(), "depth".into()];
        }
        self.comment(0);
        self.text += "model:";
        self.trailing();
        for key in ["vocab", "hidden", "context"] {
            self.comment(2);
            let value = self.number();
            self.text += &format!("  {key}: {value}");
            self.trailing();
        }
        if self.random.one_in(2) {
            self.text += "  name: a-name.2";
            self.trailing();
        }
        self.comment(2);
        self.text += "  components:";
        self.trailing();
        for (name, kind) in [("sa", "sequence"), ("da", "depth"), ("ea", "experts"), ("mlp", "mlp")] {
            self.comment(4);
            let pairs = match kind {
                "experts" => {
                    vec![("count", self.number()), ("active", "1".into()), ("intermediate", self.number())]
                }
                "mlp" => vec![("intermediate", self.number()), ("activation", "geglu".into())],
                _ => vec![
                    ("heads", "4".into()),
                    ("rope", "{base: 5e2, half_reversed: true}".into()),
                    ("head_size", "16".into()),
                ],
            };
            let flow = self.random.one_in(2);
            if flow && self.random.one_in(2) {
                let pairs: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}: {value}")).collect();
                self.text += &format!("    {name}: {{{kind}: {{{}}}}}", pairs.join(", "));
                self.trailing();
            } else {
                self.text += &format!("    {name}:");
                self.trailing();
                self.comment(6);
                self.text += &format!("      {kind}:");
                self.map(8, &pairs, flow);
            }
        }
        self.comment(2);
        self.text += "  body:";
        self.trailing();
        self.items(4, 0);
        self.comment(2);
        if self.random.one_in(2) {
            let flow = self.random.one_in(2);
            self.text += "train:";
            let only =
                *self.random.pick(&["[a, \"b.*\", 'c d']", "[]", "[routers]", "[true, \"1\", \"x\\ny\"]"]);
            let steps = self.number();
            self.map(2, &[("steps", steps), ("only", only.into()), ("evaluate", "{every: 5}".into())], flow);
        }
        self.comment(0);
    }
}

#[test]
fn random_files_go_through_both_spellings() {
    for seed in 0..300 {
        let mut writer = Writer { random: Random(seed), text: String::new(), lets: Vec::new() };
        writer.file();
        let ast = read(&writer.text, Spelling::Yaml);
        let result = std::panic::catch_unwind(|| settled(&ast));
        assert!(result.is_ok(), "seed {seed}:\n{}", writer.text);
        // The meaning of a text does not depend on how it is written.
        let dream = read(&format(&ast, Spelling::Dream).unwrap(), Spelling::Dream);
        match (check(&ast, &[]), check(&dream, &[])) {
            (Ok((left, _)), Ok((right, _))) => {
                assert_eq!(left, right, "seed {seed}");
                let shown = show(&left, Spelling::Yaml);
                assert_eq!(check(&read(&shown, Spelling::Yaml), &[]).unwrap().0, left, "seed {seed}");
            }
            (Err(left), Err(right)) => {
                let messages = |d: &dreamc_dsl::Diagnostics| {
                    let mut messages: Vec<_> = d.list.iter().map(|d| d.message.clone()).collect();
                    messages.sort();
                    messages
                };
                assert_eq!(messages(&left), messages(&right), "seed {seed}:\n{}", writer.text);
            }
            _ => panic!("seed {seed}: the spellings disagree\n{}", writer.text),
        }
    }
}

/// The library is as `dreamc fmt` leaves it, settings that are too long for a line too.
#[test]
fn definitions_of_the_library_are_formatted() {
    for (name, text) in dreamc_dsl::define::library::LIBRARY {
        let ast = read(text, Spelling::Dream);
        assert_eq!(format(&ast, Spelling::Dream).unwrap(), *text, "{name}");
        settled(&ast);
    }
}
