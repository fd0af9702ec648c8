"""Which tokens are dead, as files tell it: in masks along `token`, or in lists of ids."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.imported_file import ImportedFile, abridged
from trajstore.exchange.key_names import DEAD_IDS, MASKS
from trajstore.formats.safetensors import SafetensorsFile

__all__ = ["dead_tokens", "with_masks"]

Array = npt.NDArray[Any]


def with_masks(imported: ImportedFile, masks: str | os.PathLike[str]) -> ImportedFile:
    """The file with the dead tokens that another one tells.

    Raises
    ------
    RunNotFound, FormatError
        If it is no safetensors file, tells none, or does not fit.
    """
    with SafetensorsFile(masks) as file:
        told = {key: file.read(key) for key in (*MASKS, *DEAD_IDS) if key in file.keys}
        if not told:
            raise FormatError(
                f"{masks} tells no dead tokens: it holds {abridged(file.keys)}, expected one of "
                f"{', '.join((*MASKS, *DEAD_IDS))}"
            )
    length = max(len(imported.token), int(imported.token.max()) + 1)
    is_dead = dead_tokens(masks, told, length)[imported.token]
    return replace(imported, coordinates=imported.coordinates | {"is_dead": is_dead})


def dead_tokens(path: str | os.PathLike[str], told: Mapping[str, Array], tokens: int) -> Array:
    """Mask of the dead tokens.

    Parameters
    ----------
    path : path-like
        Of the file, for messages.
    told : mapping of str to ndarray
        Masks and lists of ids, by their keys; at least one.
    tokens : int

    Raises
    ------
    FormatError
        If one of them is none, or two disagree.
    """
    answers = {key: _mask(path, key, values, tokens) for key, values in told.items()}
    first, *others = answers
    for other in others:
        if not np.array_equal(answers[first], answers[other]):
            raise FormatError(f"{path}: {first} and {other} disagree about which tokens are dead")
    return answers[first]


def _mask(path: str | os.PathLike[str], key: str, values: Array, tokens: int) -> Array:
    if key in MASKS:
        if values.shape != (tokens,) or values.dtype.kind not in "biu" or values.max() > 1:
            raise FormatError(
                f"{path}: {key} is {values.dtype} of shape {values.shape}, expected bool of "
                f"shape ({tokens},)"
            )
        mask: Array = values.astype(bool) == MASKS[key]
        return mask
    in_range = values.ndim == 1 and values.dtype.kind in "iu"
    if not in_range or (values < 0).any() or (values >= tokens).any():
        raise FormatError(f"{path}: {key} does not hold token ids from 0 to {tokens - 1}")
    return np.isin(np.arange(tokens), values, invert=not DEAD_IDS[key])
