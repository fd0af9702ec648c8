"""A selection of one block by zarr, read from its object and decoded.

A local file is read in the thread that decodes it. Of another store, zarr's event loop requests the
end and the selected ranges, and a thread decodes them.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from zarr.storage import StorePath

from trajstore.codec.block_form import BlockForm, FewerRows
from trajstore.codec.block_label import ANYWHERE
from trajstore.codec.block_object import BlockObject, BytesObject, LocalObject, StoreObject, at_once
from trajstore.codec.open_block import OpenBlock, check_not_replaced, named, with_consequence
from trajstore.codec.selected_parts import (
    Pick,
    hull_of,
    outer_positions,
    picks,
    within_hull,
)
from trajstore.errors import FormatError
from trajstore.threads import default_threads, submit

_FOLDER = re.compile(r"(?:.*/)?([^/]+)/c[./][\d./]+")  # folder of the array, in an object's key

_ROOT = "zarr.json"

Array = npt.NDArray[Any]
Axes = list[dict[int, Pick]]


class SelectedBlock:
    """A selection of one block that is read from an object."""

    def __init__(self, form: BlockForm, selection: Any, byte_getter: Any) -> None:
        self._form = form
        key = str(getattr(byte_getter, "path", ""))
        self._place = _place(key, len(form.shape))
        folder = _FOLDER.fullmatch(key)
        self._folder = form.array if folder is None else folder[1]
        # Length of the end of the key that follows the run, if the array is in a group.
        self._within_run = 0 if folder is None else len(key) - folder.start(1)
        block = "a block" if self._place is None else f"block {self._place[0]}"
        self._name = f"{form.array}, {block}{f' ({key})' if key else ''}"
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
            with self._named_if_missing(), LocalObject(path) as source:
                return self._decoded(at_once(self._opened(source)))
        except FormatError:
            if self._within_run:
                run = path[: -self._within_run].rstrip("/")
                check_not_replaced(run, self._form, root_metadata(run))
            raise

    def from_bytes(self, data: bytes) -> Array:
        """Decode the values of a whole object."""
        # A caller that needs the whole object will write it again, including its padding.
        return self._decoded(at_once(self._opened(BytesObject(data), padding=True)))

    async def from_store(self, byte_getter: Any, prototype: Any) -> Array:
        """Read the values by ranges of an object, in any store."""
        try:
            return await self._from_ranges(byte_getter, prototype)
        except FormatError:
            # A growing block is replaced, possibly between two of the requests.
            try:
                return await self._from_ranges(byte_getter, prototype)
            except FormatError:
                if self._within_run and isinstance(byte_getter, StorePath):
                    run = StorePath(byte_getter.store, byte_getter.path[: -self._within_run])
                    found = await (run / _ROOT).get(prototype)
                    if found is not None or not await (run / self._folder / _ROOT).exists():
                        metadata = None if found is None else found.to_bytes()
                        check_not_replaced(run.path or "the run", self._form, metadata)
                raise

    async def _from_ranges(self, byte_getter: Any, prototype: Any) -> Array:
        with self._named_if_missing():
            length = self._form.tail_length
            source = await StoreObject.opened(byte_getter, prototype, length)
            block = await self._opened(source)
        values: Array = await in_thread(self._decoded, block)
        return values

    async def _opened(self, source: BlockObject, *, padding: bool = False) -> OpenBlock:
        block = await OpenBlock.opened(
            self._name, self._form, source, self._place, self._axes, padding=padding
        )
        label = block.tail.label
        with named(self._name):
            if label.block != ANYWHERE and label.array != self._folder:
                raise ValueError(f"it is {label.place()}, expected {self._folder}")
        return block

    def _decoded(self, block: OpenBlock) -> Array:
        out = np.empty(self._lengths, self._form.chain.native.stored)
        if self._axes:
            block.read(self._axes, out, helpers=_threads())
        values = out.reshape(self._shape)
        return values if self._points is None else np.asarray(values[self._points])

    @contextmanager
    def _named_if_missing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FormatError(f"{self._name} {with_consequence(FewerRows('is missing'))}") from None


def root_metadata(run: str | os.PathLike[str]) -> bytes | None:
    """Present metadata of the root of a local run; None if its folder is gone."""
    try:
        with open(os.path.join(run, _ROOT), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b"" if os.path.exists(run) else None


def _place(key: str, ndim: int) -> tuple[int, int] | None:
    """Block and part of an object, from the numbers at the end of its key, or None."""
    numbers = key.replace("/", ".").rsplit(".", ndim)[1:]
    if len(numbers) != ndim or not all(number.isdecimal() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1]) if ndim > 1 else 0


@cache
def _threads() -> ThreadPoolExecutor:
    """Permanent threads, which keep their scratch memory."""
    return ThreadPoolExecutor(default_threads(), "trajstore-reader")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not exist in a child


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a call in one of the threads that decode."""
    return await asyncio.wrap_future(submit(_threads(), work, *arguments))
