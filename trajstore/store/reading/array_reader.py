"""Stored arrays, read without zarr: values, native bits, labels, indices.

`open_run` reads values without zarr's event loop. Exporters and resuming writers read native bits
without a conversion to float32, and `verify` reads the shards themselves.

Writers import this module, so it imports no xarray; see `trajstore.store.reading.tiled_reader`.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from trajstore.codec.array_selection import ArraySelection
from trajstore.codec.block import BlockForm, UnitChunks, digest_of, encoded_chunks
from trajstore.codec.block_codec import BlockCodec, root_metadata
from trajstore.codec.chunk import Chain
from trajstore.codec.computed_rows import changing_settings, unit_of
from trajstore.codec.open_block import OpenBlock, at_once, check_not_replaced
from trajstore.errors import FormatError
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.storage.atomic import opened
from trajstore.store.storage.remote_path import METADATA_KEY, Location, RunPath, location
from trajstore.threads import share
from trajstore.values.native_types import NativeType, as_bits

Array = npt.NDArray[Any]

_OPEN = 64  # files that one selection holds open


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array of a run, with its shape at the time it was opened.

    Attributes
    ----------
    path : Path or RemotePath
        Path of the run.
    name : str
    shape : tuple of int
        Shape of the array.
    form : BlockForm
        Storage form of the shards.
    threads : int
        Most threads that read one selection.
    """

    path: Location
    name: str
    shape: tuple[int, ...]
    form: BlockForm
    threads: int = 1

    @property
    def chain(self) -> Chain:
        """Encoding of an inner chunk."""
        return self.form.chain

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape of an inner chunk."""
        return self.form.chunk

    @property
    def shard(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return self.form.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.chain.native.stored

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def parts(self) -> int:
        """Number of shards of a block."""
        return -(-self.shape[1] // self.shard[1]) if self.ndim > 1 else 1

    def key(self, block: int, part: int) -> str:
        """Key of a shard in the run."""
        return self.form.key(block, part)

    def bits(self, key: tuple[slice, ...]) -> Array:
        """Read the bits of a selection by slices, in the type of the chain.

        Per-step scalars are stored in the wider type, and so are their bits.

        Raises
        ------
        FormatError
            If a shard is missing, broken, or the shard of another place.
        """
        return self._read(key, self.chain.native.bits)

    def values(self, key: tuple[slice, ...]) -> Array:
        """Read the values of a selection by slices, equal to those that zarr reads.

        Raises
        ------
        FormatError
            If a shard is missing, broken, or the shard of another place.
        """
        return self._read(key, self.chain.native.stored)

    def native_bits(self, rows: slice, native: NativeType) -> Array:
        """Read the bits of some rows, in the recorded type.

        Raises
        ------
        FormatError
            If a shard is missing, broken, or the shard of another place.
        InvalidArgument
            If a value does not fit into that type.
        """
        if self.chain.native == native:
            return self.bits((rows,))
        return as_bits(self.values((rows,)), native, self.name)

    @contextmanager
    def opened(
        self, block: int, part: int, selection: ArraySelection | None = None
    ) -> Iterator[OpenBlock]:
        """Open a shard, and read its label and index.

        Parameters
        ----------
        block, part : int
        selection : ArraySelection, optional
            Positions in the shard that will be read; see `OpenBlock.opened`.

        Raises
        ------
        FormatError
            If it is missing or broken, or the shard of another place.
        RunNotFound
            If the whole run was removed or replaced.
        """
        path = self.path / self.key(block, part)
        name = f"{self.name}, block {block} ({path})"
        try:
            with opened(path) as source:
                yield at_once(OpenBlock.opened(name, self.form, source, (block, part), selection))
        except (FileNotFoundError, FormatError) as error:
            check_not_replaced(self.path, self.form.runs, present_root(self.path))
            if isinstance(error, FormatError):
                raise
            raise FormatError(
                f"{self.name}, block {block}: the shard {path} is missing; restore a sound run "
                f"with: trajstore repair {shlex.quote(str(self.path))}"
            ) from None

    def digest_of_rows(self, block: int, part: int, rows: int) -> bytes:
        """Digest of a shard reduced to its first `rows` rows, computed from these rows.

        Raises
        ------
        FormatError
            If the shard is missing, broken, or the shard of another place.
        """
        first = block * self.shard[0]
        key = [slice(first, first + rows)]
        if self.ndim > 1:
            key.append(slice(part * self.shard[1], (part + 1) * self.shard[1]))
        if self.chain.kind == "computed":
            return self._computed_digest(tuple(key))
        chunks = encoded_chunks(self.form, self.bits(tuple(key)))
        return digest_of(digest for _, digest in chunks)

    def _computed_digest(self, key: tuple[slice, ...]) -> bytes:
        """`digest_of_rows` for rows that are computed from other arrays."""
        unit = unit_of(self.chain.rule)
        others = {
            name: StoredArray(
                path=self.path,
                name=name,
                shape=self.shape if name in unit.matrices else (self.shape[0], *form.shape[1:]),
                form=form,
            )
            for name, form in self.form.siblings.items()
        }
        bits = {name: others[name].bits(key) for name in unit.matrices}
        rates = {name: others[name].values(key[:1]) for name in unit.rates} | self._changing(key[0])
        skips, first = skipped_steps(others, key[0].start), key[1].start
        chunks = [
            UnitChunks(unit, bits, rates, skips, window, first).take(self.name)
            for window in self.form.windows()
        ]
        return digest_of(digest for _, digest in chunks)

    def _changing(self, rows: slice) -> dict[str, Array]:
        """`changing_settings` of some rows of the run."""
        group: Any = open_group(self.path)
        form = block_form(group["W"]) if {"W", "hyperparameters"} <= {*group} else None
        if form is None:
            return {}
        names = whole(self.path, group, "hyperparameter").tolist()
        return changing_settings(form.chain.rule, names, group["hyperparameters"][rows])

    def _read(self, key: tuple[slice, ...], dtype: np.dtype[Any]) -> Array:
        selection = ArraySelection.of(key, self.shape)
        out = np.empty(selection.lengths, dtype)
        if out.size == 0:
            return out
        objects = selection.objects(self.shard)
        while together := [*islice(objects, _OPEN)]:
            self._read_together(together, out)
        return out

    def _read_together(self, objects: Iterable[tuple[Any, ...]], out: Array) -> None:
        tasks: deque[Callable[[], None]] = deque()
        with ExitStack() as files:

            def open_shard(
                number: tuple[int, int], selection: ArraySelection, place: tuple[slice, ...]
            ) -> None:
                shard = files.enter_context(self.opened(*number, selection))
                tasks.extend(shard.tasks(out[place]))

            share((partial(open_shard, *each) for each in objects), self.threads)
            share(tasks, self.threads)


def present_root(run: Location) -> bytes | None:
    """Present metadata of the root of a run, for `check_not_replaced`; None if the run is gone."""
    if isinstance(run, Path):
        return root_metadata(run)
    try:
        return (run / METADATA_KEY).read_bytes()
    except FileNotFoundError:
        return None if run.listed else b""


def block_form(array: zarr.Array[Any]) -> BlockForm | None:
    """Storage form of the blocks of an array, from its metadata.

    Returns
    -------
    BlockForm or None
        None if the layout is not that of `RunWriter`. zarr can still read the array.
    """
    codecs: tuple[Any, ...] = getattr(array.metadata, "codecs", ())
    keys = array.metadata.to_dict().get("chunk_key_encoding")
    if len(codecs) != 1 or keys != {"name": "default", "configuration": {"separator": "."}}:
        return None
    (codec,) = codecs
    return codec.form(tuple(array.chunks)) if isinstance(codec, BlockCodec) else None


def stored_array(path: RunPath, name: str, array: zarr.Array[Any]) -> StoredArray | None:
    """Open a stored array of a run; None if `block_form` returns None."""
    form = block_form(array)
    if form is None:
        return None
    return StoredArray(
        path=location(path).absolute(), name=name, shape=tuple(array.shape), form=form
    )


def skipped_steps(arrays: Mapping[str, StoredArray], rows: int) -> int:
    """Number of steps that the gradient scaler skipped in the first rows of a run."""
    if "skipped" not in arrays:
        return 0
    return int(np.count_nonzero(arrays["skipped"].values((slice(rows),)) == 1))
