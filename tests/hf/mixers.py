"""The mixers of `dsl/std` against their authors' code in transformers, or, where it is not there, against their papers' formulas written
plainly here, for `tests/numerics/mixers.rs`.

    python tests/hf/mixers.py all DIR    DIR/NAME.safetensors, each with ids, logits, gradients, logits of cached generation and weights

Formulas are evaluated in f64, modules of transformers in the f32 that they cast to. Sizes are those of the weights.
"""

import math
import pathlib
import sys

import torch
from safetensors.torch import load_file
from torch.func import functional_call
from torch.nn.functional import conv1d, kl_div, linear, log_softmax, logsigmoid, normalize, sigmoid, silu, softplus
from transformers import DiffLlamaConfig, FalconH1Config, KimiLinearConfig, Mamba2Config, MiniMaxConfig, OlmoHybridConfig, xLSTMConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.diffllama import modeling_diffllama
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

# Heads of every mixer, layers of every model.
HEADS, LAYERS = 4, 3
# Bounds of gradients; those of the mLSTM magnify the rounding of its f32 on both sides.
GRADIENTS = {"mlstm": 3e-4}
# Theirs is f32, too, and differs from processor to processor: 1.1e-5 on one with AVX-512.
LOGITS = {"gated_delta": 2e-5}


