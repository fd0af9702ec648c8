"""Content of an exported file, independent of its format: tensors, strings and notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt

from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import Part, Tensor
from trajstore.store.reading.tiled_reader import Tile, TiledVariable
from trajstore.values.native_types import NativeType
from trajstore.values.rounding import convert

__all__ = ["ExportedFile", "variable_tensor"]


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """Content of a file to write.

    Attributes
    ----------
    tensors : tuple of Tensor
    texts : dict of str to str
        Metadata of a safetensors file, or datasets of bytes in HDF5.
    attributes : dict of str to str, int or float
        Attributes of the root in HDF5.
    chunk_rows : int
        Rows of a chunk in HDF5.
    gzip : int
        Level of compression in HDF5; 0 for none.
    float16_as_bits : bool
        True if HDF5 holds float16 as its bits, as it always holds bfloat16.
    omitted : tuple of str
        Selected variables that the layout has no place for.
    notes : tuple of str
        Notes for the reader of the file.
    """

    tensors: tuple[Tensor, ...]
    texts: dict[str, str]
    attributes: dict[str, Any] = field(default_factory=dict)
    chunk_rows: int = 1
    gzip: int = 0
    float16_as_bits: bool = True
    omitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Array = npt.NDArray[Any]


def variable_tensor(
    key: str,
    variable: TiledVariable,
    selection: Selection,
    *,
    dtype: NativeType | None = None,
    rows: Array | None = None,
) -> Tensor:
    """Tensor of the selected part of a variable.

    Parameters
    ----------
    key : str
    variable : TiledVariable
    selection : Selection
    dtype : NativeType, optional
        Type in the file. Default: the native type.
    rows : ndarray of int, optional
        Positions along ``step`` that replace those of the selection, in the same number.
    """
    wanted = dtype or variable.native
    rows = selection.rows if rows is None else rows
    tokens = selection.tokens if "token" in variable.dims else None
    shape = (len(rows), *variable.shape[1:])
    if tokens is not None:
        shape = (shape[0], len(tokens), *shape[2:])
    parts = partial(_parts, variable, rows, tokens, wanted)
    return Tensor(key=key, dtype=wanted.name, shape=shape, parts=parts)


def _parts(
    variable: TiledVariable, rows: Array, tokens: Array | None, wanted: NativeType
) -> Iterator[Part]:
    native = variable.native
    exact = wanted.name == native.name
    for tile in variable.tiles(rows, tokens, native=exact):
        read = partial(_bits, tile) if exact else partial(_converted, tile, native, wanted)
        yield Part(where=tile.where, read=read)


def _bits(tile: Tile) -> tuple[Array, int]:
    return tile.read(), 0


def _converted(tile: Tile, native: NativeType, wanted: NativeType) -> tuple[Array, int]:
    return convert(tile.read(), native, wanted)
