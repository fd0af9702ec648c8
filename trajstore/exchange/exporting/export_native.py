"""Files with everything a run holds: safetensors with native names, HDF5 with common names."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from trajstore.exchange.exporting.export_layout import numbers_of, population
from trajstore.exchange.exporting.exported_file import ExportedFile, variable_tensor
from trajstore.exchange.layouts import COUNTS, HDF5_KEYS, HDF5_TEXTS, LAYOUTS
from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import constant
from trajstore.schema import COORDINATES, OF_PARAMETERS, STEP, coordinate
from trajstore.store.reading.tiled_reader import TiledRun

__all__ = ["hdf5_file", "native_file"]


def native_file(run: TiledRun, selection: Selection) -> ExportedFile:
    """Content of a safetensors file: native names and types, with the attributes as metadata."""
    tensors = [constant(STEP.name, "int64", run.steps[selection.rows])]
    tensors += [variable_tensor(name, run.series[name], selection) for name in selection.variables]
    tensors += [
        constant(name, entry.dtype, selection.along_token(values))
        for name, values in run.coordinates.items()
        if (entry := coordinate(name)) is not None and entry.dtype != "string"
    ]
    texts = {"format": "trajstore"} | _json_texts(run, selection)
    return ExportedFile(tensors=tuple(tensors), texts=texts)


_NUMBERS = tuple(key for key in LAYOUTS["thimble-6"].numbers if key not in COUNTS)

_POPULATIONS = (
    "untrained_mask", "trained_mask", "dead_mask", "live_mask", "dead_ids", "live_ids",
)  # fmt: skip


def hdf5_file(run: TiledRun, selection: Selection) -> ExportedFile:
    """Content of an HDF5 file: native types, every form of dead tokens, all that imports need."""
    tensors = [
        variable_tensor(HDF5_KEYS.get(name, name), run.series[name], selection)
        for name in selection.variables
    ]
    tensors.append(constant("recorded_steps", "int64", run.steps[selection.rows]))
    attributes: dict[str, Any] = dict(numbers_of(_NUMBERS, run, selection))
    for name, values in run.coordinates.items():
        if name in run.populations:  # their names may have another meaning in the file
            continue
        selected, dtype = selection.along_token(values), COORDINATES[name].dtype
        if name == "is_dead":
            is_dead = selected.astype(bool)
            tensors += population(_POPULATIONS, is_dead)
            attributes["n_dead"] = int(np.count_nonzero(is_dead))
            attributes["n_live"] = int(np.count_nonzero(~is_dead))
        elif dtype != "string":
            tensors.append(constant(name, dtype, selected))
    texts = {HDF5_TEXTS[name]: text for name, text in _json_texts(run, selection).items()}
    return ExportedFile(tensors=tuple(tensors), texts=texts, attributes=attributes)


def _json_texts(run: TiledRun, selection: Selection) -> dict[str, str]:
    """Attributes of the run and its variables, and the coordinates of strings, as JSON."""
    attributes = {name: run.series[name].attributes for name in selection.variables}
    texts = {"attributes": json.dumps(run.attributes), "variables": json.dumps(attributes)}
    for name, values in run.coordinates.items():
        if name in COORDINATES and COORDINATES[name].dtype == "string":
            texts[name] = json.dumps([str(text) for text in selection.along_token(values)])
    if run.parameters is not None and not set(selection.variables).isdisjoint(OF_PARAMETERS):
        texts["parameter"] = json.dumps([str(name) for name in run.parameters])
    return texts
