"""The HDF5 file format: what is at the root of a file is checked before a value of it is read.

HDF5 has no bfloat16, so 16-bit types are uint16 bit patterns, with an attribute that says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, MissingExtra, RunNotFound
from trajstore.formats.streamed_tensor import Part, Tensor
from trajstore.threads import Progress, in_parallel
from trajstore.values.native_types import NATIVE_TYPES, NativeType

__all__ = ["Hdf5File", "write_hdf5"]

Array = npt.NDArray[Any]

_LARGEST_CHUNK = 1 << 30
_MOST_CHUNKS = 1 << 22


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
        h5py = _load_h5py()
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

    def native_type(self, key: str) -> NativeType:
        """Type of a dataset of floating-point numbers, or of their bits.

        Raises
        ------
        FormatError
            If it is of another type.
        """
        dtype, said = self.dtype(key), self._native_dtype(key)
        if dtype == np.uint16 and said in (None, "bfloat16", "float16"):
            return NATIVE_TYPES[said or "bfloat16"]
        if dtype.kind == "f" and dtype.name in NATIVE_TYPES:
            return NATIVE_TYPES[dtype.name]
        raise FormatError(
            f"{self.path}: {key} is of type {dtype}"
            f"{f' (native_dtype: {said})' if said else ''}, expected uint16 bits of bfloat16, or "
            f"{', '.join(name for name in NATIVE_TYPES if name != 'bfloat16')}"
        )

    def _native_dtype(self, key: str) -> str | None:
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
        where = ... if start is None else slice(start, stop)
        try:
            values: Array = np.asarray(self._datasets[key][where])
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise self._wrong(key, error) from None
        return values.astype(values.dtype.newbyteorder("="), copy=False)

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
                    _check_stored(name, item)
                    yield name, item
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{self.path} is not a sound HDF5 file: {error}") from None

    def _wrong(self, key: str, error: Exception) -> FormatError:
        return FormatError(f"{self.path} is not a sound HDF5 file: {key} cannot be read ({error})")


def _check_stored(name: str, dataset: Any) -> None:
    """Raise ValueError if a dataset cannot be trusted to be in the file as announced."""
    if dataset.shape is None:
        raise ValueError(f"{name} is empty")
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{name} has its values in other files")
    count, itemsize = math.prod(dataset.shape), dataset.dtype.itemsize
    if not count:
        return
    if dataset.chunks is None:
        need, stored = count * itemsize, dataset.id.get_storage_size()
        if stored != need:
            raise ValueError(f"{name} needs {need} bytes, and {stored} are stored")
        return
    if math.prod(dataset.chunks) * itemsize > _LARGEST_CHUNK:
        raise ValueError(f"{name} has chunks of more than {_LARGEST_CHUNK} bytes")
    chunks = math.prod(
        -(-length // part) for length, part in zip(dataset.shape, dataset.chunks, strict=True)
    )
    # Chunks that are not there read as zeros, so a small file could claim any size.
    if chunks > _MOST_CHUNKS or dataset.id.get_num_chunks() != chunks:
        raise ValueError(
            f"{name} needs {chunks} chunks, and {dataset.id.get_num_chunks()} are stored"
        )


def write_hdf5(
    path: Path,
    tensors: Sequence[Tensor],
    texts: Mapping[str, str],
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Write a file, part by part; a tensor with a row per step in chunks of one row.

    Parameters
    ----------
    path : Path
        An existing file, which is overwritten.
    tensors : sequence of Tensor
    texts : mapping of str to str
        Each becomes a dataset of bytes.
    on_progress : callable, optional

    Returns
    -------
    dict of str to int
        Values that had to be rounded, by key.

    Raises
    ------
    MissingExtra
        If h5py is not installed.
    """
    h5py = _load_h5py()
    total = sum(tensor.nbytes for tensor in tensors)
    rounded = {tensor.key: 0 for tensor in tensors}
    done = 0
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        # HDF5 keeps texts of any length in a heap, whose damage makes its library loop for ever,
        # and pads those of one length with the NUL that a token may end with.
        for key, text in texts.items():
            file.create_dataset(key, data=np.frombuffer(text.encode(), np.uint8))
        datasets = {tensor.key: _create(file, tensor) for tensor in tensors}
        jobs = (partial(_read, tensor.key, part) for tensor in tensors for part in tensor.parts())
        for key, where, bits, changed in in_parallel(jobs):
            datasets[key][where] = bits.view(datasets[key].dtype)
            rounded[key] += changed
            done += bits.nbytes
            if on_progress is not None:
                on_progress(done, total)
    return rounded


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


def _read(key: str, part: Part) -> tuple[str, tuple[slice, ...], Array, int]:
    return key, part.where, *part.read()


def _load_h5py() -> Any:
    """The library; MissingExtra if it is not installed."""
    try:
        import h5py
    except ImportError:
        raise MissingExtra(
            "HDF5 files need h5py, which is not installed; install trajstore[hdf5]"
        ) from None
    return h5py
