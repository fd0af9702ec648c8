"""Detection of the format of a file, by its first bytes and never by its name."""

from __future__ import annotations

import os
import zipfile
from functools import partial
from pathlib import Path

from trajstore.arguments import DEFAULT_MEMORY
from trajstore.errors import FormatError, RunNotFound
from trajstore.formats.array_file import ArrayFile
from trajstore.formats.hdf5 import Hdf5File
from trajstore.formats.numpy_files import NpyFile, NpzFile
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.formats.step_folder import StepFolder, TrainerCheckpoint, model_files
from trajstore.formats.torch_file import TorchFile

FORMATS = {
    "safetensors": "safetensors files",
    "hdf5": "HDF5 files, compressed chunks up to --memory (extra hdf5)",
    "npz": ".npz and .npy of NumPy, without pickled objects",
    "torch": ".pt of torch.save, tensors and plain values only (extra train)",
    "folder": "folders of one such file per step (step_00100.safetensors), or of checkpoints of a "
    "Trainer (checkpoint-100)",
}
"""Readable formats, in words."""

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_NPY_SIGNATURE = b"\x93NUMPY"
_ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06")
_OLD_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
"""First bytes of files of torch before 1.6: a pickled number."""


def open_file(path: str | os.PathLike[str], memory: int = DEFAULT_MEMORY) -> ArrayFile:
    """Open a file, or a folder of files, in its format.

    Parameters
    ----------
    path : path-like
    memory : int
        Bytes of large compressed chunks of HDF5 that may be held at once.

    Raises
    ------
    RunNotFound
        If the path does not exist.
    FormatError
        If the format is unknown, or the file is damaged.
    MissingExtra
        If its format needs a library that is not installed.
    """
    found = Path(path)
    if found.is_dir():
        opened = partial(open_file, memory=memory)
        folder = TrainerCheckpoint if model_files(found) else StepFolder
        return folder(found, opened)
    if not found.is_file():
        raise RunNotFound(f"there is no file at {path}")
    with found.open("rb") as file:
        begin = file.read(16)
    if begin.startswith(_HDF5_SIGNATURE):
        return Hdf5File(found, memory)
    if begin.startswith(_NPY_SIGNATURE):
        return NpyFile(found)
    if begin.startswith(_OLD_TORCH):
        return TorchFile(found)
    if begin.startswith(_ZIP_SIGNATURES):
        return TorchFile(found) if _is_of_torch(found) else NpzFile(found)
    return SafetensorsFile(found)


def _is_of_torch(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("data.pkl") for name in file.namelist())
    # NotImplementedError: zipfile does not know its version or compression.
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise FormatError(f"{path} is not a valid .npz or .pt file: {error}") from None
