"""The layout of a file that exists: its keys, types and ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trajstore.errors import InvalidArgument
from trajstore.exchange.guessing.kind_table import named
from trajstore.exchange.layouts import LAYOUTS, MARKS, Column, Layout, number_type
from trajstore.formats.array_file import values_of
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.schema import VARIABLES
from trajstore.values.native_types import NATIVE_TYPES, is_nan

__all__ = ["layout_like"]

_DERIVED = {
    column.key: column
    for layout in LAYOUTS.values()
    for column in layout.columns
    if column.kind is None
}
"""Columns whose names are of no kind."""

_ALIKE = {
    "int64": ("int64", "int32"),
    "int32": ("int64", "int32"),
    "float32": ("float32", "float64"),
    "bool": ("bool", "uint8"),
}
"""Types in which a file may hold steps, marks and numbers of each usual type."""


def layout_like(path: str | os.PathLike[str]) -> tuple[Layout, tuple[str, ...]]:
    """Layout of a safetensors file: a named one, if it has the same keys, types and ranks.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Layout
    tuple of str
        A note on the keys that a run cannot fill, if there are any.

    Raises
    ------
    RunNotFound, FormatError
        If it is not a safetensors file.
    InvalidArgument
        If it holds nothing that a run can fill.
    """
    with SafetensorsFile(path) as file:
        runs, keys = _stems(file)
        layout, unknown = _guessed(file, runs, keys)
        alike = _named(file, layout, keys)
    if alike is not None:
        return alike, ()
    if not layout.columns and not layout.populations:
        raise InvalidArgument(
            f"{path} holds no history of a run under a known name; it holds {', '.join(unknown)}; "
            "describe it with --layout FILE.toml"
        )
    note = f"{', '.join(unknown)} omitted: a run has nothing of this name, type and rank"
    return layout, (note,) if unknown else ()


def _stems(file: SafetensorsFile) -> tuple[str | None, dict[str, str]]:
    """How the file holds several runs, and the key of each name in a layout."""
    numbered = {key: re.fullmatch(r"run_\d+_(.+)", key) for key in file.keys}
    if any(numbered.values()):
        return "keys", {match[1] if match else key: key for key, match in numbered.items()}
    both = {key[:-2] for key in file.keys if key.endswith("_E") and f"{key[:-2]}_W" in file.keys}
    if both:
        return "matrices", {key[:-2] if key[:-2] in both else key: key for key in file.keys}
    ranks = {
        len(file.shape(key)) - len(kind.dims)
        for key in file.keys
        if (kind := named(key).kind) is not None and kind.is_variable and file.shape(key)
    }
    return "axis" if ranks == {1} else None, {key: key for key in file.keys}


def _guessed(
    file: SafetensorsFile, runs: str | None, keys: Mapping[str, str]
) -> tuple[Layout, list[str]]:
    """Layout of the keys that a run can fill, and the other keys."""
    columns: list[Column] = []
    marks: list[str] = []
    numbers: list[str] = []
    unknown: list[str] = []
    types: dict[str, str] = {}
    steps: str | None = None
    for name, key in keys.items():
        shape, dtype, kind = file.shape(key), file.dtype(key), named(key).kind
        usual = number_type(name)
        if usual is None and not shape and dtype in _ALIKE["float32"]:
            usual = "float32"  # an imported run keeps every number of its file
        if name in MARKS and len(shape) == 1:
            usual = "bool" if MARKS[name].endswith("mask") else "int64"
            known = marks
        elif steps is None and kind is not None and kind.name == "step" and len(shape) == 1:
            steps, usual, known = name, "int64", []
        elif usual is not None and len(shape) <= (runs == "axis" and kind is None):
            known = numbers
        else:
            column = _column(file, runs, name, key)
            if column is not None:
                columns.append(column)
            elif name != "token":  # the ids of the rows, which an export adds itself
                unknown.append(name)
            continue
        if dtype not in _ALIKE[usual]:
            unknown.append(name)
            continue
        known.append(name)
        if dtype != usual:
            types[name] = dtype
    layout = Layout(
        name=file.path.name,
        columns=_without_first_rows(file, runs, keys, columns),
        required=(),
        steps=steps,
        runs=runs,  # type: ignore[arg-type]
        populations=tuple(marks),
        numbers=tuple(numbers),
        texts=tuple(name for name in file.attributes if number_type(name) is not None),
        types=types,
    )
    return layout, unknown


def _column(file: SafetensorsFile, runs: str | None, name: str, key: str) -> Column | None:
    """Column of an array; None if a run has no such array."""
    kind = named(key).kind
    if name in _DERIVED:
        column = _DERIVED[name]
    elif kind is not None and kind.is_variable:
        is_change = kind.name == "delta"
        column = Column(
            key=name,
            variable="W" if is_change else kind.name,
            dtype="float32",
            time="change" if is_change else "after",
        )
    else:
        return None
    dims = VARIABLES[column.variable].dims[1 if column.time == "initial" else 0 :]
    rank = len(file.shape(key)) - (runs == "axis" and column.time != "initial")
    return _typed(file, key, column) if rank == len(dims) else None


def _typed(file: SafetensorsFile, key: str, column: Column) -> Column | None:
    """The column with type and tokens of the array; None if it cannot have them."""
    dtype = file.dtype(key)
    bits = dtype == "uint16"
    if not bits and dtype not in NATIVE_TYPES:
        return None
    if column.time in ("change", "ulps") and dtype != "float32":
        return None
    tokens = column.tokens
    if column.has_tokens:
        length = file.shape(key)[-2 if column.is_matrix else -1]
        tokens = named(key).population or _population(file, length)  # type: ignore[assignment]
    return replace(column, dtype="bfloat16" if bits else dtype, as_bits=bits, tokens=tokens)


def _population(file: SafetensorsFile, length: int) -> str:
    """Tokens of an axis of that length, by the marks in the file."""
    sizes: dict[str, int] = {}
    for key in file.keys:
        population, _, form = MARKS.get(key, "").partition("_")
        if form == "mask":
            mask = values_of(file, key)
            sizes |= {population: int(mask.astype(bool).sum()), "all": mask.size}
        elif form == "ids":
            sizes.setdefault(population, file.shape(key)[0])
    if "all" not in sizes and {"dead", "live"} <= sizes.keys():
        sizes["all"] = sizes["dead"] + sizes["live"]
    fitting = [name for name in ("all", "dead", "live") if sizes.get(name) == length]
    return fitting[0] if fitting and "all" in sizes else "all"


def _without_first_rows(
    file: SafetensorsFile, runs: str | None, keys: Mapping[str, str], columns: list[Column]
) -> tuple[Column, ...]:
    """The columns, with what the file has in the row of step 0: nothing, NaN or zeros."""
    outer = 0 if runs == "axis" else None
    rows = {
        column.key: file.shape(keys[column.key])[outer is not None]
        for column in columns
        if column.time != "initial"
    }
    most, found = max(rows.values(), default=0), []
    for column in columns:
        first_row = int(rows.get(column.key, most) == most - 1)
        is_nan_there = False
        if column.time == "after" and not first_row and most:
            first = file.read(keys[column.key], 0, 1, outer)
            is_nan_there = bool(is_nan(first, NATIVE_TYPES[column.dtype]).all())
        blank: Any = "nan" if is_nan_there else "zero"
        found.append(replace(column, first_row=first_row, blank=blank))
    return tuple(found)


def _named(file: SafetensorsFile, layout: Layout, keys: Mapping[str, str]) -> Layout | None:
    """The layout of the table with exactly these keys, in the types of the file."""
    fitting = []
    for one in LAYOUTS.values():
        own = {column.key for column in one.columns}
        if one.runs != layout.runs or keys.keys() != own.union(
            one.populations, one.numbers, [one.steps] if one.steps else []
        ):
            continue
        columns = [_typed(file, keys[column.key], column) for column in one.columns]
        if None not in columns:
            whole = tuple(column for column in columns if column is not None)
            same = replace(one, columns=whole, types=layout.types)
            fitting.append(one if same == one else replace(same, name=layout.name))
    fitting.sort(key=lambda one: one.name == layout.name)
    return fitting[0] if fitting else None
