"""Shape of the cloud of tokens: principal axes, and inertia at each step."""

from __future__ import annotations

import functools
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.motion.collective import per_population
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import (
    Array,
    Wide,
    along,
    fold,
    in_parts,
    measure,
    read_again,
)
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, dataset
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import one_population
from trajstore.values.norms import hidden_sum, result_dtype

# Maximum bytes of scatter matrices per task.
_SCATTER_BYTES = 8 << 20


def _scatter(vectors: Array) -> tuple[Wide, Wide]:
    """Mean, and sum of products of the deviations from it."""
    wide = vectors.astype(np.float64)
    mean = wide.mean(0)
    wide -= mean
    return mean, wide.T @ wide


def _principal(covariance: Wide) -> tuple[Wide, Wide]:
    """Eigenvalues, largest first, and eigenvectors as rows; NaN if not finite.

    The sign of an eigenvector makes its largest element positive.
    """
    if not np.isfinite(covariance).all():
        return np.full(len(covariance), np.nan), np.full(covariance.shape, np.nan)
    values, vectors = np.linalg.eigh(covariance)
    axes = vectors.T[::-1]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1)
    # Values below zero are rounding errors.
    return np.maximum(values[::-1], 0), axes * np.where(largest < 0, -1.0, 1.0)


def _ranks(spectrum: Wide) -> tuple[float, float]:
    """Effective rank and participation ratio of a spectrum; NaN without any variance."""
    total = spectrum.sum()
    if not total > 0:
        return np.nan, np.nan
    share = spectrum / total
    filled = share[share > 0]
    return float(np.exp(-(filled * np.log(filled)).sum())), float(1 / np.square(share).sum())


def _scatters(chunks: list[Array], members: Array) -> list[tuple[int, Wide, Wide]]:
    """Number, mean and scatter of the finite vectors of each row."""
    result = []
    for row in range(len(chunks[0])):
        vectors = np.concatenate([chunk[row] for chunk in chunks])
        vectors = vectors if members.size == len(vectors) else vectors[members]
        if not np.isfinite(vectors).all():  # rare; the check is faster than a selection
            vectors = vectors[np.isfinite(vectors).all(1)]
        if len(vectors):
            result.append((len(vectors), *_scatter(vectors)))
    return result


def _gather(
    state: tuple[int, Wide, Wide] | None, rows: list[tuple[int, Wide, Wide]]
) -> tuple[int, Wide, Wide] | None:
    """Add some rows to the number, mean and scatter of all vectors; None without any.

    Rows are added in sequence, so that the sums do not depend on the blocks.
    """
    for scatter_of_row in rows:
        state = scatter_of_row if state is None else _both(state, scatter_of_row)
    return state


def _both(first: tuple[int, Wide, Wide], second: tuple[int, Wide, Wide]) -> tuple[int, Wide, Wide]:
    """Pairwise combination of sums of squares: Chan, Golub and LeVeque, 1983."""
    total = first[0] + second[0]
    difference = second[1] - first[1]
    scatter = (
        first[2] + second[2] + np.outer(difference, difference) * (first[0] * second[0] / total)
    )
    return total, first[1] + difference * (second[0] / total), scatter


def _axes_of(state: tuple[int, Wide, Wide] | None, hidden: int) -> Wide:
    """Mean, spectrum and axes, (2 + hidden, hidden)."""
    if state is None:
        return np.full((2 + hidden, hidden), np.nan)
    count, mean, scatter = state
    spectrum, axes = _principal(scatter / count)
    return np.concatenate([mean[None], spectrum[None], axes])


def _with_first(axes_of_all: Wide, first: Wide) -> Wide:
    """Replace the axes of `_axes_of` by a given first axis, and principal axes orthogonal to it."""
    spectrum, axes = axes_of_all[1], axes_of_all[2:]
    covariance = (axes.T * spectrum) @ axes
    whole, taken = np.trace(covariance), np.outer(first, first)
    across = np.eye(len(first)) - taken
    # A negative variance along the first axis makes it the last one, which is dropped.
    values, others = _principal(across @ covariance @ across - taken * (whole or 1))
    variances = [first @ covariance @ first, *(values[:-1] if whole else 0 * values[:-1])]
    return np.concatenate([axes_of_all[:1], [variances], first[None], others[:-1]])


