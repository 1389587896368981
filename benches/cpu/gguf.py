#!/usr/bin/env python3
"""Decoding of one model by dreamc and by llama.cpp from the same blocks, sides in turns.

    python benches/cpu/large.py --place /tmp/large --formats q8_0 q4_0
    python benches/cpu/gguf.py --dreamc target/release/dreamc --place /tmp/large --formats q8_0 q4_0 --rounds 5

Exports what `large.py` left in its place (a Llama of 1.24 billion parameters, quantised) as GGUF, so that both read the same bits, and has
each side decode so many tokens in turns, two threads each, a process for every turn. Prints JSON: the median and the range of tokens a
second of each, and the median of their ratios. A token of dreamc takes what `dreamc generate` of many takes longer than of one; llama.cpp
evaluates one token after the other through `llama-cpp-python`. Where that is missing the exit code is 3. `--processor` counts seconds of the
processor instead of the clock: beside other work the threads of either side wait for one another, so ask for `--threads 1` then. `--plain`
has llama.cpp read weights in the order of the file: with an order of its own it ended in a segmentation fault on a processor with AMX.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

MISSING = 3
THEIRS = """
import json, sys, time
import llama_cpp, llama_cpp.llama
path, tokens, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
now = time.process_time if sys.argv[4] == "processor" else time.perf_counter
if sys.argv[5] == "plain":
    defaults = llama_cpp.llama_model_default_params
    def plain():
        params = defaults()
        params.use_extra_bufts = False
        return params
    llama_cpp.llama.llama_cpp.llama_model_default_params = plain
model = llama_cpp.Llama(path, n_ctx=256, n_batch=64, n_threads=threads, n_threads_batch=threads, verbose=False)
model.eval([84, 104, 101])
model.eval([32])
begun = now()
for i in range(tokens):
    model.eval([i * 5 % 250])
print(json.dumps(tokens / (now() - begun)))
"""


def seconds(a, model, tokens):
    """Seconds that `dreamc generate` takes for so many tokens, the model in the page cache."""
    command = [a.dreamc, "generate", str(model), "The", "--greedy", "--threads", str(a.threads), "--max-tokens", str(tokens)]
    spent = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) if a.processor else time.perf_counter()
    begun = spent()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return spent() - begun


def rate(a, model):
    """Tokens a second: the time of more tokens less that of one."""
    short = seconds(a, model, 1)
    return (a.tokens - 1) / (seconds(a, model, a.tokens) - short)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dreamc", default="target/release/dreamc")
    a.add_argument("--place", type=pathlib.Path, required=True, help="the folder of large.py")
    a.add_argument("--formats", nargs="+", default=["q8_0", "q4_0"])
    a.add_argument("--python", default=sys.executable, help="one with llama-cpp-python")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--tokens", type=int, default=32)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--processor", action="store_true", help="tokens for a second of the processor")
    a.add_argument("--plain", action="store_true", help="llama.cpp without arranging weights")
    a = a.parse_args()
    if subprocess.run([a.python, "-c", "import llama_cpp"], capture_output=True).returncode != 0:
        print("llama-cpp-python is not installed: `pip install llama-cpp-python` compiles it", file=sys.stderr)
        return MISSING
    for form in a.formats:
        model, file = a.place / form, a.place / f"{form}.gguf"
        if not file.exists():
            subprocess.run([a.dreamc, "export", "gguf", str(model), "-o", str(file)], check=True, capture_output=True)
        rates = {"dreamc": [], "llama.cpp": []}
        for _ in range(a.rounds):
            rates["dreamc"].append(rate(a, model))
            how = ["processor" if a.processor else "clock", "plain" if a.plain else "arranged"]
            command = [a.python, "-c", THEIRS, str(file), str(a.tokens), str(a.threads), *how]
            rates["llama.cpp"].append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        ratio = statistics.median(x / y for x, y in zip(rates["dreamc"], rates["llama.cpp"]))
        of = lambda x: {"median": round(statistics.median(x), 2), "range": [round(min(x), 2), round(max(x), 2)]}
        print(json.dumps({"format": form} | {side: of(x) for side, x in rates.items()} | {"ratio": round(ratio, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
