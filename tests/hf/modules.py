"""Runs modules that `dreamc export torch` wrote, for `torch/tests`, and compares them with what was computed without PyTorch.

    python tests/hf/modules.py DIR NAME…

DIR/NAME.py is a module; DIR/NAME.safetensors holds `ids` [b, n + 1] (the last n are targets) or `ids` and `targets`, `weights.TENSOR`,
`logits`, `loss` and `gradients.TENSOR`, perhaps `noise`, and `prompt` with what is `written` after it. A line for each that differs: its name and what.
"""

import importlib.util
import inspect
import pathlib
import sys

import torch
from safetensors.torch import load_file

LOGITS, GRADIENTS = 1e-5, 1e-4


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear(x, weight, bias=None):
    """`F.linear`, each row by itself: BLAS adds up a row in an order of its place in a block, and equal tokens are to tie where a router scores them."""
    y = (x.unsqueeze(-2) * weight).sum(-1)
    return y if bias is None else y + bias


torch.nn.functional.linear = linear


def inside(tensors, prefix):
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def apart(found, expected):
    scale = expected.abs().max().clamp(min=1e-6)
    return ((found - expected).abs().max() / scale).item() if expected.numel() else 0.0


def problems(place, name):
    tensors = load_file(place / f"{name}.safetensors")
    tensors = {k: t.double() if t.is_floating_point() else t.long() for k, t in tensors.items()}
    torch.set_default_dtype(torch.float64)
    module = load(place / f"{name}.py")
    model = module.Model()
    renamed = getattr(module, "RENAMED", {})
    model.load_state_dict({renamed.get(k, k): t for k, t in inside(tensors, "weights.").items()})
    ids, targets = tensors["ids"], tensors.get("targets")
    if targets is None:
        ids, targets = ids[:, :-1], ids[:, 1:]
    takes = inspect.signature(model.forward).parameters
    more = {k: tensors[k] for k in ["noise", "positions", "segments"] if k in tensors and k in takes}
    found = []
    if "self.training" in (place / f"{name}.py").read_text():
        first, second = (model(ids, targets, **more)[0] for _ in range(2))
        if torch.equal(first, second):
            found.append("a module that trains drops nothing")
        model.eval()
    logits, loss = model(ids, targets, **more)
    if not apart(logits, tensors["logits"]) < LOGITS:
        found.append(f"logits differ by {apart(logits, tensors['logits']):.1e}")
    if "loss" in tensors and not apart(loss.reshape(1), tensors["loss"].reshape(1)) < LOGITS:
        found.append(f"loss is {loss.item()}, not {tensors['loss'].item()}")
    loss.backward()
    if "prompt" in tensors and "noise" not in takes:
        text = model.generate(tensors["prompt"], tensors["written"].shape[1] - 2)
        if not torch.equal(text, tensors["written"]):
            found.append(f"wrote {text.tolist()}, not {tensors['written'].tolist()}")
    gradients = inside(tensors, "gradients.")
    parameters = dict(model.named_parameters())
    for k, expected in gradients.items():
        own = parameters[renamed.get(k, k)].grad
        own = torch.zeros_like(expected) if own is None else own
        if not apart(own, expected) < GRADIENTS:
            found.append(f"gradient of {k} differs by {apart(own, expected):.1e}")
    return found


def main(place, names):
    torch.set_num_threads(1)
    for name in names:
        try:
            for problem in problems(pathlib.Path(place), name):
                print(f"{name}: {problem}")
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {e}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
