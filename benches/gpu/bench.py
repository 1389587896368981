#!/usr/bin/env python3
"""Everything there is to learn on a machine with a GPU, in one call:

    python benches/gpu/bench.py --out results

Builds dreamc, runs every test that a GPU is wanted for (calibration of the PTX device first), compares losses of cpu, ptx and
cuda, and times training of LA-16 and DR+DA-16 in dreamc and in PyTorch, one after another, same model, same tokens in a
batch, same precision. Each part writes its own JSON as soon as it is done and a failed part does not stop the others;
`report.md` is made from what is there. Parts whose means are missing (no GPU, no PyTorch) are named with the reason.

`--plan` prints what would be run and runs nothing; `test_bench.py` tests that, the arithmetic and the report.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTORCH = ROOT / "benches" / "pytorch"
MODELS = ("la-16", "dr-da-16")
# Dense bf16 peaks in FLOP/s, from the vendor's data sheets; the report also measures what one large product reaches.
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "L40S": 362e12}

# On Hopper's warpgroups, the tensor cores of every GPU, the ordinary cores.
TILES = ("Warpgroups", "Matrices", "Tile")


def peak(name):
    """Peak of the GPU of that name; `None` for one that is not listed."""
    return next((flops for known, flops in PEAKS.items() if known in name), None)


def utilisation(tokens_per_second, flops_per_token, peak_flops):
    """Share of the peak that the model's own FLOPs make: no recomputation, no element-wise work."""
    return tokens_per_second * flops_per_token / peak_flops


def last_json(text):
    """The last JSON object of a program's output, which may have said other things before."""
    at = text.rfind("\n{")
    return json.loads(text[at + 1 :] if at >= 0 else text[text.index("{") :])


def parts(a):
    """Name, command and what the part needs."""
    dreamc = str(a.dreamc)
    test = ["cargo", "test", "--release", "-q"]
    shown = ["--", "--nocapture"]
    yield "build", ["cargo", "build", "--release"], ["cargo"]
    yield "calibration", test + ["--test", "ptx", "a_gpu_does"] + shown, ["cargo", "gpu"]
    yield "gpu_tests", test + ["-p", "dreamc-runtime", "cuda"] + shown, ["cargo", "gpu"]
    yield "kernels", test + ["--test", "codegen"] + shown, ["cargo"]
    yield "torch_is_the_same_model", [sys.executable, str(PYTORCH / "test_model.py"), "--dreamc", dreamc], ["torch"]
    for device in ("cpu", "ptx", "cuda"):
        tiny = [dreamc, "train", str(ROOT / "examples/tiny-dr-da.yaml"), "--device", device, "--json", "--force"]
        small = ["train.steps=20", "train.batch=2", "train.sequence=32", "train.warmup=5", "train.precision=f32"]
        sets = [w for s in small for w in ("--set", s)]
        needs = ["gpu"] if device == "cuda" else []
        yield f"losses_{device}", tiny + ["--out", str(a.out / f"run-{device}")] + sets, needs
    for model in MODELS:
        spec = str(ROOT / "examples" / f"{model}.yaml")
        yield f"count_{model}", [dreamc, "count", spec, "--json"], []
        sets = {"train.steps": a.steps, "train.batch": a.batch, "train.accumulate": 1, "train.sequence": a.sequence}
        sets = [w for key, value in sets.items() for w in ("--set", f"{key}={value}")]
        run = [dreamc, "train", spec, "--device", "cuda", "--data", str(a.out / "text.txt"), "--json", "--force"]
        yield f"dreamc_{model}", ["env", "DREAMC_GRAPHS=1"] + run + ["--out", str(a.out / f"run-{model}")] + sets, ["gpu"]
        # What the newer paths are worth: launches one by one, and `mma.sync` in place of `wgmma`.
        for name, switch in (("launched", "DREAMC_GRAPHS"), ("floor", "DREAMC_HOPPER")):
            out = ["--out", str(a.out / f"run-{name}-{model}")]
            yield f"{name}_{model}", ["env", f"{switch}=0"] + run + out + sets, ["gpu"]
        size = ["--batch", str(a.batch), "--sequence", str(a.sequence), "--precision", "bf16"]
        yield f"paths_{model}", [dreamc, "compile", spec, "--emit", "cuda", "--architecture", "sm_90a"] + size, []
        rate = [sys.executable, str(PYTORCH / "rate.py"), "--dreamc", dreamc, "--spec", spec, "--device", "cuda", "--precision", "bf16"]
        rate += ["--batch", str(a.batch), "--sequence", str(a.sequence), "--steps", str(a.steps)]
        yield f"torch_{model}", rate, ["gpu", "torch"]


