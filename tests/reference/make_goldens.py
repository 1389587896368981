"""Writes `tests/goldens/<case>.yaml` and `tests/goldens/<case>.safetensors`; see README.md for what the files hold.

    python make_goldens.py [case ...]            write all cases, or those named
    python make_goldens.py --check [case ...]    recompute and compare with what is there; write nothing
    python make_goldens.py --to FOLDER [case ...]    write elsewhere
"""

import sys
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from reference import Model, evaluate, infer, read_spec, skips_in, train

FOLDER = Path(__file__).resolve().parent.parent / "goldens"
LARGEST_FILE = 150_000

# Large learning rate and decay, a short warm-up and a tight clip: in ten steps every part of the optimizer must leave a mark
# far above the tolerance of any comparison.
TRAIN = """\
train: {steps: 10, batch: 2, sequence: 7, learning_rate: 1e-2, warmup: 4, clip: 0.5, weight_decay: 0.1}
"""

# The components that most cases share. `{name}` and `{body}` are filled in per case.
DREAMER = """\
model:
  name: {name}
  vocab: 17
  hidden: 12
  context: 16
  components:
    sa: {{sequence: {{heads: 2, kv_heads: 1, head_size: 4, projection: {{query: 6}}}}}}
    da: {{depth: {{heads: 1, head_size: 4, projection: {{query: 6}}}}}}
    ea: {{experts: {{count: 5, active: 2, intermediate: 7, query: 6, balance: 1e-3}}}}
  body:
    - {kind}: {times}
      layers: ["{layer}"]
"""


def dreamer(name, kind, times, layer, drop=()):
    """`drop`: components that the case does not use. Layered models have more weights, hence hidden 8, and no projection
    experts."""
    text = DREAMER.format(name=name, kind=kind, times=times, layer=layer)
    lines = [line for line in text.splitlines() if not any(line.startswith(f"    {c}:") for c in drop)]
    text = "\n".join(lines) + "\n"
    if kind == "repeat":
        text = text.replace("hidden: 12", "hidden: 8").replace(", projection: {query: 6}", "")
    return text


# A frozen base with adapters, in a loop too; biases are behind what a direction scales.
ADAPTED = """\
model:
  name: {name}
  vocab: 17
  hidden: 8
  context: 16
  adapt: {{components: [sa, ea, mlp], {adapt}}}
  components:
    sa: {{sequence: {{heads: 2, kv_heads: 1, head_size: 4, bias: qkv}}}}
    ea: {{experts: {{count: 5, active: 2, intermediate: 4, query: 6, shared: 1, biased: true}}}}
    mlp: {{mlp: {{intermediate: 6}}}}
  body:
    - "sa > ea"
    - recur: 2
      layers: ["sa > mlp"]
"""

