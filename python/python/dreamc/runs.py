"""Runs that dreamc left: their metrics, ledgers and evaluations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Iterator, Union


def _table(lines: list):
    """A DataFrame where pandas is installed, else the list of dicts."""
    try:
        import pandas
    except ImportError:
        return lines
    return pandas.DataFrame(lines)


class Run:
    """The folder of one run."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self.path = Path(path)
        if not (self.path / "spec.yaml").is_file():
            raise FileNotFoundError(f"{self.path} is no run: it has no spec.yaml")

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def ledger(self) -> dict:
        """The account of the run; empty before its first checkpoint."""
        file = self.path / "ledger.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def lines(self) -> Iterator[dict]:
        """Every line of `metrics.jsonl`: steps, evaluations, steps left out."""
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            return
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                # A run under way may have half a line.
                if line.endswith("\n"):
                    yield json.loads(line)

    def metrics(self):
        """The figures of every step: a DataFrame where pandas is installed, else a list of dicts."""
        return _table([line for line in self.lines() if "loss" in line])

    def evaluations(self):
        """The figures of every evaluation, in the same form."""
        return _table([line for line in self.lines() if "loss" not in line and "skipped" not in line])

    def load(self, **settings):
        """The model of the latest checkpoint; the settings are those of `dreamc.load`."""
        from . import load

        return load(self.path, **settings)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


class Runs(list):
    """Several runs."""

    def metrics(self):
        """The steps of all of them, with a column `run`."""
        return _table([{"run": run.name, **line} for run in self for line in run.lines() if "loss" in line])

    def ledgers(self):
        """The ledgers of all of them, with a column `run`."""
        return _table([{"run": run.name, **run.ledger} for run in self])


def runs(folder: Union[str, "os.PathLike[str]"]) -> Runs:
    """The runs in a folder and in folders below it, by path."""
    found = sorted(file.parent for file in Path(folder).rglob("metrics.jsonl"))
    return Runs(Run(path) for path in found if (path / "spec.yaml").is_file())
