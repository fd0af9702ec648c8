"""Variable or coordinate that each array of a file holds, by its name and ``--map``.

Names are those of `trajstore.exchange.usual_names`. Type and rank must fit. Nothing is inferred
from values: arrays with other names are omitted and listed.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trajstore.errors import FormatError, InvalidArgument, did_you_mean
from trajstore.exchange.usual_names import (
    ARRAY_KINDS,
    SCALARS,
    ArrayKind,
    Name,
    named,
    number_of_one,
    numbers_per_run,
    scalar_of,
    single_numbers,
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
    reading = _Reading(
        file=file,
        mapped=mapped,
        ignored=ignored,
        derived=derived,
        numbers=single_numbers(file, ignored),
        vectors=numbers_per_run(file, ignored),
    )
    for key in file.keys:
        reading.add(key)
    reading.keep_one_parameter()
    reading.take_common_rates()
    unread = {key: _IGNORED if key in ignored else why for key, why in file.unread.items()}
    return NamedArrays(
        arrays=tuple(_distinct(file, reading.arrays)),
        numbers=reading.numbers,
        vectors=reading.vectors,
        omitted=(
            *(TableLine(name=key, dtype="", shape=(), why=why) for key, why in unread.items()),
            *(
                TableLine(name=key, dtype=file.dtype(key), shape=file.shape(key), why=why)
                for key, why in reading.omitted.items()
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Arrays and numbers of a file, while its keys are read.

    Attributes
    ----------
    file, mapped, ignored, derived
        As for `named_arrays`.
    numbers, vectors
        As of `NamedArrays`.
    arrays : list of NamedArray
    states : list of NamedArray
        Values of one state: numbers with the name of a variable.
    omitted : dict of str to str
        Reasons by key.
    """

    file: ArrayFile
    mapped: Mapping[str, str]
    ignored: tuple[str, ...]
    derived: Collection[str]
    numbers: dict[str, Any]
    vectors: dict[str, list[Any]]
    arrays: list[NamedArray] = field(default_factory=list)
    states: list[NamedArray] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)

    def add(self, key: str) -> None:
        """Read the name of an array, and add it to those of its kind."""
        why = self._why_omitted(key)
        if why:
            self.omitted[key] = why
            return
        name = named(key)
        if key in self.mapped:
            if self.mapped[key] not in ARRAY_KINDS:
                return  # a scalar, already among the numbers
            name = replace(name, kind=ARRAY_KINDS[self.mapped[key]])
        shape, dtype = self.file.shape(key), self.file.dtype(key)
        if name.kind is None:
            self._add_unnamed(key, shape)
            return
        array = NamedArray(key=key, dtype=dtype, shape=shape, **(vars(name) | {"kind": name.kind}))
        if shape:
            self._add_array(array)
        else:
            self._add_number(array)

    def _why_omitted(self, key: str) -> str:
        """Reason for the omission of an array, whatever its type and shape; empty without one."""
        if key in self.ignored:
            return _IGNORED
        if key in self.mapped:
            return ""
        if key in self.derived:
            return _DERIVED
        kind = named(key).kind
        mapped = [other for other, name in self.mapped.items() if kind and name == kind.name]
        if kind is not None and kind.is_variable and mapped:
            return f"replaced by {mapped[-1]} (--map)"
        return ""

    def _add_unnamed(self, key: str, shape: tuple[int, ...]) -> None:
        if key in self.numbers or f"{key}[0]" in self.numbers:
            return
        if len(shape) == 1 and scalar_of(key) is not None:
            self.vectors[key] = values_of(self.file, key).tolist()
        else:
            self.omitted[key] = UNKNOWN if shape else "not a number"

    def _add_number(self, array: NamedArray) -> None:
        if not is_number(array.dtype):
            raise self._unfit(array)
        if array.kind.is_variable and array.dtype in NATIVE_TYPES:
            self.states.append(array)
        elif array.key not in self.numbers:
            self.omitted[array.key] = "not a number"

    def _add_array(self, array: NamedArray) -> None:
        key = array.key
        if _fits(array):
            self.arrays.append(array)
            if array.kind.name == "lr" and len(array.shape) == 1 and scalar_of(key) is not None:
                self.vectors[key] = values_of(self.file, key).tolist()
        elif "." in key:  # one of the many arrays of a checkpoint
            self.omitted[key] = _OTHER_PARAMETER
        else:
            raise self._unfit(array)

    def _unfit(self, array: NamedArray) -> FormatError:
        expected = {"float": "floating-point numbers or their 16 bits", "whole": "whole numbers",
                    "truth": "booleans"}[array.kind.values]  # fmt: skip
        received = f"{array.key} has type {array.dtype} and shape {array.shape}"
        wanted = f"expected {expected} of ({', '.join(array.kind.dims)})"
        if array.key in self.mapped:
            return FormatError(
                f"{self.file.path}: {received}, but is mapped to {array.kind.name}, {wanted}; map "
                f"another array of {abridged(self.file.keys)}"
            )
        return FormatError(
            f"{self.file.path}: {received}, but its name means {array.kind.name}, {wanted}; name "
            f"its kind with --map KIND={array.key}, or omit it with --map {IGNORE}={array.key}"
        )

    def keep_one_parameter(self) -> None:
        """Keep the moments of W from an optimizer's state, which has those of all parameters."""
        shapes = {array.shape for array in self.arrays if array.kind.name == "W"}
        shape_of = Counter((array.kind.name, array.shape) for array in self.arrays)
        kept: list[NamedArray] = []
        for array in self.arrays:
            is_state = array.kind.name in ("exp_avg", "exp_avg_sq", "grad") and "." in array.key
            is_like_w = array.shape in shapes
            if not is_state or (is_like_w and shape_of[array.kind.name, array.shape] == 1):
                kept.append(array)
            elif is_like_w:
                self.omitted[array.key] = "several parameters have this shape; choose with --map"
            else:
                self.omitted[array.key] = _OTHER_PARAMETER
        self.arrays[:] = kept

    def take_common_rates(self) -> None:
        """Take one rate as that of all rows, unless the file has only one row."""
        anchors = [array for array in self.arrays if array.kind.name in TRAJECTORIES]
        if any(len(array.shape) > 2 and array.shape[array.extra] > 1 for array in anchors):
            for key in [key for key, values in self.vectors.items() if len(values) == 1]:
                self.numbers[key] = number_of_one(self.file, key)
                del self.vectors[key]
                self.arrays[:] = [array for array in self.arrays if array.key != key]
        if anchors and all(len(array.shape) == 2 for array in anchors):
            self.arrays.extend(self.states)


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
    known = (*file.keys, *file.attributes)
    unknown = [key for key in mapped if key not in known]
    unknown += [key for key in ignored if key not in (*known, *file.unread)]
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