CASES = {
    "la": dreamer("la", "repeat", 3, "sa > ea", drop=["da"]),
    "dr": dreamer("dr", "recur", 4, "sa > ea", drop=["da"]),
    "dr_da": dreamer("dr-da", "recur", 4, "(da | sa) > ea"),
    "eq4": dreamer("eq4", "recur", 3, "da > sa > ea"),
    "eq6": dreamer("eq6", "recur", 3, "da | sa | ea"),
    "la_da": dreamer("la-da", "repeat", 3, "(da | sa) > ea"),
    "prelude_core_coda": """\
model:
  name: prelude-core-coda
  vocab: 17
  hidden: 10
  context: 16
  components:
    sa: {sequence: {heads: 2, head_size: 4, projection: {query: 4}}}
    mlp: {mlp: {intermediate: 9}}
  body:
    - "sa > mlp"
    - recur: 2
      layers: ["sa > mlp", "sa > mlp"]
    - "sa > mlp"
""",
    "nested": """\
model:
  name: nested
  vocab: 17
  hidden: 8
  context: 16
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4, projection: {query: 6, balance: 3e-2}}}
    da: {depth: {heads: 1, head_size: 4, projection: {query: 8}}}
    mlp: {mlp: {intermediate: 5, activation: geglu}}
  body:
    - recur: 2
      layers:
        - repeat: 2
          layers: ["(sa > mlp) | da"]
        - recur: 2
          layers: ["da > mlp"]
    - "da > mlp"
""",
    "window": """\
model:
  name: window
  vocab: 19
  hidden: 9
  context: 16
  tie: true
  components:
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 6, window: 3, qk_norm: none, rope: 1000}}
    mlp: {mlp: {intermediate: 11}}
  body:
    - repeat: 3
      layers: ["sa > mlp"]
""",
    "switch": """\
model:
  name: switch
  vocab: 17
  hidden: 8
  context: 16
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    ea: {experts: {count: 6, active: 1, intermediate: 5, query: 8, balance: 2e-2}}
  body:
    - repeat: 3
      layers: ["sa > ea"]
""",
    "geglu_relu": """\
model:
  name: geglu-relu
  vocab: 17
  hidden: 8
  context: 16
  components:
    sa: {sequence: {heads: 2, head_size: 4, projection: {query: 4}}}
    da: {depth: {heads: 2, kv_heads: 1, head_size: 6, rope: 100, qk_norm: none, projection: {query: 4}}}
    soft: {experts: {count: 5, active: 2, intermediate: 5, query: 6, activation: geglu, balance: 1e-3}}
    hard: {experts: {count: 4, active: 3, intermediate: 7, query: 4, activation: relu, balance: 1e-3}}
    wide: {mlp: {intermediate: 9, activation: relu}}
  body:
    - "sa > soft > wide"
    - recur: 3
      layers: ["(sa | da) > hard"]
""",
    "gemma": """\
model:
  name: gemma
  vocab: 17
  hidden: 8
  context: 16
  tie: true
  embed_scale: sqrt_hidden
  logit_softcap: 30
  norm: {unit_offset: true}
  components:
    local: {sequence: {heads: 4, kv_heads: 2, head_size: 4, window: 4, softcap: 50, scale: 0.125, qk_norm: none, post_norm: true}}
    global: {sequence: {heads: 4, kv_heads: 2, head_size: 4, softcap: 50, scale: 0.125, qk_norm: none, post_norm: true}}
    mlp: {mlp: {intermediate: 9, activation: geglu, post_norm: true}}
  body:
    - repeat: 2
      layers: ["local > mlp", "global > mlp"]
""",
    "mod": """\
model:
  name: mod
  vocab: 17
  hidden: 8
  context: 16
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    mlp: {mlp: {intermediate: 9}}
  body:
    - repeat: 2
      layers: ["sa > mlp", "skip(capacity 0.6, causal bce 0.3) { sa > mlp }"]
""",
    "mod_recur": """\
model:
  name: mod-recur
  vocab: 17
  hidden: 10
  context: 16
  components:
    near: {sequence: {heads: 2, kv_heads: 1, head_size: 4, window: 3, projection: {query: 6}}}
    ea: {experts: {count: 5, active: 2, intermediate: 7, query: 6, balance: 1e-3}}
    mlp: {mlp: {intermediate: 9, activation: geglu}}
  body:
    - "near > mlp"
    - recur: 3
      layers: ["skip(capacity 0.7, causal predictor 4) { near > ea }", "mlp > skip(capacity 0.3, causal bce 0.5 into_input) { near }"]
""",
    "mod_depth": """\
model:
  name: mod-depth
  vocab: 17
  hidden: 8
  context: 16
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4, projection: {query: 4}}}
    da: {depth: {heads: 1, head_size: 4, projection: {query: 4}}}
    ea: {experts: {count: 4, active: 2, intermediate: 5, query: 4, balance: 1e-3}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - "(da | sa) > mlp"
    - recur: 3
      layers: ["skip(capacity 0.6, causal bce 0.2) { (da | sa) > ea }", "da > mlp"]
""",
    "mod_threshold": """\
model:
  name: mod-threshold
  vocab: 17
  hidden: 8
  context: 16
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    near: {sequence: {heads: 2, kv_heads: 1, head_size: 4, window: 3}}
    mlp: {mlp: {intermediate: 9}}
  body:
    - repeat: 2
      layers: ["skip(threshold, capacity 0.5, penalty 0.3) { sa } > mlp", "skip(threshold, norm_only, capacity 0.2, penalty 0.5, kv processed) { near > mlp }"]
""",
}


def zoo(name, components, body, vocab=17, hidden=8, more=""):
    """A small model of the family of `examples/zoo/NAME.dream`: the same wiring in as few weights as show it."""
    lines = "".join(f"    {c}\n" for c in components) + "  body:\n" + "".join(f"    - {item}\n" for item in body)
    return f"model:\n  name: {name}\n  vocab: {vocab}\n  hidden: {hidden}\n  context: 16\n{more}  components:\n{lines}"


def sequence(more="", name="sa"):
    return f"{name}: {{sequence: {{heads: 2, kv_heads: 1, head_size: 4{more}}}}}"


LOOPED = sequence(", projection: none")
# Its epsilon counts beside embeddings of 0.05 (see `draw`).
LANES = "  norm: {eps: 1e-2}\n"
MLP = "mlp: {mlp: {intermediate: 9}}"
SQUARE = "mlp: {mlp: {intermediate: 9, activation: relu2}}"
SANDWICH = '"sa > norm > mlp > norm"'

