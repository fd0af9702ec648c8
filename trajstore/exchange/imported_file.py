"""The runs of a file before they are written: options, assignment of arrays to runs, and content.

A file can hold several runs, or both matrices of a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.layouts import IMPORT_LAYOUTS, KEPT_ATTRIBUTES, Layout, layout_of
from trajstore.exchange.named_arrays import IGNORE, NamedArray, NamedArrays, TableLine
from trajstore.exchange.token_tables import TokenArray, masks_of
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import OPTIMIZER_STATE, TRAJECTORIES, VARIABLES
from trajstore.strict_json import parse
from trajstore.values.native_types import (
    NativeType,
    as_bfloat16,
    is_bfloat16,
    is_zero_or_nan,
    narrow,
    widen,
)

Array = npt.NDArray[Any]

HalfForm = Literal["values", "bits", "either"]
"""float16 that holds values of bfloat16, that can only be bits of bfloat16, or that is all 0."""

_DEEPEST_JSON = 32
_BATCH = 4 << 20


def reader(
    file: ArrayFile,
    key: str,
    native: NativeType,
    *,
    single: bool = False,
    outer: int | None = None,
    pick: Array | None = None,
) -> Callable[[int, int], Array]:
    """A function that reads the bits of rows of an array, from a start up to a stop.

    Parameters
    ----------
    file : ArrayFile
    key : str
    native : NativeType
    single : bool
        True if the file holds one state, without an axis of steps.
    outer : int, optional
        Position along a first axis of runs.
    pick : ndarray of int, optional
        Positions to read along its token axis. Default: all.
    """

    def read(start: int, stop: int) -> Array:
        bits = file.read(key)[None] if single else file.read(key, start, stop, outer)
        bits = np.ascontiguousarray(bits).view(native.bits)
        return bits if pick is None else bits[:, pick]

    return read


@dataclass(frozen=True, kw_only=True)
class ImportedVariable:
    """A variable in a file.

    Attributes
    ----------
    variable : str
    keys : tuple of str
        Names in the file: two if it holds the rows of dead and of live tokens.
    native : NativeType
        Type in the file, or the type that its bits represent.
    wanted : NativeType
        Type in the run.
    rows : int
        Number of rows in the file.
    row_shape : tuple of int
        Shape of a row in the run.
    read : callable
        Returns the bits of the rows of the file from a start up to a stop, in its native type.
    shift : int
        Rows of the file before the value of the first row of the run. 1 for values before the step
        of their row, -1 if the file lacks the first row. Rows that the file lacks become NaN.
    blank : bool
        True if its first row becomes NaN in the run, whatever its value: no step produced it.
    """

    variable: str
    keys: tuple[str, ...]
    native: NativeType
    wanted: NativeType
    rows: int
    row_shape: tuple[int, ...]
    read: Callable[[int, int], Array]
    shift: int = 0
    blank: bool = False

    @property
    def key(self) -> str:
        """Names in the file, for messages."""
        return " and ".join(self.keys)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return math.prod(self.row_shape) * self.native.itemsize

    def is_blank(self, row: int) -> bool:
        """True if a row holds only zeros and NaN."""
        return bool(is_zero_or_nan(self.read(row, row + 1), self.native).all())

    def wanted_bits(self, bits: Array) -> Array:
        """Bits in the wanted type. `holds_bfloat16` has checked that it holds every value."""
        if self.wanted == self.native:
            return bits
        if self.native.name == "float32":
            return as_bfloat16(bits)
        return narrow(widen(bits, self.native), self.wanted)

    def holds_bfloat16(self) -> bool:
        """True if every value is a bfloat16."""
        return all(self._are_bfloat16(bits) for bits in self._batches())

    def half_form(self) -> HalfForm:
        """Form of its float16, if they were bfloat16 before."""
        blank = True
        for bits in self._batches():
            if not self._are_bfloat16(bits):
                return "bits"
            blank = blank and not (bits & (self.native.sign_mask - 1)).any()
        return "either" if blank else "values"

    def _are_bfloat16(self, bits: Array) -> bool:
        if self.native.name == "float16":
            bits = widen(bits, self.native).view(np.uint32)
        return bool(is_bfloat16(bits))

    def _batches(self) -> Iterator[Array]:
        rows = max(1, _BATCH // max(self.row_bytes, 1))
        for start in range(0, self.rows, rows):
            yield self.read(start, min(start + rows, self.rows))


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """A run that a file holds.

    Attributes
    ----------
    label : str
        Name among the runs of the file; empty for the only one.
    steps : ndarray of int64, (step,)
    token : ndarray of int, (token,)
    coordinates : dict of str to array_like, (token,)
    variables : tuple of ImportedVariable
    attributes : dict
        Attributes for the root of the run.
    notes : tuple of str
        Notes on corrections, omissions and missing information.
    names : dict of str to tuple of str
        Coordinates of names, such as ``parameter``, if variables need them.
    populations : dict of str to ndarray of bool, (token,)
        Populations by the names of their coordinates.
    """

    steps: Array
    token: Array
    coordinates: dict[str, Any]
    variables: tuple[ImportedVariable, ...]
    attributes: dict[str, Any]
    label: str = ""
    notes: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    populations: dict[str, Array] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        """Length of the hidden dimension."""
        return next(v.row_shape[1] for v in self.variables if v.variable in TRAJECTORIES)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all variables in the file, at least 1."""
        return sum(variable.row_bytes for variable in self.variables) or 1


