"""Arrays of several runs in one file: along a first axis, under numbered keys, or as matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.exchange.layouts import Layout
from trajstore.formats.streamed_tensor import Part, Tensor, constant

__all__ = ["check_number", "joined"]

Array = npt.NDArray[Any]

_MATRICES = ("E", "W")


def check_number(layout: Layout, count: int) -> None:
    """Check the number of runs for a layout.

    Raises
    ------
    InvalidArgument
    """
    if layout.runs == "matrices" and count != 2:
        raise InvalidArgument(
            f"got {count} runs, but layout {layout.name} holds both matrices of one training; give "
            "the run of E, then that of W"
        )
    if layout.runs is None and count != 1:
        raise InvalidArgument(
            f"got {count} runs, but layout {layout.name} holds one; export one, or choose a layout "
            "of several runs, such as flannel-3 or flannel-5"
        )


def joined(layout: Layout, runs: Sequence[tuple[Array, Mapping[str, Tensor]]]) -> Iterator[Tensor]:
    """Labels of the rows, and the arrays of all runs.

    Parameters
    ----------
    layout : Layout
    runs : sequence
        Per run, the steps of its rows and its arrays by key.

    Raises
    ------
    InvalidArgument
        If the runs share rows or an axis, but have other steps or shapes.
    """
    if not layout.columns:
        return
    (steps, first), *others = runs
    if layout.runs == "keys":
        for number, (its_steps, tensors) in enumerate(runs):
            for tensor in (*_labels(layout, its_steps), *tensors.values()):
                yield replace(tensor, key=f"run_{number}_{tensor.key}")
        return
    for number, (its_steps, _) in enumerate(others, 1):
        if not np.array_equal(steps, its_steps):
            raise InvalidArgument(
                f"run {number} has {len(its_steps)} rows and the first run {len(steps)}, or other "
                f"steps; layout {layout.name} needs the same steps of all: select them (--steps)"
            )
    yield from _labels(layout, steps)
    if layout.runs is None:
        yield from first.values()
    elif layout.runs == "axis":
        for key in first:
            tensors = [held[key] for _, held in runs if key in held]
            if len(tensors) == len(runs):
                yield _stacked(layout, tensors)
    else:
        matrices = {column.key for column in layout.columns if column.is_matrix}
        shared: dict[str, Tensor] = {}
        for name, (_, tensors) in zip(_MATRICES, runs, strict=True):
            for key, tensor in tensors.items():
                if key in matrices:
                    yield replace(tensor, key=f"{key}_{name}")
                else:
                    shared.setdefault(key, tensor)
        yield from shared.values()


def _labels(layout: Layout, steps: Array) -> Iterator[Tensor]:
    """Steps of the rows, unless they count from 0."""
    if layout.steps is not None or not np.array_equal(steps, np.arange(len(steps))):
        yield constant(layout.steps or "recorded_steps", "int64", steps)


def _stacked(layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all runs, with a first axis of runs."""
    first = tensors[0]
    for number, other in enumerate(tensors):
        if other.shape != first.shape:
            raise InvalidArgument(
                f"{first.key} of run {number} has shape {other.shape}, that of run 0 "
                f"{first.shape}; layout {layout.name} needs one shape"
            )
    return replace(
        first, shape=(len(tensors), *first.shape), outer=1, parts=partial(_parts, tensors)
    )


def _parts(tensors: Sequence[Tensor]) -> Iterator[Part]:
    """Parts of all runs. Rows are counted across the runs."""
    for number, tensor in enumerate(tensors):
        begin = number * tensor.shape[0]
        for part in tensor.parts():
            rows, *rest = part.where
            at = slice(begin + rows.start, begin + rows.stop)
            yield replace(part, where=(at, *rest))
