"""Writes the weights of a folder as `torch.save` does.

    python tests/hf/pickled.py one|shards|evil TO FROM

`evil` puts into TO a file that makes a file `ran` where it is loaded.
"""

import json
import pathlib
import shutil
import sys


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def main():
    import torch
    from safetensors.torch import load_file

    kind, to, source = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    to.mkdir(exist_ok=True)
    if kind == "evil":
        torch.save({"w": torch.zeros(2), "x": Evil(str(to / "ran"))}, to / "pytorch_model.bin")
        return
    tensors = {}
    for file in sorted(source.glob("model*.safetensors")):
        tensors |= load_file(file)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, to / name)
    if json.loads((source / "config.json").read_text()).get("tie_word_embeddings"):
        # The head is the embedding: one storage by two names.
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if kind == "one":
        torch.save(tensors, to / "pytorch_model.bin")
        return
    names = sorted(tensors)
    halves = [names[::2], names[1::2]]
    weight_map = {}
    for i, half in enumerate(halves):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({name: tensors[name].clone() for name in half}, to / file)
        weight_map |= {name: file for name in half}
    (to / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


main()
