"""The form of the objects that store the blocks of an array: inner chunks, label and index.

An object contains the inner chunks of a block, or of a range of its tokens, without gaps. The label
(`trajstore.codec.block_label`) follows, then the index, as in Zarr's `sharding_indexed`: offset and
length of each inner chunk in C order of their grid, and a crc32c.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trajstore.codec.block_label import ANYWHERE, LABEL, BlockLabel, LabelError
from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.codec_chain import Chain
from trajstore.codec.computed_rows import unit_of
from trajstore.codec.crc32c_check import CHECKSUM, checksum, is_intact
from trajstore.codec.selected_parts import Pick
from trajstore.strict_json import canonical

_ENTRY = 16  # bytes of the index for one chunk: offset and length

Runs = tuple[tuple[int, str], ...]
"""Identities of the runs of the blocks, each with its first block. The last is the run itself."""

Part = tuple[list[Pick], int]
"""Part of a selection: picks of an inner chunk, and its number in the object."""


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
            own = self.runs[-1][1]
            expected = f"{self.array}, block {block}, part {part} of run {own[:8]}"
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

    def check_rows(self, tail: Tail, axes: Sequence[dict[int, Pick]]) -> None:
        """Raise an error if the block lacks selected rows.

        Raises
        ------
        FewerRows
            If a row is missing.
        """
        last = max(number * self.chunk[0] + pick.window.stop for number, pick in axes[0].items())
        if last > tail.label.rows:
            raise FewerRows(f"it holds {tail.label.rows} rows, expected at least {last}")

    def wanted(self, axes: Sequence[dict[int, Pick]]) -> Iterator[Part]:
        """Inner chunks of a selection."""
        for position in itertools.product(*axes):
            entry = 0
            for at, count in zip(position, self.grid, strict=True):
                entry = entry * count + at
            yield [axis[at] for axis, at in zip(axes, position, strict=True)], entry
