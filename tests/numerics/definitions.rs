//! Components that are written as formulas: every function keeps every promise that `dreamc verify`
//! proves, and what is written as a built-in component is compiled as one is.

use crate::support::{cpu, error};
use dreamc_compiler::compiled::{Init, Per};
use dreamc_compiler::count::{self, count};
use dreamc_compiler::program::Step;
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_data::rng::Philox;
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_runtime::generate::{Cached, Next, NextLogits, Slots, Writing, compile_cached};
use dreamc_runtime::model::Model;
use dreamc_verify::{Compiler, Task, verify};

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
    prove_only(spec, of, &[]);
}

/// The same of these proofs; all where there are none.
fn prove_only(spec: &Spec, of: &str, proofs: &[&str]) {
    let only: Vec<String> = match std::env::var("DREAMC_PROOFS") {
        Ok(names) => names.split(',').map(String::from).collect(),
        Err(_) => proofs.iter().map(|name| name.to_string()).collect(),
    };
    let task =
        Task { spec, weights: None, seed: 1, only: &only, devices: &[], pipeline: &Compiler, ranks: 1 };
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
         each = top(linear(x, [heads, n]), 3, over n)
         w = weight([n, size], normal 1)
         p = sum(pick(v, best) * softmax(pick(a, best), over choices), over choices)
         q = sum(pick(w, best), over choices) + sum(best, over choices) * maximum(p, over size)
         r = sum(pick(outer(a, v), each), over choices3) + sum(places(n) * a, over n)
         return linear(p + q, [hidden]) + linear(r, [hidden])",
    ),
    (
        "numbers of tokens and depths",
        "a = linear(x, [heads, size]) * (position + 1) + depth / depths
         b = rope(a, 100, over size) + rope(a, 50, over size, at depth) + stop(a)
         return linear(b, [hidden])",
    ),
    ("an earlier token", "return linear(shift(linear(x, [size]), 2), [hidden]) + shift(x, 1) * 0.5"),
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
         recurrence C [heads, size] from 0, n [heads] from weight([heads]), m [heads] from -1 {
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
        "matrices over a state",
        "k = linear(x, [heads, size])
         recurrence C [size, heads] from 0, n [hidden] from weight([hidden]) {
           u = linear(C, [heads, wide: 3], bias)
           r = sigmoid(linear(n, [heads, wide], over hidden))
           C = softmax(0.5 * C + k, over size) + linear(u * r, [heads, size], over wide)
           n = tanh(linear(n, [hidden]) + linear(C, [hidden]))
           o = linear(C, [two: 2, size], over heads size)
         }
         return linear(o, [hidden]) + n",
    ),
    (
        "choices of a state",
        "k = linear(x, [heads, size])
         n = linear(x, [few: 3, size])
         recurrence C [size, heads] from 0 {
           C = 0.5 * C + k
           best = top(C, 2, over size)
           o = sum(pick(C, best) * softmax(pick(n, best), over choices), over few) + sum(places(size) * C, over size)
         }
         return linear(o, [hidden])",
    ),
    (
        "attention that drops weights",
        "q = linear(x, [four: 2 * heads, size])
         k = linear(x, [heads, size])
         v = linear(x, [heads, wide: 3])
         f = running(log_sigmoid(linear(x, [heads])))
         a = attend(q, k, v, window = 5, sink, dropout = 0.4)
         b = attend(k, k, v, score = s + f[i] - f[j], mask = i - j < 6 or j == 0, dropout = 0.25)
         return linear(a, [hidden]) + linear(b, [hidden])",
    ),
    (
        "chosen blocks of keys",
        "q = rope(linear(x, [heads, size]), 100, over size)
         k = linear(x, [heads, size])
         v = linear(x, [heads, wide: 3])
         near = choose(q, running(k, block = 3) / 3, 2, block = 3, near = 1)
         return linear(attend(q, k, v, among = near, sink), [hidden])",
    ),
    (
        "chosen tokens",
        "q = linear(x, [four: 2 * heads, size])
         k = linear(x, [heads, size])
         v = linear(x, [heads, wide: 3])
         best = choose(linear(x, [few: 3, size]), linear(x, [size]), 4, relu, weights = linear(x, [few]), over few)
         a = attend(q, k, v, among = best, window = 9, scale = 0.7, dropout = 0.2)
         return linear(a, [hidden]) + 0.01 * linear(best, [hidden])",
    ),
    (
        "a choice that follows attention",
        "q = linear(x, [four: 2 * heads, size])
         k = linear(x, [heads, size])
         v = linear(x, [heads, wide: 3])
         t = stop(x)
         best = choose(linear(t, [heads, two: 2, size]), linear(t, [heads, size]), 4, near = 1, weights = linear(t, [heads, two]), over two)
         y = attend(q, k, v, among = best, sink, window = 9, dropout = 0.2)
         s = scores(best) - stop(maximum(scores(best), over choices))
         loss 0.5 * sum(mass(y) * (log(sum(exp(s), over choices)) - s), over heads choices)
         m = mass(attend(q, k, v, among = choose(q, running(k, block = 3), 2, block = 3, over four)))
         loss 0.1 * sum(m * m, over choices2)
         return linear(y, [hidden])",
    ),
    (
        "compressed, chosen and near keys",
        "q = linear(x, [heads, two: 2, size])
         k = linear(x, [heads, size])
         v = linear(x, [heads, wide: 3])
         few = conv(k, 3)
         best = choose(q, few, 3, block = 3, near = 1, first = 1, softmax, over two)
         far = attend(q, few, running(v, block = 3) / 3, every = 3)
         return linear(far + attend(q, k, v, among = best) + attend(q, k, v, window = 4), [hidden])",
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
    (
        "components inside",
        "far = sequence(x) { heads 2 }
         near = sequence(far + x) { heads 2  kv_heads 1  window 4 }
         pace = sigmoid(linear(x, [hidden]))
         y = mlp(pace * far + (1 - pace) * near) { intermediate 12 }
         z = depth(y) { heads 2 }
         e = experts(z) { count 4  active 2  intermediate 4 }
         return linear(e + shift(z), [hidden]) + mlp(y) { intermediate 6  pre_norm true }",
    ),
];