CASES |= {
    "layered": zoo("layered", [sequence(), MLP], ['{repeat: 2, layers: ["sa > mlp"]}']),
    "huginn": zoo("huginn", [LOOPED, MLP], [
        SANDWICH, "save e", "start zeros",
        f'{{recur: 4, residual_norm: false, backprop: 2, layers: ["mix e linear", {SANDWICH}, {SANDWICH}]}}',
        "norm final", SANDWICH,
    ]),
    "parcae": zoo("parcae", [LOOPED, MLP], [
        '"sa > mlp"', "norm", "save e", "start zeros",
        '{recur: 3, residual_norm: false, backprop: 2, layers: ["mix e diagonal", "sa > mlp", "sa > mlp"]}',
        "linear", '"sa > mlp"',
    ]),
    "looped_iso_depth": zoo("looped-iso-depth", [LOOPED, SQUARE], [
        "norm", '"sa > mlp"', "save e",
        '{recur: 4, residual_norm: false, backprop: 3, layers: ["mix e linear identity", "sa > mlp", norm]}',
        '"sa > mlp"',
    ], more="  logit_softcap: 15\n"),
    "looped_lanes": zoo("looped-lanes", [LOOPED, SQUARE], [
        '"sa > mlp"', '{recur: 3, residual_norm: false, layers: ["sa > mlp"]}', '"sa > mlp"',
    ], more=LANES + "  stream: {lanes: 2}\n"),
    "ouro": zoo("ouro", [sequence(", projection: none, qk_norm: none, post_norm: true"),
                         "mlp: {mlp: {intermediate: 9, post_norm: true}}"], [
        '{recur: 3, residual_norm: false, exit: {gate: 0.1}, layers: ["sa > mlp", "sa > mlp", norm]}',
    ]),
    "exit_expected": zoo("exit-expected", [LOOPED, MLP], [
        '"sa > mlp"', '{recur: 3, residual_norm: false, exit: {expected: 0.1}, layers: ["sa > mlp"]}',
    ], more="  head_bias: true\n  logit_scale: 0.7\n"),
    "exit_mean": zoo("exit-mean", [LOOPED, MLP], [
        '"sa > mlp"', '{recur: 3, residual_norm: false, exit: mean, embed: true, layers: ["sa > mlp"]}', "norm",
    ]),
    "kv_first": zoo("kv-first", [sequence(", projection: none, value_residual: true, bias: qkv"), MLP], [
        '"sa > mlp"', '{recur: 3, residual_norm: false, kv: first, lora: 2, layers: ["sa > mlp", "mlp | sa"]}', '"sa > mlp"',
    ]),
    "mixture_of_recursions": zoo("mixture-of-recursions", [LOOPED, MLP], [
        '"sa > mlp"',
        '{recur: 3, residual_norm: false, kv: first, layers: ["skip(router pass, gate sigmoid, gate_scale 0.3, whole, capacity [1, 2/3, 1/3], '
        'nested, causal bce 0.2) { sa > mlp }"]}',
        '"sa > mlp"',
    ]),
    "mixture_of_recursions_token": zoo("mixture-of-recursions-token", [LOOPED, MLP], [
        '"sa > mlp"', '{recur: 3, residual_norm: false, layers: ["skip(depth_choice) { sa > mlp }"]}', '"sa > mlp"',
    ]),
    "keys_replaced": zoo("keys-replaced", [sequence(", projection: none, bias: qkv, sink: true"), MLP], [
        '"sa > mlp"',
        '{recur: 3, residual_norm: false, kv: replaced, layers: ["skip(router pass, gate sigmoid, capacity [1, 2/3, 1/3], nested, causal bce 0.2) '
        '{ sa > mlp }"]}',
        '"sa > mlp"',
    ]),
    "router_network": zoo("router-network", [LOOPED, MLP], [
        '"sa > mlp"',
        '{recur: 3, residual_norm: false, layers: ["skip(router pass, gate sigmoid, capacity [1, 2/3, 1/3], nested, temperature 0.5, '
        'network 5, z_loss 0.3, causal bce 0.2) { sa > mlp }"]}',
    ]),
    "choice_network": zoo("choice-network", [LOOPED, MLP], [
        '"sa > mlp"', '{recur: 3, residual_norm: false, layers: ["skip(depth_choice, temperature 0.5, network 5, z_loss 0.3) { sa > mlp }"]}',
    ]),
    "relaxed_recursive": zoo("relaxed-recursive", [LOOPED, MLP], [
        '{recur: 3, residual_norm: false, lora: 2, layers: ["sa > mlp", "sa > mlp"]}',
    ]),
    "attention_residuals": zoo("attention-residuals", [sequence(), MLP], [
        '{repeat: 2, layers: ["sa > mlp"]}', '"sa | mlp"',
    ], more="  stream: attend\n"),
    "attention_residuals_block": zoo("attention-residuals-block", [sequence(), MLP], [
        '{repeat: 3, layers: ["sa > mlp"]}',
    ], more="  stream: {attend: {block: 3}}\n"),
    "hyper_connections_static": zoo("hyper-connections-static", [sequence(), MLP], [
        '{repeat: 2, layers: ["sa > mlp"]}', '"sa | mlp"',
    ], more=LANES + "  stream: {lanes: 3}\n"),
    "hyper_connections_dynamic": zoo("hyper-connections-dynamic", [sequence(), MLP], [
        '{repeat: 2, layers: ["sa > mlp"]}',
    ], more=LANES + "  stream: {lanes: 3, kind: dynamic}\n"),
    "mhc": zoo("mhc", [sequence(), MLP], [
        '{repeat: 2, layers: ["sa > mlp"]}',
    ], more=LANES + "  stream: {lanes: 3, kind: mhc}\n"),
    "lanes_embed": zoo("lanes-embed", [sequence(), MLP], [
        '{repeat: 2, layers: ["sa > mlp"]}',
    ], more=LANES + "  stream: {lanes: 3, embed: true}\n"),
    "denseformer": zoo("denseformer", [sequence(), "mlp: {mlp: {intermediate: 9, activation: geglu}}"], [
        '{repeat: 2, layers: ["sa > mlp", "sa > mlp", "mix history weighted every 2"]}', '"sa > mlp"', "mix history weighted",
    ]),
    "apart": zoo("apart", [sequence(), MLP], [
        "mix history weighted apart 2", '"sa > mlp"', "mix history weighted apart 2",
        '{repeat: 3, layers: ["sa", "mix history weighted apart 3"]}', '"sa > mlp"', "mix history weighted apart 1",
    ], more="  tie: true\n  head_bias: true\n  logit_softcap: 9\n"),
    "shared_gains": zoo("shared-gains", [LOOPED, MLP], [
        "norm g", '{recur: 3, residual_norm: false, exit: mean, layers: ["sa > mlp", norm g, "mlp"]}', "norm g",
    ], more="  norm: {unit_offset: true}\n  head_bias: true\n  logit_scale: 0.3\n"),
    "x0_scaled": zoo("x0-scaled", [sequence(), SQUARE], [
        "norm plain", "save x0", '{repeat: 3, layers: ["mix x0 scaled", "sa > mlp"]}', "norm plain",
    ], more="  logit_softcap: 15\n"),
    "mix_add": zoo("mix-add", [LOOPED, MLP], [
        '"sa > mlp"', "save e", "start zeros",
        '{recur: 3, residual_norm: false, layers: ["mix e add", "sa > mlp", norm, "save e"]}', '"sa > mlp"',
    ]),
    "moda": zoo("moda", [sequence(", depth_keys: true"), MLP], ['{repeat: 3, layers: ["sa > mlp"]}']),
    "depth_stream": zoo("depth-stream", [
        "sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4, depth_stream: keys, sink: true, bias: qk, projection: none}}",
        "near: {sequence: {heads: 2, kv_heads: 2, head_size: 4, depth_stream: own, window: 3, bias: qkv, projection: none}}",
        "mlp: {mlp: {intermediate: 9, depth_stream: true, pre_norm: false}}",
        "ea: {experts: {count: 4, active: 2, intermediate: 5, query: 4, balance: 1e-3, depth_stream: true}}",
    ], ['"sa > norm > mlp > norm"', '{recur: 3, backprop: 2, layers: ["mlp > (near | sa)", "ea > near"]}']),
    "depth_heads": zoo("depth-heads", [
        sequence(", depth_stream: keys, bias: all, pre_norm: false"),
        "mlp: {mlp: {intermediate: 9, biased: true, depth_stream: true, pre_norm: false}}",
    ], ['{repeat: 3, layers: ["sa > norm > mlp > norm"]}'], more="  tie: true\n  norm: {eps: 1e-8, unit_offset: true}\n"),
    "value_residual": zoo("value-residual", [sequence(", value_residual: true"), MLP], ['{repeat: 3, layers: ["sa > mlp"]}']),
    "cross_layer_kv": zoo("cross-layer-kv", [sequence(), sequence(", kv_from: sa", "again"), MLP], [
        '{repeat: 2, layers: ["sa > mlp", "again > mlp"]}',
    ]),
    "yoco": zoo("yoco", [sequence(", window: 3", "near"), sequence(name="full"), sequence(", kv_from: full", "cross"), MLP], [
        '"near > mlp"', '"full > mlp"', '{repeat: 2, layers: ["cross > mlp"]}',
    ]),
    "gated_attention": zoo("gated-attention", [sequence(", gate: element"), sequence(", gate: head", "few"), MLP], [
        '"sa > mlp"', '"few > mlp"',
    ]),
    "universal_transformer": zoo("universal-transformer", [LOOPED, "mlp: {mlp: {intermediate: 9, activation: relu}}"], [
        f"{{recur: 3, residual_norm: false, embed: true, layers: [{SANDWICH}]}}",
    ]),
    "moeut": zoo("moeut", [LOOPED, "ea: {experts: {count: 6, active: 2, intermediate: 5, activation: relu, balance: 1e-3, "
                           "router: {form: linear, score: sigmoid, normalise: false}}}"], [
        '{recur: 2, residual_norm: false, layers: ["sa > ea", "sa > ea"]}',
    ], more="  head_bias: true\n"),
    "attention_sink": zoo("attention-sink", [
        sequence(", window: 3, sink: true, bias: all, qk_norm: none", "near"), sequence(", sink: true, bias: qkv"), MLP,
    ], ['{repeat: 2, layers: ["near > mlp", "sa > mlp"]}']),
    "post_norms": zoo("post-norms", [
        sequence(", window: 3, qk_norm: rms_all, pre_norm: false, post_norm: true", "near"),
        sequence(", qk_norm: rms_all, pre_norm: false, post_norm: true, rope: 500"),
        "mlp: {mlp: {intermediate: 9, pre_norm: false, post_norm: true}}",
    ], ['{repeat: 2, layers: ["near > mlp", "sa > mlp"]}']),
    "biased_experts": zoo("biased-experts", [
        sequence(", sink: true, bias: all, qk_norm: none"), sequence(", bias: qk", "plain"),
        "ea: {experts: {count: 5, active: 2, intermediate: 6, activation: swiglu_clamped, biased: true, balance: 1e-3, "
        "router: {form: linear, score: softmax, normalise: true}}}",
    ], ['"sa > ea"', '"plain > ea"']),
    "rounded_experts": zoo("rounded-experts", [
        sequence(),
        "ea: {experts: {count: 5, active: 2, intermediate: 6, round: 4, balance: 1e-3, router: {form: linear, score: softmax}}}",
        "eb: {experts: {count: 3, active: 1, intermediate: 6, round: 5, balance: 1e-3, query: 6}}",
    ], ['"sa > ea"', "{recur: 2, layers: [\"sa > eb\"]}"]),
    "latent": zoo("latent", [
        "sa: {sequence: {heads: 3, head_size: 6, qk_norm: none, latent: {query: 5, kv: 7, turned: 2, value: 4}}}",
        "sb: {sequence: {heads: 2, head_size: 6, qk_norm: none, scale: 0.3, latent: {kv: 5, turned: 4, value: 6}}}", MLP,
    ], ['"sa > mlp"', '"sb > mlp"']),
    "partial_latent": zoo("partial-latent", [
        "sa: {sequence: {heads: 4, head_size: 8, qk_norm: none, latent: {kv: 7, turned: 4, value: 6, norm: none, keys: 2, pairs: [[0, 2], [1, 3]]}}}",
        "sb: {sequence: {heads: 2, head_size: 6, qk_norm: none, latent: {query: 5, kv: 5, turned: 6, value: 6, norm: none, keys: 2, pairs: high}}}",
        "sc: {sequence: {heads: 4, head_size: 8, qk_norm: none, latent: {kv: 5, turned: 4, value: 8, keys: 2, pairs: uniform}}}", MLP,
    ], ['"sa > mlp"', '"sb > mlp"', '"sc > mlp"']),
    "factors": zoo("factors", [
        sequence(), "sb: {sequence: {heads: 2, head_size: 6, qk_norm: none, rope: none, latent: {kv: 5, turned: 4, value: 6, eps: 0.1}}}",
        "mlp: {mlp: {intermediate: 9, post_norm: true}}",
    ], ['"sa > mlp"', '"sb > mlp"'], more="  logit_scale: 0.3\n  output_scale: 0.7\n"),
    "partial_rotation": zoo("partial-rotation", [
        "sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8, rope: {base: 10000, share: 0.5}}}",
        "mlp: {mlp: {intermediate: 9}}",
    ], ['{repeat: 2, layers: ["sa > mlp"]}']),
    "shared_experts": zoo("shared-experts", [
        sequence(),
        "ea: {experts: {count: 8, active: 2, intermediate: 3, balance: 1e-3, shared: 2, "
        "router: {form: linear, score: sqrtsoftplus, select: score, groups: 4, topk_groups: 2, scale: 2.5}}}",
        "eb: {experts: {count: 4, active: 2, intermediate: 4, balance: 1e-3, shared: 1, shared_gate: true, "
        "router: {form: linear, score: softmax, normalise: true}}}",
    ], ['"sa > ea"', '"sa > eb"']),
}  # fmt: skip


