"""A block that is open for reading: an object, its label and index, and what will be read of it.

The end of an object is read first, as it says where the chunks are. Then only the inner chunks of
the selection are read. Rows that are computed from other arrays need the same block of these, too.

Only an object in a zarr store needs an event loop, for `prefetch` and `sibling`. A local file and
bytes answer at once, so `at_once` runs the same code in the thread that decodes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.storage import StorePath

from trajstore.codec.array_selection import (
    ArraySelection,
    Axes,
    AxisPart,
    positions,
)
from trajstore.codec.block import BlockForm, FewerRows, Runs, Tail
from trajstore.codec.chunk import Head
from trajstore.codec.computed_rows import cache, unit_of
from trajstore.errors import FormatError, RunNotFound
from trajstore.threads import share

_SMALL = 16 << 10  # bytes; smaller objects are read by one request instead of two
_GAP = 64 << 10  # bytes; reading a smaller gap is faster than another request

T = TypeVar("T")


class BlockObject(Protocol):
    """An open object. If it is missing, opening or reading it raises FileNotFoundError."""

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object."""
        ...

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prepare to read these ranges, each from a first byte to the one after the last."""
        return

    async def sibling(self, key: str, end: int) -> BlockObject:
        """Open another object of the run, of which `end` last bytes will be read."""
        ...

    async def for_each(
        self, work: Callable[[str], Coroutine[Any, Any, T]], names: Sequence[str]
    ) -> list[T]:
        """Results of a coroutine for each name, in order. If they wait, they wait together."""
        return [await work(name) for name in names]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("the coroutine waits, so it needs an event loop")


class LocalObject(BlockObject):
    """A local file. Writers never change a file; they replace it.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    size : int
        Size in bytes.

    Raises
    ------
    FileNotFoundError
        If it does not exist.
    OSError
        If it is not a regular file, such as a pipe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._siblings: list[LocalObject] = []
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe could block
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter file."""
        return self.read(max(self.size - length, 0), min(length, self.size))

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the file."""
        left = self.size - offset  # an index may state any number
        return os.pread(self._descriptor, min(length, left), offset) if left > 0 else b""

    async def sibling(self, key: str, end: int) -> LocalObject:
        """Open another file of the run. It is closed with this one."""
        run = os.path.dirname(os.path.dirname(self._path))
        self._siblings.append(LocalObject(os.path.join(run, key)))
        return self._siblings[-1]

    def close(self) -> None:
        """Close the file, and those opened from it."""
        # Nothing was written, so an error of close does not affect the bytes that were read.
        with suppress(OSError):
            os.close(self._descriptor)
        for sibling in self._siblings:
            sibling.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StoreObject(BlockObject):
    """An object in a zarr store, with its end and the ranges that were prefetched.

    Created by `opened`, or from all its bytes, without a place.
    """

    def __init__(self, place: Any, prototype: Any, whole: bytes | None = None) -> None:
        self._place = place
        self._prototype = prototype
        self._pieces = [] if whole is None else [(0, whole)]  # with their offsets
        self._end = whole or b""

    @classmethod
    async def opened(cls, place: Any, prototype: Any, end: int) -> Self:
        """Read the last `end` bytes of an object, or all of a small one.

        Raises
        ------
        FileNotFoundError
            If it does not exist.
        """
        opened = cls(place, prototype)
        opened._end = await opened._get(SuffixByteRequest(end + _SMALL))
        if len(opened._end) < end + _SMALL:  # this is the whole object
            opened._pieces.append((0, opened._end))
        return opened

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        return self._end[-length:]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of a prefetched range; fewer at the end of the object."""
        for start, data in self._pieces:
            if start <= offset < start + len(data):
                return data[offset - start : offset - start + length]
        return b""

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read these ranges, the adjacent and nearly adjacent ones together."""
        if self._pieces:
            return
        joined = _joined(ranges)
        requests = (self._get(RangeByteRequest(start, stop)) for start, stop in joined)
        parts = await asyncio.gather(*requests)
        self._pieces = [(start, data) for (start, _), data in zip(joined, parts, strict=True)]

    async def sibling(self, key: str, end: int) -> StoreObject:
        """Open another object of the run."""
        if not isinstance(self._place, StorePath):
            raise FileNotFoundError(errno.ENOENT, "the store has no paths", key)
        run = self._place.path.rpartition("/")[0].rpartition("/")[0]
        place = StorePath(self._place.store, f"{run}/{key}" if run else key)
        return await StoreObject.opened(place, self._prototype, end)

    async def for_each(
        self, work: Callable[[str], Coroutine[Any, Any, T]], names: Sequence[str]
    ) -> list[T]:
        """Results of a coroutine for each name, in order, with all requests at the same time."""
        return await asyncio.gather(*map(work, names))

    async def _get(self, request: ByteRequest) -> bytes:
        content = await self._place.get(self._prototype, byte_range=request)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._place))
        data: bytes = content.to_bytes()
        return data


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + _GAP:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


