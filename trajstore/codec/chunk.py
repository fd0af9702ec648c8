"""Encoding and decoding of one chunk of a block, and the choice of the encoding for an array.

Matrices are stored as differences of their native bits along step (`trajstore.codec.delta`), which
Blosc compresses with bitshuffle. The differences of large weights are ordered by token, with a
shuffle of bytes. Then the history of a token is a small part of a chunk, and the snapshot of a step
decodes twice as fast. Per-step scalars are stored without differences.

A crc32c follows, as Zarr's codec of that name writes it. So a flipped bit raises an error during a
read and is never a number.

A compressed chunk is a Blosc frame: a header of 16 bytes, the offsets of its blocks, and the
blocks, each compressed independently. `Decoder` decompresses only the blocks that a part of the
chunk needs: with a new header they form a smaller frame, which any Blosc library reads.

Source: the chunk format of C-Blosc 1, which its documentation describes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from trajstore.codec.delta import fold, scratch, unfold
from trajstore.codec.predicted_rows import MOST_TERMS, coefficients_and_differences, decode_rows
from trajstore.strict_json import canonical
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE, NativeType, widen
from trajstore.values.optimizer_rule import SETTINGS

CHECKSUM = 4
"""Bytes of the checksum."""

_RESIDUE = 0x48674BC7


def checksum(data: bytes) -> bytes:
    """The four bytes that the crc32c codec appends to the data."""
    value: int = google_crc32c.value(data)
    return value.to_bytes(CHECKSUM, "little")


def is_intact(data: bytes) -> bool:
    """True if data ends with its own checksum."""
    # The crc32c of data followed by its crc32c is a constant.
    intact: bool = google_crc32c.value(data) == _RESIDUE
    return intact


Compressor = Literal["lz4", "zstd"]
Kind = Literal["delta", "plain", "native", "predicted", "computed"]
Shuffle = Literal["bitshuffle", "shuffle"]


DIFFERENCES, OWN_FORM, WITH_SETTINGS = b"\0", b"\1", b"\2"
"""First byte of a chunk of a kind with forms: differences along step, or the form of the kind.

The last one is that of computed rows whose hyperparameters differ from those of the rule."""

LENGTH = struct.Struct("<I")
"""Length in bytes of the frame of coefficients, which precedes that of the differences."""

SKIPS = struct.Struct("<I")
"""Number of skipped steps before the block, which precedes the frame of corrections."""

Head = tuple[int, bytes]
"""Number of skipped steps before a chunk of computed rows; its settings, float64 (setting, row).

The latter are empty if no hyperparameter differs from the rule's."""

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
        self, corrections: npt.NDArray[Any], bits: npt.NDArray[Any], head: Head
    ) -> bytes:
        """Encode one chunk of the kind ``computed``.

        Parameters
        ----------
        corrections : ndarray of ``native.bits``, shape of the whole chunk
            The bits of the first row; for each further row, the result of the rule XOR its bits.
        bits : ndarray of ``native.bits``, (step, …)
            See `encode`. Differences are stored if they are shorter.
        head : Head
        """
        skips, numbers = head
        packed = (WITH_SETTINGS if numbers else OWN_FORM) + SKIPS.pack(skips)
        if numbers:
            packed += self.compress(np.frombuffer(numbers, np.uint64))
        packed += self.compress(corrections[:1])
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


Array = npt.NDArray[np.generic]

_HEADER = 16  # bytes of the header, and of the smallest frame
_FIELDS = struct.Struct("<3sBIII")  # versions and flags, typesize; bytes: all, block, compressed
_FLAGS = 2
_COPIED = 0x02  # flag of an uncompressed frame
_OFFSET = 4


