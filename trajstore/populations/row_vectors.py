"""The rows of one parameter in place of the tokens of a run."""

from __future__ import annotations

import xarray as xr

from trajstore.errors import InvalidArgument

__all__ = ["row_vectors"]


def row_vectors(ds: xr.Dataset) -> xr.Dataset:
    """Rename the dimensions of a parameter to those of a run; return other Datasets unchanged.

    Parameters
    ----------
    ds : Dataset
        A run, or one parameter from ``ds.traj.parameter``, of dims (step, row, column).

    Returns
    -------
    Dataset
        Of dims (step, token, hidden). ``token`` is the number of the row. The attribute
        ``parameter`` is the name of the parameter.

    Raises
    ------
    InvalidArgument
        If the parameter has no elements.
    """
    if not {"row", "column"} <= set(ds.dims) or {"token", "hidden"} & set(ds.dims):
        return ds
    name = ds.attrs.get("recording", {}).get("parameter", "W")
    if not ds.sizes["row"] * ds.sizes["column"]:
        raise InvalidArgument(f"the parameter {name} has no elements; choose another one")
    found = ds.rename(row="token", column="hidden")
    found.encoding = dict(ds.encoding)
    return found.assign_attrs(parameter=name)
