//! Times grow with the text of a specification.

use dreamc_compiler::count::{Options, count};
use dreamc_dsl::{Spec, Spelling};
use std::fmt::Write;
use std::time::{Duration, Instant};

mod clock;
use clock::thread_time;

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
            let start = thread_time();
            count(spec, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
            thread_time() - start
        };
        once().min(once())
    };
    let (less, more) = (time(&less), time(&more));
    assert!(more < 8 * less, "{less:?} and {more:?}");
    assert!(more < Duration::from_secs(30), "{more:?}");
}

/// Four times the components take at most eight times as long to compile: a search that prices the
/// whole of a layer for each of its alternatives takes twelve times as long, and minutes. Bodies
/// are compiled on all threads, so that time is the clock's.
#[test]
fn compiling_grows_with_the_text() {
    let time = |side: usize| {
        let spec = many(side);
        let start = Instant::now();
        let options = dreamc_compiler::Options { batch: 2, sequence: 32, train: true, ..Default::default() };
        dreamc_compiler::compile(&spec, &options).unwrap_or_else(|e| panic!("{e}"));
        start.elapsed()
    };
    let (less, more) = (time(32).min(time(32)), time(64));
    println!("1,024 components: {less:?}, 4,096: {more:?}");
    assert!(more < 8 * less, "{less:?} and {more:?}");
    assert!(more < Duration::from_secs(60), "{more:?}");
}
