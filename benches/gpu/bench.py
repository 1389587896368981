#!/usr/bin/env python3
"""Everything there is to learn on a machine with a GPU, in three calls of less than ten minutes each:

    python benches/gpu/bench.py --out results --call 1      # is it right
    python benches/gpu/bench.py --out results --call 2      # how fast is it
    python benches/gpu/bench.py --out results --call 3      # against what

The first proves every kernel in processes of its own (`dreamc doctor --gpu`), then asks Hopper's own kernels, under a limit, since what waits for ever shows there; then a memory and a race checker, the
calibration of the PTX device, losses of a small model on cpu and cuda, and every gradient of a model of real width in bf16 with
Hopper's kernels, with those of every GPU, and with naive ones. The second times LA-16 and DR+DA-16 and profiles the kernels that take
most. The third times what the newer paths are worth and PyTorch, same model, same number of tokens in a batch, same precision, and decoding
by vLLM; then what is left. `first-contact` is all of it in half an hour. Without `--call` they run one after another. `results.json` and `report.md` are written anew after each part, so whatever ends this
script, what it did until then is there; a part that fails, or takes longer than its limit, does not stop the others; after `--minutes` no
part begins, and the same call goes on with those that are not done, those that failed last. Parts whose means are missing (no GPU, no PyTorch, no cargo, no
checker) are named with the reason.

    python benches/gpu/bench.py --pack FOLDER --dreamc FILE --tests FOLDER

needs no GPU: it puts the program and the test executable `gpu`, stripped, and all kernels compiled beforehand into a folder to take to a
machine without cargo, where `--dreamc FOLDER/dreamc --tests FOLDER` names them. NVRTC must be of the version that is there. (`cargo test
--release --test gpu --no-run` prints where the test executable is.) Nothing is looked for on a network.

`--plan` prints what would be run and runs nothing; `test_bench.py` tests that, the arithmetic and the report, and
`cargo test --test gpu cuda -- --ignored the_script` runs it on a stand-in for the driver.
"""

import argparse
import array
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTORCH = ROOT / "benches" / "pytorch"
MODELS = ("la-16", "dr-da-16")
# Specs next to this file: two layers of a recurrence and an MLP.
RECURRENT = ("gated-delta", "delta", "mamba2")
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


def batch(dreamc, spec, sequence, most=8):
    """The largest power of two of sequences whose plan fits the first GPU; `most` where nobody can tell."""
    free = smi("memory.free")
    if not free or not pathlib.Path(dreamc).exists():
        return most
    name = smi("name")
    target = next((known.lower() for known in PEAKS if known in name), "h100")
    while most > 1:
        # The plan is that of the GPU, as it is where it runs.
        size = ["--batch", str(most), "--sequence", str(sequence), "--precision", "bf16", "--target", target]
        out = subprocess.run([dreamc, "compile", spec, "--emit", "plan"] + size, capture_output=True, text=True).stdout
        arena = re.match(r"arena (\d+) bytes", out)
        # Room for the context and for the code of kernels.
        if arena and int(arena[1]) + (1 << 30) <= float(free.split()[0]) * (1 << 20):
            break
        most //= 2
    return most


# Kernels that the second call profiles: those that a review of their machine code was about.
PROFILED = "grouped_outer_tiles|grouped_tiles|attention_keys|attention_queries|attention_rows|product_tiles|head_x|head_w|rows"
# Gradients by other kernels from the same weights and tokens, in bf16, relative to their length: twice what an H200 gave,
# where each kernel is as far from f32.
APART = 0.15
CALLS = ("before", "right", "fast", "against")


