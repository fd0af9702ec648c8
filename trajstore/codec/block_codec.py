"""The `trajstore.block` codec of Zarr v3, which stores a whole block of an array as one object.

It is the only codec of an array, so zarr passes each selection to it. `selected_block` reads and
decodes the selection, in a thread per object, in parallel. zarr finds the codec by its entry point.

Source: docs/reference/format.md.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt
from zarr.abc.buffer import Buffer, NDBuffer
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.storage import LocalStore, StorePath

from trajstore.accessor_registration import register_accessors
from trajstore.codec.block_form import BlockForm, Runs
from trajstore.codec.block_label import ANYWHERE
from trajstore.codec.codec_chain import Chain
from trajstore.codec.selected_block import SelectedBlock, in_thread
from trajstore.codec.shard import encoded_chunks, shard_parts
from trajstore.errors import FormatError
from trajstore.values.native_types import narrow

if TYPE_CHECKING:
    # Argument of every codec; zarr up to 3.4.2 has no public name for it.
    from zarr.core.array_spec import ArraySpec

BLOCK = "trajstore.block"

_REMEDY = "; a selection of a run has other shapes: write it with ds.drop_encoding().to_zarr(…)"

Array = npt.NDArray[Any]


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
        found: dict[str, Any] = {}
        for name, parser in _PARSERS.items():
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
        reading = SelectedBlock(form, selection, byte_getter)
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
        reading = SelectedBlock(form, tuple(slice(None) for _ in shape), None)
        values = await in_thread(reading.from_bytes, chunk_bytes.to_bytes())
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
