"""How one chunk of a block becomes bytes.

An encoding is a chain of Zarr v3 codecs. `codecs` is what the metadata of an array says, and
`encode` does the same to the native bits of a chunk, without the generic pipeline between: one
pass widens and transposes, one compresses, one takes the checksum.
"""

from __future__ import annotations

from typing import Any, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, TransposeCodec

from trajstore.bits import NativeType, widen

__all__ = ["checksum", "codecs", "encode"]

_CNAME: Literal["zstd"] = "zstd"
_LEVEL = 1


def _step_last(ndim: int) -> tuple[int, ...]:
    """Order of the axes that puts step last.

    The values of one element over the steps then lie side by side, which compresses 1.5 times
    better than step first.
    """
    return (*range(1, ndim), 0)


def codecs(native: NativeType, ndim: int) -> dict[str, Any]:
    """Codec arguments of `zarr.create_array` for a chunk, core specification only."""
    return {
        "filters": [TransposeCodec(order=_step_last(ndim))] if ndim > 1 else [],
        "serializer": BytesCodec(endian="little"),
        "compressors": [
            BloscCodec(
                cname=_CNAME,
                clevel=_LEVEL,
                shuffle="bitshuffle",
                typesize=native.stored.itemsize,
            ),
            Crc32cCodec(),
        ],
    }


def encode(bits: npt.NDArray[Any], native: NativeType, shape: tuple[int, ...]) -> bytes:
    """Encode one chunk.

    Parameters
    ----------
    bits : ndarray of ``native.bits``, (step, …)
        May be smaller than the chunk at the end of an axis.
    native : NativeType
    shape : tuple of int
        Of the whole chunk; what `bits` does not cover is 0 and lies outside the array.

    Returns
    -------
    bytes
        Little-endian stored values, step last, Blosc, crc32c.
    """
    order = _step_last(bits.ndim)
    unsigned = np.dtype(f"<u{native.stored.itemsize}")
    whole = tuple(shape[axis] for axis in order)
    partial = bits.transpose(order)
    chunk = np.empty(whole, unsigned) if partial.shape == whole else np.zeros(whole, unsigned)
    widen(partial, native, out=chunk[tuple(slice(n) for n in partial.shape)])
    packed: bytes = blosc.Blosc(
        cname=_CNAME, clevel=_LEVEL, shuffle=blosc.Blosc.BITSHUFFLE, blocksize=0
    ).encode(chunk)
    return packed + checksum(packed)


def checksum(data: bytes) -> bytes:
    """The four bytes that the crc32c codec puts behind the data."""
    value: int = google_crc32c.value(data)
    return value.to_bytes(4, "little")