@dataclass(frozen=True, kw_only=True)
class ImportedFile:
    """Interpreted content of a file.

    Attributes
    ----------
    layout : str
        Name of the layout, or the format of a file without one.
    runs : tuple of ImportedRun
    table : tuple of TableLine
        What each array becomes.
    """

    layout: str
    runs: tuple[ImportedRun, ...]
    table: tuple[TableLine, ...] = field(default=())


def checked_tokens(file: ArrayFile, token: Array) -> Array:
    """Check vocabulary ids.

    Raises
    ------
    FormatError
        If ids are repeated or out of range.
    """
    limit = np.iinfo(np.int32).max
    if (token < 0).any() or (token > limit).any() or len(np.unique(token)) != len(token):
        raise FormatError(f"{file.path}: token must hold distinct ids from 0 to {limit}")
    return token


def checked_texts(file: ArrayFile, name: str, text: str, length: int) -> list[str]:
    """Parse the strings of a coordinate from a JSON text.

    Raises
    ------
    FormatError
        If it is not a list of `length` strings.
    """
    texts = _parsed(file, text)
    sound = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if sound and len(texts) == length:
        try:
            "".join(texts).encode()
            return list(texts)
        except UnicodeEncodeError:
            sound = False
    raise FormatError(f"{file.path}: {name} must hold {length} strings")


def kept_attributes(file: ArrayFile, text: str) -> dict[str, Any]:
    """Parse the attributes that remain valid for an imported run, from a JSON text.

    Raises
    ------
    FormatError
        If it is not a JSON object, or an attribute has the wrong type.
    """
    attributes = _parsed(file, text)
    if not isinstance(attributes, dict):
        raise FormatError(
            f"{file.path}: its attributes are {type(attributes).__name__}, expected a JSON object"
        )
    kept = {name: attributes[name] for name in KEPT_ATTRIBUTES if name in attributes}
    for name, value in kept.items():
        kind = {"created": str, OPTIMIZER_STATE: list}.get(name, dict)
        if not isinstance(value, kind):
            wanted = {str: "a string", list: "a list", dict: "an object"}[kind]
            raise FormatError(
                f"{file.path}: its attribute {name} is {type(value).__name__}, expected {wanted}"
            )
    return kept


