"""Lines of a run's metrics as they are written, for trackers of other makers."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Iterator


def lines(run: Path, wait: float = 2.0, once: bool = False) -> Iterator[dict]:
    """Every line of `metrics.jsonl`, and those to come until the run has ended."""
    file, at = run / "metrics.jsonl", 0
    while True:
        ended = once or status(run) in ("finished", "stopped early", "failed")
        if file.is_file():
            with file.open(encoding="utf-8") as stream:
                # A run that resumes drops the lines after its checkpoint.
                at = min(at, file.stat().st_size)
                stream.seek(at)
                while (line := stream.readline()).endswith("\n"):
                    at = stream.tell()
                    yield json.loads(line)
        if ended:
            return
        time.sleep(wait)


def status(run: Path) -> str:
    """The run's own word on how it stands; empty before its first ledger."""
    file = run / "ledger.json"
    return json.loads(file.read_text(encoding="utf-8")).get("status", "") if file.is_file() else ""


def numbers(line: dict, prefix: str = "") -> dict:
    """The numbers of a line, nested names joined by `/`."""
    found = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found.update(numbers(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix + name] = value
    return found


def arguments(tool: str):
    """The command line of a follower."""
    parser = argparse.ArgumentParser(prog=f"python -m dreamc.{tool}", description=f"Follows a run's metrics with {tool}.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--project", default="dreamc", help="the project (experiment) there")
    parser.add_argument("--once", action="store_true", help="send what is there and end")
    return parser.parse_args()


def tracker(name: str):
    """The tracker's package, by its absolute name: the module here has it, too. Without it the process ends with a line."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        sys.exit(f"python -m dreamc.{name} needs the package {name}: pip install {name}")


def follow(run: Path, once: bool, log) -> None:
    """Calls `log(numbers, step)` for every line that has a step."""
    for line in lines(run, once=once):
        figures = numbers(line)
        step = figures.pop("step", None)
        if step is not None and figures:
            kind = "train" if "loss" in line else "validation"
            log({f"{kind}/{name}": value for name, value in figures.items()}, int(step))
