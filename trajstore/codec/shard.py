"""Assembly of a shard: encoded inner chunks, label and index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

import numpy.typing as npt

from trajstore.codec.block_form import BlockForm
from trajstore.codec.block_label import digest_of
from trajstore.codec.codec_chain import Chain
from trajstore.codec.computed_rows import ComputedUnit

Chunk = tuple[bytes, bytes]
"""An encoded inner chunk, and its SHA-256."""


def encode_chunk(chain: Chain, bits: npt.NDArray[Any], shape: tuple[int, ...]) -> Chunk:
    """Encode one inner chunk with `Chain.encode`, and compute its SHA-256."""
    data = chain.encode(bits, shape)
    return data, hashlib.sha256(data).digest()


class UnitChunks:
    """Inner chunks of the arrays that are computed together, encoded when the first is taken.

    Parameters
    ----------
    unit : ComputedUnit
    bits : mapping of str to ndarray, (row, token, hidden) or (row, element)
        Native bits of each of ``unit.matrices``, in the whole shard.
    rates : mapping of str to ndarray, (row, …)
        Values of each of ``unit.rates``.
    skips : int
        Number of skipped steps before the block.
    window : tuple of slice
        Window of the chunk in the shard.
    first : int
        Position of the shard along the second dimension.
    """

    def __init__(
        self,
        unit: ComputedUnit,
        bits: Mapping[str, npt.NDArray[Any]],
        rates: Mapping[str, npt.NDArray[Any]],
        skips: int,
        window: tuple[slice, ...],
        first: int,
    ) -> None:
        self._unit = unit
        self._first = first + window[1].start
        self._bits = {name: each[window] for name, each in bits.items()}
        self._rates = rates
        self._skips = skips
        self._shape = tuple(part.stop - part.start for part in window)
        self._made: dict[str, bytes] | None = None
        self._lock = Lock()

    def take(self, name: str) -> Chunk:
        """Return the chunk of an array. Each is returned once."""
        with self._lock:
            if self._made is None:
                self._made = self._unit.encode(
                    self._bits, self._rates, self._skips, self._shape, self._first
                )
            data = self._made.pop(name)
        return data, hashlib.sha256(data).digest()


def shard_parts(
    form: BlockForm,
    chunks: Iterable[Chunk],
    *,
    block: int,
    part: int,
    rows: int,
    on_digest: Callable[[bytes], None] | None = None,
) -> Iterator[bytes]:
    """Yield the parts of one shard: inner chunks as they become available, then label and index.

    Every chunk is stored, even if it equals the fill value, so that NaN keep their payloads.

    Parameters
    ----------
    form : BlockForm
    chunks : iterable of Chunk
        Chunks in C order of the chunk grid.
    block, part : int
        Number of the block, and of the shard in it.
    rows : int
        Number of valid rows of the block.
    on_digest : callable, optional
        Called with the digest of the chunks before the last part.
    """
    entries: list[tuple[int, int]] = []
    digests: list[bytes] = []
    offset = 0
    for data, digest in chunks:
        entries.append((offset, len(data)))
        digests.append(digest)
        offset += len(data)
        yield data
    label = form.label(block=block, part=part, rows=rows, digest=digest_of(digests))
    if on_digest is not None:
        on_digest(label.digest)
    yield form.tail(entries, label)


def encoded_chunks(form: BlockForm, bits: npt.NDArray[Any]) -> Iterator[Chunk]:
    """Encode the inner chunks of a shard.

    Parameters
    ----------
    form : BlockForm
    bits : ndarray of ``native.bits``, (row, …)
        Part of each row in the shard.
    """
    return (encode_chunk(form.chain, bits[window], form.chunk) for window in form.windows())
