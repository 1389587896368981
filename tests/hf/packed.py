"""A small random gpt-oss whose experts are packed as MXFP4, for `tests/numerics/export.rs`.

    python tests/hf/packed.py make DIR    DIR/packed/ with config.json, model.safetensors and expected.safetensors: the logits that
                                          transformers computes in f32 from the numbers that it unpacks
    python tests/hf/packed.py check DIR   DIR/back/, written as bf16, has those logits, to the bit
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from families import YARN, logits, randomise

FIELDS = dict(vocab_size=97, max_position_embeddings=64, pad_token_id=None, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
              head_dim=8, intermediate_size=64, num_hidden_layers=2, sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
              rope_parameters=dict(YARN, truncate=False))  # fmt: skip


def make(place):
    folder, generator = place / "packed", torch.Generator().manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**FIELDS))
    randomise(model, 5)
    packed = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = p.shape
                draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
                # Exponents from -5 on, so that numbers are about as large as weights are.
                blocks, scales = draw(0, 256, experts, rows, columns // 32, 16), draw(122, 125, experts, rows, columns // 32)
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                p.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float())
    plain = place / "plain"
    model.save_pretrained(plain)
    ids = torch.randint(0, 97, (2, 24), generator=generator)
    folder.mkdir()
    kept = {n: t for n, t in load_file(plain / "model.safetensors").items() if f"{n}_blocks" not in packed}
    save_file(kept | packed, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"ids": ids, "logits": logits(plain, ids)}, str(folder / "expected.safetensors"))


def check(place):
    ids = load_file(place / "packed" / "expected.safetensors")["ids"]
    # Tensors have the types that they were stored in, and are read as f32.
    first, found = logits(place / "plain", ids), logits(place / "back", ids)
    if not torch.equal(found, first):
        sys.exit(f"logits differ by {(found - first).abs().max()}")
    print("equal")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
