#!/usr/bin/env python3
"""Attention that chooses its keys against attention over all of them, arms in turns:

    python benches/cpu/choose.py --dreamc target/release/dreamc --rounds 3

Two layers of width 256 with four heads of 64 and a network train one sequence in bf16. Every choice leaves a token 512 keys at most. Times
are of a training step and of a token that is written after a prompt as long, the least of the rounds; in brackets by those of all keys.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile

ARMS = {
    "all keys": "sequence { heads 4  head_size 64 }",
    "moba": "moba { heads 4  block 64  blocks 8 }",
    "nsa": "nsa { heads 4  block 32  blocks 8  window 256 }",
    "dsa": "dsa { heads 4  indexers 4  index 32  tokens 512 }",
}


def spec(mixer, tokens):
    return f"""model choosing {{
  vocab 256
  hidden 256
  context {tokens + 64}
  mix = {mixer}
  mlp = mlp {{ intermediate 512 }}
  repeat 2 {{ mix > mlp }}
}}
data {{ task composition  max_steps 3 }}
train {{ steps 10  batch 1  sequence {tokens}  learning_rate 1e-3  precision bf16 }}
"""


def bench(program, file, tokens, threads):
    written = ["--prompt", str(tokens), "--tokens", "16"]
    command = [program, "bench", str(file), "--sequence", str(tokens), "--steps", "3", "--threads", str(threads), *written, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dreamc", default="target/release/dreamc")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 4096, 16384])
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--dump", action="store_true", help="print the JSON of one arm, and stop")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for tokens in chosen.tokens:
            files = {}
            for arm, mixer in ARMS.items():
                files[arm] = pathlib.Path(folder, f"{arm.replace(' ', '-')}-{tokens}.dream")
                files[arm].write_text(spec(mixer, tokens))
            found = {arm: [] for arm in ARMS}
            for _ in range(chosen.rounds):
                for arm, file in files.items():
                    found[arm].append(bench(chosen.dreamc, file, tokens, chosen.threads))
                    if chosen.dump:
                        return print(json.dumps(found[arm][-1], indent=2))
            step = {arm: min(one["training"]["step_seconds"] for one in all) * 1e3 for arm, all in found.items()}
            token = {arm: min(1e3 / one["decoding"]["tokens_per_second"] for one in all) for arm, all in found.items()}
            print(f"{tokens} tokens")
            for arm in ARMS:
                shares = [own[arm] / own["all keys"] for own in (step, token)]
                print(f"  {arm:9} step {step[arm]:9.1f} ms ({shares[0]:.2f})   a token written {token[arm]:7.3f} ms ({shares[1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
