"""Exams: what architectures can do, by generated tasks, and whether that foretells their loss."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Iterable, Mapping, Sequence, Union

from .runs import Run, _table

Folder = Union[str, "os.PathLike[str]"]


class Exam:
    """The folder of an exam, whether it has come to its end or not."""

    def __init__(self, path: Folder) -> None:
        self.path = Path(path)
        file = self.path / "exam.json"
        if not file.is_file():
            raise FileNotFoundError(f"{self.path} is no exam: it has no exam.json")
        self.manifest: dict = json.loads(file.read_text(encoding="utf-8"))

    @property
    def tasks(self) -> list:
        """Names of the tasks."""
        return [task["name"] for task in self.manifest["tasks"]]

    @property
    def arms(self) -> list:
        """Names of the architectures, the baseline first."""
        return list(self.manifest["arms"])

    def run(self, task: str, arm: str, seed: int = 0) -> Run:
        """A run of a task."""
        tuned = next((t["tuned"] for t in self.manifest["tasks"] if t["name"] == task), None)
        if tuned is None:
            raise KeyError(f"the exam has no task {task}; it has {', '.join(self.tasks)}")
        folder = self.path / task
        return Run((folder / "all" if tuned else folder) / f"{arm}-seed{seed}")

    def lines(self) -> list:
        """Exact match of every run that has ended, by difficulty: a dict each."""
        found = []
        for task in self.manifest["tasks"]:
            for arm in self.arms:
                for seed in self.manifest["seeds"]:
                    try:
                        run = self.run(task["name"], arm, seed)
                    except FileNotFoundError:
                        continue
                    last = [line for line in run.lines() if line.get("by_difficulty")]
                    if run.ledger.get("status") not in ("finished", "stopped early") or not last:
                        continue
                    for steps, exact in last[-1]["by_difficulty"]:
                        beyond = steps > task["learned"]
                        of = {"task": task["name"], "arm": arm, "seed": seed, "steps": steps, "beyond": beyond}
                        found.append({**of, "exact": exact})
        return found

    def scores(self):
        """The same as a DataFrame where pandas is installed."""
        return _table(self.lines())

    def overall(self) -> dict:
        """The score of every architecture: its mean over tasks, seeds and the difficulties learned from."""
        sums: dict = {}
        for line in self.lines():
            if not line["beyond"]:
                sums.setdefault((line["arm"], line["task"], line["seed"]), []).append(line["exact"])
        by_arm: dict = {}
        for (arm, task, _), values in sums.items():
            by_arm.setdefault(arm, {}).setdefault(task, []).append(_mean(values))
        whole = {arm: tasks for arm, tasks in by_arm.items() if len(tasks) == len(self.tasks)}
        return {arm: _mean([_mean(seeds) for seeds in tasks.values()]) for arm, tasks in whole.items()}

    def inside(self, task: str) -> list:
        """What the report says of heads and passes: exact match without each, a dict for each architecture."""
        file = self.path / f"{task}.inside.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []

    def foretells(self, losses: Mapping[str, float], draws: int = 10_000, seed: int = 0) -> dict:
        """The rank correlation of scores and losses on a text, with its interval of 95 %.

        Spearman's, of a score with the loss turned around: 1 where the better score has the lower loss
        throughout. The interval is of a bootstrap over architectures.
        """
        scores = self.overall()
        arms = [arm for arm in self.arms if arm in scores and arm in losses]
        return rank_correlation([scores[a] for a in arms], [-losses[a] for a in arms], draws, seed)

    def __repr__(self) -> str:
        return f"Exam({str(self.path)!r})"


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _ranks(values: Sequence[float]) -> list:
    """Ranks from 1; equal values share the mean of theirs."""
    return [sum(x < v for x in values) + (sum(x == v for x in values) + 1) / 2 for v in values]


def _spearman(a: Sequence[float], b: Sequence[float]):
    a, b = _ranks(a), _ranks(b)
    da, db = [x - _mean(a) for x in a], [x - _mean(b) for x in b]
    below = (sum(x * x for x in da) * sum(x * x for x in db)) ** 0.5
    return sum(x * y for x, y in zip(da, db)) / below if below else None


def rank_correlation(a: Sequence[float], b: Sequence[float], draws: int = 10_000, seed: int = 0) -> dict:
    """Spearman's rank correlation of pairs, and its percentile bootstrap interval of 95 %."""
    if len(a) != len(b) or len(a) < 4:
        raise ValueError(f"a rank correlation needs at least four pairs, and there are {len(a)} and {len(b)} values")
    source, found = random.Random(seed), []
    for _ in range(draws):
        at = [source.randrange(len(a)) for _ in a]
        drawn = _spearman([a[i] for i in at], [b[i] for i in at])
        if drawn is not None:
            found.append(drawn)
    found.sort()
    at = lambda share: found[min(len(found) - 1, int(share * len(found)))] if found else None
    return {"n": len(a), "correlation": _spearman(a, b), "low": at(0.025), "high": at(0.975)}


def exam(
    *specs: Folder,
    baseline: Folder | None = None,
    budget: str | None = None,
    steps: int | None = None,
    seeds: int | None = None,
    tasks: Sequence[str] = (),
    rates: Sequence[float] = (),
    out: Folder | None = None,
    allow_unequal: bool = False,
    threads: int | None = None,
) -> Exam:
    """Sits the exam of some specifications, or goes on with it, as `dreamc exam` does, and gives it."""
    from . import DreamcError, _dreamc

    if out is None:
        if not (len(specs) == 1 and (Path(os.fspath(specs[0])) / "exam.json").is_file()):
            raise DreamcError("an exam needs the folder that it goes into: out=")
        out = specs[0]
    line = ["exam", *map(os.fspath, specs)]
    if os.fspath(out) != os.fspath(specs[0]):
        line += ["--out", os.fspath(out)]
    for name, value in [("baseline", baseline), ("budget", budget), ("steps", steps), ("seeds", seeds), ("threads", threads)]:
        line += [] if value is None else [f"--{name}", os.fspath(value) if name == "baseline" else str(value)]
    line += ["--tasks", ",".join(tasks)] if tasks else []
    line += ["--rates", ",".join(map(repr, rates))] if rates else []
    line += ["--allow-unequal"] if allow_unequal else []
    code = _dreamc.run(line)
    if code:
        raise DreamcError(f"dreamc {' '.join(line)} ended with exit code {code}; what it said is above")
    return Exam(out)