Array = npt.NDArray[Any]
Place = tuple[int, int] | None


def with_consequence(error: ValueError) -> str:
    """Message about a block, with the consequence for the run."""
    if isinstance(error, FewerRows):
        return (
            f"{error}; if the run was resumed from an earlier row since it was opened, open it "
            "again; otherwise it is damaged"
        )
    return f"{error}; the run is damaged"


def check_not_replaced(
    run: object,
    runs: Runs,
    metadata: bytes | None,
    since: str = "since it was opened; open it again",
    *,
    is_written: bool = False,
) -> None:
    """Check that the run at a place is still the one that was opened, or that is being written.

    Parameters
    ----------
    run : object
        The place, for the message.
    runs : Runs
        Identity of the run.
    metadata : bytes or None
        Present metadata of the root; None if there is no run any more.
    since : str
        End of the message.
    is_written : bool
        True if metadata without an identity are not those of the run. For a reader, they can be
        damaged, or a copy by another program.

    Raises
    ------
    RunNotFound
        If it is gone, or another run has its place.
    """
    try:
        identity = json.loads(metadata or b"")["attributes"]["runs"][-1][1]
    except (ValueError, LookupError, TypeError):
        identity = None
    is_unknown = identity is None and metadata is not None and not is_written
    if identity != runs[-1][1] and not is_unknown:
        raise RunNotFound(f"{run} was moved, removed or replaced {since}")


@contextmanager
def named(block: str) -> Iterator[None]:
    """Name a block in the errors of a ``with`` block.

    Raises
    ------
    FormatError
        Instead of ValueError.
    """
    try:
        yield
    except FormatError:  # of another block
        raise
    except ValueError as error:
        raise FormatError(f"{block} is not usable: {with_consequence(error)}") from error


