#!/usr/bin/env python3
"""Tokens a second that llama.cpp writes, one sequence at a time, with random weights in bf16.

    python benches/cpu/llama.py --model d --threads 2 --tokens 32

Writes a GGUF file of the shape of a spec beside this file (products of the same sizes; llama.cpp has rotary positions besides), reads a prompt
with `llama-cpp-python`, and prints JSON. Where that package is missing the last line says so and the exit code is 3: the registry has its
source alone, so that `pip install llama-cpp-python` needs a C++ compiler and some minutes.
"""

import argparse
import json
import pathlib
import random
import statistics
import struct
import sys
import tempfile
import time

MISSING = 3
# Hidden, layers, heads, size of a head, inner size, vocabulary: as in d.yaml and e.yaml, whose embedding is the head.
SHAPES = {"d": (768, 12, 12, 64, 2048, 50257), "e": (2048, 22, 16, 128, 5632, 32000)}
F32, BF16 = 0, 30
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5


def text(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def field(key, kind, value):
    pack = {UINT32: lambda x: struct.pack("<I", x), INT32: lambda x: struct.pack("<i", x)}
    pack |= {FLOAT32: lambda x: struct.pack("<f", x), STRING: text}
    if isinstance(value, list):
        body = struct.pack("<IQ", kind, len(value)) + b"".join(map(pack[kind], value))
        return text(key) + struct.pack("<I", ARRAY) + body
    return text(key) + struct.pack("<I", kind) + pack[kind](value)


def fields(shape, context):
    """Metadata: the shape, and a vocabulary of as many pieces, of which nothing but the number matters."""
    hidden, layers, heads, size, inner, vocab = shape
    pieces = ["<unk>", "<s>", "</s>"] + [f"t{i}" for i in range(3, vocab)]
    kinds = [2, 3, 3] + [1] * (vocab - 3)
    return [
        field("general.architecture", STRING, "llama"),
        field("general.name", STRING, "random"),
        field("general.file_type", UINT32, 32),
        field("llama.context_length", UINT32, context),
        field("llama.embedding_length", UINT32, hidden),
        field("llama.block_count", UINT32, layers),
        field("llama.feed_forward_length", UINT32, inner),
        field("llama.attention.head_count", UINT32, heads),
        field("llama.attention.head_count_kv", UINT32, heads),
        field("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-6),
        field("llama.rope.dimension_count", UINT32, size),
        field("llama.vocab_size", UINT32, vocab),
        field("tokenizer.ggml.model", STRING, "llama"),
        field("tokenizer.ggml.tokens", STRING, pieces),
        field("tokenizer.ggml.scores", FLOAT32, [0.0] * vocab),
        field("tokenizer.ggml.token_type", INT32, kinds),
        field("tokenizer.ggml.bos_token_id", UINT32, 1),
        field("tokenizer.ggml.eos_token_id", UINT32, 2),
        field("tokenizer.ggml.unknown_token_id", UINT32, 0),
    ]


def tensors(shape):
    """Name, rows (none for a vector), columns."""
    hidden, layers, heads, size, inner, vocab = shape
    yield "token_embd.weight", vocab, hidden
    for i in range(layers):
        yield f"blk.{i}.attn_norm.weight", None, hidden
        for name in ("attn_q", "attn_k", "attn_v"):
            yield f"blk.{i}.{name}.weight", heads * size, hidden
        yield f"blk.{i}.attn_output.weight", hidden, heads * size
        yield f"blk.{i}.ffn_norm.weight", None, hidden
        yield f"blk.{i}.ffn_gate.weight", inner, hidden
        yield f"blk.{i}.ffn_up.weight", inner, hidden
        yield f"blk.{i}.ffn_down.weight", hidden, inner
    yield "output_norm.weight", None, hidden


def write(path, shape, context):
    """A GGUF file, version 3: header, metadata, list of tensors, then their data, each at a multiple of 32 bytes."""
    meta, all_tensors = fields(shape, context), list(tensors(shape))
    infos, offset, sizes = b"", 0, []
    for name, rows, columns in all_tensors:
        dims, kind = ([columns], F32) if rows is None else ([columns, rows], BF16)
        size = columns * 4 if rows is None else rows * columns * 2
        infos += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        infos += struct.pack("<IQ", kind, offset)
        sizes.append(size)
        offset += size + -size % 32
    with open(path, "wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(all_tensors), len(meta)) + b"".join(meta) + infos)
        out.write(bytes(-out.tell() % 32))
        # bf16 between 2^-7 and 2^-5, of either sign: as good as random, and repeated, which no product notices.
        draw = random.Random(0)
        block = b"".join(struct.pack("<H", draw.choice((0x3C00, 0xBC00)) + draw.randrange(256)) for _ in range(1 << 16))
        for (_, rows, columns), size in zip(all_tensors, sizes):
            if rows is None:
                out.write(struct.pack("<f", 1.0) * columns)
            else:
                whole, rest = divmod(size, len(block))
                for _ in range(whole):
                    out.write(block)
                out.write(block[:rest])
            out.write(bytes(-size % 32))


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", choices=SHAPES, required=True)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--prompt", type=int, default=64)
    a.add_argument("--tokens", type=int, default=32)
    a.add_argument("--write", type=pathlib.Path, help="write the file there and measure nothing")
    a = a.parse_args()
    shape, context = SHAPES[a.model], a.prompt + a.tokens
    if a.write:
        write(a.write, shape, context)
        return 0
    try:
        import llama_cpp
    except ImportError:
        print("llama-cpp-python is not installed: `pip install llama-cpp-python` compiles it", file=sys.stderr)
        return MISSING
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "random.gguf"
        write(path, shape, context)
        model = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=a.prompt, n_threads=a.threads, n_threads_batch=a.threads, use_mmap=False, verbose=False
        )
        vocab = shape[-1]
        prompt = [(i * 7 + 1) % vocab for i in range(a.prompt)]
        # The first reading warms up.
        for _ in range(2):
            model.reset()
            begun = time.perf_counter()
            model.eval(prompt)
            read = time.perf_counter() - begun
        seconds = []
        for i in range(a.tokens - 1):
            begun = time.perf_counter()
            model.eval([(i * 5 + 3) % vocab])
            seconds.append(time.perf_counter() - begun)
    rates = {"tokens_per_second": 1 / statistics.median(seconds), "prompt_tokens_per_second": a.prompt / read}
    print(json.dumps({"version": llama_cpp.__version__, "decoding": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
