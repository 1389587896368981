#!/usr/bin/env python3
"""Time and memory of a LoRA step on a Llama of 1.24 billion parameters, beside peft with PyTorch, sides in turns.

    python benches/cpu/large.py --dreamc target/release/dreamc --place /tmp/large      writes and imports the model
    python benches/cpu/adapters.py --dreamc target/release/dreamc --place /tmp/large --peft .venv-hf/bin/python

Rank 16 on all seven matrices of a layer, one row of 512 tokens a step, AdamW. Seconds are those between the ends of steps, the first left
out; the most resident memory is `VmHWM`, of which pages of the base's file are other processes', too. `--precision` is that of both sides.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

from large import measured

TOKENS = 512
PEFT = """
import sys, time, resource, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
folder, precision, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
dtype = torch.bfloat16 if precision == "bf16" else torch.float32
model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
modules = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
ids = torch.randint(3, 250, (1, %d))
ends = [time.perf_counter()]
for _ in range(steps):
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ends.append(time.perf_counter())
most = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
print("STEPS", [round(b - a, 2) for a, b in zip(ends, ends[1:])], most)
""" % (TOKENS)


def dreamc(a, run):
    spec = a.place / "tuned.yaml"
    names = json.loads(subprocess.check_output([a.dreamc, "count", str(a.place / "model"), "--json"], text=True))
    parts = [n for n in names["parameters"]["by_component"] if n not in ("embedding", "head", "stream")]
    (a.place / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    spec.write_text(
        f"base: model\nmodel: {{adapt: {{components: [{', '.join(parts)}], rank: 16, alpha: 32}}}}\n"
        f"data: {{text: text.txt, validation: 0.1}}\ntrain: {{steps: {a.steps}, batch: 1, sequence: {TOKENS}, learning_rate: 1e-4, warmup: 0,"
        f" precision: {a.precision}, evaluate: {{batches: 1}}}}\n"
    )
    out = a.place / f"run-{run}"
    found = measured([a.dreamc, "train", str(spec), "--out", str(out), "--force"])
    ends = [json.loads(line) for line in open(out / "metrics.jsonl")]
    seconds = [line["seconds"] for line in ends if "loss" in line and "seconds" in line]
    return {"steps": [round(y - x, 2) for x, y in zip(seconds, seconds[1:])], **found}


def peft(a):
    line = [a.peft, "-c", PEFT, str(a.place / "transformers"), a.precision, str(a.steps)]
    text = subprocess.run(line, capture_output=True, text=True)
    if text.returncode:
        raise SystemExit(text.stderr)
    steps, most = text.stdout.split("STEPS")[1].rsplit(" ", 1)
    return {"steps": json.loads(steps)[1:], "most_gb": round(int(most) / 1e6, 2)}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dreamc", default="target/release/dreamc")
    a.add_argument("--place", type=pathlib.Path, required=True)
    a.add_argument("--peft", default=sys.executable, help="a Python that has peft")
    a.add_argument("--steps", type=int, default=3)
    a.add_argument("--turns", type=int, default=2)
    a.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    a = a.parse_args()
    for turn in range(a.turns):
        print(json.dumps({"dreamc": dreamc(a, turn)}), flush=True)
        time.sleep(3)
        print(json.dumps({"peft": peft(a)}), flush=True)
        time.sleep(3)


if __name__ == "__main__":
    main()
