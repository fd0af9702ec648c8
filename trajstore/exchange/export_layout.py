"""Content of a file in a layout: tensors, numbers, strings, and notes for its reader.

Layouts of whole runs hold everything. An export in the layout of a notebook omits whatever is not
recorded, not selected or not known, with a note.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange.layout_columns import (
    columns_of,
    is_sgd,
    joined,
    population,
    step_labels,
)
from trajstore.exchange.layouts import (
    COUNTS,
    OF_RUNS,
    RECORDED,
    Column,
    Layout,
    number_type,
    text_key,
)
from trajstore.exchange.selection import Selection
from trajstore.exchange.usual_names import Scalar, named, scalar_of
from trajstore.formats.safetensors import Tensor, constant
from trajstore.installation import __version__
from trajstore.provenance import RunAttributes
from trajstore.schema import NAMES, VARIABLES
from trajstore.store.reading.run_attributes import attribute

Array = npt.NDArray[Any]


def file_numbers(
    layout: Layout, parts: Sequence[Selection], keys: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Known numbers of the layout, and notes on the others.

    Parameters
    ----------
    layout : Layout
    parts : sequence
    keys : collection of str
        Keys of the arrays in the file.
    """
    numbers: dict[str, Any] = {}
    unknown, different = [], []
    for key in layout.numbers:
        if key in COUNTS:
            source = parts[0] if layout.only is None else parts[0].run
            if "is_dead" in source.coordinates:
                marks = source.coordinates["is_dead"].astype(bool) == COUNTS[key]
                numbers[key] = int(np.count_nonzero(marks))
        elif key.startswith(RECORDED):
            name = named(key.removeprefix(RECORDED))
            held = {column.variable for column in layout.columns if column.key in keys}
            numbers[key] = name is not None and name.kind.name in held
        elif key == "n_runs":
            numbers[key] = len(parts)
        else:
            values = [number_of(key, part) for part in parts]
            if key == "tied_weights" and layout.runs == "matrices":
                values = [False] * len(parts)
            if (first := OF_RUNS.get(key)) and None in values:
                values = [
                    None if seed is None else seed - number
                    for number, seed in enumerate(number_of(first, part) for part in parts)
                ]
            if None in values:
                unknown.append(key)
            elif layout.runs and (scalar := scalar_of(key)) and key not in scalar.names:
                # The plural of a number, which has a value per run.
                numbers[key] = values
            elif len(set(values)) == 1:
                numbers[key] = values[0]
            else:
                different.append(key)
    notes = [f"{', '.join(unknown)} omitted: not in the run's attributes"] if unknown else []
    if different:
        notes.append(f"{', '.join(different)} omitted: the runs differ")
    return numbers, notes


def number_of(key: str, part: Selection) -> int | float | None:
    """A number of a run, from its attributes, or the length of what is selected.

    Of an imported run, also a number under a name that only its file had.
    """
    attributes, scalar = part.run.attributes, scalar_of(key)
    value = None if scalar is None else _value_of(attributes, scalar)
    name = "" if scalar is None else scalar.name
    if value is None and name in ("adam_beta1", "adam_beta2") and is_sgd(part.run):
        return 0.0
    if value is None or name == "num_steps":
        value = _length(name, part)
    if value is None:
        value = attribute(attributes, "config", "scalars", key)
    return value if isinstance(value, int | float) else None


def _length(name: str, part: Selection) -> int | None:
    """The length that a scalar means. Steps are the rows but one: ``W[num_steps]`` is the last."""
    if name == "num_steps":
        return len(part.steps) - 1
    if name == "hidden_dim":
        series = part.run.series.values()
        return next((each.shape[2] for each in series if each.dims == VARIABLES["W"].dims), None)
    ids = part.run.coordinates["token"]
    is_whole = np.array_equal(ids, np.arange(len(ids)))
    return len(ids) if name == "vocab_size" and is_whole else None


def _value_of(attributes: Mapping[str, Any], scalar: Scalar) -> Any:
    """Value of a scalar; None if the attributes do not hold it."""
    for path in scalar.paths:
        value = attribute(attributes, *path)
        if isinstance(value, str) and value in scalar.codes:
            return scalar.codes[value]
        if isinstance(value, int | float) and not scalar.codes:
            return value
    return None


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """Content of a file to write.

    Attributes
    ----------
    tensors : tuple of Tensor
    texts : dict of str to str
        Metadata of a safetensors file, or datasets of bytes in HDF5.
    attributes : dict of str to str, int or float
        Attributes of the root in HDF5.
    part : Selection
        What the file holds of the first run.
    notes : tuple of str
        Notes for the reader of the file.
    """

    tensors: tuple[Tensor, ...]
    texts: dict[str, str]
    attributes: dict[str, Any]
    part: Selection
    notes: tuple[str, ...]


