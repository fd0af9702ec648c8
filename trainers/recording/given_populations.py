"""Populations that are given when a run is made, as masks of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.populations.named import with_populations
from trajstore.schema import POPULATION

__all__ = ["population_masks"]


def population_masks(
    given: Mapping[str, Any], known: Mapping[str, npt.NDArray[Any]], tokens: int
) -> dict[str, npt.NDArray[np.bool_]]:
    """Mask of each population over a vocabulary, by the name of its coordinate.

    Parameters
    ----------
    given : mapping
        By name, as `analysis.with_populations` takes them.
    known : mapping of str to ndarray, (token,)
        What expressions may ask about.
    tokens : int
        Of the vocabulary.

    Raises
    ------
    InvalidArgument
        As `analysis.with_populations`.
    """
    if not given:
        return {}
    ds = xr.Dataset(
        coords={
            "token": np.arange(tokens, dtype=np.int32),
            **{name: ("token", values) for name, values in known.items()},
        }
    )
    whole = with_populations(ds, given)
    return {
        str(name): np.asarray(values)
        for name, values in whole.coords.items()
        if name not in ds.coords and str(name).startswith(POPULATION)
    }
