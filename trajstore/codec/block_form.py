"""How one array is stored, block by block: the inner chunks of an object, its label, its index.

An object holds the inner chunks of a block, or of a range of its tokens, one behind the other; then
the label (`trajstore.codec.block_label`); then the index, as Zarr's `sharding_indexed` has it at
the end: offset and length of each inner chunk in C order of their grid, and a crc32c.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.block_label import ANYWHERE, LABEL, BlockLabel, LabelError
from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.codec_chain import Chain
from trajstore.codec.computed_rows import GRADIENT, cache, unit_of, windows_of
from trajstore.codec.crc32c_check import CHECKSUM, checksum, is_intact
from trajstore.codec.selected_parts import Pick, picks, positions
from trajstore.errors import FormatError
from trajstore.threads import default_threads, submit
from trajstore.values.native_types import widen

__all__ = ["BlockForm", "Fetch", "FewerRows", "Runs", "Siblings", "Tail", "with_consequence"]

_ENTRY = 16  # bytes of the index for one chunk: offset and length

_CHUNKS_OF_A_HELPER = 8  # fewer are sooner decoded than handed over

Array = npt.NDArray[Any]

Runs = tuple[tuple[int, str], ...]
"""Whose blocks there are: from each number on, identity of the run; the last is the run itself."""

Part = tuple[list[Pick], int, int, int]
"""Of a selection: what is taken of a chunk, its number, and its offset and length in the object."""

Fetch = Callable[[int, int], bytes]
"""Bytes of an object: from an offset on, so many."""


Siblings = Callable[["BlockForm"], tuple["Tail", Fetch]]
"""Label, index and bytes of the same block of another array."""


class FewerRows(ValueError):
    """A block does not hold the rows that are wanted of it, or is not there at all."""


def with_consequence(error: ValueError) -> str:
    """What is wrong with a block, and what that says of the run."""
    if isinstance(error, FewerRows):
        return (
            f"{error}; if the run has gone on from an earlier row since it was opened, open it "
            "again, else it is damaged"
        )
    return f"{error}; the run is damaged"


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What stands at the end of an object.

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
    """How the blocks of one array are stored.

    Attributes
    ----------
    array : str
        Its name, as the labels have it.
    chain : Chain
        Of an inner chunk.
    shape : tuple of int
        Of what one object holds: rows of a block first.
    chunk : tuple of int
        Of an inner chunk; divides the shape.
    runs : Runs
    """

    array: str
    chain: Chain
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    runs: Runs

    @cached_property
    def decoder(self) -> Decoder:
        """Of its inner chunks."""
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
        """Bytes behind the inner chunks."""
        return self.index_length + LABEL

    @cached_property
    def settings(self) -> bytes:
        """SHA-256 of all that decides how bytes become values: a canonical JSON text."""
        facts = {
            **self.chain.facts(),
            "array": self.array,
            "shape": list(self.shape),
            "chunk_shape": list(self.chunk),
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def tail(self, entries: Sequence[tuple[int, int]], label: BlockLabel) -> bytes:
        """Bytes behind the inner chunks that lie at these offsets, with these lengths."""
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
            `tail_length` of them, or fewer where the object is shorter.
        place : tuple of int, optional
            Block and part whose object it should be. Without it that is not known.

        Raises
        ------
        ValueError
            If the index or the label does not fit its checksum, or the block belongs elsewhere.
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
        """Refuse a block that belongs to another run, array or place, or was stored otherwise.

        Raises
        ------
        ValueError
            The message names both.
        """
        block, part = (label.block, label.part) if place is None else place
        if label.block == ANYWHERE:  # a copy of another program, which does not number blocks
            block, part = label.block, label.part
        # Whose block it was at first, or of a fork that has stored it in another type.
        started = sum(number <= block for number, _ in self.runs)
        possible = [run for _, run in self.runs[max(started - 1, 0) :]]
        place_of_label = (label.array, label.block, label.part)
        if place_of_label != (self.array, block, part) or label.run not in possible:
            own = self.runs[-1][1]
            expected = f"{self.array}, block {block}, part {part} of run {own[:8]}"
            raise ValueError(f"it is {label.place()}, where {expected} belongs")
        if label.settings != self.settings:
            raise ValueError("the metadata say something else than those it was written with")

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
        """Decode what a selection takes of a block.

        Parameters
        ----------
        tail : Tail
        axes : sequence of dict of int to Pick
            Of each axis what is taken of the inner chunks, by their number
            (`trajstore.codec.selected_parts.picks`).
        fetch : callable
        out : ndarray of ``native.stored`` or ``native.bits``
            Receives the values, or their native bits.
        padding : bool
            Whether rows that are not valid may be selected too.
        helpers : ThreadPoolExecutor, optional
            Its threads take chunks, too, as far as they have nothing else to do.
        siblings : callable, optional
            Opens the same block and part of another array, where rows are computed of it.

        Raises
        ------
        ValueError
            If rows are selected that the block does not hold, or a chunk is broken.
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
            # Who has not begun need not; who has is waited for, as it reads from what is open here.
            begun = [helper for helper in called if not helper.cancel()]
            wait(begun)
            offer.clear()  # the pool still knows it, and should hold none of the memory
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
            for axis, pick in enumerate(picks):
                if pick.taken is not None:
                    values = values.take(pick.taken, axis)
            if out.itemsize != values.itemsize:
                values = widen(values, self.chain.native)
            place = tuple(pick.place for pick in picks)
            if not all(isinstance(each, slice) for each in place):
                place = np.ix_(*[positions(each) for each in place])
            out[place] = values.view(out.dtype)
        except FormatError:  # of another array
            raise
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"bytes {offset} to {offset + length}: a broken chunk ({error})"
            ) from error

    def sibling(self, name: str, chain: Chain) -> BlockForm:
        """How another array of the unit that this one is computed in is stored."""
        matrix = name in unit_of(self.chain.rule).matrices
        return BlockForm(
            array=name,
            chain=chain,
            shape=self.shape if matrix else self.shape[:1],
            chunk=self.chunk if matrix else self.shape[:1],
            runs=self.runs,
        )

    def check_rows(self, tail: Tail, axes: Sequence[dict[int, Pick]]) -> None:
        """Refuse a selection of rows that the block does not hold.

        Raises
        ------
        FewerRows
            If so.
        """
        last = max(number * self.chunk[0] + pick.window.stop for number, pick in axes[0].items())
        if last > tail.label.rows:
            raise FewerRows(f"it holds {tail.label.rows} rows, of which {last} are wanted")

    def wanted(self, tail: Tail, axes: Sequence[dict[int, Pick]]) -> Iterator[Part]:
        """Inner chunks that a selection needs, and what it takes of each."""
        for position in itertools.product(*axes):
            entry = 0
            for at, count in zip(position, self.grid, strict=True):
                entry = entry * count + at
            offset, length = tail.index[entry].tolist()
            yield [axis[at] for axis, at in zip(axes, position, strict=True)], entry, offset, length