def layout_file(layout: Layout, parts: list[Selection]) -> ExportedFile:
    """Content of a file: tensors, metadata, and notes for its reader.

    A layout of a whole run gets a column for each selected variable, in its native type. One whose
    arrays all omit the row of step 0 begins with step 1.

    Raises
    ------
    VariableNotRecorded
        If a run holds no variable of the layout. Also if the layout has rows of dead or live tokens
        and the run does not record which tokens are dead.
    InvalidArgument
        If the layout needs the row before a selected one, and the run does not hold that row. Also
        if it is not for that number of runs, or they differ in steps, tokens or types.
    """
    if layout.runs == "matrices":
        parts = _in_order(layout, parts)
    if layout.whole:
        keys = {column.variable: column.key for column in layout.columns}
        types: dict[str, Any] = {
            name: each.native.name for name, each in parts[0].run.series.items()
        }
        columns = tuple(
            Column(key=keys.get(name, name), variable=name, type=types[name], row0="nan")
            for name in parts[0].variables
        )
        layout = replace(layout, columns=columns)
    elif layout.begins_late:
        layout = replace(
            layout, columns=tuple(replace(column, first_row=0) for column in layout.columns)
        )
        parts = [replace(part, rows=part.rows[part.steps > 0]) for part in parts]
    first = parts[0]
    _check_tokens(layout, parts)
    if not layout.columns and "is_dead" not in first.run.coordinates:
        raise VariableNotRecorded(
            f"layout {layout.name} holds masks only, but the run does not record which tokens are "
            "dead; label them with trajstore annotate"
        )
    notes = [f"the file holds rows of {layout.only} tokens only"] if layout.only else []
    of_runs: list[dict[str, Tensor]] = []
    for part in parts:
        tensors, absent = columns_of(layout, part)
        of_runs.append(tensors)
        notes += absent
    placeless = _without_place(layout, first)
    if placeless:
        notes.append(f"{', '.join(placeless)} omitted: not part of layout {layout.name}")
    common = set.intersection(*map(set, of_runs))
    numbers, unknown = file_numbers(layout, parts, common)
    as_attributes = layout.format == "hdf5"
    metadata = _metadata(layout, first)
    texts = _descriptions(layout, first) if layout.whole else {}
    labels = [
        *(step_labels(layout, [part.steps for part in parts]) if layout.columns else ()),
        *_token_labels(layout, first),
    ]
    arrays = [*joined(layout, of_runs)]
    written = [*arrays, *labels] if layout.whole else [*labels, *arrays]
    if not as_attributes:
        written += [
            constant(key, number_type(key) or "float32", value) for key, value in numbers.items()
        ]
    names = [*(tensor.key for tensor in written), *(numbers if as_attributes else ())]
    if double := [name for number, name in enumerate(names) if name in names[:number]]:
        raise InvalidArgument(
            f"layout {layout.name} has {double[0]!r} twice; give its arrays, steps, marks and "
            "numbers different names (token and recorded_steps may be added)"
        )
    notes += [*_notes(layout, first, common, names), *unknown]
    held = replace(
        population(layout, first, layout.only or "all"),
        rows=first.rows if layout.columns else first.rows[:0],
        variables=tuple(name for name in first.variables if name not in placeless),
    )
    return ExportedFile(
        tensors=tuple(written),
        texts=texts if as_attributes else metadata | texts,
        attributes=metadata | numbers if as_attributes else {},
        part=held,
        notes=() if layout.whole else tuple(dict.fromkeys(notes)),
    )


def _descriptions(layout: Layout, part: Selection) -> dict[str, str]:
    """Attributes of the run and its variables, and the coordinates of strings, as JSON."""
    run, names = part.run, part.variables
    texts: dict[str, Any] = {
        "attributes": run.attributes,
        "variables": {name: run.series[name].attributes for name in names},
    }
    if "token_text" in part.coordinates:
        texts["token_text"] = part.coordinates["token_text"].tolist()
    texts |= {
        name: values.tolist()
        for name, values in run.names.items()
        if not set(names).isdisjoint(NAMES[name])
    }
    return {text_key(layout, name): json.dumps(value) for name, value in texts.items()}


def _in_order(layout: Layout, parts: list[Selection]) -> list[Selection]:
    """The runs of E and of W, by the names of their parameters; as given if these are unknown."""
    names = [str(RunAttributes.of(part.run.attributes).parameter) for part in parts]
    matrices = [known and known.matrix for known in map(named, names)]
    if matrices == ["W", "E"]:
        return parts[::-1]
    if len(parts) == 2 and matrices[0] is not None and matrices[0] == matrices[1]:
        raise InvalidArgument(
            f"got the runs of {' and '.join(names)}, but layout {layout.name} holds both matrices "
            "of one training; give the run of each"
        )
    return parts


def _without_place(layout: Layout, part: Selection) -> list[str]:
    """Variables and coordinates of a run that the layout has no place for."""
    if layout.whole or not layout.columns:
        return []
    placed = {column.variable for column in layout.columns}
    if "W" not in part.run.series and any(column.time == "change" for column in layout.columns):
        placed.add("delta")
    known = {"token", "is_dead"} if layout.marks_dead else {"token"}
    known |= {*layout.marks.values()} & {"token_count"}
    return [
        *(name for name in part.variables if name not in placed),
        *(name for name in part.run.coordinates if name not in known),
    ]


