"""Heads turned into latents, from the paper alone: Ji et al. 2025, *Towards Economical Inference* (MHA2MLA, 2502.14837), section 3.

    python tests/reference/latent_values.py            # writes tests/goldens/transplants/latents.safetensors
    python tests/reference/latent_values.py --check    # computes and compares, writes nothing

No latent is computed here. A donor of two layers with grouped heads is evaluated with what the conversion leaves of its matrices:
of a head's rotation the pairs of a list alone turn (3.1), and keys that do not turn and values are those of the nearest matrix of a
rank to both together (3.2). The file holds the donor's weights, `ids`, and logits: of the donor, and of each conversion.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

PLACE = Path(__file__).resolve().parent.parent / "goldens" / "transplants" / "latents.safetensors"
VOCAB, HIDDEN, HEADS, KV, SIZE, WIDE, LAYERS, TOKENS, BASE, EPS = 17, 12, 4, 2, 8, 10, 2, 9, 100.0, 1e-6

# Pairs that turn, for each head of keys, and the rank; all of them at full rank is the donor.
CONVERSIONS = {
    "high": ([[0, 1], [0, 1]], 5),
    "low": ([[2, 3], [2, 3]], 3),
    "uniform": ([[0, 2], [0, 2]], 12),
    "chosen": ([[0, 3], [1, 2]], 4),
    "full": ([[0, 1, 2, 3], [0, 1, 2, 3]], 12),
}


def weights():
    random = np.random.default_rng(2502)
    draw = lambda *shape: random.normal(size=shape) / np.sqrt(shape[-1])
    out = {"embed.weight": random.normal(size=(VOCAB, HIDDEN)), "norm.weight": 1 + 0.3 * random.normal(size=HIDDEN)}
    out["head.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        out[f"{name}.sa.norm.weight"] = 1 + 0.3 * random.normal(size=HIDDEN)
        out[f"{name}.sa.qkv.weight"] = 2 * draw((HEADS + 2 * KV) * SIZE, HIDDEN)
        out[f"{name}.sa.out.weight"] = draw(HIDDEN, HEADS * SIZE)
        out[f"{name}.mlp.norm.weight"] = 1 + 0.3 * random.normal(size=HIDDEN)
        out[f"{name}.mlp.gate.weight"], out[f"{name}.mlp.up.weight"] = draw(WIDE, HIDDEN), draw(WIDE, HIDDEN)
        out[f"{name}.mlp.down.weight"] = draw(HIDDEN, WIDE)
    # As a file has them, so that both sides begin with the same numbers.
    return {name: w.astype(np.float32) for name, w in out.items()}


def normed(x, gain):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gain


def turned(x, pairs):
    """The pairs `(i, i + size / 2)` of a list by their angles, the others as they are."""
    y = x.copy()
    for i in pairs:
        angle = np.arange(len(x)) * BASE ** (-2.0 * i / SIZE)
        a, b = x[:, i], x[:, i + SIZE // 2]
        y[:, i], y[:, i + SIZE // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return y


def nearest(matrix, rank):
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]


def converted(qkv, pairs, rank):
    """Matrices of keys and values after the conversion; those of queries stay."""
    keys = qkv[HEADS * SIZE : (HEADS + KV) * SIZE].reshape(KV, SIZE, HIDDEN).copy()
    values = qkv[(HEADS + KV) * SIZE :]
    still = [[e for e in range(SIZE) if e % (SIZE // 2) not in pairs[head]] for head in range(KV)]
    joint = np.concatenate([keys[head][still[head]] for head in range(KV)] + [values])
    near, at = nearest(joint, rank), 0
    for head in range(KV):
        keys[head][still[head]] = near[at : at + len(still[head])]
        at += len(still[head])
    return keys, near[at:].reshape(KV, SIZE, HIDDEN)


def logits(w, ids, pairs=None, rank=None):
    x = w["embed.weight"][ids]
    every = [list(range(SIZE // 2))] * KV
    for layer in range(LAYERS):
        of = lambda name: w[f"layers.{layer}.{name}.weight"]
        n, qkv = normed(x, of("sa.norm")), of("sa.qkv")
        queries = qkv[: HEADS * SIZE].reshape(HEADS, SIZE, HIDDEN)
        if pairs is None:
            keys = qkv[HEADS * SIZE : (HEADS + KV) * SIZE].reshape(KV, SIZE, HIDDEN)
            values = qkv[(HEADS + KV) * SIZE :].reshape(KV, SIZE, HIDDEN)
        else:
            keys, values = converted(qkv, pairs, rank)
        outputs = []
        for head in range(HEADS):
            group = head * KV // HEADS
            turning = (pairs or every)[group]
            q, k = turned(n @ queries[head].T, turning), turned(n @ keys[group].T, turning)
            scores = q @ k.T / np.sqrt(SIZE)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(p / p.sum(-1, keepdims=True) @ (n @ values[group].T))
        x = x + np.concatenate(outputs, -1) @ of("sa.out").T
        n = normed(x, of("mlp.norm"))
        gate = n @ of("mlp.gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ of("mlp.up").T)) @ of("mlp.down").T
    return normed(x, w["norm.weight"]) @ w["head.weight"].T


def tensors():
    stored = weights()
    w = {name: value.astype(np.float64) for name, value in stored.items()}
    ids = (np.arange(TOKENS) * 5 + 3) % VOCAB
    out = {f"weights.{name}": value for name, value in stored.items()}
    out |= {"ids": ids.astype(np.int64), "logits.donor": logits(w, ids)}
    for name, (pairs, rank) in CONVERSIONS.items():
        out[f"logits.{name}"] = logits(w, ids, pairs, rank)
    assert np.abs(out["logits.full"] - out["logits.donor"]).max() < 1e-12
    assert all(np.abs(out[f"logits.{name}"] - out["logits.donor"]).max() > 1e-2 for name in ("high", "low", "uniform", "chosen"))
    return out


if __name__ == "__main__":
    found = tensors()
    if sys.argv[1:] == ["--check"]:
        kept = load_file(PLACE)
        worst = max(np.abs(found[name] - kept[name]).max() for name in found)
        print(f"{len(found)} tensors, the largest difference is {worst:.1e}")
        sys.exit(0 if worst < 1e-12 and kept.keys() == found.keys() else 1)
    PLACE.parent.mkdir(exist_ok=True)
    save_file(found, PLACE)
    print(f"{PLACE.stat().st_size} bytes")
