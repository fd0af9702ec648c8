"""Runs as the files of the notebooks: tensors, scalars and metadata of a layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange.exported_file import ExportedFile
from trajstore.exchange.key_names import STEPS_KEY
from trajstore.exchange.notebook_layouts import LEARNING_RATE, Column, Notebook, Scalar
from trajstore.exchange.selection import Selection
from trajstore.exchange.variable_tensor import variable_tensor
from trajstore.formats.streamed_tensor import Part, Tensor, constant
from trajstore.schema import VARIABLES
from trajstore.store.tiled_reader import Tile, TiledRun, TiledVariable, attribute, positions
from trajstore.values.native_types import is_nan, native_type
from trajstore.version import __version__

__all__ = ["notebook_file"]

Array = npt.NDArray[Any]


def notebook_file(notebook: Notebook, run: TiledRun, selection: Selection) -> ExportedFile:
    """Tensors and metadata of a notebook's file, and what the reader of it should know.

    Raises
    ------
    VariableNotRecorded
        If the run lacks a variable that the layout holds and the selection did not leave out.
    InvalidArgument
        If the layout needs the row before a selected one, and the run does not hold it.
    """
    steps = run.steps[selection.rows]
    labels = _labels(notebook, run, selection, steps)
    columns = _columns(notebook, run, selection, steps)
    scalars = _scalars(notebook, run)
    metadata = {
        "exporter": "trajstore",
        "trajstore_version": __version__,
        "layout": notebook.name,
        # The labels of the notebooks' own files counted callbacks; these are true.
        "steps": "optimizer",
    }
    if notebook.name == "1.12a":
        metadata = _metadata_1_12a(notebook, run) | metadata
    return ExportedFile(
        tensors=(*labels, *columns.values(), *scalars.values()),
        texts=metadata,
        notes=tuple(_notes(notebook, steps, columns.keys(), scalars.keys())),
    )


def _labels(notebook: Notebook, run: TiledRun, selection: Selection, steps: Array) -> list[Tensor]:
    """Steps, where they are not counted from 0, and tokens, with what tells the dead ones."""
    tensors = []
    if notebook.has_steps or not np.array_equal(steps, np.arange(len(steps))):
        tensors.append(constant(STEPS_KEY, "int64", steps))
    ids = selection.along_token(run.coordinates["token"])
    if not np.array_equal(ids, np.arange(len(ids))):
        tensors.append(constant("token", "int32", ids))
    if not (notebook.has_populations or notebook.has_counts):
        return tensors
    if "is_dead" not in run.coordinates:
        raise VariableNotRecorded(
            f"layout {notebook.name} tells dead tokens from live ones, and the run does not; "
            "export the native layout"
        )
    is_dead = selection.along_token(run.coordinates["is_dead"]).astype(bool)
    if notebook.has_populations:
        # The notebooks index the token axis with these: places, which are ids in a whole run.
        tensors.append(constant("dead_token_ids", "int64", np.flatnonzero(is_dead)))
        tensors.append(constant("live_token_ids", "int64", np.flatnonzero(~is_dead)))
    if notebook.has_counts:
        tensors.append(constant("n_trained", "int64", np.count_nonzero(~is_dead)))
        tensors.append(constant("n_untrained", "int64", np.count_nonzero(is_dead)))
    return tensors


def _columns(
    notebook: Notebook, run: TiledRun, selection: Selection, steps: Array
) -> dict[str, Tensor]:
    """Tensors with a row per step, by their keys: those whose variables were selected."""
    columns = notebook.columns
    if "W" not in run.series:
        # A run that was imported from changes knows them, and nothing else of W.
        columns = tuple(
            replace(column, variable="delta", time="after") if column.time == "change" else column
            for column in columns
        )
    tensors = {}
    for column in columns:
        if column.variable not in run.series:
            raise VariableNotRecorded(
                f"layout {notebook.name} holds {column.key}, and {column.variable} was not "
                "recorded; export the native layout"
            )
        if column.variable in selection.variables:
            tensors[column.key] = _column(notebook, column, run, selection, steps)
    return tensors


def _column(
    notebook: Notebook, column: Column, run: TiledRun, selection: Selection, steps: Array
) -> Tensor:
    variable = run.series[column.variable]
    dtype = native_type(column.dtype)
    if column.time == "after":
        tensor = variable_tensor(column.key, variable, selection, dtype=dtype)
        blank = column.blank == "zero" and VARIABLES[column.variable].row0 == "nan"
        return _with_zeros(tensor, steps) if blank else tensor
    # Step 0 has no step before it: 1.12a repeats the initial state there, a change is zero.
    before = positions(run.steps, np.where(steps == 0, 0, steps - 1))
    if (before < 0).any():
        raise InvalidArgument(
            f"layout {notebook.name} needs W before step {steps[before < 0][0]}, and the run does "
            "not hold the step before it; leave that step out, or use another layout"
        )
    if column.time == "before":
        return variable_tensor(column.key, variable, selection, dtype=dtype, rows=before)
    return _change(column.key, variable, selection, before)


def _with_zeros(tensor: Tensor, steps: Array) -> Tensor:
    """The tensor with zeros where no step had been taken yet, as the notebooks put them."""
    first = np.flatnonzero(steps == 0)
    if not len(first):
        return tensor
    return replace(tensor, parts=partial(_parts_with_zeros, tensor, int(first[0])))


def _parts_with_zeros(tensor: Tensor, row: int) -> Iterator[Part]:
    for part in tensor.parts():
        rows = part.where[0]
        if rows.start <= row < rows.stop:
            yield replace(part, read=partial(_zeros_for_nan, part, tensor.dtype, row - rows.start))
        else:
            yield part


def _zeros_for_nan(part: Part, dtype: str, row: int) -> tuple[Array, int]:
    """Bits of a part, with zeros in a row that holds nothing but NaN."""
    bits, rounded = part.read()
    if is_nan(bits[row : row + 1], native_type(dtype)).all():
        bits = bits if bits.flags.writeable else bits.copy()
        bits[row] = 0
    return bits, rounded


def _change(key: str, variable: TiledVariable, selection: Selection, before: Array) -> Tensor:
    """Differences to the rows before, in float32."""
    tokens = np.arange(variable.shape[1]) if selection.tokens is None else selection.tokens
    shape = (len(before), len(tokens), *variable.shape[2:])
    parts = partial(_parts_of_change, variable, selection.rows, before, tokens)
    return Tensor(key=key, dtype="float32", shape=shape, parts=parts)


def _parts_of_change(
    variable: TiledVariable, rows: Array, before: Array, tokens: Array
) -> Iterator[Part]:
    for tile in variable.tiles(rows, tokens):
        at, among = tile.where
        yield Part(
            where=tile.where,
            read=partial(_difference, tile, variable, before[at], tokens[among]),
        )


def _difference(
    tile: Tile, variable: TiledVariable, before: Array, tokens: Array
) -> tuple[Array, int]:
    earlier = np.concatenate([each.read() for each in variable.tiles(before, tokens)])
    change = np.subtract(tile.read(), earlier, dtype=np.float32)
    return change.view(np.uint32), 0


def _scalars(notebook: Notebook, run: TiledRun) -> dict[str, Tensor]:
    """Those that the attributes of the run tell, by their keys."""
    return {
        scalar.key: constant(scalar.key, scalar.dtype, value)
        for scalar in notebook.scalars
        if (value := _told(run.attributes, scalar)) is not None
    }


def _told(attributes: Mapping[str, Any], scalar: Scalar) -> Any:
    """Value of a scalar; None where the attributes do not tell it."""
    for path in scalar.paths:
        value = attribute(attributes, *path)
        if isinstance(value, str) and value in scalar.codes:
            return scalar.codes[value]
        if isinstance(value, int | float) and not scalar.codes:
            return value
    return None


def _metadata_1_12a(notebook: Notebook, run: TiledRun) -> dict[str, str]:
    told = {key: attribute(run.attributes, *path) for key, path in notebook.sizes.items()}
    told["learning_rate"] = _told(run.attributes, LEARNING_RATE)
    metadata = {key: str(value) for key, value in told.items() if value is not None}
    if "vocab_size" in metadata:
        metadata["model"] = "GPT2"
    if "loss" in run.series and len(run.steps):
        last = len(run.steps) - 1
        metadata["final_loss"] = str(float(run.series["loss"].get((slice(last, last + 1),))[0]))
    return metadata


def _notes(
    notebook: Notebook, steps: Array, columns: Collection[str], scalars: Collection[str]
) -> Iterator[str]:
    left_out = [column.key for column in notebook.columns if column.key not in columns]
    if left_out:
        yield f"{', '.join(left_out)} left out, as their variables were not selected"
    unknown = [scalar.key for scalar in notebook.scalars if scalar.key not in scalars]
    if unknown:
        yield f"{', '.join(unknown)} left out, as the run's attributes do not tell them"
    if notebook.name == "1.12a":
        yield (
            "W, momentum and variance are those before the step of their row, so those after step "
            f"{steps[-1]} are not in the file"
        )
        if steps[0] == 0 and "logits" in columns:
            yield "logits of step 0 are NaN: the run holds no forward pass before step 1"
