"""How one chunk of a block becomes bytes.

An encoding is a chain of Zarr v3 codecs for each array. `Chain.codecs` is what the array's metadata
says; `Chain.encode` does the same to the native bits of a chunk, without the generic pipeline and
its copies between.

``delta``
    Differences of the native bits along step (`trajstore.codecs`), then Blosc with bitshuffle.
``portable``
    Core specification only: the stored floats with step last, then Blosc with bitshuffle.

Both end in a crc32c, so that a flipped bit is an error on reading and never a number. Per-step
scalars and types without a delta are stored as they are, under either.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, TransposeCodec

from trajstore.bits import NATIVE_TYPES, NativeType, widen
from trajstore.codecs import DeltaCodec, fold
from trajstore.errors import InvalidArgument

__all__ = ["ENCODINGS", "Chain", "chain", "checksum"]

ENCODINGS = ("delta", "portable")

Compressor = Literal["lz4", "zstd"]


class _Scratch(threading.local):
    """Memory of one thread for intermediate results, used again for every chunk."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype).reshape(shape)


_scratch = _Scratch()


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Codecs of one array.

    Attributes
    ----------
    native : NativeType
    kind : {'delta', 'step-last', 'plain'}
        What is done to the values before they are compressed.
    compressor : {'lz4', 'zstd'}
    level : int
    """

    native: NativeType
    kind: Literal["delta", "step-last", "plain"]
    compressor: Compressor
    level: int

    @property
    def itemsize(self) -> int:
        """Bytes of one value when it is compressed."""
        return (self.native if self.kind == "delta" else self.native.stored).itemsize

    def codecs(self, ndim: int) -> dict[str, Any]:
        """Codec arguments of `zarr.create_array` for an array of that many dimensions."""
        filters: list[Any] = []
        if self.kind == "delta":
            filters = [DeltaCodec(native_dtype=self.native.name)]
        elif self.kind == "step-last":
            filters = [TransposeCodec(order=_step_last(ndim))]
        return {
            "filters": filters,
            "serializer": BytesCodec(endian="little"),
            "compressors": [
                BloscCodec(
                    cname=self.compressor,
                    clevel=self.level,
                    shuffle="bitshuffle",
                    typesize=self.itemsize,
                ),
                Crc32cCodec(),
            ],
        }

    def encode(self, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> bytes:
        """Encode one chunk.

        Parameters
        ----------
        bits : ndarray of ``native.bits``, (step, …)
            May be smaller than the chunk at the end of an axis.
        shape : tuple of int
            Of the whole chunk; what `bits` does not cover is 0 and lies outside the array.

        Returns
        -------
        bytes
        """
        if bits.shape != shape:
            whole = np.zeros(shape, bits.dtype)
            whole[tuple(slice(length) for length in bits.shape)] = bits
            bits = whole
        if self.kind == "delta":
            values = _scratch.array("values", shape, bits.dtype)
            fold(bits, values, _scratch.array("sign", shape, bits.dtype))
        else:
            unsigned = np.dtype(f"u{self.native.stored.itemsize}")
            if self.kind == "step-last":
                bits = bits.transpose(_step_last(bits.ndim))
            values = _scratch.array("values", bits.shape, unsigned)
            widen(bits, self.native, out=values)
        packed: bytes = blosc.Blosc(
            cname=self.compressor,
            clevel=self.level,
            shuffle=blosc.Blosc.BITSHUFFLE,
            blocksize=0,
            typesize=self.itemsize,
        ).encode(values)
        return packed + checksum(packed)


def _step_last(ndim: int) -> tuple[int, ...]:
    """Order of the axes that puts step last, so that the history of one element is contiguous."""
    return (*range(1, ndim), 0)


def chain(encoding: str, native: NativeType, ndim: int) -> Chain:
    """Codecs of an array.

    Parameters
    ----------
    encoding : {'delta', 'portable'}
    native : NativeType
    ndim : int

    Raises
    ------
    InvalidArgument
        For an unknown encoding.
    """
    if encoding not in ENCODINGS:
        raise InvalidArgument(
            f"there is no encoding {encoding!r}; choose from {', '.join(ENCODINGS)}"
        )
    if ndim == 1:
        return Chain(native=native, kind="plain", compressor="zstd", level=1)
    if encoding == "delta" and native.name in NATIVE_TYPES:
        return Chain(native=native, kind="delta", compressor="zstd", level=1)
    return Chain(native=native, kind="step-last", compressor="zstd", level=1)


def checksum(data: bytes) -> bytes:
    """The four bytes that the crc32c codec puts behind the data."""
    value: int = google_crc32c.value(data)
    return value.to_bytes(4, "little")
