#!/usr/bin/env python3
"""Best learning rates over width and depth under each parametrisation, one small run after another:

    python benches/cpu/transfer.py --dreamc target/release/dreamc --out transfer --minutes 60

A run is a folder of `--out`, named by what it is; one that has a `result.json` is never trained again, so that a later call goes on where
this one stopped. Widths come before depths. `--plan` says how many there are and how many are done; `--report`
prints the tables of docs/results/transfer.md from what is there and trains nothing.

The text is a chain of symbols, drawn by the one or the two before it from fixed tables, written by this script from a fixed seed: its loss
falls within a hundred steps, and further in a wider model. The base is a hidden size of 16 and two layers; there all rules are the same,
and it is trained once.
"""

import argparse
import json
import math
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time

RATES = [0.002, 0.004, 0.008, 0.016, 0.032, 0.064]
RULES = ["standard", "mup", "completep", "spectral"]
WIDTHS = [16, 32, 48, 64, 128]
DEPTHS = [2, 4, 8]
BASE = (16, 2)
HEAD = 8
STEPS = 160


def attention(width):
    return f"{{sequence: {{heads: {width // HEAD}, kv_heads: {width // HEAD // 2}, head_size: {HEAD}}}}}"


def experts(width):
    return f"{{experts: {{count: 4, active: 2, intermediate: {width}, query: {width // 2}, balance: 1e-3}}}}"


def mlp(width):
    return f"{{mlp: {{intermediate: {2 * width}}}}}"


def parts(model, width, depth):
    """Components, body, and lines of the model and of the base."""
    sa = ("sa", attention(width))
    if model == "layered":
        return [sa, ("mlp", mlp(width))], f'{{repeat: {depth}, layers: ["sa > mlp"]}}', "", ""
    if model == "dr":
        return [sa, ("ea", experts(width))], f'{{recur: {depth}, layers: ["sa > ea"]}}', "", f"passes: {BASE[1]}"
    if model == "dr-da":
        da = ("da", f"{{depth: {{heads: 1, head_size: {HEAD}}}}}")
        return [sa, da, ("ea", experts(width))], f'{{recur: {depth}, layers: ["(da | sa) > ea"]}}', "", f"passes: {BASE[1]}, sizes: {{da.heads: 1, da.kv_heads: 1}}"
    if model == "moe":
        return [sa, ("ea", experts(width))], f'{{repeat: {depth}, layers: ["sa > ea"]}}', "", ""
    if model == "hyper":
        return [sa, ("mlp", mlp(width))], f'{{repeat: {depth}, layers: ["sa > mlp"]}}', "  stream: {lanes: 4, kind: dynamic}\n", ""
    gd = ("gd", f"{{gated_delta: {{heads: {width // HEAD}, size: {HEAD}}}}}")
    return [gd, ("mlp", mlp(width))], f'{{repeat: {depth}, layers: ["gd > mlp"]}}', "", f"sizes: {{gd.heads: {BASE[0] // HEAD}}}"


MODELS = ["layered", "dr", "dr-da", "moe", "hyper", "gated-delta"]


def spec(run):
    model, rule, width, depth, rate, seed = run
    components, body, stream, more = parts(model, width, depth)
    transfer = f"  transfer: {{rule: {rule}, width: {BASE[0]}, depth: {BASE[1]}{', ' + more if more else ''}}}\n"
    return (
        f"model:\n  name: {model}\n  vocab: 256\n  hidden: {width}\n  context: 32\n{stream}  components:\n"
        + "".join(f"    {name}: {value}\n" for name, value in components)
        + f"  body:\n    - {body}\n"
        + "data: {text: ../chain.txt, validation: 0.02}\n"
        + f"train:\n  steps: {STEPS}\n  batch: 8\n  sequence: 32\n  learning_rate: {rate}\n  warmup: 16\n  schedule: cosine\n"
        + f"  precision: f32\n  seed: {seed}\n  evaluate: {{every: 0}}\n"
        + (transfer if (width, depth) != BASE else "")
    )


def name(run):
    model, rule, width, depth, rate, seed = run
    rule = "base" if (width, depth) == BASE else rule
    return f"{model}-{rule}-w{width}-d{depth}-r{rate}-s{seed}"


def chain(path):
    """A text of 300,000 symbols, each drawn by the one before it or, every other time, by the two before it."""
    draw = random.Random(40)
    letters = "abcdefghijklmnopqrstuvwxyz .,\n()"
    weights = [1 / (1 + k) ** 1.5 for k in range(6)]
    table = {}
    a, b = "ab"
    out = [a, b]
    for _ in range(300_000):
        state = (a, b) if draw.random() < 0.5 else b
        if state not in table:
            table[state] = sorted(letters, key=lambda _: draw.random())[:6]
        a, b = b, draw.choices(table[state], weights)[0]
        out.append(b)
    path.write_text("".join(out))


# Rules and their shapes, in lots: each is trained with every seed before the next begins.
LOTS = [
    [
        (["standard", "mup"], [(w, BASE[1]) for w in (16, 32, 64)]),
        (["standard", "mup", "completep"], [(BASE[0], 4)]),
        (["standard", "mup"], [(48, BASE[1])]),
        (["standard", "mup", "completep"], [(BASE[0], 8)]),
    ],
    [
        (["completep", "spectral"], [(w, BASE[1]) for w in (32, 64, 48)]),
    ],
    [
        (["standard", "mup", "completep", "spectral"], [(128, BASE[1])]),
    ],
]


