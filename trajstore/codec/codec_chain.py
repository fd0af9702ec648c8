"""How one chunk of a block becomes bytes, and which of the ways an array takes.

Matrices are stored as differences of their native bits along step (`trajstore.codec.delta`), which
Blosc then compresses with bitshuffle. Of large weights the differences are put in order of tokens,
with a shuffle of bytes: one token's history is then a small part of a chunk, and a step's snapshot
decodes twice as fast. Per-step scalars are stored as they are.

A crc32c follows, so that a flipped bit is an error on reading and never a number.
`trajstore.codec.chunk_decoder` does the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from trajstore.codec.crc32c_check import checksum
from trajstore.codec.delta import fold
from trajstore.codec.scratch_memory import scratch
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE, NativeType, widen

__all__ = ["Chain", "chain"]

Compressor = Literal["lz4", "zstd"]
Kind = Literal["delta", "plain"]
Shuffle = Literal["bitshuffle", "shuffle"]


_SHUFFLES = {"shuffle": blosc.Blosc.SHUFFLE, "bitshuffle": blosc.Blosc.BITSHUFFLE}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Codecs of one array.

    Attributes
    ----------
    native : NativeType
    kind : {'delta', 'plain'}
        What is done to the values before they are compressed.
    compressor : {'lz4', 'zstd'}
    level : int
    token_first : bool
        Whether differences are compressed token by token instead of row by row.
    shuffle : {'bitshuffle', 'shuffle'}
        Whether the bits or the bytes of the values are put together, by their rank.
    blocksize : int
        Bytes that Blosc is asked to compress together, and hence to decompress for any of them; for
        lz4 it takes as many of each byte of a value. 0 leaves it to Blosc.
    """

    native: NativeType
    kind: Kind
    compressor: Compressor
    level: int
    token_first: bool = False
    shuffle: Shuffle = "bitshuffle"
    blocksize: int = 0

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The chain that `facts` describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        types = NATIVE_TYPES | {STEP_TYPE.name: STEP_TYPE}
        options = dict(facts)
        native = types.get(options.pop("native_dtype", None))
        expected = {field.name for field in fields(cls)} - {"native"}
        if native is None or options.keys() != expected:
            raise ValueError(f"no chain has {dict(facts)!r}")
        if (
            options["kind"] not in get_args(Kind)
            or options["compressor"] not in get_args(Compressor)
            or options["shuffle"] not in get_args(Shuffle)
            or not all(type(options[name]) is int for name in ("level", "blocksize"))
            or type(options["token_first"]) is not bool
        ):
            raise ValueError(f"no chain has {dict(facts)!r}")
        return cls(native=native, **options)

    def facts(self) -> dict[str, Any]:
        """All that decides how bytes become values, as JSON values."""
        native = self.native if self.kind == "delta" else self.native.stored
        return {
            "native_dtype": native.name,
            "kind": self.kind,
            "token_first": self.token_first,
            "compressor": self.compressor,
            "level": self.level,
            "shuffle": self.shuffle,
            "blocksize": self.blocksize,
        }

    @property
    def itemsize(self) -> int:
        """Bytes of one value when it is compressed."""
        return (self.native if self.kind == "delta" else self.native.stored).itemsize

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
            values = scratch.array("values", shape, bits.dtype)
            fold(bits, values)
            if self.token_first:
                ordered = values.transpose(self.order(values.ndim))
                values = scratch.array("ordered", ordered.shape, bits.dtype)
                np.copyto(values, ordered)
        else:
            unsigned = np.dtype(f"u{self.native.stored.itemsize}")
            bits = bits.transpose(self.order(bits.ndim))
            values = scratch.array("values", bits.shape, unsigned)
            widen(bits, self.native, out=values)
        packed: bytes = blosc.Blosc(
            cname=self.compressor,
            clevel=self.level,
            shuffle=_SHUFFLES[self.shuffle],
            blocksize=self.blocksize,
            typesize=self.itemsize,
        ).encode(values)
        return packed + checksum(packed)

    def order(self, ndim: int) -> tuple[int, ...]:
        """Axes of a chunk in the order in which they are compressed."""
        return (1, 0, *range(2, ndim)) if self.token_first else tuple(range(ndim))


def chain(native: NativeType, ndim: int, *, small: bool, history: bool = False) -> Chain:
    """Codecs of an array.

    Parameters
    ----------
    native : NativeType
    ndim : int
    small : bool
        Whether the rows of the run are so small that no training makes them faster than the
        slower compressor takes them. docs/project/benchmarks.md has the measurements.
    history : bool
        Whether histories of single tokens are what the array is read for most.
    """
    if ndim == 1:
        return Chain(native=native, kind="plain", compressor="zstd", level=1)
    if small:
        return Chain(native=native, kind="delta", compressor="zstd", level=3)
    coding = Chain(native=native, kind="delta", compressor="lz4", level=5, blocksize=1 << 17)
    if history:
        return replace(coding, token_first=True, shuffle="shuffle", blocksize=1 << 16)
    return coding
