#!/usr/bin/env python3
"""dreamc against PyTorch on this processor, in one call:

    python benches/cpu/bench.py --threads 2 --out results

For each of the models `a` to `d` (the specs beside this file) both train the same model from the same kind of weights on as many tokens
in a step. PyTorch is run eager and compiled, experts' products one by one and by one grouped operation, in f32 and with products in bf16; the
best of these counts, and what falls far behind it in the first round runs no more. Dense models `d` and `e` (1.2 B) are written with as well, beside llama.cpp on the same shape (`llama.py`). All of it is
repeated with the instructions of older processors: AVX-512 without bf16, and AVX2, for dreamc and PyTorch. Everything runs in rounds, one
after another, so that no side has the machine to itself when it is quiet, and the median of the rounds is reported, ratios with the least
and the most. That both compute the same logits, loss and gradients is checked first (`benches/pytorch/test_model.py`).

`--scaling` measures how time grows with depth, experts and context instead, `--decode` writing alone. `--plan` prints the commands. `report.md` and a JSON file
for every run are left in `--out`; `test_bench.py` tests the arithmetic and the report.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import llama

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTORCH = ROOT / "benches" / "pytorch"
MODELS = {"a": (8, 256), "b": (8, 256), "c": (4, 512), "d": (1, 1024)}
# Dense models to write with.
WRITTEN = ("d", "e")
# Instructions: what dreamc and PyTorch are told to use. The processor's own best is the first.
LEVELS = {
    "": [],
    "avx512": ["DREAMC_CPU=avx512", "ATEN_CPU_CAPABILITY=avx512", "ONEDNN_MAX_CPU_ISA=AVX512_CORE"],
    "avx2": ["DREAMC_CPU=avx2", "ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2"],
}
# A variant of PyTorch is run again if its first round reached this part of the best one's: the same command varies by less.
CHANCE = 0.7
# What is changed of model (a), and to what.
SCALING = {
    "depth": [["model.body[0].recur=4"], ["model.body[0].recur=8"], ["model.body[0].recur=16"]],
    "experts": [["ea.count=16"], ["ea.count=64"], ["ea.count=256"]],
    "context": [["context=128", "train.sequence=128"], ["context=256"], ["context=512", "train.sequence=512"]],
}


def dreamc(a, model, precision, sets=()):
    batch, sequence = MODELS[model]
    sequence = next((int(s.split("=")[1]) for s in sets if s.startswith("context")), sequence)
    command = [str(a.dreamc), "bench", str(HERE / f"{model}.yaml"), "--json", "--threads", str(a.threads)]
    command += ["--batch", str(batch), "--sequence", str(sequence), "--steps", str(a.steps)]
    for s in [f"train.precision={precision}", *sets]:
        command += ["--set", s]
    return command


def torch(a, model, precision, compiled, grouped, sets=()):
    batch, sequence = MODELS[model]
    sequence = next((int(s.split("=")[1]) for s in sets if s.startswith("context")), sequence)
    command = [a.python, str(PYTORCH / "rate.py"), "--dreamc", str(a.dreamc), "--spec", str(HERE / f"{model}.yaml")]
    command += ["--batch", str(batch), "--sequence", str(sequence), "--steps", str(a.steps)]
    command += ["--threads", str(a.threads), "--precision", precision]
    command += ["--compile"] * compiled + ["--grouped-mm"] * grouped
    for s in sets:
        command += ["--set", s]
    return command


def runs(a):
    """Name and command of every run of a round."""
    if a.scaling:
        for axis, points in SCALING.items():
            for sets in points:
                label = f"{axis} {sets[0].split('=')[1]}"
                yield ("a", f"dreamc {label}"), dreamc(a, "a", "bf16", sets)
                yield ("a", f"torch {label}"), torch(a, "a", "f32", not a.eager, True, sets)
        return
    for level in a.levels:
        # What PyTorch compiled with other instructions it would load again, and crash.
        cache = f"TORCHINDUCTOR_CACHE_DIR={a.out.resolve() / f'inductor-{level}'}"
        env, at = (["env", cache, *LEVELS[level]], f" @{level}") if level else ([], "")
        for model in a.models if not a.decode else ():
            experts = model != "d"
            # Without products of bf16 training computes in f32.
            for precision in ("f32",) if level else ("f32", "bf16"):
                yield (model, f"dreamc {precision}{at}"), env + dreamc(a, model, precision)
                for compiled in (False, True):
                    for grouped in (False, True) if experts else (False,):
                        kind = ("compiled" if compiled else "eager") + (" grouped" if grouped else "")
                        yield (model, f"torch {precision} {kind}{at}"), env + torch(a, model, precision, compiled, grouped)
        for model in a.written:
            command = [str(a.dreamc), "bench", str(HERE / f"{model}.yaml"), "--decode", "--json"]
            command += ["--threads", str(a.threads), "--tokens", str(a.tokens)]
            yield (f"{model}, written", f"dreamc{at}"), env + command
            if not level:
                command = [a.python, str(HERE / "llama.py"), "--model", model]
                command += ["--threads", str(a.threads), "--tokens", str(a.tokens)]
                yield (f"{model}, written", "llama.cpp bf16"), command


def median(results, path):
    """Of the rounds, what lies behind a path of keys; `None` where no round has it."""
    found = []
    for result in results:
        for key in path.split("."):
            result = (result or {}).get(key)
        if result is not None:
            found.append(result)
    return statistics.median(found) if found else None


def level(name):
    """The instructions of a run."""
    return name.partition(" @")[2]


def spread(mine, other, path):
    """Ratios of runs of the same round: the median, the least and the most; nothing where no round has both."""
    pairs = [(median([a], path), median([b], path)) for a, b in zip(mine, other)]
    ratios = [a / b for a, b in pairs if a and b]
    return f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} – {max(ratios):.2f})" if ratios else ""


def best(results, prefix, at=""):
    """The run of most tokens a second among those whose names begin so, with such instructions: name and rounds."""
    there = {name: rounds for name, rounds in results.items() if name.startswith(prefix) and level(name) == at}
    rated = [(median(rounds, "training.tokens_per_second") or 0, name) for name, rounds in there.items()]
    rate, name = max(rated, default=(0, None))
    return (name, there[name]) if rate else (None, [])


def behind(results):
    """PyTorch's runs that cannot be its best: below `CHANCE` of it, each with the instructions that it had."""
    slow = set()
    for model, runs in results.items():
        for name, rounds in runs.items():
            rate = median(rounds, "training.tokens_per_second") or 0
            top = median(best(runs, "torch", level(name))[1], "training.tokens_per_second") or 0
            if name.startswith("torch") and rate < CHANCE * top:
                slow.add((model, name))
    return slow


