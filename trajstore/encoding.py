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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc
from zarr.abc.codec import Codec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, TransposeCodec

from trajstore.bits import NATIVE_TYPES, STEP_TYPE, NativeType, widen
from trajstore.codecs import DELTA, DeltaCodec, fold, unfold
from trajstore.errors import InvalidArgument

__all__ = ["ENCODINGS", "Chain", "chain", "chain_of", "checksum", "is_intact"]

ENCODINGS = ("delta", "portable")

Compressor = Literal["lz4", "zstd"]
Kind = Literal["delta", "step-last", "plain"]


_SMALLEST = 16 + 4  # a Blosc header and a checksum
_RESIDUE = 0x48674BC7


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
    kind: Kind
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
            fold(bits, values, _scratch.array("sign", shape[1:], bits.dtype))
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

    def decode(
        self,
        data: bytes,
        shape: tuple[int, ...],
        window: tuple[slice, ...],
        out: npt.NDArray[Any],
    ) -> None:
        """Decode part of a chunk.

        Parameters
        ----------
        data : bytes
            As `encode` made it.
        shape : tuple of int
            Of the whole chunk.
        window : tuple of slice
            What is wanted, with start and stop.
        out : ndarray of ``native.stored`` or ``native.bits``, shape of the window
            Receives the values, or their native bits.

        Raises
        ------
        ValueError
            If the checksum does not fit, or what is inside is not a chunk of that shape.
        """
        values = self.unpack(data, shape)
        if self.kind == "delta":
            rows, *rest = window
            unfold(
                values[(slice(rows.stop), *rest)],
                self.native,
                out.view(f"u{out.itemsize}"),
                rows.start,
            )
        else:
            if self.kind == "step-last":
                values = values.transpose(np.argsort(_step_last(len(shape))))
            out[...] = values.view(out.dtype)[window]

    def unpack(self, data: bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Check and decompress a chunk: all of decoding that can fail.

        What is left, adding up differences, is defined for every bit pattern.

        Parameters
        ----------
        data : bytes
            As `encode` made it.
        shape : tuple of int
            Of the whole chunk.

        Returns
        -------
        ndarray of unsigned integers
            Folded differences of the native bits, or bits of the stored values; step is the last
            axis of kind ``step-last``. It is scratch of this thread, until the next call.

        Raises
        ------
        ValueError
            If the checksum does not fit, or what is inside is not a chunk of that shape.
        """
        if len(data) < _SMALLEST or not is_intact(data):
            raise ValueError("the checksum does not fit")
        order = _step_last(len(shape)) if self.kind == "step-last" else range(len(shape))
        size = int(np.prod(shape)) * self.itemsize
        if int.from_bytes(data[4:8], "little") != size:  # of what Blosc compressed
            raise ValueError("it has another size than the metadata says")
        unsigned = np.dtype(f"<u{self.itemsize}")
        values = _scratch.array("values", tuple(shape[axis] for axis in order), unsigned)
        blosc.decompress(memoryview(data)[:-4], values)
        return values


def _step_last(ndim: int) -> tuple[int, ...]:
    """Order of the axes that puts step last, so that the history of one element is contiguous."""
    return (*range(1, ndim), 0)


def chain(encoding: str, native: NativeType, ndim: int, *, small: bool) -> Chain:
    """Codecs of an array.

    Parameters
    ----------
    encoding : {'delta', 'portable'}
    native : NativeType
    ndim : int
    small : bool
        Whether the rows of the run are so small that no training makes them faster than the
        slower compressor takes them. The figures behind the choice are in docs/benchmarks.md.

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
    if encoding == "portable":
        return Chain(native=native, kind="step-last", compressor="zstd", level=3 if small else 1)
    if small:
        return Chain(native=native, kind="delta", compressor="zstd", level=3)
    return Chain(native=native, kind="delta", compressor="lz4", level=9)


def chain_of(codecs: Sequence[Codec], stored: np.dtype[Any], ndim: int) -> Chain | None:
    """Chain of which an array's metadata speaks.

    Parameters
    ----------
    codecs : sequence of Codec
        Of an inner chunk, as zarr read them.
    stored : numpy.dtype
        Of the array.
    ndim : int

    Returns
    -------
    Chain or None
        None if it is none of ours; zarr can still read the array.
    """
    described = [codec.to_dict() for codec in codecs]
    options = [item for item in described if item["name"] in ("blosc", DELTA)]
    parameters: dict[str, Any] = {}
    for item in options:
        parameters.update(item["configuration"])  # type: ignore[arg-type]
    name = parameters.get("native_dtype", stored.name)
    types = NATIVE_TYPES | {STEP_TYPE.name: STEP_TYPE}
    if "cname" not in parameters or name not in types:
        return None
    kinds: tuple[Kind, ...] = ("delta", "step-last", "plain")
    for kind in kinds:
        compressor = getattr(parameters["cname"], "value", parameters["cname"])
        candidate = Chain(
            native=types[name], kind=kind, compressor=compressor, level=parameters["clevel"]
        )
        ours = candidate.codecs(ndim)
        sequence = [*ours["filters"], ours["serializer"], *ours["compressors"]]
        if [codec.to_dict() for codec in sequence] == described:
            return candidate
    return None


def checksum(data: bytes) -> bytes:
    """The four bytes that the crc32c codec puts behind the data."""
    value: int = google_crc32c.value(data)
    return value.to_bytes(4, "little")


def is_intact(data: bytes) -> bool:
    """Whether data ends with its own checksum."""
    # Of anything followed by its crc32c, the crc32c is always the same.
    intact: bool = google_crc32c.value(data) == _RESIDUE
    return intact
