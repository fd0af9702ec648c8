"""The format of a file, by its first bytes and never by its name; folders as one file.

A folder holds one file per step, or checkpoints of a Trainer, and is read as a file with a row per
step. A number that is equal in all files is stored once; one that differs has a row per file.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.defaults import DEFAULT_MEMORY
from trajstore.errors import FormatError, RunNotFound
from trajstore.formats.array_file import (
    ArrayFile,
    NpyFile,
    NpzFile,
    is_number,
    number_in,
    plain_number,
    values_of,
)
from trajstore.formats.hdf5 import Hdf5File
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.formats.torch_file import TorchFile
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]

_LARGEST = 1 << 62
_MOST_ABSENT = 12


def common_numbers(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers and strings that are equal in all files."""
    first = files[0]
    return {
        key: value
        for key, value in first.items()
        if all(key in other and _same(other[key], value) for other in files)
    }


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(
        value == other or (value != value and other != other)
    )


def numbers_of_steps(
    files: Sequence[Mapping[str, Any]], name: Callable[[int], str]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Numbers that differ between files, by key; and other differing values.

    A number that only the first file lacks starts with the second file, as arrays may. If other
    files lack it, their rows are NaN.

    Parameters
    ----------
    files : sequence of mapping
        Strings and numbers of each file.
    name : callable
        Name of a file, by its position.

    Returns
    -------
    series : dict of str to ndarray
    omitted : dict of str to str
        Differing values without a row per file, and rows that are NaN, with reasons.
    """
    common = common_numbers(files)
    series: dict[str, Array] = {}
    left: dict[str, str] = {}
    for key in dict.fromkeys(key for each in files for key in each):
        if key in common or "." in key or "/" in key:
            continue  # a number of a part of a model or of an optimizer
        values = [number_in(each.get(key)) for each in files]
        first = 1 if values[0] is None and len(values) > 1 else 0
        absent = [place for place in range(first, len(values)) if values[place] is None]
        present = [value for value in values if value is not None]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in present):
            left[key] = "not a number, and it differs between files"
        elif any(isinstance(value, int) and abs(value) >= _LARGEST for value in present):
            left[key] = "a number too large"
        elif not absent and all(isinstance(value, int) for value in present):
            series[key] = np.array(values[first:], np.int64)
        else:
            rows = [math.nan if value is None else float(value) for value in values[first:]]
            series[key] = np.array(rows, np.float64)
            if absent:
                names = ", ".join(name(place) for place in absent[:_MOST_ABSENT])
                more = " …" if len(absent) > _MOST_ABSENT else ""
                left[f"{key} of {names}{more}"] = "missing, so NaN in the run"
    return series, left


STEPS = "steps of the names"
"""Key of the step numbers in the file names. No file itself has such a key."""

_ENDINGS = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".ckpt", ".bin", ".h5", ".hdf5")
_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_MODELS = ("model.safetensors", "pytorch_model.bin")
_MOST_OPEN = 8
_MOST_NAMED = 20
_LAST_STEP = (1 << 63) - 1

# Words before the number of a step that do not name an array.
_STEP = re.compile(
    r"((recorded|global|checkpoint)[\W_]*)?(steps?|iterations?)([\W_]*numbers?)?", re.IGNORECASE
)


def _step_entries(path: Path, unread: dict[str, str]) -> list[tuple[int, Path]]:
    """Files or checkpoints in a folder, by the last number in their names.

    Parameters
    ----------
    path : Path
    unread : dict
        Receives the names of other entries, with reasons.

    Raises
    ------
    FormatError
        If two entries have the same number, a number is too large, or no entry has one.
    """
    entries: dict[int, Path] = {}
    others: list[Path] = []
    for entry in sorted(path.iterdir()):
        is_checkpoint = entry.is_dir() and entry.name.startswith("checkpoint")
        number = _NUMBER.search(entry.stem if entry.is_file() else entry.name)
        is_file = entry.is_file() and entry.suffix in _ENDINGS
        if number is None or not (is_checkpoint or is_file):
            others.append(entry)
            continue
        step = int(number[1])
        if step > _LAST_STEP:
            raise FormatError(f"{entry}: got step {step}, expected at most {_LAST_STEP}; rename it")
        if step in entries:
            raise FormatError(
                f"{path}: {entries[step].name} and {entry.name} both have step {step}; rename or "
                "move one"
            )
        entries[step] = entry
    if not entries:
        reasons = [f"; {entry.name}: {_reason(entry)}" for entry in others[:_MOST_OPEN]]
        raise FormatError(
            f"{path} holds no files of steps, expected names such as step_00100.safetensors or "
            f"checkpoint-100, with one of the endings {', '.join(_ENDINGS)}{''.join(reasons)}"
        )
    unread |= {entry.name: _reason(entry) for entry in others[:_MOST_NAMED]}
    if others[_MOST_NAMED:]:
        unread[f"{len(others) - _MOST_NAMED} more files"] = "also not files of steps"
    return sorted(entries.items())


def _reason(entry: Path) -> str:
    if entry.is_dir() and not entry.name.startswith("checkpoint"):
        return "a folder, but not a checkpoint"
    is_known = entry.is_dir() or entry.suffix in _ENDINGS
    return "no step in its name" if is_known else "by its ending, not a file of arrays"


class _Folder(ArrayFile):
    """Base of both folders: files that are opened one by one."""

    def __init__(self, path: Path, opened: Callable[[Path], ArrayFile]) -> None:
        self._opened = opened
        super().__init__(path, is_folder=True)


class StepFolder(_Folder):
    """A folder of files with the same arrays, one file per step.

    Parameters
    ----------
    path : Path
    opened : callable
        Opens one of its files.

    Attributes
    ----------
    keys : tuple of str
        Keys of the files, and `STEPS`. Numbers that differ between files have a row per file.
        Tables of whole numbers that are equal in all files are stored once.
    attributes : dict
        Attributes that are equal in all files.
    unread : dict of str to str
        Files without a step in their names, and unread content of the others.

    Raises
    ------
    FormatError
        If the files do not hold the same arrays. Only the first may lack some.
    """

    format = "folder"

    def _open(self) -> None:
        self._cache: OrderedDict[int, ArrayFile] = OrderedDict()
        self._files.callback(self._close)
        self._entries = _step_entries(self.path, self.unread)
        self._held = {STEPS: np.array([step for step, _ in self._entries], np.int64)}
        self._kinds = self._agreed()
        kinds = {key: (values.shape, values.dtype.name) for key, values in self._held.items()}
        files = len(self._entries)
        self._arrays = {STEPS: kinds[STEPS]}
        self._arrays |= {
            key: ((files - first, *shape), dtype)
            for key, (shape, dtype, first) in self._kinds.items()
        }
        self._arrays |= kinds

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        if outer is not None:
            raise FormatError(f"{self.path}: a folder has no axis of runs, so {key} has none")
        if key in self._held:
            return self._held[key][rows]
        shape, _, first = self._kinds[key]
        read = [
            self._file(row).read(self._name(row, key))
            for row in range(first, len(self._entries))[rows]
        ]
        return np.stack(read).reshape(len(read), *shape)

    def _name(self, row: int, key: str) -> str:
        """Key in the file of a row. The key of a `.npy` contains the step."""
        file = self._file(row)
        return file.keys[0] if file.format == "npy" else key

    def _file(self, row: int) -> ArrayFile:
        if row in self._cache:
            self._cache.move_to_end(row)
            return self._cache[row]
        while len(self._cache) >= _MOST_OPEN:
            self._cache.popitem(last=False)[1].__exit__()
        self._cache[row] = self._opened(self._entries[row][1])
        return self._cache[row]

    def _agreed(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """Shape, type and first row of each array. Also collect the numbers of all files."""
        kinds: dict[str, tuple[tuple[int, ...], str, int]] = {}
        attributes: list[dict[str, Any]] = []
        tables: dict[str, Array] = {}
        unread: dict[tuple[str, str], list[str]] = {}
        for row, (_, path) in enumerate(self._entries):
            file = self._file(row)
            here = {key: (_shape(file, key), file.dtype(key)) for key in file.keys}
            if file.format == "npy":
                here = {_array_name(path): next(iter(here.values()))}
            first = self._entries[0][1].name
            for key in sorted(here.keys() | kinds.keys()):
                if (key in here) != (key in kinds) and (row > 1 or key in kinds):
                    both = (first, path.name) if key in kinds else (path.name, first)
                    raise FormatError(
                        f"{self.path}: {both[0]} holds {key}, but {both[1]} does not; expected the "
                        "same arrays in all files of a folder"
                    )
                if key in here and key in kinds and here[key] != kinds[key][:2]:
                    raise FormatError(
                        f"{self.path}: {key} is {kinds[key][1]} of shape {kinds[key][0]} in "
                        f"{first}, but {here[key][1]} of shape {here[key][0]} in {path.name}"
                    )
            if row < 2:
                kinds |= {key: (*kind, row) for key, kind in here.items() if key not in kinds}
            attributes.append(dict(file.attributes))
            for key, why in file.unread.items():
                unread.setdefault((key, why), []).append(path.name)
            self._compare_tables(tables, file, here, row)
        for key, values in tables.items():
            del kinds[key]
            if values.ndim:
                self._held[key] = values
            elif np.isfinite(values):
                attributes = [each | {key: plain_number(values[()])} for each in attributes]
        self.attributes = common_numbers(attributes)
        series, left = numbers_of_steps(attributes, lambda row: self._entries[row][1].name)
        taken = kinds.keys() | self._held.keys()
        self._held |= {key: rows for key, rows in series.items() if key not in taken}
        self.unread |= left
        for (key, why), names in unread.items():
            more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
            self.unread[f"{key} of {names[0]}{more}"] = why
        return kinds

    def _compare_tables(
        self, tables: dict[str, Array], file: ArrayFile, here: Mapping[str, Any], row: int
    ) -> None:
        """Keep the tables of the first file that are equal in all files so far."""
        if row == 0 and len(self._entries) > 1 and file.format != "npy":
            for key, (shape, dtype) in here.items():
                is_whole = "int" in dtype or dtype == "bool"
                if (len(shape) == 1 and is_whole) or (not shape and is_number(dtype)):
                    tables[key] = values_of(file, key).reshape(shape)
            return
        for key in list(tables):
            here_too = values_of(file, key).reshape(here[key][0])
            if not np.array_equal(tables[key], here_too, equal_nan=here_too.dtype.kind == "f"):
                del tables[key]

    def _close(self) -> None:
        while self._cache:
            self._cache.popitem()[1].__exit__()


class TrainerCheckpoint(_Folder):
    """A `checkpoint-N` folder of Hugging Face's Trainer: model and optimizer state.

    Parameters
    ----------
    path : Path
        A folder with `model_files`.
    opened : callable
        Opens one of its files.

    Attributes
    ----------
    keys : tuple of str
        Names of the model's tensors. Names of the optimizer's tensors start with ``optimizer.``.
    """

    format = "checkpoint"

    def _open(self) -> None:
        self._where: dict[str, tuple[ArrayFile, str]] = {}
        for model in model_files(self.path):
            self._add(model, "")
        if (self.path / "optimizer.pt").is_file():
            self._add(self.path / "optimizer.pt", "optimizer.")

    def _add(self, path: Path, prefix: str) -> None:
        file = self._files.enter_context(self._opened(path))
        for key in file.keys:
            self._where[f"{prefix}{key}"] = (file, key)
            self._arrays[f"{prefix}{key}"] = (file.shape(key), file.dtype(key))
        self.attributes |= {f"{prefix}{key}": value for key, value in file.attributes.items()}
        self.unread |= {f"{prefix}{key}": why for key, why in file.unread.items()}

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        file, name = self._where[key]
        return file.read(name, rows.start, rows.stop, outer)


def _shape(file: ArrayFile, key: str) -> tuple[int, ...]:
    """Shape of an array of a file. A float of shape (1,) counts as a scalar."""
    shape = file.shape(key)
    return () if shape == (1,) and file.dtype(key) in NATIVE_TYPES else shape


def _array_name(path: Path) -> str:
    """Name of the array of a `.npy`: the name of the file without the number of the step."""
    name = _NUMBER.sub("", path.stem).strip("_-. ")
    return "W" if not name or _STEP.fullmatch(name) else name


def model_files(path: Path) -> list[Path]:
    """Files of the model, if a folder itself is a checkpoint of a Trainer."""
    whole = [path / name for name in _MODELS if (path / name).is_file()]
    return whole[:1] or sorted(path.glob("model-*-of-*.safetensors"))


FORMATS = {
    "safetensors": "safetensors files",
    "hdf5": "HDF5 files whose compressed chunks fit into memory (extra hdf5)",
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
    place = Path(path)
    if place.is_dir():
        opened = partial(open_file, memory=memory)
        folder = TrainerCheckpoint if model_files(place) else StepFolder
        return folder(place, opened)
    if not place.is_file():
        raise RunNotFound(f"there is no file at {path}")
    with place.open("rb") as file:
        begin = file.read(16)
    if begin.startswith(_HDF5_SIGNATURE):
        return Hdf5File(place, memory)
    if begin.startswith(_NPY_SIGNATURE):
        return NpyFile(place)
    if begin.startswith(_OLD_TORCH):
        return TorchFile(place)
    if begin.startswith(_ZIP_SIGNATURES):
        return TorchFile(place) if _is_of_torch(place) else NpzFile(place)
    return SafetensorsFile(place)


def _is_of_torch(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("data.pkl") for name in file.namelist())
    # NotImplementedError: zipfile does not know its version or compression.
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise FormatError(f"{path} is not a valid .npz or .pt file: {error}") from None
