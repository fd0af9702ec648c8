"""Kind of each array of a file, from its name, type and shape. Every decision is reported.

A name from `kind_table` decides if rank and type fit. A single array of (step, token, hidden) needs
no name. Unknown and derived arrays are omitted and listed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.guessing.detect_numbers import (
    number_of_one,
    numbers_per_run,
    single_numbers,
)
from trajstore.exchange.guessing.kind_table import (
    AMBIGUOUS,
    ARRAY_KINDS,
    SCALARS,
    ArrayKind,
    Name,
    described_population,
    is_derived,
    named,
    scalar_of,
)
from trajstore.formats.array_file import ArrayFile, is_number, values_of
from trajstore.schema import TRAJECTORIES
from trajstore.values.native_types import NATIVE_TYPES

IGNORE = "ignore"
"""Kind of arrays to omit."""

_BITS = ("uint16", "int16")
_BATCH = 4 << 20
_IGNORED = "ignored (--map)"
_DERIVED = "derived from other arrays"
_OTHER_PARAMETER = "belongs to another parameter"
_LISTS = ("dead_mask", "live_mask", "dead_ids", "live_ids")


@dataclass(frozen=True, kw_only=True)
class Detection:
    """A line of the table of detected arrays.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    kind : str
        Detected kind; empty if the array is omitted.
    why : str
        Details of the detection, or the reason for the omission.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class DetectedArray(Name):
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
class DetectedArrays:
    """Detected content of a file.

    Attributes
    ----------
    found : tuple of DetectedArray
    numbers : dict of str to int, float or bool
        Single numbers by key.
    vectors : dict of str to list
        Lists of one number per run, by key.
    omitted : tuple of Detection
    guessed : tuple of str
        Keys of arrays that were taken as W because of their shape alone.
    """

    found: tuple[DetectedArray, ...]
    numbers: dict[str, Any]
    vectors: dict[str, list[Any]]
    omitted: tuple[Detection, ...]
    guessed: tuple[str, ...] = ()


def detect_arrays(
    file: ArrayFile,
    mapped: Mapping[str, str] | None = None,
    *,
    ignored: tuple[str, ...] = (),
    derived: Collection[str] = (),
) -> DetectedArrays:
    """Detect the kinds of the arrays of a file.

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
        If the type or rank of an array does not fit its name, or two arrays have one kind. Also if
        other arrays have known names, and the only array that could be W has not.
    InvalidArgument
        If a kind or a key does not exist.
    """
    mapped = mapped or {}
    _check_map(file, mapped, ignored)
    _check_attributes(file, ignored)
    mapped_kinds = {ARRAY_KINDS[kind].name for kind in mapped.values() if kind in ARRAY_KINDS}
    found: list[DetectedArray] = []
    left: dict[str, str] = {}
    numbers = single_numbers(file, ignored)
    vectors = numbers_per_run(file, ignored)
    unknown: list[DetectedArray] = []
    alone: list[DetectedArray] = []
    for key in file.keys:
        shape, dtype = file.shape(key), file.dtype(key)
        if key in ignored:
            left[key] = _IGNORED
            continue
        if key in derived and key not in mapped:
            left[key] = _DERIVED
            continue
        name = named(key)
        if key not in mapped and shape and key.lower() in AMBIGUOUS:
            kinds = AMBIGUOUS[key.lower()]
            raise FormatError(
                f"{file.path}: {key} may be {' or '.join(kinds)}; choose with "
                f"{' or '.join(f'--map {kind}={key}' for kind in kinds)}"
            )
        if key in mapped:
            kind = mapped[key]
            if kind not in ARRAY_KINDS:
                continue  # a scalar, already among the numbers
            name = replace(name, kind=ARRAY_KINDS[kind])
        elif name.kind is not None and name.kind.name in mapped_kinds and name.kind.is_variable:
            other = next(other for other, kind in mapped.items() if kind == name.kind.name)
            left[key] = f"replaced by {other} (--map)"
            continue
        if name.kind is not None and name.kind.name == "token_ids":
            name = _described(file, key, name)
        if not shape:
            if name.kind is not None and not is_number(dtype):
                raise _unfit(file, _found(key, dtype, shape, name), is_mapped=key in mapped)
            if name.kind is not None and name.kind.is_variable and dtype in NATIVE_TYPES:
                alone.append(_found(key, dtype, shape, name))
            elif key not in numbers:
                left[key] = "not a number"
        elif name.kind is not None:
            if name.kind.name == "lr" and len(shape) == 1 and scalar_of(key) is not None:
                vectors[key] = values_of(file, key).tolist()
            one = _found(key, dtype, shape, name)
            if "." in key and not _fits(one):  # one of the many arrays of a checkpoint
                left[key] = _OTHER_PARAMETER
            elif not _fits(one):
                raise _unfit(file, one, is_mapped=key in mapped)
            else:
                found.append(one)
        elif key in numbers or f"{key}[0]" in numbers:
            continue
        elif len(shape) == 1 and scalar_of(key) is not None:
            vectors[key] = values_of(file, key).tolist()
        elif is_derived(key):
            left[key] = _DERIVED
        elif _is_float(dtype) and (len(shape) == 3 or (len(shape) == 2 and "." not in key)):
            unknown.append(_found(key, dtype, shape, replace(name, kind=ARRAY_KINDS["W"])))
        else:
            left[key] = "unknown name"
    chosen, more = _by_shape_alone(file, found, unknown)
    found, dropped = _of_one_parameter(found + chosen)
    anchors = [one for one in found if one.kind.name in TRAJECTORIES]
    for key in [key for key, values in vectors.items() if len(values) == 1]:
        # One rate for all rows, unless the file has only one row.
        if any(len(one.shape) > 2 and one.shape[one.extra] > 1 for one in anchors):
            numbers[key] = number_of_one(file, key)
            del vectors[key]
            found = [one for one in found if one.key != key]
    if anchors and all(len(one.shape) == 2 for one in anchors):
        found += alone  # values of the one state that the file holds
    found, tied = _once(file, found)
    left |= more | dropped | tied
    unread = {key: _IGNORED if key in ignored else why for key, why in file.unread.items()}
    return DetectedArrays(
        found=tuple(found),
        numbers=numbers,
        vectors=vectors,
        omitted=(
            *(Detection(name=key, dtype="", shape=(), why=why) for key, why in unread.items()),
            *(
                Detection(name=key, dtype=file.dtype(key), shape=file.shape(key), why=why)
                for key, why in left.items()
            ),
        ),
        guessed=tuple(one.key for one in chosen),
    )


