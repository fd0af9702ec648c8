"""Encoding of one chunk of a block, and the choice of the encoding for an array.

Matrices are stored as differences of their native bits along step (`trajstore.codec.delta`), which
Blosc compresses with bitshuffle. The differences of large weights are ordered by token, with a
shuffle of bytes. Then the history of a token is a small part of a chunk, and the snapshot of a step
decodes twice as fast. Per-step scalars are stored without differences.

A crc32c follows, so that a flipped bit raises an error during a read and is never a number.
`trajstore.codec.chunk_decoder` decodes the chunks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from trajstore.codec.crc32c_check import checksum
from trajstore.codec.delta import fold
from trajstore.codec.predicted_rows import coefficients_and_differences
from trajstore.codec.scratch_memory import scratch
from trajstore.strict_json import canonical
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE, NativeType, widen

Compressor = Literal["lz4", "zstd"]
Kind = Literal["delta", "plain", "native", "predicted", "computed"]
Shuffle = Literal["bitshuffle", "shuffle"]


DIFFERENCES, OWN_FORM = b"\0", b"\1"
"""First byte of a chunk of a kind with forms: differences along step, or the form of the kind."""

LENGTH = struct.Struct("<I")
"""Length in bytes of the frame of coefficients, which precedes that of the differences."""

SKIPS = struct.Struct("<I")
"""Number of skipped steps before the block, which precedes the frame of corrections."""

_FEW = 1 / 512  # fraction of corrections below which differences are not tried

_LONG = 1 / 2  # fraction of the values' bytes above which differences are tried as well

_SHUFFLES = {"shuffle": blosc.Blosc.SHUFFLE, "bitshuffle": blosc.Blosc.BITSHUFFLE}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Codecs of one array.

    Attributes
    ----------
    native : NativeType
    kind : {'delta', 'plain', 'native', 'predicted', 'computed'}
        Transformation before the compression: differences along step, none of the stored type or
        of the native bits, differences to a prediction over tokens
        (`trajstore.codec.predicted_rows`), or corrections of the results of an optimizer's rule
        (`trajstore.codec.computed_rows`).
    compressor : {'lz4', 'zstd'}
    level : int
    token_first : bool
        True to compress differences token by token instead of row by row.
    shuffle : {'bitshuffle', 'shuffle'}
        Unit, bits or bytes, in which Blosc groups the values by rank.
    blocksize : int
        Bytes that Blosc compresses, and decompresses, together; 0 for its own choice. For lz4, it
        uses this size for each byte of a value.
    rule : str
        Canonical JSON of the rule, for the kind ``computed``.
    """

    native: NativeType
    kind: Kind
    compressor: Compressor
    level: int
    token_first: bool = False
    shuffle: Shuffle = "bitshuffle"
    blocksize: int = 0
    rule: str = ""

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The chain that `facts` describes.

        Raises
        ------
        ValueError
            If `facts` does not describe a chain.
        """
        types = NATIVE_TYPES | {STEP_TYPE.name: STEP_TYPE}
        options = dict(facts)
        native = types.get(options.pop("native_dtype", None))
        rule = options.pop("rule", None)
        expected = {field.name for field in fields(cls)} - {"native", "rule"}
        if (
            native is None
            or options.keys() != expected
            or options["kind"] not in get_args(Kind)
            or options["compressor"] not in get_args(Compressor)
            or options["shuffle"] not in get_args(Shuffle)
            or not all(type(options[name]) is int for name in ("level", "blocksize"))
            or type(options["token_first"]) is not bool
            or isinstance(rule, dict) != (options["kind"] == "computed")
            or (options["token_first"] and options["kind"] in ("predicted", "computed"))
        ):
            raise ValueError(f"got {dict(facts)!r}, expected the settings of a chain")
        return cls(native=native, rule=canonical(rule) if rule else "", **options)

    def facts(self) -> dict[str, Any]:
        """All settings of the decoding, as JSON values."""
        rule = {"rule": json.loads(self.rule)} if self.rule else {}
        return self.own_facts() | rule

    def own_facts(self) -> dict[str, Any]:
        """The same without the rule."""
        native = self.native.stored if self.kind == "plain" else self.native
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
        return (self.native.stored if self.kind == "plain" else self.native).itemsize

    @property
    def has_forms(self) -> bool:
        """True if a chunk begins with a byte for its form."""
        return self.kind in ("predicted", "computed")

    def encode(self, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> bytes:
        """Encode one chunk.

        Parameters
        ----------
        bits : ndarray of ``native.bits``, (step, …)
            May be smaller than the chunk at the end of an axis.
        shape : tuple of int
            Shape of the whole chunk. Values not covered by `bits` are 0 and outside the array.

        Returns
        -------
        bytes
        """
        if self.has_forms:
            packed = self._prediction(bits, shape) if self.kind == "predicted" else b""
            if not packed or len(packed) > _LONG * bits.nbytes:
                other = DIFFERENCES + self.compress_differences(bits, shape)
                packed = min(packed or other, other, key=len)
        elif self.kind == "delta":
            packed = self.compress_differences(bits, shape)
        elif self.kind == "native":
            packed = self.compress(np.ascontiguousarray(padded(bits, shape)))
        else:
            unsigned = np.dtype(f"u{self.native.stored.itemsize}")
            bits = padded(bits, shape).transpose(self.order(len(shape)))
            values = scratch.array("values", bits.shape, unsigned)
            widen(bits, self.native, out=values)
            packed = self.compress(values)
        return packed + checksum(packed)

    def encode_corrections(
        self, corrections: npt.NDArray[Any], bits: npt.NDArray[Any], skips: int
    ) -> bytes:
        """Encode one chunk of the kind ``computed``.

        Parameters
        ----------
        corrections : ndarray of ``native.bits``, shape of the whole chunk
            The bits of the first row; for each further row, the result of the rule XOR its bits.
        bits : ndarray of ``native.bits``, (step, …)
            See `encode`. Differences are stored if they are shorter.
        skips : int
            Number of skipped steps before the first row.
        """
        packed = OWN_FORM + SKIPS.pack(skips) + self.compress(corrections[:1])
        left = corrections[1:]
        if left.max(initial=0):  # faster than counting
            packed += self.compress(left)
            if np.count_nonzero(left) > _FEW * left.size:
                other = DIFFERENCES + self.compress_differences(bits, corrections.shape)
                packed = min(packed, other, key=len)
        return packed + checksum(packed)

    def _prediction(self, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> bytes:
        """Encode a chunk as differences to a prediction; empty if there is no prediction."""
        predicted = coefficients_and_differences(bits, self.native)
        if predicted is None:
            return b""
        coefficients, left = predicted
        hidden = bits.shape[2]
        whole = np.zeros((shape[0], coefficients.shape[1], hidden + shape[1]), bits.dtype)
        whole[: len(bits), :, : coefficients.shape[2]] = coefficients
        head = self.compress(whole)
        return OWN_FORM + LENGTH.pack(len(head)) + head + self.compress(padded(left, shape))

    def compress_differences(self, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> bytes:
        """Compress the differences along step. Arguments: see `encode`."""
        values = scratch.array("values", shape, bits.dtype)
        fold(padded(bits, shape), values)
        if self.token_first:
            ordered = values.transpose(self.order(values.ndim))
            values = scratch.array("ordered", ordered.shape, bits.dtype)
            np.copyto(values, ordered)
        return self.compress(values)

    def compress(self, values: npt.NDArray[Any]) -> bytes:
        """Compress C-contiguous values to a Blosc frame."""
        packed: bytes = blosc.Blosc(
            cname=self.compressor,
            clevel=self.level,
            shuffle=_SHUFFLES[self.shuffle],
            blocksize=self.blocksize,
            typesize=values.itemsize,
        ).encode(values)
        return packed

    def order(self, ndim: int) -> tuple[int, ...]:
        """Order of the axes of a chunk in the compressed bytes."""
        return (1, 0, *range(2, ndim)) if self.token_first else tuple(range(ndim))


def padded(bits: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Bits of a whole chunk, padded with 0."""
    if bits.shape == shape:
        return bits
    whole = np.zeros(shape, bits.dtype)
    whole[tuple(slice(length) for length in bits.shape)] = bits
    return whole


