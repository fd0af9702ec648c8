"""The runs of a file before they are written: their parts of the file, and what these become."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.exchange.layouts import Column
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import TRAJECTORIES
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

_BATCH = 4 << 20


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
class RunPart:
    """The part of a file that makes one run.

    Attributes
    ----------
    label : str
        Name among the runs of the file; empty for the only one.
    anchor : Column
        The array that defines the number of rows: W, or its changes.
    columns : tuple of Column
    numbers : dict
    outer : int, optional
        Position along a first axis of runs, for arrays that have one.
    """

    label: str
    anchor: Column
    columns: tuple[Column, ...]
    numbers: dict[str, Any]
    outer: int | None = None

    def is_single(self, file: ArrayFile) -> bool:
        """True for one state, without an axis of steps."""
        return len(file.shape(self.anchor.key)) == 2

    def rows(self, file: ArrayFile) -> int:
        """Number of rows."""
        return 1 if self.is_single(file) else file.shape(self.anchor.key)[-3]


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
    toml : str
        The layout as TOML, to be edited; empty for a file of a whole run.
    """

    layout: str
    runs: tuple[ImportedRun, ...]
    table: tuple[TableLine, ...] = ()
    toml: str = ""