def rms(x, gain=1.0, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


def later(x):
    """Pairs of a query and a key behind it."""
    n = x.shape[1]
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def attention(q, k, bias=0.0):
    """Weights `[b, heads, i, j]` of keys."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(later(q), -torch.inf).softmax(-1)


def attend(q, k, v, bias=0.0):
    """`[b, t, heads, d]` each, with a bias `[.., heads, i, j]`."""
    return torch.einsum("bhij,bjhd->bihd", attention(q, k, bias), v)


def turn(x, base=10000.0):
    """Pairs `(i, i + size/2)` by `position / base^(2i/size)`."""
    size, n = x.shape[-1], x.shape[1]
    angle = torch.arange(n).to(x)[:, None, None] * base ** (-2.0 * torch.arange(size // 2).to(x) / size)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def short(x, filter):
    """A causal filter of each channel."""
    filter = filter.flatten(0, -2)
    return conv1d(x.transpose(1, 2), filter[:, None], padding=filter.shape[-1] - 1, groups=x.shape[-1])[..., : x.shape[1]].transpose(1, 2)


def call(module, weights, *args, **more):
    """A module of transformers with these weights, in f32."""
    module = module.float()
    names = {name for name, _ in module.named_parameters()}
    assert names == set(weights), names ^ set(weights)
    weights = {name: w.float().reshape(module.get_parameter(name).shape) for name, w in weights.items()}
    return functional_call(module, weights, args, more)


def mamba2(w, x, i, memo):
    """transformers' Mamba2Mixer, of the authors' mamba_ssm."""
    groups, members, size = w("v.bias").shape
    config = Mamba2Config(hidden_size=x.shape[-1], num_heads=groups * members, head_dim=size, state_size=w("B.bias").shape[-1],
                          n_groups=groups, expand=groups * members * size // x.shape[-1], layer_norm_epsilon=1e-5, chunk_size=16,
                          num_hidden_layers=LAYERS, time_step_limit=(0.0, float("inf")))
    parts = ["v", "B", "C"]
    weights = {
        "in_proj.weight": torch.cat([w(f"{name}.weight") for name in ["z", *parts, "step"]]),
        "conv1d.weight": torch.cat([w(f"{name}.filter").flatten(0, -2) for name in parts]),
        "conv1d.bias": torch.cat([w(f"{name}.bias").flatten() for name in parts]),
        "dt_bias": w("step.weight2"), "A_log": w("a.weight"), "D": w("y.weight"),
        "norm.weight": w("out.weight"), "out_proj.weight": w("out.weight2"),
    }
    return call(Mamba2Mixer(config, i), weights, x.float())


def falcon_h1(w, x, i, memo):
    """transformers' FalconH1Mixer and FalconH1Attention, as its layer adds them; factors are those of `tests/numerics/mixers.rs`."""
    groups, members, size = w("v.bias").shape
    config = FalconH1Config(hidden_size=x.shape[-1], mamba_d_ssm=groups * members * size, mamba_n_heads=groups * members, mamba_d_head=size,
                            mamba_n_groups=groups, mamba_d_state=w("B.bias").shape[-1], mamba_d_conv=w("v.filter").shape[-1],
                            mamba_chunk_size=16, num_attention_heads=HEADS, num_key_value_heads=2, num_hidden_layers=LAYERS, ssm_in_multiplier=1.25,
                            ssm_multipliers=[0.7, 0.5, 0.9, 1.4, 1.2], key_multiplier=0.7, attn_implementation="eager",
                            rope_parameters=dict(rope_type="default", rope_theta=500.0))
    config.head_dim = w("q.weight").shape[0] // HEADS
    parts = ["v", "B", "C"]
    mixer = modeling_falcon_h1.FalconH1Mixer(config, i)
    mixer.register_buffer("mup_vector", modeling_falcon_h1.compute_mup_vector(config), persistent=False)
    mixed = call(mixer, {
        "in_proj.weight": torch.cat([w(f"{name}.weight") for name in ["z", *parts, "step"]]),
        "conv1d.weight": torch.cat([w(f"{name}.filter").flatten(0, -2) for name in parts]),
        "conv1d.bias": torch.cat([w(f"{name}.bias").flatten() for name in parts]),
        "dt_bias": w("step.weight2"), "A_log": w("a.weight"), "D": w("y.weight"), "out_proj.weight": w("out.weight"),
    }, x.float())
    seen = 1.3 * x.float()
    n = x.shape[1]
    turned = modeling_falcon_h1.FalconH1RotaryEmbedding(config)(seen, torch.arange(n)[None])
    mask = torch.zeros(n, n).masked_fill(later(x), -torch.inf)[None, None]
    weights = {f"{their}_proj.weight": w(f"{ours}.weight") for their, ours in zip("qkv", "qkw")} | {"o_proj.weight": w("out.weight2")}
    attended = call(modeling_falcon_h1.FalconH1Attention(config, i), weights, seen, turned, mask)[0]
    return 0.6 * mixed + 0.9 * attended


def scaled_mlp(w, x, i, memo):
    """transformers' FalconH1MLP."""
    config = FalconH1Config(hidden_size=x.shape[-1], intermediate_size=w("a.weight").shape[0], mlp_multipliers=[0.8, 0.6])
    weights = {"gate_proj.weight": w("a.weight"), "up_proj.weight": w("a.weight2"), "down_proj.weight": w("out.weight")}
    return call(modeling_falcon_h1.FalconH1MLP(config), weights, x.float())


def gated_delta(w, x, i, memo):
    """transformers' OlmoHybridGatedDeltaNet, of flash-linear-attention's layer."""
    size, value = (w(f"{name}.filter").shape[-2] for name in "qv")
    config = OlmoHybridConfig(hidden_size=x.shape[-1], linear_num_value_heads=HEADS, linear_num_key_heads=HEADS, num_hidden_layers=LAYERS,
                              linear_key_head_dim=size, linear_value_head_dim=value, linear_conv_kernel_dim=w("q.filter").shape[-1],
                              linear_allow_neg_eigval=False)
    weights = {f"{name}_proj.weight": w(f"{name}.weight") for name in "qkv"} | {
        "conv1d.weight": torch.cat([w(f"{name}.filter").flatten(0, -2) for name in "qkv"]),
        "a_proj.weight": w("step.weight"), "dt_bias": w("step.weight2"), "A_log": w("a.weight"), "b_proj.weight": w("b.weight"),
        "g_proj.weight": w("out.weight"), "o_norm.weight": w("out.gain"), "o_proj.weight": w("out.weight2"),
    }
    return call(OlmoHybridGatedDeltaNet(config, i), weights, x.float())


def kda(w, x, i, memo):
    """transformers' KimiLinearDeltaAttention."""
    size = w("q.filter").shape[1]
    config = KimiLinearConfig(hidden_size=x.shape[-1], linear_num_heads=HEADS, linear_head_dim=size, num_hidden_layers=LAYERS,
                              linear_conv_kernel_dim=w("q.filter").shape[-1], rms_norm_eps=1e-5)
    weights = {f"{name}_proj.weight": w(f"{name}.weight") for name in "qkv"} | {
        "conv1d.weight": torch.cat([w(f"{name}.filter").flatten(0, 1) for name in "qkv"]),
        "forget_gate.f_a_proj.weight": w("step.weight"), "forget_gate.f_b_proj.weight": w("step.weight2"),
        "forget_gate.dt_bias": w("step.weight3"), "forget_gate.A_log": w("a.weight"), "b_proj.weight": w("b.weight"),
        "g_a_proj.weight": w("gate.weight"), "g_b_proj.weight": w("gate.weight2"), "o_norm.weight": w("out.gain"),
        "o_proj.weight": w("out.weight"),
    }
    return call(KimiLinearDeltaAttention(config, i), weights, x.float())


def lightning(w, x, i, memo):
    """transformers' MiniMaxLightningAttention."""
    config = MiniMaxConfig(hidden_size=x.shape[-1], num_attention_heads=HEADS, head_dim=x.shape[-1] // HEADS, num_hidden_layers=LAYERS,
                           block_size=16, layer_types=["linear_attention"] * LAYERS)
    parts = [w(f"{name}.weight").unflatten(0, (HEADS, -1)) for name in "qkv"]
    weights = {"qkv_proj.weight": torch.cat(parts, 1).flatten(0, 1), "norm.weight": w("out.gain"), "output_gate.weight": w("out.weight"),
               "out_proj.weight": w("out.weight2")}
    return call(MiniMaxLightningAttention(config, i), weights, x.float(), None, None)[0]


def mlstm(w, x, i, memo):
    """transformers' xLSTMLayer, of the authors' mlstm_kernels; its steps, whose running maximum begins at 0."""
    config = xLSTMConfig(hidden_size=x.shape[-1], num_heads=HEADS, qk_dim_factor=0.5, v_dim_factor=1.0, num_hidden_layers=LAYERS,
                         mode="inference", weight_mode="single", chunk_size=16, autocast_kernel_dtype="float32",
                         inference_state_dtype="float32", norm_eps=1e-6, eps=1e-6, gate_soft_cap=15.0, use_bias=False)
    weights = {f"{name}.weight": w(f"{name}.weight") for name in "qkv"} | {
        "igate_preact.weight": w("i.weight"), "igate_preact.bias": w("i.weight2"), "fgate_preact.weight": w("f.weight"),
        "fgate_preact.bias": w("f.weight2"), "multihead_norm.weight": w("normed.weight"), "ogate_preact.weight": w("out.weight"),
        "out_proj.weight": w("out.weight2"),
    }
    return call(xLSTMLayer(config), weights, x.float())[0]


def differential(w, x, i, memo):
    """transformers' DiffLlamaAttention, whose pairs of heads are first all first, then all second; gains are in the last matrix."""
    size = w("more.weight").shape[0]
    config = DiffLlamaConfig(hidden_size=x.shape[-1], num_attention_heads=2 * HEADS, num_key_value_heads=2 * HEADS, head_dim=size,
                             num_hidden_layers=LAYERS, rms_norm_eps=1e-5, attn_implementation="eager")
    value = w("v.weight").unflatten(0, (HEADS, 2, size)).transpose(0, 1).flatten(0, 2)
    weights = {
        "q_proj.weight": torch.cat([w("a.weight"), w("b.weight")]), "k_proj.weight": torch.cat([w("a.weight2"), w("b.weight2")]),
        "v_proj.weight": value, "o_proj.weight": w("out.weight") * w("out.gain").repeat(HEADS),
        "lambda_q1": w("more.weight"), "lambda_k1": w("more.weight2"), "lambda_q2": w("less.weight"), "lambda_k2": w("less.weight2"),
    }
    x = x.float()
    n = x.shape[1]
    turned = modeling_diffllama.DiffLlamaRotaryEmbedding(config)(x, torch.arange(n)[None])
    mask = torch.zeros(n, n).masked_fill(later(x), -torch.inf)[None, None]
    return call(modeling_diffllama.DiffLlamaAttention(config, i), weights, x, turned, mask)[0]


def alibi(w, x, i, memo):
    """Attention with transformers' slopes of BLOOM."""
    slopes = build_alibi_tensor(torch.ones(1, 2), HEADS, torch.float64)[:, 0, 1]
    q, k, v = (heads(linear(x, w(f"{name}.weight"))) for name in "qkv")
    place = torch.arange(x.shape[1])
    bias = -slopes[:, None, None] * (place[:, None] - place)
    return linear(attend(q, k, v, bias).flatten(2), w("out.weight"))


def forgetting(w, x, i, memo):
    """2503.02130, equation 5: scores plus sums of the logarithms of gates behind the key."""
    q, k, v = (heads(linear(x, w(f"{name}.weight"))) for name in "qkv")
    f = logsigmoid(linear(x, w("f.weight"), w("f.bias"))).transpose(1, 2)
    between = torch.stack([f * (torch.arange(f.shape[-1]) > j) for j in range(f.shape[-1])], -1).cumsum(-2)
    return linear(attend(q, k, v, between).flatten(2), w("out.weight"))


def linear_attention(w, x, i, memo):
    """2006.16236, equation 9, as sums over pairs."""
    q, k = (torch.nn.functional.elu(heads(linear(x, w(f"{name}.weight")))) + 1 for name in "ab")
    v = heads(linear(x, w("v.weight")))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(later(x), 0)
    y = torch.einsum("bhij,bjhd->bihd", scores, v) / (scores.sum(-1).transpose(1, 2)[..., None] + 1e-6)
    return linear(y.flatten(2), w("out.weight"))


def retnet(w, x, i, memo):
    """2307.08621, equation 5 and 8, as sums over pairs."""
    q, k, v = (heads(linear(x, w(f"{name}.weight"))) for name in "qkv")
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS).to(x))
    place = torch.arange(x.shape[1]).to(x)
    decay = gamma[:, None, None] ** (place[:, None] - place).clamp(min=0)
    scores = torch.einsum("bihd,bjhd->bhij", turn(q), turn(k)) / q.shape[-1] ** 0.5 * decay
    y = rms(torch.einsum("bhij,bjhd->bihd", scores.masked_fill(later(x), 0), v))
    return linear(silu(linear(x, w("out.weight"))) * y.flatten(2), w("out.weight2"))


