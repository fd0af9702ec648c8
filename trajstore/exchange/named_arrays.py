"""Variable or coordinate that each array of a file holds, by its name and ``--map``.

Names are those of `trajstore.exchange.usual_names`. Type and rank must fit. Nothing is inferred
from values: arrays with other names are omitted and listed.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import FormatError, InvalidArgument, did_you_mean
from trajstore.exchange.file_numbers import number_of_one, numbers_per_run, single_numbers
from trajstore.exchange.usual_names import (
    ARRAY_KINDS,
    SCALARS,
    ArrayKind,
    Name,
    named,
    scalar_of,
)
from trajstore.formats.array_file import ArrayFile, is_number, values_of
from trajstore.schema import TRAJECTORIES
from trajstore.values.native_types import NATIVE_TYPES

IGNORE = "ignore"
"""Kind of arrays to omit."""

KINDS = (*ARRAY_KINDS, *SCALARS, IGNORE)
"""All words that ``--map`` accepts."""

UNKNOWN = "unknown name (--map)"
"""Reason for the omission of an array without a usual name."""

_BITS = ("uint16", "int16")
_IGNORED = "ignored (--map)"
_DERIVED = "derived from other arrays"
_OTHER_PARAMETER = "belongs to another parameter"
_LISTS = ("dead_mask", "live_mask", "dead_ids", "live_ids")
_MOST_LISTED = 24


@dataclass(frozen=True, kw_only=True)
class TableLine:
    """A line of the table of the arrays and numbers of a file.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    kind : str
        What it becomes; empty if it is omitted.
    why : str
        Details, or the reason for the omission.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedArray(Name):
    """An array with a known kind, and what its name says.

    Attributes
    ----------
    key, dtype : str
    shape : tuple of int
    """

    kind: ArrayKind
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def extra(self) -> int:
        """Number of axes beyond those of its kind."""
        return len(self.shape) - len(self.kind.dims)


@dataclass(frozen=True, kw_only=True)
class NamedArrays:
    """Content of a file with known names.

    Attributes
    ----------
    arrays : tuple of NamedArray
    numbers : dict of str to int, float or bool
        Single numbers by key.
    vectors : dict of str to list
        Lists of one number per run, by key.
    omitted : tuple of TableLine
    """

    arrays: tuple[NamedArray, ...]
    numbers: dict[str, Any]
    vectors: dict[str, list[Any]]
    omitted: tuple[TableLine, ...]


