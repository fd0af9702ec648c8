"""Arrays of several runs in one file: along a first axis, under numbered keys, or as matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.exchange.layouts import Layout
from trajstore.formats.safetensors import Tensor, Where, constant

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
            f"layout {layout.name} holds both matrices of one training, got {count} of them; give "
            "the run of E, then that of W"
        )
    if count < 1 or (layout.runs is None and count != 1):
        raise InvalidArgument(
            f"got {count} runs, expected one for layout {layout.name}; a layout such as flannel-3 "
            "or flannel-5 holds several, flannel-2 both matrices of untied weights"
        )


def step_labels(layout: Layout, steps: Sequence[Array]) -> Iterator[Tensor]:
    """Steps of the rows of each run, unless they count from 0.

    Raises
    ------
    InvalidArgument
        If the runs share the labels, but have other steps.
    """
    numbered = layout.runs == "keys"
    for number, its in enumerate(steps):
        if not numbered and not np.array_equal(steps[0], its):
            raise InvalidArgument(
                f"run {number} has {len(its)} rows and the first run {len(steps[0])}, or other "
                f"steps; layout {layout.name} needs the same steps of all: select them "
                "(--select step=…)"
            )
    for number, its in enumerate(steps if numbered else steps[:1]):
        if layout.steps is not None or not np.array_equal(its, np.arange(len(its))):
            key = layout.steps or "recorded_steps"
            yield constant(f"run_{number}_{key}" if numbered else key, "int64", its)


def joined(layout: Layout, runs: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Arrays of all runs, given those of each run by key.

    Raises
    ------
    InvalidArgument
        If the runs share an axis, but have other shapes.
    """
    if layout.runs == "keys":
        for number, arrays in enumerate(runs):
            yield from (replace(each, key=f"run_{number}_{key}") for key, each in arrays.items())
    elif layout.runs == "axis":
        initial = [column.key for column in layout.columns if column.time == "initial"]
        for key in runs[0]:
            tensors = [arrays[key] for arrays in runs if key in arrays]
            once = key in initial and len(runs) == 1
            if len(tensors) == len(runs):
                yield tensors[0] if once else _stacked(layout, tensors)
    elif layout.runs == "matrices":
        matrices = {column.key for column in layout.columns if column.is_matrix}
        shared: dict[str, Tensor] = {}
        for name, arrays in zip(_MATRICES, runs, strict=True):
            for key, tensor in arrays.items():
                if key in matrices:
                    yield replace(tensor, key=f"{key}_{name}")
                else:
                    shared.setdefault(key, tensor)
        yield from shared.values()
    else:
        yield from runs[0].values()


def _stacked(layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all runs, with a first axis of runs."""
    first = tensors[0]
    for number, other in enumerate(tensors):
        if other.shape != first.shape:
            raise InvalidArgument(
                f"{first.key} of run {number} has shape {other.shape}, that of run 0 "
                f"{first.shape}; layout {layout.name} needs one shape"
            )
    length = first.shape[0]

    def parts() -> Iterator[Where]:
        """Parts of all runs. Rows are counted across the runs."""
        for number, tensor in enumerate(tensors):
            for rows, *rest in tensor.parts():
                begin = number * length
                yield (slice(begin + rows.start, begin + rows.stop), *rest)

    def read(where: Where) -> tuple[Array, int]:
        number, start = divmod(int(where[0].start), length)
        rows = slice(start, int(where[0].stop) - number * length)
        return tensors[number].read((rows, *where[1:]))

    return replace(first, shape=(len(tensors), *first.shape), outer=1, parts=parts, read=read)
