#!/usr/bin/env python3
"""Seconds and memory of checkpoints that ranks write, programs in turns:

    python benches/cpu/parts.py target/release/dreamc [OTHER/dreamc] --rounds 3

Four ranks train a model of 85 million parameters in f32 with its weights cut over them, and keep a checkpoint after the second step of
three. A round says how long the third step took, which the checkpoint shares with training, after what time the checkpoint had its name,
and the most memory of each rank; the last line of a program is the median of its rounds.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

RANKS = 4
SPEC = """model parts {
  vocab 256
  hidden 768
  context 64
  sa = sequence { heads 12  head_size 64 }
  ff = mlp { intermediate 3072 }
  repeat 12 { sa > ff }
}
data { text "book.txt" }
train {
  steps 3  batch 4  accumulate 4  sequence 16  precision f32
  parallel { data 4  shard weights }
  checkpoint { every 2  minutes 0  keep 1 }
  evaluate { every 0 }
}
"""


def children(parent):
    """Ranks that `dreamc launch` started, and their processes."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = pathlib.Path("/proc", process, "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == parent:
                for text in pathlib.Path("/proc", process, "environ").read_bytes().split(b"\0"):
                    if text.startswith(b"RANK="):
                        yield int(text[5:]), process
        except (OSError, IndexError):
            pass


def most(process):
    """The most memory that a process has had, in bytes; nothing after it ended."""
    try:
        lines = pathlib.Path("/proc", process, "status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
    except OSError:
        return 0


def measure(program, folder):
    spec, run = folder / "parts.dream", folder / "run"
    spec.write_text(SPEC)
    (folder / "book.txt").write_text("all that a rank holds, and no more. " * 500)
    job = subprocess.Popen([program, "launch", "-n", str(RANKS), "train", spec, "--out", run, "-q"], stdout=subprocess.DEVNULL)
    steps, named, memory, ranks = [], None, {}, []
    while job.poll() is None:
        if len(ranks) < RANKS:
            ranks = list(children(job.pid))
        for rank, process in ranks:
            memory[rank] = max(most(process), memory.get(rank, 0))
        metrics = run / "metrics.jsonl"
        done = metrics.read_text().count('"loss"') if metrics.exists() else 0
        steps += [time.monotonic()] * (done - len(steps))
        if named is None and (run / "checkpoints/step-00000002").exists():
            named = time.monotonic()
        time.sleep(0.01)
    if job.returncode != 0 or len(steps) < 3 or named is None:
        sys.exit(f"{program}: ended with {job.returncode} after {len(steps)} steps")
    first, second, third = steps[:3]
    others = max(bytes for rank, bytes in memory.items() if rank > 0)
    return {
        "step before, s": second - first,
        "step that it shares, s": third - second,
        "named after, s": named - second,
        "rank 0, GB": memory[0] / 1e9,
        "another rank, GB": others / 1e9,
    }


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("programs", nargs="+")
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    found = {program: [] for program in chosen.programs}
    for _ in range(chosen.rounds):
        for program, rounds in found.items():
            with tempfile.TemporaryDirectory(dir=".") as folder:
                rounds.append(measure(program, pathlib.Path(folder)))
            print(program, json.dumps({what: round(value, 2) for what, value in rounds[-1].items()}), flush=True)
    for program, rounds in found.items():
        middle = {what: round(statistics.median(one[what] for one in rounds), 2) for what in rounds[0]}
        print(program, "median", json.dumps(middle))


if __name__ == "__main__":
    main()
