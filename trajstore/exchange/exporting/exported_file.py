"""What a file will hold of a run, whatever its format: tensors, texts, and what to say of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import Tensor
from trajstore.schema import COORDINATES, MODEL
from trajstore.store.reading.tiled_reader import TiledRun

__all__ = ["ExportedFile", "json_texts"]


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """A file that is to be written.

    Attributes
    ----------
    tensors : tuple of Tensor
    texts : dict of str to str
        What it says besides: the metadata of a safetensors file, datasets of bytes in HDF5.
    attributes : dict of str to str, int or float
        Of the root, in HDF5.
    chunk_rows : int
        Rows of a chunk, in HDF5.
    gzip : int
        Level of compression in HDF5; 0 for none.
    float16_as_bits : bool
        Whether float16 too is written to HDF5 as its bits; bfloat16 always is.
    left_out : tuple of str
        Variables that were selected, and that it has no place for.
    notes : tuple of str
        What whoever reads the file should know.
    """

    tensors: tuple[Tensor, ...]
    texts: dict[str, str]
    attributes: dict[str, Any] = field(default_factory=dict)
    chunk_rows: int = 1
    gzip: int = 0
    float16_as_bits: bool = True
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def json_texts(run: TiledRun, selection: Selection) -> dict[str, str]:
    """Attributes of the run and its variables, and the coordinates that are texts, as JSON."""
    attributes = {name: run.series[name].attributes for name in selection.variables}
    texts = {"attributes": json.dumps(run.attributes), "variables": json.dumps(attributes)}
    for name, values in run.coordinates.items():
        if name in COORDINATES and COORDINATES[name].dtype == "string":
            texts[name] = json.dumps([str(text) for text in selection.along_token(values)])
    if run.parameters is not None and not set(selection.variables).isdisjoint(MODEL):
        texts["parameter"] = json.dumps([str(name) for name in run.parameters])
    return texts
