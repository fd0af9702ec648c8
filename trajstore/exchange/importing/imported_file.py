"""What a file holds, once it is detected and every shape and type is checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.guessing.detect_arrays import Detection
from trajstore.exchange.layouts import KEPT_ATTRIBUTES
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import TRAJECTORIES
from trajstore.strict_json import parse
from trajstore.values.native_types import NativeType, is_zero_or_nan, narrow, widen
from trajstore.values.rounding import as_bfloat16, is_bfloat16

__all__ = [
    "HalfForm",
    "ImportedFile",
    "ImportedRun",
    "ImportedVariable",
    "Source",
    "Time",
    "checked_texts",
    "checked_tokens",
    "first_row_is_blank",
    "kept_attributes",
]

Array = npt.NDArray[Any]

HalfForm = Literal["values", "bits", "either"]
"""Whether float16 holds values of bfloat16, could only be its bits, or is 0 either way."""

Time = Literal["after", "before"]
"""Whether a row holds the state after its step, or before it."""

_DEEPEST_JSON = 32
_BATCH = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """An array of a file that holds a variable, or the part of it of some tokens.

    Attributes
    ----------
    key : str
    outer : int, optional
        Place along a first axis of runs.
    places : ndarray of int, optional
        Places along ``token`` where its tokens go; all without it.
    pick : ndarray of int, optional
        What to take along its token axis; all without it.
    """

    key: str
    outer: int | None = None
    places: Array | None = None
    pick: Array | None = None


@dataclass(frozen=True, kw_only=True)
class ImportedVariable:
    """A variable as a file holds it.

    Attributes
    ----------
    variable : str
    native : NativeType
        In the file, or as which its bits are read.
    wanted : NativeType
        In the run.
    rows : int
        In the file.
    row_shape : tuple of int
        In the run.
    file : ArrayFile, optional
    sources : tuple of Source
    given : ndarray, optional
        Its bits, where no file holds them.
    single : bool
        Whether the file holds one state, without an axis of steps.
    time : {'after', 'before'}
    missing : bool
        Whether its first row in the file is the run's second.
    blank : bool
        Whether its first row, 0 or whatever it is, is NaN in the run: no step made it.
    """

    variable: str
    native: NativeType
    wanted: NativeType
    rows: int
    row_shape: tuple[int, ...]
    file: ArrayFile | None = None
    sources: tuple[Source, ...] = ()
    given: Array | None = None
    single: bool = False
    time: Time = "after"
    missing: bool = False
    blank: bool = False

    @property
    def key(self) -> str:
        """Name in the file."""
        return " and ".join(source.key for source in self.sources) or self.variable

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return math.prod(self.row_shape) * self.native.itemsize

    def read(self, start: int, stop: int) -> Array:
        """Bits of the rows of the file from `start` up to `stop`, in the type that it has."""
        if self.given is not None:
            return self.given[start:stop]
        assert self.file is not None
        whole = np.empty((stop - start, *self.row_shape), self.native.bits)
        for source in self.sources:
            if self.single:
                bits = self.file.read(source.key)[None]
            else:
                bits = self.file.read(source.key, start, stop, source.outer)
            bits = np.ascontiguousarray(bits).view(self.native.bits)
            if source.pick is not None:
                bits = bits[:, source.pick]
            if source.places is None:
                return bits
            whole[:, source.places] = bits
        return whole

    def wanted_bits(self, bits: Array) -> Array:
        """Bits of the wanted type, which holds every value, as `holds_bfloat16` has checked."""
        if self.wanted == self.native:
            return bits
        if self.native.name == "float32":
            return as_bfloat16(bits)
        return narrow(widen(bits, self.native), self.wanted)

    def holds_bfloat16(self) -> bool:
        """Whether every value is one of bfloat16."""
        return all(self._are_bfloat16(bits) for bits in self._batches())

    def half_form(self) -> HalfForm:
        """What its float16 may be, if they were bfloat16 before."""
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
        That tells it from the others of the file; empty for the only one.
    steps : ndarray of int64, (step,)
    token : ndarray of int, (token,)
    coordinates : dict of str to array_like, (token,)
    variables : tuple of ImportedVariable
    attributes : dict
        For the root of the run.
    notes : tuple of str
        What was corrected, left out or is not known.
    parameters : tuple of str
        Names, where there are variables of the model's parameters.
    populations : dict of str to ndarray of bool, (token,)
        By the names of their coordinates.
    """

    steps: Array
    token: Array
    coordinates: dict[str, Any]
    variables: tuple[ImportedVariable, ...]
    attributes: dict[str, Any]
    label: str = ""
    notes: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    populations: dict[str, Array] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        """Length of the hidden dimension."""
        return next(v.row_shape[1] for v in self.variables if v.variable in TRAJECTORIES)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all variables in the file, at least 1."""
        return sum(held.row_bytes for held in self.variables) or 1


@dataclass(frozen=True, kw_only=True)
class ImportedFile:
    """A file that is understood.

    Attributes
    ----------
    layout : str
        Of the table of layouts, or the format where it is of none.
    runs : tuple of ImportedRun
    table : tuple of Detection
        What each array was taken for.
    """

    layout: str
    runs: tuple[ImportedRun, ...]
    table: tuple[Detection, ...] = field(default=())


def first_row_is_blank(held: ImportedVariable) -> bool:
    """Whether the first row holds nothing but zeros and NaN."""
    return bool(is_zero_or_nan(held.read(0, 1), held.native).all())


def checked_tokens(file: ArrayFile, token: Array) -> Array:
    """Vocabulary ids that a run can hold.

    Raises
    ------
    FormatError
        If they are not distinct, or out of range.
    """
    limit = np.iinfo(np.int32).max
    if (token < 0).any() or (token > limit).any() or len(np.unique(token)) != len(token):
        raise FormatError(f"{file.path}: token must hold distinct ids from 0 to {limit}")
    return token


def checked_texts(file: ArrayFile, name: str, text: str, length: int) -> list[str]:
    """Texts of a coordinate, of a JSON text.

    Raises
    ------
    FormatError
        If they are not so many texts.
    """
    texts = _parsed(file, text)
    sound = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if sound and len(texts) == length:
        try:
            "".join(texts).encode()
            return list(texts)
        except UnicodeEncodeError:
            sound = False
    raise FormatError(f"{file.path}: {name} must hold {length} texts")


def kept_attributes(file: ArrayFile, text: str) -> dict[str, Any]:
    """Attributes, of a JSON text, that stay true of an imported run.

    Raises
    ------
    FormatError
        If it holds no attributes, or such as a run cannot hold.
    """
    attributes = _parsed(file, text)
    if not isinstance(attributes, dict):
        raise FormatError(f"{file.path}: its attributes are no JSON object")
    kept = {name: attributes[name] for name in KEPT_ATTRIBUTES if name in attributes}
    for name, value in kept.items():
        if not isinstance(value, str if name == "created" else dict):
            raise FormatError(f"{file.path}: its attribute {name} is {type(value).__name__}")
    return kept


def _parsed(file: ArrayFile, text: str) -> Any:
    """Value of a JSON text that a run can hold among its attributes."""
    try:
        value = parse(text)
    except ValueError as error:
        raise FormatError(f"{file.path}: its attributes cannot be read ({error})") from None
    if not _is_shallow(value, _DEEPEST_JSON):
        raise FormatError(f"{file.path}: its attributes are nested deeper than {_DEEPEST_JSON}")
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        # A number beyond float64 reads as infinity, which JSON cannot say.
        return not isinstance(value, float) or math.isfinite(value)
    inner: Any = value.values() if isinstance(value, Mapping) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)
