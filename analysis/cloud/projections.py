"""Projections of tokens on given axes, and their orthogonal parts."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.collective import centroid
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Wide, measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.values.norms import hidden_sum, vector_norm


def _orthonormal(axes: Wide) -> Wide:
    """Orthonormal rows that span the same space; NaN if an axis is zero or not finite."""
    unit = axes / vector_norm(axes)[:, None]
    if not np.isfinite(unit).all():
        return np.full(axes.shape, np.nan)
    vectors, sizes, _ = np.linalg.svd(unit.T, full_matrices=False)
    return np.asarray(vectors.T[sizes > sizes.max(initial=0) * len(unit) * 1e-14])


def _project(W: Array, axes: Wide) -> Wide:
    """Coordinates of each vector along each axis, and the length of its orthogonal part."""
    wide = W.astype(np.float64)
    along = [hidden_sum(wide * (axis / vector_norm(axis))) for axis in axes]
    # Twice, to remove the remaining rounding error along the axes.
    for axis in (*_orthonormal(axes),) * 2:
        wide -= hidden_sum(wide * axis)[:, None] * axis
    return np.stack([*along, vector_norm(wide)], -1)


Axes = str | npt.ArrayLike | xr.DataArray


@quantity()
def projection(scan: Scan, axes: Axes = "centroid") -> xr.Dataset:
    """Coordinates of each token along given vectors, and the length of its orthogonal part.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    axes : {'centroid', 'hidden_mean'}, array (hidden) or (axis, hidden), or DataArray
        Axes to project on, of any length. ``centroid`` is that of all tokens at the same step,
        ``hidden_mean`` the recorded h̄ of the step. A DataArray has the dimension hidden, and
        optionally step (every step of `ds`) and axis.

    Returns
    -------
    Dataset, float64
        ``projection`` (step, token, axis), W·a/‖a‖; ``across`` (step, token), the length of the
        part of W that is orthogonal to all axes. Units of W. NaN if an axis is zero or not finite,
        such as h̄ of row 0.

    Raises
    ------
    InvalidArgument
        If the axes are unknown or do not match the size of W.
    VariableNotRecorded
        If ``hidden_mean`` was not recorded.

    Examples
    --------
    >>> found = projection(ds, [[1, 0, 0, 0], [0, 1, 0, 0]])
    >>> found.projection.sel(step=0, token=ord("e")).values
    array([1.5, 1.5])
    """
    blocks = scan.blocks("W")
    directions = _directions(scan, axes)
    count = directions.sizes["axis"]
    own = "sah" if "step" in directions.dims else "ah"
    order = {"s": "step", "a": "axis", "h": "hidden"}
    data = da.asarray(directions.transpose(*(order[letter] for letter in own)).data, np.float64)
    data = data.rechunk((*([blocks.chunks[0]] if "s" in own else []), -1, -1))
    sizes = {"c": count + 1}
    made = measure(_project, "stc", blocks, (data, own), dtype=np.float64, sizes=sizes, by_row=True)
    coords = scan.coords("W", ("step", "token"))
    if "axis" in directions.coords:
        coords["axis"] = directions["axis"]
    along = Fact("f8", "W along the axis", scan.units)
    across = Fact("f8", "length of W across all axes", scan.units)
    found = {
        "projection": (("step", "token", "axis"), made[..., :count], along),
        "across": (("step", "token"), made[..., count], across),
    }
    return dataset(found, coords)


def _directions(scan: Scan, axes: Axes) -> xr.DataArray:
    """Vectors to project on, (axis, hidden), optionally with step."""
    hidden = scan.variable("W").sizes["hidden"]
    if isinstance(axes, str):
        return _named_direction(scan, axes).expand_dims("axis").assign_coords(axis=[axes])
    if not isinstance(axes, xr.DataArray):
        try:
            vectors = np.atleast_2d(np.asarray(axes, np.float64))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"got axes={reprlib.repr(axes)}, expected 'centroid', 'hidden_mean' or vectors of "
                f"{hidden} numbers"
            ) from error
        if vectors.ndim != 2 or vectors.shape[1] != hidden or not len(vectors):
            raise InvalidArgument(
                f"got axes of shape {np.shape(axes)}, expected vectors of {hidden} elements"
            )
        return xr.DataArray(vectors, dims=("axis", "hidden"))
    axes = axes if "axis" in axes.dims else axes.expand_dims("axis")
    expected: dict[Hashable, int] = {"hidden": hidden, "step": scan.rows}
    wrong = {dim: size for dim, size in axes.sizes.items() if expected.get(dim, size) != size}
    if wrong or not {"axis", "hidden"} <= set(axes.dims) <= {"step", "axis", "hidden"}:
        raise InvalidArgument(
            f"got axes with {dict(axes.sizes)}, expected hidden={hidden}, and optionally axis and "
            f"step={scan.rows}"
        )
    return axes.astype(np.float64)


def _named_direction(scan: Scan, name: str) -> xr.DataArray:
    """A named vector per step, float64 (step, hidden).

    Raises
    ------
    InvalidArgument
        For an unknown name.
    VariableNotRecorded
        If the vector was not recorded.
    """
    if name == "centroid":
        return centroid(scan, "all")["centroid"].drop_vars("population")
    if name != "hidden_mean":
        raise InvalidArgument(
            f"got axes={name!r}, expected 'centroid', 'hidden_mean' or vectors of W"
        )
    input_checks.variables(scan.ds, name)
    return scan.ds[name].transpose("step", "hidden").astype(np.float64)
