"""Angles between the vectors of tokens and other vectors, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.collective import bulk_thermal, centroid
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import measure, over_hidden, rows_before
from trajstore.analysis.scan.facts import Fact, named, record_of
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations.masks import chosen_populations
from trajstore.values.token_norms import hidden_sum, vector_norm

__all__ = ["alignment"]

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]

VECTORS = ("W", "delta", "grad")
PARTNERS = ("hidden_mean", "centroid", "bulk", "grad", "delta", "previous")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def _cosines(vectors: Array, others: Array) -> Wide:
    """Cosine of each vector with its partner, or with that of its row, (row, token).

    NaN for zero vectors.
    """
    result = np.empty(vectors.shape[:2])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for row, (these, those) in enumerate(zip(vectors, others, strict=True)):
            one, other = these.astype(np.float64), those.astype(np.float64)
            lengths = vector_norm(one) * vector_norm(other)
            result[row] = hidden_sum(one * other) / lengths
    return np.clip(result, -1, 1)  # rounding may exceed the range; NaN is kept


def _change(block: Array, boundary: Array, start: npt.NDArray[np.bool_]) -> Wide:
    """Change from the previous row, (row, token, hidden); NaN without one."""
    before = np.concatenate([boundary, block[:-1]])
    with np.errstate(invalid="ignore"):
        change = np.subtract(block, before, dtype=np.float64)
    change[~start.ravel()] = np.nan
    return np.asarray(change)


def _earlier(block: Array, boundary: Array, start: npt.NDArray[np.bool_]) -> Array:
    """Previous row of each row, (row, token, hidden); NaN without one."""
    before = np.concatenate([boundary, block[:-1]])
    before[~start.ravel()] = np.nan
    return before


def _statistics(
    cosines: Wide, groups: npt.NDArray[np.bool_], levels: Wide, record: np.dtype[Any]
) -> npt.NDArray[np.void]:
    """Number, mean and quantiles over tokens with a cosine, (row, population)."""
    result = np.empty((len(cosines), len(groups)), record)
    result["alignment"] = result["alignment_quantiles"] = np.nan
    for row, number in np.ndindex(result.shape):
        known = cosines[row, groups[number]]
        known = np.sort(known[~np.isnan(known)])
        result["aligned_tokens"][row, number] = known.size
        if known.size:
            result["alignment"][row, number] = known.mean()
            result["alignment_quantiles"][row, number] = np.quantile(known, levels)
    return result


@quantity()
def alignment(
    scan: Scan,
    with_: str = "centroid",
    of: str = "W",
    population: str | None = None,
    quantiles: Sequence[float] | float = QUANTILES,
) -> xr.Dataset:
    """Cosines between a vector of each token and another vector, and their statistics.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), and the selected variables.
    with_ : {'hidden_mean', 'centroid', 'bulk', 'grad', 'delta', 'previous'}
        The other vector: the recorded h̄ of the step; the mean of W over `population` (default: all
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
    >>> turns = alignment(ds, with_="previous", of="delta")
    >>> turns.alignment.sel(population="dead", step=[2, 3]).values
    array([1., 1.])
    """
    if of not in VECTORS or with_ not in PARTNERS or of == with_:
        raise InvalidArgument(
            f"got of={of!r} and with_={with_!r}, expected two different vectors: of from "
            f"{', '.join(VECTORS)}; with_ from {', '.join(PARTNERS)}"
        )
    levels = input_checks.quantile_levels(quantiles)
    names, groups = chosen_populations(scan.ds, population)
    like = "grad" if of == "grad" else "W"
    vectors = _of_tokens(scan, of, like)
    cosines = _with_partner(scan, vectors, with_, like, population)
    label = f"cosine of {of} and {with_}"
    facts = {
        "alignment": Fact("f8", f"mean {label}"),
        "alignment_quantiles": Fact(f"({levels.size},)f8", f"quantiles of the {label}"),
        "aligned_tokens": Fact("i8", "tokens with a cosine"),
    }
    table = measure(
        _statistics,
        "sp",
        cosines.rechunk({1: -1}),
        groups=groups,
        levels=levels,
        record=record_of(facts),
        dtype=record_of(facts),
        sizes={"p": len(groups)},
    )
    own = scan.wrap(cosines, like).assign_attrs(long_name=label, units="1")
    angle = own.copy(data=da.rad2deg(da.arccos(cosines))).assign_attrs(
        long_name=f"angle between {of} and {with_}", units="degree"
    )
    dims = ("step", "population", "quantile")
    of_populations = named(table, facts, lambda data: xr.DataArray(data, dims=dims[: data.ndim]))
    result = xr.Dataset(
        {"cosine": own, "angle": angle, **of_populations},
        {"step": scan.ds["step"], "population": names, "quantile": levels},
    )
    return result.sel(population=population) if population is not None else result


def _of_tokens(scan: Scan, name: str, like: str) -> da.Array:
    """A vector of each token with the chunks of a variable, (step, token, hidden)."""
    if name != "delta":
        return scan.aligned(like, name)
    blocks = scan.aligned(like, "W")
    return measure(_change, "sth", *_with_rows_before(blocks), dtype=np.float64)


def _with_rows_before(blocks: da.Array) -> tuple[Any, ...]:
    """Blocks, the row before each, and whether each row has a row before."""
    return blocks, rows_before(blocks), np.arange(len(blocks)) > 0


def _with_partner(
    scan: Scan, vectors: da.Array, with_: str, like: str, population: str | None
) -> da.Array:
    """Cosines, (step, token)."""
    if with_ in ("grad", "delta"):
        other = _of_tokens(scan, with_, like)
    elif with_ == "previous":
        other = measure(_earlier, "sth", *_with_rows_before(vectors), dtype=vectors.dtype)
    else:
        other = _of_steps(scan, with_, population).rechunk((vectors.chunks[0], -1))[:, None]
    return over_hidden(_cosines, vectors, other, dtype=np.float64)


def _of_steps(scan: Scan, name: str, population: str | None) -> da.Array:
    """One vector per step, (step, hidden)."""
    if name == "centroid":
        return centroid(scan, population or "all")["centroid"].data
    if name == "bulk":
        velocity = bulk_thermal(scan, population or "all")["bulk_velocity"].data
        none = da.full((1, velocity.shape[1]), np.nan)
        return da.concatenate([none, velocity])
    input_checks.variables(scan.ds, name)
    return scan.ds[name].transpose("step", "hidden").chunk().data
