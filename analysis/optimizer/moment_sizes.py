"""Sizes of Adam's moments of each token, and ratios of the recorded moments to the exact ones.

Exact quantiles of the ratios would need all elements of a row at once. Instead the distances of the
ratios from 1 are counted in classes, 16 per factor of two. Counts can be added over any parts of
the elements, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.moments import Recurrence, steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, along, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, ResultVariables, table
from trajstore.analysis.scan.rows import tiles
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import populations
from trajstore.values.native_types import unsigned_view
from trajstore.values.norms import hidden_sum
from trajstore.values.optimizer_rule import MOMENTS, OptimizerRule

_FACTS = {
    "first_moment_size": ResultVariable("f8", "mean of |m̂| over hidden", "nat"),
    "second_moment_root": ResultVariable("f8", "mean of √v̂ over hidden", "nat"),
    "moment_ratio": ResultVariable("f8", "mean of |m̂|/√v̂ over hidden"),
}


def _sizes(
    first: Array, second: Array, step: int, numbers: np.void, rule: OptimizerRule
) -> dict[str, npt.NDArray[np.float64]]:
    by_first, by_second = rule.at(numbers).corrections(step)
    size = np.abs(first.astype(np.float64)) / by_first
    root = np.sqrt(second.astype(np.float64)) / by_second
    nothing = (size == 0) & (root == 0)
    ratio = np.where(nothing, 0, size / root)
    return {
        "first_moment_size": hidden_sum(size) / size.shape[1],
        "second_moment_root": hidden_sum(root) / size.shape[1],
        "moment_ratio": hidden_sum(ratio) / (~nothing).sum(-1),
    }


@quantity()
def moment_sizes(scan: Scan, optimizer: Mapping[str, Any] | None = None) -> xr.Dataset:
    """Sizes of Adam's moments of each token, with bias correction, and their ratio.

    m̂ = m/(1 − β₁ᵗ) and v̂ = v/(1 − β₂ᵗ), t the number of steps that the optimizer has taken.
    Without ε, Adam changes an element by lr·m̂/√v̂. Source: Kingma and Ba, arXiv:1412.6980,
    algorithm 1.

    Parameters
    ----------
    ds : Dataset
        With ``exp_avg`` and ``exp_avg_sq``.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.

    Returns
    -------
    Dataset, float64 (step, token)
        Means over hidden: ``first_moment_size`` of ``|m̂|`` and ``second_moment_root`` of √v̂, nat
        per unit of W; ``moment_ratio`` of ``|m̂|``/√v̂, without elements whose moments are both 0.
        NaN at step 0. The ratio is also NaN if no element is left.

    Raises
    ------
    VariableNotRecorded
        If the moments or the optimizer are not recorded.
    InvalidArgument
        For an optimizer other than Adam or AdamW, and for a run with skipped steps whose first rows
        are missing.

    Examples
    --------
    >>> sizes = moment_sizes(ds)  # at step 1, m̂ is the gradient, and v̂ its square
    >>> sizes.moment_ratio.sel(step=1, token=ord("z")).values.round(2).item()
    1.0
    """
    input_checks.require_variables(scan.ds, *MOMENTS)
    rule, numbers = input_checks.adam_rule(scan.ds, optimizer)
    first, second = MOMENTS
    sizes = measure(
        _sizes,
        scan.blocks(first),
        scan.aligned(first, second),
        steps_taken(scan, "moment_sizes"),
        numbers,
        dims=("step", "token"),
        rule=rule,
        dtype=_FACTS,
        by_row=True,
    )
    return scan.of_tokens(sizes, _FACTS, first)


_SQUARES = np.dtype([("recorded", np.float64), ("exact", np.float64)])

# Without its lowest 19 bits, a float32 is its exponent and four bits of mantissa.
_SHIFT = 19
_BIAS = 127
_LEAST = (_BIAS - 24) << 4
_MOST = (_BIAS + 24) << 4
_SIDE = _MOST - _LEAST
_NAN = 2 * _SIDE + 3

CLASSES = _NAN + 1
"""Number of classes: ratios from −∞ to below 1, 1 itself, above 1 to ∞, and NaN last."""


def ratio_classes(ratios: Array) -> npt.NDArray[np.intp]:
    """Class of each ratio, in the order of the ratios.

    Parameters
    ----------
    ratios : ndarray of float64

    Returns
    -------
    ndarray of int, same shape
        Distances from 1 below 2⁻²⁴ count as 0; distances of 2²⁴ and above as infinite.
    """
    distance = (ratios - 1).astype(np.float32)
    bits = unsigned_view(distance)
    place = ((bits & np.uint32(0x7FFFFFFF)) >> np.uint32(_SHIFT)).astype(np.intp)
    np.clip(place, _LEAST - 1, _MOST, out=place)
    place -= _LEAST - 1
    np.negative(place, out=place, where=(bits >> np.uint32(31)) != 0)
    place += _SIDE + 1
    place[np.isnan(distance)] = _NAN
    return place


def _middles() -> npt.NDArray[np.float64]:
    """Representative ratio of each class except NaN."""
    edges = (np.arange(_LEAST, _MOST + 1, dtype=np.uint32) << np.uint32(_SHIFT)).view(np.float32)
    wide = edges.astype(np.float64)
    above = np.concatenate([(wide[:-1] + wide[1:]) / 2, [np.inf]])
    return 1 + np.concatenate([-above[::-1], [0], above])


_MIDDLES = _middles()


def quantiles_of_counts(counts: Array, levels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Quantiles of the counted ratios.

    Parameters
    ----------
    counts : ndarray of int, (…, class)
    levels : ndarray of float64, (quantile,)
        From 0 to 1.

    Returns
    -------
    ndarray of float64, (…, quantile)
        The ratio of rank ⌊level · (n − 1)⌋ of n, accurate to 1/32 of its distance from 1. NaN if a
        NaN was counted, or nothing.
    """
    below = counts[..., :_NAN].cumsum(-1)
    total = below[..., -1]
    result = np.full((*total.shape, levels.size), np.nan)
    for at in np.ndindex(total.shape):
        if total[at] and not counts[at][_NAN]:
            ranks = np.floor(levels * (total[at] - 1))
            result[at] = _MIDDLES[np.searchsorted(below[at], ranks, side="right")]
    return result


