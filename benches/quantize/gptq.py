#!/usr/bin/env python3
"""Calibration of `dreamc quantize` against GPTQ, on one model of the Llama family and the same text.

    python benches/quantize/gptq.py --dreamc target/release/dreamc --model runs/m --learned learned.txt --held held.txt --place /tmp/gptq

Exports the run, quantises it by plain GPTQ (Frantar et al., 2210.17323) in PyTorch: matrices layer after layer, each with the second moments
of its inputs in the model quantised so far, 1 % of their mean on the diagonal, scales of a block from what it has become when it is reached.
The embedding is rounded to the nearest, the head is a matrix like the others. The numbers come back through `dreamc import hf`. Prints the KL
divergence from the run on held text of rounding to the nearest, of `dreamc quantize --data`, and of GPTQ. Needs `torch` and `transformers`.
"""

import argparse
import json
import pathlib
import shutil
import subprocess

import torch
from transformers import AutoModelForCausalLM

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GRID = {"mxfp4": torch.cat([E2M1, -E2M1]), "q4_0": torch.arange(-8.0, 8.0), "q8_0": torch.arange(-127.0, 128.0)}


def scales(block, format):
    """The scale of each row of blocks of 32 numbers."""
    largest, at = block.abs().max(1)
    if format == "q4_0":
        return (block.gather(1, at[:, None])[:, 0] / -8).half().float()
    if format == "q8_0":
        return (largest / 127).half().float()
    return torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-38))) - 2)


def nearest(x, scale, format):
    """The nearest numbers under scales; the first of two."""
    grid = GRID[format]
    return grid[(x[:, None] - grid[None, :] * scale[:, None]).abs().argmin(1)] * scale


def rounded(w, format):
    """To the nearest, block by block."""
    out = torch.empty_like(w)
    for first in range(0, w.shape[1], 32):
        scale = scales(w[:, first : first + 32], format)
        for j in range(first, first + 32):
            out[:, j] = nearest(w[:, j], scale, format)
    return out


def gptq(w, moments, format):
    """Column by column, errors spread over later ones by the inverse of the moments."""
    w, h = w.clone(), moments.double()
    h += 0.01 * h.diag().mean() * torch.eye(len(h), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True).float()
    out = torch.empty_like(w)
    for j in range(w.shape[1]):
        if j % 32 == 0:
            scale = scales(w[:, j : j + 32], format)
        out[:, j] = nearest(w[:, j], scale, format)
        error = (w[:, j] - out[:, j]) / upper[j, j]
        w[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :][None, :]
    return out


def moments_of(model, modules, rows):
    """Second moments of the inputs of modules."""
    found = {m: 0 for m in modules}

    def seen(module, inputs):
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        found[module] = found[module] + x.T @ x

    hooks = [m.register_forward_pre_hook(seen) for m in modules]
    for row in rows:
        model(row[None])
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def quantised(model, rows, format):
    """Every matrix of a model, by GPTQ."""
    for layer in model.model.layers:
        # Matrices of one input together, in their order.
        for names in (["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]):
            own = [m for name, m in layer.named_modules() if name.split(".")[-1] in names]
            for module, h in moments_of(model, own, rows).items():
                module.weight.copy_(gptq(module.weight, h, format))
    head = moments_of(model, [model.lm_head], rows)[model.lm_head]
    wide = model.lm_head.weight.clone()
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.lm_head.weight
    if not tied:
        embedding.copy_(rounded(embedding, format))
    model.lm_head.weight.copy_(gptq(wide, head, format))
    return model


def main():
    parser = argparse.ArgumentParser()
    for name in ("dreamc", "model", "learned", "held", "place"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["q4_0", "mxfp4", "q8_0"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=256)
    a = parser.parse_args()

    def dreamc(*words):
        return subprocess.run([a.dreamc, *map(str, words)], check=True, capture_output=True, text=True).stdout

    def divergence(model):
        said = dreamc("eval", model, "--against", a.model, "--data", a.held, "--sequence", 128, "--json")
        against = json.loads(said)[0]["against"]
        return {"divergence": against["divergence"], "flips": against["flips"]}

    hf = a.place / "hf"
    if not hf.exists():
        dreamc("export", "hf", a.model, "-o", hf)
    text = torch.frombuffer(bytearray(a.learned.read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - a.sequence, (a.rows,), generator=draw)
    rows = torch.stack([text[s : s + a.sequence] for s in starts.tolist()])
    found = {}
    for format in a.formats:
        out = a.place / "out"
        dreamc("quantize", a.model, "--format", format, "-o", out, "--force")
        found[format] = {"nearest": divergence(out)}
        dreamc("quantize", a.model, "--format", format, "--data", a.learned, "-o", out, "--force")
        found[format]["dreamc"] = divergence(out)
        model = quantised(AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32), rows, format)
        folder = a.place / "theirs"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(hf, folder)
        model.save_pretrained(folder)
        dreamc("import", "hf", folder, "-o", a.place / "back", "--force")
        found[format]["gptq"] = divergence(a.place / "back")
        print(json.dumps({format: found[format]}), flush=True)


if __name__ == "__main__":
    main()
