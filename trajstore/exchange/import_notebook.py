"""What a safetensors file holds that is in the layout of a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.dead_tokens import dead_tokens
from trajstore.exchange.imported_file import (
    ImportedFile,
    ImportedVariable,
    Time,
    abridged,
    checked_tokens,
    first_row_is_blank,
    imported_variables,
)
from trajstore.exchange.key_names import DEAD_IDS, STEPS_KEY
from trajstore.exchange.notebook_layouts import LEARNING_RATE, Notebook
from trajstore.exchange.step_labels import true_steps, unlabelled_steps
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.schema import VARIABLES

__all__ = ["read_notebook"]

Array = npt.NDArray[Any]


def read_notebook(file: SafetensorsFile, notebook: Notebook) -> ImportedFile:
    """Understand a file of a notebook's layout.

    Raises
    ------
    FormatError
        If something is missing, or shapes, types or the alignment of rows disagree.
    """
    missing = [key for key in notebook.required if key not in file.keys]
    if missing:
        raise FormatError(
            f"{file.path}: layout {notebook.name} requires {', '.join(missing)}; "
            f"it holds {abridged(file.keys)}"
        )
    notes: list[str] = []
    columns = [column for column in notebook.columns if column.key in file.keys]
    absent = [column.key for column in notebook.columns if column.key not in file.keys]
    if absent:
        notes.append(f"the file does not hold {', '.join(absent)}")
    first = columns[0].key
    shape = file.shape(first)
    if len(shape) != 3:
        raise FormatError(f"{file.path}: {first} has shape {shape}, expected (step, token, hidden)")
    rows, tokens = shape[:2]
    steps, note = _steps(file, notebook, rows)
    notes += [note] if note else []
    token = np.arange(tokens, dtype=np.int32)
    if "token" in file.keys:
        token = file.vector("token", ("int32", "int64"), tokens)
    names: dict[str, tuple[str, Time]] = {}
    for column in columns:
        if column.time == "change":
            names[column.key] = ("delta", "after")
            notes.append(f"{column.key} became delta; the file holds no initial W, hence no W")
        else:
            names[column.key] = (column.variable, column.time)
    variables = imported_variables(file, names, rows=rows, tokens=tokens)
    notes += _check_start(file, notebook, variables, steps)
    told = {key: file.vector(key, ("int64", "int32")) for key in DEAD_IDS if key in file.keys}
    coordinates = {"is_dead": dead_tokens(file.path, told, tokens)} if told else {}
    return ImportedFile(
        layout=notebook.name,
        steps=steps,
        token=checked_tokens(file, token),
        coordinates=coordinates,
        variables=variables,
        attributes=_attributes(file, notebook),
        exact=False,
        notes=tuple(notes),
    )


def _steps(file: SafetensorsFile, notebook: Notebook, rows: int) -> tuple[Array, str | None]:
    if STEPS_KEY in file.keys:
        labels = file.vector(STEPS_KEY, ("int64", "int32"), rows)
        return true_steps(labels, trusted=file.metadata.get("steps") == "optimizer")
    steps, note = unlabelled_steps(rows)
    return steps, note if notebook.has_steps else None


def _check_start(
    file: SafetensorsFile, notebook: Notebook, variables: Iterable[ImportedVariable], steps: Array
) -> Iterator[str]:
    """Whether the first row and the spacing are what the layout means by them."""
    for held in variables:
        if held.time == "before" and (np.diff(steps) != 1).any():
            raise FormatError(
                f"{file.path}: {held.key} is that before the step of its row, so its steps must "
                "follow one another; take the run that it was exported from"
            )
        if steps[0] != 0:
            continue
        if held.time == "before":
            if held.rows > 1 and not np.array_equal(held.read(0, 1), held.read(1, 2)):
                raise FormatError(
                    f"{file.path}: {held.key} differs between rows 0 and 1, but in layout "
                    f"{notebook.name} both come before step 1"
                )
        elif VARIABLES[held.variable].row0 == "nan" and not first_row_is_blank(held):
            if notebook.name == "1.12a" and held.variable == "logits":
                yield "logits of row 0 are of a forward pass that no step made; they were left out"
            else:
                raise FormatError(
                    f"{file.path}: {held.key} has values in row 0, where no step had been taken; "
                    f"this is not the alignment of layout {notebook.name}"
                )


def _attributes(file: SafetensorsFile, notebook: Notebook) -> dict[str, Any]:
    """Attributes that the extra scalars and the metadata of a notebook's file tell."""
    attributes: dict[str, Any] = {}
    for scalar in notebook.scalars:
        if scalar.key in file.keys and not scalar.codes:
            value = _number(file, scalar.key)
            if math.isfinite(value):
                _put(attributes, scalar.paths[0], value)
    hyperparameters = attributes.get("optimizer", {}).get("hyperparameters", {})
    betas = hyperparameters.pop("betas", {})
    if len(betas) == 2:
        hyperparameters["betas"] = [betas["0"], betas["1"]]
    for key, path in notebook.sizes.items():
        text = file.metadata.get(key, "")
        if text.isdecimal() and len(text) < 16:
            _put(attributes, path, int(text))
    if notebook.name == "1.12a":
        try:
            rate = float(file.metadata.get(LEARNING_RATE.key, "nan"))
        except ValueError:
            rate = math.nan
        if math.isfinite(rate):
            _put(attributes, LEARNING_RATE.paths[0], rate)
    return attributes


def _number(file: SafetensorsFile, key: str) -> float:
    entry = file.entries[key]
    if entry.dtype not in ("float32", "float64") or entry.shape != ():
        raise FormatError(
            f"{file.path}: {key} is {entry.dtype} of shape {entry.shape}, expected a float32"
        )
    value = file.read(key).view("f4" if entry.dtype == "float32" else "f8")
    # The shortest decimal that is this float32, as 0.001 was written, not its float64 tail.
    return float(str(value[()]))


def _put(attributes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        attributes = attributes.setdefault(key, {})
    attributes[last] = value
