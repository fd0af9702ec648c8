"""Projections of tokens on given axes, and their orthogonal parts."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.collective import centroid
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.values.token_norms import hidden_sum, vector_norm

__all__ = ["projection"]

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]


def _orthonormal(axes: Wide) -> Wide:
    """Orthonormal rows that span the same space; NaN if an axis is zero or not finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = axes / vector_norm(axes)[:, None]
    if not np.isfinite(unit).all():
        return np.full(axes.shape, np.nan)
    vectors, sizes, _ = np.linalg.svd(unit.T, full_matrices=False)
    return np.asarray(vectors.T[sizes > sizes.max(initial=0) * len(unit) * 1e-14])


def _project(W: Array, axes: Wide) -> Wide:
    """Coordinates of each vector along each axis, and the length of its orthogonal part."""
    axes = np.broadcast_to(axes, (len(W), *axes.shape[1:]))
    rows, tokens, _ = W.shape
    count = axes.shape[1]
    result = np.empty((rows, tokens, count + 1))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for row in range(rows):
            wide = W[row].astype(np.float64)
            for number, axis in enumerate(axes[row]):
                result[row, :, number] = hidden_sum(wide * (axis / vector_norm(axis)))
            # Twice, to remove the remaining rounding error along the axes.
            for axis in (*_orthonormal(axes[row]),) * 2:
                wide -= hidden_sum(wide * axis)[:, None] * axis
            result[row, :, count] = vector_norm(wide)
    return result


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
    lengths = blocks.chunks[0] if "step" in directions.dims else (1,)
    order = ("step", "axis", "hidden") if "step" in directions.dims else ("axis", "hidden")
    data = directions.transpose(*order).data
    if not isinstance(data, da.Array):
        data = da.from_array(np.asarray(data, np.float64), chunks=-1)
    data = data[None] if data.ndim == 2 else data
    data = data.rechunk((lengths, -1, -1))
    made = measure(_project, "stc", blocks, (data, "sah"), dtype=np.float64, sizes={"c": count + 1})
    along = scan.wrap(made[..., :count], "W", dims=("step", "token", "axis"))
    if "axis" in directions.coords:
        along = along.assign_coords(axis=directions["axis"])
    unit = scan.units
    return xr.Dataset(
        {
            "projection": along.assign_attrs(long_name="W along the axis", units=unit),
            "across": scan.wrap(made[..., count], "W").assign_attrs(
                long_name="length of W across all axes", units=unit
            ),
        }
    )


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