def define(name, settings, code):
    """`define:` of a specification."""
    lines = "".join(f"      {line.strip()}\n" for line in code.strip().splitlines())
    return f"define:\n  {name}:\n    settings: {settings}\n    code: |\n{lines}"


# The library, and definitions that have every function.
CASES |= {
    "std_states": zoo("std-states", [
        "la: {linear_attention: {heads: 2}}", "rn: {retnet: {heads: 2, value: 6}}", "li: {lightning: {heads: 2}}",
        "ga: {gla: {heads: 2, rank: 3, normalizer: 4}}",
    ], ['"la > rn"', '"li > ga"']),
    "std_delta": zoo("std-delta", [
        "dn: {deltanet: {heads: 2, width: 3}}", "gd: {gated_delta: {heads: 2, members: 2, size: 3, value: 4, width: 2}}",
        "ka: {kda: {heads: 2, size: 3, value: 4, width: 2}}",
    ], ['"dn > gd"', '"ka"']),
    "std_rwkv7": zoo("std-rwkv7", [
        "rw: {rwkv7: {size: 4, decay_rank: 3, rate_rank: 2, value_rank: 2, gate_rank: 3}}", MLP,
    ], ['{repeat: 2, layers: ["rw > mlp"]}']),
    "std_steps": zoo("std-steps", [
        "mb: {mamba2: {size: 2, groups: 2, members: 2, state: 3, width: 3}}", "ml: {mlstm: {heads: 2, size: 3}}",
    ], ['"mb"', '"ml"']),
    "std_falcon": zoo("std-falcon", [
        "fa: {falcon_h1: {heads: 4, kv_heads: 2, head: 2, base: 50, size: 2, groups: 2, members: 3, state: 3, width: 3, read: 1.25, gate: 0.7, values: 0.5, "
        "keys: 0.9, queries: 1.4, steps: 1.2, mixed: 0.6, seen: 1.3, key: 0.7, attended: 0.9}}",
        "ff: {scaled_mlp: {wide: 10, gate: 0.8, down: 0.6}}",
    ], ['{repeat: 2, layers: ["fa > ff"]}']),
    "std_scores": zoo("std-scores", [
        "al: {alibi: {heads: 2}}", "fo: {forgetting: {heads: 2}}", "di: {differential: {heads: 2, size: 2}}",
        "ca: {canon: {width: 3}}",
    ], ['"ca > al"', '"ca > fo"', '"di"']),
    "std_choices": zoo("std-choices", [
        "mo: {moba: {heads: 2, block: 2, blocks: 2}}", "ns: {nsa: {heads: 4, groups: 2, block: 2, blocks: 3, window: 3}}",
        "ds: {dsa: {heads: 2, indexers: 2, index: 4, tokens: 3}}",
    ], ['"mo > ns"', '"ds"']),
    "define_choices": zoo("define-choices", ["own: {mixer: {heads: 2}}", sequence()], ['"own > sa"', '"own"']) + define(
        "mixer", "{heads: 2, size: 4, few: 2}", """
            q = rope(linear(x, [four: 2 * heads, size]), 100)
            k = rope(linear(x, [heads, size]), 100)
            v = linear(x, [heads, wide: 3])
            m = running(k, block = 2) / 2
            c = choose(q, m, few, block = 2, near = 1, scale = 0.3)
            e = attend(q, m, running(v, block = 2), every = 2, scale = 0.8)
            i = choose(linear(x, [heads, three: 3, size]), linear(x, [size]), 3, relu, weights = linear(x, [three, heads]), over three)
            a = attend(q, k, v, among = c, sink)
            b = attend(k, k, v, among = i, window = 5)
            d = attend(q, k, v, among = choose(k, k, 2, block = 3, first = 1, softmax, over heads))
            return linear(a + 0.5 * d + e, [hidden]) + linear(b, [hidden]) + 0.1 * linear(running(sum(c, over few), block = 4), [hidden])
        """),
    "define_followed": zoo("define-followed", ["own: {mixer: {heads: 2}}", sequence()], ['"own > sa"', '"own"']) + define(
        "mixer", "{heads: 2, size: 4, few: 3}", """
            q = rope(linear(x, [heads, two: 2, size]), 100)
            k = rope(linear(x, [heads, size]), 100)
            v = linear(x, [heads, wide: 3])
            t = stop(x)
            c = choose(rope(linear(t, [heads, three: 3, size]), 100), rope(linear(t, [heads, size]), 100), few, relu, near = 1, weights = linear(t, [heads, three]), over three)
            a = attend(q, k, v, among = c, sink, scale = 0.8)
            s = scores(c)
            l = s - stop(maximum(s, over few))
            p = mass(a) / 2
            loss 0.7 * sum(p * (log(max(p, 1e-20)) - l + log(sum(exp(l), over few))), over heads few)
            b = choose(q, running(k, block = 2) / 2, 2, block = 2, near = 1, over two)
            m = mass(attend(q, k, v, among = b, window = 5))
            loss 0.1 * sum(sum(m, over choices) * square(linear(x, [heads])), over heads)
            return linear(a + attend(q, k, v, among = b, window = 5), [hidden])
        """),
    "define_elements": zoo("define-elements", ["own: {mixer: {heads: 2}}", sequence()], ['"sa > own"']) + define(
        "mixer", "{heads: 2, size: 4}", """
            a = linear(x, [heads, size], bias)
            w = weight([size, heads], normal 0.5)
            b = exp(-abs(a)) + log(1 + square(a)) + sqrt(1 + square(a)) + rsqrt(1 + square(a))
            c = sin(a) + cos(a) + tanh(a) + sigmoid(a) + silu(a) + gelu(a) + relu(a) + relu2(a)
            d = softplus(a) + log_sigmoid(a) + min(a, b) + max(a, c) + mod(a, 2) + where(a < b, c, a) + clip(a, -1, 1)
            e = softmax(d, over heads) + w * rms(a, over heads size, gain) + l2(c, over heads, eps = 0.1)
            f = layer_norm(e, over size, gain) * sum(a, over heads) + mean(a, over heads) - maximum(b, over size)
            g = dot(outer(sum(a, over heads), weight([wide: 3], one)), f, over size)
            h = merge(f, over heads size, [all: heads * size])
            m = join(h, merge(g, over wide heads, [other: 3 * heads]), along both)
            n = split(slice(m, over both, 8, [six: 6]), over six, [two: 2, three: 3])
            p = linear(e, [heads, three], over size) + stop(sum(f, over size) * position) * places(heads)
            return linear(slice(m, over both, 2, [part: 5]), [hidden]) + linear(p, [hidden]) + linear(n, [hidden]) + linear(f, [hidden])
        """),
    "define_tokens": zoo("define-tokens", ["own: {mixer: {heads: 2}}", sequence()], ['"own > sa"', '"own"']) + define(
        "mixer", "{heads: 2, size: 4}", """
            q = rope(conv(linear(x, [four: 2 * heads, size]), 3, bias), 100)
            k = rope(linear(x, [heads, size]), 100)
            v = linear(x, [heads, wide: 3]) + shift(linear(x, [wide]), 2)
            f = running(log_sigmoid(linear(x, [four], bias)))
            near = weight([four, span: 5], normal 0.5)
            a = attend(q, k, v, window = 6, sink, scale = 0.4)
            b = attend(q, k, v, score = 3 * tanh(s / 3) + f[i] - f[j] + near[head, clip(i - j, 0, 4)], mask = i - j < 4 or j == 0)
            i = linear(x, [heads])
            g = log_sigmoid(linear(x, [heads], bias))
            recurrence C [heads, size] from 0, n [heads] from weight([heads], zero), m [heads] from -1 {
              most = max(g + m, i)
              keep = exp(g + m - most)
              C = keep * C + exp(i - most) * k
              n = tanh(0.5 * n + sum(v, over wide) * weight([heads], one))
              m = most
              o = C / max(abs(n), exp(-m)) + where(n > 0, softmax(C, over size), 0.5)
            }
            return linear(a, [hidden]) + linear(b, [hidden]) + linear(o * k, [hidden]) + linear(m, [hidden])
        """),
    "define_ids": zoo("define-ids", ["own: {mixer: {heads: 2}}", "two: {reader: {}}", sequence()], ['"own > sa"', '"two > own"']) + define(
        "mixer", "{heads: 2, size: 3}", """
            v = embedding([heads, size], normal 0.5) * sigmoid(linear(x, [heads]))
            s = shift(embedding([size], normal 0.5))
            return linear(v + s, [hidden])
        """) + define("reader", "{}", """
            return sigmoid(x) * embedding([hidden], normal 0.5) + linear(own.v, [hidden])
        """).removeprefix("define:\n"),
    "define_losses": zoo("define-losses", ["own: {mixer: {heads: 2}}", sequence(", projection: none")], [
        '"own > sa"', '{recur: 2, layers: ["own"]}',
    ]) + define("mixer", "{heads: 2, count: 3}", """
        z = linear(x, [heads, count])
        p = softmax(z, over count)
        seen = p + earlier(seen)
        m = average(seen) / (1 + depth)
        loss where(depth == depths - 1, 0.3 * sum(m * log(m), over heads count), 0)
        loss 0.1 * sum(square(z - average(z, batch)), over heads count)
        g = weight([heads], 0.7)
        loss 0.05 * sum(square(g - 2), over heads)
        return linear(p * g * linear(x, [heads, count]), [hidden])
    """),
    "define_depths": zoo("define-depths", ["own: {mixer: {heads: 2}}", "two: {reader: {}}", sequence(", projection: none")], [
        '"own > two"', '{recur: 3, lora: 2, layers: ["sa > own", "(two | own) > sa"]}',
    ]) + define("mixer", "{heads: 2, size: 4}", """
        q = rope(linear(x, [heads, size]), 50, at depth)
        k = rope(linear(x, [heads, size]), 50, at depth)
        v = linear(x, [heads, size]) * (1 + pass) / depths
        w = v + 0.5 * earlier(w)
        return linear(depth_attend(q, k, w), [hidden])
    """) + define("reader", "{}", """
        return linear(own.v + sum(own.k, over size) * depth, [hidden])
    """).removeprefix("define:\n"),
    "lora": ADAPTED.format(name="lora", adapt="matrices: [q, v, gate, down], rank: 2, alpha: 3"),
    "dora": ADAPTED.format(name="dora", adapt="rank: 2, alpha: 3, dora: true"),
}  # fmt: skip
# A small share of the loss would hide whether it is there.
Z_LOSS = TRAIN.replace("}", ", z_loss: 1e-2}")
# Embeddings are small where lanes are (see `draw`): longer steps magnify rounding.
SHORT = TRAIN.replace("learning_rate: 1e-2", "learning_rate: 1e-3")


