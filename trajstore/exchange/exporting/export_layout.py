"""Files in the layouts of the notebooks: tensors, numbers and strings.

An export omits whatever is not recorded, not selected or not known, with a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange.exporting.exported_file import ExportedFile, variable_tensor
from trajstore.exchange.guessing.kind_table import Scalar, scalar_of
from trajstore.exchange.layouts import POPULATIONS, Column, Layout
from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import Part, Tensor, constant
from trajstore.schema import TRAJECTORIES, VARIABLES
from trajstore.store.reading.run_settings import attribute
from trajstore.store.reading.tiled_reader import Tile, TiledRun, TiledVariable, positions
from trajstore.values.native_types import is_nan, native_type
from trajstore.values.optimizer_rule import MOMENTS
from trajstore.version import __version__

__all__ = ["layout_file", "numbers_of", "population"]

Array = npt.NDArray[Any]


def layout_file(layout: Layout, run: TiledRun, selection: Selection) -> ExportedFile:
    """Content of a notebook's file: tensors, metadata, and notes for its reader.

    Raises
    ------
    VariableNotRecorded
        If the run holds no variable of the layout. Also if the layout has rows of dead tokens only
        and the run does not record which tokens are dead.
    InvalidArgument
        If the layout needs the row before a selected one, and the run does not hold that row.
    """
    steps = run.steps[selection.rows]
    notes: list[str] = []
    if layout.only_dead:
        selection = _only_dead(layout, run, selection)
        notes.append("the file holds rows of dead tokens only")
    columns, absent = _columns(layout, run, selection, steps)
    placeless = _without_place(layout, run, selection)
    if placeless:
        notes.append(f"{', '.join(placeless)} omitted: not part of layout {layout.name}")
    numbers = dict(_numbers(layout, run, selection))
    metadata = {
        "exporter": "trajstore",
        "trajstore_version": __version__,
        "layout": layout.name,
        # The step labels of the notebooks' own files counted callbacks; these count steps.
        "steps": "optimizer",
    }
    if layout.as_texts:
        metadata = _texts(layout, run) | metadata
    as_attributes = layout.format == "hdf5"
    kinds = dict(layout.scalars) | dict.fromkeys(layout.counts, "int64")
    tensors = [
        *_labels(layout, run, selection, steps),
        *columns.values(),
        *(constant(key, kinds[key], value) for key, value in numbers.items() if not as_attributes),
    ]
    return ExportedFile(
        tensors=tuple(tensors),
        texts={} if as_attributes else metadata,
        attributes=metadata | numbers if as_attributes else {},
        chunk_rows=layout.chunk_rows,
        gzip=layout.gzip,
        float16_as_bits=any(column.as_bits for column in layout.columns),
        omitted=tuple(name for name in placeless if name in VARIABLES),
        notes=(*notes, *absent, *_notes(layout, run, steps, columns.keys(), numbers.keys())),
    )


def _without_place(layout: Layout, run: TiledRun, selection: Selection) -> list[str]:
    """Variables and coordinates of the run that the layout has no place for."""
    held = {column.variable for column in layout.columns}
    if "W" not in run.series and any(column.time == "change" for column in layout.columns):
        held.add("delta")
    known = {"token", "is_dead"} if layout.marks_dead else {"token"}
    return [
        *(name for name in selection.variables if name not in held),
        *(name for name in run.coordinates if name not in known),
    ]


def _only_dead(layout: Layout, run: TiledRun, selection: Selection) -> Selection:
    if "is_dead" not in run.coordinates:
        raise VariableNotRecorded(
            f"layout {layout.name} holds dead tokens only, and the run does not record which "
            "tokens are dead; use another layout, or label them with trajstore annotate"
        )
    is_dead = run.coordinates["is_dead"].astype(bool)
    places = np.arange(len(is_dead)) if selection.tokens is None else selection.tokens
    places = places[is_dead[places]]
    if not len(places):
        raise InvalidArgument(
            f"layout {layout.name} holds dead tokens only, and none is selected; select dead "
            "tokens, or use another layout"
        )
    return replace(selection, tokens=places)


def _labels(layout: Layout, run: TiledRun, selection: Selection, steps: Array) -> Iterator[Tensor]:
    """Steps and tokens, unless they count from 0, and the marks of the dead tokens."""
    if layout.steps is not None or not np.array_equal(steps, np.arange(len(steps))):
        yield constant(layout.steps or "recorded_steps", "int64", steps)
    ids = selection.along_token(run.coordinates["token"])
    counted = np.array_equal(ids, np.arange(len(ids)))
    if not counted and not (layout.only_dead and _is_vocabulary(run)):
        yield constant("token", "int32", ids)
    if "is_dead" not in run.coordinates:
        return
    if layout.only_dead and _is_vocabulary(run):
        yield from population(layout.populations, run.coordinates["is_dead"].astype(bool))
    else:
        # The notebooks index the token axis with these: positions, equal to ids in a whole run.
        is_dead = selection.along_token(run.coordinates["is_dead"]).astype(bool)
        yield from population(layout.populations, is_dead)


def _is_vocabulary(run: TiledRun) -> bool:
    """True if the run holds a row of every id."""
    ids = run.coordinates["token"]
    return bool(np.array_equal(ids, np.arange(len(ids))))


def population(keys: Collection[str], is_dead: Array) -> Iterator[Tensor]:
    """Masks and lists of dead and live tokens.

    Parameters
    ----------
    keys : collection of str
        Keys of `trajstore.exchange.layouts.POPULATIONS`.
    is_dead : ndarray of bool, (token,)
    """
    for key in keys:
        form, marks_dead = POPULATIONS[key]
        mask = is_dead == marks_dead
        yield (
            constant(key, "bool", mask) if form == "mask"
            else constant(key, "int64", np.flatnonzero(mask))
        )  # fmt: skip


def _columns(
    layout: Layout, run: TiledRun, selection: Selection, steps: Array
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors with a row per step, by their keys, and notes about omitted ones."""
    columns = layout.columns
    if "W" not in run.series:
        # A run that was imported from changes of W holds only these.
        columns = tuple(
            replace(column, variable="delta", time="after") if column.time == "change" else column
            for column in columns
        )
    tensors: dict[str, Tensor] = {}
    unrecorded, unselected, zeros = [], [], []
    for column in columns:
        if column.variable in selection.variables:
            tensors[column.key] = _column(layout, column, run, selection, steps)
        elif column.variable in run.series:
            unselected.append(column.key)
        elif column.variable in MOMENTS and _is_sgd(run):
            tensors[column.key] = _zeros(column, run, selection, len(steps))
            zeros.append(column.key)
        else:
            unrecorded.append(column.key)
    if not tensors.keys() - set(zeros):
        raise VariableNotRecorded(
            f"layout {layout.name} holds only {', '.join(column.variable for column in columns)}, "
            f"but the selection has {', '.join(selection.variables)}; use the native layout"
        )
    notes = []
    if unrecorded:
        notes.append(f"{', '.join(unrecorded)} omitted: not recorded")
    if unselected:
        notes.append(f"{', '.join(unselected)} omitted: not selected")
    if zeros:
        notes.append(f"{', '.join(zeros)} are 0: SGD has no moments")
    return tensors, notes


