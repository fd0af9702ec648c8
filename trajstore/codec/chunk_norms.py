"""Norms of the vectors of a chunk, measured while it lies in the processor's cache.

A history is some ten times as large in memory as its norms need. Where they are all that is asked
for, each chunk is decoded to memory that the next one takes, or, by a compiled loop, to none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.scratch_memory import scratch
from trajstore.compiled_loop import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.token_norms import result_dtype, rounding_slack, token_norm

__all__ = ["ChunkNorms"]

Array = npt.NDArray[Any]

_LOOP = CompiledLoop("trajstore.codec.norm_loop", "measure_vectors", in_any_order=True)


class ChunkNorms:
    """Decodes the chunks of one array, (step, token, hidden), to norms along hidden.

    Parameters
    ----------
    decoder : Decoder
    order : {1, 2, inf}
    """

    def __init__(self, decoder: Decoder, order: float) -> None:
        self._decoder = decoder
        self._order = order

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the norms."""
        return result_dtype(self._decoder.native.stored)

    def decode(self, data: bytes, window: tuple[slice, ...], out: Array) -> None:
        """Decode part of a chunk.

        Parameters
        ----------
        data : bytes
        window : tuple of slice
            What is wanted, with start and stop: whole vectors.
        out : ndarray, (step, token, 1)
            Receives the norms, as `trajstore.values.token_norms.token_norm` gives them.

        Raises
        ------
        ValueError
            As by `Decoder.decode`.
        """
        values = self._decoder.unpack_window(data, window)
        if self._by_loop(values, window[0].start, out[..., 0]):
            return
        shape = tuple(item.stop - item.start for item in window)
        vectors = scratch.array("vectors", shape, self._decoder.native.stored)
        self._decoder.complete(values, window, vectors)
        out[..., 0] = token_norm(vectors, self._order)

    def _by_loop(self, folded: Array, start: int, out: Array) -> bool:
        """Do the same, where there is a compiled loop that can; whether it was done."""
        native = self._decoder.native
        if self._order != 2 or not native.is_cut_off or native.stored != np.float32:
            return False
        if not self._decoder.takes_differences or not rows_in_one_piece(folded):
            return False
        if not _LOOP.is_worth(folded.size):
            return False
        lengths, unsure = np.empty(out.shape, np.float32), np.empty(1, np.uint8)
        done = _LOOP.run(
            memory_of(folded),
            folded.strides[0] // folded.itemsize,
            folded.shape,
            start,
            np.uint32(native.spare_bits),
            rounding_slack(folded.shape[2]),
            lengths.reshape(-1),
            unsure,
        )
        if not done or unsure[0]:
            return False
        out[...] = lengths
        return True
