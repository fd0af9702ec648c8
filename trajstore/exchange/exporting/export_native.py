"""Runs as safetensors files with their own names and types, and all that an import needs."""

from __future__ import annotations

from trajstore.exchange.exporting.exported_file import ExportedFile, json_texts
from trajstore.exchange.exporting.variable_tensor import variable_tensor
from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import constant
from trajstore.schema import STEP, coordinate
from trajstore.store.reading.tiled_reader import TiledRun

__all__ = ["native_file"]


def native_file(run: TiledRun, selection: Selection) -> ExportedFile:
    """Every variable under its own name in its own type, and the attributes as metadata."""
    tensors = [constant(STEP.name, "int64", run.steps[selection.rows])]
    tensors += [variable_tensor(name, run.series[name], selection) for name in selection.variables]
    tensors += [
        constant(name, entry.dtype, selection.along_token(values))
        for name, values in run.coordinates.items()
        if (entry := coordinate(name)) is not None and entry.dtype != "string"
    ]
    texts = {"format": "trajstore"} | json_texts(run, selection)
    return ExportedFile(tensors=tuple(tensors), texts=texts)
