"""The object that stores a block: inner chunks, the label that names its place, and an index.

An object contains the inner chunks of a block, or of a range of its tokens, without gaps. Their
label follows, then the index, as in Zarr's `sharding_indexed`: offset and length of each inner
chunk in C order of their grid, and a crc32c. `BlockForm` is what all objects of an array share;
`shard_parts` writes one.

Source: docs/reference/format.md, *Labels*.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.array_selection import Axes, AxisPart
from trajstore.codec.chunk import CHECKSUM, Chain, Decoder, checksum, is_intact
from trajstore.codec.computed_rows import ComputedUnit, unit_of
from trajstore.strict_json import canonical

_MAGIC = b"trajblk2"
_FIELDS = struct.Struct("<8s16s32sQII32s32s")

LABEL = _FIELDS.size + 4
"""Bytes of a label, with its checksum."""

ANYWHERE = (1 << 64) - 1
"""Block number in the label of a copy that another program made: the block is unknown."""


class LabelError(ValueError):
    """A label cannot be read. The block may be intact, if another program wrote it."""


@dataclass(frozen=True, kw_only=True)
class BlockLabel:
    """Identity, place and digest of a block.

    Attributes
    ----------
    run : str
        Identity of the run: 32 hexadecimal digits.
    array : str
    block, part : int
        Number of the block along ``step``, and of the object along ``token``.
    rows : int
        Number of valid rows of the block; the others are padding.
    settings : bytes
        SHA-256 of the block's encoding (`trajstore.codec.block.BlockForm.settings`).
    digest : bytes
        SHA-256 of the stored chunks (`digest_of`).
    """

    run: str
    array: str
    block: int
    part: int
    rows: int
    settings: bytes
    digest: bytes

    def pack(self, index: bytes) -> bytes:
        """Bytes of the label. Its checksum covers the index after it, too."""
        fields = _FIELDS.pack(
            _MAGIC,
            bytes.fromhex(self.run),
            self.array.encode(),
            self.block,
            self.part,
            self.rows,
            self.settings,
            self.digest,
        )
        return fields + checksum(fields + index)

    @classmethod
    def unpack(cls, data: bytes, index: bytes) -> BlockLabel:
        """Label, from its bytes and those of the index after it.

        Raises
        ------
        LabelError
            If the checksum does not match, or the bytes are no label.
        """
        fields = data[:-4]
        if not is_intact(fields + index + data[-4:]):
            known = "the checksum of its label does not match"
            raise LabelError(known if data.startswith(_MAGIC) else "it has no label")
        magic, run, array, block, part, rows, settings, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC:
            raise LabelError("it has no label")
        return cls(
            run=run.hex(),
            array=array.rstrip(b"\0").decode(),
            block=block,
            part=part,
            rows=rows,
            settings=settings,
            digest=digest,
        )

    def place(self) -> str:
        """Run, array, block and part, for a message."""
        number = "some block" if self.block == ANYWHERE else f"block {self.block}"
        return f"{self.array}, {number}, part {self.part} of run {self.run[:8]}"


def new_identity() -> str:
    """Identity of a new run: 128 random bits, in hexadecimal digits."""
    return uuid.uuid4().hex


def digest_of(pieces: Iterable[bytes]) -> bytes:
    """Digest of a block, from the SHA-256 of each inner chunk, in order."""
    return hashlib.sha256(b"".join(pieces)).digest()


_ENTRY = 16  # bytes of the index for one chunk: offset and length

Runs = tuple[tuple[int, str], ...]
"""Identities of the runs of the blocks, each with its first block. The last is the run itself."""


class FewerRows(ValueError):
    """A block lacks rows of the selection, or does not exist."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Label and index, from the end of an object.

    Attributes
    ----------
    label : BlockLabel
    index : ndarray of uint64, (chunk, 2)
        Offset and length of each inner chunk.
    """

    label: BlockLabel
    index: npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """Storage form of the blocks of one array.

    Attributes
    ----------
    array : str
        Name of the array, as in the labels.
    chain : Chain
        Encoding of an inner chunk.
    shape : tuple of int
        Shape of one object: rows of a block first.
    chunk : tuple of int
        Shape of an inner chunk; divides `shape`.
    runs : Runs
    """

    array: str
    chain: Chain
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    runs: Runs

    @cached_property
    def decoder(self) -> Decoder:
        """Decoder of the inner chunks."""
        return Decoder(self.chain, self.chunk)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of inner chunks in each dimension."""
        return tuple(whole // part for whole, part in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def index_length(self) -> int:
        """Bytes of the index, with its checksum."""
        return math.prod(self.grid) * _ENTRY + CHECKSUM

    @cached_property
    def tail_length(self) -> int:
        """Bytes after the inner chunks."""
        return self.index_length + LABEL

    @cached_property
    def settings(self) -> bytes:
        """SHA-256 of all settings of the decoding, as a canonical JSON text."""
        facts = {
            **self.chain.facts(),
            "array": self.array,
            "shape": list(self.shape),
            "chunk_shape": list(self.chunk),
        }
        return hashlib.sha256(canonical(facts).encode()).digest()

    def tail(self, entries: Sequence[tuple[int, int]], label: BlockLabel) -> bytes:
        """Bytes after the inner chunks, which have these offsets and lengths."""
        packed = np.array(entries, "<u8").tobytes()
        return label.pack(packed) + packed + checksum(packed)

    def label(self, *, block: int, part: int, rows: int, digest: bytes) -> BlockLabel:
        """Label of a block of the run itself."""
        return BlockLabel(
            run=self.runs[-1][1],
            array=self.array,
            block=block,
            part=part,
            rows=rows,
            settings=self.settings,
            digest=digest,
        )

    def read_tail(self, data: bytes, place: tuple[int, int] | None) -> Tail:
        """Label and index, from the last bytes of an object.

        Parameters
        ----------
        data : bytes
            The last `tail_length` bytes, or fewer if the object is shorter.
        place : tuple of int, optional
            Expected block and part; None if unknown.

        Raises
        ------
        ValueError
            If the index or the label does not match its checksum, or the block is of another place.
        """
        index = data[-self.index_length :]
        if len(index) < self.index_length or not is_intact(index):
            raise ValueError(f"the index, the last {self.index_length} bytes of it, is broken")
        if len(data) < self.tail_length:
            raise LabelError("it has no label")
        entries = index[:-CHECKSUM]
        label = BlockLabel.unpack(data[:LABEL], entries)
        self.check_place(label, place)
        return Tail(label=label, index=np.frombuffer(entries, "<u8").reshape(-1, 2))

    def check_place(self, label: BlockLabel, place: tuple[int, int] | None) -> None:
        """Raise an error for a block of another run, array, place or encoding.

        Raises
        ------
        ValueError
            If the label differs. The message names the found and the expected place.
        """
        block, part = (label.block, label.part) if place is None else place
        if label.block == ANYWHERE:  # written by another program, which does not number blocks
            block, part = label.block, label.part
        # The run that recorded the block, or a later fork that stored it in another type.
        started = sum(number <= block for number, _ in self.runs)
        possible = [run for _, run in self.runs[max(started - 1, 0) :]]
        place_of_label = (label.array, label.block, label.part)
        if place_of_label != (self.array, block, part) or label.run not in possible:
            identity = self.runs[-1][1]
            expected = f"{self.array}, block {block}, part {part} of run {identity[:8]}"
            raise ValueError(f"it is {label.place()}, expected {expected}")
        if label.settings != self.settings:
            raise ValueError("the metadata differs from that with which it was written")

    def key(self, block: int, part: int) -> str:
        """Key of an object in the run: ``W/c.3.0.0``."""
        numbers = [block, part, *[0] * len(self.shape)][: len(self.shape)]
        return f"{self.array}/c.{'.'.join(map(str, numbers))}"

    def windows(self) -> Iterator[tuple[slice, ...]]:
        """Window of each inner chunk, in C order of their grid."""
        for position in itertools.product(*map(range, self.grid)):
            yield tuple(
                slice(at * length, (at + 1) * length)
                for at, length in zip(position, self.chunk, strict=True)
            )

    @cached_property
    def siblings(self) -> dict[str, BlockForm]:
        """Storage forms of all arrays from which a computed array is computed, and of itself."""
        unit = unit_of(self.chain.rule)
        forms = {name: replace(self, array=name, chain=unit.chains[name]) for name in unit.chains}
        for name in unit.rates:
            shape = (*self.shape[:1], *unit.row_of_rate(name))
            forms[name] = replace(forms[name], shape=shape, chunk=shape)
        return forms

    def check_rows(self, tail: Tail, axes: Axes) -> None:
        """Raise an error if the block lacks selected rows.

        Raises
        ------
        FewerRows
            If a row is missing.
        """
        last = max(number * self.chunk[0] + part.window.stop for number, part in axes[0].items())
        if last > tail.label.rows:
            raise FewerRows(f"it holds {tail.label.rows} rows, expected at least {last}")

    def selected_chunks(self, axes: Axes) -> Iterator[tuple[list[AxisPart], int]]:
        """What a selection takes of each inner chunk, along each axis, and the chunk's number."""
        for position in itertools.product(*axes):
            entry = 0
            for number, count in zip(position, self.grid, strict=True):
                entry = entry * count + number
            yield [axis[number] for axis, number in zip(axes, position, strict=True)], entry


Chunk = tuple[bytes, bytes]
"""An encoded inner chunk, and its SHA-256."""


def encode_chunk(chain: Chain, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> Chunk:
    """Encode one inner chunk with `Chain.encode`, and compute its SHA-256."""
    data = chain.encode(bits, shape)
    return data, hashlib.sha256(data).digest()


class UnitChunks:
    """Inner chunks of the arrays that are computed together, encoded when the first is taken.

    Parameters
    ----------
    unit : ComputedUnit
    bits : mapping of str to ndarray, (row, token, hidden) or (row, element)
        Native bits of each of ``unit.matrices``, in the whole shard.
    rates : mapping of str to ndarray, (row, …)
        Values of each of ``unit.rates``.
    skips : int
        Number of skipped steps before the block.
    window : tuple of slice
        Window of the chunk in the shard.
    first : int
        Position of the shard along the second dimension.
    """

    def __init__(
        self,
        unit: ComputedUnit,
        bits: Mapping[str, npt.NDArray[Any]],
        rates: Mapping[str, npt.NDArray[Any]],
        skips: int,
        window: tuple[slice, ...],
        first: int,
    ) -> None:
        self._unit = unit
        self._first = first + window[1].start
        self._bits = {name: each[window] for name, each in bits.items()}
        self._rates = rates
        self._skips = skips
        self._shape = tuple(part.stop - part.start for part in window)
        self._made: dict[str, bytes] | None = None
        self._lock = Lock()

    def take(self, name: str) -> Chunk:
        """Return the chunk of an array. Each is returned once."""
        with self._lock:
            if self._made is None:
                self._made = self._unit.encode(
                    self._bits, self._rates, self._skips, self._shape, self._first
                )
            data = self._made.pop(name)
        return data, hashlib.sha256(data).digest()


def shard_parts(
    form: BlockForm,
    chunks: Iterable[Chunk],
    *,
    block: int,
    part: int,
    rows: int,
    on_digest: Callable[[bytes], None] | None = None,
) -> Iterator[bytes]:
    """Yield the parts of one shard: inner chunks as they become available, then label and index.

    Every chunk is stored, even if it equals the fill value, so that NaN keep their payloads.

    Parameters
    ----------
    form : BlockForm
    chunks : iterable of Chunk
        Chunks in C order of the chunk grid.
    block, part : int
        Number of the block, and of the shard in it.
    rows : int
        Number of valid rows of the block.
    on_digest : callable, optional
        Called with the digest of the chunks before the last part.
    """
    entries: list[tuple[int, int]] = []
    digests: list[bytes] = []
    offset = 0
    for data, digest in chunks:
        entries.append((offset, len(data)))
        digests.append(digest)
        offset += len(data)
        yield data
    label = form.label(block=block, part=part, rows=rows, digest=digest_of(digests))
    if on_digest is not None:
        on_digest(label.digest)
    yield form.tail(entries, label)


def encoded_chunks(form: BlockForm, bits: npt.NDArray[Any]) -> Iterator[Chunk]:
    """Encode the inner chunks of a shard.

    Parameters
    ----------
    form : BlockForm
    bits : ndarray of ``native.bits``, (row, …)
        Part of each row in the shard.
    """
    return (encode_chunk(form.chain, bits[window], form.chunk) for window in form.windows())
