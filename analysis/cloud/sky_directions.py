"""Directions of tokens on the sky about an axis: latitude and longitude."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.shape import principal_axes
from trajstore.analysis.scan.block_tasks import Array, Wide, measure, read_again
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.values.norms import hidden_sum, vector_norm


def _angles(W: Array, axes: Wide, *first: Array) -> dict[str, Wide]:
    """Angles of W, or of its change since the first row, in degrees, of each token."""
    wide = W.astype(np.float64)
    for start in first:
        wide -= start
    up = hidden_sum(wide * axes[2])
    # The length across is small near the poles; a difference of squares would lose it.
    across = wide - up[:, None] * axes[2]
    east, north = (hidden_sum(across * axis) for axis in axes[3:5])
    nothing = np.where(vector_norm(wide) > 0, 0, np.nan)
    return {
        "latitude": np.degrees(np.arctan2(up, vector_norm(across))) + nothing,
        "longitude": np.degrees(np.arctan2(north, east)) + nothing,
    }


@quantity()
def sky(
    scan: Scan,
    axis: Literal["centroid", "hidden_mean"] = "centroid",
    of: Literal["displacement", "W"] = "displacement",
    population: str = "all",
) -> xr.Dataset:
    """Direction of each token's displacement as latitude and longitude about an axis.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), of at least 3 dimensions.
    axis : {'centroid', 'hidden_mean'}
        The north pole: the mean of W over the population and all rows, or the recorded h̄, averaged
        over the steps.
    of : {'displacement', 'W'}
        The vector of a token: W minus its first row, or W itself.
    population : str
        Population of the centroid and of the longitudes.

    Returns
    -------
    Dataset, float64
        ``latitude`` (step, token), degrees: 90 minus the angle between the vector and the axis.
        ``longitude`` (step, token), degrees, in the plane of two directions, 0 along the first:
        those of the largest variance of W orthogonal to the axis, over the population and all
        rows. Both are NaN for a vector of length zero. ``sky_axes`` (component, hidden): the axis
        and both directions.

    Raises
    ------
    InvalidArgument
        For an unknown axis, vector or population, or fewer than 3 dimensions.
    VariableNotRecorded
        If h̄ is the axis and was not recorded.

    Examples
    --------
    >>> found = sky(ds)
    >>> found.latitude.isel(step=[0, -1]).sel(token=ord("z")).values.round(1)
    array([  nan, -26.4])
    """
    scan.require_rows(1, "sky")
    blocks = scan.blocks("W")
    if blocks.shape[2] < 3:
        raise InvalidArgument(f"sky requires at least 3 dimensions, got {blocks.shape[2]}")
    made = principal_axes(scan, population, first=axis)
    facts = {
        name: Fact("f8", f"{name} of the {of}", "degree") for name in ("latitude", "longitude")
    }
    found = measure(
        _angles,
        "st",
        # Read again after the axes are known. Otherwise all blocks would stay in memory.
        read_again(blocks, made),
        (made, "ah"),
        *([(blocks[0], "th")] if of == "displacement" else []),
        dtype=facts,
        by_row=True,
    )
    axes = xr.DataArray(made[2:5], dims=("component", "hidden"))
    axes.attrs = {"long_name": "axis and directions across it", "units": "1"}
    result = scan.of_tokens(found, facts, "W").assign(sky_axes=axes)
    return result.assign_attrs(population=population, axis=axis)
