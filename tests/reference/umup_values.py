"""Writes tests/goldens/umup: an MLP and a transformer by the authors' package `unit-scaling` 0.3.5.

    pip install torch unit-scaling safetensors
    python tests/reference/umup_values.py

u-µP (Blake and others, 2407.17465) multiplies every product, activation, attention and branch by a number of its own and keeps
weights of deviation 1. Of each weight `scale.NAME` is the product of these numbers, read off the package's own functions, and with it the
deviation of its first values; weights before (`before.NAME`) and after three steps of AdamW (`after.NAME`) have it inside. `multiplier.sa`
is the scale of scores. All in float64, kept as f32. `tests/numerics/rates.rs` compares.
"""

import pathlib

import torch
import unit_scaling as uu
import unit_scaling.functional as U
from safetensors.torch import save_file

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens" / "umup"
VOCAB, HIDDEN, LAYERS, HEADS, RATE, BETAS, EPS = 23, 32, 2, 4, 0.1, (0.9, 0.95), 1e-13
IDS = torch.tensor([[(7 * r + 5 * i + i * i) % VOCAB for i in range(9)] for r in range(3)])
SEQUENCE = IDS.shape[1] - 1


class Residual(torch.nn.Module):
    """A branch of a model of networks alone: appendix G with one kind of branch."""

    def __init__(self, i):
        super().__init__()
        self.tau, self.mlp_norm, self.mlp = (LAYERS + i) ** -0.5, uu.RMSNorm(HIDDEN, eps=1e-8), uu.MLP(HIDDEN)

    def forward(self, x):
        return U.residual_apply(lambda x: self.mlp(self.mlp_norm(x)), x, self.tau)


def model(attends):
    if attends:
        made = uu.TransformerDecoder(HIDDEN, VOCAB, LAYERS, HEADS)
    else:
        layers = uu.DepthSequential(*(Residual(i) for i in range(LAYERS)))
        made = torch.nn.Sequential()
        made.embedding, made.layers = uu.Embedding(VOCAB, HIDDEN), layers
        made.final_norm, made.projection = uu.RMSNorm(HIDDEN), uu.LinearReadout(HIDDEN, VOCAB)
    for part in made.modules():
        if isinstance(part, uu.RMSNorm):
            part.eps = 1e-8
    return made


def ratio(scaled, plain):
    """The number by which the package multiplies."""
    by = scaled / plain
    assert by.std() < 1e-9 * by.abs().mean(), by
    return by.mean().item()


def product(module):
    x = torch.randn(3, module.weight.shape[1])
    return ratio(module(x), torch.nn.functional.linear(x, module.weight))


def network():
    a, b = torch.randn(2, 5, 7).unbind()
    return ratio(U.silu_glu(a, b), a * torch.nn.functional.silu(b))


def attention():
    q, k, v = torch.randn(3, 1, 1, SEQUENCE, HIDDEN // HEADS).unbind()
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=HEADS / HIDDEN)
    return ratio(U.scaled_dot_product_attention(q, k, v, is_causal=True), plain)


def multipliers(made):
    """By name as dreamc has it: the products of numbers from a weight to the stream."""
    found = {"embed.weight": 1.0, "head.weight": product(made.projection)}
    kept = 1.0
    one, none = torch.ones(1), torch.zeros(1)
    for i, layer in enumerate(made.layers):
        branches = [("mlp", layer.mlp, getattr(layer, "mlp_tau", None) or layer.tau)]
        if hasattr(layer, "mhsa"):
            branches.insert(0, ("sa", layer.mhsa, layer.mhsa_tau))
        for name, part, tau in branches:
            # The stream is divided at every branch; ours is not, and is as much larger.
            kept *= U.residual_add(none, one, tau).item()
            adds = U.residual_add(one, none, tau).item() / kept
            of = f"layers.{i}.{name}"
            if name == "sa":
                found[f"{of}.qkv.weight"] = product(part.linear_qkv)
                found[f"{of}.out.weight"] = product(part.linear_o) * attention() * adds
            else:
                found[f"{of}.up.weight"] = product(part.linear_1)
                found[f"{of}.gate.weight"] = product(part.linear_gate)
                found[f"{of}.down.weight"] = product(part.linear_2) * network() * adds
    return found


NAMES = {
    "embedding": "embed",
    "projection": "head",
    "mhsa.linear_qkv": "sa.qkv",
    "mhsa.linear_o": "sa.out",
    "mlp.linear_1": "mlp.up",
    "mlp.linear_gate": "mlp.gate",
    "mlp.linear_2": "mlp.down",
}


def parameters(made):
    for name, p in made.named_parameters():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        yield name, p


def case(name, attends):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    made = model(attends)
    by = multipliers(made)
    tensors = {f"scale.{key}": torch.tensor([x]) for key, x in by.items()}
    if attends:
        tensors["multiplier.sa"] = torch.tensor([HEADS / HIDDEN])
    # Numbers that f32 has, as dreamc keeps them: both begin alike.
    with torch.no_grad():
        for key, p in parameters(made):
            p.copy_((p * by[key]).float().double() / by[key])
    now = lambda: {key: p.detach() * by[key] for key, p in parameters(made)}
    tensors |= {f"before.{key}": x for key, x in now().items()}
    optimizer = uu.optim.AdamW(made.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    losses = []
    for _ in range(3):
        x = made.layers(made.embedding(IDS[:, :-1]))
        logits = made.projection(made.final_norm(x))
        loss = U.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    tensors |= {f"after.{key}": x for key, x in now().items()}
    tensors |= {"losses": torch.stack(losses), "ids": IDS.double()}
    GOLDENS.mkdir(parents=True, exist_ok=True)
    save_file({key: x.float().contiguous() for key, x in tensors.items()}, GOLDENS / f"{name}.safetensors")


case("mlp", False)
case("transformer", True)
