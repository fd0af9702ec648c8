"""Runs as HDF5 files with the names that users of HDF5 give: W, grad_W, momentum_W, losses."""

from __future__ import annotations

from trajstore.exchange.exported_file import ExportedFile, json_texts
from trajstore.exchange.key_names import HDF5_KEYS, HDF5_TEXTS, MASKS, STEPS_KEY
from trajstore.exchange.selection import Selection
from trajstore.exchange.variable_tensor import variable_tensor
from trajstore.formats.streamed_tensor import constant
from trajstore.schema import COORDINATES
from trajstore.store.tiled_reader import TiledRun

__all__ = ["hdf5_file"]


def hdf5_file(run: TiledRun, selection: Selection) -> ExportedFile:
    """Every variable in its own type, the dead tokens as masks, and all that an import needs."""
    tensors = [
        variable_tensor(HDF5_KEYS.get(name, name), run.series[name], selection)
        for name in selection.variables
    ]
    tensors.append(constant(STEPS_KEY, "int64", run.steps[selection.rows]))
    for name, values in run.coordinates.items():
        selected, dtype = selection.along_token(values), COORDINATES[name].dtype
        if name == "is_dead":
            tensors += [
                constant(key, "bool", selected.astype(bool) == marks_dead)
                for key, marks_dead in MASKS.items()
            ]
        elif dtype != "string":
            tensors.append(constant(name, dtype, selected))
    texts = {HDF5_TEXTS[name]: text for name, text in json_texts(run, selection).items()}
    return ExportedFile(tensors=tuple(tensors), texts=texts)
