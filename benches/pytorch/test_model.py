"""That the PyTorch models compute what dreamc computes: `python test_model.py --dreamc PATH`, on a CPU, in f32.

`dreamc probe` writes weights, logits, loss and gradients of the tiny examples; this loads the weights and compares.
"""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

from model import Model, load_spec

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read(path):
    """A safetensors file of f32."""
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            a, b = entry["data_offsets"]
            raw = bytearray(data[8 + size + a : 8 + size + b])
            tensors[name] = torch.frombuffer(raw, dtype=torch.float32).reshape(entry["shape"])
    return tensors


def check(dreamc, path):
    spec = load_spec(dreamc, str(ROOT / path))
    ids = [[(7 * i + 31 * row) % spec["model"]["vocab"] for i in range(25)] for row in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "ids.json").write_text(json.dumps(ids))
        command = [dreamc, "probe", str(ROOT / path), "--ids", str(folder / "ids.json")]
        subprocess.run(command + ["-o", str(folder / "out"), "--seed", "0", "--weights"], check=True)
        found = read(folder / "out")
    model = Model(spec)
    weights = {n.removeprefix("weights."): t for n, t in found.items() if n.startswith("weights.")}
    model.load_state_dict(weights, strict=True)
    ids = torch.tensor(ids)
    x = model(ids[:, :-1], torch.float32)
    logits = F.linear(x, model.head.weight)
    loss = model.loss(ids[:, :-1], ids[:, 1:], torch.float32, chunk=20)
    loss.backward()

    def apart(a, b):
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))

    worst = {"logits": apart(logits.detach(), found["logits"]), "loss": apart(loss.detach(), found["loss"][0])}
    for name, p in model.named_parameters():
        expected = found.get(f"gradients.{name}")
        if expected is not None and expected.abs().max() > 1e-7:
            worst[name] = apart(p.grad, expected)
    name, error = max(worst.items(), key=lambda item: item[1])
    print(f"{path}: {len(worst)} compared, worst {name}: {error:.1e}")
    return error < 2e-4


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--dreamc", default=str(ROOT / "target/release/dreamc"))
    a = arguments.parse_args()
    torch.manual_seed(0)
    paths = ["examples/tiny-la.yaml", "examples/tiny-dr.yaml", "examples/tiny-dr-da.yaml"]
    paths += ["benches/cpu/a.yaml", "benches/cpu/b.yaml", "benches/cpu/d.yaml"]
    results = [check(a.dreamc, path) for path in paths]
    sys.exit(0 if all(results) else 1)