def _parsed(file: ArrayFile, text: str) -> Any:
    """Value of a JSON text, if the attributes of a run can hold it."""
    try:
        value = parse(text)
    except ValueError as error:
        raise FormatError(f"{file.path}: cannot read its attributes ({error})") from None
    if not _is_shallow(value, _DEEPEST_JSON):
        raise FormatError(
            f"{file.path}: its attributes are nested deeper than {_DEEPEST_JSON}, or hold a number "
            "beyond float64"
        )
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        # A number beyond float64 is parsed as infinity, which JSON cannot represent.
        return not isinstance(value, float) or math.isfinite(value)
    inner: Any = value.values() if isinstance(value, Mapping) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)


RUN_COUNTS = tuple(
    f"{prefix}{noun}"
    for noun in ("runs", "trials", "replicates")
    for prefix in ("n_", "num_", "number_of_")
)
"""Names of the number of runs of a file."""


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """The part of a file that makes one run.

    Attributes
    ----------
    label : str
    arrays : tuple of NamedArray
    numbers : dict
    outer : int, optional
        Position along a first axis of runs, for arrays that have one.
    """

    label: str
    arrays: tuple[NamedArray, ...]
    numbers: dict[str, Any]
    outer: int | None = None


def run_parts(file: ArrayFile, content: NamedArrays) -> Iterator[RunPart]:
    """Split a file into runs, by numbers in names, a first axis, or the matrices of untied models.

    Parameters
    ----------
    file : ArrayFile
    content : NamedArrays

    Raises
    ------
    FormatError
        If arrays disagree about the number of runs, or an array belongs to an unknown run.
    """
    arrays = content.arrays
    anchors = [array for array in arrays if array.kind.name in TRAJECTORIES]
    numbered = sorted({array.run for array in anchors if array.run is not None})
    lengths = {
        array.key: array.shape[0] for array in arrays if array.extra == 1 and array.kind.is_variable
    }
    along = [lengths[array.key] for array in anchors if array.extra == 1]
    if along:
        for key, length in lengths.items():
            if length != along[0]:
                raise FormatError(
                    f"{file.path}: {anchors[0].key} has {along[0]} runs along its first axis, but "
                    f"{key} has {length}; omit one with --map ignore={key}"
                )
    if numbered and along:
        raise FormatError(
            f"{file.path}: {anchors[0].key} has the number of a run in its name and an axis of "
            "runs, expected only one of them"
        )
    count = len(numbered) or (along[0] if along else 1)
    what = (
        f"the names of arrays give {count} runs ({', '.join(map(str, numbered[:12]))})" if numbered
        else f"{anchors[0].key} of shape {anchors[0].shape} has {count} runs"
    )  # fmt: skip
    _check_count(file, content, count, what)
    for array in arrays:
        of_all = array.run is None and array.extra < 1
        if (numbered or along) and array.kind.is_variable and of_all and array.kind.name != "lr":
            raise FormatError(
                f"{file.path}: {anchors[0].key} belongs to one of {count} runs, but {array.key} "
                f"has no number of a run; omit it with --map ignore={array.key}"
            )
    matrices = sorted({array.matrix for array in anchors if array.matrix is not None})
    places: Sequence[tuple[int | None, int | None]] = (
        [(run, None) for run in numbered] if numbered
        else [(None, at) for at in range(along[0])] if along
        else [(None, None)]
    )  # fmt: skip
    for run, outer in places:
        number = run if run is not None else outer
        for matrix in matrices or (None,):
            mine = tuple(
                array for array in arrays
                if array.run in (None, run) and (array.matrix in (None, matrix) or not matrices)
            )  # fmt: skip
            for array in mine:
                if matrices and array.matrix is None and array.kind.dims == VARIABLES["W"].dims:
                    raise FormatError(
                        f"{file.path}: {array.key} belongs to E or W, which are untied, but its "
                        f"name does not end with _E or _W; omit it with --map ignore={array.key}"
                    )
            numbers = dict(content.numbers)
            for key, values in content.vectors.items():
                if number is not None and len(values) == len(places):
                    numbers[key] = values[outer if outer is not None else places.index((run, None))]
            used = tuple(
                array for array in mine if array.key not in numbers or array.kind.is_variable
            )
            labels = [str(each) for each in (number, matrix) if each is not None]
            yield RunPart(label=".".join(labels), arrays=used, numbers=numbers, outer=outer)


