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
from trajstore.analysis.scan.block_tasks import Array, Points, Wide, measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import chosen_populations
from trajstore.values.norms import hidden_sum, vector_norm

VECTORS = ("W", "delta", "grad")
PARTNERS = ("hidden_mean", "centroid", "bulk", "grad", "delta", "previous")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def _cosines(vectors: Array, others: Array) -> Wide:
    """Cosine of each vector with its partner, or with the only one; NaN for zero vectors."""
    one, other = vectors.astype(np.float64), others.astype(np.float64)
    cosines = hidden_sum(one * other) / (vector_norm(one) * vector_norm(other))
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
    facts = {
        "alignment": Fact("f8", f"mean {label}"),
        "alignment_quantiles": Fact(f"({levels.size},)f8", f"quantiles of the {label}"),
        "aligned_tokens": Fact("i8", "tokens with a cosine"),
    }
    found = measure(
        _statistics,
        "sp",
        cosines.rechunk({1: -1}),
        groups=groups,
        levels=levels,
        dtype=facts,
        sizes={"p": len(groups)},
        by_row=True,
    )
    own = scan.wrap(cosines, like).assign_attrs(long_name=label, units="1")
    angle = own.copy(data=da.rad2deg(da.arccos(cosines))).assign_attrs(
        long_name=f"angle between {of} and {other}", units="degree"
    )
    coords = {"step": scan.ds["step"], "population": names, "quantile": levels}
    statistics = table(found, facts, ("step", "population", "quantile"), coords)
    result = xr.Dataset({"cosine": own, "angle": angle, **statistics})
    return result.sel(population=population) if population is not None else result


def _of_tokens(scan: Scan, name: str, like: str) -> da.Array:
    """A vector of each token with the chunks of a variable, (step, token, hidden)."""
    if name != "delta":
        return scan.aligned(like, name)
    blocks = scan.aligned(like, "W")
    return measure(_change, "sth", *_with_rows_before(blocks), dtype=np.float64, by_row=True)


def _with_rows_before(blocks: da.Array) -> tuple[Any, ...]:
    """Rows and the row before each, and whether there is one."""
    return Points(variable="", type="", blocks=blocks), np.arange(len(blocks)) > 0


def _with_partner(
    scan: Scan, vectors: da.Array, name: str, like: str, population: str | None
) -> da.Array:
    """Cosines, (step, token)."""
    if name in ("grad", "delta"):
        other: Any = _of_tokens(scan, name, like)
    elif name == "previous":
        sources = _with_rows_before(vectors)
        other = measure(_earlier, "sth", *sources, dtype=vectors.dtype, by_row=True)
    else:
        other = _of_steps(scan, name, population).rechunk((vectors.chunks[0], -1)), "sh"
    return measure(_cosines, "st", vectors, other, dtype=np.float64, by_row=True)


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