class Decoder:
    """Decodes the chunks of one array.

    Parameters
    ----------
    chain : Chain
        The chain that encoded the chunks.
    shape : tuple of int
        Shape of a whole chunk.
    """

    def __init__(self, chain: Chain, shape: tuple[int, ...]) -> None:
        self._chain = chain
        self._shape = shape
        order = chain.order(len(shape))
        self._natural = tuple(order.index(axis) for axis in range(len(shape)))
        self._lead = order[0]  # the axis that comes first in the bytes
        # A row is the sum of all rows before it. Tokens are independent.
        self._takes_differences = chain.kind not in ("plain", "native")
        self._from_start = self._takes_differences and self._lead == 0
        self._length = shape[self._lead]
        self._rest = tuple(shape[axis] for axis in order[1:])
        self._row = math.prod(self._rest) * chain.itemsize
        self._bits = np.dtype(f"<u{chain.itemsize}")

    def decode(self, data: bytes, window: tuple[slice, ...], out: npt.NDArray[np.generic]) -> None:
        """Decode part of a chunk.

        Parameters
        ----------
        data : bytes
            Result of `Chain.encode`.
        window : tuple of slice
            Part to decode, with start and stop.
        out : ndarray of ``native.stored`` or ``native.bits``, shape of the window
            Receives the values, or their native bits.

        Raises
        ------
        ValueError
            If the checksum does not match, or the content is not a chunk of that shape.
        """
        frame = self._checked(data)
        if not self._chain.has_forms:
            self._decode_frame(frame, window, out)
        elif frame[:1] == DIFFERENCES:
            self._decode_frame(frame[1:], window, out)
        elif self._chain.kind == "predicted":
            direct = out.itemsize == self._chain.itemsize and window[0].start == 0
            values = self._predicted(frame, window, out.view(self._bits) if direct else None)
            if not direct:
                self.put(values[window[0].start :], out)
        elif window[0].stop == 1:  # the key row
            self.put(self._corrections(frame, window), out)
        else:
            raise ValueError("its rows are computed from other arrays, which were not passed")

    def stored_form(self, data: bytes, window: tuple[slice, ...]) -> tuple[Head | None, Array]:
        """Stored content of a chunk of the kind ``computed``, for the rows before the window's end.

        Parameters
        ----------
        data : bytes
        window : tuple of slice
            The first starts at 0.

        Returns
        -------
        head : Head or None
            With the settings of these rows; None if `bits` are the rows themselves.
        bits : ndarray of ``native.bits``, shape of the window
            The rows, or the first row and the corrections of the rule's results.

        Raises
        ------
        ValueError
            See `decode`.
        """
        frame = self._checked(data)
        if frame[:1] == DIFFERENCES:
            shape = tuple(part.stop - part.start for part in window)
            out = np.empty(shape, self._chain.native.bits)
            self._decode_frame(frame[1:], window, out)
            return None, out
        (skips, numbers), _ = self._head(frame)
        # Other arrays may still have this block with fewer rows, or already with more.
        made = np.frombuffer(numbers).reshape(len(SETTINGS), -1)[:, : window[0].stop]
        numbers = made.tobytes() if (made != made[:, :1]).any() else b""
        return (skips, numbers), self._corrections(frame, window)

    def is_computed(self, data: bytes) -> bool:
        """True if a chunk needs the chunks of other arrays."""
        return self._chain.kind == "computed" and data[:1] != DIFFERENCES

    def _decode_frame(
        self, frame: memoryview, window: tuple[slice, ...], out: npt.NDArray[np.generic]
    ) -> None:
        values = self._unpack_window(frame, window)
        if self._takes_differences:
            native = self._chain.native
            unfold(values, native, out.view(f"u{out.itemsize}"), window[0].start)
        elif self._chain.kind == "native":
            self.put(values, out)
        else:
            out[...] = values.view(out.dtype)

    def _corrections(self, frame: memoryview, window: tuple[slice, ...]) -> Array:
        """The first row, and the corrections of the further ones, which may all be 0."""
        (_, frames), stop = self._head(frame), window[0].stop
        length = int.from_bytes(frames[12:16], "little")
        values = np.zeros([part.stop - part.start for part in window], self._bits)
        values[:1] = self._unpack(frames[:length], 0, 1, length=1)[:, *window[1:]]
        if len(frames) > length and stop > 1:
            left = self._unpack(frames[length:], 0, stop - 1, length=self._length - 1)
            values[1:] = left[:, *window[1:]]
        return values

    def _head(self, frame: memoryview) -> tuple[Head, memoryview]:
        """Head of a chunk of computed rows, and its frames."""
        (skips,), frames = SKIPS.unpack_from(frame, 1), frame[1 + SKIPS.size :]
        if frame[:1] == OWN_FORM:
            return (skips, b""), frames
        numbers = np.empty((len(SETTINGS), self._length), np.float64)
        size, length = (int.from_bytes(frames[at : at + 4], "little") for at in (4, 12))
        if size != numbers.nbytes or not _HEADER <= length < len(frames):
            raise ValueError("its hyperparameters are not a whole Blosc frame")
        blosc.decompress(frames[:length], numbers)
        return (skips, numbers.tobytes()), frames[length:]

    def _predicted(
        self, frame: memoryview, window: tuple[slice, ...], out: Array | None = None
    ) -> Array:
        """Bits of the rows before the window's end, in `out` or in scratch memory."""
        (length,) = LENGTH.unpack_from(frame, 1)
        start = 1 + LENGTH.size
        head, body = frame[start : start + length], frame[start + length :]
        (rows, tokens, hidden), item = self._shape, self._chain.itemsize
        term = rows * (hidden + tokens) * item
        size = int.from_bytes(head[4:8], "little")
        if (
            len(head) < _HEADER
            or not size
            or size % term
            or int.from_bytes(head[12:16], "little") != length
        ):
            raise ValueError("it is not a whole Blosc frame")
        if size > MOST_TERMS * term:
            raise ValueError(f"it has {size // term} terms, expected at most {MOST_TERMS}")
        packed = np.empty(size, "u1")
        blosc.decompress(head, packed)
        terms = packed.view(self._bits).reshape(rows, -1, hidden + tokens)
        stop, along_token, along_hidden = window[0].stop, window[1], window[2]
        taken = np.concatenate(
            [
                terms[:stop, :, :hidden][..., along_hidden],
                terms[:stop, :, hidden:][..., along_token],
            ],
            axis=2,
        )
        left = self._unpack(body, 0, stop)[:, along_token, along_hidden]
        if out is None:
            out = scratch.array("predicted", left.shape, self._bits)
        decode_rows(taken, left, self._chain.native, out)
        return out

    def put(self, bits: Array, out: npt.NDArray[np.generic]) -> None:
        """Write native bits to `out`, as the bits of the stored values or as they are."""
        if out.itemsize == bits.itemsize:
            out.view(bits.dtype)[...] = bits
        else:
            widen(bits, self._chain.native, out=out.view(f"u{out.itemsize}"))

    def _checked(self, data: bytes) -> memoryview:
        """Check the checksum of a chunk, and return the chunk without it."""
        if len(data) < _HEADER + CHECKSUM + self._chain.has_forms or not is_intact(data):
            raise ValueError("the checksum does not match")
        last = 1 + (self._chain.kind == "computed")
        if self._chain.has_forms and data[0] > last:
            raise ValueError(f"its first byte is {data[0]}, expected that of a form, 0 to {last}")
        return memoryview(data)[:-CHECKSUM]

    def unpack(self, data: bytes) -> Array:
        """Check and decompress a chunk, which are the steps of decoding that can fail.

        The remaining step, the sum of differences, is defined for every bit pattern.

        Parameters
        ----------
        data : bytes
            Result of `Chain.encode`.

        Returns
        -------
        ndarray of unsigned integers
            Folded differences of the native bits, or bits of the stored values, in the shape of the
            chunk. It may be scratch memory of this thread, valid until the next call.

        Raises
        ------
        ValueError
            If the checksum does not match, or the content is not a chunk of that shape.
        """
        frame = self._checked(data)
        if not self._chain.has_forms:
            return self._unpack(frame, 0, self._length)
        if frame[:1] == DIFFERENCES:
            return self._unpack(frame[1:], 0, self._length)
        whole = tuple(slice(0, length) for length in self._shape)
        decode = self._predicted if self._chain.kind == "predicted" else self._corrections
        return decode(frame, whole)

    def _unpack_window(self, frame: memoryview, window: tuple[slice, ...]) -> Array:
        """Decompress the values that a part of a chunk needs.

        For differences, these are all steps up to the last one of the window.
        """
        lead = window[self._lead]
        values = self._unpack(frame, 0 if self._from_start else lead.start, lead.stop)
        key = list(window)
        key[self._lead] = slice(None)
        if self._takes_differences:
            key[0] = slice(window[0].stop)
        return values[tuple(key)]

    def _unpack(
        self, frame: memoryview, start: int, stop: int, *, length: int | None = None
    ) -> Array:
        """Decompress a range of the axis that comes first in the bytes.

        Parameters
        ----------
        frame : memoryview
        start, stop : int
        length : int, optional
            Length of that axis in the frame; by default that of a chunk.
        """
        length = self._length if length is None else length
        size = length * self._row
        if len(frame) < _HEADER:
            raise ValueError("it is not a whole Blosc frame")
        if int.from_bytes(frame[4:8], "little") != size:  # the uncompressed size
            raise ValueError("its size differs from that in the metadata")
        if int.from_bytes(frame[12:16], "little") != len(frame):  # Blosc does not check it
            raise ValueError("it is not a whole Blosc frame")
        skip = start * self._row
        if stop - start < length:
            frame, skip = cut_frame(frame, skip, stop * self._row)
            size = int.from_bytes(frame[4:8], "little")
        values = scratch.array("values", (size,), "u1")
        blosc.decompress(frame, values)
        wanted = values[skip : skip + (stop - start) * self._row].view(self._bits)
        return wanted.reshape(stop - start, *self._rest).transpose(self._natural)


