"""Writing of HDF5 files, part by part.

HDF5 has no bfloat16, so 16-bit types are uint16 bit patterns, with an attribute for the type.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.formats.hdf5 import load_h5py
from trajstore.formats.streamed_tensor import Tensor, Where, counted
from trajstore.threads import Progress, in_parallel

Array = npt.NDArray[Any]

_COMPRESSED_AT_ONCE = 64 << 20


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
    # Parts of several compressed chunks are written in turn; each chunk is compressed once.
    cache = {"rdcc_nbytes": _COMPRESSED_AT_ONCE} if gzip else {}
    with _closed(h5py.File(path, "w", libver=("earliest", "v110"), **cache)) as file:
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
        jobs = (partial(_read, tensor, where) for tensor in tensors for where in tensor.parts())

        def written() -> Iterator[tuple[str, int, int]]:
            for key, where, bits, changed in in_parallel(jobs):
                datasets[key][where] = bits.view(datasets[key].dtype)
                yield key, bits.nbytes, changed

        return counted(tensors, written(), on_progress)


@contextmanager
def _closed(file: Any) -> Iterator[Any]:
    """Close a new file, which writes its last bytes.

    Raises
    ------
    OSError
        If the system refuses them, which HDF5 reports as a RuntimeError.
    """
    try:
        yield file
    except BaseException:
        with suppress(RuntimeError):  # usually from the same cause
            file.close()
        raise
    name = file.filename
    try:
        file.close()
    except RuntimeError as error:
        raise OSError(errno.EIO, f"HDF5 cannot write the last bytes ({error})", name) from error


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


def _read(tensor: Tensor, where: Where) -> tuple[str, Where, Array, int]:
    return tensor.key, where, *tensor.read(where)