def chain(native: NativeType, ndim: int, *, small: bool, history: bool = False) -> Chain:
    """Choose the codecs of an array.

    Parameters
    ----------
    native : NativeType
    ndim : int
    small : bool
        True for rows so small that even the slower compressor is faster than any training. For
        measurements see docs/project/benchmarks.md.
    history : bool
        True if mostly histories of single tokens are read.
    """
    if ndim == 1:
        return Chain(native=native, kind="plain", compressor="zstd", level=1)
    if small:
        return Chain(native=native, kind="delta", compressor="zstd", level=3)
    coding = Chain(native=native, kind="delta", compressor="lz4", level=5, blocksize=1 << 17)
    if history:
        return replace(coding, token_first=True, shuffle="shuffle", blocksize=1 << 16)
    return coding


def vector_chain(native: NativeType, *, small: bool, differences: bool) -> Chain:
    """Choose the codecs of a variable along ``element``, with values of many parameters.

    Parameters
    ----------
    native : NativeType
    small : bool
        See `chain`.
    differences : bool
        False for gradients, whose steps have little in common.
    """
    if not small:
        coding = chain(native, 2, small=False)
        return coding if differences else replace(coding, kind="native")
    # zstd counts the values of 128 KiB, here those of one byte, or of bits of the same rank. Most
    # bytes of a gradient are evenly distributed, apart from the one with the exponent.
    return Chain(
        native=native,
        kind="delta" if differences else "native",
        compressor="zstd",
        level=1,
        shuffle="bitshuffle" if differences else "shuffle",
        blocksize=native.itemsize << 17,
    )
