"""Populations of the user's own: masks, lists of ids, labels, expressions."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.populations.expressions import select_tokens
from trajstore.populations.masks import POPULATIONS, check_dataset
from trajstore.schema import POPULATION_FILES

__all__ = ["with_populations"]

Array = npt.NDArray[Any]


def with_populations(
    ds: xr.Dataset, populations: Mapping[str, Any] | None = None, **named: Any
) -> xr.Dataset:
    """Dataset with populations of your own, which every analysis then takes and gives.

    Each becomes a coordinate ``is_NAME`` along token. Any other coordinate of truth values along
    token is a population, too, under its own name. They may overlap.

    Parameters
    ----------
    ds : Dataset
        A run.
    populations : mapping, optional
        By name: a mask, bool (token); whole numbers, also a set of them, the ids of its tokens, as
        in ``token``; texts, a label of each token, which make a population NAME_LABEL each, for all
        labels but the empty one; or a str, an expression such as
        ``token_count < quantile(token_count, 0.25)`` (see docs/analysis.md).
    **named
        More of them.

    Returns
    -------
    Dataset

    Raises
    ------
    InvalidArgument
        If a name is taken or no name, an expression is none, a mask or labels are not one for each
        token, there is no such token, or it is a file.

    Examples
    --------
    >>> some = with_populations(ds, rare="0 < token_count <= 1", first=[0, 1, 2])
    >>> from trajstore.analysis import centroid
    >>> centroid(some).population.values.tolist()
    ['dead', 'live', 'all', 'rare', 'first']
    >>> int(some.is_rare.sum())
    5
    """
    check_dataset(ds)
    if not isinstance(populations, Mapping | None):
        raise InvalidArgument(
            f"got {populations!r}, expected populations by name: a mapping, or NAME=… as keywords, "
            "such as rare='token_count < 10'"
        )
    for name, given in {**(populations or {}), **named}.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"got {name!r} as the name of a population, expected a text")
        for one, mask in _masks(ds, name, given).items():
            if not one.isidentifier() or one in (*POPULATIONS, "mostly_dead"):
                raise InvalidArgument(
                    f"got a population named {one!r}; a name is of letters, digits and _, begins "
                    f"with no digit, and is none of {', '.join(POPULATIONS)}, mostly_dead"
                )
            if f"is_{one}" in ds.coords or one in ds.coords:
                raise InvalidArgument(f"there is a coordinate named {one!r} or 'is_{one}' already")
            ds = ds.assign_coords({f"is_{one}": ("token", mask)})
    return ds


def _masks(ds: xr.Dataset, name: str, given: Any) -> dict[str, npt.NDArray[np.bool_]]:
    if isinstance(given, PurePath) or (isinstance(given, str) and _is_file_name(given)):
        raise InvalidArgument(
            f"got the file {given} for the population {name}, expected what is in it, ids or a "
            f"mask; only the command line reads files: --population {name}={given}"
        )
    if isinstance(given, str):
        return {name: select_tokens(ds, given)}
    values = _values(name, given)
    tokens = ds.sizes["token"]
    if values.dtype.kind in "iu" or not values.size:
        return {name: _of_ids(ds, name, values.astype(np.int64))}
    if values.dtype.kind == "f" or len(values) != tokens:
        raise InvalidArgument(
            f"got the population {name} of {len(values)} values of {values.dtype}, expected a "
            f"truth value or a label for each of {tokens} tokens, or ids"
        )
    if values.dtype == bool:
        return {name: values}
    texts = values.astype(object)
    labels = [label for label in dict.fromkeys(texts.tolist()) if label]
    return {f"{name}_{label}": np.asarray(texts == label, bool) for label in sorted(labels)}


def _is_file_name(text: str) -> bool:
    return PurePath(text).suffix in POPULATION_FILES


def _values(name: str, given: Any) -> Array:
    """What was given, as an array of one dimension."""
    try:
        values = np.asarray(list(given) if isinstance(given, Set) else given)
    except ValueError:  # lists of several lengths
        values = np.empty((0, 0))
    if values.ndim != 1:
        shape = f" of shape {values.shape}" if values.size > 1 else ""
        raise InvalidArgument(
            f"got {reprlib.repr(given)}{shape} for the population {name}, expected an expression, "
            "or one dimension: a mask, ids, or a label of each token"
        )
    return values


def _of_ids(ds: xr.Dataset, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    known = ds["token"].values
    strangers = np.setdiff1d(ids, known)
    if strangers.size:
        raise InvalidArgument(
            f"the population {name} names {strangers.size} tokens that are not here, the first is "
            f"{strangers[0]}"
        )
    return np.asarray(np.isin(known, ids))