def _count_kernel(
    recorded: Array, exact: npt.NDArray[np.float64], group: Array, groups: int
) -> npt.NDArray[np.int64]:
    """Count of ratios of each group in each class: (row, 1, group · class)."""
    rows, tokens, hidden = recorded.shape
    result = np.zeros((rows, 1, groups * CLASSES), np.int64)
    for part in tiles(1, tokens, hidden):
        first = group[0, part] * CLASSES
        for row in range(rows):
            numerator, denominator = recorded[row, part].astype(np.float64), exact[row, part]
            ratio = numerator / denominator
            ratio[(numerator == 0) & (denominator == 0)] = 1
            classes = (ratio_classes(ratio) + first).ravel()
            result[row, 0] += np.bincount(classes, minlength=groups * CLASSES)
    return result


def _squares_kernel(recorded: Array, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.void]:
    rows, tokens, hidden = recorded.shape
    result = np.empty((rows, tokens), _SQUARES)
    for part in tiles(rows, tokens, hidden):
        for name, block in (("recorded", recorded), ("exact", exact)):
            wide = np.ascontiguousarray(block[:, part], np.float64)
            result[name][:, part] = np.square(wide).sum(-1)
    return result


def _error_kernel(
    counts: npt.NDArray[np.int64],
    squares: npt.NDArray[np.void],
    groups: npt.NDArray[np.bool_],
    members: npt.NDArray[np.int64],
    levels: npt.NDArray[np.float64],
) -> dict[str, npt.NDArray[np.float64]]:
    """Ratio of norms and quantiles, (population)."""
    numerator, denominator = (
        np.sqrt([np.ascontiguousarray(squares[name][group]).sum() for group in groups])
        for name in ("recorded", "exact")
    )
    ratio = np.where((numerator == 0) & (denominator == 0), 1, numerator / denominator)
    whole = members @ counts.reshape(-1, CLASSES)
    return {
        "norm_ratio": np.where(groups.any(1), ratio, np.nan),
        "ratio_quantiles": quantiles_of_counts(whole, levels),
    }


