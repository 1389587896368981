#!/usr/bin/env python3
"""Linear attention against what PyTorch has without a GPU, sides in turns:

    python benches/cpu/linear.py --test target/debug/deps/dreamc_device-HASH --rounds 3

A gated delta rule is compared with `torch_chunk_gated_delta_rule` of transformers, a decay of each head (`state`) with the chunk scan of
Mamba-2's paper (its "minimal" form, Dao and Gu 2405.21060, listing 1), eager and compiled, f32, two threads; and both with dreamc's own
attention of as many heads and the same size. `--test` is the unit-test binary of `dreamc-device` (`cargo test -p dreamc-device --lib
--no-run` names it), whose test `rates` prints the other side. Times are of a token, forward and backward together; the least of the rounds.

    python benches/cpu/linear.py --dreamc target/release/dreamc --rounds 3

trains whole models instead, each of four layers of the mixer and a network: dreamc in f32 and bf16 against the layers of transformers, eager
and compiled, in f32 and with bf16 autocast. `--dreamc` is the program. Rates are of the best step of all rounds; the ceiling is a large
matmul's in bf16. Last come the times of a token that is written behind texts of 1,024 and 16,384 tokens.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F
from transformers import Mamba2Config, OlmoHybridConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

# Tokens, heads, size of keys, size of values.
SHAPES = [(256, 4, 64, 64), (1024, 4, 64, 64), (1024, 4, 128, 128), (16384, 4, 64, 64)]


def segment_sum(x):
    """Sums of x behind j up to i, -inf above the diagonal."""
    t = x.size(-1)
    x = x[..., None].expand(*x.shape, t)
    x = x.masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool), -1), 0)
    return torch.cumsum(x, -2).masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool)), -torch.inf)


def chunk_scan(x, a, b, c, block=64):
    """y of S_t = exp(a_t) S_{t-1} + x_t b_tᵀ, y_t = S_t c_t; x [b, t, h, p], a [b, t, h], b and c [b, t, n] of all heads."""
    n = x.shape[1] // block
    x, a = x.unflatten(1, (n, block)), a.unflatten(1, (n, block)).permute(0, 3, 1, 2)
    b, c = b.unflatten(1, (n, block)), c.unflatten(1, (n, block))
    sums = torch.cumsum(a, -1)
    near = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, torch.exp(segment_sum(a)), x)
    states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, torch.exp(sums[..., -1:] - sums), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    decays = torch.exp(segment_sum(F.pad(sums[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", decays, states)[:, :-1]
    far = torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, torch.exp(sums))
    return (near + far).flatten(1, 2)


def torch_side(kind, shape, compiled):
    tokens, heads, size, value = shape
    torch.manual_seed(0)
    leaf = lambda *dims: (0.1 * torch.randn(*dims)).requires_grad_()
    g = (-0.1 * torch.rand(1, tokens, heads)).requires_grad_()
    v = leaf(1, tokens, heads, value)
    if kind == "delta":
        q, k = leaf(1, tokens, heads, size), leaf(1, tokens, heads, size)
        beta = torch.rand(1, tokens, heads).requires_grad_()
        run = lambda: torch_chunk_gated_delta_rule(q, k, v, g, beta)[0]
    else:
        b, c = leaf(1, tokens, size), leaf(1, tokens, size)
        run = lambda: chunk_scan(v, g, b, c)
    run = torch.compile(run) if compiled else run
    d = torch.randn(1, tokens, heads, value)

    def step():
        begin = time.perf_counter()
        run().backward(d)
        return (time.perf_counter() - begin) * 1e6 / tokens

    step()
    return step


def dreamc(a, kind, shape):
    line = " ".join(map(str, shape)) + " " + kind
    env = os.environ | {"DREAMC_SHAPES": line}
    command = [a.test, "--ignored", "--nocapture", "linear_attention::tests::rates"]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    numbers = next(l for l in out.splitlines() if l.startswith("rate ")).split(":")[1]
    return sum(map(float, numbers.split()))


# Whole models: layers, hidden size, vocabulary, intermediate size, and the settings of each mixer of dreamc.
LAYERS, HIDDEN, VOCAB, INTERMEDIATE = 4, 256, 256, 512
MIXERS = {"gated_delta": "heads 4  size 48  value 96", "mamba2": "size 64  state 128", "sequence": "heads 4  head_size 64"}


class Layers(torch.nn.Module):
    """The same model of transformers' layers."""

    def __init__(self, kind):
        super().__init__()
        if kind == "gated_delta":
            # Its check demands a layer of attention, which no layer of the model is made from.
            config = OlmoHybridConfig(hidden_size=HIDDEN, linear_num_value_heads=4, linear_num_key_heads=4, num_hidden_layers=LAYERS + 1,
                                      linear_key_head_dim=48, linear_value_head_dim=96, linear_allow_neg_eigval=False,
                                      layer_types=["linear_attention"] * LAYERS + ["full_attention"])
            mixer = OlmoHybridGatedDeltaNet
        else:
            config = Mamba2Config(hidden_size=HIDDEN, num_heads=8, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=LAYERS,
                                  chunk_size=64)
            mixer = Mamba2Mixer
        linear = lambda a, b: torch.nn.Linear(a, b, bias=False)
        self.embed, self.head = torch.nn.Embedding(VOCAB, HIDDEN), linear(HIDDEN, VOCAB)
        self.mixers = torch.nn.ModuleList(mixer(config, i) for i in range(LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2 * LAYERS + 1))
        sizes = [(HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
        self.networks = torch.nn.ModuleList(torch.nn.ModuleList(linear(*size) for size in sizes) for _ in range(LAYERS))

    def forward(self, ids):
        x = self.embed(ids)
        for i, (mixer, (gate, up, down)) in enumerate(zip(self.mixers, self.networks)):
            x = x + mixer(self.norms[2 * i](x))
            n = self.norms[2 * i + 1](x)
            x = x + down(F.silu(gate(n)) * up(n))
        return self.head(self.norms[-1](x))


def trainer(kind, batch, tokens, compiled, narrow):
    """A step of training; gives its seconds."""
    torch.manual_seed(0)
    model = Layers(kind)
    run = torch.compile(model) if compiled else model
    update = torch.optim.AdamW(model.parameters(), lr=4e-4)
    ids = torch.randint(0, VOCAB, (batch, tokens + 1))

    def step():
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = F.cross_entropy(run(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update.step()
        update.zero_grad()
        return time.perf_counter() - begin

    step(), step()
    return step


def specification(kind, batch, tokens, context):
    component = f"{kind} {{ {MIXERS[kind]} }}"
    return f"""model m {{
  vocab {VOCAB}  hidden {HIDDEN}  context {context}
  mixer = {component}
  mlp = mlp {{ intermediate {INTERMEDIATE} }}
  repeat {LAYERS} {{ mixer > mlp }}
}}
train {{ batch {batch}  sequence {tokens}  clip 0.5 }}
"""


def bench(a, kind, batch, tokens, precision, *more):
    """The report of `dreamc bench`."""
    with tempfile.TemporaryDirectory() as place:
        spec = pathlib.Path(place) / "m.dream"
        spec.write_text(specification(kind, batch, tokens, tokens + 128))
        command = [a.dreamc, "bench", str(spec), "--json", "--threads", "2", "--set", f"train.precision={precision}"]
        train = ["--steps", "5", "--batch", str(batch), "--sequence", str(tokens), "--tokens", "0"]
        out = subprocess.run([*command, *(more or train)], capture_output=True, text=True, check=True).stdout
    return json.loads(out)


def models(a):
    print("| model | tokens | dreamc f32 | dreamc bf16 | share of the ceiling | attention bf16 | PyTorch, best | which | ratio | ratio to attention |")
    print("|---|---:|---:|---:|---:|---:|---:|---|---:|---:|")
    for kind in ("gated_delta", "mamba2"):
        for batch, tokens in ((4, 256), (1, 1024), (1, 4096), (1, 16384)):
            if tokens > a.longest:
                continue
            ways = [(c, n) for c in ((False,) if a.eager else (False, True)) for n in (False, True)]
            steps = {way: trainer(kind, batch, tokens, *way) for way in ways}
            rates, ceiling = {name: [] for name in ["f32", "bf16", "attention", *steps]}, 0
            for _ in range(a.rounds):
                for precision in ("f32", "bf16"):
                    report = bench(a, kind, batch, tokens, precision)
                    rates[precision].append(report["training"]["best_tokens_per_second"])
                    ceiling = max(ceiling, report["ceiling"]["bf16"])
                rates["attention"].append(bench(a, "sequence", batch, tokens, "bf16")["training"]["best_tokens_per_second"])
                for way, step in steps.items():
                    rates[way].append(batch * tokens / min(step() for _ in range(3)))
            best = {name: max(found) for name, found in rates.items()}
            way = max(steps, key=lambda way: best[way])
            share = best["bf16"] * report["training"]["flops"] / (batch * tokens) / ceiling
            own, which = max(best["f32"], best["bf16"]), f"{'compiled' if way[0] else 'eager'} {'bf16' if way[1] else 'f32'}"
            print(
                f"| {kind} | {batch}×{tokens} | {best['f32']:,.0f} | {best['bf16']:,.0f} | {share:.0%} | {best['attention']:,.0f} | {best[way]:,.0f} | {which} | "
                f"{own / best[way]:.1f} | {own / best['attention']:.2f} |",
                flush=True,
            )
    print("\n| model | µs of a written token behind 1,024 | behind 16,384 | ratio |\n|---|---:|---:|---:|")
    for kind in ("gated_delta", "mamba2"):
        times = {tokens: [] for tokens in (1024, 16384) if tokens <= a.longest}
        for _ in range(a.rounds):
            for tokens, found in times.items():
                report = bench(a, kind, 1, tokens, "bf16", "--decode", "--prompt", str(tokens))
                found.append(1e6 / report["decoding"]["tokens_per_second"])
        found = [statistics.median(found) for found in times.values()]
        print(f"| {kind} | {' | '.join(f'{x:,.0f}' for x in found)} | {found[-1] / found[0]:.2f} |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side = p.add_mutually_exclusive_group(required=True)
    side.add_argument("--test", help="the unit-test binary: kernels alone")
    side.add_argument("--dreamc", help="the program: whole models")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--eager", action="store_true", help="nothing is compiled")
    p.add_argument("--longest", type=int, default=16384, help="tokens")
    a = p.parse_args()
    torch.set_num_threads(2)
    if a.dreamc:
        return models(a)
    print("| tokens | heads | size | | dreamc, µs | attention, µs | PyTorch, µs | ratio |")
    print("|---:|---:|---|---|---:|---:|---:|---:|")
    for shape in (s for s in SHAPES if s[0] <= a.longest):
        for kind in ("delta", "state"):
            sides = {"eager": torch_side(kind, shape, False)}
            if not a.eager:
                sides["compiled"] = torch_side(kind, shape, True)
            best = {name: float("inf") for name in [*sides, "own", "attention"]}
            for _ in range(a.rounds):
                best["own"] = min(best["own"], dreamc(a, kind, shape))
                best["attention"] = min(best["attention"], dreamc(a, "attention", shape))
                for name, step in sides.items():
                    best[name] = min(best[name], step())
            other = min(best[name] for name in sides)
            tokens, heads, size, value = shape
            print(
                f"| {tokens} | {heads} | {size}×{value} | {kind} | {best['own']:.2f} | {best['attention']:.2f} | {other:.2f} | {other / best['own']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