def parts(a):
    """Call, name, command, what the part needs and its seconds; most telling first."""
    dreamc = str(a.dreamc)
    # Nothing to build for a plan, or where the program came from elsewhere.
    if not a.dreamc.exists() or shutil.which("cargo"):
        yield 0, "build", ["cargo", "build", "--release"], ["cargo"], a.each
    small = [f"train.steps={min(20, 2 * a.steps)}", "train.batch=2", "train.sequence=64", "train.warmup=5", "train.precision=f32"]
    sets = [w for s in small for w in ("--set", s)]

    def losses_of(call, device, *needs):
        tiny = [dreamc, "train", str(ROOT / "examples/tiny-dr-da.yaml"), "--device", device, "--json", "--force"]
        return call, f"losses_{device}", tiny + ["--out", str(a.work / f"run-{device}")] + sets, list(needs), a.each

    models = []
    for model in a.models:
        spec = str(ROOT / "examples" / f"{model}.yaml")
        models.append((model, spec, ["--batch", str(a.batch or batch(dreamc, spec, a.sequence)), "--sequence", str(a.sequence)]))
    for model, spec, size in models:
        yield 0, f"count_{model}", [dreamc, "count", spec, "--json"], [], a.each
        paths = [dreamc, "compile", spec, "--emit", "cuda", "--architecture", "sm_90a", "--precision", "bf16"]
        yield 0, f"paths_{model}", paths + size, [], a.each

    # 1: right.
    shown = ["--nocapture", "--test-threads=1"]
    there = ["env", f"CARGO_MANIFEST_DIR={ROOT}", str((a.tests or a.work) / "gpu")]
    test = ["cargo", "test", "--release", "-q", "--test", "gpu"]

    def of_tests(name, *more):
        return there + [name, *more] + shown if a.tests else test + [name, "--", *more] + shown

    needs = ["gpu"] if a.tests else ["cargo", "gpu"]
    yield 1, "versions", ["sh", "-c", f"nvidia-smi; {dreamc} --version; {sys.executable} -V"], ["gpu"], 30
    # In processes of its own with a watchdog: whatever a kernel does to the GPU, the next part begins.
    yield 1, "doctor", [dreamc, "doctor", "--gpu", "--json"], ["gpu"], 240
    hopper = "a_gpu_does_the_same_with_hoppers_own_ptx"
    yield 1, "hopper", of_tests(hopper), needs, 60
    if a.tests:
        for tool in ("memcheck", "racecheck"):
            yield 1, tool, ["compute-sanitizer", "--tool", tool] + of_tests(hopper), ["gpu", "compute-sanitizer"], 90
    yield 1, "calibration", of_tests("a_gpu_does_the_same_with_the_same_ptx"), needs, 150
    yield losses_of(1, "cpu")
    yield losses_of(1, "cuda", "gpu")
    model, spec, _ = models[0]
    probe = [dreamc, "probe", spec, "--ids", str(a.work / "ids.json"), "--device", "cuda", "--precision", "bf16", "--no-logits"]
    probe += [w for s in a.shrink for w in ("--set", s)]
    for name, switch in (("hopper", []), ("floor", ["DREAMC_HOPPER=0"]), ("naive", ["DREAMC_NAIVE=1"])):
        yield 1, f"probe_{name}", ["env", *switch, *probe, "-o", str(a.work / f"{name}.safetensors")], ["gpu"], 120
    for name in ("floor", "naive"):
        files = [str(a.work / f"{which}.safetensors") for which in ("hopper", name)]
        yield 1, f"gradients_{name}", [sys.executable, str(HERE / "bench.py"), "--agree", *files], ["gpu"], 120

    # 2: fast.
    bench = {}
    for model, spec, size in models:
        bench[model] = [dreamc, "bench", spec, "--device", "cuda", "--json", "--steps", str(a.steps)] + size
        yield 2, f"dreamc_{model}", bench[model] + ["--tokens", "0"], ["gpu"], a.each
    for name in RECURRENT:
        rate = [dreamc, "bench", str(HERE / f"{name}.dream"), "--device", "cuda", "--json", "--steps", str(a.steps), "--tokens", "0"]
        yield 2, f"recurrent_{name}", rate + (["--batch", str(a.batch)] if a.batch else []), ["gpu"], a.each
    for model, _, _ in models:
        profile = ["ncu", "--set", "full", "--clock-control", "none", "--kernel-name", f"regex:{PROFILED}", "--launch-count", "40"]
        profile += ["-f", "-o", str(a.out / f"profile-{model}"), "env", "DREAMC_GRAPHS=0"]
        yield 2, f"profile_{model}", profile + bench[model] + ["--tokens", "0", "--steps", "1"], ["gpu", "ncu"], a.each

    # 3: against what.
    for model, _, _ in models:
        # Launches one by one, `mma.sync` in place of `wgmma`, and no product by cuBLASLt.
        for name, switch in (("floor", "DREAMC_HOPPER"), ("generated", "DREAMC_CUBLASLT"), ("launched", "DREAMC_GRAPHS")):
            yield 3, f"{name}_{model}", ["env", f"{switch}=0"] + bench[model] + ["--tokens", "0"], ["gpu"], a.each
    for compiled in (False, True):
        for model, spec, size in models:
            rate = [sys.executable, str(PYTORCH / "rate.py"), "--dreamc", dreamc, "--spec", spec, "--device", "cuda", "--precision", "bf16"]
            rate += size + ["--steps", str(a.steps)] + (["--compile", "--grouped-mm"] if compiled else [])
            yield 3, f"{'torch' if compiled else 'eager'}_{model}", rate, ["gpu", "torch"], a.each
    for model, _, _ in models:
        yield 3, f"written_{model}", bench[model] + ["--steps", "1"], ["gpu"], a.each
    for name in a.decoded:
        spec = str(ROOT / "examples/published" / f"{name}.yaml")
        decode = [dreamc, "bench", spec, "--decode", "--device", "cuda", "--json", "--tokens", str(a.written)]
        yield 3, f"decoded_{name}", decode, ["gpu"], a.each
        other = [sys.executable, str(HERE / "decode.py"), "--dreamc", dreamc, "--spec", spec, "--work", str(a.work)]
        yield 3, f"vllm_{name}", other + ["--tokens", str(a.written)], ["gpu", "vllm"], a.each
    # Packed weights: bytes of a matrix a second in every format, and a model of a billion numbers by each of some.
    packed = [dreamc, "bench", str(ROOT / "examples/published/llama-3.2-1b.yaml"), "--device", "cuda", "--json"]
    yield 3, "blocks", packed + ["--blocks"], ["gpu"], a.each
    for name in ("bf16", "q8_0", "q4_k"):
        written = packed + ["--decode", "--tokens", str(a.written)]
        yield 3, f"blocks_{name}", written + ([] if name == "bf16" else ["--format", name]), ["gpu"], a.each
    yield 3, "all_train_alike", of_tests("all_examples_train_alike", "--ignored"), needs, a.each
    if not a.tests:
        cargo = ["cargo", "test", "--release", "-q"]
        yield 3, "gpu_tests", cargo + ["-p", "dreamc-device", "cuda", "--"] + shown, ["cargo", "gpu"], a.each
        yield 3, "kernels", of_tests("codegen"), ["cargo"], a.each
    yield 3, "torch_is_the_same_model", [sys.executable, str(PYTORCH / "test_model.py"), "--dreamc", dreamc], ["torch"], a.each
    # Last: it needs no GPU, and long.
    yield losses_of(3, "ptx")


