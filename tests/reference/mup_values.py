"""Writes tests/goldens/mup: an MLP and a transformer by the authors' package `mup` 1.0.0.

    pip install torch mup safetensors
    python tests/reference/mup_values.py

Of each: `scale.NAME`, how much smaller than at the base the package draws a weight's first values,
its multiplier included; `multiplier.NAME`, where it has one; weights before (`before.NAME`) and
after three steps of MuAdamW (`after.NAME`), multipliers included, and the loss of each step. All in
float64, kept as f32. `tests/numerics/rates.rs` compares.
"""

import math
import pathlib

import torch
from mup import MuAdamW, MuReadout, init, set_base_shapes
from safetensors.torch import save_file

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens" / "mup"
VOCAB, LAYERS, HEADS, RATE, BETAS, EPS = 23, 2, 4, 0.004, (0.9, 0.95), 1e-10
BASE, HERE = dict(hidden=8, head=2, inner=16), dict(hidden=32, head=8, inner=64)
IDS = torch.tensor([[(7 * r + 5 * i + i * i) % VOCAB for i in range(9)] for r in range(3)])


class Norm(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def linear(i, o):
    return torch.nn.Linear(i, o, bias=False)


class Attention(torch.nn.Module):
    def __init__(self, hidden, head, **_):
        super().__init__()
        self.head = head
        self.norm, self.out = Norm(hidden), linear(HEADS * head, hidden)
        self.q, self.k, self.v = (linear(hidden, HEADS * head) for _ in range(3))

    def forward(self, x):
        b, t, _ = x.shape
        n = self.norm(x)
        q, k, v = (f(n).view(b, t, HEADS, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        # 1/d and not 1/sqrt(d), with a constant that makes both the same at the base.
        scores = q @ k.transpose(-1, -2) * (math.sqrt(BASE["head"]) / self.head)
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class Mlp(torch.nn.Module):
    def __init__(self, hidden, inner, **_):
        super().__init__()
        self.norm = Norm(hidden)
        self.gate, self.up, self.down = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

    def forward(self, x):
        n = self.norm(x)
        return self.down(torch.nn.functional.silu(self.gate(n)) * self.up(n))


class Model(torch.nn.Module):
    def __init__(self, sizes, attends):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, sizes["hidden"])
        self.layers = torch.nn.ModuleList()
        for _ in range(LAYERS):
            parts = {"sa": Attention(**sizes)} if attends else {}
            self.layers.append(torch.nn.ModuleDict(parts | {"mlp": Mlp(**sizes)}))
        self.norm = Norm(sizes["hidden"])
        self.head = MuReadout(sizes["hidden"], VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            for part in layer.values():
                x = x + part(x)
        return self.head(self.norm(x))


def named(model):
    """Tensors as dreamc names them, multipliers included."""
    found = {}
    for name, p in model.named_parameters():
        by = 1 / model.head.width_mult() if name == "head.weight" else 1.0
        found[name] = p.detach().clone() * by
    for i in range(LAYERS):
        if f"layers.{i}.sa.q.weight" in found:
            qkv = [found.pop(f"layers.{i}.sa.{x}.weight") for x in "qkv"]
            found[f"layers.{i}.sa.qkv.weight"] = torch.cat(qkv)
    return found


def scales(model):
    """The package's own draw over a draw of the same seed that knows of no base."""
    found = {}
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        torch.manual_seed(1)
        plain = torch.nn.init.normal_(torch.empty_like(p)).std()
        torch.manual_seed(1)
        init.normal_(p)
        by = 1 / model.head.width_mult() if name == "head.weight" else 1.0
        found[f"scale.{name}"] = (p.detach().std() / plain * by).reshape(1)
    return found


def case(name, attends):
    torch.set_default_dtype(torch.float64)
    model = Model(HERE, attends)
    set_base_shapes(model, Model(BASE, attends), delta=Model(dict(hidden=16, head=4, inner=32), attends))
    tensors = scales(model)
    tensors["multiplier.head.weight"] = torch.tensor([1 / model.head.width_mult()])
    if attends:
        tensors["multiplier.sa"] = torch.tensor([math.sqrt(BASE["head"]) / HERE["head"]])
    torch.manual_seed(2)
    for key, p in model.named_parameters():
        if p.dim() > 1:
            init.normal_(p, std=0.3)
    # Numbers that f32 has: both begin alike.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.float().double())
    tensors |= {f"before.{key}": x for key, x in named(model).items()}
    optimizer = MuAdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    losses = []
    for _ in range(3):
        logits = model(IDS[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    tensors |= {f"after.{key}": x for key, x in named(model).items()}
    tensors |= {"losses": torch.stack(losses), "ids": IDS.double()}
    GOLDENS.mkdir(parents=True, exist_ok=True)
    save_file({key: x.float().contiguous() for key, x in tensors.items()}, GOLDENS / f"{name}.safetensors")


case("mlp", False)
case("transformer", True)
