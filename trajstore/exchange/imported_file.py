"""What a file holds, once its layout is recognised and every shape and type is checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.key_names import KEPT_ATTRIBUTES
from trajstore.schema import VARIABLES
from trajstore.strict_json import parse
from trajstore.values.native_types import NativeType, is_zero_or_nan

__all__ = [
    "ArrayFile",
    "ImportedFile",
    "ImportedVariable",
    "Time",
    "abridged",
    "checked_texts",
    "checked_tokens",
    "first_row_is_blank",
    "imported_variables",
    "kept_attributes",
]

Array = npt.NDArray[Any]

Time = Literal["after", "before"]
"""Whether a row holds the state after its step, or before it."""

_DEEPEST_JSON = 32


class ArrayFile(Protocol):
    """A file of named arrays, open for reading, as `trajstore.formats` has one for each format.

    Attributes
    ----------
    path : Path
    keys : tuple of str
    """

    path: Path
    keys: tuple[str, ...]

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of an array."""

    def native_type(self, key: str) -> NativeType:
        """Type of an array of floating-point numbers; FormatError if it is of another type."""

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Values of an array or their bits, or those of its rows from `start` up to `stop`."""


@dataclass(frozen=True, kw_only=True)
class ImportedVariable:
    """A variable as a file holds it.

    Attributes
    ----------
    file : ArrayFile
    variable, key : str
        Its names in a run and in the file.
    native : NativeType
        In the file.
    wanted : NativeType
        In the run.
    rows : int
    row_shape : tuple of int
    time : {'after', 'before'}
        Whether a row holds the state after its step, or before it.
    """

    file: ArrayFile
    variable: str
    key: str
    native: NativeType
    wanted: NativeType
    rows: int
    row_shape: tuple[int, ...]
    time: Time

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return math.prod(self.row_shape) * self.native.itemsize

    def read(self, start: int, stop: int) -> Array:
        """Bits of the rows from `start` up to `stop`, in the type that the file has."""
        values = self.file.read(self.key, start, stop)
        return np.ascontiguousarray(values).view(self.native.bits)


@dataclass(frozen=True, kw_only=True)
class ImportedFile:
    """A file that is understood: what a run is made of.

    Attributes
    ----------
    layout : str
    steps : ndarray of int64, (step,)
    token : ndarray of int, (token,)
    coordinates : dict of str to array_like, (token,)
    variables : tuple of ImportedVariable
    attributes : dict
        For the root of the run.
    exact : bool
        Whether the file says what the native types were.
    notes : tuple of str
        What was corrected, left out or is not known.
    """

    layout: str
    steps: Array
    token: Array
    coordinates: dict[str, Any]
    variables: tuple[ImportedVariable, ...]
    attributes: dict[str, Any]
    exact: bool
    notes: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        """Length of the hidden dimension."""
        return next(v.row_shape[1] for v in self.variables if v.variable in ("W", "delta"))


def imported_variables(
    file: ArrayFile, names: Mapping[str, tuple[str, Time]], *, rows: int, tokens: int
) -> tuple[ImportedVariable, ...]:
    """Variables of a file, their shapes and types checked.

    Parameters
    ----------
    file : ArrayFile
    names : mapping of str to (str, {'after', 'before'})
        Variable that a key holds, and at which time.
    rows, tokens : int

    Raises
    ------
    FormatError
        If shapes disagree, a type is none of a run, or there is no W.
    """
    hidden: int | None = None
    found = []
    for key, (variable, time) in names.items():
        shape, dims = file.shape(key), VARIABLES[variable].dims
        if len(shape) == len(dims) and "hidden" in dims and hidden is None:
            hidden = shape[dims.index("hidden")]
        lengths = {"step": rows, "token": tokens, "hidden": hidden}
        expected = tuple(lengths[dim] for dim in dims)
        if shape != expected:
            raise FormatError(f"{file.path}: {key} has shape {shape}, expected {expected}")
        if not all(shape):
            raise FormatError(f"{file.path}: {key} has shape {shape}, which holds nothing")
        native = file.native_type(key)
        found.append(
            ImportedVariable(
                file=file,
                variable=variable,
                key=key,
                native=native,
                wanted=native,
                rows=rows,
                row_shape=shape[1:],
                time=time,
            )
        )
    if not any(held.variable in ("W", "delta") for held in found):
        raise FormatError(f"{file.path}: it holds no W, without which there is no run")
    return tuple(found)


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


def checked_texts(file: ArrayFile, name: str, text: str, tokens: int) -> list[str]:
    """Texts of the tokens, of a JSON text.

    Raises
    ------
    FormatError
        If they are not as many texts as there are tokens.
    """
    texts = _parsed(file, text)
    sound = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if sound and len(texts) == tokens:
        try:
            "".join(texts).encode()
            return list(texts)
        except UnicodeEncodeError:
            sound = False
    raise FormatError(f"{file.path}: {name} must hold {tokens} texts")


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
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)


def abridged(keys: Iterable[str]) -> str:
    """Keys for a message, a dozen at most."""
    names = sorted(keys)
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"
