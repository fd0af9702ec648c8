"""The `trajstore.block` codec of Zarr v3, which stores a whole block of an array as one object.

It is the only codec of an array, so zarr passes it the selection in each block. `BlockInStore`
reads and decodes this selection, the blocks in parallel.

Source: docs/reference/format.md.
"""

from __future__ import annotations

import asyncio
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from zarr.abc.buffer import Buffer, NDBuffer
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.storage import LocalStore, StorePath

from trajstore.codec.array_selection import ArraySelection
from trajstore.codec.block import ANYWHERE, BlockForm, FewerRows, Runs, encoded_chunks, shard_parts
from trajstore.codec.chunk import Chain
from trajstore.codec.open_block import (
    BlockObject,
    LocalObject,
    OpenBlock,
    StoreObject,
    at_once,
    check_not_replaced,
    named,
    with_consequence,
)
from trajstore.errors import FormatError
from trajstore.installation import register_accessors
from trajstore.threads import default_threads, readers, submit
from trajstore.values.native_types import narrow

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec


_FOLDER = re.compile(r"(?:.*/)?([^/]+)/c[./][\d./]+")  # folder of the array, in an object's key

_ROOT = "zarr.json"

Array = npt.NDArray[Any]


class BlockInStore:
    """A selection of one block, at a key of a zarr store.

    A local file is read in the thread that decodes it. Of another store, zarr's event loop requests
    the end and the selected ranges, and a thread decodes them.
    """

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
        self._selection = ArraySelection.of(selection, form.shape)

    def from_file(self, path: str) -> Array:
        """Read the values from a local file."""
        try:
            with LocalObject(path) as source:
                return self._decoded(at_once(self._opened(source)))
        except (FileNotFoundError, FormatError) as error:
            if self._within_run:
                run = path[: -self._within_run].rstrip("/")
                check_not_replaced(run, self._form.runs, root_metadata(run))
            if isinstance(error, FormatError):
                raise
            raise self._missing() from None

    async def from_bytes(self, data: bytes) -> Array:
        """Decode the values of a whole object."""
        # A caller that needs the whole object will write it again, including its padding.
        block = await self._opened(StoreObject(None, None, data), padding=True)
        values: Array = await in_thread(self._decoded, block)
        return values

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
                    root = await (run / _ROOT).get(prototype)
                    if root is not None or not await (run / self._folder / _ROOT).exists():
                        metadata = None if root is None else root.to_bytes()
                        check_not_replaced(run.path or "the run", self._form.runs, metadata)
                raise

    async def _from_ranges(self, byte_getter: Any, prototype: Any) -> Array:
        try:
            source = await StoreObject.opened(byte_getter, prototype, self._form.tail_length)
            block = await self._opened(source)
        except FileNotFoundError:
            raise self._missing() from None
        values: Array = await in_thread(self._decoded, block)
        return values

    def _missing(self) -> FormatError:
        return FormatError(f"{self._name} {with_consequence(FewerRows('is missing'))}")

    async def _opened(self, source: BlockObject, *, padding: bool = False) -> OpenBlock:
        block = await OpenBlock.opened(
            self._name, self._form, source, self._place, self._selection, padding=padding
        )
        label = block.tail.label
        with named(self._name):
            if label.block != ANYWHERE and label.array != self._folder:
                raise ValueError(f"it is {label.place()}, expected {self._folder}")
        return block

    def _decoded(self, block: OpenBlock) -> Array:
        values = np.empty(self._selection.lengths, self._form.chain.native.stored)
        if values.size:
            block.read(values, threads=default_threads())
        return self._selection.shaped(values)


def root_metadata(run: str | os.PathLike[str]) -> bytes | None:
    """Present metadata of the root of a local run; None if its folder is gone."""
    try:
        with open(os.path.join(run, _ROOT), "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return b"" if os.path.exists(run) else None


def _place(key: str, ndim: int) -> tuple[int, int] | None:
    """Block and part of an object, from the numbers at the end of its key, or None."""
    numbers = key.replace("/", ".").rsplit(".", ndim)[1:]
    if len(numbers) != ndim or not all(number.isdecimal() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1]) if ndim > 1 else 0


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a call in one of the threads that decode."""
    return await asyncio.wrap_future(submit(readers(), work, *arguments))


BLOCK = "trajstore.block"

_REMEDY = "; a selection of a run has other shapes: write it with ds.drop_encoding().to_zarr(…)"


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
        parsed: dict[str, Any] = {}
        for name, parser in _PARSERS.items():
            try:
                parsed[name] = parser(facts[name])
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
        return cls(chain=chain, **parsed)

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
                f"{_REMEDY}"
            )
        whole = getattr(chunk_grid, "chunk_shape", self.chunk_shape)
        if any(length % part for length, part in zip(whole, self.chunk_shape, strict=True)):
            raise ValueError(f"inner chunks of {self.chunk_shape} do not divide {whole}{_REMEDY}")
        dimensions = (2, 3) if self.chain.kind == "computed" else (3,)
        if self.chain.has_forms and (
            len(shape) not in dimensions or whole[0] != self.chunk_shape[0]
        ):
            raise ValueError(
                f"got inner chunks of {self.chunk_shape} in {whole}, expected all rows and "
                f"{' or '.join(map(str, dimensions))} dimensions for the kind {self.chain.kind}"
                f"{_REMEDY}"
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
        reading = BlockInStore(form, selection, byte_getter)
        folder = local_folder(byte_getter.store) if isinstance(byte_getter, StorePath) else None
        if folder is not None:
            path = os.path.join(folder, byte_getter.path)
            values = await in_thread(reading.from_file, path)
        else:
            values = await reading.from_store(byte_getter, chunk_spec.prototype)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        shape = tuple(chunk_spec.shape)
        form = self.form(shape)
        reading = BlockInStore(form, tuple(slice(None) for _ in shape), None)
        values = await reading.from_bytes(chunk_bytes.to_bytes())
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        form = self.form(tuple(chunk_spec.shape))
        data = await in_thread(_encoded, form, chunk_array.as_numpy_array())
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


def local_folder(store: Any) -> Any:
    """Folder of a local store, or of one with the attribute ``local_root``; otherwise None."""
    return store.root if isinstance(store, LocalStore) else getattr(store, "local_root", None)


def _encoded(form: BlockForm, values: Array) -> bytes:
    """Encode a block from zarr, which does not pass its place."""
    chunks = encoded_chunks(form, narrow(values, form.chain.native))
    parts = shard_parts(form, chunks, block=ANYWHERE, part=0, rows=form.shape[0])
    return b"".join(parts)
