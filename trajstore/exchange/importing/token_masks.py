"""Files of masks, ids or counts that label dead tokens, for an import or an existing run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.guessing.detect_arrays import abridged, detect_arrays
from trajstore.exchange.guessing.kind_table import named
from trajstore.exchange.importing.token_tables import (
    TOKEN_KINDS,
    TokenArray,
    token_arrays,
    token_table,
)
from trajstore.formats.array_file import ArrayFile, values_of
from trajstore.formats.open_file import open_file

_TAKEN_AS = {
    "dead_ids": "ids without a known name, taken as the dead tokens",
    "dead_mask": "a mask without a known name, taken as the mask of the dead tokens",
    "live_mask": "taken as the mask of the live tokens",
}


def masks_of(masks: str | os.PathLike[str]) -> tuple[TokenArray, ...]:
    """Masks, lists of ids and counts of a ``masks`` file.

    Raises
    ------
    RunNotFound, FormatError
        If the file does not exist, or holds none of them.
    """
    with open_file(masks) as file:
        nameless = _nameless(file)
        detected = detect_arrays(file, nameless)
        arrays = token_arrays(file, detected.found, of=f" of {Path(masks).name}")
        if not arrays:
            raise FormatError(
                f"{masks} labels no tokens: found {abridged(file.keys)}, expected masks, lists of "
                "ids or counts; rename an array to dead_mask, untrained_mask, live_ids, "
                "trained_indices, token_counts, …"
            )
    notes = {
        kind: f"{key} of {Path(masks).name}: {_TAKEN_AS[kind]}" for key, kind in nameless.items()
    }
    return tuple(
        replace(one, is_separate=True, note=notes.get(one.kind, one.note)) for one in arrays
    )


def _nameless(file: ArrayFile) -> dict[str, str]:
    """Key and kind of the only array of a file, if it is a mask or distinct ids without a name."""
    if len(file.keys) != 1:
        return {}
    (key,) = file.keys
    kind = named(key).kind
    is_known = kind is not None and kind.name in TOKEN_KINDS
    if is_known or len(file.shape(key)) != 1:
        return {}
    if file.dtype(key) == "bool":
        return {key: "live_mask" if "live" in key.lower() else "dead_mask"}
    if "int" not in file.dtype(key):
        return {}
    ids = values_of(file, key)
    return {key: "dead_ids"} if len(np.unique(ids)) == len(ids) else {}


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
    arrays = [one for one in masks_of(masks) if one.kind not in ("token", "token_ids")]
    table = token_table(masks, len(token), [ids, *arrays], {}, sizes={}, rows_of="the run")
    found = table.coordinates
    if not found:
        raise FormatError(
            f"{masks} holds only the ids of tokens, expected labels of dead tokens or counts; name "
            "the array dead_ids, live_ids, dead_mask, live_mask or token_count"
        )
    return found
