"""Centroids of populations, their motion, the motion of tokens about them, and their separation.

Every quantity is computed from whole rows. Token chunks are joined in the order of the tokens, so
that sums do not depend on the chunks. A task holds one block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import (
    Array,
    ConsecutiveRows,
    Wide,
    along,
    in_halves,
    in_turn,
    measure,
    shared,
)
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import (
    ResultVariable,
    ResultVariables,
    dataset,
    record_of,
    table,
)
from trajstore.analysis.scan.rows import tiles, with_lattice_attributes
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import chosen_populations
from trajstore.values.native_types import unsigned_view
from trajstore.values.norms import vector_norm

Kernel = Callable[..., dict[str, Any]]
"""Function of a row of one population that returns named numbers. For motion, it is a function of
(row, previous row, spacing)."""


def _of_groups(
    now: Array, *motion: Any, groups: Array, kernel: Kernel, record: np.dtype[Any]
) -> npt.NDArray[np.void]:
    """Results of each population, (population). An empty one has NaN, or 0 in integers."""
    result = np.zeros(len(groups), record)
    for number, group in enumerate(groups):
        at = slice(None) if group.all() else np.nonzero(group)[0]
        if not group.any():
            values = {name: np.nan for name in record.names or () if record[name].base.kind == "f"}
        else:
            values = kernel(now[at], *(each[at] if np.ndim(each) else each for each in motion))
        for name, value in values.items():
            result[name][number] = value
    return result


def per_population(
    scan: Scan,
    population: str | Sequence[str] | None,
    kernel: Kernel,
    variables: ResultVariables,
    *,
    motion: bool,
    points: ConsecutiveRows | None = None,
    vector: str = "hidden",
) -> xr.Dataset:
    """Numbers of each population at each row.

    Parameters
    ----------
    scan : Scan
    population : str or sequence of str, optional
        One population, or several. Default: all.
    kernel : callable
        A `Kernel`.
    variables : mapping of str to ResultVariable
        What the kernel returns. A type with a shape adds a dimension.
    motion : bool
        True if the variables describe changes between rows, so that row 0 has none.
    points : ConsecutiveRows, optional
        Values to use instead of the stored W.
    vector : str
        Name of the added dimension.
    """
    names, groups = chosen_populations(scan.ds, population)
    points = points or scan.recorded()
    spacing = np.diff(scan.steps, prepend=scan.steps[:1] - 1).astype(np.float64)

    members = shared(groups)

    def of_block(block: ConsecutiveRows, spacing: Array) -> da.Array:
        halves = replace(block, blocks=in_halves(block.blocks))
        return measure(
            _of_groups,
            *((halves, spacing) if motion else (halves.blocks,)),
            dims=("step", "population"),
            groups=members,
            kernel=kernel,
            record=record_of(variables),
            dtype=variables,
            sizes={"population": len(groups)},
            by_row=True,
        )

    rows = slice(1, None) if motion else slice(None)
    measured = in_turn(of_block, points, spacing)[rows] if motion else of_block(points, spacing)
    coords = {"step": scan.ds["step"][rows], "population": names}
    result = table(measured, variables, ("step", "population", vector), coords)
    return result.isel(population=0) if isinstance(population, str) else result


def _mean(shape: tuple[int, ...], vectors: Callable[[slice], Array]) -> Array:
    """Mean of vectors, computed one tile at a time, with the same order of summation."""
    tokens, hidden = shape
    total = np.zeros(hidden)
    for part in tiles(1, tokens, hidden):
        made = vectors(part)
        made[0] += total
        total = made.sum(0)
    return np.asarray(total / tokens)


def _distances(tokens: int, center: Array, vectors: Callable[[slice], Array]) -> Array:
    parts = tiles(1, tokens, center.size)
    return np.concatenate([vector_norm(vectors(part) - center) for part in parts])


def _centroid_kernel(now: Array) -> dict[str, Any]:
    center = _mean(now.shape, lambda part: now[part].astype(np.float64))
    radii = _distances(len(now), center, lambda part: now[part].astype(np.float64))
    return {
        "centroid": center,
        "centroid_norm": vector_norm(center),
        "mean_radius": radii.mean(),
        "max_radius": radii.max(),
    }


@quantity()
def centroid(scan: Scan, population: str | Sequence[str] | None = None) -> xr.Dataset:
    """Centroid of each population, its drift, and distances of the tokens from it.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    population : {'dead', 'live', 'all'}, optional
        A single population. The result then has no dimension population.

    Returns
    -------
    Dataset, float64
        ``centroid`` (step, population, hidden), the mean of W. Over (step, population):
        ``centroid_norm``; ``drift``, the length of its change per optimizer step, NaN at the first
        row; ``mean_radius`` and ``max_radius``, the mean and largest distance of the tokens from
        it. A population without tokens has NaN.

    Raises
    ------
    InvalidArgument
        For an unknown population.

    Examples
    --------
    >>> centroid(ds, "dead").centroid_norm.isel(step=[0, -1]).values.round(3)
    array([1.5  , 1.409])
    """
    unit = scan.units
    hidden = scan.variable("W").sizes["hidden"]
    variables = {
        "centroid": ResultVariable(f"({hidden},)f8", "mean of W", unit),
        "centroid_norm": ResultVariable("f8", "norm of the centroid", unit),
        "mean_radius": ResultVariable("f8", "mean distance from the centroid", unit),
        "max_radius": ResultVariable("f8", "largest distance from the centroid", unit),
    }
    result = per_population(scan, population, _centroid_kernel, variables, motion=False)
    return result.assign(drift=_drift(result["centroid"], scan))


def _drift(centroid: xr.DataArray, scan: Scan) -> xr.DataArray:
    later, earlier = centroid.data[1:], centroid.data[:-1]
    dims = tuple(map(str, centroid.dims))
    pair = along(later, *dims), along(earlier.rechunk(later.chunks), *dims)
    lengths = measure(_displacement, *pair, dims=dims[:-1], dtype=np.float64)
    spacing = scan.spacing().values.reshape(-1, *(1,) * (lengths.ndim - 1))
    none = da.full((min(1, len(centroid)), *lengths.shape[1:]), np.nan)
    data = da.concatenate([none, lengths / spacing]).rechunk(centroid.data.chunks[:-1])
    drift = centroid.isel(hidden=0).copy(data=data)
    return drift.assign_attrs(
        long_name="change of the centroid per step", units=f"{scan.units} per step"
    )


def _displacement(later: Array, earlier: Array) -> Array:
    return vector_norm(later - earlier)


def _bulk_kernel(now: Array, before: Array, spacing: Array) -> dict[str, Any]:
    def velocities(part: slice) -> Array:
        displacements: Array = np.subtract(now[part], before[part], dtype=np.float64)
        return displacements if spacing == 1 else displacements / spacing

    bulk = _mean(now.shape, velocities)
    speed = vector_norm(bulk)
    thermal = np.sqrt(np.square(_distances(len(now), bulk, velocities)).mean())
    ratio = speed / thermal
    return {
        "bulk_velocity": bulk,
        "bulk_speed": speed,
        "thermal_speed": thermal,
        "bulk_thermal_ratio": ratio,
    }


@quantity()
def bulk_thermal(scan: Scan, population: str | Sequence[str] | None = None) -> xr.Dataset:
    """Mean velocity of each population (bulk), and the spread of velocities about it (thermal).

    bulk² + thermal² is the mean square of the tokens' speeds.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step.
    population : {'dead', 'live', 'all'}, optional
        A single population. The result then has no dimension population.

    Returns
    -------
    Dataset, float64, one row fewer than `ds`
        ``bulk_velocity`` (step, population, hidden), mean of ΔW/Δs. Over (step, population):
        ``bulk_speed``, its norm; ``thermal_speed``, root mean square about this mean;
        ``bulk_thermal_ratio``, inf if all tokens have the same velocity, NaN if none moves.

    Raises
    ------
    InvalidArgument
        For an unknown population.

    Examples
    --------
    >>> bulk_thermal(ds).bulk_thermal_ratio.sel(step=1).values.round(2)  # dead tokens move together
    array([ inf,  inf, 1.94])
    """
    unit = f"{scan.units} per step"
    hidden = scan.recorded().blocks.shape[2]
    variables = {
        "bulk_velocity": ResultVariable(f"({hidden},)f8", "mean velocity", unit),
        "bulk_speed": ResultVariable("f8", "length of the mean velocity", unit),
        "thermal_speed": ResultVariable("f8", "rms velocity about the mean", unit),
        "bulk_thermal_ratio": ResultVariable("f8", "bulk over thermal speed"),
    }
    return per_population(scan, population, _bulk_kernel, variables, motion=True)


def _coherence_kernel(now: Array, before: Array, spacing: Array) -> dict[str, Any]:
    displacements = np.subtract(now, before, dtype=np.float64)
    mean = displacements.mean(0)
    lengths = vector_norm(displacements)
    length = vector_norm(mean)
    moving = lengths != 0  # NaN is not 0
    cosines = (displacements * mean).sum(-1)[moving] / lengths[moving] / length
    return {"coherence": cosines.mean() if cosines.size and length != 0 else np.nan}


@quantity()
def coherence(scan: Scan, population: str | None = None) -> xr.DataArray:
    """Mean cosine between each token's ΔW and the mean ΔW of its population.

    Tokens that do not move have no direction and are left out.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step.
    population : {'dead', 'live', 'all'}, optional
        A single population. The result then has no dimension population.

    Returns
    -------
    DataArray, float64 (step, population), one row fewer than `ds`
        From −1 to 1; NaN if nothing moves, or if the motions cancel.

    Raises
    ------
    InvalidArgument
        For an unknown population.

    Examples
    --------
    >>> coherence(ds).sel(step=1).to_series().round(3).to_dict()
    {'dead': 1.0, 'live': 1.0, 'all': 0.844}
    """
    variables = {"coherence": ResultVariable("f8", "mean cosine between ΔW and its mean")}
    result = per_population(scan, population, _coherence_kernel, variables, motion=True)
    return result["coherence"]


def _distinct_kernel(now: Array) -> dict[str, Any]:
    vectors = unsigned_view(np.ascontiguousarray(now))
    whole = vectors.view(f"V{vectors.shape[1] * vectors.itemsize}").ravel()
    _, counts = np.unique(whole, return_counts=True)
    return {"distinct": np.int64(counts.size), "most_common": np.int64(counts.max())}


@quantity()
def distinct(scan: Scan, population: str | None = None, lattice: str = "native") -> xr.Dataset:
    """Number of distinct vectors of each population, bit for bit.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    population : {'dead', 'live', 'all'}, optional
        A single population. The result then has no dimension population.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type.

    Returns
    -------
    Dataset, int64 (step, population)
        ``distinct``, the number of distinct bit patterns of W; ``most_common``, the number of
        tokens with the most common one. −0.0 and +0.0 have different bits. 0 without tokens.

    Raises
    ------
    InvalidArgument
        For an unknown population or lattice, or if W holds values that do not fit
        ``native_dtype``.

    Examples
    --------
    >>> distinct(ds).distinct.isel(step=-1).to_series().to_dict()
    {'dead': 1, 'live': 2, 'all': 3}
    """
    variables = {
        "distinct": ResultVariable("i8", "distinct vectors"),
        "most_common": ResultVariable("i8", "tokens that share the most common vector"),
    }
    points = scan.points(lattice)
    result = per_population(
        scan, population, _distinct_kernel, variables, motion=False, points=points
    )
    return with_lattice_attributes(result, lattice)


def _directions(vectors: Wide) -> Wide:
    return np.asarray(vectors / vector_norm(vectors)[..., None])


def _pairs(vectors: Wide) -> Wide:
    """Distance and angle in degrees of each pair, (…, 2, population, population)."""
    unit = _directions(vectors)
    distance = vector_norm(vectors[..., :, None, :] - vectors[..., None, :, :])
    apart = vector_norm(unit[..., :, None, :] - unit[..., None, :, :])
    together = vector_norm(unit[..., :, None, :] + unit[..., None, :, :])
    # Accurate for all angles, unlike the arc cosine.
    return np.stack([distance, np.degrees(2 * np.arctan2(apart, together))], -3)


@quantity()
def separation(scan: Scan, of: Literal["centroid", "displacement"] = "centroid") -> xr.Dataset:
    """Distance and angle between populations, and the direction of each.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    of : {'centroid', 'displacement'}
        Vector of a population: its centroid, or the net displacement of its centroid since the
        first row.

    Returns
    -------
    Dataset, float64
        ``separation`` (step, population, other_population), L2 distance between the two vectors,
        units of W; ``separation_angle``, the angle between them in degrees; ``direction`` (step,
        population, hidden), the vector divided by its length. Angle and direction are NaN for a
        vector of length zero, such as the displacement of the first row.

    Raises
    ------
    InvalidArgument
        If `of` is unknown.

    Examples
    --------
    >>> pair = separation(ds).sel(population="dead", other_population="live")
    >>> pair.separation.isel(step=[0, -1]).values.round(3)
    array([1.5  , 1.734])
    """
    scan.require_rows(1, "separation")
    center = centroid(scan)["centroid"]
    vectors = center if of == "centroid" else center - center[:1].drop_vars("step").squeeze("step")
    names = vectors["population"].values
    data = vectors.data.rechunk({1: -1, 2: -1})
    sizes = {"measure": 2, "other_population": len(names)}
    pairs = measure(
        _pairs,
        along(data, "step", "population", "hidden"),
        dims=("step", "measure", "population", "other_population"),
        dtype=np.float64,
        sizes=sizes,
    )
    direction = measure(
        _directions,
        along(data, "step", "population", "hidden"),
        dims=("step", "population", "hidden"),
        dtype=np.float64,
    )
    dims = ("step", "population", "other_population")
    distance = ResultVariable("f8", f"distance between {of}s", scan.units)
    variables = {
        "separation": (dims, pairs[:, 0], distance),
        "separation_angle": (
            dims,
            pairs[:, 1],
            ResultVariable("f8", f"angle between {of}s", "degree"),
        ),
        "direction": (vectors.dims, direction, ResultVariable("f8", f"direction of the {of}")),
    }
    return dataset(variables, {**dict(vectors.coords), "other_population": names})