def _is_sgd(run: TiledRun) -> bool:
    """True if an optimizer without moments trained the run."""
    name = str(attribute(run.attributes, "optimizer", "class") or "").rpartition(".")[2]
    momentum = attribute(run.attributes, "optimizer", "hyperparameters", "momentum")
    return name in ("SGD", "RoundedSGD") and not momentum


def _zeros(column: Column, run: TiledRun, selection: Selection, rows: int) -> Tensor:
    """Zeros in place of the moments of an optimizer without any, as in the notebooks' files."""
    like = next(run.series[name] for name in (*TRAJECTORIES, "grad") if name in run.series)
    tokens = like.shape[1] if selection.tokens is None else len(selection.tokens)
    shape = (rows, tokens, like.shape[2])
    dtype = native_type(column.dtype)

    def parts() -> Iterator[Part]:
        for row in range(rows):
            bits = np.zeros((1, *shape[1:]), dtype.bits)
            yield Part(where=(slice(row, row + 1),), read=partial(_unrounded, bits))

    return Tensor(key=column.key, dtype=_stored(column), shape=shape, parts=parts)


def _unrounded(bits: Array) -> tuple[Array, int]:
    return bits, 0


def _stored(column: Column) -> str:
    return "uint16" if column.as_bits else column.dtype


