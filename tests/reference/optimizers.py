"""Ten steps of every optimizer, in NumPy in float64 from the published formulas: shares no code with the compiler.

    python tests/reference/optimizers.py        writes tests/goldens/optimizers/{adamw,lion,sgd,muon,muonh}.safetensors

Weights and gradients are those of the golden file `dr_da`; the gradient of step t (from 1) is that times cos(0.7 t + 0.1 i) at element i.
"""

import json
import struct
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parent.parent / "goldens"
STEPS, RATE, DECAY, CLIP, EPS = 10, 0.01, 0.1, 0.5, 1e-8
BETAS, MOMENTUM, MATRIX_RATE = (0.9, 0.99), 0.95, 2.0
DTYPES = {"F64": np.float64, "I64": np.int64, "F32": np.float32}


def read(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(rest[slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"]).copy()
        for name, t in header.items()
    }


def write(path, tensors):
    header, body = {}, b""
    for name, x in tensors.items():
        raw = x.astype(np.float64).tobytes()
        header[name] = {"dtype": "F64", "shape": list(x.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def orthogonalise(u):
    """Jordan's zeropower_via_newtonschulz5, in float64."""
    x = u / (np.linalg.norm(u) + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def whole(name, shape):
    """Matrices of layers; of a routed tensor each expert's. Not embeddings, head, gains, biases and routers."""
    inside = name.startswith("layers.") and "router" not in name and "norm" not in name
    return inside and len(shape) >= 2


def muon(w, m, g, rate, decay, sphere):
    m[...] = MOMENTUM * m + (1 - MOMENTUM) * g
    o = orthogonalise(MOMENTUM * m + (1 - MOMENTUM) * g)
    rate *= MATRIX_RATE
    if sphere:
        radius = np.linalg.norm(w)
        w[...] = w - rate * radius * o / (np.linalg.norm(o) + 1e-7)
        w *= radius / np.linalg.norm(w)
    else:
        w[...] = w * (1 - rate * decay) - rate * max(1, w.shape[0] / w.shape[1]) ** 0.5 * o


def train(kind, weights, gradients):
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    m = {name: np.zeros_like(w) for name, w in weights.items()}
    v = {name: np.zeros_like(w) for name, w in weights.items()}
    for t in range(1, STEPS + 1):
        now = {n: g * np.cos(0.7 * t + 0.1 * np.arange(g.size)).reshape(g.shape) for n, g in gradients.items()}
        now = {n: g.astype(np.float32).astype(np.float64) for n, g in now.items()}
        length = np.sqrt(sum((g * g).sum() for g in now.values()))
        for name, g in now.items():
            g = g * min(1.0, CLIP / length)
            w = weights[name]
            decay = DECAY if w.ndim >= 2 and name != "embed.weight" else 0.0
            if kind == "lion":
                step = np.sign(BETAS[0] * m[name] + (1 - BETAS[0]) * g)
                weights[name] = w - RATE * (step + decay * w)
                m[name] = BETAS[1] * m[name] + (1 - BETAS[1]) * g
            elif kind == "sgd":
                m[name] = MOMENTUM * m[name] + g
                weights[name] = w - RATE * (m[name] + decay * w)
            elif kind in ("muon", "muonh") and whole(name, w.shape):
                size = w.shape[-2:]
                for one in zip(w.reshape(-1, *size), m[name].reshape(-1, *size), g.reshape(-1, *size)):
                    muon(*one, RATE, decay, kind == "muonh")
            else:
                m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
                step = m[name] / (1 - BETAS[0] ** t) / (np.sqrt(v[name] / (1 - BETAS[1] ** t)) + EPS)
                weights[name] = w - RATE * (step + decay * w)
    return weights


if __name__ == "__main__":
    golden = read(GOLDENS / "dr_da.safetensors")
    part = lambda prefix: {n[len(prefix) :]: x for n, x in golden.items() if n.startswith(prefix)}
    weights = {n: w.astype(np.float32) for n, w in part("weights.").items()}
    (GOLDENS / "optimizers").mkdir(exist_ok=True)
    for kind in ("adamw", "lion", "sgd", "muon", "muonh"):
        write(GOLDENS / "optimizers" / f"{kind}.safetensors", train(kind, weights, part("gradients.")))
