"""What a file holds, with what its user says of it: the one way from a path to runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trajstore.byte_sizes import EXCHANGE_MEMORY, parse_bytes
from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.import_arrays import Overrules, read_arrays
from trajstore.exchange.import_native import read_native
from trajstore.exchange.imported_file import ImportedRun, ImportedVariable, Understood
from trajstore.exchange.layouts import IMPORT_LAYOUTS, LAYOUTS
from trajstore.exchange.recognition import IGNORE, abridged, recognise
from trajstore.exchange.token_tables import TABLES, Told, told_tables
from trajstore.formats.open_file import open_file
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.values.native_types import NATIVE_TYPES

__all__ = ["opened_file", "overrules", "understood"]


def overrules(
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: int | None = None,
    masks: str | os.PathLike[str] | None = None,
    schedule: str | None = None,
) -> Overrules:
    """What the user of an import says, checked as far as that needs no file but that of the masks.

    Parameters
    ----------
    layout : str, optional
    map : mapping of str to str or iterable of str, optional
        Name of the array that has each role, or several of a file with several runs; those of
        ``ignore`` are left out.
    bits : {'bfloat16', 'float16'}, optional
    labels : mapping of str to str, optional
        ``steps``: the name of an array, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
    masks : path-like, optional
    schedule : str, optional

    Raises
    ------
    InvalidArgument
        If one of them cannot be.
    RunNotFound, FormatError
        If `masks` is no file that tells tokens.
    """
    if layout is not None and layout not in IMPORT_LAYOUTS:
        raise InvalidArgument(
            f"there is no layout {layout!r}; choose from {', '.join(IMPORT_LAYOUTS)}"
        )
    if bits not in (None, "bfloat16", "float16"):
        raise InvalidArgument(f"16 bits are bfloat16 or float16, got {bits!r}")
    if first_row not in (None, 0, 1):
        raise InvalidArgument(f"the first row is that of step 0 or 1, got {first_row!r}")
    unknown = set(labels or {}) - {"steps"}
    if unknown:
        raise InvalidArgument(f"labels are of steps, got {', '.join(sorted(unknown))}")
    mapped: dict[str, str] = {}
    ignored: list[str] = []
    for role, keys in (map or {}).items():
        for key in [keys] if isinstance(keys, str) else keys:
            if key in mapped:
                raise InvalidArgument(f"{key} cannot be both {mapped[key]} and {role}")
            if role == IGNORE:
                ignored.append(key)
            else:
                mapped[key] = role
    return Overrules(
        layout=layout,
        mapped=mapped,
        ignored=tuple(ignored),
        bits=bits,
        steps=(labels or {}).get("steps"),
        first_row=first_row,
        schedule=schedule,
        masks=() if masks is None else tuple(_tables_of(masks)),
    )


def _tables_of(masks: str | os.PathLike[str]) -> list[Told]:
    """Tables of tokens that another file tells."""
    with open_file(masks) as file:
        recognised = recognise(file, {key: "dead_ids" for key in file.keys if file.format == "npy"})
        told = told_tables(file, recognised, of=f" of {Path(masks).name}")
        if not told:
            raise FormatError(
                f"{masks} tells no tokens: it holds {abridged(file.keys)}, expected masks or lists "
                "of ids (dead_mask, untrained_mask, live_ids, trained_indices, token_counts, …)"
            )
    return [one for one in told if one.role in TABLES]


@contextmanager
def opened_file(
    path: str | os.PathLike[str], said: Overrules, memory: int | str = EXCHANGE_MEMORY
) -> Iterator[Understood]:
    """A file that is open and understood, for as long as the block lasts.

    Parameters
    ----------
    path : path-like
    said : Overrules
    memory : int or str
        For large compressed chunks of HDF5.

    Raises
    ------
    RunNotFound
        If there is none.
    FormatError
        If it is not sound, or not understood.
    MissingExtra
        If its format needs a library that is not installed.
    """
    with open_file(path, parse_bytes(memory)) as file:
        yield understood(file, said)


def understood(file: Any, said: Overrules | None = None) -> Understood:
    """What an open file holds, as runs are made of it.

    Parameters
    ----------
    file : ArrayFile
    said : Overrules, optional

    Raises
    ------
    FormatError
        If it is not understood, or not of the layout that the user names.
    """
    said = said or Overrules()
    wanted = said.layout
    form = "hdf5" if wanted == "hdf5" else None if wanted is None else "safetensors"
    if wanted in LAYOUTS:
        form = LAYOUTS[wanted].format
    if form is not None and file.format != form and "hdf5" in (form, file.format):
        kind = "an HDF5 file" if file.format == "hdf5" else "no HDF5 file"
        raise FormatError(f"{file.path} is {kind}, and layout {wanted} was asked for")
    is_native = isinstance(file, SafetensorsFile) and file.attributes.get("format") == "trajstore"
    if wanted == "native" or (wanted is None and is_native):
        if not isinstance(file, SafetensorsFile):
            raise FormatError(f"{file.path} is no safetensors file, as layout native is")
        return read_native(file)
    found = read_arrays(file, said)
    own = file.format == "hdf5" and found.layout == "hdf5" and _says_types(found)
    return (
        found if own else replace(found, runs=tuple(_typed(run, said.bits) for run in found.runs))
    )


def _says_types(found: Understood) -> bool:
    return any("trajstore_json" in held.file.keys for run in found.runs for held in run.variables
               if held.file is not None)  # fmt: skip


def _typed(run: ImportedRun, bits: str | None) -> ImportedRun:
    """The run with types as narrow as every value allows, and what there is to say of them."""
    notes = list(run.notes)
    made, narrowed, warned, reread = [], [], [], []
    for held in run.variables:
        if held.given is not None or held.native.name not in ("float32", "float16"):
            made.append(held)
            continue
        if held.native.name == "float16" and bits == "float16":
            made.append(held)
            continue
        is_bfloat16 = held.holds_bfloat16()
        if held.native.name == "float32":
            narrowed += [held.variable] if is_bfloat16 else []
            made.append(_as_bfloat16(held) if is_bfloat16 else held)
        elif bits is None:
            warned += [held.variable] if is_bfloat16 else []
            made.append(held)
        elif is_bfloat16:
            reread.append(held.variable)
            made.append(_as_bfloat16(held))
        else:
            native = NATIVE_TYPES["bfloat16"]
            notes.append(f"{held.key}: the bits of its float16 were read as those of bfloat16")
            made.append(replace(held, native=native, wanted=native))
    if narrowed:
        notes.append(
            f"{', '.join(narrowed)}: float32 in the file, bfloat16 in the run, as every value is "
            "one"
        )
    if reread:
        notes.append(
            f"{', '.join(reread)}: float16 in the file, bfloat16 in the run, as every value is "
            "one; what float16 is too small for was lost in the file"
        )
    if warned:
        notes.append(
            f"{', '.join(warned)}: float16, and every value is one of bfloat16, so it was most "
            "likely bfloat16 before: values below 6e-5 have lost precision and those below 3e-8 "
            "are 0 in the file; --bits bfloat16 has the run hold bfloat16, whose lattice is another"
        )
    return replace(run, variables=tuple(made), notes=tuple(notes))


def _as_bfloat16(held: ImportedVariable) -> ImportedVariable:
    return replace(held, wanted=NATIVE_TYPES["bfloat16"])