def missing(needs):
    """Why a part cannot run here, or `None`."""
    if "cargo" in needs and not shutil.which("cargo"):
        return "no cargo"
    if "gpu" in needs and not gpu():
        return "no GPU (nvidia-smi finds none)"
    if "torch" in needs:
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            return "no PyTorch"
    return None


def gpu():
    """Name of the first GPU, or an empty string."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    out = subprocess.run(query, capture_output=True, text=True)
    return out.stdout.splitlines()[0].strip() if out.returncode == 0 and out.stdout.strip() else ""


def run(name, command, needs, out):
    reason = missing(needs)
    result = {"name": name, "command": command, "skipped": reason}
    if reason is None:
        begun = time.time()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        text = done.stdout + "\n" + done.stderr
        result.update(code=done.returncode, seconds=time.time() - begun, tail=text[-8000:])
        result["tiles"] = {word: done.stdout.count(word + "<") for word in TILES}
        try:
            result["json"] = last_json(done.stdout)
        except ValueError:
            pass
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))
    state = reason and f"skipped: {reason}" or ("ok" if result["code"] == 0 else f"FAILED ({result['code']})")
    print(f"{name:<28} {state}", flush=True)
    return result


def losses(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def report(out, name):
    """Markdown from the JSON files of the parts."""
    results = {p.stem: json.loads(p.read_text()) for p in sorted(out.glob("*.json"))}
    lines = [f"# {name or 'no GPU'}", "", "| part | result |", "|---|---|"]
    for key, r in results.items():
        state = f"skipped: {r['skipped']}" if r["skipped"] else "ok" if r["code"] == 0 else f"failed ({r['code']})"
        lines.append(f"| {key} | {state} |")
    cpu = losses(out / "run-cpu")
    for device in ("ptx", "cuda"):
        there = losses(out / f"run-{device}")
        if cpu and len(there) == len(cpu):
            apart = max(abs(a - b) / abs(a) for a, b in zip(cpu, there))
            lines.append(f"\nLosses of {len(cpu)} steps, {device} against cpu: {apart:.1e} apart at most.")
    table = []
    for model in MODELS:
        count = results.get(f"count_{model}", {}).get("json", {})
        flops = count.get("flops_per_token", {}).get("training")
        tiles = results.get(f"paths_{model}", {}).get("tiles")
        if tiles:
            lines.append(f"\nProducts of {model} for sm_90a, by kind of tile: " + ", ".join(f"{k} {v}" for k, v in tiles.items()) + ".")
        for who in ("dreamc", "launched", "floor", "torch"):
            r = results.get(f"{who}_{model}", {})
            j = r.get("json")
            if r.get("code") != 0 or not j:
                continue
            rate = j["tokens"] / j["train_seconds"]
            share = utilisation(rate, flops, peak(name)) if flops and peak(name) else None
            used = f"{j['peak_memory'] / 1e9:.1f}"
            table.append((model, who, rate, share, used))
    if table:
        lines += ["", "| model | | tokens/s | FLOP utilisation | memory, GB |", "|---|---|---|---|---|"]
        for model, who, rate, share, used in table:
            shown = "" if share is None else f"{100 * share:.1f} %"
            lines.append(f"| {model} | {who} | {rate:,.0f} | {shown} | {used} |")
    return "\n".join(lines) + "\n"


def text(path, size=1 << 23):
    """Something to train on: repeatable, and no two lines alike."""
    state, words = 1, []
    while len(words) * 6 < size:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(f"{state >> 40:x}"[:5])
    path.write_text("\n".join(" ".join(words[i : i + 16]) for i in range(0, len(words), 16)))


def arguments(argv=None):
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu-results"))
    a.add_argument("--dreamc", type=pathlib.Path, default=ROOT / "target/release/dreamc")
    a.add_argument("--batch", type=int, default=8, help="sequences in a step, the same for both")
    a.add_argument("--sequence", type=int, default=4096)
    a.add_argument("--steps", type=int, default=20)
    a.add_argument("--only", help="parts whose names match this regular expression")
    a.add_argument("--plan", action="store_true", help="print the commands and stop")
    return a.parse_args(argv)


def main(argv=None):
    a = arguments(argv)
    a.out = a.out.resolve()
    chosen = [p for p in parts(a) if not a.only or re.search(a.only, p[0])]
    if a.plan:
        for name, command, needs in chosen:
            print(f"{name}: {' '.join(command)}" + (f"   (needs {', '.join(needs)})" if needs else ""))
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DREAMC_CACHE", str(a.out / "cache"))
    text(a.out / "text.txt")
    failed = [name for name, command, needs in chosen if run(name, command, needs, a.out).get("code", 0) != 0]
    (a.out / "report.md").write_text(report(a.out, gpu()))
    print((a.out / "report.md").read_text())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
