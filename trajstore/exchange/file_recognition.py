"""Which format a file is of, and which layout: the one place that knows all of them.

A format is told by the first bytes of a file; a layout by the keys and types of its arrays.
"""

from __future__ import annotations

import os
from pathlib import Path

from trajstore.errors import FormatError, RunNotFound
from trajstore.exchange.import_hdf5 import read_hdf5
from trajstore.exchange.import_native import read_native
from trajstore.exchange.import_notebook import read_notebook
from trajstore.exchange.imported_file import ImportedFile, abridged
from trajstore.exchange.notebook_layouts import LAYOUTS, NOTEBOOKS
from trajstore.formats.hdf5 import Hdf5File
from trajstore.formats.safetensors import SafetensorsFile

__all__ = ["IMPORT_LAYOUTS", "open_file", "understood"]

IMPORT_LAYOUTS = (*LAYOUTS, "hdf5")

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_file(
    file: str | os.PathLike[str], layout: str | None = None
) -> Hdf5File | SafetensorsFile:
    """Open a file in its format.

    Parameters
    ----------
    file : path-like
    layout : str, optional
        One of `IMPORT_LAYOUTS`, whose format the file must have.

    Raises
    ------
    RunNotFound
        If there is no file.
    FormatError
        If it is neither format, not sound, or not that of the layout.
    MissingExtra
        If it is HDF5, and h5py is not installed.
    """
    path = Path(file)
    if not path.is_file():
        raise RunNotFound(f"there is no file at {file}")
    with path.open("rb") as opened:
        is_hdf5 = opened.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE
    if layout is not None and is_hdf5 != (layout == "hdf5"):
        found = "an HDF5 file" if is_hdf5 else "no HDF5 file"
        raise FormatError(f"{file} is {found}, and layout {layout} was asked for")
    return Hdf5File(path) if is_hdf5 else SafetensorsFile(path)


def understood(file: Hdf5File | SafetensorsFile, layout: str | None = None) -> ImportedFile:
    """What an open file holds, as a run is made of it.

    Parameters
    ----------
    file : Hdf5File or SafetensorsFile
    layout : str, optional
        One of `IMPORT_LAYOUTS` that its format has; recognised without it.

    Raises
    ------
    FormatError
        If it is of no known layout, lacks what its layout requires, or shapes or types disagree.
    """
    if isinstance(file, Hdf5File):
        return read_hdf5(file)
    layout = layout or _recognised(file)
    if layout == "native":
        return read_native(file)
    return read_notebook(file, NOTEBOOKS[layout])


def _recognised(file: SafetensorsFile) -> str:
    if file.metadata.get("format") == "trajstore":
        return "native"
    if file.metadata.get("layout") in NOTEBOOKS:
        return file.metadata["layout"]
    keys = set(file.keys)
    fitting = [name for name, notebook in NOTEBOOKS.items() if keys >= set(notebook.required)]
    if len(fitting) > 1:
        # 15.1a and 1.12f share their keys; the one is float32, the other bfloat16.
        dtype = file.entries["embeddings"].dtype if "embeddings" in keys else None
        matching = [
            name
            for name in fitting
            if any(c.key == "embeddings" and c.dtype == dtype for c in NOTEBOOKS[name].columns)
        ]
        fitting = matching or fitting
    if not fitting:
        required = "; ".join(f"{n.name}: {', '.join(n.required)}" for n in NOTEBOOKS.values())
        raise FormatError(
            f"{file.path} is of no known layout: it holds {abridged(keys)}, and the layouts "
            f"require — {required}"
        )
    return fitting[0]
