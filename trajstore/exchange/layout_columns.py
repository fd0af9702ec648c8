"""Tensors of a file in a layout, made from variables of one run or of several.

Several runs lie along a first axis, under numbered keys, or as the matrices E and W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange.layouts import Column, Layout
from trajstore.exchange.selection import Selection
from trajstore.formats.safetensors import Tensor, Where, constant
from trajstore.provenance import RunAttributes
from trajstore.schema import TRAJECTORIES, VARIABLES
from trajstore.store.reading.tiled_reader import TiledRun, TiledVariable, positions
from trajstore.values.native_types import convert, is_nan, native_type, spacing
from trajstore.values.optimizer_rule import MOMENTS

Array = npt.NDArray[Any]
Made = Callable[..., Tensor]
"""Makes the tensor of a column, whose key and type it knows."""


def columns_of(layout: Layout, part: Selection) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors with a row per step, by their keys, and notes about omitted ones.

    Raises
    ------
    VariableNotRecorded
        If the run holds no variable of the layout, or does not record which tokens are dead.
    InvalidArgument
        If the layout needs the row before a selected one, and the run does not hold that row.
    """
    run, selected, columns = part.run, part.variables, layout.columns
    populations: dict[str, Selection] = {
        column.tokens: population(layout, part, column.tokens) for column in columns
    }
    if "W" not in run.series:
        # A run that was imported from changes of W holds only these.
        columns = tuple(
            replace(column, variable="delta", time="after") if column.time == "change" else column
            for column in columns
        )
    tensors: dict[str, Tensor] = {}
    unrecorded, unselected, zeros = [], [], []
    for column in columns:
        made = partial(Tensor, key=column.key, dtype=column.file_type)
        if column.variable in selected:
            tensors[column.key] = _column(layout, column, made, populations[column.tokens])
        elif column.variable in run.series:
            unselected.append(column.key)
        elif column.variable in MOMENTS and is_sgd(run):
            tensors[column.key] = _zeros(column, made, populations[column.tokens])
            zeros.append(column.key)
        else:
            unrecorded.append(column)
    if columns and not tensors.keys() - set(zeros):
        raise VariableNotRecorded(
            f"layout {layout.name} holds only {', '.join(column.variable for column in columns)}, "
            f"but the selection has {', '.join(selected)}; use the native layout"
        )
    notes = []
    if unrecorded:
        keys = ", ".join(column.key for column in unrecorded)
        names = ", ".join(dict.fromkeys(column.variable for column in unrecorded))
        notes.append(f"{keys} omitted: the run does not record {names}")
    if unselected:
        notes.append(f"{', '.join(unselected)} omitted: not selected")
    if zeros:
        notes.append(f"{', '.join(zeros)} are 0: SGD has no moments")
    return tensors, notes


def is_sgd(run: TiledRun) -> bool:
    """True if an optimizer without moments trained the run."""
    optimizer = RunAttributes.of(run.attributes).optimizer
    return optimizer.rule == "SGD" and not optimizer.hyperparameters.get("momentum")


def population(layout: Layout, part: Selection, name: str) -> Selection:
    """The selected tokens of a population: dead, live or all.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        If the run does not record which tokens are dead, or none of the population is selected.
    """
    if name == "all":
        return part
    if "is_dead" not in part.run.coordinates:
        raise VariableNotRecorded(
            f"layout {layout.name} has rows of {name} tokens, but the run has no is_dead; "
            "use another layout, or label the tokens with trajstore annotate"
        )
    places = np.arange(len(part.run.coordinates["token"])) if part.tokens is None else part.tokens
    places = places[part.coordinates["is_dead"].astype(bool) == (name == "dead")]
    if not len(places):
        raise InvalidArgument(
            f"layout {layout.name} has rows of {name} tokens, but none is selected; select "
            f"{name} tokens, or use another layout"
        )
    return replace(part, tokens=places)


def _zeros(column: Column, made: Made, part: Selection) -> Tensor:
    """Zeros in place of the moments of an optimizer without any, as in the notebooks' files."""
    series = part.run.series
    like = next(series[name] for name in (*TRAJECTORIES, "grad") if name in series)
    shape = like.shape_of(part.rows[column.first_row :], part.tokens)
    row = np.zeros((1, *shape[1:]), native_type(column.type).bits)
    parts = [(slice(at, at + 1),) for at in range(shape[0])]
    return made(shape=shape, parts=lambda: parts, read=lambda where: (row, 0))


