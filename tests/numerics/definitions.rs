//! Components that are written as formulas: every function keeps every promise that `dreamc verify`
//! proves, and what is written as a built-in component is compiled as one is.

use dreamc_compiler::program::{BufferId, Plan, Space};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_runtime::verify::{Compiler, Task, verify};

/// Where a definition named `own` is applied.
const MODEL: &str = "
model m {
  vocab 32  hidden 8  context 16
  own = mixer { }
  sa = sequence { heads 2 }
  mlp = mlp { intermediate 12 }
  layer { own > mlp }  layer { sa }  layer { own }
}
train { batch 2  sequence 12 }
";

fn spec(text: &str) -> Spec {
    let ast = parse("m.dream", text, Spelling::Dream).unwrap_or_else(|found| panic!("{found}"));
    check(&ast, &[]).unwrap_or_else(|found| panic!("{found}")).0
}

/// A definition of these statements in a model.
fn defined(statements: &str) -> Spec {
    spec(&format!("define mixer(heads 2, size 4) {{\n{statements}\n}}\n{MODEL}"))
}

/// That proofs hold of a specification: those of its formulas, of decoding, of counts and of
/// gradients.
fn prove(spec: &Spec, of: &str) {
    let only: Vec<String> = match std::env::var("DREAMC_PROOFS") {
        Ok(names) => names.split(',').map(String::from).collect(),
        Err(_) => vec![],
    };
    let task = Task { spec, weights: None, seed: 1, only: &only, devices: &[], pipeline: &Compiler, ranks: 1 };
    let report = verify(&task, &mut |_| {}).unwrap_or_else(|e| panic!("{of}: {e}"));
    assert!(report.holds(), "{of}\n{report}");
}

/// Statements of definitions, by what they show.
const FUNCTIONS: &[(&str, &str)] = &[
    ("a network", "return linear(silu(linear(x, [wide: 12])) * linear(x, [wide], bias), [hidden])"),
    (
        "functions of a number",
        "a = linear(x, [n: 6])
         b = exp(-abs(a)) + log(1 + square(a)) + sqrt(1 + square(a)) + rsqrt(1 + square(a))
         c = sin(a) + cos(a) + tanh(a) + sigmoid(a) + silu(a) + gelu(a) + relu(a) + relu2(a)
         d = softplus(a) + log_sigmoid(a) + floor(a) + min(a, b) + max(a, c) + mod(a, 2)
         e = where(a < b, c, d) + where(a == 0 or not (a > c) and a != 1, 1, b) + clip(a, -1, 1)
         return linear(a + b + c + d + e, [hidden])",
    ),
    (
        "dimensions",
        "a = linear(x, [heads, size])
         w = weight([size, heads], normal 0.5)
         b = softmax(a, over heads) + w * rms(a, over heads size, gain) + l2(a, over heads)
         c = layer_norm(a, over size, gain) * sum(a, over heads) + mean(a, over heads) - maximum(b, over size)
         d = outer(sum(a, over heads), weight([wide: 3]))
         e = dot(d, a, over size)
         f = merge(a, over heads size, [all: heads * size])
         g = join(f, merge(outer(e, weight([heads])), over wide heads, [other: 3 * heads]), along both)
         s = slice(g, over both, 2, [part: 5])
         t = split(slice(g, over both, 8, [six: 6]), over six, [two: 2, three: 3])
         return linear(s, [hidden]) + linear(sum(t, over two), [hidden]) + linear(c, [hidden], over heads size)",
    ),
    (
        "a matrix of every head",
        "a = linear(x, [heads, size])
         b = linear(a, [heads, wide: 3], over size)
         return linear(b, [hidden])",
    ),
    (
        "choices",
        "a = linear(x, [n: 6])
         best = top(a, 2, over n)
         v = linear(x, [n, size])
         return linear(sum(pick(v, best) * softmax(pick(a, best), over choices), over choices), [hidden])",
    ),
    (
        "numbers of tokens and depths",
        "a = linear(x, [heads, size]) * (position + 1) + depth / depths
         b = rope(a, 100, over size) + rope(a, 50, over size, at depth) + stop(a)
         return linear(b, [hidden])",
    ),
    ("an earlier token", "return linear(shift(linear(x, [size]), 2) + shift(x, 1) * 0.5, [hidden])"),
    ("a convolution", "return linear(silu(conv(linear(x, [heads, size]), 3, bias)), [hidden])"),
    ("a running sum", "return linear(running(linear(x, [size])) / (position + 1), [hidden])"),
    (
        "attention",
        "q = linear(x, [four: 2 * heads, size])
         k = rope(linear(x, [heads, size]), 100, over size)
         v = linear(x, [heads, wide: 3])
         return linear(attend(q, k, v, window = 5, sink), [hidden])",
    ),
    (
        "two attentions",
        "q = linear(x, [heads, size])
         k = linear(x, [size])
         v = linear(x, [wide: 6])
         a = attend(q, k, v)
         return linear(a, [hidden]) + linear(attend(shift(q), q, q), [hidden])",
    ),
    (
        "the delta rule",
        "q = l2(silu(conv(linear(x, [heads, size]), 3)), over size) * rsqrt(size)
         k = l2(silu(conv(linear(x, [heads, size]), 3)), over size)
         v = silu(linear(x, [heads, value: 6]))
         a = exp(-exp(weight([heads], log_uniform 1 16)) * softplus(linear(x, [heads]) + weight([heads], zero)))
         b = sigmoid(linear(x, [heads]))
         recurrence S [heads, value, size] {
           S = a * S
           S = S + outer(b * (v - sum(S * k, over size)), k)
           o = sum(S * q, over size)
         }
         return linear(rms(o, over value, gain) * silu(linear(x, [heads, value])), [hidden])",
    ),
    (
        "states of any kind",
        "i = linear(x, [heads])
         f = log_sigmoid(linear(x, [heads], bias))
         k = linear(x, [heads, size])
         w = linear(x, [wide: 3])
         recurrence C [size, heads] from 0, n [heads] from weight([heads]), m [heads] from -1 {
           most = max(f + m, i)
           keep = exp(f + m - most)
           C = keep * C + exp(i - most) * k
           n = tanh(linear(n, [heads]) + sum(w, over wide))
           m = most
           o = C / max(abs(n), exp(-m)) + where(n > 0, softmax(C, over size), 0.5)
         }
         return linear(o * k, [hidden]) + linear(m, [hidden])",
    ),
    (
        "attention along depth",
        "q = linear(x, [heads, size])
         k = linear(x, [heads, size])
         v = linear(x, [heads, size])
         return linear(depth_attend(q, k, v), [hidden])",
    ),
    (
        "a value of the last application",
        "v = linear(x, [size])
         w = v + 0.5 * earlier(v)
         return linear(w, [hidden])",
    ),
];

#[test]
fn every_function_keeps_every_promise() {
    let only = std::env::var("DREAMC_DEFINITION").ok();
    let mut failed = vec![];
    for (of, statements) in FUNCTIONS.iter().filter(|(of, _)| only.as_ref().is_none_or(|o| of.contains(o.as_str()))) {
        let found = std::panic::catch_unwind(|| prove(&defined(statements), of));
        if let Err(why) = found {
            let text = why.downcast_ref::<String>().cloned().unwrap_or_default();
            failed.push(format!("{of}: {text}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}
