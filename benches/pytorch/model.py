"""LA, DR and DR+DA of the paper and dense layers in PyTorch, as one who knows PyTorch would write them for speed: SDPA, grouped
products, one sort of the slots for each routing, explicit casts where autocast would cast, everything inside `torch.compile`.

Tensors have dreamc's names, so that `test_model.py` can load what `dreamc probe` writes and compare logits and gradients.
"""

import json
import math
import subprocess

import torch
import torch.nn.functional as F
import torch.utils.checkpoint


# Grouped products by one operation, or expert by expert: which is faster differs by device and version.
GROUPED_MM = False


def load_spec(dreamc, path, overrides=()):
    """The model section with every default filled in, from dreamc itself."""
    command = [dreamc, "show", path, "--json"] + [w for o in overrides for w in ("--set", o)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def low_rank(router):
    return router["form"]["low_rank"]


def norm(x, gain, eps=1e-6):
    return F.rms_norm(x.float(), (x.shape[-1],), gain, eps)


def rope_tables(positions, size, base, half_reversed=False, depths=0):
    """Cosines and sines for each position: `[positions, size / 2]`."""
    pairs = torch.arange(size // 2, device=positions.device)
    angles = base ** (-2.0 * pairs.double() / size)
    at = positions.double()[:, None].expand(-1, size // 2)
    if half_reversed:
        at = torch.where(pairs % 2 == 0, at, depths - 1 - at)
    return (at * angles).cos().float(), (at * angles).sin().float()


def rotate(x, cosine, sine):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def grouped(x, w, offsets, dtype):
    """Rows `offsets[e - 1]..offsets[e]` of `x` times `w[e]` transposed."""
    x, w = x.to(dtype), w.to(dtype)
    if GROUPED_MM or x.is_cuda:
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets)
    ends = [0] + offsets.tolist()
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(zip(ends, ends[1:]))])


class Router(torch.nn.Module):
    """Section 4: low rank, sigmoid scores, selection by logit and bias."""

    def __init__(self, experts, query, hidden):
        super().__init__()
        self.query = Linear(query, hidden)
        self.keys = Linear(experts, query)
        self.q_norm, self.k_norm = Gain(query), Gain(query)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x, table, active, dtype):
        q = rotate(norm(F.linear(x.to(dtype), self.query.weight.to(dtype)), self.q_norm.weight), *table)
        k = norm(self.keys.weight, self.k_norm.weight)
        z = F.linear(q.to(dtype), k.to(dtype)).float() / math.sqrt(k.shape[-1])
        chosen = (z + self.bias).topk(active, dim=-1).indices
        return z.gather(-1, chosen).sigmoid(), chosen


class Linear(torch.nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(*shape) * math.sqrt(1.0 / (5 * shape[-1])))


