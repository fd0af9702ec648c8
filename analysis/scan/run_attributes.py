"""Attributes of one run, and of one among several."""

from __future__ import annotations

import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.schema import OF_RUN

__all__ = ["RUN", "check_single_run", "with_own_attributes"]


RUN = "run"


def check_single_run(ds: xr.Dataset) -> None:
    """Refuse several runs, where a question is about one.

    Raises
    ------
    InvalidArgument
        If there is a dimension run.
    """
    if RUN in ds.dims:
        raise InvalidArgument(
            "this is a question about one run, and there are several here; ask each of them with "
            "ds.traj, or analysis.over_runs(ds, function), or choose one: ds.isel(run=0)"
        )


def with_own_attributes(ds: xr.Dataset) -> xr.Dataset:
    """A single run of several, with the attributes that it alone has; others as they are."""
    if RUN in ds.dims or RUN not in ds.coords or OF_RUN not in ds.attrs:
        return ds
    own = ds.attrs[OF_RUN].get(str(ds[RUN].values))
    if own is None:
        return ds
    shared = {name: value for name, value in ds.attrs.items() if name != OF_RUN}
    single = ds.assign_attrs({})
    single.attrs = {**shared, **own["attributes"]}
    for name, attributes in own["variables"].items():
        if name in single.variables:
            single[name].attrs = dict(attributes)
    single.encoding["source"] = own["source"]
    return single
