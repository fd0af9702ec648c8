"""Writing of HDF5 files, part by part.

HDF5 has no bfloat16, so 16-bit types are uint16 bit patterns, with an attribute for the type.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.formats.hdf5 import load_h5py
from trajstore.formats.streamed_tensor import Tensor, Where, counted
from trajstore.threads import Progress, in_parallel

Array = npt.NDArray[Any]


def write_hdf5(
    path: Path,
    tensors: Sequence[Tensor],
    texts: Mapping[str, str],
    on_progress: Progress | None = None,
    *,
    attributes: Mapping[str, Any],
    chunk_rows: int,
    gzip: int,
    float16_as_bits: bool,
) -> dict[str, int]:
    """Write a file, part by part. Tensors with a row per step are chunked by rows.

    Parameters
    ----------
    path : Path
        An existing file, which is overwritten.
    tensors : sequence of Tensor
    texts : mapping of str to str
        Each becomes a dataset of bytes.
    on_progress : callable, optional
    attributes : mapping of str to str, int or float
        Attributes of the root. Strings get a fixed length.
    chunk_rows : int
    gzip : int
        Level of compression; 0 for none.
    float16_as_bits : bool
        True to write float16 as uint16 bits, like bfloat16.

    Returns
    -------
    dict of str to int
        Numbers of rounded values, by key.

    Raises
    ------
    MissingExtra
        If h5py is not installed.
    """
    h5py = load_h5py()
    with _opened(h5py, path) as (file, target):
        # HDF5 keeps variable-length strings in a heap, and its library loops forever if that is
        # damaged. It pads fixed-length strings with NUL, with which a token may end.
        for key, text in texts.items():
            file.create_dataset(key, data=np.frombuffer(text.encode(), np.uint8))
        for name, value in attributes.items():
            file.attrs[name] = np.bytes_(value) if isinstance(value, str) else value
        as_bits = ("bfloat16", "float16") if float16_as_bits else ("bfloat16",)
        datasets = {
            tensor.key: _create(file, tensor, as_bits, chunk_rows, gzip) for tensor in tensors
        }
        jobs = (job for tensor in tensors for job in _jobs(tensor, datasets[tensor.key]))

        def written() -> Iterator[tuple[str, int, int]]:
            for key, where, bits, changed, chunk in in_parallel(jobs):
                dataset = datasets[key]
                if chunk is None:
                    dataset[where] = bits.view(dataset.dtype)
                else:
                    begin = (where[0].start, *[0] * (bits.ndim - 1))
                    dataset.id.write_direct_chunk(begin, chunk)
                target.check()
                yield key, bits.nbytes, changed

        return counted(tensors, written(), on_progress)


class _Target:
    """The bytes of a new file, for HDF5, which crashes at the end of a process if a write fails.

    After an error, further writes are dropped.

    Parameters
    ----------
    path : Path
        An existing file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        self._error: OSError | None = None
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close
        self.read, self.readinto, self.flush = (
            self._file.read,
            self._file.readinto,
            self._file.flush,
        )

    def write(self, data: Any) -> int:
        """Write all bytes, or none after an error."""
        left = memoryview(data).cast("B")
        try:
            while self._error is None and left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._error = error
        return len(data)

    def truncate(self, size: int) -> int:
        """Set the length of the file."""
        return self._file.truncate(size) if self._error is None else size

    def check(self) -> None:
        """Raise the error of an earlier write."""
        if self._error is not None:
            raise self._error


@contextmanager
def _opened(h5py: Any, path: Path, **options: Any) -> Iterator[tuple[Any, _Target]]:
    """A new HDF5 file and its target.

    Raises
    ------
    OSError
        If the system refuses a write.
    """
    with closing(_Target(path)) as target:
        try:
            with h5py.File(target, "w", libver=("earliest", "v110"), **options) as file:
                yield file, target
        finally:
            target.check()


def _create(file: Any, tensor: Tensor, as_bits: Sequence[str], rows: int, gzip: int) -> Any:
    series = len(tensor.shape) > 1 and tensor.shape[0] > 0  # h5py refuses empty chunks
    sixteen = tensor.dtype in as_bits
    dataset = file.create_dataset(
        tensor.key,
        shape=tensor.shape,
        dtype="uint16" if sixteen else tensor.dtype,
        # One step per chunk, as in loops that append steps, or the rows of the layout.
        chunks=(min(rows, tensor.shape[0]), *tensor.shape[1:]) if series else None,
        compression="gzip" if series and gzip else None,
        compression_opts=gzip if series and gzip else None,
        # Every value is written; filling the chunks first would write everything twice.
        fill_time="never" if series else None,
    )
    if sixteen:
        dataset.attrs["native_dtype"] = np.bytes_(tensor.dtype)
        dataset.attrs["description"] = np.bytes_(f"bit patterns of {tensor.dtype} as uint16")
    return dataset


Read = tuple[str, Where, Array, int, bytes | None]
"""Key, position and bits of a part, the number of rounded values, and the compressed chunk."""


def _jobs(tensor: Tensor, dataset: Any) -> Iterator[Callable[[], Read]]:
    """Jobs that read the parts of a tensor, for threads. They compress whole chunks themselves.

    HDF5 would compress in one thread.
    """
    level = dataset.compression_opts
    for where in tensor.parts():
        if level is None:
            yield partial(_read, tensor, where)
            continue
        others = tuple(slice(0, size) for size in tensor.shape[1 : len(where)])
        rows, count = dataset.chunks[0], tensor.shape[0]
        for start in range(0, count, rows):
            whole = (slice(start, min(start + rows, count)), *others)
            yield partial(_compressed, tensor, whole, dataset.chunks, level)
        return


def _read(tensor: Tensor, where: Where) -> Read:
    return tensor.key, where, *tensor.read(where), None


def _compressed(tensor: Tensor, where: Where, shape: tuple[int, ...], level: int) -> Read:
    bits, changed = tensor.read(where)
    chunk = np.zeros(shape, bits.dtype)  # the last one may have more rows than the tensor
    chunk[: len(bits)] = bits
    return tensor.key, where, bits, changed, zlib.compress(chunk.data, level)