def packing(a):
    """What `--pack` runs: both programs stripped, and the kernels of all models in a cache."""
    for name, file in (("dreamc", a.dreamc), ("gpu", (a.tests or a.work) / "gpu")):
        yield 0, f"strip_{name}", ["strip", "-o", str(a.pack / name), str(file)], [], a.each
    for model in a.models:
        compiled = [str(a.dreamc), "compile", str(ROOT / "examples" / f"{model}.yaml"), "--emit", "cubin", "--architecture", "sm_90a"]
        compiled += ["--target", a.target, "--precision", "bf16", "--batch", str(a.batch or 8), "--sequence", str(a.sequence)]
        yield 0, f"compile_{model}", ["env", f"DREAMC_CACHE={a.pack / 'cache'}"] + compiled, [], a.each


def read_floats(path):
    """Tensors of f32 of a safetensors file, by name."""
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, array.array("f", data[8 + length + begin : 8 + length + end])


def lengths(mine, other):
    """Of the difference of two tensors, and of the second."""
    try:
        import numpy
    except ImportError:
        return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(mine, other))), math.sqrt(math.fsum(y * y for y in other))
    mine, other = (numpy.frombuffer(x, numpy.float32).astype(numpy.float64) for x in (mine, other))
    return float(numpy.linalg.norm(mine - other)), float(numpy.linalg.norm(other))