def _check_map(file: ArrayFile, mapped: Mapping[str, str], ignored: tuple[str, ...]) -> None:
    for kind in mapped.values():
        if kind not in ARRAY_KINDS and kind not in SCALARS:
            raise InvalidArgument(
                f"there is no kind {kind!r}; choose from "
                f"{', '.join((*ARRAY_KINDS, *SCALARS, IGNORE))}"
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


def _found(key: str, dtype: str, shape: tuple[int, ...], name: Name) -> DetectedArray:
    return DetectedArray(key=key, dtype=dtype, shape=shape, **vars(name))


def _described(file: ArrayFile, key: str, name: Name) -> Name:
    """Name of a list of tokens; a description of the file may define them as dead or live."""
    text = " ".join(str(value) for at, value in file.attributes.items() if "descr" in at.lower())
    population = described_population(text)
    if population is None:
        return name
    note = f"{population} tokens, by a description in its file"
    return replace(name, kind=ARRAY_KINDS[f"{population}_ids"], note=note)


def _is_float(dtype: str) -> bool:
    return dtype in NATIVE_TYPES or dtype in _BITS


def _fits(one: DetectedArray) -> bool:
    """True if the type and rank of an array fit its kind."""
    kind, rank = one.kind, len(one.shape)
    if kind.values == "float":
        fits = one.dtype in NATIVE_TYPES or (one.dtype in _BITS and rank > 1)
    elif kind.values == "whole":
        fits = "int" in one.dtype
    else:
        fits = one.dtype == "bool" or "int" in one.dtype
    least = len(kind.dims) - (1 if "step" in kind.dims and len(kind.dims) > 1 else 0)
    return fits and least <= rank <= len(kind.dims) + 1


def _unfit(file: ArrayFile, one: DetectedArray, *, is_mapped: bool) -> FormatError:
    expected = {"float": "floating-point numbers or their 16 bits", "whole": "whole numbers",
                "truth": "booleans"}[one.kind.values]  # fmt: skip
    received = f"{one.key} has type {one.dtype} and shape {one.shape}"
    wanted = f"expected {expected} of ({', '.join(one.kind.dims)})"
    if is_mapped:
        return FormatError(
            f"{file.path}: {received}, but is mapped to {one.kind.name}, {wanted}; map another "
            f"array of {abridged(file.keys)}"
        )
    return FormatError(
        f"{file.path}: {received}, but its name means {one.kind.name}, {wanted}; name its kind "
        f"with --map KIND={one.key}, or omit it with --map {IGNORE}={one.key}"
    )


def _by_shape_alone(
    file: ArrayFile, found: list[DetectedArray], unknown: list[DetectedArray]
) -> tuple[list[DetectedArray], dict[str, str]]:
    """W, if no name identifies it and only one array has its rank; and reasons to omit others."""
    rank = max((len(one.shape) for one in unknown), default=0)
    alike = [one for one in unknown if len(one.shape) == rank]
    is_clear = len(alike) == len({one.run for one in alike}) > 0
    if any(one.kind.name in TRAJECTORIES for one in found) or not is_clear:
        return [], {one.key: "unknown name; name its kind with --map" for one in unknown}
    others = [other.key for other in found if other.kind.is_variable]
    if others:
        one = alike[0]
        raise FormatError(
            f"{file.path} holds {abridged(others)} but no known name of W; if {one.key} of shape "
            f"{one.shape} is W, pass --map W={one.key}"
        )
    return alike, {one.key: "unknown name" for one in unknown if one not in alike}


def _of_one_parameter(found: list[DetectedArray]) -> tuple[list[DetectedArray], dict[str, str]]:
    """Keep the moments of W from an optimizer's state, which has moments of every parameter."""
    shapes = {one.shape for one in found if one.kind.name == "W"}
    kept: list[DetectedArray] = []
    left: dict[str, str] = {}
    for one in found:
        state = one.kind.name in ("exp_avg", "exp_avg_sq", "grad") and "." in one.key
        alike = [other for other in found if other.kind == one.kind and other.shape == one.shape]
        if not state or (one.shape in shapes and len(alike) == 1):
            kept.append(one)
        elif one.shape in shapes:
            left[one.key] = "several parameters have this shape; choose with --map"
        else:
            left[one.key] = _OTHER_PARAMETER
    return kept, left


def _once(
    file: ArrayFile, found: list[DetectedArray]
) -> tuple[list[DetectedArray], dict[str, str]]:
    """The arrays, of which no two may be the same variable. A tied W counts once."""
    matrices = {one.matrix for one in found if one.kind.name == "W"}
    untied = "E" in matrices and len(matrices) > 1
    seen: dict[Any, DetectedArray] = {}
    for one in found:
        if not one.kind.is_variable:
            continue
        place = (one.kind.name, one.run, one.matrix if untied else None, one.population)
        other = seen.setdefault(place, one)
        if other is not one:
            raise FormatError(
                f"{file.path}: {other.key} and {one.key} both have names of {one.kind.name}; "
                f"choose with --map {one.kind.name}={one.key}"
            )
    same = _tied(file, [one for one in found if one.kind.name == "W"]) if untied else None
    if untied and same is None:
        # If there is an E, a W is the other matrix of an untied model.
        return [
            replace(one, matrix="W") if one.matrix is None and one.kind.name == "W" else one
            for one in found
        ], {}
    tied = {} if same is None else {same.key: "tied to the other matrix: the same values"}
    return [replace(one, matrix=None) for one in found if one is not same], tied


def _tied(file: ArrayFile, matrices: list[DetectedArray]) -> DetectedArray | None:
    """The unembedding of a model, if it equals the embedding. Untied histories have plain names.

    Values are compared a few rows at a time.
    """
    if len(matrices) != 2 or any("." not in one.key for one in matrices):
        return None
    one, other = sorted(matrices, key=lambda each: each.matrix or "W")
    if one.shape != other.shape or one.dtype != other.dtype:
        return None
    rows = max(1, _BATCH // (8 * max(1, math.prod(one.shape[1:]))))
    for start in range(0, one.shape[0], rows):
        stop = min(start + rows, one.shape[0])
        if not np.array_equal(file.read(one.key, start, stop), file.read(other.key, start, stop)):
            return None
    return other


def abridged(keys: Any) -> str:
    """Keys for a message, at most twelve."""
    names = sorted(map(str, keys))
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"