def _check_count(file: ArrayFile, content: NamedArrays, count: int, what: str) -> None:
    """Refuse a number of runs, or lists of one number per run, that differ from the arrays."""
    for key, value in content.numbers.items():
        if key.lower() in RUN_COUNTS and value != count:
            raise FormatError(
                f"{file.path}: {key} is {value}, but {what}; omit it with --map ignore={key}"
            )
    for key, values in content.vectors.items():
        of_rows = any(array.key == key for array in content.arrays)
        if len(values) not in (1, count) and count > 1 and not of_rows:
            raise FormatError(
                f"{file.path}: {key} has {len(values)} values, but {what}; omit it with --map "
                f"ignore={key}"
            )


OTHERS = "*"
"""Key of all variables without an entry."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import. They override or complete the usual names.

    Attributes
    ----------
    layout : Layout, optional
        The keys and alignment of the file.
    mapped : dict of str to str
        Keys and their kinds.
    ignored : tuple of str
        Keys to omit.
    bits : dict of str to str
        Type of 16-bit values, bfloat16 or float16, by variable or key; `OTHERS` for the rest.
    steps : str, optional
        Labels of the rows: a key, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
        Step of the first row of a file without labels.
    masks : tuple of TokenArray
        Labels of tokens from another file.
    """

    layout: Layout | None = None
    mapped: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    bits: Mapping[str, str] = field(default_factory=dict)
    steps: str | None = None
    first_row: int | None = None
    masks: tuple[TokenArray, ...] = ()

    def bits_of(self, variable: str, *keys: str) -> str | None:
        """Type of the 16-bit arrays of a variable, if an option gives it."""
        names = (*keys, variable, OTHERS)
        return next((self.bits[name] for name in names if name in self.bits), None)


def import_options(
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: int | None = None,
    masks: str | os.PathLike[str] | None = None,
) -> ImportOptions:
    """Check the options of an import. Of all files, only ``masks`` is read.

    Parameters
    ----------
    layout : str, optional
    map : mapping of str to str or iterable of str, optional
        Name of the array of each kind, or several names in a file with several runs. Arrays under
        ``ignore`` are omitted.
    bits : {'bfloat16', 'float16'} or mapping of str to them, optional
        Type of all 16-bit arrays, or types by variable or name of an array.
    labels : mapping of str to str, optional
        ``steps``: the name of an array, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
    masks : path-like, optional

    Raises
    ------
    InvalidArgument
        If an option has an invalid value.
    RunNotFound, FormatError
        If `masks` does not exist, or labels no tokens.
    """
    described = None if layout is None else layout_of(layout, IMPORT_LAYOUTS)
    bits_of = {} if bits is None else {OTHERS: bits} if isinstance(bits, str) else dict(bits)
    for type in bits_of.values():
        if type not in ("bfloat16", "float16"):
            raise InvalidArgument(f"got bits {type!r}, expected bfloat16 or float16")
    if first_row not in (None, 0, 1):
        raise InvalidArgument(f"got first row {first_row!r}, expected step 0 or 1")
    unknown = set(labels or {}) - {"steps"}
    if unknown:
        raise InvalidArgument(f"got labels of {', '.join(sorted(unknown))}, expected steps only")
    mapped: dict[str, str] = {}
    ignored: list[str] = []
    for kind, keys in (map or {}).items():
        for key in [keys] if isinstance(keys, str) else keys:
            if key in mapped:
                raise InvalidArgument(
                    f"got {key} mapped to {mapped[key]} and to {kind}, expected one of them"
                )
            if kind == IGNORE:
                ignored.append(key)
            else:
                mapped[key] = kind
    return ImportOptions(
        layout=described,
        mapped=mapped,
        ignored=tuple(ignored),
        bits=bits_of,
        steps=(labels or {}).get("steps"),
        first_row=first_row,
        masks=() if masks is None else masks_of(masks),
    )