def agree(left, right):
    """How far the tensors of two probes are apart, relative to their lengths; NaN where either has one."""
    others, worst, count = dict(read_floats(right)), ("", 0.0), 0
    for name, mine in read_floats(left):
        other = others.pop(name)
        apart, length = lengths(mine, other)
        # Gradients that are zero by nature hold rounding noise.
        distance = apart if length < 1e-8 else apart / length
        count += 1
        # A NaN is worst, and stays.
        if not (distance <= worst[1] or math.isnan(worst[1])):
            worst = (name, distance)
    return {"tensors": count, "missing": sorted(others), "worst": worst[0], "apart": worst[1]}


def some_ids(rows, tokens, vocab):
    """Tokens in no order, the same every time."""
    state, ids = 1, []
    for _ in range(rows * tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append((state >> 8) % vocab)
    return [ids[r * tokens : (r + 1) * tokens] for r in range(rows)]


def missing(needs):
    """Why a part cannot run here, or `None`."""
    if "cargo" in needs and not shutil.which("cargo"):
        return "no cargo"
    if "gpu" in needs and not gpu():
        return "no GPU (nvidia-smi finds none)"
    for tool in ("compute-sanitizer", "ncu"):
        if tool in needs and not shutil.which(tool):
            return f"no {tool}"
    import importlib.util

    for module, said in (("torch", "PyTorch"), ("vllm", "vLLM")):
        if module in needs and importlib.util.find_spec(module) is None:
            return f"no {said}"
    return None


@functools.cache
def smi(what):
    """What `nvidia-smi` says of the first GPU; an empty string where there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    out = subprocess.run(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True, text=True)
    return out.stdout.splitlines()[0].strip() if out.returncode == 0 and out.stdout.strip() else ""


def gpu():
    """Name of the first GPU, or an empty string."""
    return smi("name")


def run(name, command, needs, limit):
    """What a part did; it ends after `limit` seconds."""
    reason = missing(needs)
    result = {"name": name, "command": command, "skipped": reason}
    if reason is None:
        begun = time.time()
        try:
            # A group of its own, so that all of it can be ended.
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
            process = subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", **pipes)
            try:
                out, err = process.communicate(timeout=limit)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                err, code = err + f"\nstopped after {limit:.0f} s", 124
        except OSError as error:
            out, err, code = "", str(error), 127
        result.update(code=code, seconds=time.time() - begun, tail=(out[-4000:] + "\n" + err[-4000:]))
        result["tiles"] = {word: out.count(word + "<") for word in TILES}
        try:
            result["json"] = last_json(out)
        except ValueError:
            pass
    state = reason and f"skipped: {reason}" or ("ok" if result["code"] == 0 else f"FAILED ({result['code']})")
    print(f"{name:<28} {state}", flush=True)
    return result


def save(path, text):
    """Whole or as it was before."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def losses(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def who_of(launch):
    """Who computes a launch that cuBLASLt could compute, and what was measured of the two."""
    choice = launch.get("choice")
    return "" if choice is None else f"{'cuBLASLt' if choice['library'] else 'generated'}: {choice['reason']}"


def by_library(model, launches):
    """How much of the plain products of a step is cuBLASLt's; nothing where it was not asked."""
    able = [k for k in launches if "choice" in k]
    taken = [k for k in able if k["choice"]["library"]]
    if not able:
        return []
    share = sum(k["seconds"] for k in taken) / (sum(k["seconds"] for k in able) or 1)
    return [f"\ncuBLASLt computes {len(taken)} of {len(able)} plain products of {model}, {100 * share:.0f} % of their time."]


def proved(results):
    """What `dreamc doctor --gpu` found: kernels that are not right, and those furthest below the roofline."""
    found = results.get("doctor", {}).get("json")
    if not found:
        return []
    lines = [f"\n`dreamc doctor --gpu`: {found['kernels']} kernels on {found['device']}, driver {found['driver']}, NVRTC {found['nvrtc']}; {found['wrong']} wrong."]
    wrong = [line for line in found["lines"] if not line["right"]]
    slow = sorted((k for k in found["lines"] if k["right"] and k.get("share") and k["rung"] != "naive"), key=lambda k: k["share"])
    for title, kernels in (("wrong", wrong), ("furthest below the roofline", slow[:10])):
        if not kernels:
            continue
        lines += ["", f"| {title} | model | rung | shape | µs | roofline | error | found |", "|---|---|---|---|---|---|---|---|"]
        for k in kernels:
            numbers = [k.get("seconds") and f"{k['seconds'] * 1e6:.1f}", k.get("share") and f"{100 * k['share']:.0f} %"]
            numbers.append(f"{k['error']:.1e}" if "error" in k else None)
            cells = [k["kernel"], k["model"], k["rung"], k["shape"], *numbers, k.get("why", k["outcome"])]
            lines.append("| " + " | ".join("" if c is None else " ".join(str(c).split()).replace("|", "/") for c in cells) + " |")
    return lines


def of_blocks(results):
    """How fast packed weights are read, alone and in a model."""
    lines, found = [], (results.get("blocks", {}).get("json") or {}).get("readings", [])
    if found:
        lines += ["", "| a matrix of | rows | µs | GB/s |", "|---|---|---|---|"]
        lines += [f"| {r['format']} | {r['rows']} | {r['seconds'] * 1e6:.1f} | {r['bytes_per_second'] / 1e9:,.0f} |" for r in found]
    written = []
    for part in (part for part in results if part.startswith("blocks_")):
        said = results[part].get("json") or {}
        for d in filter(None, map(said.get, ("decoding", "decoding_eight"))):
            cells = (part[len("blocks_") :], d["sequences"], f"{d['tokens_per_second']:,.0f}", f"{d['prompt_tokens_per_second']:,.0f}")
            written.append((*cells, f"{d['weights_per_second'] / 1e9:,.0f}"))
    if written:
        lines += ["", "| weights in | texts at once | tokens/s | of prompts | GB/s of weights |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in written]
    return lines


def report(results, name):
    """Markdown from what the parts gave."""
    lines = [f"# {name or 'no GPU'}", "", "| part | result |", "|---|---|"]
    for key, r in results.items():
        state = f"skipped: {r['skipped']}" if r["skipped"] else "ok" if r["code"] == 0 else f"failed ({r['code']})"
        lines.append(f"| {key} | {state} |")
    lines += proved(results)
    cpu = results.get("losses_cpu", {}).get("losses", [])
    for device in ("ptx", "cuda"):
        there = results.get(f"losses_{device}", {}).get("losses", [])
        if cpu and len(there) == len(cpu):
            apart = max(abs(a - b) / abs(a) for a, b in zip(cpu, there))
            lines.append(f"\nLosses of {len(cpu)} steps, {device} against cpu: {apart:.1e} apart at most.")
    for other in ("floor", "naive"):
        found = results.get(f"gradients_{other}", {}).get("json")
        if found:
            what = {"floor": "those of every GPU", "naive": "naive ones"}[other]
            lines.append(f"\nGradients by Hopper's kernels against {what}: {found['apart']:.1e} apart at most ({found['worst']}).")
    table, kernels = [], []
    for model in [key[len("count_") :] for key in results if key.startswith("count_")]:
        count = results[f"count_{model}"].get("json", {})
        flops = count.get("flops_per_token", {}).get("training")
        tiles = results.get(f"paths_{model}", {}).get("tiles")
        if tiles:
            lines.append(f"\nProducts of {model} for sm_90a, by kind of tile: " + ", ".join(f"{k} {v}" for k, v in tiles.items()) + ".")
        for who in ("dreamc", "launched", "floor", "generated", "torch", "eager"):
            r = results.get(f"{who}_{model}", {})
            j = r.get("json")
            if r.get("code") != 0 or not j or "training" not in j:
                continue
            rate = j["training"]["tokens_per_second"]
            share = utilisation(rate, flops, peak(name)) if flops and peak(name) else None
            memory = j["peak_memory"] if "peak_memory" in j else j["training"]["memory"]["total"]
            writing = results.get(f"written_{model}", {}).get("json") if who == "dreamc" else j
            written = ((writing or {}).get("decoding") or {}).get("tokens_per_second")
            table.append((model, who, rate, share, f"{memory / 1e9:.1f}", "" if written is None else f"{written:,.0f}"))
            if who == "dreamc":
                all_of_it = sum(k["seconds"] for k in j["training"]["launches"]) or 1
                for k in j["training"]["launches"][:20]:
                    flop_rate = k["flops"] / k["seconds"] if k["flops"] and k["seconds"] else None
                    reached = f"{flop_rate / 1e12:.1f}" if flop_rate else ""
                    of_peak = f"{100 * flop_rate / peak(name):.0f} %" if flop_rate and peak(name) else ""
                    times = (k["count"], k["seconds"] * 1e3, k["seconds"] / all_of_it)
                    kernels.append((model, k["origin"], k["kernel"], *times, reached, of_peak, who_of(k)))
                lines += by_library(model, j["training"]["launches"])
                ceiling = (j.get("ceiling") or {}).get("bf16")
                if ceiling:
                    lines.append(f"\nA large product of bf16 in dreamc: {ceiling / 1e12:.0f} TFLOP/s.")
    if table:
        lines += ["", "| model | | tokens/s | FLOP utilisation | memory, GB | written tokens/s |", "|---|---|---|---|---|---|"]
        for model, who, rate, share, used, written in table:
            shown = "" if share is None else f"{100 * share:.1f} %"
            lines.append(f"| {model} | {who} | {rate:,.0f} | {shown} | {used} | {written} |")
    if kernels:
        lines += ["", "| model | launch | kernel | times | ms | share | TFLOP/s | of the peak | by |", "|---|---|---|---|---|---|---|---|---|"]
        for model, origin, kernel, times, ms, share, rate, of_peak, by in kernels:
            lines.append(f"| {model} | {origin} | {kernel} | {times} | {ms:.3f} | {100 * share:.1f} % | {rate} | {of_peak} | {by} |")
    written = []
    for who, key in (("dreamc", "decoded_"), ("vLLM", "vllm_")):
        for part in (part for part in results if part.startswith(key)):
            said = results[part].get("json") or {}
            for found in filter(None, map(said.get, ("decoding", "decoding_eight"))):
                written.append((part[len(key) :], who, found["sequences"], found["tokens_per_second"]))
    if written:
        lines += ["", "| model | written by | texts at once | tokens/s |", "|---|---|---|---|"]
        lines += [f"| {model} | {who} | {texts} | {rate:,.0f} |" for model, who, texts, rate in sorted(written)]
    lines += of_blocks(results)
    recurrent = []
    for part in (part for part in results if part.startswith("recurrent_")):
        training = (results[part].get("json") or {}).get("training") or {}
        launches = training.get("launches") or []
        # Of one layer.
        each = {k["kernel"].split(" ")[0]: f"{k['seconds'] / k['count'] * 1e3:.2f}" for k in launches}
        times = [each.get(f"linear_attention{kind}", "") for kind in ("", "_grad")]
        if training:
            recurrent.append((part[len("recurrent_") :], training["tokens_per_second"], *times))
    if recurrent:
        lines += ["", "| recurrence | tokens/s | forward, ms | backward, ms |", "|---|---|---|---|"]
        lines += [f"| {name} | {rate:,.0f} | {forward} | {backward} |" for name, rate, forward, backward in recurrent]
    return "\n".join(lines) + "\n"


def arguments(argv=None):
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu-results"), help="for results.json and report.md")
    a.add_argument("--work", type=pathlib.Path, default=ROOT / "target/gpu-bench", help="for runs and compiled kernels")
    a.add_argument("--dreamc", type=pathlib.Path, default=ROOT / "target/release/dreamc")
    a.add_argument("--tests", type=pathlib.Path, help="folder with the test executable `gpu`, where there is no cargo")
    a.add_argument("--models", type=lambda s: s.split(","), default=list(MODELS), help="of examples/, with commas")
    a.add_argument("--decoded", type=lambda s: s.split(","), default=["llama-3.2-1b"], help="of examples/published/, with commas: vLLM has their class")
    a.add_argument("--written", type=int, default=128, help="tokens that they write")
    a.add_argument("--batch", type=int, help="sequences in a step, the same for both; up to 8 by default, as many as fit")
    a.add_argument("--sequence", type=int, default=4096)
    a.add_argument("--steps", type=int, default=10)
    a.add_argument("--minutes", type=float, default=9.0, help="after which no part begins, and none goes on")
    a.add_argument("--each", type=float, default=240.0, help="seconds that a part may take")
    a.add_argument("--call", type=int, choices=(1, 2, 3), help="the parts of one call: is it right, how fast is it, against what")
    a.add_argument("--shrink", type=lambda s: s.split(","), default=["let.depth=2"], help="FIELD=VALUE of the model whose gradients are compared")
    a.add_argument("--tokens", type=int, default=1024, help="tokens of a row whose gradients are compared")
    a.add_argument("--only", help="parts whose names match this regular expression")
    a.add_argument("--again", action="store_true", help="also parts that are done")
    a.add_argument("--pack", type=pathlib.Path, help="put stripped programs and compiled kernels there, and stop")
    a.add_argument("--target", default="h200", help="the GPU that --pack compiles for")
    a.add_argument("--agree", nargs=2, type=pathlib.Path, metavar="FILE", help="compare two probes, and stop")
    a.add_argument("--plan", action="store_true", help="print the commands and stop")
    a = a.parse_args(argv)
    a.out, a.work, a.dreamc, a.tests, a.pack = (p and p.resolve() for p in (a.out, a.work, a.dreamc, a.tests, a.pack))
    return a


def untried_first(chosen, results):
    """Those that are not done, in their order: first those that nobody tried, then those that failed or were stopped."""
    left = [p for p in chosen if results.get(p[1], {}).get("code") != 0]
    return sorted(left, key=lambda p: "code" in results.get(p[1], {}))


def main(argv=None):
    # What chooses the batch is part of the call.
    begun = time.time()
    a = arguments(argv)
    if a.agree:
        found = agree(*a.agree)
        print(json.dumps(found))
        return 0 if found["apart"] <= APART and not found["missing"] else 1
    if a.pack and not a.plan:
        a.pack.mkdir(parents=True, exist_ok=True)
    # Of another call, what needs no GPU and is done before.
    chosen = [p for p in (packing(a) if a.pack else parts(a)) if not a.call or p[0] in (0, a.call)]
    chosen = [p for p in chosen if not a.only or re.search(a.only, p[1])]
    if a.plan:
        for call, name, command, needs, limit in chosen:
            asks = f"   (needs {', '.join(needs)})" if needs else ""
            print(f"{CALLS[call]}: {name}: {' '.join(command)}{asks}   at most {limit:.0f} s")
        return 0
    end = begun + 60 * a.minutes
    a.out.mkdir(parents=True, exist_ok=True)
    a.work.mkdir(parents=True, exist_ok=True)
    (a.work / "ids.json").write_text(json.dumps(some_ids(4, a.tokens + 1, 256)))
    packed = a.dreamc.parent / "cache"
    os.environ.setdefault("DREAMC_CACHE", str(packed if packed.is_dir() else a.work / "cache"))
    # PyTorch brings NVRTC.
    os.environ.setdefault("VIRTUAL_ENV", sys.prefix)
    kept = a.out / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    name, failed = gpu(), []
    for _, part, command, needs, limit in chosen if a.again else untried_first(chosen, results):
        left = end - time.time()
        if left < 5:
            results[part] = {"name": part, "command": command, "skipped": "no time left; the same call goes on"}
        else:
            results[part] = run(part, command, needs, min(left, limit))
            if part.startswith("losses_"):
                results[part]["losses"] = losses(a.work / f"run-{part[len('losses_') :]}")
        if results[part].get("code", 0) != 0:
            failed.append(part)
        save(kept, json.dumps(results, indent=1))
        save(a.out / "report.md", report(results, name))
    print(report(results, name))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