def runs(seeds):
    """All runs in their order: each lot for each seed for all models, widths first."""
    for stages in LOTS:
        for seed in range(seeds):
            for rules, shapes in stages:
                for width, depth in shapes:
                    for model in MODELS:
                        # The base is the same under every rule.
                        for rule in rules[:1] if (width, depth) == BASE else rules:
                            for rate in RATES:
                                yield (model, rule, width, depth, rate, seed)


def train(a, run):
    folder = a.out / name(run)
    if (folder / "result.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(spec(run))
    began = time.time()
    command = [str(a.dreamc), "train", str(folder / "spec.yaml"), "--threads", "1", "--out", str(folder / "run"), "--json", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    result = {"run": run, "seconds": time.time() - began, "code": done.returncode}
    if done.returncode == 0:
        ledger = json.loads(done.stdout)
        result["loss"] = ledger["validation_loss"]
        result["ledger"] = ledger
    elif not (folder / "run").is_dir():
        raise SystemExit(f"{name(run)} was refused: {done.stderr}{done.stdout}")
    else:
        # A run that leaves the numbers is a trial as well, and a loss beyond any.
        result["error"] = done.stderr[-2000:]
    # The curve, without the weights.
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    (folder / "result.json").write_text(json.dumps(result))
    print(f"{name(run)}: {result.get('loss')} in {result['seconds']:.1f} s", flush=True)


def results(a):
    """Held-out losses and FLOPs of training by model, rule, width, depth and rate; one of each seed."""
    losses, flops = {}, {}
    for path in sorted(a.out.glob("*/result.json")):
        r = json.loads(path.read_text())
        model, rule, width, depth, rate, seed = r["run"]
        key = (model, "base" if (width, depth) == BASE else rule, width, depth)
        loss = r.get("loss")
        losses.setdefault(key, {}).setdefault(rate, {})[seed] = math.inf if loss is None else loss
        flops[(model, width, depth)] = r.get("ledger", {}).get("executed_flops", 0)
    return losses, flops


def tuned(found):
    """The best rate by means over the seeds that all rates have, and losses by rate and seed; none where a rate is missing."""
    if any(rate not in found for rate in RATES):
        return None
    seeds = sorted(set.intersection(*(set(found[rate]) for rate in RATES)))
    if not seeds:
        return None
    losses = {rate: [found[rate][seed] for seed in seeds] for rate in RATES}
    best = min(RATES, key=lambda rate: statistics.fmean(losses[rate]))
    return best, losses, len(seeds)


def lost(found, base):
    """What the rate loses that is the base's best, mean and deviation over seeds of differences to the best rate here."""
    best, losses, _ = found
    by_seed = [there - here for there, here in zip(losses[base[0]], losses[best])]
    mean = statistics.fmean(by_seed)
    if best == base[0]:
        return "0"
    if math.isinf(mean):
        return "∞"
    return f"{mean:.3f}" + (f" ± {statistics.stdev(by_seed):.3f}" if len(by_seed) > 1 else "")


def report(a):
    losses, flops = results(a)
    of = lambda model, rule, w, d: tuned(losses.get((model, "base" if (w, d) == BASE else rule, w, d), {}))
    print(f"{sum(len(s) for r in losses.values() for s in r.values())} runs are done.\n")
    for title, rules, shapes in (
        ("width", RULES, [(w, BASE[1]) for w in WIDTHS]),
        ("depth", RULES[:3], [(BASE[0], d) for d in DEPTHS]),
    ):
        names = [str(w if title == "width" else d) for w, d in shapes]
        print(f"| model | rule | best rate at {title} {' | '.join(names)} | lost by the base's rate at {' | '.join(names[1:])} |")
        print("|---|---|" + "---:|" * (2 * len(shapes) - 1))
        for model in MODELS:
            for rule in rules:
                found = [of(model, rule, w, d) for w, d in shapes]
                if not any(found[1:]):
                    continue
                base = found[0]
                mark = lambda f: "–" if f is None else f"{f[0]:g}" + ("*" if f[0] in (RATES[0], RATES[-1]) else "")
                cells = [mark(f) for f in found] + ["–" if f is None or base is None else lost(f, base) for f in found[1:]]
                print(f"| {model} | `{rule}` | " + " | ".join(cells) + " |")
        print()
    print("| model | FLOPs of tuning at every width | at the base, carried | less by |\n|---|---:|---:|---:|")
    for model in MODELS:
        each = [flops.get((model, w, BASE[1])) for w in WIDTHS]
        done = [f for f in each if f]
        if each[0] and len(done) > 1:
            every, base = len(RATES) * sum(done), len(RATES) * each[0]
            print(f"| {model}, {len(done)} widths | {every:.2e} | {base:.2e} | {every / base:.1f} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dreamc", type=pathlib.Path, default=pathlib.Path("target/release/dreamc"))
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("transfer"))
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    p.add_argument("--share", default="1/1", help="train the K-th of N shares of the runs: 1/2 and 2/2 are two processes of one folder")
    p.add_argument("--plan", action="store_true")
    p.add_argument("--report", action="store_true")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(runs(a.seeds)))
    if a.plan:
        done = sum((a.out / name(r) / "result.json").is_file() for r in wanted)
        print(f"{len(wanted)} runs, {done} of them done")
        return
    if a.report:
        report(a)
        return
    if not (a.out / "chain.txt").is_file():
        chain(a.out / "chain.txt")
    end = time.time() + 60 * a.minutes
    share, of = map(int, a.share.split("/"))
    for run in wanted[share - 1 :: of]:
        if time.time() > end:
            break
        train(a, run)


if __name__ == "__main__":
    sys.exit(main())
