"""What tests of every kind share besides fixtures: bits, parameters, calls, commits by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from trajstore import RunWriter
from trajstore.store.writing.commit import CommitTimer

Cli = Callable[..., Result]


def random_bits(shape: tuple[int, ...], seed: int, width: int = 16) -> np.ndarray:
    """Any bit patterns: NaN payloads, infinities, subnormals and negative zeros among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << width, shape, dtype=f"u{width // 8}")


def nightly_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of which only some are in the short tier."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.nightly) for value in values
    ]


def parameter_table(
    shapes: Mapping[str, Sequence[int]], of_W: str | None = None, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """The attribute ``parameters``: of these one may be W, and others lie one after another."""
    table: list[dict[str, Any]] = []
    offset = 0
    for name, shape in shapes.items():
        entry = {"name": name, "shape": list(shape), "dtype": dtype, "group": 0}
        if name == of_W:
            table.append(entry | {"variable": "W"})
        else:
            table.append(entry | {"variable": "params", "offset": offset})
            offset += prod(shape)
    return table


class StillTimer(CommitTimer):
    """A writer's timer without a thread; it asks when a test moves its clock on.

    Attributes
    ----------
    now : float
        What the clock shows.
    """

    def __init__(self, every: float, commit: Callable[[], bool | None]) -> None:
        self.now = 0.0
        super().__init__(every, commit, clock=lambda: self.now)

    def start(self) -> None:
        """Start no thread."""

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have every writer that is made from now on take it."""
        monkeypatch.setattr("trajstore.store.writing.blocks.CommitTimer", cls)

    @classmethod
    def of(cls, writer: RunWriter) -> StillTimer:
        """That of a writer."""
        timer: Any = writer._blocks._timer
        assert isinstance(timer, cls)
        return timer


def commit_now(writer: RunWriter) -> None:
    """Have what is there committed as the timer does, and wait for that."""
    pending = writer._blocks._last
    if pending is not None:
        pending.result()
    assert writer._blocks._commit_unfinished()
    pending = writer._blocks._last
    if pending is not None:
        pending.result()
