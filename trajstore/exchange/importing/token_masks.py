"""Files of masks, ids or counts: which tokens are dead, for an import or for an existing run."""

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

__all__ = ["annotations_of", "masks_of"]

_TAKEN_FOR = {
    "dead_ids": "ids whose name says nothing, taken for those of the dead tokens",
    "dead_mask": "a mask whose name says nothing, taken for that of the dead tokens",
    "live_mask": "taken for the mask of the live tokens",
}


def masks_of(masks: str | os.PathLike[str]) -> tuple[TokenArray, ...]:
    """Masks, lists of ids and counts of a file that was given for them.

    Raises
    ------
    RunNotFound, FormatError
        If it is no file that holds some.
    """
    with open_file(masks) as file:
        nameless = _nameless(file)
        detected = detect_arrays(file, nameless)
        arrays = token_arrays(file, detected, of=f" of {Path(masks).name}")
        if not arrays:
            raise FormatError(
                f"{masks} tells no tokens: it holds {abridged(file.keys)}, expected masks or lists "
                "of ids (dead_mask, untrained_mask, live_ids, trained_indices, token_counts, …)"
            )
    notes = {
        kind: f"{key} of {Path(masks).name}: {_TAKEN_FOR[kind]}" for key, kind in nameless.items()
    }
    return tuple(
        replace(one, is_beside=True, note=notes.get(one.kind, ""))
        for one in arrays
        if one.kind in TOKEN_KINDS
    )


def _nameless(file: ArrayFile) -> dict[str, str]:
    """The kind of the only array of a file, a mask or distinct ids, whose name says nothing."""
    if len(file.keys) != 1:
        return {}
    (key,) = file.keys
    kind = named(key).kind
    is_told = kind is not None and kind.name in TOKEN_KINDS
    if is_told or len(file.shape(key)) != 1:
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
    """``is_dead`` and ``token_count`` of a run's tokens, as far as a file tells them.

    Parameters
    ----------
    masks : path-like
        In any format that imports take as ``masks``.
    token : ndarray of int, (token,)
        Vocabulary ids of the run.

    Raises
    ------
    RunNotFound, FormatError
        If there is no such file, it tells no tokens, or other ones.
    """
    ids = TokenArray(name="the run's tokens", kind="token", values=np.asarray(token, np.int64))
    arrays = [one for one in masks_of(masks) if one.kind not in ("token", "token_ids")]
    table = token_table(masks, len(token), [ids, *arrays], {}, sizes={}, rows_of="the run")
    found = table.coordinates
    if not found:
        raise FormatError(f"{masks} does not tell which tokens are dead, or how often they occur")
    return found