def named_arrays(
    file: ArrayFile,
    mapped: Mapping[str, str] | None = None,
    *,
    ignored: tuple[str, ...] = (),
    derived: Collection[str] = (),
) -> NamedArrays:
    """Arrays and numbers of a file whose names are known.

    Parameters
    ----------
    file : ArrayFile
    mapped : mapping of str to str, optional
        Keys and their kinds.
    ignored : tuple of str, optional
        Keys to ignore.
    derived : collection of str, optional
        Keys of arrays that follow from others, whatever their names are.

    Raises
    ------
    FormatError
        If the type or rank of an array does not fit its name, or two arrays have one kind.
    InvalidArgument
        If a kind or a key does not exist.
    """
    mapped = mapped or {}
    _check_map(file, mapped, ignored)
    _check_attributes(file, ignored)
    key_of = {kind: key for key, kind in mapped.items()}
    arrays: list[NamedArray] = []
    left: dict[str, str] = {}
    numbers = single_numbers(file, ignored)
    vectors = numbers_per_run(file, ignored)
    alone: list[NamedArray] = []
    for key in file.keys:
        shape, dtype, name = file.shape(key), file.dtype(key), named(key)
        if key in ignored:
            left[key] = _IGNORED
            continue
        if key in mapped:
            if mapped[key] not in ARRAY_KINDS:
                continue  # a scalar, already among the numbers
            name = replace(name, kind=ARRAY_KINDS[mapped[key]])
        elif key in derived:
            left[key] = _DERIVED
            continue
        elif name.kind is not None and name.kind.is_variable and name.kind.name in key_of:
            left[key] = f"replaced by {key_of[name.kind.name]} (--map)"
            continue
        if name.kind is None:
            if key in numbers or f"{key}[0]" in numbers:
                continue
            if len(shape) == 1 and scalar_of(key) is not None:
                vectors[key] = values_of(file, key).tolist()
            else:
                left[key] = UNKNOWN if shape else "not a number"
            continue
        array = NamedArray(key=key, dtype=dtype, shape=shape, **(vars(name) | {"kind": name.kind}))
        if not shape:
            if not is_number(dtype):
                raise _unfit(file, array, is_mapped=key in mapped)
            if array.kind.is_variable and dtype in NATIVE_TYPES:
                alone.append(array)
            elif key not in numbers:
                left[key] = "not a number"
        elif _fits(array):
            arrays.append(array)
            if array.kind.name == "lr" and len(shape) == 1 and scalar_of(key) is not None:
                vectors[key] = values_of(file, key).tolist()
        elif "." in key:  # one of the many arrays of a checkpoint
            left[key] = _OTHER_PARAMETER
        else:
            raise _unfit(file, array, is_mapped=key in mapped)
    arrays, others = _of_one_parameter(arrays)
    anchors = [array for array in arrays if array.kind.name in TRAJECTORIES]
    for key in [key for key, values in vectors.items() if len(values) == 1]:
        # One rate for all rows, unless the file has only one row.
        if any(len(one.shape) > 2 and one.shape[one.extra] > 1 for one in anchors):
            numbers[key] = number_of_one(file, key)
            del vectors[key]
            arrays = [array for array in arrays if array.key != key]
    if anchors and all(len(array.shape) == 2 for array in anchors):
        arrays += alone  # values of the one state that the file holds
    unread = {key: _IGNORED if key in ignored else why for key, why in file.unread.items()}
    return NamedArrays(
        arrays=tuple(_distinct(file, arrays)),
        numbers=numbers,
        vectors=vectors,
        omitted=(
            *(TableLine(name=key, dtype="", shape=(), why=why) for key, why in unread.items()),
            *(
                TableLine(name=key, dtype=file.dtype(key), shape=file.shape(key), why=why)
                for key, why in (left | others).items()
            ),
        ),
    )


def described(file: ArrayFile) -> str:
    """The arrays of a file with types and shapes, and the command that names them, to be edited."""
    listed = [f"  {key}  {file.dtype(key)} {file.shape(key)}" for key in file.keys[:_MOST_LISTED]]
    listed += ["  …"] if len(file.keys) > _MOST_LISTED else []
    listed += [f"  {key}  not read: {why}" for key, why in [*file.unread.items()][:_MOST_LISTED]]
    matrices = [key for key in file.keys if _is_float(file.dtype(key)) and len(file.shape(key)) > 1]
    if not matrices:
        return "\n".join(listed or ["  nothing"])
    matrix = max(matrices, key=lambda key: len(file.shape(key)))
    others = [key for key in file.keys if key != matrix and file.shape(key)]
    unnamed = [key for key in others if named(key).kind is None and scalar_of(key) is None]
    words = [f"W={matrix}", *(f"KIND={key}" for key in unnamed[:4])]
    options = " ".join(f"--map {shlex.quote(word)}" for word in words)
    return (
        "\n".join(listed)
        + "\nReplace each KIND by a word that `trajstore import` lists, or delete its --map; add "
        "your other options:\n"
        + f"  trajstore import {shlex.quote(str(file.path))} {options} -o run.zarr"
    )


def _check_map(file: ArrayFile, mapped: Mapping[str, str], ignored: tuple[str, ...]) -> None:
    for kind in mapped.values():
        if kind not in ARRAY_KINDS and kind not in SCALARS:
            raise InvalidArgument(
                f"there is no kind {kind!r}{did_you_mean(kind, KINDS)}; choose from "
                f"{', '.join(KINDS)}"
            )
    held = (*file.keys, *file.attributes)
    unknown = [key for key in mapped if key not in held]
    unknown += [key for key in ignored if key not in (*held, *file.unread)]
    if unknown:
        raise InvalidArgument(
            f"{file.path} holds no {unknown[0]!r}; it holds {abridged(file.keys)}"
        )


