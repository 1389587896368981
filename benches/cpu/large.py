#!/usr/bin/env python3
"""Time and memory of a Llama of 1.24 billion parameters in bf16, with random weights.

    python benches/cpu/large.py --dreamc target/release/dreamc --place /tmp/large

Writes a folder as `transformers` does (2.5 GB; numbers are repeated, which no matmul notices), imports it, and prints for each command
the seconds, the most memory that was resident (`VmHWM`), and how much of it is the process's own: what is left without the pages of files,
which other processes share. The file is read once before, so that it is in the page cache; the last line is of one token after
the file left it (`POSIX_FADV_DONTNEED`), with the gigabytes that came from the disk. `--formats q8_0 q4_0` quantises it and measures
the same of each. Needs Linux and a Python without packages; the tokenizer has 256 bytes and no more.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import time

HIDDEN, LAYERS, HEADS, KV, SIZE, INNER, VOCAB = 2048, 16, 32, 8, 64, 8192, 128256
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": SIZE,
    "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": INNER, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": VOCAB,
}  # fmt: skip


def tensors():
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", [HIDDEN]
        yield at + "self_attn.q_proj.weight", [HEADS * SIZE, HIDDEN]
        yield at + "self_attn.k_proj.weight", [KV * SIZE, HIDDEN]
        yield at + "self_attn.v_proj.weight", [KV * SIZE, HIDDEN]
        yield at + "self_attn.o_proj.weight", [HIDDEN, HEADS * SIZE]
        yield at + "post_attention_layernorm.weight", [HIDDEN]
        yield at + "mlp.gate_proj.weight", [INNER, HIDDEN]
        yield at + "mlp.up_proj.weight", [INNER, HIDDEN]
        yield at + "mlp.down_proj.weight", [HIDDEN, INNER]
    yield "model.norm.weight", [HIDDEN]


def tokenizer():
    """Bytes, by the names that byte-level tokenizers give them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in plain}
    names |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in names)}
    vocab = {names[b]: b for b in range(256)} | {"<|begin|>": 256, "<|end|>": 257}
    added = [{"id": i, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for t, i in (("<|begin|>", 256), ("<|end|>", 257))]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}


def write(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"bos_token_id": 256, "eos_token_id": 257}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    header, at = {}, 0
    for name, shape in tensors():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = random.Random(0)
    block = b"".join(struct.pack("<H", draw.choice((0x3C00, 0xBC00)) + draw.randrange(256)) for _ in range(1 << 16))
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors():
            if len(shape) == 1:
                out.write(struct.pack("<H", 0x3F80) * shape[0])
                continue
            whole, rest = divmod(2 * shape[0] * shape[1], len(block))
            for _ in range(whole):
                out.write(block)
            out.write(block[:rest])


def measured(command):
    """Seconds of a command, and the most of its memory, in all and its own, in GB."""
    begun, most, own = time.perf_counter(), 0, 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None:
        try:
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            of = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith(("VmHWM", "RssAnon"))}
            most, own = max(most, of.get("VmHWM", 0)), max(own, of.get("RssAnon", 0))
        except (OSError, IndexError):
            pass
        time.sleep(0.01)
    text = process.stdout.read()
    if process.returncode != 0:
        raise SystemExit(f"{command}:\n{text}")
    return {"seconds": round(time.perf_counter() - begun, 2), "most_gb": round(most / 1e6, 2), "own_gb": round(own / 1e6, 2)}


def forget(path):
    """Takes a file out of the page cache, as far as no process has it mapped."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold(command, path):
    """What `measured` says of a command that finds nothing of a file in memory, and what the machine reads from disks meanwhile."""

    def read():
        fields = next(line.split() for line in pathlib.Path("/proc/vmstat").read_text().splitlines() if line.startswith("pgpgin "))
        return int(fields[1])

    forget(path)
    before = read()
    found = measured(command)
    return found | {"from_disk_gb": round((read() - before) * 1024 / 1e9, 2)}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dreamc", default="target/release/dreamc")
    a.add_argument("--place", type=pathlib.Path, required=True, help="a folder for 5 GB, kept for the next time")
    a.add_argument("--tokens", type=int, default=3)
    a.add_argument("--formats", nargs="*", default=[], help="formats of `dreamc quantize`, some 1.3 and 0.7 GB more")
    a = a.parse_args()
    theirs, ours = a.place / "transformers", a.place / "model"
    if not (theirs / "model.safetensors").exists():
        shutil.rmtree(theirs, ignore_errors=True)
        write(theirs)
    if not ours.exists():
        time.sleep(3)
        print(json.dumps({"import": measured([a.dreamc, "import", "hf", str(theirs), "-o", str(ours)])}))
    text = a.place / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 2 + "abcdefgh\n")
    measure(a, "bf16", ours, text)
    for form in a.formats:
        packed = a.place / form
        if not packed.exists():
            command = [a.dreamc, "quantize", str(ours), "--format", form, "-o", str(packed)]
            print(json.dumps({f"quantize to {form}": measured(command)}), flush=True)
        measure(a, form, packed, text)


def measure(a, form, ours, text):
    with open(ours / "model.safetensors", "rb") as file:
        while file.read(1 << 24):
            pass
    generate = [a.dreamc, "generate", str(ours), "Hello", "--greedy", "--max-tokens"]
    words = str(a.tokens)
    for name, command in (
        ("generate, the file's bytes verified", [*generate, words]),
        ("generate", [*generate, words]),
        ("generate, one token", [*generate, "1"]),
        ("eval of 100 tokens", [a.dreamc, "eval", str(ours), "--data", str(text), "--sequence", "128"]),
    ):
        print(json.dumps({f"{form}: {name}": measured(command)}), flush=True)
    name = "generate, one token, the file not in the page cache"
    print(json.dumps({f"{form}: {name}": cold([*generate, "1"], ours / "model.safetensors")}), flush=True)


if __name__ == "__main__":
    main()
