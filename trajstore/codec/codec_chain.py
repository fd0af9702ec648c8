"""How one chunk of a block becomes bytes, and which of the ways an array takes.

Matrices are stored as differences of their native bits along step (`trajstore.codec.delta`), which
Blosc then compresses with bitshuffle. Of large weights the differences are put in order of tokens,
with a shuffle of bytes: one token's history is then a small part of a chunk, and a step's snapshot
decodes twice as fast. Per-step scalars are stored as they are.

A crc32c follows, so that a flipped bit is an error on reading and never a number.
`trajstore.codec.chunk_decoder` does the reverse.
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
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE, NativeType, widen

__all__ = ["DIFFERENCES", "LENGTH", "OWN_FORM", "Chain", "canonical", "chain", "padded"]

Compressor = Literal["lz4", "zstd"]
Kind = Literal["delta", "plain", "predicted", "computed"]
Shuffle = Literal["bitshuffle", "shuffle"]


DIFFERENCES, OWN_FORM = b"\0", b"\1"
"""First byte of a chunk of a kind with forms: differences along step, or that of the kind."""

LENGTH = struct.Struct("<I")
"""Bytes of the frame of coefficients, which comes before that of the differences."""

_FEW = 1 / 512  # share of corrections below which differences are not tried

_LONG = 1 / 2  # share of its values' bytes above which a prediction is held against differences

_SHUFFLES = {"shuffle": blosc.Blosc.SHUFFLE, "bitshuffle": blosc.Blosc.BITSHUFFLE}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Codecs of one array.

    Attributes
    ----------
    native : NativeType
    kind : {'delta', 'plain', 'predicted', 'computed'}
        What is done to the values before they are compressed: differences along step, nothing,
        differences to a prediction over tokens (`trajstore.codec.predicted_rows`), or corrections
        of what an optimizer's rule gives (`trajstore.codec.computed_rows`).
    compressor : {'lz4', 'zstd'}
    level : int
    token_first : bool
        Whether differences are compressed token by token instead of row by row.
    shuffle : {'bitshuffle', 'shuffle'}
        Whether the bits or the bytes of the values are put together, by their rank.
    blocksize : int
        Bytes that Blosc is asked to compress together, and hence to decompress for any of them; for
        lz4 it takes as many of each byte of a value. 0 leaves it to Blosc.
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
            If it describes none.
        """
        types = NATIVE_TYPES | {STEP_TYPE.name: STEP_TYPE}
        options = dict(facts)
        native = types.get(options.pop("native_dtype", None))
        rule = options.pop("rule", None)
        expected = {field.name for field in fields(cls)} - {"native", "rule"}
        if native is None or options.keys() != expected:
            raise ValueError(f"no chain has {dict(facts)!r}")
        if (
            options["kind"] not in get_args(Kind)
            or options["compressor"] not in get_args(Compressor)
            or options["shuffle"] not in get_args(Shuffle)
            or not all(type(options[name]) is int for name in ("level", "blocksize"))
            or type(options["token_first"]) is not bool
            or isinstance(rule, dict) != (options["kind"] == "computed")
            or (options["token_first"] and options["kind"] in ("predicted", "computed"))
        ):
            raise ValueError(f"no chain has {dict(facts)!r}")
        return cls(native=native, rule=canonical(rule) if rule else "", **options)

    def facts(self) -> dict[str, Any]:
        """All that decides how bytes become values, as JSON values."""
        rule = {"rule": json.loads(self.rule)} if self.rule else {}
        return self.own_facts() | rule

    def own_facts(self) -> dict[str, Any]:
        """As `facts`, without the rule."""
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
        """Whether a chunk begins with a byte that names its form."""
        return self.kind in ("predicted", "computed")

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
        if self.has_forms:
            packed = self._prediction(bits, shape) if self.kind == "predicted" else b""
            if not packed or len(packed) > _LONG * bits.nbytes:
                other = DIFFERENCES + self.compress_differences(bits, shape)
                packed = min(packed or other, other, key=len)
        elif self.kind == "delta":
            packed = self.compress_differences(bits, shape)
        else:
            unsigned = np.dtype(f"u{self.native.stored.itemsize}")
            bits = padded(bits, shape).transpose(self.order(len(shape)))
            values = scratch.array("values", bits.shape, unsigned)
            widen(bits, self.native, out=values)
            packed = self.compress(values)
        return packed + checksum(packed)

    def encode_corrections(self, corrections: npt.NDArray[Any], bits: npt.NDArray[Any]) -> bytes:
        """Encode one chunk of the kind ``computed``.

        Parameters
        ----------
        corrections : ndarray of ``native.bits``, shape of the whole chunk
            The bits of the first row; then of each row what the rule gives, XOR its bits.
        bits : ndarray of ``native.bits``, (step, …)
            As for `encode`: differences are stored where they are shorter.
        """
        packed = OWN_FORM + self.compress(corrections)
        if np.count_nonzero(corrections[1:]) > _FEW * corrections[1:].size:
            other = DIFFERENCES + self.compress_differences(bits, corrections.shape)
            packed = min(packed, other, key=len)
        return packed + checksum(packed)

    def _prediction(self, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> bytes:
        """A chunk as differences to a prediction; empty if none is found."""
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
        """Frame of the differences along step; arguments as of `encode`."""
        values = scratch.array("values", shape, bits.dtype)
        fold(padded(bits, shape), values)
        if self.token_first:
            ordered = values.transpose(self.order(values.ndim))
            values = scratch.array("ordered", ordered.shape, bits.dtype)
            np.copyto(values, ordered)
        return self.compress(values)

    def compress(self, values: npt.NDArray[Any]) -> bytes:
        """Frame of C-contiguous values."""
        packed: bytes = blosc.Blosc(
            cname=self.compressor,
            clevel=self.level,
            shuffle=_SHUFFLES[self.shuffle],
            blocksize=self.blocksize,
            typesize=values.itemsize,
        ).encode(values)
        return packed

    def order(self, ndim: int) -> tuple[int, ...]:
        """Axes of a chunk in the order in which they are compressed."""
        return (1, 0, *range(2, ndim)) if self.token_first else tuple(range(ndim))


def canonical(value: Any) -> str:
    """JSON text of a value that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def padded(bits: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Bits of a whole chunk; 0 where there are none."""
    if bits.shape == shape:
        return bits
    whole = np.zeros(shape, bits.dtype)
    whole[tuple(slice(length) for length in bits.shape)] = bits
    return whole


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
