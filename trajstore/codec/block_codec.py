"""The `trajstore.block` codec of Zarr v3, which stores a whole block of an array as one object.

It is the only codec of an array, so zarr passes each selection to it. It reads label and index from
the end of the object, raises an error for a block of another place, reads the inner chunks of the
selection, and decodes them in a thread per object, in parallel. In a local store the same thread
also reads the file. zarr finds the codec by its entry point.

Source: docs/reference/format.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from zarr.abc.buffer import Buffer, NDBuffer
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.storage import LocalStore, StorePath

from trajstore.accessor_registration import register_accessors
from trajstore.codec.block_form import (
    BlockForm,
    Fetch,
    FewerRows,
    Runs,
    Siblings,
    Tail,
    with_consequence,
)
from trajstore.codec.block_label import ANYWHERE, digest_of
from trajstore.codec.codec_chain import Chain
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
from trajstore.values.native_types import narrow

if TYPE_CHECKING:
    # Argument of every codec; zarr up to 3.4.2 has no public name for it.
    from zarr.core.array_spec import ArraySpec

__all__ = ["BLOCK", "BlockCodec", "local_folder"]

BLOCK = "trajstore.block"

_FOLDER = re.compile(r"(?:.*/)?([^/]+)/c[./][\d./]+")  # folder of the array, in an object's key
_SMALL = 16 << 10  # bytes; smaller objects are read by one request instead of two
_GAP = 64 << 10  # bytes; reading a smaller gap is faster than another request

Array = npt.NDArray[Any]
Axes = list[dict[int, Pick]]


@dataclass(frozen=True, kw_only=True)
class BlockCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
    """Array-to-bytes codec ``trajstore.block``.

    Parameters
    ----------
    array : str
        Name of the array, as in the labels.
    chunk_shape : tuple of int
        Shape of an inner chunk; divides the shape of a chunk of the array.
    chain : Chain
        Encoding of an inner chunk.
    runs : tuple of (int, str)
        Identities of the runs of the blocks, each with its first block.

    Raises
    ------
    FormatError
        During a read, if an object is missing, broken, or the block of another place.
    """

    is_fixed_size = False

    array: str
    chunk_shape: tuple[int, ...]
    chain: Chain
    runs: Runs

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Codec from the metadata of an array.

        Raises
        ------
        FormatError
            If the metadata does not describe this codec.
        """
        register_accessors()
        member, facts = "codecs.0.configuration", data.get("configuration")
        if data.get("name") != BLOCK or not isinstance(facts, dict):
            raise FormatError(
                f"zarr.json: codecs.0 is {reprlib.repr(data)}, expected {BLOCK} and a configuration"
            )
        parsers: dict[str, Callable[[Any], Any]] = {
            "array": str,
            "chunk_shape": _lengths,
            "runs": _runs,
        }
        found: dict[str, Any] = {}
        for name, parser in parsers.items():
            try:
                found[name] = parser(facts[name])
            except KeyError:
                raise FormatError(f"zarr.json: {member}.{name} is missing") from None
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"zarr.json: {member}.{name} is {reprlib.repr(facts[name])}: {error}"
                ) from error
        try:
            chain = Chain.from_facts({name: facts[name] for name in facts.keys() - _PARSERS.keys()})
        except (TypeError, ValueError) as error:
            raise FormatError(f"zarr.json: {member}: {error}") from error
        return cls(chain=chain, **found)

    def to_dict(self) -> dict[str, Any]:
        """Metadata of the codec."""
        return {
            "name": BLOCK,
            "configuration": {
                "array": self.array,
                "runs": [list(entry) for entry in self.runs],
                "chunk_shape": list(self.chunk_shape),
                **self.chain.facts(),
            },
        }

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Check the data type of the array, and that inner chunks divide its chunks.

        Raises
        ------
        ValueError
            If one does not match.
        """
        stored = self.chain.native.stored
        if dtype.to_native_dtype() != stored:
            raise ValueError(f"{BLOCK} of {self.chain.native.name} encodes {stored}, got {dtype}")
        if len(self.chunk_shape) != len(shape) or not shape:
            raise ValueError(
                f"{BLOCK} has inner chunks of {self.chunk_shape}, but the array has shape {shape}"
            )
        whole = getattr(chunk_grid, "chunk_shape", self.chunk_shape)
        if any(length % part for length, part in zip(whole, self.chunk_shape, strict=True)):
            raise ValueError(f"inner chunks of {self.chunk_shape} do not divide {whole}")
        if self.chain.has_forms and (len(shape) != 3 or whole[0] != self.chunk_shape[0]):
            raise ValueError(
                f"got inner chunks of {self.chunk_shape} in {whole}, expected all rows and three "
                f"dimensions for the kind {self.chain.kind}"
            )

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Raise NotImplementedError, as the size is not fixed. zarr never calls this method."""
        raise NotImplementedError  # as zarr's own compressing codecs

    def form(self, shape: tuple[int, ...]) -> BlockForm:
        """Storage form of blocks of that shape."""
        return _form(self, shape)

    async def _decode_partial_single(
        self, byte_getter: Any, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        form = self.form(tuple(chunk_spec.shape))
        reading = _Reading(form, selection, byte_getter)
        folder = local_folder(byte_getter.store) if isinstance(byte_getter, StorePath) else None
        if folder is not None:
            path = os.path.join(folder, byte_getter.path)
            values = await _in_thread(reading.from_file, path)
        else:
            values = await reading.from_store(byte_getter, chunk_spec.prototype)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        shape = tuple(chunk_spec.shape)
        form = self.form(shape)
        reading = _Reading(form, tuple(slice(None) for _ in shape), None)
        values = await _in_thread(reading.from_bytes, chunk_bytes.to_bytes())
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        form = self.form(tuple(chunk_spec.shape))
        data = await _in_thread(_encoded, form, chunk_array.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(data)


def _lengths(value: Any) -> tuple[int, ...]:
    return tuple(int(length) for length in value)


def _runs(value: Any) -> Runs:
    return tuple((int(at), str(run)) for at, run in value)


_PARSERS: dict[str, Callable[[Any], Any]] = {"array": str, "chunk_shape": _lengths, "runs": _runs}
"""Parsers of the members of the configuration, except those of the chain."""


@lru_cache(maxsize=256)
def _form(codec: BlockCodec, shape: tuple[int, ...]) -> BlockForm:
    return BlockForm(
        array=codec.array,
        chain=codec.chain,
        shape=shape,
        chunk=codec.chunk_shape,
        runs=codec.runs,
    )


class _Reading:
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
        if len(form.shape) == 1:
            name = ".".join(name.split(".")[:2])
        return f"{parent}/{form.array}/{name}" if parent else f"{form.array}/{name}"

    def _sibling_place(self, form: BlockForm) -> tuple[int, int] | None:
        if self._place is None or len(form.shape) > 1:
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
        values: Array = await _in_thread(partial(self._decoded, tail, fetch, siblings=given))
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
        if len(form.shape) < len(axes):  # per-step numbers, which have one chunk
            axes = [picks(range(form.shape[0]), form.shape[0])]
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


def local_folder(store: Any) -> Any:
    """Folder of a local store, or of one with the attribute ``local_root``; otherwise None."""
    return store.root if isinstance(store, LocalStore) else getattr(store, "local_root", None)


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


def _encoded(form: BlockForm, values: Array) -> bytes:
    """Encode a block from zarr, which does not pass its place."""
    bits = narrow(values, form.chain.native)
    pieces, digests, entries, offset = [], [], [], 0
    for at in itertools.product(*map(range, form.grid)):
        window = tuple(
            slice(number * length, (number + 1) * length)
            for number, length in zip(at, form.chunk, strict=True)
        )
        piece = form.chain.encode(bits[window], form.chunk)
        pieces.append(piece)
        digests.append(hashlib.sha256(piece).digest())
        entries.append((offset, len(piece)))
        offset += len(piece)
    label = form.label(block=ANYWHERE, part=0, rows=form.shape[0], digest=digest_of(digests))
    return b"".join([*pieces, form.tail(entries, label)])


@cache
def _threads() -> ThreadPoolExecutor:
    """Permanent threads, which keep their scratch memory."""
    return ThreadPoolExecutor(default_threads(), "trajstore-reader")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not exist in a child


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wrap_future(submit(_threads(), work, *arguments))