def _token_labels(layout: Layout, part: Selection) -> Iterator[Tensor]:
    """Ids of the tokens, unless they count from 0, and the marks of the dead and live tokens.

    The notebooks index the token axis with the marks. They are positions, which are ids in a whole
    run, or ids of a whole vocabulary in files with rows of some tokens.
    """
    ids, coordinates = part.coordinates["token"], part.coordinates
    is_dead, selected = coordinates.get("is_dead"), np.ones(len(ids), bool)
    if layout.only:
        every = part.run.coordinates["token"]
        if (np.diff(every) <= 0).any():
            raise InvalidArgument(
                f"layout {layout.name} marks the tokens of its rows in the order of their ids, but "
                "the Dataset has another order; sort it: ds.sortby('token')"
            )
        size = max(int(number_of("vocab_size", part) or 0), int(every[-1]) + 1)
        is_dead, selected = np.zeros((2, size), bool)
        is_dead[every], selected[ids] = part.run.coordinates["is_dead"], True
    elif layout.whole or not np.array_equal(ids, np.arange(len(ids))):
        yield constant("token", "int32", ids)
    for key, kind in layout.marks.items():
        name, _, form = kind.partition("_")
        if kind == "token_count":
            if kind in coordinates and not layout.only:
                yield constant(key, "int64", coordinates[kind])
        elif form in ("mask", "ids") and is_dead is not None:
            mask = (is_dead.astype(bool) == (name == "dead")) & selected
            yield (
                constant(key, "bool", mask) if form == "mask"
                else constant(key, "int64", np.flatnonzero(mask))
            )  # fmt: skip
    if layout.name == "native":  # in other files, their names may have another meaning
        yield from (constant(name, "bool", coordinates[name]) for name in part.run.populations)


def _check_tokens(layout: Layout, parts: Sequence[Selection]) -> None:
    """Refuse runs with other tokens than the first one."""
    for number, name in product(range(1, len(parts)), ("token", "is_dead")):
        its, first = (parts[at].coordinates.get(name, np.empty(0)) for at in (number, 0))
        if not np.array_equal(its, first):
            raise InvalidArgument(
                f"{name} of run {number} differs from that of run 0; layout {layout.name} holds "
                "one set of tokens: select common ones (tokens=…), or export each run"
            )


def _metadata(layout: Layout, part: Selection) -> dict[str, str]:
    """Strings besides the arrays, as far as they are known."""
    if layout.whole:
        return {"format": "trajstore"} if layout.format == "safetensors" else {}
    metadata: dict[str, str] = {}
    if layout.texts:  # as in files of 1.12a
        known = {key: number_of(key, part) for key in layout.texts}
        metadata = {key: str(value) for key, value in known.items() if value is not None}
        if "vocab_size" in metadata:
            metadata["model"] = "GPT2"
        last = len(part.run.steps) - 1
        if "loss" in part.run.series and last >= 0:
            loss = part.run.series["loss"].get((slice(last, last + 1),))[0]
            metadata["final_loss"] = str(float(loss))
    return metadata | {
        "exporter": "trajstore",
        "trajstore_version": __version__,
        "layout": Path(layout.name).name,
        # The step labels of the notebooks' own files counted callbacks; these count steps.
        "steps": "optimizer",
    }


def _notes(
    layout: Layout, part: Selection, columns: Collection[str], keys: Collection[str]
) -> Iterator[str]:
    marks = [key for key, kind in layout.marks.items() if kind != "token_count"]
    known = [*marks, *(key for key in layout.numbers if key in COUNTS)]
    if known and "is_dead" not in part.run.coordinates:
        yield f"{', '.join(known)} omitted: the run does not record which tokens are dead"
    for key in {*layout.marks} - {*marks, *keys}:
        why = "the file holds rows of some tokens only" if layout.only else "the run has no counts"
        yield f"{key} omitted: {why}"
    ids = part.coordinates["token"]
    if not layout.columns and not layout.only and not np.array_equal(ids, np.arange(len(ids))):
        yield f"the masks are of the {len(ids)} tokens of the export only, not the vocabulary"
    written = [column for column in layout.columns if column.key in columns]
    late = [column.key for column in written if column.first_row]
    if late and part.steps[0] != 0:
        yield f"{', '.join(late)} begin with the row after step {part.steps[0]}"
    cells = [column.key for column in written if column.time == "ulps"]
    if cells and (native := part.run.series["W"].native.name) != "bfloat16":
        yield f"{', '.join(cells)} counts spacings of {native}, the type of W in the run"
    before = [column.key for column in written if column.time == "before"]
    if before:
        named = " and ".join([", ".join(before[:-1]), before[-1]] if before[1:] else before)
        yield (
            f"{named} are the values before the step of their row; the file does not hold those "
            f"after step {part.steps[-1]}"
        )
        if part.steps[0] == 0 and "logits" in columns:
            yield "logits of step 0 are NaN: a run does not record the forward pass before step 1"