def gla(w, x, i, memo):
    """2312.06635, equation 4 as sums over pairs, with section 4.4's gates."""
    q, k, v = (heads(linear(x, w(f"{name}.weight"))) for name in "qkv")
    gate = heads(logsigmoid(linear(linear(x, w("a.weight")), w("a.weight2"), w("a.bias").flatten())) / 16)
    so_far = gate.cumsum(1)
    pairs = torch.exp(so_far[:, :, None] - so_far[:, None]).masked_fill(later(x)[..., None, None], 0)
    scores = torch.einsum("bihd,bijhd,bjhd->bhij", q, pairs, k) / q.shape[-1] ** 0.5
    y = rms(torch.einsum("bhij,bjhd->bihd", scores, v), w("out.gain"), 1e-5)
    return linear(silu(linear(x, w("out.weight"))) * y.flatten(2), w("out.weight2"))


def deltanet(w, x, i, memo):
    """2406.06484, equation 2: what a key reads is replaced."""
    q, k, v = (heads(silu(short(linear(x, w(f"{name}.weight")), w(f"{name}.filter")))) for name in "qkv")
    q, k = (u / (u.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    beta = sigmoid(linear(x, w("b.weight")))
    state, out = torch.zeros(*k[:, 0].shape, v.shape[-1]).to(x), []
    for t in range(x.shape[1]):
        own, b = k[:, t, :, :, None], beta[:, t, :, None, None]
        old = (own * state).sum(-2, keepdim=True)
        state = state + b * own * (v[:, t, :, None] - old)
        out.append((q[:, t, :, :, None] * state).sum(-2) / q.shape[-1] ** 0.5)
    return linear(rms(torch.stack(out, 1), w("out.gain"), 1e-5).flatten(2), w("out.weight"))


def rwkv7(w, x, i, memo):
    """2503.14456, equations 4 to 21, with the names of its appendix."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    mixed = {name: x + (before - x) * w(f"x{name}.weight") for name in "rwkvag"}
    full = lambda name: heads(linear(mixed[name[0]], w(f"{name[1:]}.weight")))
    low = lambda name, own, function: linear(function(linear(mixed[name], w(f"{own}.weight"))), w(f"{own}.weight2"))
    r, keys, v = full("rr"), full("kkeys"), full("vown")
    decay = torch.exp(-math.exp(-0.5) * sigmoid(w("w.weight") + heads(linear(linear(mixed["w"], w("w.weight2")).tanh(), w("w.weight3")))))
    if i == 0:
        memo["first"] = v
    nu = sigmoid(w("v.weight") + heads(linear(linear(mixed["v"], w("v.weight2")), w("v.weight3"))))
    v = v + (memo["first"] - v) * nu
    a = sigmoid(w("rate.weight") + heads(linear(linear(mixed["a"], w("rate.weight2")), w("rate.weight3"))))
    gate = low("g", "gate", sigmoid)
    kappa = normalize(keys * w("unit.weight"), dim=-1)
    k = keys * (1 + (a - 1) * w("k.weight"))
    state, out = torch.zeros(x.shape[0], *v.shape[2:], k.shape[-1]).to(x), []
    for t in range(x.shape[1]):
        unit = kappa[:, t, :, None]
        state = state * decay[:, t, :, None] - (state * unit).sum(-1, keepdim=True) * (unit * a[:, t, :, None]) + v[:, t, ..., None] * k[:, t, :, None]
        out.append((state * r[:, t, :, None]).sum(-1))
    o = torch.stack(out, 1)
    o = (o - o.mean(-1, keepdim=True)) * torch.rsqrt(o.var(-1, keepdim=True, unbiased=False) + 64e-5)
    o = o * w("normed.weight") + w("normed.weight2") + (r * k * w("bonus.weight")).sum(-1, keepdim=True) * v
    return linear(o.flatten(2) * gate, w("out.weight"))


def canon(w, x, i, memo):
    """2512.17351, equation 1, without the residual, which the stream adds."""
    return short(x, w("out.filter"))


def only(seen):
    """A bias that leaves these pairs."""
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def picked(chosen, block, n):
    """Pairs `[b, heads, i, j]` of keys whose block is among `[b, heads, i, count]`."""
    of_key = torch.arange(n) // block
    return (chosen[..., None] == of_key).any(-2) & ~later(torch.zeros(1, n))


def moba(w, x, i, memo):
    """github.com/MoonshotAI/MoBA, moba_naive: `block` and `blocks` are those of `tests/numerics/mixers.rs`."""
    block, count, n = 8, 3, x.shape[1]
    q, k = (turn(heads(linear(x, w(f"{name}.weight")))) for name in "qk")
    v = heads(linear(x, w("v.weight")))
    means = torch.stack([k[:, first : first + block].mean(1) for first in range(0, n, block)], 1)
    gate = torch.einsum("bihd,bchd->bhic", q, means)
    own = (torch.arange(n) // block)[:, None] - torch.arange(means.shape[1])
    gate = gate.masked_fill(own < 0, -torch.inf).masked_fill(own == 0, torch.inf)
    chosen = gate.topk(min(count, means.shape[1]), -1)[1]
    return linear(attend(q, k, v, only(picked(chosen, block, n))).flatten(2), w("out.weight"))


def dsa(w, x, i, memo):
    """github.com/deepseek-ai/DeepSeek-V3.2-Exp, Indexer, and the loss of its paper; `tokens` are those of `tests/numerics/mixers.rs`."""
    count, n = 24, x.shape[1]
    q, k = (turn(heads(linear(x, w(f"{name}.weight")))) for name in "qk")
    v = heads(linear(x, w("v.weight")))
    half, x = w("b.gain").shape[0] // 2, x.detach()
    a = linear(x, w("a.weight")).unflatten(-1, (-1, 2 * half))
    b = torch.nn.functional.layer_norm(linear(x, w("b.weight")), (2 * half,), w("b.gain"), w("b.weight2"), 1e-6)[:, :, None]
    a, b = (torch.cat([turn(y[..., :half]), y[..., half:]], -1) for y in (a, b))
    weights = linear(x, w("w.weight")) * a.shape[2] ** -0.5 * (2 * half) ** -0.5
    score = (torch.einsum("bihd,bjd->bihj", a, b[:, :, 0]).relu() * weights[..., None]).sum(2)
    # Heads whose products are all below zero leave scores of 0: of equal ones the first is taken.
    order = score.masked_fill(later(x), -torch.inf).sort(stable=True, dim=-1, descending=True)[1]
    chosen = order[..., : min(count, n)]
    seen = torch.zeros(x.shape[0], n, n, dtype=torch.bool).scatter(-1, chosen, True) & ~later(x)
    # The divergence of the indexer from the weights of all heads, each over the tokens that were chosen.
    weights = attention(q, k, only(seen[:, None])).detach().sum(1)
    weights = weights / weights.sum(-1, keepdim=True)
    index = score.masked_fill(~seen, -torch.inf).log_softmax(-1)
    memo.setdefault("losses", []).append(kl_div(index, weights, reduction="none").masked_fill(~seen, 0.0).sum(-1).mean())
    return linear(attend(q, k, v, only(seen[:, None])).flatten(2), w("out.weight"))


def nsa(w, x, i, memo):
    """2502.11089 with the means of github.com/fla-org/native-sparse-attention; sizes are those of `tests/numerics/mixers.rs`."""
    block, count, window, groups, n = 8, 4, 11, 2, x.shape[1]
    q = turn(heads(linear(x, w("q.weight"))))
    k = turn(linear(x, w("k.weight")).unflatten(-1, (groups, -1)))
    v = linear(x, w("v.weight")).unflatten(-1, (groups, -1))
    whole = n // block
    few, of_few = (y[:, : whole * block].unflatten(1, (whole, block)).mean(2).repeat_interleave(HEADS // groups, 2) for y in (k, v))
    k, v = (y.repeat_interleave(HEADS // groups, 2) for y in (k, v))
    complete = torch.arange(whole) < ((torch.arange(n) + 1) // block)[:, None]
    scores = torch.einsum("bihd,bchd->bhic", q, few) / q.shape[-1] ** 0.5
    p = scores.masked_fill(~complete, -torch.inf).softmax(-1).nan_to_num()
    far = torch.einsum("bhic,bchd->bihd", p, of_few)
    blocks = -(-n // block)
    # Heads of a group choose together.
    rank = torch.nn.functional.pad(p.unflatten(1, (groups, -1)).sum(2), (0, blocks - whole), value=-1.0)
    own = (torch.arange(n) // block)[:, None] - torch.arange(blocks)
    forced = ((own >= 0) & (own < 2)) | ((own >= 0) & (torch.arange(blocks) == 0))
    incomplete = torch.nn.functional.pad(~complete, (0, blocks - whole), value=True)
    rank = rank.masked_fill(incomplete, -1.0).masked_fill(forced, torch.inf)
    best, chosen = rank.topk(count, -1)
    chosen = chosen.masked_fill(best < 0, -1).repeat_interleave(HEADS // groups, 1)
    near = torch.arange(n)[:, None] - torch.arange(n) < window
    branches = [far, attend(q, k, v, only(picked(chosen, block, n))), attend(q, k, v, only(near))]
    gates = [sigmoid(linear(x, w(f"{name}_gate.weight")))[..., None] for name in ("far", "best", "near")]
    return linear(sum(gate * branch for gate, branch in zip(gates, branches)).flatten(2), w("out.weight"))


MIXERS = [alibi, canon, deltanet, differential, dsa, falcon_h1, forgetting, gated_delta, gla, kda, lightning, linear_attention, mamba2, mlstm, moba, nsa, retnet, rwkv7, scaled_mlp]


def model(weights, ids, mixer):
    x, memo = weights["embed.weight"][ids], {}
    for i in range(LAYERS):
        # A filter begins with the token itself, theirs ends with it.
        own = lambda name, i=i: weights[f"layers.{i}.own.{name}"].flip([-1] if name.endswith(".filter") else [])
        x = x + mixer(own, rms(x, own("norm.weight")), i, memo)
    # Losses of mixers of their own are added to that of the text.
    return linear(rms(x, weights["norm.weight"]), weights["head.weight"]), sum(memo.get("losses", []))


def apart(found, right):
    """The largest difference, in parts of the largest number."""
    return ((found - right).abs().max() / right.abs().max().clamp(min=1e-12)).item()


def check(file, mixer):
    held = load_file(file)
    weights = {name[8:]: w.double().requires_grad_() for name, w in held.items() if name.startswith("weights.")}
    ids = held["ids"]
    logits, losses = model(weights, ids[:, :-1], mixer)
    (losses - log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()).backward()
    errors = {"logits": (apart(held["logits"].double(), logits), LOGITS.get(mixer.__name__, 1e-5))}
    cached = held["cached"].double()
    errors["cached"] = (apart(cached, logits[:, -cached.shape[1] :]), 1e-5)
    for name, w in weights.items():
        right = w.grad if w.grad is not None else torch.zeros_like(w)
        # A gradient that is zero holds what rounding leaves of other gradients.
        found = held[f"gradients.{name}"].double()
        error = found.abs().max().item() if right.abs().max() < 1e-9 else apart(found, right)
        errors[f"gradient of {name}"] = (error, GRADIENTS.get(mixer.__name__, 1e-4))
    worst = max((e, name) for name, (e, _) in errors.items() if name.startswith("gradient"))
    print(f"{mixer.__name__}: logits {errors['logits'][0]:.1e}, cached {errors['cached'][0]:.1e}, {worst[1]} {worst[0]:.1e}")
    return [f"{mixer.__name__}: {name} differs by {e:.1e}" for name, (e, bound) in errors.items() if not e < bound]


def main():
    place = pathlib.Path(sys.argv[2])
    present = {mixer.__name__: mixer for mixer in MIXERS}
    files = sorted(place.glob("*.safetensors"))
    wrong = [line for file in files for line in check(file, present[file.stem])]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(files)} mixers")


if __name__ == "__main__":
    main()
