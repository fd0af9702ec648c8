"""Directions of tokens: angles to other vectors, projections on axes, and places on a sky."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.geometry.shape import principal_axes
from trajstore.analysis.motion.collective import bulk_thermal, centroid
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import (
    DIMS,
    Array,
    ConsecutiveRows,
    Wide,
    along,
    measure,
    read_again,
)
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, dataset, table
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import chosen_populations
from trajstore.values.norms import hidden_sum, vector_norm

VECTORS = ("W", "delta", "grad")
PARTNERS = ("hidden_mean", "centroid", "bulk", "grad", "delta", "previous")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def _cosines(vectors: Array, others: Array) -> Wide:
    """Cosine of each vector with its partner, or with the only one; NaN for zero vectors."""
    first, second = vectors.astype(np.float64), others.astype(np.float64)
    cosines = hidden_sum(first * second) / (vector_norm(first) * vector_norm(second))
    return np.clip(cosines, -1, 1)  # rounding may exceed the range; NaN is kept


def _change(now: Array, before: Array, known: np.bool_) -> Wide:
    """Change from the previous row; NaN without one."""
    return np.where(known, np.subtract(now, before, dtype=np.float64), np.nan)


def _earlier(now: Array, before: Array, known: np.bool_) -> Array:
    """The previous row; NaN without one."""
    return np.where(known, before, np.nan)


def _statistics(
    cosines: Wide, groups: npt.NDArray[np.bool_], levels: Wide
) -> dict[str, npt.NDArray[Any]]:
    """Number, mean and quantiles over tokens with a cosine, (population)."""
    known = [np.sort(each[~np.isnan(each)]) for each in (cosines[group] for group in groups)]
    none = np.full(levels.size, np.nan)
    return {
        "aligned_tokens": np.array([each.size for each in known]),
        "alignment": np.array([each.mean() if each.size else np.nan for each in known]),
        "alignment_quantiles": np.stack(
            [np.quantile(each, levels) if each.size else none for each in known]
        ),
    }


@quantity()
def alignment(
    scan: Scan,
    other: str = "centroid",
    of: str = "W",
    population: str | None = None,
    quantiles: Sequence[float] | float = QUANTILES,
) -> xr.Dataset:
    """Cosines between a vector of each token and another vector, and their statistics.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), and the selected variables.
    other : {'hidden_mean', 'centroid', 'bulk', 'grad', 'delta', 'previous'}
        The second vector: the recorded h̄ of the step; the mean of W over `population` (default: all
        tokens); the bulk motion, which is the mean of ΔW over it; the token's gradient; its change
        ΔW; or `of` itself in the previous row.
    of : {'W', 'delta', 'grad'}
        The vector: W, its change from the previous row, or its gradient.
    population : str, optional
        A single population. The statistics then have no dimension population.
    quantiles : float or sequence of float
        From 0 to 1, with linear interpolation.

    Returns
    -------
    Dataset, float64
        ``cosine`` (step, token), from −1 to 1, NaN if one of the vectors is zero or not finite, or
        a previous row is missing; ``angle``, its arc cosine in degrees, accurate to 10⁻⁶. The angle
        between consecutive W is the swing of a vector, that between consecutive ΔW its turning
        angle. Over (step, population): ``alignment``, the mean cosine,
        ``alignment_quantiles`` (…, quantile), and ``aligned_tokens``, int64, the number of tokens
        with a cosine. Statistics are over these tokens.

    Raises
    ------
    VariableNotRecorded
        If the run does not hold one of the vectors.
    InvalidArgument
        For unknown or equal vectors, an unknown population, or quantiles outside 0 to 1.

    Examples
    --------
    >>> turns = alignment(ds, other="previous", of="delta")
    >>> turns.alignment.sel(population="dead", step=[2, 3]).values
    array([1., 1.])
    """
    if of not in VECTORS or other not in PARTNERS or of == other:
        raise InvalidArgument(
            f"got of={of!r} and other={other!r}, expected two different vectors: of from "
            f"{', '.join(VECTORS)}; other from {', '.join(PARTNERS)}"
        )
    levels = input_checks.quantile_levels(quantiles)
    names, groups = chosen_populations(scan.ds, population)
    like = "grad" if of == "grad" else "W"
    vectors = _of_tokens(scan, of, like)
    cosines = _with_partner(scan, vectors, other, like, population)
    label = f"cosine of {of} and {other}"
    variables = {
        "alignment": ResultVariable("f8", f"mean {label}"),
        "alignment_quantiles": ResultVariable(f"({levels.size},)f8", f"quantiles of the {label}"),
        "aligned_tokens": ResultVariable("i8", "tokens with a cosine"),
    }
    statistics_of_steps = measure(
        _statistics,
        cosines.rechunk({1: -1}),
        dims=("step", "population"),
        groups=groups,
        levels=levels,
        dtype=variables,
        sizes={"population": len(groups)},
        by_row=True,
    )
    cosine = scan.wrap(cosines, like).assign_attrs(long_name=label, units="1")
    angle = cosine.copy(data=da.rad2deg(da.arccos(cosines))).assign_attrs(
        long_name=f"angle between {of} and {other}", units="degree"
    )
    coords = {"step": scan.ds["step"], "population": names, "quantile": levels}
    statistics = table(statistics_of_steps, variables, ("step", "population", "quantile"), coords)
    result = xr.Dataset({"cosine": cosine, "angle": angle, **statistics})
    return result.sel(population=population) if population is not None else result


def _of_tokens(scan: Scan, name: str, like: str) -> da.Array:
    """A vector of each token with the chunks of a variable, (step, token, hidden)."""
    if name != "delta":
        return scan.aligned(like, name)
    blocks = scan.aligned(like, "W")
    return measure(
        _change,
        *_with_rows_before(blocks),
        dims=DIMS,
        dtype=np.float64,
        by_row=True,
    )


def _with_rows_before(blocks: da.Array) -> tuple[Any, ...]:
    """Rows and the row before each, and whether there is one."""
    return ConsecutiveRows(blocks=blocks), np.arange(len(blocks)) > 0


def _with_partner(
    scan: Scan, vectors: da.Array, name: str, like: str, population: str | None
) -> da.Array:
    """Cosines, (step, token)."""
    if name in ("grad", "delta"):
        other: Any = _of_tokens(scan, name, like)
    elif name == "previous":
        sources = _with_rows_before(vectors)
        other = measure(_earlier, *sources, dims=DIMS, dtype=vectors.dtype, by_row=True)
    else:
        other = _of_steps(scan, name, population).rechunk((vectors.chunks[0], -1))
        other = along(other, "step", "hidden")
    return measure(_cosines, vectors, other, dims=("step", "token"), dtype=np.float64, by_row=True)


def _of_steps(scan: Scan, name: str, population: str | None) -> da.Array:
    """One vector per step, (step, hidden)."""
    if name == "centroid":
        return centroid(scan, population or "all")["centroid"].data
    if name == "bulk":
        velocity = bulk_thermal(scan, population or "all")["bulk_velocity"].data
        none = da.full((1, velocity.shape[1]), np.nan)
        return da.concatenate([none, velocity])
    input_checks.require_variables(scan.ds, name)
    return scan.ds[name].transpose("step", "hidden").chunk().data


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
    dims = tuple(dim for dim in ("step", "axis", "hidden") if dim in directions.dims)
    vectors = da.asarray(directions.transpose(*dims).data, np.float64)
    vectors = vectors.rechunk((*([blocks.chunks[0]] if "step" in dims else []), -1, -1))
    coordinates = measure(
        _project,
        blocks,
        along(vectors, *dims),
        dims=("step", "token", "coordinate"),
        dtype=np.float64,
        sizes={"coordinate": count + 1},
        by_row=True,
    )
    coords = scan.coords("W", ("step", "token"))
    if "axis" in directions.coords:
        coords["axis"] = directions["axis"]
    on_axis = ResultVariable("f8", "W along the axis", scan.units)
    across = ResultVariable("f8", "length of W across all axes", scan.units)
    variables = {
        "projection": (("step", "token", "axis"), coordinates[..., :count], on_axis),
        "across": (("step", "token"), coordinates[..., count], across),
    }
    return dataset(variables, coords)


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
    input_checks.require_variables(scan.ds, name)
    return scan.ds[name].transpose("step", "hidden").astype(np.float64)


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
    basis = principal_axes(scan, population, first=axis)
    variables = {
        name: ResultVariable("f8", f"{name} of the {of}", "degree")
        for name in ("latitude", "longitude")
    }
    angles = measure(
        _angles,
        # Read again after the axes are known. Otherwise all blocks would stay in memory.
        read_again(blocks, basis),
        along(basis, "axis", "hidden"),
        *([along(blocks[0], "token", "hidden")] if of == "displacement" else []),
        dims=("step", "token"),
        dtype=variables,
        by_row=True,
    )
    axes = xr.DataArray(basis[2:5], dims=("component", "hidden"))
    axes.attrs = {"long_name": "axis and directions across it", "units": "1"}
    result = scan.of_tokens(angles, variables, "W").assign(sky_axes=axes)
    return result.assign_attrs(population=population, axis=axis)
