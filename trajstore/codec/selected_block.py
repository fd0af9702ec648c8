"""A selection of one block, read from its object and decoded.

Label and index come from the end of the object; a block of another place is an error. Only the
inner chunks of the selection are read. A local file is read in the thread that decodes it. Rows
that are computed from other arrays need the objects of these, too.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.storage import StorePath

from trajstore.codec.block_form import (
    BlockForm,
    Fetch,
    FewerRows,
    Siblings,
    Tail,
    with_consequence,
)
from trajstore.codec.block_label import ANYWHERE
from trajstore.codec.computed_rows import unit_of
from trajstore.codec.selected_parts import (
    Pick,
    hull_of,
    outer_positions,
    picks,
    within_hull,
)
from trajstore.errors import FormatError
from trajstore.threads import default_threads, submit

__all__ = ["SelectedBlock", "in_thread"]

_FOLDER = re.compile(r"(?:.*/)?([^/]+)/c[./][\d./]+")  # folder of the array, in an object's key
_SMALL = 16 << 10  # bytes; smaller objects are read by one request instead of two
_GAP = 64 << 10  # bytes; reading a smaller gap is faster than another request

Array = npt.NDArray[Any]
Axes = list[dict[int, Pick]]


class SelectedBlock:
    """A selection of one block that is read from an object."""

    def __init__(self, form: BlockForm, selection: Any, byte_getter: Any) -> None:
        self._form = form
        self._key = str(getattr(byte_getter, "path", ""))
        self._place = _place(self._key, len(form.shape))
        folder = _FOLDER.fullmatch(self._key)
        self._folder = form.array if folder is None else folder[1]
        selection = selection if isinstance(selection, tuple) else (selection,)
        selection = (*selection, *[slice(None)] * (len(form.shape) - len(selection)))
        outer = outer_positions(selection, form.shape)
        self._points: tuple[Any, ...] | None = None
        if outer is None:
            # The smallest box that contains the points is read; then the points are selected.
            hulls = [hull_of(*pair) for pair in zip(selection, form.shape, strict=True)]
            self._points = tuple(
                within_hull(item, hull) for item, hull in zip(selection, hulls, strict=True)
            )
            along: Sequence[Any] = hulls
            self._shape = tuple(len(hull) for hull in hulls)
        else:
            along, self._shape = outer
        self._lengths = [len(axis) for axis in along]
        self._axes: Axes = []
        if all(self._lengths):
            self._axes = [picks(axis, part) for axis, part in zip(along, form.chunk, strict=True)]

    def from_file(self, path: str) -> Array:
        """Read the values from a local file."""
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing() from None
        try:
            size = os.fstat(file).st_size
            length = self._form.tail_length
            data = os.pread(file, min(length, size), max(size - length, 0))
            with ExitStack() as opened:
                return self._decoded(
                    self._tail(data),
                    lambda offset, length: os.pread(file, length, offset),
                    siblings=partial(self._sibling_file, opened, path),
                )
        finally:
            os.close(file)

    def _sibling_file(self, opened: ExitStack, path: str, form: BlockForm) -> tuple[Tail, Fetch]:
        """Open the same block of another array, from which rows are computed."""
        sibling = self._sibling_key(path, form)
        try:
            file = os.open(sibling, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing_sibling(form, sibling) from None
        opened.callback(os.close, file)
        size = os.fstat(file).st_size
        data = os.pread(file, form.tail_length, max(size - form.tail_length, 0))
        try:
            tail = form.read_tail(data, self._sibling_place(form))
        except ValueError as error:
            raise self._broken_sibling(form, sibling, error) from error
        return tail, lambda offset, length: os.pread(file, length, offset)

    def _sibling_key(self, key: str, form: BlockForm) -> str:
        folder, _, name = key.rpartition("/")
        parent = folder.rpartition("/")[0]
        if self._is_rate(form):
            name = ".".join([*name.split(".")[:2], *["0"] * (len(form.shape) - 1)])
        return f"{parent}/{form.array}/{name}" if parent else f"{form.array}/{name}"

    def _is_rate(self, form: BlockForm) -> bool:
        """True for per-step numbers, which have one chunk a block."""
        return form.array not in unit_of(self._form.chain.rule).matrices

    def _sibling_place(self, form: BlockForm) -> tuple[int, int] | None:
        if self._place is None or not self._is_rate(form):
            return self._place
        return self._place[0], 0

    def _missing_sibling(self, form: BlockForm, key: str) -> FormatError:
        return FormatError(
            f"{self._named()} is computed from {form.array}, which is missing ({key}); copy the "
            "whole run, or export it with: trajstore export RUN --encoding delta -o COPY.zarr"
        )

    def _broken_sibling(self, form: BlockForm, key: str, error: ValueError) -> FormatError:
        return FormatError(
            f"{self._named()} is computed from {form.array} ({key}), which is not usable: "
            f"{with_consequence(error)}"
        )

    def from_bytes(self, data: bytes) -> Array:
        """Decode the values of a whole object."""
        tail = self._tail(data[-self._form.tail_length :])
        # A caller that needs the whole object will write it again, including its padding.
        return self._decoded(tail, partial(_part_of, data), padding=True)

    async def from_store(self, byte_getter: Any, prototype: Any) -> Array:
        """Read the values by ranges of an object, in any store."""
        try:
            return await self._from_ranges(byte_getter, prototype)
        except FormatError:
            # A growing block is replaced, possibly between two of the requests.
            return await self._from_ranges(byte_getter, prototype)

    async def _from_ranges(self, byte_getter: Any, prototype: Any) -> Array:
        tail, fetch = await self._fetched(byte_getter, prototype, self._form)
        siblings: dict[str, tuple[Tail, Fetch]] | None = None
        if isinstance(byte_getter, StorePath) and self._needs_siblings(tail, fetch):
            unit = unit_of(self._form.chain.rule)
            forms = [
                self._form.sibling(name, unit.chains[name])
                for name in (*unit.matrices, *unit.rates)
                if name != self._form.array
            ]
            places = [
                StorePath(byte_getter.store, self._sibling_key(byte_getter.path, form))
                for form in forms
            ]
            found = await asyncio.gather(
                *(
                    self._fetched(place, prototype, form)
                    for place, form in zip(places, forms, strict=True)
                )
            )
            siblings = {form.array: each for form, each in zip(forms, found, strict=True)}
        given = None if siblings is None else lambda form: siblings[form.array]
        values: Array = await in_thread(partial(self._decoded, tail, fetch, siblings=given))
        return values

    def _needs_siblings(self, tail: Tail, fetch: Fetch) -> bool:
        """True if a selected chunk must be computed from other arrays."""
        decoder = self._form.decoder
        return self._form.chain.kind == "computed" and any(
            decoder.is_computed(fetch(start, 1)) for start, _ in self._ranges(tail, self._form)
        )

    async def _fetched(
        self, byte_getter: Any, prototype: Any, form: BlockForm
    ) -> tuple[Tail, Fetch]:
        """Read label, index and the selected inner chunks of an object."""
        own = form is self._form
        length = form.tail_length
        found = await byte_getter.get(prototype, byte_range=SuffixByteRequest(length + _SMALL))
        if found is None:
            raise self._missing() if own else self._missing_sibling(form, byte_getter.path)
        end = found.to_bytes()
        place = self._place if own else self._sibling_place(form)
        try:
            tail = self._tail(end[-length:]) if own else form.read_tail(end[-length:], place)
        except FormatError:
            raise
        except ValueError as error:
            raise self._broken_sibling(form, byte_getter.path, error) from error
        if len(end) < length + _SMALL:  # this is the whole object
            return tail, partial(_part_of, end)
        stretches = _stretches(self._ranges(tail, form))
        parts = await asyncio.gather(
            *(
                byte_getter.get(prototype, byte_range=RangeByteRequest(start, stop))
                for start, stop in stretches
            )
        )
        if any(part is None for part in parts):
            raise self._missing() if own else self._missing_sibling(form, byte_getter.path)
        held: list[tuple[int, int, bytes]] = [
            (start, stop, part.to_bytes())
            for (start, stop), part in zip(stretches, parts, strict=True)
        ]

        def fetch(offset: int, length: int) -> bytes:
            start, _, data = next(item for item in held if item[0] <= offset < item[1])
            return data[offset - start : offset - start + length]

        return tail, fetch

    def _ranges(self, tail: Tail, form: BlockForm) -> list[tuple[int, int]]:
        if not self._axes:
            return []
        axes = self._axes
        if form is not self._form and self._is_rate(form):
            axes = [picks(range(length), length) for length in form.shape]
        else:
            try:
                form.check_rows(tail, axes)
            except ValueError as error:
                raise self._broken(error) from error
        wanted = form.wanted(tail, axes)
        return [(offset, offset + length) for _, _, offset, length in wanted]

    def _decoded(
        self,
        tail: Tail,
        fetch: Fetch,
        *,
        padding: bool = False,
        siblings: Siblings | None = None,
    ) -> Array:
        out = np.empty(self._lengths, self._form.chain.native.stored)
        if self._axes:
            try:
                self._form.read(
                    tail,
                    self._axes,
                    fetch,
                    out,
                    padding=padding,
                    helpers=_threads(),
                    siblings=siblings,
                )
            except FormatError:  # of another array
                raise
            except ValueError as error:
                raise self._broken(error) from error
        values = out.reshape(self._shape)
        return values if self._points is None else np.asarray(values[self._points])

    def _tail(self, data: bytes) -> Tail:
        """Read label and index, and check that the object belongs to this array."""
        try:
            tail = self._form.read_tail(data, self._place)
            label = tail.label
            if label.block != ANYWHERE and label.array != self._folder:
                raise ValueError(f"it is {label.place()}, expected {self._folder}")
        except ValueError as error:
            raise self._broken(error) from error
        return tail

    def _missing(self) -> FormatError:
        return FormatError(f"{self._named()} {with_consequence(FewerRows('is missing'))}")

    def _broken(self, error: ValueError) -> FormatError:
        return FormatError(f"{self._named()} is not usable: {with_consequence(error)}")

    def _named(self) -> str:
        where = f" ({self._key})" if self._key else ""
        block = "a block" if self._place is None else f"block {self._place[0]}"
        return f"{self._form.array}, {block}{where}"


def _part_of(data: bytes, offset: int, length: int) -> bytes:
    return data[offset : offset + length]


def _place(key: str, ndim: int) -> tuple[int, int] | None:
    """Block and part of an object, from the numbers at the end of its key, or None."""
    numbers = key.replace("/", ".").rsplit(".", ndim)[1:]
    if len(numbers) != ndim or not all(number.isdecimal() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1]) if ndim > 1 else 0


def _stretches(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Byte ranges, with adjacent and nearly adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + _GAP:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


@cache
def _threads() -> ThreadPoolExecutor:
    """Permanent threads, which keep their scratch memory."""
    return ThreadPoolExecutor(default_threads(), "trajstore-reader")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not exist in a child


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a call in one of the threads that decode."""
    return await asyncio.wrap_future(submit(_threads(), work, *arguments))
