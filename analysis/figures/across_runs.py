"""Several runs in one figure: which belong together, and their mean and spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

__all__ = ["Group", "mean_and_spread", "run_groups"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in nothing but their seed.

    Attributes
    ----------
    label : str
        What they have in common and others have not, ``sigma=1e-05``; '' where there is one group.
    members : tuple of int
        Their numbers along run.
    """

    label: str
    members: tuple[int, ...]


def run_groups(ds: xr.Dataset) -> list[Group]:
    """Groups of the runs of a Dataset, by what differs between their configurations.

    Parameters
    ----------
    ds : Dataset
        As `trajstore.open_runs` returns it.
    """
    swept = {
        str(name): coordinate.values.tolist()
        for name, coordinate in ds.coords.items()
        if coordinate.dims == ("run",)
        and name != "run"
        and coordinate.attrs.get("long_name") != "training.seed"
    }
    groups: dict[str, list[int]] = {}
    for number in range(ds.sizes["run"]):
        label = ", ".join(f"{name}={values[number]}" for name, values in swept.items())
        groups.setdefault(label, []).append(number)
    return [Group(label=label, members=tuple(members)) for label, members in groups.items()]


def mean_and_spread(data: Sequence[xr.Dataset]) -> tuple[xr.Dataset, xr.Dataset]:
    """Mean over runs of what a figure shows, and the standard deviation between them.

    Parameters
    ----------
    data : sequence of Dataset
        Computed, one for each run.

    Returns
    -------
    mean, spread : Dataset
        The spread is that of a sample (with n − 1), which a single run has not: NaN. A NaN of any
        run is one of both.
    """
    joined = xr.concat(
        data, "run", data_vars="all", coords="minimal", compat="override", join="exact"
    )
    mean = joined.mean("run", skipna=False, keep_attrs=True)
    for name, array in data[0].data_vars.items():
        mean[name] = mean[name].transpose(*array.dims)
    spread = (
        joined.std("run", ddof=1, skipna=False) if len(data) > 1 else xr.full_like(mean, np.nan)
    )
    return mean, spread
