"""Runs as HDF5 files with the names that users of HDF5 give: W, grad_W, momentum_W, losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.exchange.exporting.export_layout import numbers_of, population
from trajstore.exchange.exporting.exported_file import ExportedFile, json_texts
from trajstore.exchange.exporting.variable_tensor import variable_tensor
from trajstore.exchange.key_names import HDF5_KEYS, HDF5_TEXTS
from trajstore.exchange.layouts import LAYOUTS
from trajstore.exchange.selection import Selection
from trajstore.formats.streamed_tensor import constant
from trajstore.schema import COORDINATES
from trajstore.store.reading.tiled_reader import TiledRun

__all__ = ["hdf5_file"]

_POPULATIONS = (
    "untrained_mask", "trained_mask", "dead_mask", "live_mask", "dead_ids", "live_ids",
)  # fmt: skip


def hdf5_file(run: TiledRun, selection: Selection) -> ExportedFile:
    """Every variable in its own type, dead tokens in every form, and all that an import needs."""
    tensors = [
        variable_tensor(HDF5_KEYS.get(name, name), run.series[name], selection)
        for name in selection.variables
    ]
    tensors.append(constant("recorded_steps", "int64", run.steps[selection.rows]))
    attributes: dict[str, Any] = dict(numbers_of(LAYOUTS["thimble-6"].scalars, run))
    for name, values in run.coordinates.items():
        if name in run.populations:  # whose names may mean something else to who reads the file
            continue
        selected, dtype = selection.along_token(values), COORDINATES[name].dtype
        if name == "is_dead":
            is_dead = selected.astype(bool)
            tensors += population(_POPULATIONS, is_dead)
            attributes["n_dead"] = int(np.count_nonzero(is_dead))
            attributes["n_live"] = int(np.count_nonzero(~is_dead))
        elif dtype != "string":
            tensors.append(constant(name, dtype, selected))
    texts = {HDF5_TEXTS[name]: text for name, text in json_texts(run, selection).items()}
    return ExportedFile(tensors=tuple(tensors), texts=texts, attributes=attributes)