def _scores(vectors: Array, axes: Wide, count: int) -> Wide:
    """Coordinates along the first axes about the mean, (token, component)."""
    about = np.subtract(vectors, axes[0], dtype=np.float64)
    along = np.empty(about.shape)
    return np.stack(
        [hidden_sum(np.multiply(about, axis, out=along)) for axis in axes[2 : 2 + count]], -1
    )


def principal_axes(
    scan: Scan, population: str, basis: str | int = "all", first: str | None = None
) -> da.Array:
    """Mean, spectrum and axes of `pca`, (2 + hidden, hidden)."""
    blocks = scan.blocks("W")
    hidden = blocks.shape[2]
    group = one_population(scan.ds, population)
    axes = fold(
        _gather,
        in_parts(blocks[_rows_of_basis(scan, basis)], max(1, _SCATTER_BYTES // (8 * hidden**2))),
        finish=functools.partial(_axes_of, hidden=hidden),
        sizes=(2 + hidden, hidden),
        prepare=_scatters,
        whole_rows=True,
        members=np.nonzero(group)[0],
    )
    if first is not None:
        axis = along(_first_axis(scan, first, axes), "hidden")
        axes = measure(
            _with_first,
            along(axes, "axis", "hidden"),
            axis,
            dims=("axis", "hidden"),
            dtype=np.float64,
        )
    return axes


@quantity()
def pca(
    scan: Scan,
    population: str = "all",
    components: int = 3,
    basis: str | int = "all",
    first: Literal["hidden_mean", "centroid"] | None = None,
) -> xr.Dataset:
    """Principal axes of a population, one basis for all steps, and all tokens projected on them.

    The covariance is accumulated row by row, so memory holds at most a block of rows.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    population : str
        Population whose vectors define the basis.
    components : int
        Number of axes to project tokens on.
    basis : {'all', 'last'} or int
        Rows that define the basis: all, the last one, or the row of a step.
    first : {'hidden_mean', 'centroid'}, optional
        Use the direction of h̄, averaged over the steps, or of W̄ as the first axis. The others are
        principal axes orthogonal to it.

    Returns
    -------
    Dataset, float64
        ``spectrum`` (principal), eigenvalues of the covariance Σ(W − W̄)(W − W̄)ᵀ/n over tokens and
        rows, largest first, in units of W squared (with `first`, the variance along each axis);
        ``effective_rank``, exp(−Σ p ln p) of their fractions p (Roy and Vetterli, EUSIPCO 2007),
        and ``participation_ratio``, 1/Σp²; ``basis_mean`` (hidden) and ``basis`` (component,
        hidden), of unit length, with a positive largest element; ``scores`` (step, token,
        component) of *all* tokens, (W − W̄)·basis, of the type of a norm. Vectors that are not
        finite are excluded from the basis, and their scores are NaN. All results are NaN if the
        population has no finite vectors; the ranks also if all vectors are equal.

    Raises
    ------
    InvalidArgument
        For an unknown population, basis or first axis, or a number of components that is not from 1
        to hidden.
    StepNotFound
        If the step of the basis was not recorded.
    VariableNotRecorded
        If h̄ is the first axis and was not recorded.

    Examples
    --------
    >>> found = pca(ds, "dead", components=2)
    >>> found.effective_rank.values.round(3).item()  # dead tokens move along one line
    1.0
    """
    blocks = scan.blocks("W")
    hidden = blocks.shape[2]
    if not 1 <= components <= hidden:
        raise InvalidArgument(f"got components={components}, expected 1 to {hidden}")
    axes = principal_axes(scan, population, basis, first)
    scores = measure(
        _scores,
        # Read again after the basis is known. Otherwise all blocks would stay in memory.
        read_again(blocks, axes),
        along(axes, "axis", "hidden"),
        dims=("step", "token", "component"),
        count=components,
        dtype=result_dtype(blocks.dtype),
        sizes={"component": components},
        by_row=True,
    )
    ranks = measure(
        _ranks, along(axes[1], "hidden"), dims=("rank",), dtype=np.float64, sizes={"rank": 2}
    )
    unit = scan.units
    square = "1" if unit == "1" else f"({unit})^2"
    variances = ResultVariable("f8", "variance along each principal axis", square)
    rank = ResultVariable("f8", "effective rank of the covariance")
    ratio = ResultVariable("f8", "participation ratio of the spectrum")
    coordinate = ResultVariable("f8", "coordinate along the principal axis", unit)
    variables: dict[str, tuple[Any, Any, ResultVariable]] = {
        "spectrum": ("principal", axes[1], variances),
        "effective_rank": ((), ranks[0], rank),
        "participation_ratio": ((), ranks[1], ratio),
        "basis_mean": (
            "hidden",
            axes[0],
            ResultVariable("f8", "mean of the vectors of the basis", unit),
        ),
        "basis": (
            ("component", "hidden"),
            axes[2 : 2 + components],
            ResultVariable("f8", "principal axes"),
        ),
        "scores": (("step", "token", "component"), scores, coordinate),
    }
    coords = scan.coords("W", ("step", "token"))
    return dataset(variables, coords).assign_attrs(population=population)


def scores_along_axes(scan: Scan, principal: xr.Dataset) -> xr.DataArray:
    """Coordinates of all tokens of a prepared Dataset along known axes.

    Parameters
    ----------
    scan : Scan
        With ``W``. Its rows and tokens may differ from those that defined the axes.
    found : Dataset
        Computed ``basis`` and ``basis_mean`` of `pca`.

    Returns
    -------
    DataArray (step, token, component)
    """
    blocks = scan.blocks("W")
    count, hidden = principal["basis"].shape
    axes = np.concatenate(
        [principal["basis_mean"].values[None], np.zeros((1, hidden)), principal["basis"].values]
    )
    scores = measure(
        _scores,
        blocks,
        dims=("step", "token", "component"),
        axes=axes,
        count=count,
        dtype=result_dtype(blocks.dtype),
        sizes={"component": count},
        by_row=True,
    )
    return scan.wrap(scores, "W", dims=("step", "token", "component"))


def _rows_of_basis(scan: Scan, basis: str | int) -> slice:
    if basis == "all":
        return slice(None)
    if basis == "last":
        row = max(scan.rows - 1, 0)
    elif isinstance(basis, str):
        raise InvalidArgument(f"got basis={basis!r}, expected 'all', 'last' or a step")
    else:
        row = input_checks.row_of_step(scan.ds, basis)
    return slice(row, row + 1)


def _first_axis(scan: Scan, name: str, axes: da.Array) -> da.Array:
    if name == "centroid":
        mean = axes[0]
    else:
        input_checks.require_variables(scan.ds, name)
        states = da.asarray(scan.ds[name].transpose("step", "hidden").data).rechunk(-1)
        mean = da.nanmean(states.astype(np.float64), axis=0)
    return (mean / da.linalg.norm(mean)).rechunk(-1)


def _inertia_kernel(now: Array) -> dict[str, Any]:
    _, scatter = _scatter(now)
    values, _ = _principal(scatter / len(now))
    return {"inertia": values, "inertia_rank": _ranks(values)[0]}


@quantity()
def inertia(scan: Scan, population: str | None = None) -> xr.Dataset:
    """Variance of each population along its own principal axes at each step.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    population : str, optional
        A single population. The result then has no dimension population.

    Returns
    -------
    Dataset, float64
        ``inertia`` (step, population, principal), eigenvalues of the covariance of the tokens at a
        step, largest first, in units of W squared. Their sum is the mean square distance from the
        centroid. ``inertia_rank`` (step, population), their effective rank as in `pca`, NaN if all
        tokens are equal. A population without tokens has NaN.

    Raises
    ------
    InvalidArgument
        For an unknown population.

    Examples
    --------
    >>> found = inertia(ds, "all").inertia.isel(step=0, principal=slice(2)).values
    >>> found.round(3)  # two distinct vectors at first
    array([0.162, 0.   ])
    """
    unit = scan.units
    hidden = scan.variable("W").sizes["hidden"]
    variables = {
        "inertia": ResultVariable(
            f"({hidden},)f8",
            "variance along the principal axes of the step",
            "1" if unit == "1" else f"({unit})^2",
        ),
        "inertia_rank": ResultVariable("f8", "effective rank of the cloud"),
    }
    return per_population(
        scan, population, _inertia_kernel, variables, motion=False, vector="principal"
    )