def growth(results):
    """Markdown of `--scaling`: `{"dreamc depth 4": [result of a round, ...], ...}`."""
    lines = ["| what grows | | dreamc, ms a step | | PyTorch, ms a step | | dreamc against it |", "|---|---|---|---|---|---|---|"]

    def step(side, label):
        seconds = median(results.get(f"{side} {label}", []), "training.step_seconds")
        return seconds and 1e3 * seconds

    for axis, points in SCALING.items():
        first = {}
        for sets in points:
            label = f"{axis} {sets[0].split('=')[1]}"
            times = {side: step(side, label) for side in ("dreamc", "torch")}
            cells = [axis, sets[0].split("=")[1]]
            for side, time in times.items():
                first.setdefault(side, time)
                cells += [f"{time:,.0f}" if time else "", f"{time / first[side]:.2f} ×" if time and first[side] else ""]
            both = times["dreamc"] and times["torch"]
            cells.append(f"{times['torch'] / times['dreamc']:.2f} ×" if both else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report(all_results):
    """Markdown: `{model: {name: [result of a round, ...]}}`."""
    def number(x, form="{:,.0f}"):
        return "" if x is None else form.format(x)

    trained = {model: runs for model, runs in all_results.items() if not model.endswith("written")}
    lines = ["| model | | tokens/s | against PyTorch's best | memory, MB | tokens/s written | share of the ceiling |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for model, results in trained.items():
        for run, these in results.items():
            name, rounds = best(results, "torch", level(run))
            mine = median(these, "training.tokens_per_second")
            if run.startswith("torch") and run != name:
                continue
            against = spread(these, rounds, "training.tokens_per_second")
            memory = median(these, "peak_resident")
            precision = "bf16" if " bf16" in run else "f32"
            ceiling, flops = median(these, f"ceiling.{precision}"), median(these, "training.flops_per_second")
            share = 100 * flops / ceiling if ceiling and flops else None
            cells = [model, run, number(mine), against, number(memory and memory / 1e6)]
            cells += [number(median(these, "decoding.tokens_per_second")), number(share, "{:.0f} %")]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| model | | tokens/s | weights, GB/s | reading alone, GB/s | share of it | eight at once | against llama.cpp |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for model, results in all_results.items():
        for run, these in results.items() if model.endswith("written") else ():
            rates = [median(these, f"{key}.tokens_per_second") for key in ("decoding", "decoding_eight")]
            weights, read = (median(these, f"decoding.{key}") for key in ("weights_per_second", "read"))
            # Of each run by itself: the memory's speed is another in the next one.
            parts = [(median([run], "decoding.weights_per_second"), median([run], "decoding.read")) for run in these]
            shares = [100 * w / r for w, r in parts if w and r]
            share = f"{statistics.median(shares):.0f} % ({min(shares):.0f} – {max(shares):.0f})" if shares else ""
            eight = rates[1] / rates[0] if all(rates) else None
            other = results.get("llama.cpp bf16", []) if run.startswith("dreamc") else []
            cells = [model, run, number(rates[0], "{:,.1f}"), number(weights and weights / 1e9, "{:.1f}")]
            cells += [number(read and read / 1e9, "{:.1f}"), share, number(eight, "{:.1f} ×")]
            cells.append(spread(these, other, "decoding.tokens_per_second"))
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "All runs, tokens/s, median of the rounds:", ""]
    for model, results in trained.items():
        rates = ((name, median(rounds, "training.tokens_per_second")) for name, rounds in results.items())
        lines.append(f"- {model}: " + ", ".join(f"{name} {number(rate) or 'failed'}" for name, rate in rates))
    return "\n".join(lines) + "\n"


def arguments(argv=None):
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=pathlib.Path, default=pathlib.Path("cpu-results"))
    a.add_argument("--dreamc", type=pathlib.Path, default=ROOT / "target/release/dreamc")
    a.add_argument("--python", default=sys.executable, help="a Python that has PyTorch")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--steps", type=int, default=5)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--models", default="abcd", help="some of abcd")
    a.add_argument("--written", default="de", help="some of de")
    a.add_argument("--levels", default=",".join(LEVELS), help="instructions, with commas: nothing for the processor's best, avx512, avx2")
    a.add_argument("--tokens", type=int, default=32, help="tokens written")
    a.add_argument("--decode", action="store_true", help="writing alone")
    a.add_argument("--scaling", action="store_true")
    a.add_argument("--eager", action="store_true", help="with --scaling: PyTorch as it is, not compiled for every point")
    a.add_argument("--limit", type=int, default=600, help="seconds that one run may take")
    a.add_argument("--plan", action="store_true")
    a = a.parse_args(argv)
    a.levels = a.levels.split(",")
    return a


