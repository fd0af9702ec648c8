"""User-defined populations: masks, lists of ids, labels, expressions."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.exact_values import ANY, exact
from trajstore.populations.expressions import select_tokens
from trajstore.populations.masks import POPULATIONS, check_dataset
from trajstore.populations.row_vectors import is_of_parameter, row_vectors
from trajstore.schema import POPULATION_FILES

Array = npt.NDArray[Any]


def with_populations(
    ds: xr.Dataset, /, populations: Mapping[str, Any] | None = None, **named: Any
) -> xr.Dataset:
    """Add populations to a Dataset. Every analysis then accepts and reports them.

    Each population becomes a coordinate ``is_NAME`` along token. Any other boolean coordinate along
    token is also a population, under its own name. Populations may overlap.

    Parameters
    ----------
    ds : Dataset
        A run, or one parameter from ``ds.traj.parameter``, whose rows are then tokens.
    populations : mapping, optional
        Populations by name. A value is one of: a mask, bool (token); token ids, whole numbers as in
        ``token`` (also a set); labels, one text per token, where each label except the empty one
        becomes a population NAME_LABEL; an expression, a str such as
        ``token_count < quantile(token_count, 0.25)`` (docs/reference/variables.md). Of a parameter,
        the number of a row is ``row``.
    **named
        Further populations.

    Returns
    -------
    Dataset

    Raises
    ------
    InvalidArgument
        If a name exists or is invalid, an expression is invalid, a mask or labels do not have one
        value per token, a token id is unknown, or a value is a file name.

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
    ds = row_vectors(ds)
    if not isinstance(populations, Mapping | None):
        raise InvalidArgument(
            f"got {populations!r}, expected a mapping from names to populations, or keywords "
            "such as rare='token_count < 10'"
        )
    for name, given in {**(populations or {}), **named}.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"got the population name {name!r}, expected a str")
        for one, mask in _masks(ds, name, given).items():
            if not one.isidentifier() or one in (*POPULATIONS, "mostly_dead"):
                raise InvalidArgument(
                    f"got the population name {one!r}, expected letters, digits and _, no leading "
                    f"digit, and none of {', '.join(POPULATIONS)}, mostly_dead"
                )
            if f"is_{one}" in ds.coords or one in ds.coords:
                raise InvalidArgument(f"a coordinate {one!r} or 'is_{one}' already exists")
            ds = ds.assign_coords({f"is_{one}": ("token", mask)})
    return ds


def _masks(ds: xr.Dataset, name: str, given: Any) -> dict[str, npt.NDArray[np.bool_]]:
    is_text = isinstance(given, str)
    if isinstance(given, PurePath) or (is_text and PurePath(given).suffix in POPULATION_FILES):
        raise InvalidArgument(
            f"got the file name {given} for the population {name}, expected ids or a mask; only "
            f"the command line reads files: --population {name}={given}"
        )
    if is_text:
        rows = {"row": ds["token"]} if is_of_parameter(ds) else {}
        return {name: select_tokens(ds.assign_coords(rows), given)}
    values = _values(name, given)
    tokens = ds.sizes["token"]
    if values.dtype.kind in "iu" or not values.size:
        return {name: _of_ids(ds, name, exact(f"population {name}", values, "int64", least=ANY))}
    if values.dtype.kind == "f" or len(values) != tokens:
        raise InvalidArgument(
            f"got {len(values)} values of {values.dtype} for the population {name}, expected a "
            f"boolean or a label for each of {tokens} tokens, or ids"
        )
    if values.dtype == bool:
        return {name: values}
    texts = exact(f"population {name}", values, "string").astype(object)
    labels = [label for label in dict.fromkeys(texts.tolist()) if label]
    return {f"{name}_{label}": np.asarray(texts == label, bool) for label in sorted(labels)}


def _values(name: str, given: Any) -> Array:
    """The given values as a one-dimensional array."""
    try:
        listed = isinstance(given, list | tuple | Set)
        values = np.asarray([*given] if listed else given)
        if listed and (values.dtype.kind == "U" or any(isinstance(one, bool) for one in given)):
            # NumPy turns 1 next to texts into "1", and True next to numbers into 1.
            values = values if values.dtype == bool else np.asarray([*given], object)
    except ValueError:  # lists of several lengths
        values = np.empty((0, 0))
    if values.ndim != 1:
        shape = f" of shape {values.shape}" if values.size > 1 else ""
        raise InvalidArgument(
            f"got {reprlib.repr(given)}{shape} for the population {name}, expected an expression "
            "or one dimension: a mask, ids, or one label per token"
        )
    return values


def _of_ids(ds: xr.Dataset, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    known = ds["token"].values
    unknown = np.setdiff1d(ids, known)
    if unknown.size:
        raise InvalidArgument(
            f"got {unknown.size} unknown token ids for the population {name}, the first is "
            f"{unknown[0]}"
        )
    return np.asarray(np.isin(known, ids))
