"""Files of masks, ids or counts that label dead tokens, for an import or an existing run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.importing.named_arrays import abridged, named_arrays
from trajstore.exchange.importing.token_tables import (
    TokenArray,
    token_arrays,
    token_table,
)
from trajstore.formats.open_file import open_file


def masks_of(masks: str | os.PathLike[str]) -> tuple[TokenArray, ...]:
    """Masks, lists of ids and counts of a ``masks`` file.

    Raises
    ------
    RunNotFound, FormatError
        If the file does not exist, or holds none of them.
    """
    with open_file(masks) as file:
        arrays = token_arrays(file, named_arrays(file).arrays, of=f" of {Path(masks).name}")
        if not arrays:
            raise FormatError(
                f"{masks} labels no tokens: found {abridged(file.keys)}, expected masks, lists of "
                "ids or counts; rename an array, or the .npy, to dead_mask, untrained_mask, "
                "live_ids, trained_indices, token_counts, …"
            )
    return tuple(replace(array, is_separate=True) for array in arrays)


def annotations_of(
    masks: str | os.PathLike[str], token: npt.NDArray[np.integer[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """``is_dead`` and ``token_count`` of a run's tokens, as far as a file holds them.

    Parameters
    ----------
    masks : path-like
        File in any format that imports accept as ``masks``.
    token : ndarray of int, (token,)
        Vocabulary ids of the run.

    Raises
    ------
    RunNotFound, FormatError
        If the file does not exist, labels no tokens, or does not fit the run's tokens.
    """
    ids = TokenArray(name="the run's tokens", kind="token", values=np.asarray(token, np.int64))
    arrays = [one for one in masks_of(masks) if one.kind != "token"]
    table = token_table(masks, len(token), [ids, *arrays], {}, sizes={}, rows_of="the run")
    found = table.coordinates
    if not found:
        raise FormatError(
            f"{masks} holds only the ids of tokens, expected labels of dead tokens or counts; name "
            "the array dead_ids, live_ids, dead_mask, live_mask or token_count"
        )
    return found
