"""Writes the folders that the import is tested on: small random models as `transformers` saves them, and their logits.

    python3 -m venv .venv && .venv/bin/pip install -r tests/import/requirements.txt
    .venv/bin/python tests/import/make_goldens.py old      # with transformers 4: config.json with `rope_theta`
    .venv/bin/python tests/import/make_goldens.py new      # with transformers 5: config.json with `rope_parameters`

A folder holds what was saved (`config.json`, `model*.safetensors`, perhaps `tokenizer.json`) and `expected.safetensors`:
`ids` [2, n] and `logits` [2, n, V] of the model in f32, with attention written out (`eager`); where the tokenizer puts a
begin token, `text_nats` and `text_targets` too, the loss of a text in rows that begin with it.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3Config,
)

HERE = pathlib.Path(__file__).parent
TOKENS = 24
VOCAB = 264
TEXT = "the cat and the hat in the rain, and then again\n" * 4
ROW, STRIDE = 16, 4

COMMON = dict(vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=257, eos_token_id=256, pad_token_id=None)
LLAMA = dict(COMMON, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
GEMMA = dict(COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40,
             sliding_window=6, attn_logit_softcapping=4.0, final_logit_softcapping=6.0, query_pre_attn_scalar=6)


def tokenizer(begin):
    """One token a byte, two that end and begin, and a few for pairs of letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("i", "n"), ("Ġ", "a")]
    vocab |= {"<|end_of_text|>": 256, "<|begin_of_text|>": 257}
    vocab |= {a + b: 258 + i for i, (a, b) in enumerate(merges)}
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken("<|end_of_text|>", special=True), AddedToken("<|begin_of_text|>", special=True)])
    if begin:
        t.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 257)])
    return t


def randomise(model, seed):
    """Weights large enough that caps, windows and norms matter; no gain is what it begins as."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.add_(0.2 * normal)
            else:
                p.copy_(normal * (1.0 if "embed" in name else 1.5 / p.shape[-1] ** 0.5))


def text_loss(model, t):
    """Loss of TEXT and its end token in rows of ROW tokens. Every row begins with the begin token; rows advance by STRIDE targets."""
    tokens = t.encode(TEXT, add_special_tokens=False).ids + [256]
    nats = 0.0
    for learn in range(0, len(tokens), STRIDE):
        to = min(learn + STRIDE, len(tokens))
        first = max(learn + STRIDE - ROW, 0)
        row = torch.tensor([[257] + tokens[first:to]])
        with torch.no_grad():
            logs = model(row[:, :-1]).logits.double().log_softmax(-1)
        nats -= logs[0].gather(1, row[0, 1:, None])[learn - first:].sum().item()
    return nats, len(tokens)


def write(name, config, seed, *, dtype=torch.float32, shards=None, edit=None, begin=None):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    text = json.loads(path.read_text())
    for key in edit or []:
        text.pop(key, None)
    path.write_text(json.dumps(text, indent=1) + "\n")
    if begin is not None:
        tokenizer(begin).save(str(folder / "tokenizer.json"), pretty=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(seed + 1))
    with torch.no_grad():
        logits = model.eval()(ids).logits.float()
    expected = {"ids": ids.to(torch.int64), "logits": logits.contiguous()}
    if begin:
        nats, targets = text_loss(model, tokenizer(begin))
        expected |= {"text_nats": torch.tensor([nats]), "text_targets": torch.tensor([targets])}
    save_file(expected, str(folder / "expected.safetensors"), {"transformers": transformers.__version__})
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, logits to {logits.abs().max():.2f}, "
          f"{sum(f.stat().st_size for f in folder.iterdir()) // 1024} KiB")


def old():
    write("gemma2_old", Gemma2Config(**GEMMA, hidden_size=16, num_hidden_layers=5, rope_theta=10000.0), 1,
          dtype=torch.bfloat16, edit=["layer_types"])
    write("llama3_old", LlamaConfig(**LLAMA, num_hidden_layers=3, rope_theta=500.0, rms_norm_eps=1e-5,
                                    rope_scaling=LLAMA3), 2, shards="20KB", begin=True)
    write("qwen3_old", Qwen3Config(**LLAMA, num_hidden_layers=2, head_dim=8, rope_theta=1e6,
                                   tie_word_embeddings=True), 3, begin=False)
    write("mixtral_old", MixtralConfig(**dict(LLAMA, intermediate_size=16), num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
                                       sliding_window=7, rope_theta=1e6, rms_norm_eps=1e-5), 4)
    write("olmoe_old", OlmoeConfig(**dict(LLAMA, num_key_value_heads=4, intermediate_size=16), num_hidden_layers=2, num_experts=6,
                                   num_experts_per_tok=3, norm_topk_prob=False), 5)


def new():
    rope = lambda base, **more: dict(rope_type="default", rope_theta=base) | more
    write("gemma2_new", Gemma2Config(**GEMMA, hidden_size=24, num_hidden_layers=4, rope_parameters=rope(10000.0),
                                     layer_types=["full_attention", "sliding_attention", "sliding_attention",
                                                  "full_attention"]), 6, begin=True, shards="20KB")
    write("llama3_new", LlamaConfig(**LLAMA, num_hidden_layers=2, tie_word_embeddings=True,
                                    rope_parameters=rope(500.0) | LLAMA3), 7)
    write("qwen3_new", Qwen3Config(**LLAMA, num_hidden_layers=4, head_dim=8, use_sliding_window=True, sliding_window=5,
                                   max_window_layers=2, rope_parameters=rope(1e6)), 8)
    write("mixtral_new", MixtralConfig(**dict(LLAMA, intermediate_size=16), num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
                                       rope_parameters=rope(1e6)), 9, dtype=torch.bfloat16)
    write("olmoe_new", OlmoeConfig(**dict(LLAMA, intermediate_size=16), num_hidden_layers=2, num_experts=6, num_experts_per_tok=3,
                                   norm_topk_prob=True, rope_parameters=rope(10000.0)), 10)


if __name__ == "__main__":
    major = {"old": "4", "new": "5"}[sys.argv[1]]
    if not transformers.__version__.startswith(major + "."):
        sys.exit(f"`{sys.argv[1]}` needs transformers {major}, this is {transformers.__version__}")
    {"old": old, "new": new}[sys.argv[1]]()