def main(argv=None):
    a = arguments(argv)
    a.dreamc = a.dreamc.resolve()
    everything = list(runs(a))
    if a.plan:
        for (model, name), command in everything:
            print(f"{model}: {name}: {' '.join(command)}")
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    command = [a.python, str(PYTORCH / "test_model.py"), "--dreamc", str(a.dreamc)]
    if not a.decode and subprocess.run(command).returncode != 0:
        print("the two do not compute the same model (or there is no PyTorch): nothing is compared", file=sys.stderr)
        return 1
    results, missing, slow = {}, set(), set()
    for number in range(a.rounds):
        for (model, name), command in everything:
            if name in missing or (model, name) in slow:
                continue
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=a.limit)
                text = done.stdout[done.stdout.index("{") :] if done.returncode == 0 else ""
                result, error = json.loads(text or "{}"), done.stderr[-2000:]
                if done.returncode == llama.MISSING and name.startswith("llama"):
                    print(f"{name}: skipped: {error.strip()}", flush=True)
                    missing.add(name)
                    continue
            except subprocess.TimeoutExpired:
                result, error = {}, f"over {a.limit} s"
            results.setdefault(model, {}).setdefault(name, []).append(result)
            rate = (result.get("training") or result.get("decoding") or {}).get("tokens_per_second")
            print(f"{number + 1}/{a.rounds} {model} {name}: {rate and round(rate)} {'' if result else error}", flush=True)
            (a.out / "results.json").write_text(json.dumps(results, indent=1))
            (a.out / "report.md").write_text(growth(results["a"]) if a.scaling else report(results))
        slow = slow if a.scaling else behind(results)
    print((a.out / "report.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