def _column(layout: Layout, column: Column, made: Made, part: Selection) -> Tensor:
    variable, tokens = part.run.series[column.variable], part.tokens
    at = rows = part.rows[column.first_row :]
    steps = part.run.steps[rows]
    if column.time == "centroid":
        return _centroid(made, variable, rows, tokens)
    if column.time == "last_motion":
        return _last_motion(made, variable, rows, tokens, steps)
    if column.time != "after":
        # No step precedes step 0: 1.12a repeats the initial state there, and a change is zero.
        before = np.where(steps == 0, 0, steps - 1)
        wanted = np.zeros(1, np.int64) if column.time == "initial" else before
        at = positions(part.run.steps, wanted)
        if (at < 0).any():
            raise InvalidArgument(
                f"layout {layout.name} needs {column.variable} of step {wanted[at < 0][0]}, which "
                "the run does not hold; select other steps, or use another layout"
            )
    native, dtype = variable.native, native_type(column.type)
    is_change = column.time in ("change", "ulps")
    shown = rows if is_change else at
    as_zero = column.time == "after" and column.row0 == "zero"
    as_zero = as_zero and VARIABLES[variable.name].row0 == "nan"

    def read(where: Where) -> tuple[Array, int]:
        if is_change:
            earlier = variable.read(where, at, tokens)
            with np.errstate(invalid="ignore", over="ignore"):  # NaN, infinity are valid results
                change = np.subtract(variable.read(where, rows, tokens), earlier, dtype=np.float32)
                if column.time == "ulps":
                    change /= spacing(earlier, native.name)
            return change.view(np.uint32), 0
        if dtype.name == native.name:
            bits, rounded = variable.read(where, at, tokens, native=True), 0
        else:
            bits, rounded = convert(variable.read(where, at, tokens), native, dtype)
        for row in np.flatnonzero(steps[where[0]] == 0) if as_zero else ():  # as the notebooks do
            if is_nan(bits[row], dtype).all():
                bits = bits if bits.flags.writeable else bits.copy()
                bits[row] = 0
        return bits, rounded

    shape, parts = variable.shape_of(shown, tokens), partial(variable.tiles, shown, tokens)
    tensor = made(shape=shape, parts=parts, read=read)
    return _first_row(tensor) if column.time == "initial" else tensor


def _first_row(tensor: Tensor) -> Tensor:
    """The first row of the tensor, without an axis of steps."""

    def read(where: Where) -> tuple[Array, int]:
        bits, rounded = tensor.read((slice(1), *where))
        return bits[0], rounded

    return replace(
        tensor,
        shape=tensor.shape[1:],
        parts=lambda: [where[1:] for where in tensor.parts()],
        read=read,
    )


def _centroid(made: Made, variable: TiledVariable, rows: Array, tokens: Array | None) -> Tensor:
    """Mean over the tokens in each row, summed in float64."""
    count, of_tokens, hidden = variable.shape_of(rows, tokens)

    def read(where: Where) -> tuple[Array, int]:
        some = rows[where[0]]
        total = np.zeros((len(some), hidden))
        for tile in variable.tiles(some, tokens):
            total[tile[0]] += variable.read(tile, some, tokens).sum(1, dtype=np.float64)
        return (total / of_tokens).astype(np.float32).view(np.uint32), 0

    parts = [(some,) for some, _ in groupby(variable.tiles(rows, tokens), key=itemgetter(0))]
    return made(shape=(count, hidden), parts=lambda: parts, read=read)


def _last_motion(
    made: Made, variable: TiledVariable, rows: Array, tokens: Array | None, steps: Array
) -> Tensor:
    """Step of the last row in which a token differs from the row before; -1 if it never does."""
    shape = variable.shape_of(rows, tokens)[1:]

    def read(where: Where) -> tuple[Array, int]:
        last = np.full(shape[0], -1, np.int32)
        before = np.zeros(shape, variable.native.bits)
        for tile in variable.tiles(rows, tokens):
            at, some = tile
            bits = variable.read(tile, rows, tokens, native=True)
            if at.start == 0:
                before[some] = bits[0]
            for step, row in zip(steps[at], bits, strict=True):
                last[some][(row != before[some]).any(-1)] = step
                before[some] = row
        return last[where].view(np.uint32), 0

    return made(shape=shape[:1], parts=lambda: [(slice(0, shape[0]),)], read=read)


_MATRICES = ("E", "W")


def check_number(layout: Layout, count: int) -> None:
    """Check the number of runs for a layout.

    Raises
    ------
    InvalidArgument
    """
    fits, expected = {
        None: (count == 1, "one"),
        "matrices": (count == 2, "the run of E, then that of W,"),
    }.get(layout.runs, (count > 0, "one or several"))
    if not fits:
        raise InvalidArgument(
            f"got {count} runs, expected {expected} for layout {layout.name}; a layout such as "
            "flannel-3 or flannel-5 holds several, flannel-2 both matrices of untied weights"
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
                f"steps; layout {layout.name} needs the same steps of all: select them (steps=…)"
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
            if len(tensors) == len(runs):
                one = key in initial and _are_equal(tensors)
                yield tensors[0] if one else _stacked(layout, tensors)
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


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    """True if all tensors hold the same bits."""
    first, *others = tensors
    pairs = ((first.read(at)[0], each.read(at)[0]) for each in others for at in first.parts())
    return all(np.array_equal(*pair) for pair in pairs)


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