#[test]
fn every_function_keeps_every_promise() {
    let only = std::env::var("DREAMC_DEFINITION").ok();
    let mut failed = vec![];
    for (of, statements) in
        FUNCTIONS.iter().filter(|(of, _)| only.as_ref().is_none_or(|o| of.contains(o.as_str())))
    {
        let found = std::panic::catch_unwind(|| prove(&defined(statements), of));
        if let Err(why) = found {
            let text = why.downcast_ref::<String>().cloned().unwrap_or_default();
            failed.push(format!("{of}: {text}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// A definition inside another, with values of every kind, in a model that skips and repeats.
#[test]
fn definitions_inside_others_keep_every_promise() {
    let text = |body: &str| {
        format!(
            "define inner(size 4) {{
               v = linear(x, [size])
               k = l2(linear(x, [size]), over size)
               recurrence S [value: size, size] {{
                 S = 0.9 * S + outer(linear_of, k)
                 o = sum(S * k, over size)
               }}
               return linear(o, [hidden]) + linear(shift(v) + earlier(v), [hidden])
             }}
             define outer_one(heads 2) {{
               a = inner(x) {{ size 3 }}
               b = sequence(a) {{ heads heads }}
               return inner(b + x) {{ size 5 }} + b
             }}
             model m {{
               vocab 32  hidden 8  context 16
               own = outer_one {{ }}
               sa = sequence {{ heads 2 }}
               mlp = mlp {{ intermediate 12 }}
               {body}
             }}
             train {{ batch 2  sequence 12 }}"
        )
        .replace("linear_of", "linear(x, [value])")
    };
    for body in [
        "layer { own > mlp }  layer { sa }  layer { own }",
        "recur 3 { own > mlp }  layer { sa }",
        "layer { sa }  recur 2 backprop 1 { own > mlp }",
        "layer { own }  layer { skip(threshold, capacity 0.5, penalty 0.1) { own > mlp } }  layer { own }",
        "layer { sa }  layer { skip(threshold, capacity 0.5, penalty 0.1, kv all) { own } }",
        "layer { own }  layer { skip(capacity 0.5, causal bce 0.01) { own > mlp } }  layer { own }",
    ] {
        prove(&spec(&text(body)), body);
    }
}

/// Values of other components, and of earlier applications, where tokens skip either: such a token
/// has the value of the application before.
#[test]
fn values_outlast_the_applications_that_a_token_skips() {
    let text = |body: &str| {
        format!(
            "define maker(size 4) {{
               v = linear(x, [size]) + 0.5 * earlier(v)
               return linear(v, [hidden])
             }}
             define reader(size 4) {{
               return linear(ma.v * linear(x, [size]), [hidden])
             }}
             model m {{
               vocab 32  hidden 8  context 16
               ma = maker {{ }}
               re = reader {{ }}
               sa = sequence {{ heads 2 }}
               {body}
             }}
             train {{ batch 2  sequence 12 }}"
        )
    };
    let (top, own) = ("skip(capacity 0.5, causal bce 0.01)", "skip(threshold, capacity 0.5, penalty 0.1)");
    for body in [
        "layer { sa > ma > re }  layer { re }".into(),
        format!("layer {{ sa > ma }}  layer {{ {top} {{ ma > re }} }}  layer {{ re }}"),
        format!("layer {{ sa > ma }}  layer {{ {own} {{ ma > re }} }}  layer {{ re }}"),
        format!("layer {{ sa > {own} {{ ma }} > re }}  layer {{ {top} {{ re }} }}"),
        format!("recur 3 {{ sa > {own} {{ ma }} > {top} {{ re }} }}"),
    ] {
        prove(&spec(&text(&body)), &body);
    }
}

// Every way ---------------------------------------------------------------------------------------

/// A model whose `own` has states of every kind of function of several tokens: components before
/// the body, then what else the specification has.
fn within(body: &str, more: &str) -> Spec {
    within_dropping(body, more, "")
}

/// The same, whose attention has these words, too.
fn within_dropping(body: &str, more: &str, words: &str) -> Spec {
    let text = format!(
        "model:
  name: within
  vocab: 17
  hidden: 8
  context: 12
{more}  components:
    own: {{mixer: {{}}}}
    sa: {{sequence: {{heads: 2, head_size: 4, projection: none}}}}
    mlp: {{mlp: {{intermediate: 7}}}}
  body:
{body}
define:
  mixer:
    settings: {{heads: 2, size: 3}}
    code: |
      k = l2(conv(linear(x, [heads, size]), 3), over size, eps = 0.1)
      v = linear(x, [heads, wide: 4])
      a = sigmoid(linear(x, [heads]))
      f = running(log_sigmoid(linear(x, [heads])))
      recurrence S [heads, wide, size] {{
        S = a * S
        S = S + outer(v - sum(S * k, over size), k)
        o = sum(S * k, over size)
      }}
      y = attend(k, shift(k), v, score = s + f[i] - f[j], mask = i - j < 5 or j == 0{words})
      return linear(o, [hidden]) + linear(y, [hidden])
"
    );
    let ast = parse("within.yaml", &text, Spelling::Yaml).unwrap_or_else(|found| panic!("{found}"));
    check(&ast, &[]).unwrap_or_else(|found| panic!("{found}")).0
}

const TRAIN: &str = "train: {steps: 6, batch: 2, sequence: 8, learning_rate: 0.01";

/// Bodies of a definition, with keys of the model before and those of the recipe after them.
const WAYS: &[(&str, &str, &str, &str)] = &[
    ("a loop", "    - {recur: 3, layers: [\"own > mlp\"]}", "", ""),
    (
        "a loop with matrices of each pass",
        "    - {recur: 3, residual_norm: false, lora: 2, layers: [\"own > mlp\"]}",
        "",
        "",
    ),
    (
        "a loop of random depth whose last passes have a gradient",
        "    - {recur: 3, residual_norm: false, backprop: 2, layers: [\"own > mlp\"]}",
        "",
        ", random_depth: {min: 1, max: 3}",
    ),
    (
        "a loop that tokens leave",
        "    - {recur: 3, residual_norm: false, exit: {gate: 0.1}, layers: [\"own > mlp\", norm]}",
        "",
        "",
    ),
    ("tokens that skip", "    - \"skip(capacity 0.6, causal bce 0.2) { own > mlp }\"\n    - own", "", ""),
    (
        "tokens that skip by a threshold",
        "    - \"skip(threshold, capacity 0.5, penalty 0.3) { own } > mlp\"",
        "",
        "",
    ),
    (
        "passes of fewer and fewer tokens",
        "    - {recur: 3, residual_norm: false, layers: [\"skip(router pass, gate sigmoid, capacity [1, 2/3, 1/3], \
         nested, causal bce 0.2) { own > mlp }\"]}",
        "",
        "",
    ),
    ("side by side", "    - own | mlp\n    - own | sa", "", ""),
    ("lanes", "    - own > mlp\n    - own", "  stream: {lanes: 2, kind: dynamic}\n", ""),
    (
        "lanes that are mixed to sums of one",
        "    - own > mlp\n    - own",
        "  stream: {lanes: 2, kind: mhc}\n",
        "",
    ),
    ("attention over layers", "    - own > mlp\n    - own | sa", "  stream: attend\n", ""),
    ("statements", "    - own\n    - save e\n    - mlp\n    - mix e linear\n    - own", "", ""),
    ("halves", "    - own > mlp", "", ", precision: bf16"),
    ("a penalty and Muon", "    - own > mlp", "", ", optimizer: muon, z_loss: 0.01"),
];

#[test]
fn a_definition_goes_wherever_a_component_goes() {
    let only = std::env::var("DREAMC_DEFINITION").ok();
    let mut failed = vec![];
    for &(of, body, model, train) in
        WAYS.iter().filter(|(of, ..)| only.as_ref().is_none_or(|o| of.contains(o.as_str())))
    {
        let begun = std::time::Instant::now();
        let spec = within(&format!("{body}\n{TRAIN}{train}}}"), model);
        if let Err(why) = std::panic::catch_unwind(|| prove(&spec, of)) {
            failed.push(why.downcast_ref::<String>().cloned().unwrap_or_default());
        }
        println!("{of}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// Weights are dropped where tokens are gathered, skip, and come again: by application, and by the
/// tokens that there are.
#[test]
fn an_attention_drops_weights_wherever_it_stands() {
    for body in [
        "    - {recur: 3, residual_norm: false, backprop: 2, layers: [\"own > mlp\"]}",
        "    - \"skip(capacity 0.6, causal bce 0.2) { own > mlp }\"\n    - own",
        "    - \"skip(threshold, capacity 0.5, penalty 0.3) { own } > mlp\"",
    ] {
        let spec = within_dropping(&format!("{body}\n{TRAIN}}}"), "", ", dropout = 0.3");
        prove_only(&spec, body, &["formulas", "devices", "rewritten", "cached", "counts"]);
    }
}

/// Evaluation drops nothing: its logits are those of the same model without.
#[test]
fn evaluation_drops_no_weights() {
    let body = format!("    - own > mlp\n{TRAIN}}}");
    let logits = |words: &str, trained: bool| {
        let spec = within_dropping(&body, "", words);
        let options =
            Options { batch: 2, sequence: 8, logits: true, as_trained: trained, ..Options::default() };
        let compiled = compile(&spec, &options).unwrap_or_else(|e| panic!("{e}"));
        let mut model = Model::load(&cpu(1), compiled).unwrap();
        fill(&mut model);
        let ids: Vec<i32> = (0..16).map(|i| i % 17).collect();
        let batch = Batch {
            sequence: 8,
            targets: ids.clone(),
            positions: (0..16).map(|i| i % 8).collect(),
            segments: vec![0; 16],
            ids,
            ..Batch::default()
        };
        model.evaluate(&batch).unwrap();
        model.all_logits().unwrap()
    };
    let plain = logits("", false);
    assert_eq!(logits(", dropout = 0.3", false), plain);
    assert_ne!(logits(", dropout = 0.3", true), plain);
}

/// Documents after one another in a row do not see each other, on one rank or several.
#[test]
fn ranks_and_packed_documents_train_what_one_trains() {
    let body = format!("    - own > mlp\n{TRAIN}}}\ndata: {{text: read.txt, tokenizer: read.json}}");
    let spec = within(&body, "");
    let only = ["formulas", "gradients", "ranks"].map(String::from);
    let task = Task {
        spec: &spec,
        weights: None,
        seed: 1,
        only: &only,
        devices: &[],
        pipeline: &Compiler,
        ranks: 2,
    };
    let report = verify(&task, &mut |_| {}).unwrap();
    assert!(report.holds(), "{report}");
}

/// Every mixer of the library is the one of its formulas, and decodes as it reads.
#[test]
fn every_mixer_of_the_library_keeps_its_promises() {
    let mut failed = vec![];
    for (name, _) in dreamc_dsl::define::library::LIBRARY {
        let text = format!(
            "model m {{ vocab 17  hidden 128  context 12  own = {name} {{ }}  mlp = mlp {{ intermediate 12 }}  layer {{ own > mlp }} }}\n\
             train {{ batch 2  sequence 8 }}"
        );
        let proofs = ["formulas", "cached", "counts"].map(String::from);
        let found = std::panic::catch_unwind(|| {
            let spec = spec(&text);
            let task = Task {
                spec: &spec,
                weights: None,
                seed: 1,
                only: &proofs,
                devices: &[],
                pipeline: &Compiler,
                ranks: 1,
            };
            let report = verify(&task, &mut |_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(report.holds(), "{name}\n{report}");
        });
        if let Err(why) = found {
            failed.push(format!("{name}: {}", why.downcast_ref::<String>().cloned().unwrap_or_default()));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

// The same plan -----------------------------------------------------------------------------------

/// A plan without the names that people gave.
fn launches(spec: &Spec, options: &Options) -> String {
    fn steps(all: &[Step], out: &mut Vec<String>) {
        for step in all {
            match step {
                Step::Launch(l) => out.push(format!("{:?} {:?} {:?}", l.kernel, l.operands, l.places)),
                Step::Loop { variable, count, reverse, steps: inner } => {
                    out.push(format!("loop {variable} {count} {reverse}"));
                    steps(inner, out);
                    out.push("end".into());
                }
            }
        }
    }
    let plan = compile(spec, options).unwrap_or_else(|e| panic!("{e}")).plan;
    let mut out: Vec<String> = plan.kernels.iter().map(|k| format!("{k:?}")).collect();
    for b in &plan.buffers {
        out.push(format!("{:?} {:?} {} {} {}", b.space, b.dtype, b.elements(), b.instances, b.offset));
    }
    for (name, program) in &plan.programs {
        out.push(format!("program {name} {}", program.variables));
        steps(&program.steps, &mut out);
    }
    out.join("\n")
}

/// The first line that differs.
fn difference(a: &str, b: &str) -> String {
    let pairs = a.lines().zip(b.lines()).enumerate().find(|(_, (a, b))| a != b);
    pairs.map_or_else(|| "one is longer".into(), |(i, (a, b))| format!("line {i}:\n{a}\n{b}"))
}

/// Pairs of a built-in component and what a definition writes in its place.
const SAME: &[(&str, &str)] = &[
    (
        "mlp { intermediate 12 }",
        "gate = linear(x, [wide: 12])
         up = linear(x, [wide])
         return linear(silu(gate) * up, [hidden])",
    ),
    ("mlp { intermediate 12  activation relu2 }", "return linear(relu2(linear(x, [wide: 12])), [hidden])"),
    (
        "sequence { heads 2  kv_heads 1  head_size 4 }",
        "all = linear(x, [all: 16])
         q = split(slice(all, over all, 0, [wide: 8]), over wide, [heads, size])
         k = split(slice(all, over all, 8, [key: 4]), over key, [kv: 1, size])
         v = split(slice(all, over all, 12, [value: 4]), over value, [kv, size])
         a = rms(q, over size, gain)
         b = rms(k, over size, gain)
         return linear(attend(rope(a, 10000), rope(b, 10000), v), [hidden])",
    ),
    (
        "sequence { heads 2  head_size 4  gate head  sink true  window 5 }",
        "all = linear(x, [all: 24])
         q = split(slice(all, over all, 0, [wide: 8]), over wide, [heads, size])
         k = split(slice(all, over all, 8, [key: 8]), over key, [kv: 2, size])
         v = split(slice(all, over all, 16, [value: 8]), over value, [kv, size])
         a = rms(q, over size, gain)
         b = rms(k, over size, gain)
         o = attend(rope(a, 10000), rope(b, 10000), v, window = 5, sink)
         return linear(o * sigmoid(linear(x, [heads])), [hidden])",
    ),
    (
        "depth { heads 2  head_size 4  rope 500 }",
        "all = linear(x, [all: 24])
         q = split(slice(all, over all, 0, [wide: 8]), over wide, [heads, size])
         k = split(slice(all, over all, 8, [key: 8]), over key, [kv: 2, size])
         v = split(slice(all, over all, 16, [value: 8]), over value, [kv, size])
         a = rms(q, over size, gain)
         b = rms(k, over size, gain)
         o = depth_attend(rope(a, 500, at depth), rope(b, 500, at depth), v)
         return linear(o, [hidden])",
    ),
];

#[test]
fn what_is_written_as_a_built_in_component_is_compiled_as_one() {
    let mut failed = vec![];
    for (component, statements) in SAME {
        let own = defined(statements);
        let built = MODEL.replace("mixer { }", component);
        let built = spec(&built);
        let training = Options { batch: 2, sequence: 12, train: true, ..Options::default() };
        let writing = Writing { rows: 2, ..Writing::default() };
        for options in [training, writing.options(&own)] {
            let (a, b) = (launches(&built, &options), launches(&own, &options));
            if a != b {
                failed.push(format!("{component}: {}", difference(&a, &b)));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

// Generation --------------------------------------------------------------------------------------

/// A model with states of texts of every kind, and keys.
fn stateful() -> Spec {
    let mut spec = defined(
        "k = l2(conv(linear(x, [heads, size]), 3), over size)
         v = shift(linear(x, [heads, size]), 2)
         recurrence S [heads, size, wide: 4] from weight([heads], normal 1) {
           S = 0.9 * S + outer(v, weight([wide], normal 1)) * sum(k, over size)
           o = sum(S, over wide)
         }
         r = running(linear(x, [heads, size])) / (position + 1)
         return linear(o + r + attend(k, k, v), [hidden])",
    );
    spec.model.context = 80;
    spec
}

fn cached(spec: &Spec, rows: u64, prompt: Option<u64>) -> Cached {
    let writing = Writing { rows, prompt, ..Writing::default() };
    let compiled = compile_cached(spec, &writing).unwrap_or_else(|e| panic!("{e}"));
    let mut cached = Cached::load(&cpu(2), compiled).unwrap();
    fill(cached.model());
    cached
}

/// Weights that any program of the model has.
fn fill(model: &mut Model) {
    for (name, shape) in model.entries() {
        let n = shape.iter().product::<u64>() as usize;
        let values = dreamc_runtime::init::values(3, &name, Init::Normal(0.3), n);
        model.set(&name, &values).unwrap();
    }
}

fn text(seed: u64, length: usize) -> Vec<u32> {
    let mut random = Philox::new(seed, "text").stream(0);
    (0..length).map(|_| random.below(32) as u32).collect()
}

/// The logits that follow each prefix of a text from `from` on, read anew for each.
fn alone(spec: &Spec, text: &[u32]) -> Vec<f32> {
    let mut one = cached(spec, 1, Some(text.len() as u64));
    one.start(&[text.to_vec()]).unwrap().remove(0)
}

fn close(a: &[f32], b: &[f32], what: &str) {
    let widen = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let e = error(&widen(a), &widen(b));
    assert!(e < 5e-6, "{what}: logits differ by {e:.2e}");
}

#[test]
fn texts_of_unequal_length_do_not_see_one_another_and_leave_nothing_behind() {
    let spec = stateful();
    let texts = [text(1, 1), text(2, 7), text(3, 70)];
    let mut all = cached(&spec, 3, None);
    let logits = all.start(&texts).unwrap();
    for (i, logits) in logits.iter().enumerate() {
        close(logits, &alone(&spec, &texts[i]), &format!("text {i}"));
    }
    // A token more of the first two; the third is passed over.
    let next = [Next::written(0, &5), Next::written(1, &9)];
    for (n, logits) in next.iter().zip(all.step(&next).unwrap()) {
        let longer = [&texts[n.row][..], n.tokens].concat();
        close(&logits, &alone(&spec, &longer), &format!("text {}, a token later", n.row));
    }
    let third = all.step(&[Next::written(2, &4)]).unwrap().remove(0);
    close(&third, &alone(&spec, &[&texts[2][..], &[4]].concat()), "a text that padding passed over");
    // Another text in the row of one that has gone.
    all.release(1).unwrap();
    let row = all.admit().unwrap().unwrap();
    let other = text(4, 9);
    let logits = all.step(&[Next::prompt(row, &other)]).unwrap().remove(0);
    close(&logits, &alone(&spec, &other), "a text after another");
}

#[test]
fn a_text_goes_on_from_the_last_page_whose_state_is_kept() {
    let spec = stateful();
    let writing = Writing { rows: 2, prompt: Some(16), ..Writing::default() };
    let mut slots = Slots::compile(&cpu(2), &spec, &writing).unwrap();
    fill(slots.reader().model());
    slots.keep(1000);
    let page = slots.chunk();
    let first = text(5, 3 * page + 3);
    let slot = slots.admit().unwrap().unwrap();
    slots.step(&[Next::prompt(slot, &first)]).unwrap();
    slots.step(&[Next::written(slot, &1)]).unwrap();
    slots.release(slot).unwrap();
    // Alike in two pages and a half.
    let mut second = first.clone();
    second[2 * page + page / 2] ^= 1;
    let slot = slots.admit().unwrap().unwrap();
    let found = slots.adopt(slot, &second).unwrap();
    assert_eq!(found, 2 * page);
    let logits = slots.step(&[Next::prompt(slot, &second[found..])]).unwrap().remove(0);
    close(&logits, &alone(&spec, &second), "a text that begins as another");
    // One that is in a row yet.
    let third = first.clone();
    let slot = slots.admit().unwrap().unwrap();
    let found = slots.adopt(slot, &third).unwrap();
    assert!(found >= 2 * page, "{found}");
    let logits = slots.step(&[Next::prompt(slot, &third[found..])]).unwrap().remove(0);
    close(&logits, &alone(&spec, &third), "a text that begins as two others");
}

#[test]
fn states_of_texts_are_counted_and_do_not_grow() {
    let spec = stateful();
    let bytes = |context: u64| {
        let mut spec = spec.clone();
        spec.model.context = context;
        count(&spec, &count::Options::default()).unwrap().memory_bytes
    };
    let (short, long) = (bytes(40), bytes(80));
    assert_eq!(short.text_state, long.text_state);
    // Of each of two applications, in f32: two tokens of a convolution of 8 channels, two of a
    // shift, a state of 32 numbers and their count, a sum of 8.
    assert_eq!(short.text_state, 2 * 4 * (16 + 16 + 33 + 8));
    // The plan lists the same.
    let compiled = compile_cached(&spec, &Writing::default()).unwrap();
    let texts = compiled.sequence.iter().filter(|s| s.per == Per::Text);
    assert_eq!(u128::from(texts.map(|s| s.bytes()).sum::<u64>()), short.text_state);
}