@dataclass(frozen=True, kw_only=True)
class OpenBlock:
    """A block whose label and index were read. Created by `opened`.

    Attributes
    ----------
    name : str
        Name of the block in errors.
    form : BlockForm
    object : BlockObject
    tail : Tail
    axes : Axes
        What will be read of its inner chunks; empty to read no values.
    others : mapping of str to OpenBlock
        The same block of the arrays from which the selected rows are computed.
    """

    name: str
    form: BlockForm
    object: BlockObject
    tail: Tail
    axes: Axes = ()
    others: Mapping[str, OpenBlock] = field(default_factory=dict)

    @classmethod
    async def opened(
        cls,
        name: str,
        form: BlockForm,
        source: BlockObject,
        place: Place,
        selection: ArraySelection | None = None,
        *,
        padding: bool = False,
    ) -> Self:
        """Read label and index of an object, and prepare to read a selection.

        Parameters
        ----------
        name : str
        form : BlockForm
        source : BlockObject
        place : (int, int) or None
            Expected block and part; None if unknown.
        selection : ArraySelection, optional
            Positions in the block that will be read (default: none).
        padding : bool
            True to allow the selection of invalid rows.

        Raises
        ------
        FormatError
            If label or index is broken, the block is of another place, or lacks selected rows.
            Also if another array, from which rows are computed, is missing or broken.
        FileNotFoundError
            If the object is missing.
        """
        axes = () if selection is None else selection.chunks(form.chunk)
        with named(name):
            tail = form.read_tail(source.end(form.tail_length), place)
            block = cls(name=name, form=form, object=source, tail=tail, axes=axes)
            if axes and not padding:
                form.check_rows(tail, axes)
        ranges = await block._prefetched() if axes else []
        if form.chain.kind != "computed" or not any(
            form.decoder.is_computed(source.read(start, 1)) for start, _ in ranges
        ):
            return block
        others = [other for other in form.siblings if other != form.array]
        blocks = await source.for_each(partial(block._other, place), others)
        return replace(block, others=dict(zip(others, blocks, strict=True)))

    async def _prefetched(self) -> list[tuple[int, int]]:
        """Byte ranges of the selection, ready to be read."""
        entries = [entry for _, entry in self.form.selected_chunks(self.axes)]
        ranges = [(start, start + length) for start, length in self.tail.index[entries].tolist()]
        await self.object.prefetch(ranges)
        return ranges

    async def _other(self, place: Place, array: str) -> OpenBlock:
        """The same block of another array, from which rows are computed."""
        form, axes = self.form.siblings[array], self.axes
        if array in unit_of(self.form.chain.rule).rates:  # which have one chunk a block
            place = place and (place[0], 0)
            axes = ArraySelection.of((), form.shape).chunks(form.chunk)
        key = form.key(*(place or (0, 0)))
        name = f"{self.name} is computed from {array} ({key}), which"
        try:
            source = await self.object.sibling(key, form.tail_length)
            with named(name):
                tail = form.read_tail(source.end(form.tail_length), place)
                form.check_rows(tail, self.axes)
            other = OpenBlock(name=name, form=form, object=source, tail=tail, axes=axes)
            await other._prefetched()
        except FileNotFoundError:
            raise FormatError(
                f"{name} is missing; copy the whole run, or export it with: trajstore export RUN "
                "--encoding delta -o COPY.zarr"
            ) from None
        return other

    def read(self, out: Array, *, threads: int = 1) -> None:
        """Decode the selection for which the block was opened.

        Parameters
        ----------
        out : ndarray of ``native.stored`` or ``native.bits``
            Receives the values, or their native bits.
        threads : int
            Most threads that decode chunks.

        Raises
        ------
        FormatError
            If a chunk is broken.
        """
        share(self.tasks(out), threads)

    def tasks(self, out: Array) -> Iterator[Callable[[], None]]:
        """Tasks of `read`, one for each chunk. They raise its errors."""
        unit = _ComputedBlock(self) if self.others else None
        for parts, entry in self.form.selected_chunks(self.axes):
            yield partial(self._decode, unit, out, parts, entry)

    def chunk(self, entry: int) -> bytes:
        """Read an inner chunk by its number.

        Raises
        ------
        ValueError
            If the object ends before it.
        """
        offset, length = self.tail.index[entry].tolist()
        data = self.object.read(offset, length)
        if len(data) != length:
            raise ValueError("the object ends before it")
        return data

    def _decode(
        self, unit: _ComputedBlock | None, out: Array, parts: Sequence[AxisPart], entry: int
    ) -> None:
        decoder = self.form.decoder
        with named(self.name):
            try:
                data = self.chunk(entry)
                window = tuple(part.window for part in parts)
                fill = partial(decoder.decode, data, window)
                if unit is not None and decoder.is_computed(data):
                    rows = unit.rows(window, entry)[self.form.array]
                    fill = partial(decoder.put, rows[window[0]])
                _place(fill, parts, out)
            except FormatError:  # of another array
                raise
            except (ValueError, RuntimeError, OverflowError) as error:
                raise ValueError(f"{self._bytes(entry)}: a broken chunk ({error})") from error

    def _bytes(self, entry: int) -> str:
        offset, length = self.tail.index[entry].tolist()
        return f"bytes {offset} to {offset + length}"


