"""Content of an exported file, independent of its format: tensors, strings and notes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy.typing as npt

from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import Tensor, Where
from trajstore.store.reading.tiled_reader import TiledRun, TiledVariable
from trajstore.values.native_types import NativeType
from trajstore.values.rounding import convert

__all__ = ["ExportedFile", "ExportedRun", "variable_tensor"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """A run in a file.

    Attributes
    ----------
    run : TiledRun
    selection : Selection
    """

    run: TiledRun
    selection: Selection

    @property
    def steps(self) -> Array:
        """Selected steps."""
        steps: Array = self.run.steps[self.selection.rows]
        return steps

    @cached_property
    def coordinates(self) -> dict[str, Array]:
        """Coordinates of the selected tokens."""
        return {
            name: self.selection.along_token(values)
            for name, values in self.run.coordinates.items()
        }


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
    omitted : tuple of str
        Selected variables that the layout has no place for.
    notes : tuple of str
        Notes for the reader of the file.
    """

    tensors: tuple[Tensor, ...]
    texts: dict[str, str]
    attributes: dict[str, Any]
    omitted: tuple[str, ...]
    notes: tuple[str, ...]


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
    native = variable.native
    wanted = dtype or native
    selected = (selection.rows if rows is None else rows, selection.tokens)

    def read(where: Where) -> tuple[Array, int]:
        if wanted.name == native.name:
            return variable.read(where, *selected, native=True), 0
        return convert(variable.read(where, *selected), native, wanted)

    return Tensor(
        key=key,
        dtype=wanted.name,
        shape=variable.shape_of(*selected),
        parts=partial(variable.tiles, *selected),
        read=read,
    )
