"""Runs of a file under the given options: the only way from a path to runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trajstore.arguments import EXCHANGE_MEMORY, parse_bytes
from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.importing.import_arrays import read_arrays
from trajstore.exchange.importing.import_options import ImportOptions
from trajstore.exchange.importing.import_whole import read_whole, whole_layout
from trajstore.exchange.importing.imported_file import (
    HalfForm,
    ImportedFile,
    ImportedRun,
    ImportedVariable,
)
from trajstore.exchange.importing.named_arrays import abridged
from trajstore.exchange.layouts import Layout
from trajstore.formats.array_file import ArrayFile
from trajstore.formats.open_file import open_file
from trajstore.store.storage.remote_path import local_path
from trajstore.values.native_types import NATIVE_TYPES

OnLabels = Callable[[list[str]], object]
"""Called with the labels of the runs of a file."""


@contextmanager
def opened_file(
    path: str | os.PathLike[str],
    options: ImportOptions,
    memory: int | str = EXCHANGE_MEMORY,
    on_labels: OnLabels | None = None,
) -> Iterator[ImportedFile]:
    """Open and interpret a file. It stays open until the block ends.

    Parameters
    ----------
    path : path-like
    options : ImportOptions
    memory : int or str
        Memory for rows, and for large compressed chunks of HDF5.
    on_labels : callable, optional
        Called with the labels of the runs as soon as they are known, before values are read.

    Raises
    ------
    RunNotFound
        If the file does not exist.
    FormatError
        If the file is damaged, or cannot be interpreted.
    MissingExtra
        If its format needs a library that is not installed.
    """
    with open_file(local_path(path), parse_bytes(memory)) as file:
        yield read_runs(file, options, parse_bytes(memory), on_labels)


def read_runs(
    file: Any,
    options: ImportOptions | None = None,
    memory: int = parse_bytes(EXCHANGE_MEMORY),
    on_labels: OnLabels | None = None,
) -> ImportedFile:
    """Interpret an open file as runs.

    Parameters
    ----------
    file : ArrayFile
    options : ImportOptions, optional
    memory : int
        Bytes that one row must fit into.
    on_labels : callable, optional
        As for `opened_file`.

    Raises
    ------
    FormatError
        If the file cannot be interpreted, or does not have the given layout.
    InvalidArgument
        If an option does not apply to it, or a row does not fit into the memory.
    """
    options = options or ImportOptions()
    layout = options.layout or whole_layout(file)
    if layout is not None:
        _check_layout(file, layout, is_given=options.layout is not None)
    if layout is not None and layout.whole:
        _check_no_options(file, layout, options)
        found = read_whole(file, layout)
    else:
        found = read_arrays(file, options, memory)
    if on_labels is not None:
        on_labels([run.label for run in found.runs])
    if layout is not None and layout.whole:
        return found
    return replace(found, runs=tuple(_typed(run, options) for run in found.runs))


def _check_layout(file: ArrayFile, layout: Layout, *, is_given: bool) -> None:
    if file.format != layout.format and (layout.whole or "hdf5" in (layout.format, file.format)):
        raise FormatError(
            f"{file.path} has format {file.format}, but layout {layout.name} is for "
            f"{layout.format} files; omit --layout"
        )
    missing = [key for key in layout.required if key not in file.keys]
    if missing:
        raise FormatError(
            f"{file.path}: layout {layout.name} requires {', '.join(missing)}, but the file holds "
            f"{abridged(file.keys)}{'; omit --layout to go by usual names' if is_given else ''}"
        )


def _check_no_options(file: ArrayFile, layout: Layout, options: ImportOptions) -> None:
    """Refuse options for a file of a whole run, which defines everything itself."""
    flags = {
        "--map": options.mapped or options.ignored,
        "--bits": options.bits,
        "--labels": options.steps is not None,
        "--first-row": options.first_row is not None,
        "--masks": options.masks,
    }
    given = [name for name, is_given in flags.items() if is_given]
    if given:
        raise InvalidArgument(
            f"{file.path} has layout {layout.name}, which defines everything that an import needs, "
            f"so {', '.join(given)} would have no effect; omit it"
        )


def _typed(run: ImportedRun, options: ImportOptions) -> ImportedRun:
    """The run with the narrowest types that hold every value, and notes on them."""
    halves = _halves(run, options)
    made, narrowed, warned, valued, reread = [], [], [], [], []
    for held in run.variables:
        form = halves.get(held.variable)
        if form is None and held.native.name == "float32" and held.holds_bfloat16():
            narrowed.append(held.variable)
            made.append(_as_bfloat16(held))
        elif form is None or options.bits_of(held.variable, *held.keys) is None:
            warned += [held.variable] if form in ("values", "either") else []
            made.append(held)
        elif form == "bits":
            native = NATIVE_TYPES["bfloat16"]
            reread.append(held.key)
            made.append(replace(held, native=native, wanted=native))
        else:
            valued.append(held.variable)
            made.append(_as_bfloat16(held))
    notes = [f"{key}: the bits of its float16 were read as bits of bfloat16" for key in reread]
    if narrowed:
        notes.append(
            f"{', '.join(narrowed)}: float32 in the file, bfloat16 in the run: every value is a "
            "bfloat16"
        )
    if valued:
        notes.append(
            f"{', '.join(valued)}: float16 in the file, bfloat16 in the run: every value is a "
            "bfloat16; the file has lost values outside the range of float16"
        )
    if warned:
        some = len(warned) < len(halves)
        option = " ".join(f"--bits {name}=bfloat16" for name in warned) if some else ""
        notes.append(
            f"{', '.join(warned)}: float16 in which every value is a bfloat16, so most likely "
            "converted from bfloat16: values below 6e-5 have lost precision and those below 3e-8 "
            f"are 0 in the file; {option or '--bits bfloat16'} stores it as bfloat16, which has "
            "another lattice"
        )
    return replace(run, variables=tuple(made), notes=(*run.notes, *notes))


def _halves(run: ImportedRun, options: ImportOptions) -> dict[str, HalfForm]:
    """Forms of the float16 arrays that no option keeps as float16, by variable.

    Raises
    ------
    InvalidArgument
        If ``--bits bfloat16`` would mean values for some arrays and bits for others.
    """
    found: dict[str, HalfForm] = {}
    unnamed: dict[str, str] = {}
    for held in run.variables:
        type = options.bits_of(held.variable, *held.keys)
        if held.native.name != "float16" or type == "float16":
            continue
        form = found[held.variable] = held.half_form()
        if type == "bfloat16" and options.bits.keys().isdisjoint((held.variable, *held.keys)):
            unnamed.setdefault(form, held.variable)
    if {"values", "bits"} <= set(unnamed):
        valued, other = unnamed["values"], unnamed["bits"]
        raise InvalidArgument(
            f"--bits bfloat16 is ambiguous: every value of {valued} is a bfloat16, but not every "
            f"value of {other}, whose bits would be reinterpreted; name the variables, such as "
            f"--bits {valued}=bfloat16"
        )
    return found


def _as_bfloat16(held: ImportedVariable) -> ImportedVariable:
    return replace(held, wanted=NATIVE_TYPES["bfloat16"])
