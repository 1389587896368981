from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt

__version__: str

class DreamcError(Exception): ...

class SpecError(DreamcError):
    file: Optional[str]
    line: Optional[int]
    column: Optional[int]
    diagnostics: list[dict[str, Any]]

def run(arguments: list[str]) -> int: ...
def check(spec: str, set: list[str]) -> tuple[str, str]: ...
def count_spec(spec: str, set: list[str], tokens: Optional[int]) -> str: ...
def match_spec(spec: str, set: list[str]) -> str: ...
def train(
    spec: str,
    data: Optional[str] = ...,
    out: Optional[str] = ...,
    set: list[str] = ...,
    device_name: str = ...,
    threads: Optional[int] = ...,
    on_step: Optional[Callable[[dict[str, Any]], Any]] = ...,
) -> tuple[str, str]: ...

class Model:
    spec: str
    name: str
    vocab: int
    context: int
    end_token: int
    def __init__(
        self, path: str, device: str = ..., threads: Optional[int] = ..., depth: Optional[int] = ..., set: list[str] = ...
    ) -> None: ...
    def logits(self, ids: list[list[int]]) -> npt.NDArray[np.float32]: ...
    def loss(self, ids: list[list[int]]) -> float: ...
    def gradients(self, ids: list[list[int]]) -> tuple[float, dict[str, npt.NDArray[np.float32]]]: ...
    def hidden(self, ids: list[list[int]]) -> npt.NDArray[np.float32]: ...
    def run(
        self,
        ids: list[list[int]],
        capture: list[str],
        patch: list[tuple[str, npt.NDArray[np.float32]]],
        tokens: list[int] | None = ...,
    ) -> dict[str, npt.NDArray[np.float32]]: ...
    def points(self, rows: int, tokens: int) -> list[tuple[str, list[str], list[int]]]: ...
    def weights(self) -> dict[str, npt.NDArray[np.float32]]: ...
    def tokenize(self, text: str, begin: bool = ...) -> list[int]: ...
    def detokenize(self, ids: list[int]) -> str: ...
    def generate(
        self,
        prompts: list[str],
        max_tokens: int = ...,
        temperature: float = ...,
        top_p: Optional[float] = ...,
        top_k: Optional[int] = ...,
        seed: int = ...,
        stop: list[str] = ...,
        cache: bool = ...,
    ) -> list[tuple[str, list[int]]]: ...