class Gain(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


class Attention(torch.nn.Module):
    """Over the sequence or over depth; with projection experts where the layer recurs."""

    def __init__(self, spec, hidden, depth, recurrent):
        super().__init__()
        self.heads, self.kv, self.size = spec["heads"], spec["kv_heads"], spec["head_size"]
        self.rope = spec["rope"]
        width = (self.heads + 2 * self.kv) * self.size
        self.norm, self.q_norm, self.k_norm = Gain(hidden), Gain(self.size), Gain(self.size)
        lead = (depth,) if recurrent else ()
        self.qkv, self.out = Linear(*lead, width, hidden), Linear(*lead, hidden, self.heads * self.size)
        self.recurrent = recurrent
        if recurrent:
            self.qkv.shared, self.out.shared = Linear(width, hidden), Linear(hidden, self.heads * self.size)
            self.router = Router(depth, low_rank(spec["projection"]["router"])["query"], hidden)

    def project(self, x, matrices, routing, dtype):
        """`s · W_e x + stop_gradient(s) · W_shared x`, or one matrix."""
        if not self.recurrent:
            return F.linear(x.to(dtype), matrices.weight.to(dtype))
        score, order, back, offsets = routing
        routed = grouped(x.to(dtype)[order], matrices.weight, offsets, dtype)[back]
        shared = F.linear(x.to(dtype), matrices.shared.weight.to(dtype))
        return score.to(dtype) * routed + score.detach().to(dtype) * shared

    def route(self, x, tables, dtype):
        if not self.recurrent:
            return None
        score, chosen = self.router(x, tables, 1, dtype)
        return (score, *sort(chosen[..., 0], self.router.bias.numel()))

    def queries(self, x, routing, dtype):
        qkv = self.project(x, self.qkv, routing, dtype).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split([self.heads, self.kv, self.kv], dim=-2)
        return norm(q, self.q_norm.weight), norm(k, self.k_norm.weight), v


def sort(choices, experts):
    """Slots by expert, where each slot went, and where each expert's slots end."""
    order = choices.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    offsets = torch.bincount(choices, minlength=experts).cumsum(0).to(torch.int32)
    return order, back, offsets


class Experts(torch.nn.Module):
    def __init__(self, spec, hidden):
        super().__init__()
        count, inner = spec["count"], spec["intermediate"]
        self.active = spec["active"]
        self.norm = Gain(hidden)
        self.gate, self.up, self.down = Linear(count, inner, hidden), Linear(count, inner, hidden), Linear(count, hidden, inner)
        self.router = Router(count, low_rank(spec["router"])["query"], hidden)

    def forward(self, x, table, dtype):
        x = norm(x, self.norm.weight)
        score, chosen = self.router(x, table, self.active, dtype)
        gates = score / score.sum(-1, keepdim=True)
        order, back, offsets = sort(chosen.flatten(), self.router.bias.numel())
        rows = x.to(dtype)[order // self.active]
        inner = F.silu(grouped(rows, self.gate.weight, offsets, dtype)) * grouped(rows, self.up.weight, offsets, dtype)
        y = grouped(inner, self.down.weight, offsets, dtype)[back].unflatten(0, (-1, self.active))
        return (gates.unsqueeze(-1) * y).sum(1)


class Mlp(torch.nn.Module):
    def __init__(self, spec, hidden):
        super().__init__()
        inner = spec["intermediate"]
        self.norm = Gain(hidden)
        self.gate, self.up, self.down = Linear(inner, hidden), Linear(inner, hidden), Linear(hidden, inner)

    def forward(self, x, _, dtype):
        x = norm(x, self.norm.weight).to(dtype)
        gate, up, down = (m.weight.to(dtype) for m in (self.gate, self.up, self.down))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Layer(torch.nn.Module):
    """`sa > ea`, `sa > mlp` or, recurrent with depth attention, `(da | sa) > ea`."""

    def __init__(self, components, hidden, depth, recurrent):
        super().__init__()
        self.sa = Attention(components["sa"]["sequence"], hidden, depth, recurrent)
        self.da = Attention(components["da"]["depth"], hidden, depth, recurrent) if "da" in components else None
        if "ea" in components:
            self.ea = Experts(components["ea"]["experts"], hidden)
        else:
            self.mlp = Mlp(components["mlp"]["mlp"], hidden)
        self.residual_norm = Gain(hidden) if recurrent else None

    def forward(self, x, batch, tables, cache, dtype, past=None):
        """`x[tokens, h]`; gives `y` and the keys and values of this depth. `past` is keys and values of the text so far, with room for
        one more, and how many there are."""
        t = x
        if self.da is not None:
            h = norm(x, self.da.norm.weight)
            routing = self.da.route(h, tables["da.router"], dtype)
            q, k, v = self.da.queries(h, routing, dtype)
            q, k = (rotate(y, *tables["da"]).to(dtype) for y in (q, k))
            cache = (torch.cat([cache[0], k[None]]), torch.cat([cache[1], v[None]])) if cache else (k[None], v[None])
            # One query for each token, over depths: [tokens, heads, 1, d] and [tokens, heads, depths, d].
            keys, values = (y.permute(1, 2, 0, 3) for y in cache)
            o = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values.to(dtype), enable_gqa=True)
            t = t + self.da.project(o.squeeze(2).flatten(1), self.da.out, routing, dtype)
        h = norm(x, self.sa.norm.weight)
        routing = self.sa.route(h, tables.get("sa.router"), dtype)
        q, k, v = self.sa.queries(h, routing, dtype)
        q, k = (rotate(y, *tables["sa"]).to(dtype) for y in (q, k))
        q, k, v = (y.unflatten(0, (batch, -1)).transpose(1, 2) for y in (q, k, v.to(dtype)))
        if past is not None:
            keys, values, length = past
            keys[:, :, length : length + 1], values[:, :, length : length + 1] = k, v
            k, v = keys[:, :, : length + 1], values[:, :, : length + 1]
        causal = past is None
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        t = t + self.sa.project(o.flatten(1), self.sa.out, routing, dtype)
        wide = self.ea if hasattr(self, "ea") else self.mlp
        y = t + wide(t, tables.get("ea.router"), dtype)
        return (norm(y, self.residual_norm.weight) if self.residual_norm is not None else y), cache


class Model(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        model = spec["model"]
        hidden, (body,) = model["hidden"], model["body"]
        self.recurrent = "recur" in body
        self.depth = int(next(iter(body.values()))["count"])
        self.components = model["components"]
        self.embed, self.head = Linear(model["vocab"], hidden), Linear(model["vocab"], hidden)
        count = 1 if self.recurrent else self.depth
        self.layers = torch.nn.ModuleList(Layer(self.components, hidden, self.depth, self.recurrent) for _ in range(count))
        self.norm = None if self.recurrent else Gain(hidden)

    def tables(self, depth, tokens, device):
        """Rotations of one application: the sequence's, and those of depth."""
        out = {}
        for name, component in self.components.items():
            (kind, c), = component.items()
            at = torch.tensor([depth], device=device)

            def of_depth(size, rope):
                return rope_tables(at, size, rope["base"], rope["half_reversed"], self.depth)

            if kind == "sequence":
                cosine, sine = rope_tables(tokens, c["head_size"], c["rope"]["base"])
                out[name] = cosine[:, None], sine[:, None]
            elif kind == "depth":
                out[name] = tuple(y[:, None] for y in of_depth(c["head_size"], c["rope"]))
            if kind == "mlp":
                continue
            router = low_rank(c["router"] if kind == "experts" else c["projection"]["router"])
            out[name + ".router"] = of_depth(router["query"], router["rope"])
        return out

    def forward(self, ids, dtype):
        batch, length = ids.shape
        tokens = torch.arange(length, device=ids.device).repeat(batch)
        x, cache = self.embed.weight[ids].flatten(0, 1), None
        for depth in range(self.depth):
            layer = self.layers[0 if self.recurrent else depth]
            x, cache = layer(x, batch, self.tables(depth, tokens, ids.device), cache, dtype)
        x = norm(x, self.norm.weight) if self.norm is not None else x
        return x.unflatten(0, (batch, length))

    @torch.inference_mode()
    def write(self, count, dtype):
        """Writes the likeliest tokens one at a time; yields after each."""
        c = self.components["sa"]["sequence"]
        shape = (1, c["kv_heads"], count, c["head_size"])
        past = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(self.depth)]
        token = torch.zeros(1, dtype=torch.long)
        for length in range(count):
            x, cache, at = self.embed.weight[token], None, torch.tensor([length])
            for depth in range(self.depth):
                layer = self.layers[0 if self.recurrent else depth]
                x, cache = layer(x, 1, self.tables(depth, at, x.device), cache, dtype, (*past[depth], length))
            x = norm(x, self.norm.weight) if self.norm is not None else x
            token = F.linear(x.to(dtype), self.head.weight.to(dtype)).argmax(-1)
            yield int(token)

    def loss(self, ids, targets, dtype, chunk=4096):
        """Cross-entropy a few rows of logits at a time, each recomputed on the way back: the logits of all rows do not fit."""

        def part(x, w, t):
            return F.cross_entropy(F.linear(x, w).float(), t, reduction="sum")

        x, w = self(ids, dtype).flatten(0, 1).to(dtype), self.head.weight.to(dtype)
        parts = zip(x.split(chunk), targets.flatten().split(chunk))
        total = sum(torch.utils.checkpoint.checkpoint(part, a, w, t, use_reentrant=False) for a, t in parts)
        return total / targets.numel()