class _ComputedBlock:
    """Computed rows of the arrays of a unit, during one read."""

    def __init__(self, block: OpenBlock) -> None:
        self._form = block.form
        self._unit = unit_of(block.form.chain.rule)
        self._blocks = {**block.others, block.form.array: block}
        self._rates: dict[str, Array] = {}
        self._lock = Lock()

    def rows(self, window: tuple[slice, ...], entry: int) -> dict[str, Array]:
        """Rows of all arrays of the unit, from the first row of a chunk.

        Parameters
        ----------
        window : tuple of slice
            Part of the chunk.
        entry : int
            Number of the chunk in the object.
        """
        windows = (slice(0, window[0].stop), *window[1:])
        names = (*self._unit.matrices, *self._unit.rates)
        labels = tuple(self._blocks[name].tail.label.digest for name in names)
        bounds = tuple((part.start, part.stop) for part in windows[1:])
        # Other rules may have stored the same bytes.
        stored = self._form.chain.rule, self._form.shape, self._form.chunk
        key = (stored, labels, entry, bounds)
        return cache.get(key, partial(self._compute, entry, windows), windows[0].stop)

    def _compute(self, entry: int, windows: tuple[slice, ...]) -> dict[str, Array]:
        stored: dict[str, tuple[Head | None, Array]] = {}
        for name in self._unit.matrices:
            block = self._blocks[name]
            try:
                if name == self._unit.gradient:
                    grad = self._gradient(block, entry, windows)
                else:
                    stored[name] = block.form.decoder.stored_form(block.chunk(entry), windows)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{name}, {block._bytes(entry)}: {error}") from error
        rates = {name: self._rate(name, windows[0].stop) for name in self._unit.rates}
        # The chunks of a part are in the order of the second dimension.
        form, part = self._form, self._blocks[self._form.array].tail.label.part
        first = part * form.shape[1] + entry * form.chunk[1] + windows[1].start
        return self._unit.compute(stored, grad, rates, first)

    def _gradient(self, block: OpenBlock, entry: int, windows: tuple[slice, ...]) -> Array:
        """Bits of the gradient.

        A part of the tokens needs the decompression of all. So the whole chunk is decoded, and
        cached for other tokens.
        """
        form, name = block.form, block.form.array
        rows, *others = windows[0].stop, *windows[1:]

        def decoded() -> dict[str, Array]:
            grad = np.empty((rows, *form.chunk[1:]), form.chain.native.bits)
            whole = tuple(slice(0, length) for length in grad.shape)
            form.decoder.decode(block.chunk(entry), whole, grad)
            return {name: grad}

        if all(part == slice(0, n) for part, n in zip(others, form.chunk[1:], strict=True)):
            return decoded()[name]
        key = (form.chain, form.shape, form.chunk, block.tail.label.digest, entry)
        return np.ascontiguousarray(cache.get(key, decoded, rows)[name][:rows, *others])

    def _rate(self, name: str, rows: int) -> Array:
        with self._lock:
            values = self._rates.get(name)
            if values is None or len(values) < rows:
                block = self._blocks[name]
                lengths = (rows, *block.form.shape[1:])
                values = np.empty(lengths, block.form.chain.native.stored)
                whole = ArraySelection.of((), lengths).chunks(block.form.chunk)
                replace(block, axes=whole).read(values)
                self._rates[name] = values
            return values[:rows]


def _place(fill: Callable[[Array], None], parts: Sequence[AxisPart], out: Array) -> None:
    """Let `fill` write the values of a window, and place the selected ones."""
    if all(part.taken is None for part in parts):
        fill(out[tuple(part.place for part in parts)])
        return
    values = np.empty([part.window.stop - part.window.start for part in parts], out.dtype)
    fill(values)
    for axis, part in enumerate(parts):
        if part.taken is not None:
            values = values.take(part.taken, axis)
    out[np.ix_(*[positions(part.place) for part in parts])] = values
