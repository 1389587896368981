"""Small random models of Ouro and Huginn for `tests/numerics/export.rs`, whose classes are not in transformers: written from
their papers and published code (2510.25741, section 3; 2502.05171, section 2), plainly, without it and in f64.

    python tests/hf/loops.py make DIR    DIR/NAME/ with config.json, model.safetensors and expected.safetensors, for each
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

VOCAB, HIDDEN, HEADS, SIZE, INNER, EPS = 61, 24, 3, 8, 20, 1e-3


def norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain


def attend(q, k, v):
    """`[b, t, heads, size]` each -> `[b, t, heads * size]`."""
    q, k, v = (u.transpose(1, 2) for u in (q, k, v))
    later = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
    scores = (q @ k.transpose(2, 3) / SIZE**0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def angles(t, base):
    return torch.arange(t).double()[:, None, None] * base ** (-2.0 * torch.arange(SIZE // 2).double() / SIZE)


def halves(x, turn):
    """Pairs `(i, i + size/2)`."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1)


def neighbours(x, turn):
    """Pairs `(2i, 2i + 1)`."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], -1).flatten(-2)


def heads(x):
    return x.unflatten(-1, (HEADS, SIZE))


class Drawn(dict):
    """Weights by name, drawn where they are first read."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, name, *shape):
        if name not in self:
            normal = torch.randn(shape, generator=self.generator)
            wide = 1.0 if "embed" in name or "wte" in name else 0.8 / shape[-1] ** 0.5
            self[name] = 1 + 0.2 * normal if len(shape) == 1 else wide * normal
        return self[name].double()


def ouro(w, ids, layers=2, passes=3):
    x, turn = w("model.embed_tokens.weight", VOCAB, HIDDEN)[ids], angles(ids.shape[1], 500.0)
    for _ in range(passes):
        for i in range(layers):
            of = lambda name, *shape: w(f"model.layers.{i}.{name}.weight", *shape)
            n = norm(x, of("input_layernorm", HIDDEN))
            q, k, v = (heads(linear(n, of(f"self_attn.{p}_proj", HIDDEN, HIDDEN))) for p in "qkv")
            y = linear(attend(halves(q, turn), halves(k, turn), v), of("self_attn.o_proj", HIDDEN, HIDDEN))
            x = x + norm(y, of("input_layernorm_2", HIDDEN))
            n = norm(x, of("post_attention_layernorm", HIDDEN))
            inner = silu(linear(n, of("mlp.gate_proj", INNER, HIDDEN))) * linear(n, of("mlp.up_proj", INNER, HIDDEN))
            x = x + norm(linear(inner, of("mlp.down_proj", HIDDEN, INNER)), of("post_attention_layernorm_2", HIDDEN))
        x = norm(x, w("model.norm.weight", HIDDEN))
    w("model.early_exit_gate.weight", 1, HIDDEN), w("model.early_exit_gate.bias", 1)
    return linear(x, w("lm_head.weight", VOCAB, HIDDEN))


def huginn(w, ids, passes=3):
    turn = angles(ids.shape[1], 700.0)

    def block(x, place):
        of = lambda name, *shape: w(f"transformer.{place}.{name}", *shape)
        q, k, v = (heads(u) for u in linear(norm(x, of("norm_1.weight", HIDDEN)), of("attn.Wqkv.weight", 3 * HIDDEN, HIDDEN)).chunk(3, -1))
        bias = of("attn.qk_bias", 2, 1, HEADS, SIZE)
        q, k = neighbours(q + bias[0], turn), neighbours(k + bias[1], turn)
        x = norm(linear(attend(q, k, v), of("attn.proj.weight", HIDDEN, HIDDEN)) + x, of("norm_2.weight", HIDDEN))
        gate, up = linear(norm(x, of("norm_3.weight", HIDDEN)), of("mlp.fc.weight", 2 * INNER, HIDDEN)).chunk(2, -1)
        return norm(linear(silu(gate) * up, of("mlp.proj.weight", HIDDEN, INNER)) + x, of("norm_4.weight", HIDDEN))

    table = w("transformer.wte.weight", VOCAB, HIDDEN)
    last = w("transformer.ln_f.weight", HIDDEN)
    e = block(1.25 * table[ids], "prelude.0")
    x = torch.zeros_like(e)  # the first state is noise, here as good as none
    for _ in range(passes):
        x = linear(torch.cat([x, e], -1), w("transformer.adapter.weight", HIDDEN, 2 * HIDDEN))
        for i in range(2):
            x = block(x, f"core_block.{i}")
    x = norm(block(norm(x, last), "coda.0"), last)
    w["lm_head.weight"], w["freqs_cis"] = table.float(), torch.zeros(1, 64, 1, SIZE // 2, 2)
    return linear(x, table)


OURO = dict(
    architectures=["OuroForCausalLM"], model_type="ouro", vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=64,
    num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE, intermediate_size=INNER,
    rms_norm_eps=EPS, rope_theta=500.0, total_ut_steps=3, early_exit_threshold=1.0, hidden_act="silu", sliding_window=None,
    tie_word_embeddings=False, torch_dtype="float32", bos_token_id=0, eos_token_id=0,
)  # fmt: skip
HUGINN = dict(
    architectures=["RavenForCausalLM"], model_type="huginn_raven", vocab_size=VOCAB, padded_vocab_size=VOCAB, n_embd=HIDDEN,
    block_size=64, n_layers=4, n_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE, intermediate_size=INNER, norm_eps=EPS,
    tie_embeddings=True, n_layers_in_prelude=1, n_layers_in_recurrent_block=2, n_layers_in_coda=1, mean_recurrence=3,
    mean_backprop_depth=2, qk_bias=True, bias=False, rope_base=700.0, injection_type="linear", state_init="like-init",
    nonlin_name="SiLU", init_values=dict(std=1e-20, embed_scale=1.25), torch_dtype="float32",
)  # fmt: skip


def make(place):
    for seed, (name, config, model) in enumerate([("ouro", OURO, ouro), ("huginn", HUGINN, huginn)]):
        folder, weights = place / name, Drawn(seed)
        folder.mkdir()
        ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = model(weights, ids).float().contiguous()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(dict(weights), str(folder / "model.safetensors"), metadata={"format": "pt"})
        save_file({"ids": ids, "logits": logits}, str(folder / "expected.safetensors"))


if __name__ == "__main__":
    {"make": make}[sys.argv[1]](pathlib.Path(sys.argv[2]))