def text(case):
    """The whole specification of a case."""
    train = Z_LOSS if case == "shared_experts" else SHORT if LANES in CASES[case] else TRAIN
    return CASES[case] + train


def draw(model, shapes, rng):
    """Weights that hide nothing: no gain is 1 and no bias 0, and branches are about as large as the stream."""
    weights = {}
    for name, shape in shapes.items():
        if model.beginnings.get(name):
            weights[name] = begun(model.beginnings[name], shape, rng)
        elif name.endswith("router.bias"):
            weights[name] = 0.2 * rng.standard_normal(shape)  # next to logits of about 1: selects, now and then, another
        elif name.endswith("router.offset.weight"):
            weights[name] = -2.5 * weights[name.replace("offset", "scale")] + 0.2 * rng.standard_normal(shape)
        elif ".skip." in name:
            weights[name] = rng.standard_normal(shape) / max(shape[-1], 2) ** 0.5
        elif name.endswith(("read.weight", "exit.weight", "choice.weight", "choice.network.up.weight", "choice.network.down.weight")):
            weights[name] = 0.7 * rng.standard_normal(shape)
        elif name.endswith((".gate.bias", ".up.bias")):
            weights[name] = 6.0 * rng.standard_normal(shape)  # some beyond the limits of 7 and some within
        elif name.endswith((".bias", ".logit_bias", ".sink", "mix.decay")) or ".mix.weight" in name and len(shape) == 1:
            weights[name] = (len(shape) == 1 and name.endswith("mix.weight")) / shape[0] + 0.3 * rng.standard_normal(shape)
        elif len(shape) == 1:
            weights[name] = 1 - model.gain_offset + 0.2 * rng.standard_normal(shape)
        elif name == "embed.weight":
            # Lanes are equal at first, and a norm removes their common factor: all that the first reading weights change is how
            # much its epsilon counts, so it has to count.
            weights[name] = (0.05 if model.lanes else 0.7) * rng.standard_normal(shape)
        else:
            weights[name] = rng.standard_normal(shape) / shape[-1] ** 0.5
    for name, first, rows, (_, _, magnitude, norm) in model.adapters(shapes):
        if norm in shapes:
            weights[norm] = np.linalg.norm(weights[name][..., first : first + rows, :], axis=-1)
            weights[magnitude] = weights[norm] * (1 + 0.2 * rng.standard_normal(shapes[norm]))
    return weights