def cut_frame(frame: memoryview, start: int, stop: int) -> tuple[memoryview, int]:
    """Smaller frame that contains a byte range of a frame.

    Parameters
    ----------
    frame : memoryview of bytes
    start, stop : int
        Range of the uncompressed bytes; start < stop.

    Returns
    -------
    frame : memoryview
        The given frame, if its blocks are not in order.
    skip : int
        Bytes before the range in the result.

    Raises
    ------
    ValueError
        If the header does not describe the frame.
    """
    if len(frame) < _HEADER:
        raise ValueError("it is not a whole Blosc frame")
    kind, typesize, size, block, packed = _FIELDS.unpack_from(frame)
    count = -(-size // block) if block else 0
    starts_end = _HEADER + count * _OFFSET
    copied = kind[_FLAGS] & _COPIED
    if packed != len(frame) or not count or (not copied and starts_end > packed):
        raise ValueError("it is not a whole Blosc frame")
    if not 0 <= start < stop <= size:
        raise ValueError(f"it holds {size} bytes, not those from {start} to {stop}")
    if copied:
        length = stop - start
        head = _FIELDS.pack(kind, typesize, length, min(block, length), _HEADER + length)
        return memoryview(head + frame[_HEADER + start : _HEADER + stop]), 0
    first, last = start // block, (stop - 1) // block + 1
    if first and last == count:
        # Blosc expects a short block only as the last of several.
        first = min(first, count - 2)
    starts = [*struct.unpack_from(f"<{count}i", frame, _HEADER), packed]
    if starts[0] < starts_end or starts != sorted(set(starts)):
        return frame, start
    begin, end = starts[first], starts[last]
    moved = _HEADER + (last - first) * _OFFSET
    head = _FIELDS.pack(
        kind, typesize, min(last * block, size) - first * block, block, moved + end - begin
    )
    offsets = struct.pack(f"<{last - first}i", *(at - begin + moved for at in starts[first:last]))
    return memoryview(head + offsets + frame[begin:end]), start - first * block
