"""dreamc: a declarative architecture compiler for attention mixtures.

In: paths of specifications and runs, token ids as lists or arrays. Out: dicts, NumPy arrays and
exceptions with file, line and column. `dreamc` on the command line is the same program.
"""

from __future__ import annotations

import json as _json
import os as _os
import signal as _signal
import threading as _threading
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence, Union

from . import _dreamc
from ._dreamc import DreamcError, SpecError, __version__
from .exam import Exam, exam, rank_correlation
from .runs import Run, runs

__all__ = [
    "Checked",
    "DreamcError",
    "Exam",
    "Model",
    "Run",
    "SpecError",
    "__version__",
    "check",
    "count",
    "exam",
    "load",
    "match",
    "rank_correlation",
    "runs",
    "train",
]

Path = Union[str, "_os.PathLike[str]"]
Fields = Mapping[str, Any]


class Checked(NamedTuple):
    """A specification without errors."""

    text: str
    """Its YAML with every default."""
    warnings: list
    """Its warnings, as `dreamc check --json` has them."""


def _changes(fields: Fields | None) -> list:
    """Fields as `--set` takes them."""

    def value(x: Any) -> str:
        if isinstance(x, bool):
            return "true" if x else "false"
        return x if isinstance(x, str) else _json.dumps(x)

    return [f"{name}={value(x)}" for name, x in (fields or {}).items()]


def check(spec: Path, set: Fields | None = None) -> Checked:
    """Checks a specification; raises `SpecError` with every diagnostic where it has errors."""
    text, warnings = _dreamc.check(_os.fspath(spec), _changes(set))
    return Checked(text, _json.loads(warnings))


def count(spec: Path, set: Fields | None = None, tokens: int | None = None) -> dict:
    """Counts parameters, FLOPs per token and bytes: the keys of `dreamc count --json`."""
    return _json.loads(_dreamc.count_spec(_os.fspath(spec), _changes(set), tokens))


def match(spec: Path, set: Fields | None = None) -> dict:
    """Matches a specification to the baseline of its `match` section: the keys of `dreamc match --json`."""
    return _json.loads(_dreamc.match_spec(_os.fspath(spec), _changes(set)))


def _rows(ids: Any) -> list:
    """Rows of token ids of an array, a list of rows, or one row."""
    rows = ids.tolist() if hasattr(ids, "tolist") else [r.tolist() if hasattr(r, "tolist") else r for r in ids]
    return [rows] if rows and not isinstance(rows[0], (list, tuple)) else [list(row) for row in rows]


def _floats(value: Any):
    """A value as an array of f32; one that is that already is not copied."""
    import numpy

    return numpy.asarray(value, dtype=numpy.float32)


class Model:
    """A model with weights on a device. Ids are `[rows, tokens]`; one row may stand alone."""

    def __init__(
        self,
        path: Path,
        device: str = "cpu",
        threads: int | None = None,
        depth: int | None = None,
        set: Fields | None = None,
    ) -> None:
        self._model = _dreamc.Model(_os.fspath(path), device, threads, depth, _changes(set))

    @property
    def spec(self) -> str:
        """The specification with every default, as YAML."""
        return self._model.spec

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self._model.vocab

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""
        return self._model.context

    @property
    def end_token(self) -> int:
        """The token that ends a text."""
        return self._model.end_token

    def logits(self, ids: Any):
        """Logits after every token in f32, `[rows, tokens, vocab]`."""
        return self._model.logits(_rows(ids))

    def loss(self, ids: Any) -> float:
        """Mean loss in nats of the tokens behind the first of each row."""
        return self._model.loss(_rows(ids))

    def gradients(self, ids: Any) -> dict:
        """Gradient of that loss (and of the routers' losses) by every tensor, by name."""
        return self._model.gradients(_rows(ids))[1]

    def hidden(self, ids: Any):
        """The stream before each layer and behind the last, `[depth + 1, rows, tokens, hidden]`."""
        return self._model.hidden(_rows(ids))

    def run(
        self,
        ids: Any,
        capture: str | Sequence[str] = (),
        patch: Mapping[str, Any] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> dict:
        """`logits`, and values inside the model that names or patterns mean, as arrays by name.

        `patch` gives values of these names other numbers, at `tokens` or at all of them.
        """
        patterns = [capture] if isinstance(capture, str) else list(capture)
        given = [(name, _floats(value)) for name, value in (patch or {}).items()]
        return self._model.run(_rows(ids), patterns, given, None if tokens is None else list(tokens))

    def points(self, rows: int = 1, tokens: int = 1) -> dict:
        """What `run` can capture: dimensions and shape by name, for so many rows of tokens."""
        return {name: (tuple(dims), tuple(shape)) for name, dims, shape in self._model.points(rows, tokens)}

    def weights(self) -> dict:
        """Every tensor by name, in f32."""
        return self._model.weights()

    def tokenize(self, text: str, begin: bool = True) -> list:
        """Token ids of a text, behind the begin token where the model was trained with one."""
        return self._model.tokenize(text, begin)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        return self._model.detokenize(list(ids))

    def generate(
        self,
        prompt: str | Sequence[str],
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        cache: bool = True,
    ):
        """The text after a prompt, or a list of texts after several; greedy at temperature 0."""
        one = isinstance(prompt, str)
        prompts = [prompt] if one else list(prompt)
        written = self._model.generate(prompts, max_tokens, temperature, top_p, top_k, seed, list(stop), cache)
        texts = [text for text, _ in written]
        return texts[0] if one else texts


def load(path: Path, **settings: Any) -> Model:
    """Opens a run, a checkpoint, an import, or a specification, whose weights its seed draws."""
    return Model(path, **settings)


def train(
    spec: Path,
    data: Path | None = None,
    out: Path | None = None,
    set: Fields | None = None,
    device: str = "cpu",
    threads: int | None = None,
    on_step: Callable[[dict], Any] | None = None,
) -> Run:
    """Trains a specification and gives its run.

    `on_step` gets the line of every step and every evaluation. An exception of its stops the run at
    the end of the step, with a checkpoint, and is raised here.
    """
    data, out = (None if path is None else _os.fspath(path) for path in (data, out))
    main = _threading.current_thread() is _threading.main_thread()
    before = {s: _signal.getsignal(s) for s in (_signal.SIGINT, _signal.SIGTERM)} if main else {}
    try:
        folder, _ = _dreamc.train(_os.fspath(spec), data, out, _changes(set), device, threads, on_step)
    finally:
        for number, handler in before.items():
            _signal.signal(number, handler)
    return Run(folder)
