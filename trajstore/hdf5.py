"""HDF5 files with the names that users of HDF5 give: W, grad_W, momentum_W, variance_W, losses.

HDF5 has no bfloat16, so 16-bit types are uint16 bit patterns, with an attribute that says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, MissingExtra, RunNotFound
from trajstore.parts import Part, Progress, Tensor, constant, in_parallel, series_tensor
from trajstore.schema import COORDINATES
from trajstore.selection import Selection
from trajstore.source import Source

__all__ = ["HDF5_KEYS", "Hdf5File", "write_hdf5"]

Array = npt.NDArray[Any]

HDF5_KEYS = {
    "W": "W",
    "grad": "grad_W",
    "exp_avg": "momentum_W",
    "exp_avg_sq": "variance_W",
    "logits": "logits",
    "loss": "losses",
}
"""Names of variables in HDF5 files; the others keep theirs."""

STEPS_KEY = "recorded_steps"
MASKS = {"untrained_mask": True, "trained_mask": False}
"""Masks along ``token``, and whether they mark the dead tokens."""

_LARGEST_CHUNK = 1 << 30
_MOST_CHUNKS = 1 << 22


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingExtra(
            "HDF5 files need h5py, which is not installed; install trajstore[hdf5]"
        ) from None
    return h5py


def write_hdf5(
    path: Path, source: Source, selection: Selection, on_progress: Progress | None = None
) -> None:
    """Write a selection.

    Parameters
    ----------
    path : Path
        An existing file, which is overwritten.
    source : Source
    selection : Selection
    on_progress : callable, optional

    Raises
    ------
    MissingExtra
        If h5py is not installed.
    """
    h5py = _h5py()
    tensors = [
        series_tensor(HDF5_KEYS.get(name, name), source.series[name], selection)
        for name in selection.variables
    ]
    tensors.append(constant(STEPS_KEY, "int64", source.steps[selection.rows]))
    # Texts are JSON in bytes: HDF5 keeps texts of any length in a heap, whose damage makes its
    # library loop for ever, and pads those of one length with the NUL that a token may end with.
    texts = {
        "trajstore": json.dumps(source.attributes),
        "variables": json.dumps(
            {name: source.series[name].attributes for name in selection.variables}
        ),
    }
    for name, values in source.coordinates.items():
        selected = selection.along_token(values)
        if COORDINATES[name].dtype == "string":
            texts[name] = json.dumps([str(text) for text in selected])
        elif name == "is_dead":
            for key, marks_dead in MASKS.items():
                tensors.append(constant(key, "bool", selected.astype(bool) == marks_dead))
        else:
            tensors.append(constant(name, COORDINATES[name].dtype, selected))
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        for name, text in texts.items():
            file.create_dataset(f"{name}_json", data=np.frombuffer(text.encode(), np.uint8))
        targets = {tensor.key: _create(file, tensor) for tensor in tensors}
        for key, where, bits in in_parallel(_jobs(tensors)):
            target = targets[key]
            target[where] = bits.view(target.dtype)
            done += bits.nbytes
            if on_progress is not None:
                on_progress(done, total)


def _create(file: Any, tensor: Tensor) -> Any:
    series = len(tensor.shape) > 1
    sixteen = tensor.dtype in ("bfloat16", "float16")
    dataset = file.create_dataset(
        tensor.key,
        shape=tensor.shape,
        dtype="uint16" if sixteen else tensor.dtype,
        # One step a chunk, as loops that append a step write it.
        chunks=(1, *tensor.shape[1:]) if series else None,
        # Every value is written; filling the chunks first would write them twice.
        fill_time="never" if series else None,
    )
    if sixteen:
        dataset.attrs["native_dtype"] = np.bytes_(tensor.dtype)
        dataset.attrs["description"] = np.bytes_(f"bit patterns of {tensor.dtype} as uint16")
    return dataset


def _jobs(tensors: list[Tensor]) -> Iterator[Callable[[], tuple[str, tuple[slice, ...], Array]]]:
    for tensor in tensors:
        for part in tensor.parts():

            def job(
                tensor: Tensor = tensor, part: Part = part
            ) -> tuple[str, tuple[slice, ...], Array]:
                return tensor.key, part.where, part.read()[0]

            yield job


class Hdf5File:
    """An HDF5 file, open for reading, every dataset of which is really in it; a context manager.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    keys : tuple of str
        Of the datasets at its root.

    Raises
    ------
    RunNotFound
        If there is no file.
    FormatError
        If it is not an HDF5 file, or a dataset at its root is not stored in it as announced.
    MissingExtra
        If h5py is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        h5py = _h5py()
        self.path = Path(path)
        if not self.path.is_file():
            raise RunNotFound(f"there is no file at {path}")
        try:
            self._file = h5py.File(self.path, "r")
        except (OSError, ValueError, RuntimeError) as error:
            raise FormatError(f"{path} is not a sound HDF5 file: {error}") from None
        try:
            self._datasets = dict(self._sound(h5py))
        except BaseException:
            self._file.close()
            raise
        self.keys = tuple(self._datasets)

    def __enter__(self) -> Hdf5File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a dataset."""
        return tuple(self._datasets[key].shape)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Type of a dataset as it is stored."""
        dtype: np.dtype[Any] = self._datasets[key].dtype
        return dtype

    def native_dtype(self, key: str) -> str | None:
        """What the bits of a dataset mean, where an attribute says so."""
        attributes = self._datasets[key].attrs
        try:
            if "native_dtype" not in attributes:
                return None
            # A text of any length would be read from the heap; see `write_hdf5`.
            fixed = attributes.get_id("native_dtype").dtype.kind == "S"
            return attributes["native_dtype"].decode() if fixed else "of any length"
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._wrong(key, error) from None

    def text(self, key: str) -> str:
        """A dataset of bytes that are one text.

        Raises
        ------
        FormatError
            If it holds anything else.
        """
        dtype, shape = self.dtype(key), self.shape(key)
        if dtype != np.uint8 or len(shape) != 1:
            raise FormatError(f"{self.path}: {key} is {dtype} of shape {shape}, expected bytes")
        try:
            return self.read(key).tobytes().decode()
        except UnicodeDecodeError as error:
            raise self._wrong(key, error) from None

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Values of a dataset, or of its rows from `start` up to `stop`.

        Raises
        ------
        FormatError
            If the library cannot read them.
        """
        dataset = self._datasets[key]
        where = ... if start is None else slice(start, stop)
        values: Array = np.asarray(self._guarded(key, lambda: dataset[where]))
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def _guarded(self, key: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise self._wrong(key, error) from None

    def _sound(self, h5py: Any) -> Iterator[tuple[str, Any]]:
        try:
            names = list(self._file)
            for name in names:
                link = self._file.get(name, getlink=True)
                if not isinstance(link, h5py.HardLink):
                    continue  # an external one would read another file
                item = self._file[name]
                # No variable is a text, and texts of any length are not read; see `write_hdf5`.
                if isinstance(item, h5py.Dataset) and item.dtype.kind != "O":
                    fault = self._fault(item)
                    if fault:
                        raise FormatError(f"{self.path} is not a sound HDF5 file: {name} {fault}")
                    yield name, item
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{self.path} is not a sound HDF5 file: {error}") from None

    def _fault(self, dataset: Any) -> str | None:
        """Why a dataset cannot be trusted to be in the file as announced."""
        if dataset.shape is None:
            return "is empty"
        if dataset.external or dataset.is_virtual:
            return "has its values in other files"
        count = math.prod(dataset.shape)
        itemsize = dataset.dtype.itemsize
        stored = dataset.id.get_storage_size()
        if not count:
            return None
        if dataset.chunks is None:
            need = count * itemsize
            return None if stored == need else f"needs {need} bytes, and {stored} are stored"
        if math.prod(dataset.chunks) * itemsize > _LARGEST_CHUNK:
            return f"has chunks of more than {_LARGEST_CHUNK} bytes"
        chunks = math.prod(
            -(-length // part) for length, part in zip(dataset.shape, dataset.chunks, strict=True)
        )
        # Chunks that are not there read as zeros, so a small file could claim any size.
        if chunks > _MOST_CHUNKS or dataset.id.get_num_chunks() != chunks:
            return f"needs {chunks} chunks, and {dataset.id.get_num_chunks()} are stored"
        return None

    def _wrong(self, key: str, error: Exception) -> FormatError:
        return FormatError(f"{self.path} is not a sound HDF5 file: {key} cannot be read ({error})")