def _column(
    layout: Layout, column: Column, run: TiledRun, selection: Selection, steps: Array
) -> Tensor:
    variable = run.series[column.variable]
    dtype = native_type(column.dtype)
    if column.time == "after":
        rows = selection.rows
        if column.first_row == 1 and len(steps) > 1 and steps[0] == 0:
            rows, steps = rows[1:], steps[1:]
        tensor = variable_tensor(column.key, variable, selection, dtype=dtype, rows=rows)
        blank = column.blank == "zero" and VARIABLES[column.variable].row0 == "nan"
        tensor = _with_zeros(tensor, steps) if blank else tensor
        return replace(tensor, dtype=_stored(column))
    # No step precedes step 0: 1.12a repeats the initial state there, and a change is zero.
    before = positions(run.steps, np.where(steps == 0, 0, steps - 1))
    if (before < 0).any():
        raise InvalidArgument(
            f"layout {layout.name} needs W before step {steps[before < 0][0]}, but the run does "
            "not hold the step before it; omit that step, or use another layout"
        )
    if column.time == "before":
        return variable_tensor(column.key, variable, selection, dtype=dtype, rows=before)
    return _change(column.key, variable, selection, before)


def _with_zeros(tensor: Tensor, steps: Array) -> Tensor:
    """The tensor with zeros in the row of step 0, as in the notebooks' files."""
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
    """Bits of a part, with zeros in place of a row of NaN."""
    bits, rounded = part.read()
    if is_nan(bits[row : row + 1], native_type(dtype)).all():
        bits = bits if bits.flags.writeable else bits.copy()
        bits[row] = 0
    return bits, rounded


def _change(key: str, variable: TiledVariable, selection: Selection, before: Array) -> Tensor:
    """Differences from the rows before, in float32."""
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
    with np.errstate(invalid="ignore"):  # the difference of two infinities is NaN
        change = np.subtract(tile.read(), earlier, dtype=np.float32)
    return change.view(np.uint32), 0


def _numbers(
    layout: Layout, run: TiledRun, selection: Selection
) -> Iterator[tuple[str, int | float]]:
    """Known numbers of the layout, by their keys."""
    if "is_dead" in run.coordinates:
        is_dead = run.coordinates["is_dead"].astype(bool)
        if not layout.only_dead:
            is_dead = selection.along_token(is_dead)
        for key, marks_dead in layout.counts.items():
            yield key, int(np.count_nonzero(is_dead == marks_dead))
    yield from numbers_of(layout.scalars, run)


def numbers_of(keys: Collection[str], run: TiledRun) -> Iterator[tuple[str, int | float]]:
    """Numbers from the attributes of a run.

    Parameters
    ----------
    keys : collection of str
        Names from `trajstore.exchange.guessing.kind_table.SCALARS`.
    run : TiledRun
    """
    for key in keys:
        scalar = scalar_of(key)
        assert scalar is not None, key
        value = _value_of(run.attributes, scalar)
        if value is None and scalar.name in ("adam_beta1", "adam_beta2") and _is_sgd(run):
            value = 0.0
        if value is None and scalar.name == "num_steps":
            value = int(run.steps[-1]) if len(run.steps) else None
        if value is not None:
            yield key, value


def _value_of(attributes: Mapping[str, Any], scalar: Scalar) -> Any:
    """Value of a scalar; None if the attributes do not hold it."""
    for path in scalar.paths:
        value = attribute(attributes, *path)
        if isinstance(value, str) and value in scalar.codes:
            return scalar.codes[value]
        if isinstance(value, int | float) and not scalar.codes:
            return value
    return None


def _texts(layout: Layout, run: TiledRun) -> dict[str, str]:
    """Metadata of 1.12a, as far as they are known."""
    known = dict(numbers_of(layout.as_texts, run))
    metadata = {key: str(value) for key, value in known.items()}
    if "vocab_size" in metadata:
        metadata["model"] = "GPT2"
    if "loss" in run.series and len(run.steps):
        last = len(run.steps) - 1
        metadata["final_loss"] = str(float(run.series["loss"].get((slice(last, last + 1),))[0]))
    return metadata


def _notes(
    layout: Layout,
    run: TiledRun,
    steps: Array,
    columns: Collection[str],
    numbers: Collection[str],
) -> Iterator[str]:
    if layout.marks_dead and "is_dead" not in run.coordinates:
        known = ", ".join((*layout.populations, *layout.counts))
        yield f"{known} omitted: the run does not record which tokens are dead"
    unknown = [key for key in layout.scalars if key not in numbers]
    if unknown:
        yield f"{', '.join(unknown)} omitted: not in the run's attributes"
    before = [column.key for column in layout.columns if column.time == "before"]
    before = [key for key in before if key in columns]
    if before:
        named = " and ".join([", ".join(before[:-1]), before[-1]] if before[1:] else before)
        yield (
            f"{named} are the values before the step of their row; the file does not hold those "
            f"after step {steps[-1]}"
        )
        if steps[0] == 0 and "logits" in columns:
            yield "logits of step 0 are NaN: a run does not record the forward pass before step 1"
