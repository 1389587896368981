//! `dreamc check-transfer` at small sizes, of every kind of component, wiring, loop, skip and
//! definition of the library: sizes of activations have the slopes of the rule.

use dreamc_dsl::Spec;
use dreamc_dsl::define::library::LIBRARY;
use dreamc_dsl::spec::Kind;
use dreamc_verify::coordinates::{Axis, Line, Report, check};
use dreamc_verify::{Compiler, Subject, shrink};

/// A subject: components, body and stream, and what it stands for.
struct Case {
    name: &'static str,
    text: &'static str,
    /// Slopes that are not the rule's, each with its reason where it stands.
    off: &'static [(&'static str, Axis)],
    /// Rules but `mup` under which all of its slopes are those of the rule.
    also: &'static [&'static str],
}

const fn case(name: &'static str, text: &'static str) -> Case {
    Case { name, text, off: &[], also: &[] }
}

impl Case {
    const fn also(self, rules: &'static [&'static str]) -> Case {
        Case { also: rules, ..self }
    }
}

/// Attentions and networks of layers.
const LAYERS: Case = case(
    "layers",
    "
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    near: {sequence: {heads: 2, head_size: 4, window: 3, sink: true, gate: element, bias: all, value_residual: true}}
    ea: {experts: {count: 4, active: 2, intermediate: 6, query: 4, shared: 1}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"sa > mlp\", \"near > ea\"]}]",
)
.also(&["completep", "umup"]);

/// Attentions of short vectors, over depth, and with keys of earlier depths.
const DEPTHS: Case = case(
    "depths",
    "
    lat: {sequence: {heads: 2, head_size: 6, qk_norm: none, latent: {query: 6, kv: 8, turned: 2, value: 4}}}
    da: {depth: {heads: 2, head_size: 4}}
    md: {sequence: {heads: 2, kv_heads: 1, head_size: 4, depth_keys: true}}
    mlp: {mlp: {intermediate: 8, post_norm: true}}
  body: [{repeat: 2, layers: [\"(da | lat) > mlp\", \"md > mlp\"]}]",
);

/// A loop with everything that a loop has.
const LOOP: Case = case(
    "loop",
    "
    sa: {sequence: {heads: 2, head_size: 4}}
    da: {depth: {heads: 1, head_size: 4}}
    ea: {experts: {count: 3, active: 2, intermediate: 6, query: 4}}
  body: [{recur: 3, layers: [\"(da | sa) > ea\"]}]",
)
.also(&["completep", "spectral"]);

/// Passes with weights of their own, around layers and statements.
const PASSES: Case = case(
    "passes",
    "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 8}}
  body: [\"sa > mlp\", save e, {recur: 3, residual_norm: false, embed: true, lora: 2, layers: [\"mix e linear\", \"sa > norm > mlp\"]}, norm]",
);

/// Tokens that skip: routers stay, and every token is taken.
const SKIPS: Case = case(
    "skips",
    "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 8}}
  body:
    - repeat: 2
      layers: [\"skip(capacity 0.5, causal bce 0.1) { sa > mlp }\", \"skip(threshold, capacity 0.5, penalty 0.3) { sa } > mlp\"]",
)
.also(&["completep", "umup"]);

const STATIC: Case = case(
    "static lanes",
    "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"sa > mlp\"]}]
  stream: {lanes: 3, kind: static}",
)
.also(&["completep"]);

const DYNAMIC: Case = case(
    "dynamic lanes",
    "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"sa > mlp\"]}]
  stream: {lanes: 3, kind: dynamic}",
)
.also(&["completep"]);

const MANIFOLD: Case = case(
    "lanes on a manifold",
    "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"sa > mlp\"]}]
  stream: {lanes: 3, kind: mhc}",
)
.also(&["completep", "umup"]);

const ATTENDED: Case = case(
    "a mean of sources",
    "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"sa > mlp\"]}]
  stream: {attend: {block: 1}}",
);

const DELTA: Case = case(
    "definitions of the delta rule",
    "
    gd: {gated_delta: {heads: 2}}
    dn: {deltanet: {heads: 2}}
    ka: {kda: {heads: 2}}
    rw: {rwkv7: {size: 4}}
  body: [{repeat: 2, layers: [\"gd > dn\", \"ka > rw\"]}]",
)
.also(&["spectral"]);

const DECAY: Case = case(
    "definitions that decay",
    "
    la: {linear_attention: {heads: 2}}
    li: {lightning: {heads: 2}}
    re: {retnet: {heads: 2}}
    gl: {gla: {heads: 2, rank: 4}}
    ma: {mamba2: {size: 4, state: 4}}
    ml: {mlstm: {heads: 2}}
  body: [{repeat: 2, layers: [\"la > li > re\", \"gl > ma > ml\"]}]",
)
.also(&["spectral"]);

const HYBRID: Case = Case {
    name: "a definition that attends and decays",
    // Keys and queries of a state whose size stays begin m^-1/2 smaller, and no norm follows them.
    off: &[("fa.out", Axis::Width), ("fa.out", Axis::Heads), ("fa.scores", Axis::Heads)],
    also: &[],
    text: "
    fa: {falcon_h1: {heads: 2, head: 4, size: 4, state: 4}}
    ff: {scaled_mlp: {}}
  body: [{repeat: 2, layers: [\"fa > ff\"]}]",
};

const SCORED: Case = Case {
    name: "definitions of attentions",
    // Its formula reads the depth: of `1 - first` 0.8 are left at first, 0.2 far up.
    off: &[("di.out", Axis::Depth)],
    also: &[],
    text: "
    al: {alibi: {heads: 2}}
    fo: {forgetting: {heads: 2}}
    di: {differential: {heads: 2}}
    ca: {canon: {width: 3}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"al > ca > fo\", \"di > mlp\"]}]",
};

const CHOOSING: Case = case(
    "definitions that choose their keys",
    "
    mo: {moba: {heads: 2, block: 3}}
    ns: {nsa: {heads: 2, block: 2, window: 4}}
    ds: {dsa: {heads: 2, indexers: 2, index: 4, tokens: 5}}
    mlp: {mlp: {intermediate: 8}}
  body: [{repeat: 2, layers: [\"mo > ns\", \"ds > mlp\"]}]",
);

fn spec(case: &Case, rule: &str) -> Spec {
    let text = format!(
        "model:\n  name: carried\n  vocab: 17\n  hidden: 16\n  context: 12\n  components:{}\ntrain: {{steps: 6, batch: 4, transfer: \
         {{rule: {rule}, width: 16, depth: 4}}}}\n",
        case.text
    );
    let ast = dreamc_dsl::parse("carried.yaml", &text, dreamc_dsl::Spelling::Yaml)
        .unwrap_or_else(|e| panic!("{e}"));
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{}: {e}", case.name)).0
}

fn report(case: &Case, rule: &str) -> Report {
    let begun = std::time::Instant::now();
    let small = shrink(&spec(case, rule), false);
    let subject = Subject::new(small.spec, 1, None, &[], &Compiler).unwrap();
    let drawn = begun.elapsed().as_secs_f64();
    let report = check(&subject, &mut |_| {}).unwrap().unwrap();
    println!(
        "{}, {rule}: {} slopes, {:.1} s, of which {drawn:.1} for the draw",
        case.name,
        report.lines.len(),
        begun.elapsed().as_secs_f64()
    );
    for line in &report.lines {
        if !line.flat || std::env::var_os("DREAMC_SLOPES").is_some() {
            let sizes: Vec<String> = line.sizes.iter().map(|x| format!("{x:.1e}")).collect();
            println!(
                "  {} {}, {}: {:+.2} ({:+.2} to {:+.2}), by the rule {:+.2}; {} {:?}",
                line.of,
                line.when(),
                line.over.title(),
                line.slope.slope,
                line.slope.low,
                line.slope.high,
                line.expected,
                sizes.join(" "),
                line.weight
            );
        }
    }
    report
}

fn holds(case: &Case) {
    holds_by(case, "mup");
    case.also.iter().for_each(|rule| holds_by(case, rule));
}

fn holds_by(case: &Case, rule: &str) {
    let found = report(case, rule);
    let known = |line: &&Line| !case.off.contains(&(line.of.as_str(), line.over));
    let off = found.lines.iter().filter(known).filter(|line| !line.flat);
    let off: Vec<_> = off.map(|line| (&line.of, line.over)).collect();
    assert!(off.is_empty(), "{}, {rule}: {off:?}", case.name);
    assert!(found.lines.iter().any(|line| line.over == Axis::Depth), "{}", case.name);
}

macro_rules! cases {
    ($($test:ident: $case:ident;)*) => {
        $(#[test] fn $test() { holds(&$case); })*

        const CASES: &[&Case] = &[$(&$case),*];
    };
}

cases! {
    layers_carry: LAYERS;
    depths_carry: DEPTHS;
    loops_carry: LOOP;
    passes_carry: PASSES;
    skips_carry: SKIPS;
    static_lanes_carry: STATIC;
    dynamic_lanes_carry: DYNAMIC;
    lanes_on_a_manifold_carry: MANIFOLD;
    means_of_sources_carry: ATTENDED;
    definitions_of_the_delta_rule_carry: DELTA;
    definitions_that_decay_carry: DECAY;
    definitions_that_attend_and_decay_carry: HYBRID;
    definitions_of_attentions_carry: SCORED;
    definitions_that_choose_carry: CHOOSING;
}

/// Nothing of the language is without a case.
#[test]
fn every_kind_and_every_definition_has_a_case() {
    let specs: Vec<Spec> = CASES.iter().map(|case| spec(case, "mup")).collect();
    for kind in Kind::BUILT_IN {
        let has = |spec: &Spec| spec.model.components.values().any(|c| c.kind() == kind);
        assert!(specs.iter().any(has), "{kind:?}");
    }
    for (name, _) in LIBRARY {
        let has = |spec: &Spec| spec.model.components.values().any(|c| c.about().as_deref() == Some(*name));
        assert!(specs.iter().any(has), "{name}");
    }
}
