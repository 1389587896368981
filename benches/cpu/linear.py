#!/usr/bin/env python3
"""Linear attention against what PyTorch has without a GPU, sides in turns:

    python benches/cpu/linear.py --test target/debug/deps/dreamc_runtime-HASH --rounds 3

A gated delta rule is compared with `torch_chunk_gated_delta_rule` of transformers, a decay of each head (`state`) with the chunk scan of
Mamba-2's paper (its "minimal" form, Dao and Gu 2405.21060, listing 1), eager and compiled, f32, two threads; and both with dreamc's own
attention of as many heads and the same size. `--test` is the unit-test binary of `dreamc-runtime` (`cargo test -p dreamc-runtime --lib
--no-run` names it), whose test `rates` prints the other side. Times are of a token, forward and backward together; the least of the rounds.
"""

import argparse
import os
import subprocess
import time

import torch
import torch.nn.functional as F
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


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--test", required=True)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--eager", action="store_true", help="nothing is compiled")
    p.add_argument("--longest", type=int, default=16384, help="tokens")
    a = p.parse_args()
    torch.set_num_threads(2)
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
