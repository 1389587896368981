"""An independent reference for attention mixtures: small, obvious, slow, float64.

It shares no code with the compiler and was written from the semantics alone, so that two readings of the same page
meet in the golden files. It therefore avoids cleverness: every expert is computed for every token and the unchosen ones
are multiplied by zero, the depth loop is unrolled, and nothing is fused.

    model = Model(read_spec(text)["model"])
    loss, gradients = loss_and_gradients(model, weights, ids)     # weights: {tensor name: array}, ids: [b, n + 1]

Matrices are `[out, in]`. `x` is always `[b, t, h]`.
"""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import yaml

import definitions

jax.config.update("jax_enable_x64", True)  # before any array exists: float32 would hide errors below 1e-7

EPS = 1e-6  # of every RMSNorm
LIBRARY = Path(__file__).resolve().parent.parent.parent / "dsl" / "std"


# --- The language: what a spec says, with every default filled in -------------------------------------------------------

ATTENTION_DEFAULTS = dict(
    heads=None, kv_heads=None, head_size=None, rope=None, qk_norm="rms", window=None, softcap=None, scale=None,
    pre_norm=True, post_norm=False, projection=None, bias=None, gate=None, sink=False, value_residual=False,
)  # fmt: skip
DEFAULTS = {
    "sequence": ATTENTION_DEFAULTS | {"rope": 10000, "depth_keys": False, "depth_stream": None, "kv_from": None, "latent": None},
    "depth": ATTENTION_DEFAULTS | {"rope": {"base": 500, "half_reversed": True}},
    "experts": dict(count=None, active=None, intermediate=None, query=128, activation="swiglu", balance=1e-3,
                    router=None, shared=0, shared_gate=False, biased=False, round=None, depth_stream=False, pre_norm=True,
                    post_norm=False),
    "mlp": dict(intermediate=None, activation="swiglu", biased=False, depth_stream=False, pre_norm=True, post_norm=False),
}  # fmt: skip
LATENT_DEFAULTS = dict(query=None, kv=None, turned=None, value=None, norm="rms", keys=1, pairs="none", eps=None)
SKIP_DEFAULTS = dict(
    capacity=None, threshold=False, causal=None, penalty=None, norm_only=False, kv=None, router=None, gate=None,
    gate_scale=1.0, whole=False, nested=False, depth_choice=False, temperature=1.0, network=None, z_loss=0.0,
)  # fmt: skip
RECUR_DEFAULTS = dict(
    recur=None, layers=None, residual_norm=True, backprop=None, depth="fixed", lora=None, embed=False, exit="last",
    kv=None,
)  # fmt: skip
ROUTER_DEFAULTS = dict(
    form="low_rank", score="sigmoid", select="logit", normalise=True, scale=1.0, groups=1, topk_groups=1,
)  # fmt: skip
PROJECTION_DEFAULTS = dict(query=128, balance=1e-2)
MODEL_DEFAULTS = dict(
    name=None, vocab=None, hidden=None, context=None, components=None, body=None, tie=False, head_bias=False, embed_scale=None,
    logit_scale=None, logit_softcap=None, output_scale=None, norm={}, stream="sum", adapt=None,
)  # fmt: skip
TRAIN_DEFAULTS = dict(
    steps=None, batch=None, sequence=None, learning_rate=4e-4, warmup=500, clip=0.5, weight_decay=1e-3,
    betas=[0.9, 0.999], eps=1e-8, z_loss=0.0,
)  # fmt: skip


