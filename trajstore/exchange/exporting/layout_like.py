"""The layout of a file that exists: its keys, types and ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from trajstore.errors import InvalidArgument
from trajstore.exchange.guessing.kind_table import named
from trajstore.exchange.layouts import LAYOUTS, MARKS, Column, Layout, number_type
from trajstore.formats.array_file import values_of
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.schema import VARIABLES
from trajstore.values.native_types import NATIVE_TYPES, is_nan

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
    if not layout.columns and not layout.marks:
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
    outer = int(runs == "axis")
    alike = {name: _alike(file, outer, name, key) for name, key in keys.items()}
    rows = [
        file.shape(keys[name])[outer]
        for name, column in alike.items()
        if column is not None and column.time != "initial"
    ]
    columns: list[Column] = []
    marks: list[str] = []
    steps: list[str] = []
    numbers: list[str] = []
    unknown: list[str] = []
    types: dict[str, str] = {}
    for name, key in keys.items():
        shape, dtype, kind = file.shape(key), file.dtype(key), named(key).kind
        column, usual, known = alike[name], "", numbers
        if column is not None:
            column = _typed(file, key, column)
        if column is not None:
            columns.append(_with_first_row(file, key, column, outer, max(rows, default=0)))
            continue
        if name in MARKS and len(shape) == 1:
            usual, known = "bool" if MARKS[name].endswith("mask") else "int64", marks
        elif not steps and kind is not None and kind.name == "step" and len(shape) == 1:
            usual, known = "int64", steps
        elif len(shape) <= (outer and kind is None):
            # An imported run keeps every number of its file.
            usual = number_type(name) or ("" if shape else "float32")
        if dtype in _ALIKE.get(usual, ()):
            known.append(name)
            types |= {name: dtype} if dtype != usual else {}
        elif name != "token":  # the ids of the rows, which an export adds itself
            unknown.append(name)
    layout = Layout(
        name=file.path.name,
        columns=tuple(columns),
        required=(),
        steps=steps[0] if steps else None,
        runs=runs,  # type: ignore[arg-type]
        marks=tuple(marks),
        numbers=tuple(numbers),
        texts=tuple(name for name in file.attributes if number_type(name) is not None),
        types=types,
    )
    return layout, unknown


def _alike(file: SafetensorsFile, outer: int, name: str, key: str) -> Column | None:
    """Column of the name and rank of an array; None if a run has no such array."""
    kind = named(key).kind
    if name in _DERIVED:
        column = _DERIVED[name]
    elif kind is not None and kind.is_variable:
        column = Column(key=name, variable=kind.name, type="float32")
        if kind.name == "delta":
            column = replace(column, variable="W", time="change")
    else:
        return None
    dims = len(VARIABLES[column.variable].dims)
    rank = dims - 1 if column.time == "initial" else dims + outer
    return column if rank == len(file.shape(key)) else None


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
    return replace(column, type="bfloat16" if bits else dtype, bits=bits, tokens=tokens)


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


def _with_first_row(
    file: SafetensorsFile, key: str, column: Column, outer: int, rows: int
) -> Column:
    """The column, with what the file has in the row of step 0: nothing, NaN or zeros."""
    if column.time == "initial":
        return column
    if file.shape(key)[outer] == rows - 1:
        return replace(column, first_row=1, row0="zero")
    is_nan_there = False
    if column.time == "after" and rows:
        first = file.read(key, 0, 1, 0 if outer else None)
        is_nan_there = bool(is_nan(first, NATIVE_TYPES[column.type]).all())
    return replace(column, first_row=0, row0="nan" if is_nan_there else "zero")


def _named(file: SafetensorsFile, layout: Layout, keys: Mapping[str, str]) -> Layout | None:
    """The layout of the table with exactly these keys, in the types of the file."""
    fitting = []
    for one in LAYOUTS.values():
        own = {column.key for column in one.columns}
        if one.runs != layout.runs or keys.keys() != own.union(
            one.marks, one.numbers, [one.steps] if one.steps else []
        ):
            continue
        columns = [_typed(file, keys[column.key], column) for column in one.columns]
        if None not in columns:
            whole = tuple(column for column in columns if column is not None)
            same = replace(one, columns=whole, types=layout.types)
            fitting.append(one if same == one else replace(same, name=layout.name))
    return min(fitting, key=lambda one: one.name == layout.name, default=None)