@quantity()
def moment_error(
    scan: Scan,
    optimizer: Mapping[str, Any] | None = None,
    quantiles: Sequence[float] | float = (0.05, 0.25, 0.5, 0.75, 0.95),
) -> xr.Dataset:
    """Ratios of the recorded moments to exact moments without rounding.

    Parameters
    ----------
    ds : Dataset
        With the variables that `exact_moments` needs, ``exp_avg`` and ``exp_avg_sq``.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.
    quantiles : float or sequence of float
        From 0 to 1.

    Returns
    -------
    Dataset, float64
        ``norm_ratio`` (step, population, moment): ‖recorded‖/‖exact‖, with norms over all elements
        of the population. ``ratio_quantiles`` (step, population, moment, quantile): quantiles of
        recorded/exact per element, counted in classes. Each is accurate to 1/32 of its distance
        from 1; distances below 2⁻²⁴ are 0, and distances of 2²⁴ and above are infinite. A ratio of
        1 means no error; 0/0 counts as 1. All are NaN if an element is NaN, or the population has
        no tokens. Without ``is_dead``, the only population is ``all``.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        As for `exact_moments`; and if a quantile is not from 0 to 1.

    Examples
    --------
    >>> error = moment_error(ds).norm_ratio.sel(moment="exp_avg_sq", population="dead")
    >>> error.dims
    ('step',)
    """
    levels = input_checks.quantile_levels(quantiles)
    input_checks.require_variables(scan.ds, "grad", "clip_coef", *MOMENTS)
    recurrence = Recurrence.of(scan, optimizer, "moment_error")
    names, groups = populations(scan.ds)
    variables = {
        "norm_ratio": ResultVariable(
            "f8", "norm of the recorded moment over norm of the exact moment"
        ),
        "ratio_quantiles": ResultVariable(
            f"({levels.size},)f8", "quantiles of the recorded over the exact moment, by element"
        ),
    }
    errors = da.concatenate(_errors(recurrence, groups, levels, variables))
    dims = ("step", "population", "moment", "quantile")
    coords = (scan.ds["step"], names, list(MOMENTS), levels)
    return table(errors, variables, dims, dict(zip(dims, coords, strict=True)))


def _errors(
    recurrence: Recurrence,
    groups: npt.NDArray[np.bool_],
    levels: npt.NDArray[np.float64],
    variables: ResultVariables,
) -> list[da.Array]:
    """Ratio of norms and quantiles in each block of rows, (step, population, moment)."""
    by_token = recurrence.gradient.chunks[1]
    # Populations may overlap, so tokens are counted in disjoint sets: the members of each, and the
    # set of each token.
    members, kind = np.unique(groups, axis=1, return_inverse=True)
    kinds = members.shape[1]
    group = da.from_array(kind.reshape(1, -1, 1), chunks=((1,), by_token, (1,)))

    def of_moment(recorded: da.Array, exact: da.Array) -> da.Array:
        counts = measure(
            _count_kernel,
            recorded,
            exact,
            along(group, "single_row", "token", "single_element"),
            dims=("step", "token", "class"),
            groups=kinds,
            dtype=np.int64,
            sizes={"token": 1, "class": kinds * CLASSES},
        )
        squares = measure(_squares_kernel, recorded, exact, dims=("step", "token"), dtype=_SQUARES)
        return measure(
            _error_kernel,
            along(counts.sum(axis=1), "step", "class"),
            squares.rechunk({1: -1}),
            dims=("step", "population"),
            groups=groups,
            members=members.astype(np.int64),
            levels=levels,
            dtype=variables,
            sizes={"population": len(groups)},
            by_row=True,
        )

    def compute(number: int, exact: Mapping[str, da.Array], _: list[da.Array]) -> da.Array:
        pairs = ((recurrence.recorded(name).blocks[number], exact[name]) for name in MOMENTS)
        return da.stack([of_moment(*pair) for pair in pairs], axis=2)

    return recurrence.in_turn(compute)