class _OpenUnit:
    """The objects of a unit that one read takes from: each is opened when it is needed."""

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
        """Bytes of an inner chunk."""
        data = self._open(name)[2](offset, length)
        if len(data) != length:
            raise ValueError("the object ends before it")
        return data

    def computed(self, picks: Sequence[Pick], entry: int) -> dict[str, Array]:
        """Rows of all arrays of the unit, from the first of a chunk on.

        Parameters
        ----------
        picks : sequence of Pick
            What is taken of the chunk.
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
        held: dict[str, tuple[bool, Array]] = {}
        for name in self._unit.matrices:
            form, tail, _ = self._open(name)
            offset, length = tail.index[entry].tolist()
            try:
                data = self.fetched(name, offset, length)
                if name != GRADIENT:
                    held[name] = form.decoder.stored_form(data, windows)
                    continue
                grad = np.empty(
                    [part.stop - part.start for part in windows], form.chain.native.bits
                )
                form.decoder.decode(data, windows, grad)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{name}, bytes {offset} to {offset + length}: {error}") from error
        rows = windows[0].stop
        rates = {name: self._rate(name, rows) for name in self._unit.rates}
        return self._unit.compute(held, grad, rates)

    def _rate(self, name: str, rows: int) -> Array:
        with self._lock:
            found = self._rates.get(name)
            if found is None or len(found) < rows:
                form, tail, fetch = self._open(name)
                found = np.empty(rows, form.chain.native.stored)
                form.read(tail, [picks(range(rows), form.chunk[0])], fetch, found)
                self._rates[name] = found
            return found[:rows]

    def _open(self, name: str) -> tuple[BlockForm, Tail, Fetch]:
        with self._lock:
            if name not in self._opened:
                form = self._form.sibling(name, self._unit.chains[name])
                if self._siblings is None:
                    raise ValueError(f"it is computed from {name}, which was not given")
                tail, fetch = self._siblings(form)
                if name in self._unit.matrices:
                    form.check_rows(tail, self._axes)
                self._opened[name] = form, tail, fetch
            return self._opened[name]


def _decode_all(left: deque[Part], decode: Callable[[list[Pick], int, int, int], None]) -> None:
    """Decode chunk after chunk, until none is left; other threads may take of them, too."""
    try:
        while left:
            try:
                part = left.popleft()
            except IndexError:  # another thread has taken the last
                return
            decode(*part)
    finally:
        left.clear()  # after an error nobody need go on


def _decode_picks(data: bytes, picks: Sequence[Pick], decoder: Decoder, out: Array) -> None:
    window = tuple(pick.window for pick in picks)
    if all(pick.taken is None for pick in picks):
        decoder.decode(data, window, out[tuple(pick.place for pick in picks)])
        return
    values = np.empty([item.stop - item.start for item in window], out.dtype)
    decoder.decode(data, window, values)
    for axis, pick in enumerate(picks):
        if pick.taken is not None:
            values = values.take(pick.taken, axis)
    out[np.ix_(*[positions(pick.place) for pick in picks])] = values


def _run_offered(offer: Sequence[Callable[[], None]]) -> None:
    for work in tuple(offer):
        work()
