//! Times grow with the text of a specification.

use dreamc_compiler::count::{Options, count};
use dreamc_dsl::{Spec, Spelling};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// A body of `side` layers, each of `side` components in a row, all of them different.
fn many(side: usize) -> Spec {
    let mut text =
        String::from("model:\n  name: many\n  vocab: 256\n  hidden: 16\n  context: 32\n  components:\n");
    for i in 0..side * side {
        let _ = match i % 3 {
            0 => writeln!(
                text,
                "    c{i}: {{sequence: {{heads: 2, kv_heads: 1, head_size: {}}}}}",
                8 + 2 * (i % 5)
            ),
            1 => writeln!(text, "    c{i}: {{mlp: {{intermediate: {}}}}}", 8 + i % 200),
            _ => writeln!(
                text,
                "    c{i}: {{experts: {{count: 4, active: 2, intermediate: {}, query: 8}}}}",
                8 + i % 100
            ),
        };
    }
    text += "  body:\n";
    for layer in 0..side {
        let names: Vec<String> = (layer * side..(layer + 1) * side).map(|i| format!("c{i}")).collect();
        let _ = writeln!(text, "    - \"{}\"", names.join(" > "));
    }
    text += "train: {steps: 2, batch: 2, sequence: 32, precision: f32}\n";
    let ast = dreamc_dsl::parse("many.yaml", &text, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}"));
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// Four times the components take at most eight times as long to count, and 4,096 of them come to
/// an end: a look at every weight for each weight takes sixteen times as long, and minutes.
#[test]
fn counting_grows_with_the_text() {
    let (less, more) = (many(32), many(64));
    let time = |spec: &Spec| {
        let once = || {
            let start = Instant::now();
            count(spec, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
            start.elapsed()
        };
        once().min(once())
    };
    let (less, more) = (time(&less), time(&more));
    assert!(more < 8 * less, "{less:?} and {more:?}");
    assert!(more < Duration::from_secs(30), "{more:?}");
}

#[test]
fn compiling_grows_with_the_text() {
    for side in [16, 32, 64] {
        let spec = many(side);
        let start = Instant::now();
        let options = dreamc_compiler::Options { batch: 2, sequence: 32, train: true, ..Default::default() };
        dreamc_compiler::compile(&spec, &options).unwrap_or_else(|e| panic!("{e}"));
        println!("{side}: {:?}", start.elapsed());
    }
}