class Loader(yaml.SafeLoader):
    """Specs are YAML 1.2, where `1e-2` is a number. PyYAML speaks 1.1, where it is text."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def read_spec(text):
    return yaml.load(text, Loader)


def fill(defaults, given, where):
    """Defaults under what is given. A misspelt key must not silently mean its default, so unknown keys are errors."""
    unknown = set(given) - set(defaults)
    if unknown:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}")
    return defaults | given


def component(name, given, hidden=None, own=None):
    """`{sequence: {...}}` -> a flat dictionary with its `kind` and all its fields. `own`: the definitions of the specification."""
    ((kind, fields),) = given.items()
    if kind not in DEFAULTS:
        known = own or {}
        if kind not in known:
            known = definitions.library((LIBRARY / f"{kind}.dream").read_text())
        settings = {key: value for key, value in fields.items() if key not in ("pre_norm", "post_norm")}
        bound = known[kind].bind(settings, hidden)
        return dict(kind="defined", bound=bound, pre_norm=fields.get("pre_norm", True), post_norm=fields.get("post_norm", False))
    c = fill(DEFAULTS[kind], fields, name) | {"kind": kind}
    if kind in ("sequence", "depth"):
        c["kv_heads"] = c["kv_heads"] or c["heads"]
        if c["projection"] != "none":
            c["projection"] = fill(PROJECTION_DEFAULTS, c["projection"] or {}, f"{name}.projection")
        if c.get("latent"):
            c["latent"] = fill(LATENT_DEFAULTS, c["latent"], f"{name}.latent")
            assert c["qk_norm"] == "none" and c["kv_heads"] == c["heads"], name
        rope = c["rope"] if isinstance(c["rope"], dict) else {"base": c["rope"]}
        c["rope"] = fill({"base": None, "half_reversed": False, "share": 1.0, "scaling": None}, rope, f"{name}.rope")
        assert c["bias"] in (None, "qk", "qkv", "out", "all") and c["gate"] in (None, "head", "element"), name
        assert c["heads"] % c["kv_heads"] == 0 and c["head_size"] % 2 == 0, name
        # A token does not know how long its sequence will become, so only depth has an end to count back from. Nor has
        # a window over depth been given a meaning.
        assert not (kind == "sequence" and c["rope"]["half_reversed"]), name
        assert not (kind == "depth" and c["window"]), name
        assert c["qk_norm"] in ("rms", "rms_all", "none"), name
    if kind == "experts":
        c["router"] = fill(ROUTER_DEFAULTS, c["router"] or {}, f"{name}.router")
    return c


def parse(text):
    """A composition -> a component's name, or ("|", terms), or (">", terms), or ("skip", [wrapped], number, fields), or
    ("norm", [], number).

    The two operators have no precedence over each other here: a mixture of both must be parenthesised, so that no golden
    file depends on a choice that `docs/dev/semantics.md` leaves open.
    """
    tokens = re.findall(r"[\w.]+|\S", text)
    skips = norms = 0

    def skip():
        """`skip(threshold, capacity 0.5, causal bce 0.1) { … }`, numbered in the order of the text."""
        nonlocal skips
        number, fields = skips, {}
        skips += 1
        assert tokens.pop(0) == "(", text
        arguments, open_brackets = [[]], 0
        while (word := tokens.pop(0)) != ")":
            open_brackets += (word == "[") - (word == "]")
            if word == "," and not open_brackets:
                arguments.append([])
            else:
                arguments[-1].append(word)
        for key, *values in arguments:
            if not values:
                fields[key] = True
            elif key == "causal":
                fields[key] = values
            elif key == "capacity" and values[0] == "[":
                fields[key] = [fraction(share) for share in "".join(values[1:-1]).split(",")]
            else:
                fields[key] = values[0] if key in ("kv", "router", "gate") else fraction("".join(values))
        fields = fill(SKIP_DEFAULTS, fields, "skip")
        fields["kv"] = fields["kv"] or ("all" if fields["threshold"] else "processed")
        assert fields["router"] in (None, "pass") and fields["gate"] in (None, "sigmoid", "tanh"), text
        assert tokens.pop(0) == "{", text
        inside = expression()
        assert tokens.pop(0) == "}", text
        return "skip", [inside], number, fields

    def term():
        nonlocal norms
        token = tokens.pop(0)
        if token == "skip":
            return skip()
        if token == "norm":
            norms += 1
            return "norm", [], norms - 1
        if token != "(":
            assert re.fullmatch(r"\w+", token), f"a component expected in {text!r}, found {token!r}"
            return token
        inside = expression()
        assert tokens.pop(0) == ")", text
        return inside

    def expression():
        terms, operators = [term()], set()
        while tokens and tokens[0] not in ")}":
            operators.add(tokens.pop(0))
            terms.append(term())
        assert operators <= {"|", ">"} and len(operators) <= 1, f"parenthesise {text!r}"
        return (operators.pop(), terms) if operators else terms[0]

    tree = expression()
    assert not tokens, text
    return tree


def fraction(text):
    """`0.5` or `2/3`."""
    numerator, _, denominator = text.partition("/")
    return float(numerator) / float(denominator or 1)


def names_in(tree):
    return [tree] if isinstance(tree, str) else [name for term in tree[1] for name in names_in(term)]


def skips_in(tree):
    """(number, fields) of every `skip`."""
    if isinstance(tree, str):
        return []
    own = [(tree[2], tree[3])] if tree[0] == "skip" else []
    return own + [skip for term in tree[1] for skip in skips_in(term)]


def norms_in(tree):
    """The number of every `norm` term."""
    if isinstance(tree, str):
        return []
    return [tree[2]] if tree[0] == "norm" else [number for term in tree[1] for number in norms_in(term)]


def units_in(tree):
    """What lanes stand around: the terms of the outermost sequence."""
    return tree[1] if tree[0] == ">" else [tree]


class Loop:
    """A `recur`: its number, how many passes it makes, and its settings."""

    def __init__(self, number, given):
        settings = fill(RECUR_DEFAULTS, given, "recur")
        self.number, self.passes = number, settings["recur"]
        # A drawn depth is a function of a generator that nobody shares: the reference knows the written count alone.
        assert settings["depth"] == "fixed" and settings["kv"] in (None, "first", "replaced")
        self.residual_norm, self.lora, self.embed = settings["residual_norm"], settings["lora"], settings["embed"]
        self.kv = settings["kv"]
        self.backprop = settings["backprop"] or self.passes
        leave = settings["exit"]
        [(self.exit, self.entropy)] = leave.items() if isinstance(leave, dict) else [(leave, 0.0)]
        assert self.exit in ("last", "mean", "gate", "expected"), leave
        self.choice = None  # the fields of the `skip` by which tokens choose their number of passes


class Layer:
    """One set of weights: its composition, the loops around it, and how often the model applies it."""

    def __init__(self, text, loops):
        self.tree = parse(text)
        self.loops = loops  # from the outermost to the innermost
        self.recurrent = bool(loops)
        self.residual_norm = self.recurrent and loops[-1].residual_norm
        self.times = 0
        # Weights are named by layer and component, so twice the same component in a layer would tie the two.
        assert len(set(names_in(self.tree))) == len(names_in(self.tree)), f"a component twice in {text!r}"

    def lora(self):
        """The loop whose passes have matrices of their own, if any."""
        own = [loop for loop in self.loops if loop.lora]
        assert len(own) <= 1, "lora of two loops around one layer"
        return own[0] if own else None


STATEMENTS = ("norm", "linear", "save", "mix", "start")


class Model:
    """`program` is the body as it runs: ("layer", index), ("statement", number, words) and ("loop", loop, program)."""

    def __init__(self, given, z_loss=0.0, defined=None):
        m = fill(MODEL_DEFAULTS, given, "model")
        self.own = {}  # tensors of definitions that are no matrices, which do not decay
        self.beginnings = {}  # how tensors of definitions begin
        self.z_loss = z_loss
        self.vocab, self.hidden, self.tie = m["vocab"], m["hidden"], m["tie"]
        own = definitions.of_yaml(defined or {})
        self.components = {name: component(name, c, self.hidden, own) for name, c in m["components"].items()}
        self.head_bias = m["head_bias"]
        assert m["embed_scale"] in (None, "sqrt_hidden")
        self.embed_scale = self.hidden**0.5 if m["embed_scale"] else 1.0
        self.logit_softcap = m["logit_softcap"]
        self.logit_scale, self.output_scale = m["logit_scale"] or 1.0, m["output_scale"] or 1.0
        norm = fill({"unit_offset": False, "eps": EPS}, m["norm"], "norm")
        self.gain_offset, self.eps = 1.0 if norm["unit_offset"] else 0.0, norm["eps"]
        self.adapt = m["adapt"] and fill({"components": None, "matrices": [], "rank": 16, "alpha": None, "dora": False}, m["adapt"], "adapt")

        # The stream: "sum", "attend" with the size of a block (0: none), or "lanes" with their number and kind.
        self.block = self.lanes = 0
        self.lanes_kind, self.lanes_embed = "static", False
        stream = m["stream"]
        if isinstance(stream, dict) and "attend" in stream:
            self.stream, self.block = "attend", fill({"block": 0}, stream["attend"], "attend")["block"]
        elif isinstance(stream, dict):
            filled = fill({"lanes": None, "kind": "static", "embed": False}, stream, "stream")
            self.stream, self.lanes, self.lanes_kind = "lanes", filled["lanes"], filled["kind"]
            self.lanes_embed = filled["embed"]
        else:
            self.stream = stream
        assert self.stream in ("sum", "attend", "lanes") and self.lanes_kind in ("static", "dynamic", "mhc")

        self.layers, self.statements, self.loops = [], [], []  # each in order of first use
        self.program = self.expand(m["body"], [])
        self.applications = self.unroll(self.program)  # the index of the layer applied at each depth
        self.depth = len(self.applications)
        for i in self.applications:
            self.layers[i].times += 1
        self.final_norm = not self.normalises(self.program)
        exits = [loop for loop in self.loops if loop.exit != "last"]
        assert len(exits) <= 1, "two loops with exits"
        self.exit = exits[0] if exits else None

    def expand(self, items, loops):
        """The body as a program. `repeat` makes new layers and statements, `recur` applies the same again."""
        program = []
        for item in items:
            if isinstance(item, str) and item.split()[0] in STATEMENTS and not re.search("[>|]", item):
                program.append(("statement", len(self.statements), item.split()))
                self.statements.append(item.split())
            elif isinstance(item, str):
                self.layers.append(Layer(item, loops))
                program.append(("layer", len(self.layers) - 1))
            elif "repeat" in item:
                fill({"repeat": 0, "layers": []}, item, "body")
                for _ in range(item["repeat"]):
                    program += self.expand(item["layers"], loops)
            else:
                loop = Loop(len(self.loops), item)
                self.loops.append(loop)
                inside = self.expand(item["layers"], [*loops, loop])
                first = self.layers[inside[0][1]].tree if inside[0][0] == "layer" else ""
                loop.choice = first[3] if first[:1] == ("skip",) and first[3]["depth_choice"] else None
                assert not loop.choice or len(inside) == 1
                program.append(("loop", loop, inside))
        return program

    def unroll(self, program):
        flat = []
        for kind, what, *rest in program:
            if kind == "layer":
                flat.append(what)
            elif kind == "loop":
                flat += what.passes * self.unroll(rest[0])
        return flat

    def normalises(self, program):
        """Whether the last thing that happens to the stream is a norm, so that it needs no final one."""
        kind, what, *rest = program[-1]
        if kind == "layer":
            return self.layers[what].residual_norm
        if kind == "statement":
            return rest[0][0] == "norm" or rest[0][0] == "save" and self.normalises(program[:-1])
        return self.normalises(rest[0])

    def history(self, statement):
        """Depths whose streams `mix history weighted` reads, 0 for the embedding; the stream itself comes after them. `every k`
        reads every k-th from the embedding on, `apart k` every k-th from here back (DenseFormer's dilation)."""
        words = self.statements[statement]
        step = int(words[4]) if words[3:] else 1
        # Inside a loop every pass would have another number of weights.
        before = next(j for j, (kind, what, *_) in enumerate(self.program) if (kind, what) == ("statement", statement))
        depth = len(self.unroll(self.program[:before]))
        if words[3:4] == ["apart"]:
            return list(range(depth % step, max(depth, 1), step))
        return [0, *range(step, depth, step)]

    def gain(self, k):
        """The name of the gain of a statement that is a norm: its own, the one that all norms of a name have, or none."""
        words = self.statements[k]
        if words[1:] == ["plain"]:
            return None
        if words[1:] == ["final"]:
            return "norm.weight"
        return f"norms.{words[1]}.weight" if words[1:] else f"body.{k}.norm.weight"

    def shapes(self):
        """{tensor name: shape}, which is also the list of tensors that exist."""
        h = self.hidden
        shapes = {"embed.weight": (self.vocab, h)}
        if not self.tie:
            shapes["head.weight"] = (self.vocab, h)
        if self.head_bias:
            shapes["head.bias"] = (self.vocab,)
        if self.final_norm:
            shapes["norm.weight"] = (h,)
        if self.stream == "attend":
            shapes["output.read.weight"] = shapes["output.read.norm.weight"] = (h,)
        if self.lanes_embed:
            shapes["lanes.embed.weight"] = (self.lanes, h)
        if self.lanes_kind == "mhc":
            n = self.lanes
            shapes |= {"output.lanes.weight": (n, n * h), "output.lanes.bias": (n,), "output.lanes.scale": (1,)}

        for k, words in enumerate(self.statements):
            prefix = f"body.{k}"
            if words[0] == "norm":
                if name := self.gain(k):
                    shapes[name] = (h,)
            elif words[0] == "linear":
                shapes[f"{prefix}.linear.weight"] = (h, h)
            elif words[:2] == ["mix", "history"]:
                shapes[f"{prefix}.mix.weight"] = (len(self.history(k)) + 1,)
            elif words[0] == "mix" and words[2] == "linear":
                shapes[f"{prefix}.mix.weight"] = (h, 2 * h)
            elif words[0] == "mix" and words[2] == "scaled":
                shapes[f"{prefix}.mix.lambda"] = shapes[f"{prefix}.mix.mu"] = (1,)
            elif words[0] == "mix" and words[2] == "diagonal":
                shapes[f"{prefix}.mix.delta"] = shapes[f"{prefix}.mix.decay"] = (h,)
                shapes[f"{prefix}.mix.weight"] = (h, h)

        for loop in self.loops:
            prefix = f"loops.{loop.number}"
            if loop.embed:
                shapes[f"{prefix}.embed.weight"] = (loop.passes, h)
            if loop.exit in ("gate", "expected"):
                shapes[f"{prefix}.exit.weight"], shapes[f"{prefix}.exit.bias"] = (h,), (1,)
            if loop.choice:
                if loop.choice["network"]:
                    size = int(loop.choice["network"])
                    shapes[f"{prefix}.choice.network.up.weight"] = (size, h)
                    shapes[f"{prefix}.choice.network.down.weight"] = (loop.passes, size)
                else:
                    shapes[f"{prefix}.choice.weight"] = (loop.passes, h)
                shapes[f"{prefix}.choice.bias"] = (loop.passes,)

        def router(prefix, experts, query, form="low_rank"):
            if form == "linear":
                shapes[f"{prefix}.router.weight"] = (experts, h)
            else:
                shapes[f"{prefix}.router.query.weight"] = (query, h)
                shapes[f"{prefix}.router.keys.weight"] = (experts, query)
                shapes[f"{prefix}.router.q_norm.weight"] = (query,)
                shapes[f"{prefix}.router.k_norm.weight"] = (query,)
            shapes[f"{prefix}.router.bias"] = (experts,)

        for i, layer in enumerate(self.layers):
            lora = layer.lora()

            def matrix(name, shape, lora=lora):
                """A matrix of a component, with one of low rank for every pass beside it."""
                shapes[f"{name}.weight"] = shape
                if lora and len(shape) == 2:
                    shapes[f"{name}.lora_a"] = (lora.passes, lora.lora, shape[1])
                    shapes[f"{name}.lora_b"] = (lora.passes, shape[0], lora.lora)

            if layer.residual_norm:
                shapes[f"layers.{i}.residual_norm.weight"] = (h,)
            for number in norms_in(layer.tree):
                shapes[f"layers.{i}.norm{number}.weight"] = (h,)
            for j in range(len(units_in(layer.tree)) if self.stream == "lanes" else 0):
                self.lane_shapes(f"layers.{i}.lanes{j}", layer, shapes)
            for number, fields in skips_in(layer.tree):
                if fields["depth_choice"]:
                    continue
                prefix = f"layers.{i}.skip.{number}"
                each = (layer.loops[-1].passes,) if fields["router"] == "pass" else ()
                if fields["norm_only"]:
                    shapes[f"{prefix}.router.scale.weight"] = (*each, 1)
                    shapes[f"{prefix}.router.offset.weight"] = (*each, 1)
                elif fields["network"]:
                    size = int(fields["network"])
                    shapes[f"{prefix}.network.up.weight"] = (*each, size, h)
                    shapes[f"{prefix}.network.down.weight"] = (*each, size)
                else:
                    shapes[f"{prefix}.router.weight"] = (*each, h)
                if fields["causal"] and fields["causal"][0] == "predictor":
                    size = int(fields["causal"][1])
                    shapes[f"{prefix}.predictor.up.weight"] = (*each, size, h)
                    shapes[f"{prefix}.predictor.down.weight"] = (*each, size)
            for name in names_in(layer.tree):
                prefix, c = f"layers.{i}.{name}", self.components[name]
                if self.stream == "attend":
                    shapes[f"{prefix}.read.weight"] = shapes[f"{prefix}.read.norm.weight"] = (h,)
                if c["pre_norm"]:
                    shapes[f"{prefix}.norm.weight"] = (h,)
                if c["post_norm"]:
                    shapes[f"{prefix}.post_norm.weight"] = (h,)
                if c["kind"] == "defined":
                    self.defined_shapes(c, prefix, shapes, layer.lora())
                elif c["kind"] in ("sequence", "depth"):
                    d, own = c["head_size"], not c.get("kv_from")
                    qkv, out = ((c["heads"] + 2 * c["kv_heads"] * own) * d, h), (h, c["heads"] * d)
                    mixed = layer.recurrent and c["projection"] != "none"
                    mixture = (layer.times,) if mixed else ()  # one projection expert per application
                    if latent := c.get("latent"):
                        up = (c["heads"] * d, latent["query"] or h)
                        normed = latent["norm"] == "rms"
                        if latent["query"]:
                            shapes[f"{prefix}.q_down.weight"] = (latent["query"], h)
                            if normed:
                                shapes[f"{prefix}.q_down_norm.weight"] = (latent["query"],)
                        shapes[f"{prefix}.q_up.weight"] = up
                        shapes[f"{prefix}.kv_down.weight"] = (latent["kv"] + latent["keys"] * latent["turned"], h)
                        if normed:
                            shapes[f"{prefix}.kv_down_norm.weight"] = (latent["kv"],)
                        each = d - latent["turned"] + latent["value"]
                        shapes[f"{prefix}.kv_up.weight"] = (c["heads"] * each, latent["kv"])
                        out = (h, c["heads"] * latent["value"])
                    else:
                        matrix(f"{prefix}.qkv", mixture + qkv)
                    matrix(f"{prefix}.out", mixture + out)
                    if mixed:
                        shapes[f"{prefix}.qkv.shared.weight"] = qkv
                        shapes[f"{prefix}.out.shared.weight"] = out
                        router(prefix, layer.times, c["projection"]["query"])
                    if c["bias"] in ("qkv", "all"):
                        shapes[f"{prefix}.qkv.bias"] = qkv[:1]
                    if c["bias"] == "qk":
                        shapes[f"{prefix}.q.bias"] = (c["heads"] * d,)
                        if own:
                            shapes[f"{prefix}.k.bias"] = (c["kv_heads"] * d,)
                    if c["bias"] in ("out", "all"):
                        shapes[f"{prefix}.out.bias"] = out[:1]
                    if c["qk_norm"] != "none":
                        each = c["qk_norm"] == "rms"  # else all heads are one vector
                        shapes[f"{prefix}.q_norm.weight"] = (d if each else c["heads"] * d,)
                        if own:
                            shapes[f"{prefix}.k_norm.weight"] = (d if each else c["kv_heads"] * d,)
                    if c["gate"]:
                        matrix(f"{prefix}.gate", (c["heads"] * (d if c["gate"] == "element" else 1), h))
                    if c["sink"]:
                        shapes[f"{prefix}.sink"] = (c["heads"],)
                    if c.get("depth_stream") == "own":
                        shapes[f"{prefix}.depth_kv.weight"] = (2 * c["kv_heads"] * d, h)
                        if c["bias"] in ("qkv", "all"):
                            shapes[f"{prefix}.depth_kv.bias"] = (2 * c["kv_heads"] * d,)
                    if c["value_residual"]:
                        shapes[f"{prefix}.value_residual"] = (1,)
                else:
                    mixture = (c["count"],) if c["kind"] == "experts" else ()
                    gated = c["activation"] not in ("relu", "relu2")
                    if c["depth_stream"]:
                        reader = next(c for c in self.components.values() if c.get("depth_stream") in ("keys", "own"))
                        shapes[f"{prefix}.depth_kv.weight"] = (2 * reader["kv_heads"] * reader["head_size"], h)
                    if c["kind"] == "mlp" and c["biased"]:
                        shapes |= {f"{prefix}.{name}.bias": (c["intermediate"],) for name in ["gate"] * gated + ["up"]}
                        shapes[f"{prefix}.down.bias"] = (h,)
                        if c["depth_stream"]:
                            shapes[f"{prefix}.depth_kv.bias"] = shapes[f"{prefix}.depth_kv.weight"][:1]
                    if gated:
                        matrix(f"{prefix}.gate", mixture + (c["intermediate"], h))
                    matrix(f"{prefix}.up", mixture + (c["intermediate"], h))
                    matrix(f"{prefix}.down", mixture + (h, c["intermediate"]))
                    if c["kind"] == "experts":
                        router(prefix, c["count"], c["query"], c["router"]["form"])
                        if c["shared"]:
                            wide = c["shared"] * c["intermediate"]
                            if gated:
                                shapes[f"{prefix}.shared.gate.weight"] = (wide, h)
                            shapes[f"{prefix}.shared.up.weight"] = (wide, h)
                            shapes[f"{prefix}.shared.down.weight"] = (h, wide)
                        if c["biased"]:
                            shapes[f"{prefix}.router.logit_bias"] = (c["count"],)
                            if gated:
                                shapes[f"{prefix}.gate.bias"] = (c["count"], c["intermediate"])
                            shapes[f"{prefix}.up.bias"] = (c["count"], c["intermediate"])
                            shapes[f"{prefix}.down.bias"] = (c["count"], h)
                        if c["shared_gate"]:
                            shapes[f"{prefix}.shared_gate.weight"] = (h,)
        return shapes | self.adapter_shapes(shapes)

    def adapters(self, shapes):
        """(matrix, first of its rows, how many, names of A, B, magnitudes and norms) of every matrix that an adapter reaches."""
        if not self.adapt:
            return
        for name, shape in shapes.items():
            path = re.fullmatch(r"layers\.\d+\.(\w+)\.((shared\.)?(qkv|out|gate|up|down))\.weight", name)
            if not path or path[1] not in self.adapt["components"]:
                continue
            c = self.components[path[1]]
            parts = {path[2]: shape[-2]}
            if path[2] == "qkv" and len(shape) == 2:
                wide = c["kv_heads"] * c["head_size"]
                parts = {"q": shape[0] - 2 * wide, "k": wide, "v": wide}
            first = 0
            for part, rows in parts.items():
                if not self.adapt["matrices"] or part in self.adapt["matrices"]:
                    stem = name.removesuffix(path[2] + ".weight") + part
                    yield name, first, rows, [f"{stem}.adapter_{which}" for which in ("a", "b", "magnitude", "norm")]
                first += rows

    def adapter_shapes(self, shapes):
        rank, found = (self.adapt or {}).get("rank"), {}
        for name, _, rows, (a, b, magnitude, norm) in self.adapters(shapes):
            many, over = shapes[name][:-2], shapes[name][-1]
            found |= {a: (*many, rank, over), b: (*many, rows, rank)}
            if self.adapt["dora"]:
                self.own[magnitude] = "own"
                found |= {magnitude: (*many, rows), norm: (*many, rows)}
        return found

    def adapted(self, weights, stop):
        """Every adapted matrix is `W + alpha/rank B A`; of DoRA (2402.09353, equation 5) each row of that has its magnitude, and the norm
        by which it is divided is no function of the weights (section 4.3)."""
        weights = dict(weights)
        for name, first, rows, (a, b, magnitude, _) in self.adapters({name: w.shape for name, w in weights.items()}):
            alpha = 2.0 * self.adapt["rank"] if self.adapt["alpha"] is None else self.adapt["alpha"]
            own = weights[name][..., first : first + rows, :] + alpha / self.adapt["rank"] * weights[b] @ weights[a]
            if self.adapt["dora"]:
                norm = stop(jnp.sqrt(jnp.sum(own * own, axis=-1, keepdims=True)))
                own = weights[magnitude][..., None] * own / norm
            weights[name] = weights[name].at[..., first : first + rows, :].set(own)
        return weights

    def defined_shapes(self, c, prefix, shapes, lora):
        """The tensors that a definition asks for, of one token that is zero."""

        def ask(path, purpose, shape, init):
            name = f"{prefix}.{path}"
            shapes[name], self.beginnings[name] = shape, init
            if purpose != "matrix":
                self.own[name] = purpose
            elif lora:
                adapted = name.replace(".weight", ".lora_a")
                shapes[adapted] = (lora.passes, lora.lora, shape[1])
                shapes[adapted.replace("lora_a", "lora_b")] = (lora.passes, shape[0], lora.lora)
            return jnp.zeros(shape)

        context = definitions.Context(vocab=self.vocab, others=self.values_of_others())
        definitions.Evaluation(c["bound"], ask, context).run(jnp.zeros((1, 1, self.hidden)))

    def values_of_others(self):
        """Values of every component that is defined, by name, of a token that is zero."""

        class Others(dict):
            def __missing__(others, name):
                ask = lambda path, purpose, shape, init: jnp.zeros(shape)
                one = definitions.Evaluation(self.components[name]["bound"], ask, definitions.Context(vocab=self.vocab, others=others))
                one.run(jnp.zeros((1, 1, self.hidden)))
                others[name] = one.names
                return one.names

        return Others()

    def lane_shapes(self, prefix, layer, shapes):
        n, h = self.lanes, self.hidden
        if self.lanes_kind == "mhc":
            shapes[f"{prefix}.weight"] = (2 * n + n * n, n * h)
            shapes[f"{prefix}.bias"], shapes[f"{prefix}.scale"] = (2 * n + n * n,), (3,)
            return
        each = (layer.times,) if layer.recurrent else ()  # weights of each application
        shapes[f"{prefix}.alpha"] = shapes[f"{prefix}.beta"] = (*each, n)
        shapes[f"{prefix}.mix"] = (*each, n, n)
        if self.lanes_kind == "dynamic":
            shapes[f"{prefix}.norm.weight"] = (h,)
            shapes[f"{prefix}.alpha_weight"] = shapes[f"{prefix}.beta_weight"] = (h,)
            shapes[f"{prefix}.mix_weight"] = (h, n)
            shapes[f"{prefix}.alpha_scale"] = shapes[f"{prefix}.beta_scale"] = (1,)

    def balance_rates(self):
        """{name of a router's bias: its update rate λ}"""
        rates = {}
        for i, layer in enumerate(self.layers):
            for name in names_in(layer.tree):
                c = self.components[name]
                if c["kind"] == "experts":
                    rates[f"layers.{i}.{name}.router.bias"] = c["balance"]
                elif c["kind"] in ("sequence", "depth") and layer.recurrent and c["projection"] != "none":
                    rates[f"layers.{i}.{name}.router.bias"] = c["projection"]["balance"]
        return rates | {f"loops.{loop.number}.choice.bias": 1e-3 for loop in self.loops if loop.choice}


# --- The formulas -------------------------------------------------------------------------------------------------------


def rms_norm(x, gain, eps=EPS):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rotate(x, positions, base, share=1.0, scaling=None):
    """RoPE: turn each pair `(x_i, x_{i + d/2})` by `positions_i · base^(-2i/d)`. `positions` ends in an axis of d/2 pairs.

    Only the first `share · d` of a head turn: they are a head of that size of their own, the rest stays.
    """
    d = round(share * x.shape[-1])
    x, rest = x[..., :d], x[..., d:]
    frequencies, factor = scaled_frequencies(base, d, scaling)
    angle = (positions[..., : d // 2] if jnp.ndim(positions) else positions) * frequencies
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def chosen_pairs(pairs, every, chosen):
    """Which pairs of a rotation of `every` turn, a list for each head of keys or one for all; `None` for a rotation of their own
    (2502.14837, section 3.1, whose fourth way, by contribution, gives a list)."""
    if pairs == "none":
        return None
    if isinstance(pairs, str):
        first = {"high": lambda i: i, "low": lambda i: every - chosen + i, "uniform": lambda i: i * every // chosen}[pairs]
        return [[first(i) for i in range(chosen)]]
    return pairs if isinstance(pairs[0], list) else [pairs]


def scaled_frequencies(base, d, scaling):
    """Angles a step of every pair, and a factor on sine and cosine. `linear`: positions are divided. `yarn` (Peng et al. 2023,
    as transformers computes it): frequencies of fewer than `slow` turns in the original context are divided, those of more than
    `fast` are kept, a line between them; the factor is `0.1 ln(factor) + 1`."""
    frequencies = base ** (-2.0 * np.arange(d // 2) / d)
    if scaling is None:
        return frequencies, 1.0
    kind = scaling["type"]
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    assert kind == "yarn"

    def pair_that_turns(times):
        return d * np.log(scaling["original_context"] / (times * 2 * np.pi)) / (2 * np.log(base))

    low = max(np.floor(pair_that_turns(scaling.get("fast", 32))), 0)
    high = min(np.ceil(pair_that_turns(scaling.get("slow", 1))), d - 1)
    divided = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = frequencies / scaling["factor"] * divided + frequencies * (1 - divided)
    return frequencies, 0.1 * np.log(scaling["factor"]) + 1.0


def depth_positions(l, depth, d, half_reversed):
    """The position of each of the d/2 pairs at depth `l`: odd pairs count back from the last depth, if half reversed."""
    pair = np.arange(d // 2)
    return np.where((pair % 2 == 1) & half_reversed, depth - 1 - l, l).astype(float)


def activate(kind, gate, up):
    if kind == "swiglu":
        return jax.nn.silu(gate) * up
    if kind == "geglu":
        return jax.nn.gelu(gate, approximate=True) * up
    if kind == "geglu_erf":
        return jax.nn.gelu(gate, approximate=False) * up
    if kind == "swiglu_clamped":
        gate = jnp.minimum(gate, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -7.0, 7.0) + 1.0)
    if kind == "relu":
        return jax.nn.relu(up)
    if kind == "relu2":
        return jax.nn.relu(up) ** 2
    raise ValueError(kind)


def gelu_by_error_function(x):
    """GELU of networks that score: the error function by Abramowitz and Stegun, 7.1.26, whose error is below 1.5e-7."""
    size = jnp.abs(x) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * size)
    sum_ = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return 0.5 * x * (1 + jnp.sign(x) * (1 - sum_ * jnp.exp(-(size**2))))


class Forward:
    """One forward pass. It exists for what crosses depth: the depth caches, and the record of all routing."""

    def __init__(self, model, weights, replay=None, inference=False):
        self.defined = {}  # component name -> {value's name: of its latest application}
        self.along_depth = {}  # component name -> what each `depth_attend` of it has seen
        self.passes = []  # the pass of every loop around what is being computed
        self.layer_of = None  # the layer that is being computed
        self.names = {}  # saved streams
        self.earlier = {}  # component name -> [(k, v) of its earlier applications], for `depth_keys`
        self.stream_along_depth = []  # [(k, v)] of the token, before any norm: what `depth_stream`s left so far
        self.latest = {}  # component name -> (k, v) of its latest application, for `kv_from`
        self.first_values = {}  # component name -> v of its first application, for `value_residual`
        self.first_keys = {}  # (layer, component) -> (k, v, who wrote them) of pass 0, for `kv first`
        self.members = {}  # (layer, number of a skip) -> who took part in the latest pass, for `nested`
        self.history = []  # the embedding and the stream after every layer application
        self.pass_logits = []  # of a loop with exits
        self.pass_streams = []
        self.inference = inference  # whether tokens decide by themselves, as when a text is written
        self.taking = None  # [b, t]: which tokens take part where a skip wraps what is being computed; None: all
        self.all_keys = True  # whether the others are keys all the same
        self.auxiliary = 0.0  # losses of routers
        self.shares = []  # share of the tokens that took part in each skip
        self.model = model
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}
        self.depth_cache = {}  # component name -> [(k, v) of every application so far that contained it]
        self.counts = {}  # router's bias -> how often each expert was chosen, over all tokens and depths
        self.gaps = []  # how clearly each routing was decided
        self.bias_decided = 0  # routings that the bias changed
        # The semantics stop some gradients, so finite differences of the plain loss do not equal the gradient: the stopped
        # values must be held still. `stopped` records them, `replay` puts such a record back.
        self.stopped = []
        self.replay = replay
        self.w = model.adapted(self.w, self.stop)

    def stop(self, value):
        if self.replay is not None:
            value = self.replay[len(self.stopped)]
        self.stopped.append(value)
        return jax.lax.stop_gradient(value)

    def norm(self, x, name, eps=None):
        return rms_norm(x, self.model.gain_offset + self.w[name], self.model.eps if eps is None else eps)

    def run(self, ids):
        m = self.model
        self.ids = ids
        x = self.w["embed.weight"][ids] * m.embed_scale
        self.history = [x]
        self.depth = 0  # layer applications so far
        self.stream = {"sum": x, "attend": [x], "lanes": jnp.stack(m.lanes * [x], axis=2) if m.lanes else None}[m.stream]
        if m.lanes_embed:
            self.stream = self.stream + self.w["lanes.embed.weight"]
        self.execute(m.program)
        return self.head(self.stream)

    def head(self, stream):
        m = self.model
        x = self.leave(stream)
        if m.final_norm:
            x = self.norm(x, "norm.weight")
        logits = x @ self.w["embed.weight" if m.tie else "head.weight"].T
        if m.head_bias:
            logits = logits + self.w["head.bias"]
        logits = m.logit_scale * logits
        return m.logit_softcap * jnp.tanh(logits / m.logit_softcap) if m.logit_softcap else logits

    def leave(self, stream):
        """The stream as `[b, t, h]`, where it ends."""
        m = self.model
        if m.stream == "attend":
            return self.read(stream, "output.read")
        if m.stream == "lanes" and m.lanes_kind == "mhc":
            z = self.flat(stream) @ self.w["output.lanes.weight"].T
            weights = jax.nn.sigmoid(self.w["output.lanes.scale"] * z + self.w["output.lanes.bias"]) + EPS
            return jnp.einsum("btn,btnh->bth", weights, stream)
        return jnp.sum(stream, axis=2) if m.stream == "lanes" else stream

    def execute(self, program):
        for index, (kind, what, *rest) in enumerate(program):
            if kind == "layer":
                self.layer(what)
            elif kind == "statement":
                self.statement(what, rest[0])
            else:
                after = program[index + 1 :]
                assert what.exit == "last" or [r[2][0] for r in after] in ([], ["norm"]), "something behind an exit"
                self.loop(what, rest[0], after)

    def layer(self, i):
        m, l = self.model, self.depth
        layer = self.layer_of = m.layers[i]
        if m.stream == "attend":
            self.attend(layer.tree, l, i)
        elif m.stream == "lanes":
            for j, unit in enumerate(units_in(layer.tree)):
                self.around(unit, j, l, i)
        else:
            self.stream = self.stream + self.update(layer.tree, self.stream, l, i)
        if layer.residual_norm:
            assert m.stream == "sum"
            self.stream = self.norm(self.stream, f"layers.{i}.residual_norm.weight")
        self.depth += 1
        if m.stream == "sum":
            self.history.append(self.stream)

    def statement(self, k, words):
        assert self.model.stream == "sum", "a statement needs a stream that is a sum"
        x, prefix = self.stream, f"body.{k}"
        weight = lambda name: self.w[f"{prefix}.{name}"]
        kind, *words = words
        if kind == "norm":
            name = self.model.gain(k)
            x = self.norm(x, name) if name else rms_norm(x, 1.0, self.model.eps)
        elif kind == "linear":
            x = x @ weight("linear.weight").T
        elif kind == "save":
            self.names[words[0]] = (x, list(self.passes))
        elif kind == "start":
            # The generator of `start normal` is the compiler's own, so golden files start at zero.
            assert words == ["zeros"], "a drawn start"
            x = jnp.zeros_like(x)
        elif words[0] == "history":
            sources = [*(self.history[depth] for depth in self.model.history(k)), x]
            x = sum(weight("mix.weight")[j] * source for j, source in enumerate(sources))
        else:
            e, how = self.names[words[0]][0], words[1]
            if how == "add":
                x = x + e
            elif how == "linear":
                x = jnp.concatenate([x, e], axis=-1) @ weight("mix.weight").T
            elif how == "scaled":
                x = weight("mix.lambda") * x + weight("mix.mu") * e
            elif how == "diagonal":
                step = jax.nn.softplus(weight("mix.delta"))
                x = jnp.exp(-step * jnp.exp(weight("mix.decay"))) * x + step * (e @ weight("mix.weight").T)
            else:
                raise ValueError(how)
        self.stream = x

    def loop(self, loop, program, after):
        if loop.choice:
            return self.chosen_passes(loop, program)
        prefix = f"loops.{loop.number}"
        entered = {name: len(entries) for cache in (self.depth_cache, self.earlier) for name, entries in cache.items()}
        entered[None] = len(self.stream_along_depth)
        known = {id(v) for cache in (self.latest, self.first_values) for v in cache.values()}
        for p in range(loop.passes):
            if p == loop.passes - loop.backprop > 0:
                self.detach(entered, known, len(self.passes))
            if loop.embed:
                assert self.model.stream == "sum"
                self.stream = self.stream + self.w[f"{prefix}.embed.weight"][p]
            self.passes.append(p)
            self.execute(program)
            self.passes.pop()
            if loop.exit != "last":
                self.pass_streams.append(self.leave(self.stream))
                # A norm behind the loop belongs to what each pass goes through.
                through, kept = self.stream, self.stream
                for _, k, words in after:
                    self.statement(k, words)
                    through = self.stream
                self.pass_logits.append(self.head(through))
                self.stream = kept

    def detach(self, entered, known, level):
        """Nothing that earlier passes of this loop made has a gradient; names saved outside of it keep theirs."""
        self.stream = jax.tree.map(self.stop, self.stream)
        self.history = [self.stop(x) for x in self.history]
        self.names = {
            name: (self.stop(x), made) if len(made) > level else (x, made) for name, (x, made) in self.names.items()
        }
        for cache in (self.depth_cache, self.earlier):
            for name, entries in cache.items():
                for e in range(entered.get(name, 0), len(entries)):
                    k, v, *rest = entries[e]
                    entries[e] = (self.stop(k), self.stop(v), *rest)
        for e in range(entered[None], len(self.stream_along_depth)):
            self.stream_along_depth[e] = tuple(self.stop(each) for each in self.stream_along_depth[e])
        for name, (k, v, *rest) in list(self.first_keys.items()):
            self.first_keys[name] = (self.stop(k), self.stop(v), *rest)
        for cache in (self.latest, self.first_values):
            for name, value in list(cache.items()):
                if id(value) not in known:
                    cache[name] = jax.tree.map(self.stop, value)

    def chosen_passes(self, loop, program):
        """Every token chooses how many passes it makes, where the loop begins."""
        ((_, i),), prefix = program, f"loops.{loop.number}.choice"
        layer = self.layer_of = self.model.layers[i]
        _, (inside,), _, fields = layer.tree
        assert self.model.stream == "sum" and not layer.residual_norm and not loop.embed and self.taking is None
        start = self.stream
        z = start / fields["temperature"]
        if fields["network"]:
            z = gelu_by_error_function(z @ self.w[f"{prefix}.network.up.weight"].T)
            z = z @ self.w[f"{prefix}.network.down.weight"].T
        else:
            z = z @ self.w[f"{prefix}.weight"].T
        self.auxiliary += fields["z_loss"] * jnp.mean(jax.nn.logsumexp(z, axis=-1) ** 2)
        shares = jax.nn.softmax(z, axis=-1)
        ranked = jax.lax.stop_gradient(shares + self.w[f"{prefix}.bias"])
        last = jnp.argmax(ranked, axis=-1)  # the lowest of equals
        chosen = self.stop(jax.nn.one_hot(last, loop.passes))
        last = jnp.argmax(chosen, axis=-1)
        ordered = -jnp.sort(-ranked, axis=-1)
        self.gaps.append(jnp.min(ordered[..., 0] - ordered[..., 1]))
        self.counts[f"{prefix}.bias"] = chosen.sum(axis=(0, 1))
        self.bias_decided += jnp.sum(jnp.argmax(shares, axis=-1) != last)
        for p in range(loop.passes):
            if p == loop.passes - loop.backprop > 0:
                self.detach({}, set(), len(self.passes))
            self.passes.append(p)
            self.taking, self.all_keys = p <= last, False
            if p:
                self.shares.append(jnp.mean(self.taking))
            f = self.update(inside, self.stream, self.depth, i)
            self.stream = jnp.where(self.taking[..., None], self.stream + f, self.stream)
            self.taking, self.all_keys = None, True
            self.passes.pop()
            self.depth += 1
            self.history.append(self.stream)
        self.stream = start + jnp.sum(chosen * shares, axis=-1, keepdims=True) * self.stream

    # --- Streams

    def read(self, sources, prefix):
        """`Σ_j p_j v_j`, `p = softmax_j(w · RMSNorm(v_j; g))`."""
        if self.model.block:
            first, outputs, m = sources[0], sources[1:], self.model.block
            sources = [first] + [sum(outputs[at : at + m]) for at in range(0, len(outputs), m)]
        values = jnp.stack(sources, axis=2)
        keys = rms_norm(values, self.w[f"{prefix}.norm.weight"], self.model.eps)
        weights = jax.nn.softmax(keys @ self.w[f"{prefix}.weight"], axis=2)
        return jnp.einsum("btj,btjh->bth", weights, values)

    def attend(self, tree, l, i):
        """Components read a mixture of all outputs so far; those side by side see the same ones."""
        if isinstance(tree, str):
            self.stream = [*self.stream, self.component(tree, self.read(self.stream, f"layers.{i}.{tree}.read"), l, i)]
            return
        operator, terms = tree
        before, made = self.stream, []
        for term in terms:
            if operator == "|":
                self.stream = before
            self.attend(term, l, i)
            made += self.stream[len(before) :]
        if operator == "|":
            self.stream = [*before, *made]

    def flat(self, lanes):
        """All lanes as one vector, normalised without a gain."""
        b, t, n, h = lanes.shape
        return rms_norm(lanes.reshape(b, t, n * h), 1.0, self.model.eps)

    def around(self, unit, j, l, i):
        """Lanes around one component, or one group of them side by side."""
        m, prefix, lanes = self.model, f"layers.{i}.lanes{j}", self.stream
        weight = lambda name: self.w[f"{prefix}.{name}"]
        n = m.lanes
        if m.lanes_kind == "mhc":
            z = self.flat(lanes) @ weight("weight").T
            scale, bias = weight("scale"), weight("bias")
            read = jax.nn.sigmoid(scale[0] * z[..., :n] + bias[:n]) + EPS
            write = 2 * jax.nn.sigmoid(scale[1] * z[..., n : 2 * n] + bias[n : 2 * n])
            square = (scale[2] * z[..., 2 * n :] + bias[2 * n :]).reshape(*z.shape[:-1], n, n)
            mix = jnp.swapaxes(sinkhorn(jax.nn.softmax(square, axis=-1) + EPS), -1, -2)  # it acts as its transpose
        else:
            layer = m.layers[i]
            nth = self.application_of(i) if layer.recurrent else ()
            read, write, mix = (weight(name)[nth] for name in ("alpha", "beta", "mix"))
            if m.lanes_kind == "dynamic":
                normed = rms_norm(lanes, weight("norm.weight"), self.model.eps)
                read = read + weight("alpha_scale") * jnp.tanh(normed @ weight("alpha_weight"))
                write = write + weight("beta_scale") * jnp.tanh(normed @ weight("beta_weight"))
                # Lane j says what it gives to each lane i: [b, t, j, i].
                given = weight("alpha_scale") * jnp.tanh(normed @ weight("mix_weight"))
                mix = mix + jnp.swapaxes(given, -1, -2)
        read, write = (jnp.broadcast_to(each, lanes.shape[:-1]) for each in (read, write))
        u = jnp.einsum("btn,btnh->bth", read, lanes)
        y = self.update(unit, u, l, i)
        mix = jnp.broadcast_to(mix, (*lanes.shape[:2], n, n))
        self.stream = jnp.einsum("btij,btjh->btih", mix, lanes) + write[..., None] * y[:, :, None]

    def application_of(self, i):
        """How often layer `i` was applied before this depth."""
        return self.model.applications[: self.depth].count(i)

    def update(self, tree, x, l, i):
        """What a term adds to the stream `x`, so that terms of any nesting compose by adding their updates."""
        if isinstance(tree, str):
            return self.component(tree, x, l, i)
        if tree[0] == "skip":
            return self.skip(tree, x, l, i)
        if tree[0] == "norm":
            return self.norm(x, f"layers.{i}.norm{tree[2]}.weight") - x
        operator, terms = tree
        total = jnp.zeros_like(x)
        for term in terms:
            total = total + self.update(term, x + total if operator == ">" else x, l, i)
        return total

    def skip(self, tree, x, l, i):
        """Nothing is gathered here: everything is computed for every token, and masks say who takes part."""
        _, (inside,), number, fields = tree
        prefix = f"layers.{i}.skip.{number}"

        # A router of its own for every pass is a slice of the tensor.
        p = self.passes[-1] if self.passes else 0
        weight = lambda name: self.w[f"{prefix}.{name}"][p if fields["router"] == "pass" else ...]

        def score(x):
            x = x / fields["temperature"]
            if fields["norm_only"]:
                norm = jnp.sqrt(jnp.sum(x * x, axis=-1))
                return norm * weight("router.scale.weight") + weight("router.offset.weight")
            if fields["network"]:
                return gelu_by_error_function(x @ weight("network.up.weight").T) @ weight("network.down.weight")
            return x @ weight("router.weight")

        def predictor(x):
            return jax.nn.silu(x @ weight("predictor.up.weight").T) @ weight("predictor.down.weight")

        assert self.taking is None, "a skip inside a skip"
        b, t, _ = x.shape
        r = score(x)
        capacity = fields["capacity"][p] if isinstance(fields["capacity"], list) else fields["capacity"]
        # With `nested` only those are asked that took part in the pass before.
        asked = jnp.ones((b, t), dtype=bool)
        if fields["nested"] and p > 0:
            asked = self.members[i, number]
        if fields["threshold"]:
            taking = r >= 0
            self.gaps.append(jnp.min(jnp.abs(r)))
        elif self.inference and not self.top_k_always and capacity < 1:
            z = predictor(x) if fields["causal"][0] == "predictor" else r
            taking = (z > 0) & asked
            self.gaps.append(jnp.min(jnp.abs(z)))
        else:
            k = self.room(capacity, t)
            ranked = jnp.where(asked, jax.lax.stop_gradient(r), -jnp.inf)
            # Before a token stand those of larger scores, and those of the same score and a lower index.
            larger = ranked[:, None, :] > ranked[:, :, None]
            same = (ranked[:, None, :] == ranked[:, :, None]) & np.tri(t, t, -1, dtype=bool)
            taking = (jnp.sum(larger | same, axis=-1) < k) & asked
            descending = -jnp.sort(-ranked, axis=-1)
            if k < t:
                self.gaps.append(jnp.min(descending[:, k - 1] - descending[:, k]))
        self.members[i, number] = taking
        member = self.stop(taking.astype(x.dtype))
        if capacity < 1:
            self.shares.append(jnp.mean(member))

        self.taking, self.all_keys = member > 0, fields["kv"] == "all"
        f = self.update(inside, x, l, i)
        self.taking, self.all_keys = None, True

        if fields["threshold"]:
            p = jax.nn.sigmoid(r)
            mask = p + self.stop(member - p)  # straight through: the decision, with the gradient of p
            self.auxiliary += fields["penalty"] * jax.nn.relu(jnp.mean(mask) - capacity)
            return mask[..., None] * f
        # One number a token: the logarithm of its sum of exponentials is itself.
        self.auxiliary += fields["z_loss"] * jnp.sum(r**2 * asked) / jnp.sum(asked)
        if fields["causal"]:
            kind, *numbers = fields["causal"]
            if kind == "predictor":
                z, weight = predictor(self.stop(x)), 0.01
            else:
                into_input = numbers[1:] == ["into_input"]
                z, weight = score(x if into_input else self.stop(x)), float(numbers[0])
            self.auxiliary += weight * jnp.sum((jax.nn.softplus(z) - member * z) * asked) / jnp.sum(asked)
        if fields["gate"]:
            r = {"sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh}[fields["gate"]](r)
        r = fields["gate_scale"] * r
        if fields["whole"]:
            f = x + f
        return jnp.where(member[..., None] > 0, self.gated(r, member, x, f), 0.0)

    # What public code gets wrong; the tests replace these one by one and must notice.
    top_k_always = False  # also where a text is written

    def room(self, capacity, t):
        return max(1, int(np.floor(capacity * t)))

    def gated(self, r, member, x, f):
        """The update of tokens that take part."""
        return r[..., None] * f

    def positions(self, b, t):
        """Places of tokens in the sequence, whoever takes part: [b or 1, t]."""
        return np.arange(t, dtype=float)[None]

    def leave_keys(self, prefix, leaves, x_hat):
        """A key and a value `[b, t, heads * d]` of a matrix of their own join the depth stream."""
        if leaves:
            made = x_hat @ self.w[f"{prefix}.depth_kv.weight"].T + self.w.get(f"{prefix}.depth_kv.bias", 0.0)
            self.stream_along_depth.append(tuple(jnp.split(made, 2, axis=-1)))

    def are_keys(self):
        """[b, t]: which tokens are keys, where a skip leaves some out."""
        return self.taking

    def component(self, name, x, l, i):
        c, prefix = self.model.components[name], f"layers.{i}.{name}"
        self.layer_of = self.model.layers[i]
        x_hat = self.norm(x, f"{prefix}.norm.weight") if c["pre_norm"] else x
        if c["kind"] in ("sequence", "depth"):
            y = self.attention(name, c, prefix, x_hat, l, self.model.layers[i])
        elif c["kind"] == "experts":
            self.leave_keys(prefix, c["depth_stream"], x_hat)
            y = self.experts(c, prefix, x_hat, l)
        elif c["kind"] == "defined":
            y = self.definition(name, c, prefix, x_hat, l)
        else:
            self.leave_keys(prefix, c["depth_stream"], x_hat)
            y = self.network(c, prefix, x_hat)
        return self.model.output_scale * (self.norm(y, f"{prefix}.post_norm.weight") if c["post_norm"] else y)

    def definition(self, name, c, prefix, x_hat, l):
        """A component that is written as formulas."""
        assert self.taking is None, "a definition in a skip"

        def ask(path, purpose, shape, init):
            weight = self.w[f"{prefix}.{path}"]
            adapted = f"{prefix}.{path}".replace(".weight", ".lora_a")
            if purpose == "matrix" and adapted in self.w:
                p = self.passes[self.layer_of.loops.index(self.layer_of.lora())]
                weight = weight + self.w[adapted.replace("lora_a", "lora_b")][p] @ self.w[adapted][p]
            return weight

        context = definitions.Context(
            depth=l, depths=self.model.depth, passing=self.passes[-1] if self.passes else 0, stop=self.stop,
            vocab=self.model.vocab, ids=self.ids, earlier=self.defined.get(name, {}), others=self.defined, along_depth=self.along_depth.setdefault(name, {}),
        )  # fmt: skip
        evaluation = definitions.Evaluation(c["bound"], ask, context)
        y = evaluation.run(x_hat)
        self.auxiliary += evaluation.loss
        self.defined[name] = evaluation.names
        return y

    def matrix(self, name):
        """A matrix of a component, with what this pass adds to it."""
        w = self.w[f"{name}.weight"]
        if f"{name}.lora_a" in self.w:
            p = self.passes[self.layer_of.loops.index(self.layer_of.lora())]
            w = w + self.w[f"{name}.lora_b"][p] @ self.w[f"{name}.lora_a"][p]
        return w

    def network(self, c, prefix, x_hat):
        """A dense network; shared experts are one of the width of all of them."""
        biased = c["kind"] == "mlp" and c["biased"]  # of experts the routed ones alone
        product = lambda name, x: x @ self.matrix(f"{prefix}.{name}").T + (self.w[f"{prefix}.{name}.bias"] if biased else 0.0)
        gate = None if c["activation"] in ("relu", "relu2") else product("gate", x_hat)
        return product("down", activate(c["activation"], gate, product("up", x_hat)))

    def route(self, prefix, x_hat, l, active, router=ROUTER_DEFAULTS):
        """-> (score of every expert [b, t, E], 1 where chosen and else 0 [b, t, E], the same of each token's next choice)"""
        bias = self.w[f"{prefix}.router.bias"]
        if router["form"] == "linear":
            logits = x_hat @ self.w[f"{prefix}.router.weight"].T
        else:
            keys = self.w[f"{prefix}.router.keys.weight"]
            size = keys.shape[1]
            query = self.norm(x_hat @ self.w[f"{prefix}.router.query.weight"].T, f"{prefix}.router.q_norm.weight")
            query = rotate(query, depth_positions(l, self.model.depth, size, half_reversed=True), 500.0)
            keys = self.norm(keys, f"{prefix}.router.k_norm.weight")  # an expert sits at no depth: keys are not rotated
            logits = query @ keys.T / size**0.5
        logits = logits + self.w.get(f"{prefix}.router.logit_bias", 0.0)
        experts = logits.shape[-1]
        score = {
            "sigmoid": jax.nn.sigmoid,
            "softmax": lambda z: jax.nn.softmax(z, axis=-1),
            "sqrtsoftplus": lambda z: jnp.sqrt(jax.nn.softplus(z)),
        }[router["score"]](logits)

        # The choice is discrete and carries no gradient. The bias takes part in it and in nothing else.
        unbiased = jax.lax.stop_gradient(logits if router["select"] == "logit" else score)
        ranked = self.in_groups(unbiased + bias, router)
        order = jnp.argsort(-ranked, axis=-1, stable=True)  # stable: ties go to the lowest index
        chosen = jax.nn.one_hot(order[..., :active], experts, dtype=x_hat.dtype).sum(axis=-2)
        chosen = self.stop(chosen)

        name = f"{prefix}.router.bias"
        counted = chosen if self.taking is None else chosen * self.taking[..., None]
        self.counts[name] = self.counts.get(name, 0) + counted.sum(axis=(0, 1))
        descending = jnp.take_along_axis(ranked, order, axis=-1)
        if active < experts:
            self.gaps.append(jnp.min(descending[..., active - 1] - descending[..., active]))
            unbiased = jnp.argsort(-self.in_groups(unbiased, router), axis=-1, stable=True)[..., :active]
            unbiased = jax.nn.one_hot(unbiased, experts).sum(axis=-2)
            self.bias_decided += jnp.sum(jnp.any(unbiased != chosen, axis=-1))
        following = jax.nn.one_hot(order[..., active], experts, dtype=x_hat.dtype) if active < experts else 0 * chosen
        return score, chosen, following

    def rounded(self, score, chosen, following, tile):
        """Which choices are computed: as many of each expert as the nearest multiple of `tile`, half a tile rounded up.

        Down by letting tokens of the lowest score go; up by the best of those tokens whose next choice the expert is.
        """
        experts = score.shape[-1]
        flat = lambda u: jax.lax.stop_gradient(u).reshape(-1, experts)
        score, own, spare = flat(score), flat(chosen), flat(following)
        number = np.arange(score.shape[0])
        better = (score[None] > score[:, None]) | ((score[None] == score[:, None]) & (number < number[:, None])[..., None])
        rank = lambda among: jnp.sum(better * among[None], axis=1)  # how many of those are better
        count, spares = own.sum(axis=0), spare.sum(axis=0)
        over = count % tile
        up = (over > 0) & (tile - over <= over) & (tile - over <= spares)
        kept = own * jnp.where(up, True, rank(own) < count - over)
        taken = spare * (up & (rank(spare) < tile - over))
        for among, some in ((own, kept), (spare, taken)):
            least = jnp.min(jnp.where(some > 0, score, jnp.inf), axis=0)
            most = jnp.max(jnp.where((among > 0) & (some == 0), score, -jnp.inf), axis=0)
            self.gaps.append(jnp.min(least - most))
        return self.stop((kept + taken).reshape(chosen.shape))

    def in_groups(self, values, router):
        """What selects, but nothing outside of the best groups. A group is as good as its two best experts together."""
        if router["groups"] == 1:
            return values
        *rest, experts = values.shape
        grouped = values.reshape(*rest, router["groups"], experts // router["groups"])
        best = jnp.sum(-jnp.sort(-grouped, axis=-1)[..., :2], axis=-1)
        order = jnp.argsort(-best, axis=-1, stable=True)
        kept = jax.nn.one_hot(order[..., : router["topk_groups"]], router["groups"]).sum(axis=-2)
        descending = jnp.take_along_axis(best, order, axis=-1)
        if router["topk_groups"] < router["groups"]:
            self.gaps.append(jnp.min(descending[..., router["topk_groups"] - 1] - descending[..., router["topk_groups"]]))
        return jnp.where(kept[..., None] > 0, grouped, -jnp.inf).reshape(values.shape)

    def experts(self, c, prefix, x_hat, l):
        score, chosen, following = self.route(prefix, x_hat, l, c["active"], c["router"])
        computed = chosen
        if c["round"] and not self.inference:
            computed = self.rounded(score, chosen, following, c["round"])
        gates = score * computed
        if c["router"]["normalise"]:
            gates = gates / jnp.sum(score * chosen, axis=-1, keepdims=True)
        gates = gates * c["router"]["scale"]
        relu = c["activation"] in ("relu", "relu2")
        bias = lambda name: self.w[f"{prefix}.{name}.bias"] if c["biased"] else 0.0
        gate = None if relu else jnp.einsum("bth,eih->btei", x_hat, self.w[f"{prefix}.gate.weight"]) + bias("gate")
        up = jnp.einsum("bth,eih->btei", x_hat, self.w[f"{prefix}.up.weight"]) + bias("up")
        inner = activate(c["activation"], gate, up)
        outputs = jnp.einsum("btei,ehi->bteh", inner, self.w[f"{prefix}.down.weight"]) + bias("down")
        routed = jnp.einsum("bte,bteh->bth", gates, outputs)
        if not c["shared"]:
            return routed
        shared = self.network(c, f"{prefix}.shared", x_hat)
        if c["shared_gate"]:
            shared = shared * jax.nn.sigmoid(x_hat @ self.w[f"{prefix}.shared_gate.weight"])[..., None]
        return routed + shared

    def latent(self, c, prefix, x_hat):
        """Latent attention, head by head: no key is stored, and no value is longer than it is.

        DeepSeek-V2 (2405.04434), section 2.1.3. MHA2MLA (2502.14837), section 3: latents as they are (`norm: none`), `keys`
        heads of the part of keys that turns, and of the pairs of a whole head those of `pairs` alone, each at its frequency.
        """
        w, l, (b, t, _) = (lambda name: self.w[f"{prefix}.{name}.weight"]), c["latent"], x_hat.shape
        heads, d, turned = c["heads"], c["head_size"], c["latent"]["turned"]
        positions = self.positions(b, t)[..., None] * np.ones(turned // 2)
        normed = lambda u, name: self.norm(u, f"{prefix}.{name}.weight", l["eps"]) if l["norm"] == "rms" else u

        def turn(u, key):
            if c["rope"]["base"] == "none":
                return u
            if (pairs := chosen_pairs(l["pairs"], round(c["rope"]["share"] * d) // 2, turned // 2)) is None:
                return rotate(u, positions, c["rope"]["base"])
            frequencies, factor = scaled_frequencies(c["rope"]["base"], round(c["rope"]["share"] * d), c["rope"]["scaling"])
            angle = positions * np.asarray(frequencies)[pairs[key % len(pairs)]]
            z = (u[..., : turned // 2] + 1j * u[..., turned // 2 :]) * factor * jnp.exp(1j * angle)
            return jnp.concatenate([z.real, z.imag], axis=-1)

        asked = x_hat
        if l["query"]:
            asked = normed(x_hat @ w("q_down").T, "q_down_norm")
        both = x_hat @ w("kv_down").T
        made = normed(both[..., : l["kv"]], "kv_down_norm")
        each, outputs = d - turned + l["value"], []
        ahead = np.triu(np.ones((t, t), dtype=bool), 1)
        for head in range(heads):
            key = head // (heads // l["keys"])
            shared = turn(both[..., l["kv"] + key * turned : l["kv"] + (key + 1) * turned], key)
            q = asked @ w("q_up")[head * d : (head + 1) * d].T
            kv = made @ w("kv_up")[head * each : (head + 1) * each].T
            k, v = kv[..., : d - turned], kv[..., d - turned :]
            scores = q[..., : d - turned] @ jnp.swapaxes(k, -1, -2)
            scores = scores + turn(q[..., d - turned :], key) @ jnp.swapaxes(shared, -1, -2)
            scores = scores * (d**-0.5 if c["scale"] is None else c["scale"])
            outputs.append(jax.nn.softmax(jnp.where(ahead, -jnp.inf, scores), axis=-1) @ v)
        return jnp.concatenate(outputs, axis=-1) @ w("out").T

    def attention(self, name, c, prefix, x_hat, l, layer):
        # One routing serves both projections, decided from the input of the first.
        mixed = layer.recurrent and c["projection"] != "none"
        project = self.projection_experts(prefix, x_hat, l) if mixed else self.plain_projection(prefix)
        b, t, _ = x_hat.shape
        heads, kv_heads, d = c["heads"], c["kv_heads"], c["head_size"]
        taking = jnp.ones((b, t), dtype=bool) if self.taking is None else self.taking
        if c.get("latent"):
            return self.latent(c, prefix, x_hat)
        qkv = project("qkv", x_hat)
        if c["bias"] in ("qkv", "all"):
            qkv = qkv + self.w[f"{prefix}.qkv.bias"]
        qkv = qkv.reshape(b, t, -1, d)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if c["bias"] == "qk":
            q = q + self.w[f"{prefix}.q.bias"].reshape(heads, d)
            k = k + (0.0 if c.get("kv_from") else self.w[f"{prefix}.k.bias"].reshape(kv_heads, d))

        if c["kind"] == "sequence":
            # [b or 1, t, 1, d/2]: all pairs of a token share its position, and so do all heads.
            positions = self.positions(b, t)[..., None, None] * np.ones(d // 2)
        else:
            positions = depth_positions(l, self.model.depth, d, c["rope"]["half_reversed"])
        turn = partial(rotate, positions=positions, base=c["rope"]["base"], share=c["rope"]["share"],
                       scaling=c["rope"]["scaling"])  # fmt: skip

        def normed(u, gain):
            if c["qk_norm"] == "rms":
                u = self.norm(u, f"{prefix}.{gain}.weight")
            elif c["qk_norm"] == "rms_all":
                u = self.norm(u.reshape(*u.shape[:-2], -1), f"{prefix}.{gain}.weight").reshape(u.shape)
            return u

        def ready(u, gain):
            return turn(normed(u, gain))

        above = []
        if c.get("depth_stream"):
            for key, value in self.stream_along_depth:
                key, value = (each.reshape(b, t, kv_heads, d) for each in (key, value))
                above.append((normed(key, "k_norm"), value))
            if c["depth_stream"] == "keys":
                self.stream_along_depth.append(tuple(each.reshape(b, t, kv_heads * d) for each in (k, v)))
            else:
                self.leave_keys(prefix, True, x_hat)

        q = ready(q, "q_norm")
        writers = taking  # whose keys and values these are, where a skip leaves some out
        if c.get("kv_from"):
            k, v = self.latest[c["kv_from"]]
        else:
            k = ready(k, "k_norm")
            if c["value_residual"]:
                v_0 = self.first_values.setdefault(name, v)
                share = self.w[f"{prefix}.value_residual"]
                v = share * v + (1 - share) * v_0
            if c["kind"] == "sequence" and layer.loops and layer.loops[-1].kv:
                first = self.first_keys.setdefault(prefix, (k, v, taking))
                if layer.loops[-1].kv == "first":
                    k, v, writers = first
                else:
                    # A token that skips this pass has the keys and values of pass 0, which all tokens make.
                    own = (taking | self.all_keys)[..., None, None]
                    k, v = jnp.where(own, k, first[0]), jnp.where(own, v, first[1])
                    writers = first[2]
            self.latest[name] = (k, v)

        if c["kind"] == "sequence":
            own = (k, v)
            # Keys and values of all tokens, seen by every token of the same row: [b, 1, s, heads, d].
            k, v = k[:, None], v[:, None]
            back = np.arange(t)[:, None] - np.arange(t)[None, :]  # how far key j lies behind query i
            visible = (back >= 0) & (back < (c["window"] or t))
            visible = jnp.broadcast_to(visible[None, :, None, :], (b, t, 1, t))
            if self.taking is not None and not self.all_keys:
                are_keys = self.are_keys() if writers is taking else writers
                visible = visible & are_keys[:, None, None, :]
                k, v = (each * writers[:, None, :, None, None] for each in (k, v))  # of the others nothing is known
            if c["depth_keys"]:
                # Beside them those that this component made of the same token before: [b, t, t + n, heads, d].
                before = self.earlier.setdefault(name, [])
                k, v = (
                    jnp.concatenate([jnp.broadcast_to(each, (b, t, *each.shape[2:])), *(e[at][:, :, None] for e in before)], axis=2)
                    for at, each in enumerate((k, v))
                )
                there = [jnp.broadcast_to(e[2][:, :, None, None], (b, t, 1, 1)) for e in before]
                visible = jnp.concatenate([visible, *there], axis=3)
                before.append((*own, taking))
            if above:
                # Every key of the depth stream is seen by its own token alone.
                k, v = (
                    jnp.concatenate([jnp.broadcast_to(each, (b, t, *each.shape[2:])), *(e[at][:, :, None] for e in above)], axis=2)
                    for at, each in enumerate((k, v))
                )
                visible = jnp.concatenate([visible, jnp.ones((b, t, 1, len(above)), bool)], axis=3)
        else:
            # Keys and values of all depths so far of this very token: [b, t, s, heads, d]. Keys keep the rotation they were
            # written with. Nothing later is in the cache, so there is nothing to mask.
            cache = self.depth_cache.setdefault(name, [])
            cache.append((k, v, taking))
            k, v, present = (jnp.stack(each, axis=2) for each in zip(*cache))
            # Depths that the token skipped are not there; one that skips this depth may see everything.
            visible = (present | ~taking[..., None])[:, :, None, :]

        # Query head j reads the key/value head j // (heads per kv head).
        k, v = (jnp.repeat(each, heads // kv_heads, axis=3) for each in (k, v))
        scores = jnp.sum(q[:, :, None] * k, axis=-1)  # [b, t, s, heads]
        scores = jnp.swapaxes(scores, 2, 3) * (d**-0.5 if c["scale"] is None else c["scale"])  # [b, t, heads, s]
        if c["softcap"]:
            scores = c["softcap"] * jnp.tanh(scores / c["softcap"])
        # A query that sees nothing (of a token that takes no part) gets nothing.
        sees = jnp.any(visible, axis=-1, keepdims=True)
        scores = jnp.where(visible | ~sees, scores, -jnp.inf)
        if c["sink"]:
            # A logit next to the others, with a value of zero.
            sink = jnp.broadcast_to(self.w[f"{prefix}.sink"][:, None], (*scores.shape[:3], 1))
            probabilities = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1] * sees
        else:
            probabilities = jax.nn.softmax(scores, axis=-1) * sees
        mixed = jnp.sum(jnp.swapaxes(probabilities, 2, 3)[..., None] * v, axis=2)  # [b, t, heads, d]
        if c["gate"]:
            gate = jax.nn.sigmoid(x_hat @ self.matrix(f"{prefix}.gate").T)
            mixed = mixed * gate.reshape(b, t, heads, -1)  # one for a head, or one for each of its elements
        y = project("out", mixed.reshape(b, t, heads * d))
        return y + self.w[f"{prefix}.out.bias"] if c["bias"] in ("out", "all") else y

    def plain_projection(self, prefix):
        return lambda which, x: x @ self.matrix(f"{prefix}.{which}").T

    def projection_experts(self, prefix, x_hat, l):
        """Equation 7. The shared expert is scaled by the score but teaches the router nothing: its scale has no gradient."""
        score, chosen, _ = self.route(prefix, x_hat, l, active=1)
        stopped = self.stop(jnp.sum(score * chosen, axis=-1, keepdims=True))

        def project(which, x):
            routed = jnp.einsum("bte,bti,eoi->bto", score * chosen, x, self.w[f"{prefix}.{which}.weight"])
            return routed + stopped * (x @ self.w[f"{prefix}.{which}.shared.weight"].T)

        return project


    def loss(self, logits, targets):
        """What is trained: the loss of all passes where a loop has exits, and the losses of routers and of the head."""
        loop, total = self.model.exit, self.auxiliary
        if loop is not None and loop.exit == "expected":
            logits = self.expected_logits()
        if self.model.z_loss:
            total += self.model.z_loss * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        if loop is None:
            return total + cross_entropy(logits, targets)
        each = jnp.stack([token_losses(logits, targets) for logits in self.pass_logits])  # [n, b, t]
        if loop.exit == "mean":
            return total + jnp.mean(each)
        q = self.exit_shares()
        entropy = -jnp.sum(q * jnp.log(q), axis=0)
        if loop.exit == "expected":
            return total + jnp.mean(token_losses(logits, targets) - loop.entropy * entropy)
        return total + jnp.mean(jnp.sum(q * each, axis=0) - loop.entropy * entropy)

    def exit_shares(self):
        """The share that each pass has of a token: [n, b, t]. The last pass takes the rest."""
        prefix, stay, shares = f"loops.{self.model.exit.number}.exit", 1.0, []
        for x in self.pass_streams[:-1]:
            leave = jax.nn.sigmoid(x @ self.w[f"{prefix}.weight"] + self.w[f"{prefix}.bias"])
            shares.append(stay * leave)
            stay = stay * (1 - leave)
        return jnp.stack([*shares, stay])

    def expected_logits(self):
        """What training sees in place of the last pass's logits where passes share out logits."""
        return jnp.einsum("nbt,nbtv->btv", self.exit_shares(), jnp.stack(self.pass_logits))


def sinkhorn(square):
    """Rows and columns of positive matrices made to sum to 1: columns first, then rows and columns in turn, 20 times."""
    for step in range(20):
        if step:
            square = square / (jnp.sum(square, axis=-1, keepdims=True) + EPS)
        square = square / (jnp.sum(square, axis=-2, keepdims=True) + EPS)
    return square


def token_losses(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]


def cross_entropy(logits, targets):
    return jnp.mean(token_losses(logits, targets))


# --- Training -----------------------------------------------------------------------------------------------------------


def is_bias(name):
    return name.endswith(("router.bias", "choice.bias"))


def split_weights(weights):
    """-> (what has a gradient, the routers' biases)"""
    return (
        {name: w for name, w in weights.items() if not is_bias(name)},
        {name: w for name, w in weights.items() if is_bias(name)},
    )


@partial(jax.jit, static_argnums=0)
def evaluate(model, weights, ids, replay=None):
    """ids [b, n + 1]: the model reads the first n tokens of each row and predicts the last n. -> (loss, everything else)"""

    def loss_of(trained, biases):
        forward = Forward(model, trained | biases, replay)
        logits = forward.run(ids[:, :-1])
        loss = forward.loss(logits, ids[:, 1:])
        if model.exit is not None and model.exit.exit == "expected":
            logits = forward.expected_logits()
        gap = jnp.min(jnp.array(forward.gaps + [jnp.inf]))
        return loss, dict(logits=logits, counts=forward.counts, gap=gap, bias_decided=forward.bias_decided,
                          stopped=forward.stopped, shares=forward.shares)  # fmt: skip

    (loss, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(*split_weights(weights))
    return loss, rest | {"gradients": gradients}


@partial(jax.jit, static_argnums=0)
def infer(model, weights, ids):
    """Logits of the tokens `ids [b, n]` where each decides by itself. -> (logits, smallest gap, shares)"""
    forward = Forward(model, weights, inference=True)
    logits = forward.run(ids)
    return logits, jnp.min(jnp.array(forward.gaps + [jnp.inf])), forward.shares


def loss_and_gradients(model, weights, ids):
    loss, rest = evaluate(model, weights, ids)
    return loss, rest["gradients"]


def decays(model, name, weight):
    """Matrices, but not embeddings, nor anything of a diagonal mix, nor tensors of definitions that no product reads."""
    if weight.ndim < 2 or name.endswith("embed.weight") or name in model.own:
        return False
    statement = re.fullmatch(r"body\.(\d+)\.mix\.weight", name)
    return not (statement and model.statements[int(statement[1])][2] == "diagonal")


def train(model, weights, batches, given):
    """AdamW over the batches. -> (loss of each step before its update, weights after the last, smallest routing gap)"""
    t = fill(TRAIN_DEFAULTS, given, "train")
    beta1, beta2 = t["betas"]
    weights = {name: np.array(w) for name, w in weights.items()}
    trained, _ = split_weights(weights)
    if model.adapt:
        trained = {name: w for name, w in trained.items() if ".adapter_" in name and not name.endswith("_norm")}
    mean = {name: np.zeros_like(w) for name, w in trained.items()}
    square = {name: np.zeros_like(w) for name, w in trained.items()}
    rates, losses, smallest_gap = model.balance_rates(), [], np.inf

    for step, ids in enumerate(batches):
        loss, rest = evaluate(model, weights, ids)
        losses.append(float(loss))
        smallest_gap = min(smallest_gap, float(rest["gap"]))
        gradients = {name: np.array(g) for name, g in rest["gradients"].items() if name in trained}
        norm = np.sqrt(sum(np.sum(g * g) for g in gradients.values()))
        factor = min(1.0, t["clip"] / norm)
        rate = t["learning_rate"] * min(1.0, (step + 1) / t["warmup"])

        for name, g in gradients.items():
            g = g * factor
            mean[name] = beta1 * mean[name] + (1 - beta1) * g
            square[name] = beta2 * square[name] + (1 - beta2) * g * g
            mean_hat = mean[name] / (1 - beta1 ** (step + 1))
            square_hat = square[name] / (1 - beta2 ** (step + 1))
            decay = t["weight_decay"] if decays(model, name, weights[name]) else 0.0
            weights[name] = weights[name] - rate * (mean_hat / (np.sqrt(square_hat) + t["eps"]) + decay * weights[name])

        # Experts chosen less often than the median become easier to choose. No learning rate and no decay has a part in it.
        for name, counts in rest["counts"].items() if not model.adapt else ():
            counts = np.array(counts)
            weights[name] = weights[name] + rates[name] * np.sign(np.median(counts) - counts)
    return np.array(losses), weights, smallest_gap