def _check_attributes(file: ArrayFile, ignored: tuple[str, ...]) -> None:
    """Refuse masks and lists of tokens in attributes: they are read from arrays only."""
    for key, value in file.attributes.items():
        kind = named(key).kind
        is_list = isinstance(value, list) or (isinstance(value, str) and value[:1] in ("[", "("))
        if key not in ignored and is_list and kind is not None and kind.name in _LISTS:
            raise FormatError(
                f"{file.path}: {key} is an attribute, but {kind.name} is read from arrays only; "
                f"save it as an array, or save {kind.name}.npy and pass --masks {kind.name}.npy "
                f"--map {IGNORE}={key}"
            )


def _is_float(dtype: str) -> bool:
    return dtype in NATIVE_TYPES or dtype in _BITS


def _fits(array: NamedArray) -> bool:
    """True if the type and rank of an array fit its kind."""
    kind, rank = array.kind, len(array.shape)
    if kind.values == "float":
        fits = array.dtype in NATIVE_TYPES or (array.dtype in _BITS and rank > 1)
    elif kind.values == "whole":
        fits = "int" in array.dtype
    else:
        fits = array.dtype == "bool" or "int" in array.dtype
    least = len(kind.dims) - (1 if "step" in kind.dims and len(kind.dims) > 1 else 0)
    return fits and least <= rank <= len(kind.dims) + 1


def _unfit(file: ArrayFile, array: NamedArray, *, is_mapped: bool) -> FormatError:
    expected = {"float": "floating-point numbers or their 16 bits", "whole": "whole numbers",
                "truth": "booleans"}[array.kind.values]  # fmt: skip
    received = f"{array.key} has type {array.dtype} and shape {array.shape}"
    wanted = f"expected {expected} of ({', '.join(array.kind.dims)})"
    if is_mapped:
        return FormatError(
            f"{file.path}: {received}, but is mapped to {array.kind.name}, {wanted}; map another "
            f"array of {abridged(file.keys)}"
        )
    return FormatError(
        f"{file.path}: {received}, but its name means {array.kind.name}, {wanted}; name its kind "
        f"with --map KIND={array.key}, or omit it with --map {IGNORE}={array.key}"
    )


def _of_one_parameter(arrays: list[NamedArray]) -> tuple[list[NamedArray], dict[str, str]]:
    """Keep the moments of W from an optimizer's state, which has moments of every parameter."""
    shapes = {one.shape for one in arrays if one.kind.name == "W"}
    kept: list[NamedArray] = []
    left: dict[str, str] = {}
    for one in arrays:
        state = one.kind.name in ("exp_avg", "exp_avg_sq", "grad") and "." in one.key
        alike = [other for other in arrays if other.kind == one.kind and other.shape == one.shape]
        if not state or (one.shape in shapes and len(alike) == 1):
            kept.append(one)
        elif one.shape in shapes:
            left[one.key] = "several parameters have this shape; choose with --map"
        else:
            left[one.key] = _OTHER_PARAMETER
    return kept, left


def _distinct(file: ArrayFile, arrays: list[NamedArray]) -> list[NamedArray]:
    """The arrays, of which no two may be the same variable."""
    matrices = {array.matrix for array in arrays if array.kind.name == "W"}
    untied = "E" in matrices and len(matrices) > 1
    first: dict[Any, NamedArray] = {}
    for array in arrays:
        if not array.kind.is_variable:
            continue
        place = (array.kind.name, array.run, array.matrix if untied else None, array.population)
        other = first.setdefault(place, array)
        if other is not array:
            raise FormatError(
                f"{file.path}: {other.key} and {array.key} both have names of {array.kind.name}; "
                f"choose with --map {array.kind.name}={array.key}"
            )
    if not untied:
        return [replace(array, matrix=None) for array in arrays]
    # If there is an E, a W is the other matrix of an untied model.
    return [
        replace(array, matrix=array.matrix or "W") if array.kind.name == "W" else array
        for array in arrays
    ]


def abridged(keys: Any) -> str:
    """Keys for a message, at most twelve."""
    names = sorted(map(str, keys))
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"
