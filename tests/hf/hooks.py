"""A small random model of transformers, what hooks find inside it, and its logits with one value replaced.

    python tests/hf/hooks.py make DIR

DIR/NAME/ has config.json and model.safetensors; DIR/a.json and b.json are rows of ids as `dreamc probe` reads them, the last one of
a row being a target alone; DIR/NAME.safetensors has of text a `stream.{i}` behind layer i, `scores.{i}` and `mlp.{i}`, of text b
`patched`: its logits with the MLP output of layer 1 that text a has, at tokens 3 and 4; and `streamed`: with the stream behind layer
0, at all tokens.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

SIZES = dict(vocab_size=97, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None, hidden_size=24,
             num_attention_heads=4, num_key_value_heads=2, intermediate_size=40, num_hidden_layers=3)
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1),
}

command, folder = sys.argv[1], pathlib.Path(sys.argv[2])
assert command == "make"
torch.manual_seed(3)
texts = {name: torch.randint(0, 97, (2, 10)) for name in "ab"}
for name, ids in texts.items():
    (folder / f"{name}.json").write_text(json.dumps(ids.tolist()))
a, b = (ids[:, :-1] for ids in texts.values())

for name, config in MODELS.items():
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder / name)
    found = {}
    kept = lambda key: lambda module, given, out: found.__setitem__(key, (out[0] if isinstance(out, tuple) else out).clone())
    hooks = []
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(kept(f"stream.{i}")))
        hooks.append(layer.mlp.register_forward_hook(kept(f"mlp.{i}")))
    with torch.no_grad():
        said = model(a, output_attentions=True)
    for hook in hooks:
        hook.remove()
    for i, scores in enumerate(said.attentions):
        # dreamc has the tokens before the heads.
        found[f"scores.{i}"] = scores.transpose(1, 2)
    found["logits"] = said.logits

    def at_tokens(module, given, out):
        out = out.clone()
        out[:, 3:5] = found["mlp.1"][:, 3:5]
        return out

    def everywhere(module, given, out):
        return (found["stream.0"], *out[1:]) if isinstance(out, tuple) else found["stream.0"]

    for key, module, hook in [("patched", model.model.layers[1].mlp, at_tokens), ("streamed", model.model.layers[0], everywhere)]:
        handle = module.register_forward_hook(hook)
        with torch.no_grad():
            found[key] = model(b).logits
        handle.remove()
    save_file({key: value.contiguous() for key, value in found.items()}, folder / f"{name}.safetensors")
