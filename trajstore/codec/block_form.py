"""The form of the objects that store the blocks of an array: inner chunks, label and index.

An object contains the inner chunks of a block, or of a range of its tokens, without gaps. The label
(`trajstore.codec.block_label`) follows, then the index, as in Zarr's `sharding_indexed`: offset and
length of each inner chunk in C order of their grid, and a crc32c.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.block_label import ANYWHERE, LABEL, BlockLabel, LabelError
from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.codec_chain import Chain
from trajstore.codec.computed_rows import cache, unit_of, windows_of
from trajstore.codec.crc32c_check import CHECKSUM, checksum, is_intact
from trajstore.codec.selected_parts import Pick, picks, positions
from trajstore.errors import FormatError
from trajstore.strict_json import canonical
from trajstore.threads import default_threads, submit
from trajstore.values.native_types import widen

__all__ = ["BlockForm", "Fetch", "FewerRows", "Runs", "Siblings", "Tail", "with_consequence"]

_ENTRY = 16  # bytes of the index for one chunk: offset and length

_CHUNKS_OF_A_HELPER = 8  # for fewer chunks, another thread does not pay

Array = npt.NDArray[Any]

Runs = tuple[tuple[int, str], ...]
"""Identities of the runs of the blocks, each with its first block. The last is the run itself."""

Part = tuple[list[Pick], int, int, int]
"""Part of a selection: picks of a chunk, its number, and its offset and length in the object."""

Fetch = Callable[[int, int], bytes]
"""Returns bytes of an object, for an offset and a length."""


Siblings = Callable[["BlockForm"], tuple["Tail", Fetch]]
"""Label, index and bytes of the same block of another array."""


class FewerRows(ValueError):
    """A block lacks rows of the selection, or does not exist."""


def with_consequence(error: ValueError) -> str:
    """Message about a block, with the consequence for the run."""
    if isinstance(error, FewerRows):
        return (
            f"{error}; if the run was resumed from an earlier row since it was opened, open it "
            "again; otherwise it is damaged"
        )
    return f"{error}; the run is damaged"


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

    def read(
        self,
        tail: Tail,
        axes: Sequence[dict[int, Pick]],
        fetch: Fetch,
        out: Array,
        *,
        padding: bool = False,
        helpers: ThreadPoolExecutor | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """Decode a selection of a block.

        Parameters
        ----------
        tail : Tail
        axes : sequence of dict of int to Pick
            Picks of the inner chunks along each axis, by number of the chunk
            (`trajstore.codec.selected_parts.picks`).
        fetch : callable
        out : ndarray of ``native.stored`` or ``native.bits``
            Receives the values, or their native bits.
        padding : bool
            True to allow the selection of invalid rows.
        helpers : ThreadPoolExecutor, optional
            Its idle threads decode chunks, too.
        siblings : callable, optional
            Opens the same block and part of another array, from which rows are computed.

        Raises
        ------
        ValueError
            If the block lacks selected rows, or a chunk is broken.
        """
        if not padding:
            self.check_rows(tail, axes)
        decode = partial(self._decode, fetch=fetch, out=out)
        if self.chain.kind == "computed":
            unit = _OpenUnit(self, tail, fetch, axes, siblings)
            decode = partial(self._decode_computed, unit=unit, out=out)
        left = deque(self.wanted(tail, axes))
        each = partial(_decode_all, left, decode)
        if helpers is None:
            each()
            return
        count = min(default_threads() - 1, len(left) // _CHUNKS_OF_A_HELPER)
        offer = [each]
        called = [submit(helpers, _run_offered, offer) for _ in range(count)]
        try:
            _run_offered(offer)
        finally:
            # Helpers that have not started are canceled. Others still read from the open object.
            begun = [helper for helper in called if not helper.cancel()]
            wait(begun)
            offer.clear()  # the pool still refers to it; this releases the memory
        for helper in begun:
            helper.result()

    def _decode(
        self,
        picks: Sequence[Pick],
        _: int,
        offset: int,
        length: int,
        *,
        fetch: Fetch,
        out: Array,
    ) -> None:
        try:
            data = fetch(offset, length)
            if len(data) != length:
                raise ValueError("the object ends before it")
            _decode_picks(data, picks, self.decoder, out)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"bytes {offset} to {offset + length}: a broken chunk ({error})"
            ) from error

    def _decode_computed(
        self,
        picks: Sequence[Pick],
        entry: int,
        offset: int,
        length: int,
        *,
        unit: _OpenUnit,
        out: Array,
    ) -> None:
        try:
            data = unit.fetched(self.array, offset, length)
            if not self.decoder.is_computed(data):
                _decode_picks(data, picks, self.decoder, out)
                return
            rows = unit.computed(picks, entry)[self.array][picks[0].window.start :]
            values = rows[: picks[0].window.stop - picks[0].window.start]
            if out.itemsize == values.itemsize:
                _place(values.view(out.dtype), picks, out)
            elif all(pick.taken is None for pick in picks):
                place = out[tuple(pick.place for pick in picks)]
                widen(values, self.chain.native, out=place.view(f"u{out.itemsize}"))
            else:
                _place(widen(values, self.chain.native), picks, out)
        except FormatError:  # of another array
            raise
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"bytes {offset} to {offset + length}: a broken chunk ({error})"
            ) from error

    def sibling(self, name: str, chain: Chain) -> BlockForm:
        """Storage form of another array of the same computed unit."""
        unit = unit_of(self.chain.rule)
        if name in unit.matrices:
            return replace(self, array=name, chain=chain)
        shape = (*self.shape[:1], *unit.row_of_rate(name))
        return replace(self, array=name, chain=chain, shape=shape, chunk=shape)

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

    def wanted(self, tail: Tail, axes: Sequence[dict[int, Pick]]) -> Iterator[Part]:
        """Inner chunks of a selection, with the picks of each."""
        for position in itertools.product(*axes):
            entry = 0
            for at, count in zip(position, self.grid, strict=True):
                entry = entry * count + at
            offset, length = tail.index[entry].tolist()
            yield [axis[at] for axis, at in zip(axes, position, strict=True)], entry, offset, length


class _OpenUnit:
    """The objects of a computed unit during one read. Each is opened on first use."""

    def __init__(
        self,
        form: BlockForm,
        tail: Tail,
        fetch: Fetch,
        axes: Sequence[dict[int, Pick]],
        siblings: Siblings | None,
    ) -> None:
        self._form = form
        self._unit = unit_of(form.chain.rule)
        self._axes = axes
        self._siblings = siblings
        self._opened: dict[str, tuple[BlockForm, Tail, Fetch]] = {form.array: (form, tail, fetch)}
        self._rates: dict[str, Array] = {}
        self._lock = RLock()

    def fetched(self, name: str, offset: int, length: int) -> bytes:
        """Read the bytes of an inner chunk."""
        data = self._open(name)[2](offset, length)
        if len(data) != length:
            raise ValueError("the object ends before it")
        return data

    def computed(self, picks: Sequence[Pick], entry: int) -> dict[str, Array]:
        """Rows of all arrays of the unit, from the first row of a chunk.

        Parameters
        ----------
        picks : sequence of Pick
            Picks of the chunk.
        entry : int
            Number of the chunk in the object.
        """
        windows = windows_of(picks)
        labels = tuple(self._open(name)[1].label.digest for name in self._names)
        bounds = tuple((part.start, part.stop) for part in windows[1:])
        # Other rules may have stored the same bytes.
        stored = self._form.chain.rule, self._form.shape, self._form.chunk
        key = (stored, labels, entry, bounds)
        return cache.get(key, partial(self._compute, entry, windows), windows[0].stop)

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._unit.matrices, *self._unit.rates)

    def _compute(self, entry: int, windows: tuple[slice, ...]) -> dict[str, Array]:
        held: dict[str, tuple[int | None, Array]] = {}
        for name in self._unit.matrices:
            form, tail, _ = self._open(name)
            offset, length = tail.index[entry].tolist()
            try:
                if name == self._unit.gradient:
                    grad = self._gradient(entry, windows)
                    continue
                data = self.fetched(name, offset, length)
                held[name] = form.decoder.stored_form(data, windows)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{name}, bytes {offset} to {offset + length}: {error}") from error
        rows = windows[0].stop
        rates = {name: self._rate(name, rows) for name in self._unit.rates}
        # The chunks of a part are in the order of the second dimension.
        form, tail, _ = self._open(self._unit.gradient)
        first = tail.label.part * form.shape[1] + entry * form.chunk[1] + windows[1].start
        return self._unit.compute(held, grad, rates, first)

    def _gradient(self, entry: int, windows: tuple[slice, ...]) -> Array:
        """Bits of the gradient.

        A part of the tokens needs the decompression of all. So the whole chunk is decoded, and
        cached for other tokens.
        """
        form, tail, _ = self._open(self._unit.gradient)
        name, rows, *others = form.array, windows[0].stop, *windows[1:]

        def decoded() -> dict[str, Array]:
            grad = np.empty((rows, *form.chunk[1:]), form.chain.native.bits)
            whole = tuple(slice(0, length) for length in grad.shape)
            form.decoder.decode(self.fetched(name, *tail.index[entry].tolist()), whole, grad)
            return {name: grad}

        if all(part == slice(0, n) for part, n in zip(others, form.chunk[1:], strict=True)):
            return decoded()[name]
        key = (form.chain, form.shape, form.chunk, tail.label.digest, entry)
        return np.ascontiguousarray(cache.get(key, decoded, rows)[name][:rows, *others])

    def _rate(self, name: str, rows: int) -> Array:
        with self._lock:
            found = self._rates.get(name)
            if found is None or len(found) < rows:
                form, tail, fetch = self._open(name)
                lengths = (rows, *form.shape[1:])
                found = np.empty(lengths, form.chain.native.stored)
                axes = [
                    picks(range(n), whole) for n, whole in zip(lengths, form.shape, strict=True)
                ]
                form.read(tail, axes, fetch, found)
                self._rates[name] = found
            return found[:rows]

    def _open(self, name: str) -> tuple[BlockForm, Tail, Fetch]:
        with self._lock:
            if name not in self._opened:
                form = self._form.sibling(name, self._unit.chains[name])
                if self._siblings is None:
                    raise ValueError(f"it is computed from {name}, which was not passed")
                tail, fetch = self._siblings(form)
                if name in self._unit.matrices:
                    form.check_rows(tail, self._axes)
                self._opened[name] = form, tail, fetch
            return self._opened[name]


def _decode_all(left: deque[Part], decode: Callable[[list[Pick], int, int, int], None]) -> None:
    """Decode chunks until none is left. Several threads may share the queue."""
    try:
        while left:
            try:
                part = left.popleft()
            except IndexError:  # another thread took the last one
                return
            decode(*part)
    finally:
        left.clear()  # after an error, all threads stop


def _decode_picks(data: bytes, picks: Sequence[Pick], decoder: Decoder, out: Array) -> None:
    window = tuple(pick.window for pick in picks)
    if all(pick.taken is None for pick in picks):
        decoder.decode(data, window, out[tuple(pick.place for pick in picks)])
        return
    values = np.empty([item.stop - item.start for item in window], out.dtype)
    decoder.decode(data, window, values)
    _place(values, picks, out)


def _place(values: Array, picks: Sequence[Pick], out: Array) -> None:
    """Write the picked values of a window to their places."""
    if all(pick.taken is None for pick in picks):
        out[tuple(pick.place for pick in picks)] = values
        return
    for axis, pick in enumerate(picks):
        if pick.taken is not None:
            values = values.take(pick.taken, axis)
    out[np.ix_(*[positions(pick.place) for pick in picks])] = values


def _run_offered(offer: Sequence[Callable[[], None]]) -> None:
    for work in tuple(offer):
        work()