def begun(init, shape, rng):
    """As a definition says; a constant with a difference for every element."""
    how, *numbers = init
    if how == "constant":
        return numbers[0] + 0.2 * rng.standard_normal(shape)
    if how == "normal":
        return numbers[0] * rng.standard_normal(shape)
    if how == "filter":
        return rng.uniform(-1, 1, shape) / shape[-1] ** 0.5
    if how == "uniform":
        return rng.uniform(*numbers, shape)
    if how == "ramp":
        # Where it begins says nothing of what a model computes.
        return rng.uniform(*sorted(numbers), shape)
    if how == "log_uniform":
        return np.log(rng.uniform(*numbers, shape))
    assert how == "inverse_softplus_uniform"
    step = np.exp(rng.uniform(np.log(numbers[0]), np.log(numbers[1]), shape))
    return step + np.log(-np.expm1(-step))


def compute(case):
    """Everything the case's safetensors file holds."""
    spec = read_spec(text(case))
    model, t = Model(spec["model"], spec["train"].get("z_loss", 0.0), spec.get("define")), spec["train"]
    # A choice between two experts that are nearly equal could fall otherwise in another order of summation, and then no
    # comparison means anything. Such draws are thrown away.
    for seed in range(zlib.crc32(case.encode()), zlib.crc32(case.encode()) + 100):
        rng = np.random.default_rng(seed)
        weights = draw(model, model.shapes(), rng)
        size = (t["steps"] + 1, t["batch"], t["sequence"] + 1)
        ids, *steps = rng.integers(0, model.vocab, size=size, dtype=np.int64)
        loss, rest = evaluate(model, weights, ids)
        losses, trained, gap = train(model, weights, steps, t)
        skips = any(skips_in(layer.tree) for layer in model.layers)
        rounds = any(c.get("round") for c in model.components.values())
        # Training may see other logits than those of the last pass.
        expects = model.exit is not None and model.exit.exit == "expected"
        infers = skips or rounds or expects
        inferred, gap_inferred, shares = infer(model, weights, ids[:, :-1]) if infers else (None, np.inf, [])
        # Most skips must be of some tokens and not of others, or nothing is compared.
        mixed = sum(0 < float(share) < 1 for share in [*shares, *rest["shares"]]) >= 0.7 * len([*shares, *rest["shares"]])
        if min(gap, float(rest["gap"]), float(gap_inferred)) > 1e-6 and mixed:
            break
    else:
        raise SystemExit(f"{case}: no draw without near-ties")

    routed = bool(model.balance_rates())
    assert not routed or rest["bias_decided"] > 0, f"{case}: the bias decides nothing"
    # Adam divides a gradient by its own size, so one of rounding noise would become a step of rounding noise. Where the
    # mathematics says zero (attention over a single depth, the gate of a single expert) the gradient must be negligible.
    sizes = {name: float(np.max(np.abs(g))) for name, g in rest["gradients"].items()}
    assert all(size < 1e-16 or size > 1e-9 for size in sizes.values()), f"{case}: {sizes}"
    still = [name for name, size in sizes.items() if size < 1e-16]

    tensors = {"ids": ids, "logits": rest["logits"], "loss": np.array([loss])}
    if infers:
        tensors["inference.logits"] = inferred
    tensors |= {f"weights.{name}": w for name, w in weights.items()}
    tensors |= {f"gradients.{name}": g for name, g in rest["gradients"].items()}
    tensors |= {"steps.ids": np.stack(steps), "steps.losses": losses}
    tensors |= {f"steps.weights.{name}": w for name, w in trained.items()}
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    assert all(np.all(np.isfinite(value)) for value in tensors.values())
    assert all(value.dtype == (np.int64 if name.endswith("ids") else np.float64) for name, value in tensors.items())
    return tensors, dict(seed=seed, gap=gap, loss=float(loss), last=float(losses[-1]), bias_decided=int(rest["bias_decided"]),
                         no_gradient=still)  # fmt: skip


def main(arguments):
    arguments, folder = list(arguments), FOLDER
    if check := "--check" in arguments:
        arguments.remove("--check")
    if "--to" in arguments:
        at = arguments.index("--to")
        folder = Path(arguments.pop(at + 1))
        arguments.pop(at)
    folder.mkdir(exist_ok=True)
    for case in arguments or CASES:
        tensors, facts = compute(case)
        path = folder / f"{case}.safetensors"
        if check:
            there = load_file(path)
            assert there.keys() == tensors.keys(), case
            worst = max(np.max(np.abs(there[name] - tensors[name])) for name in tensors)
            assert (folder / f"{case}.yaml").read_text() == text(case), case
            assert worst < 1e-10, f"{case}: differs by {worst}"
            print(f"{case}: equal within {worst:.1e}")
            continue
        (folder / f"{case}.yaml").write_text(text(case))
        save_file(tensors, path)
        assert path.stat().st_size < LARGEST_FILE, f"{path.name}: {path.stat().st_size} bytes"
        print(f"{case}: {path.stat().st_size} bytes, {facts}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
