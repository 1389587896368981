"""Loads the folder that `dreamc export torch RUN` wrote, as its README says, and compares it with `dreamc probe RUN`.

    python tests/hf/exported.py FOLDER IDS.json PROBE.safetensors

Prints the largest relative difference of logits, loss and gradients, one a line.
"""

import importlib.util
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file


def apart(found, expected):
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


folder, ids, probe = map(pathlib.Path, sys.argv[1:])
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("model", folder / "model.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.load(folder)
ids = torch.tensor(json.loads(ids.read_text()))
logits, loss = model(ids[:, :-1], ids[:, 1:])
loss.backward()
expected = load_file(probe)
parameters = dict(model.named_parameters())
renamed = getattr(module, "RENAMED", {})
gradients = {k.removeprefix("gradients."): t for k, t in expected.items() if k.startswith("gradients.")}
assert gradients
print(apart(logits, expected["logits"]))
print(apart(loss.reshape(1), expected["loss"]))
print(max(apart(parameters[renamed.get(k, k)].grad, t) for k, t in gradients.items()))
