"""Updates that rounding loses: of each token, of each parameter, and by the sizes of moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.moments import Recurrence, intended_change, steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, along, measure
from trajstore.analysis.scan.quantity import quantity, takes_scan
from trajstore.analysis.scan.result_variables import ResultVariable, dataset, table
from trajstore.analysis.scan.rows import tiles
from trajstore.analysis.scan.scan import Scan, native_dtype
from trajstore.errors import InvalidArgument
from trajstore.populations import populations
from trajstore.store.reading.run_attributes import parameter_dataset
from trajstore.values.native_types import spacing
from trajstore.values.optimizer_rule import MOMENTS, OptimizerRule

_VARIABLES = (*MOMENTS, "W")

_KIND = f"({len(_VARIABLES)},)f8"
_FACTS = {
    "meant_fraction": ResultVariable(_KIND, "fraction of elements with an intended change"),
    "stuck_fraction": ResultVariable(
        _KIND, "fraction of these elements that rounding left unchanged"
    ),
    "update_lost": ResultVariable(
        "f8", "fraction of the norm of the update of W that rounding lost"
    ),
}
_COUNTS = np.dtype(
    [
        ("meant", np.int64, (len(_VARIABLES),)),
        ("left", np.int64, (len(_VARIABLES),)),
        ("intended", np.float64),
        ("lost", np.float64),
    ]
)
"""Counts of elements per variable, and squares of the update of W, per token and step."""


def _count_kernel(
    gradient: Array,
    exp_avg: Array,
    exp_avg_boundary: Array,
    exp_avg_sq: Array,
    exp_avg_sq_boundary: Array,
    W: Array,
    W_boundary: Array,
    lr: Array,
    count: Array,
    taken: Array,
    numbers: npt.NDArray[np.void],
    rule: OptimizerRule,
) -> npt.NDArray[np.void]:
    rows, tokens, hidden = W.shape
    result = np.zeros((rows, tokens), _COUNTS)
    rule = rule.at(numbers)
    pairs = ((exp_avg, exp_avg_boundary), (exp_avg_sq, exp_avg_sq_boundary), (W, W_boundary))
    for part in tiles(rows, tokens, hidden):
        out = result[:, part]
        for number, (name, (block, boundary)) in enumerate(zip(_VARIABLES, pairs, strict=True)):
            before = np.concatenate([boundary[:, part], block[:-1, part]])
            if name == "W":
                intended = rule.change(
                    before.astype(np.float64),
                    exp_avg[:, part].astype(np.float64),
                    exp_avg_sq[:, part].astype(np.float64),
                    lr,
                    count,
                    "float64",
                )
            else:
                intended = intended_change(rule, name, before, gradient[:, part])
            meant = (intended != 0) & np.isfinite(intended) & taken
            left = meant & (before == block[:, part])
            out["meant"][..., number] = meant.sum(-1)
            out["left"][..., number] = left.sum(-1)
            if name == "W":
                # Contiguous along hidden, because the order of summation affects the result.
                squares = np.square(np.ascontiguousarray(np.where(taken, intended, 0)))
                out["intended"] = squares.sum(-1)
                out["lost"] = np.where(left, squares, 0).sum(-1)
    return result


def _fraction_kernel(
    counts: npt.NDArray[np.void], groups: npt.NDArray[np.bool_], hidden: int
) -> dict[str, Array]:
    """Results of `moment_stuck`, (population)."""
    members = [counts[group] for group in groups]
    meant, left, intended, lost = (
        np.stack([np.ascontiguousarray(each[name]).sum(0) for each in members])
        for name in _COUNTS.names or ()
    )
    elements = np.float64(hidden) * groups.sum(-1, keepdims=True)
    return {
        "meant_fraction": meant / elements,
        "stuck_fraction": left / meant,
        "update_lost": np.sqrt(lost / intended),
    }


@quantity()
def moment_stuck(scan: Scan, optimizer: Mapping[str, Any] | None = None) -> xr.Dataset:
    """Fraction of elements that the optimizer intended to change, and that rounding left unchanged.

    The intended change of each step is computed in float64 from the recorded state before it:
    (1 − β₁)(g − m) and (1 − β₂)(g² − v) for the moments, and the whole update with weight decay for
    W, without the intermediate rounding of `adam_update`. An element is stuck if its value is
    equal after the step, where −0 and +0 are equal.

    Parameters
    ----------
    ds : Dataset
        With ``W``, ``grad``, ``clip_coef``, ``exp_avg``, ``exp_avg_sq`` and ``lr`` of consecutive
        steps.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.

    Returns
    -------
    Dataset, float64, one row fewer than `ds`
        ``meant_fraction`` (step, population, variable): fraction of the elements of ``exp_avg``,
        ``exp_avg_sq`` and ``W`` with a finite, nonzero intended change. ``stuck_fraction``, same
        dimensions: fraction of these elements that are stuck. ``update_lost`` (step, population):
        norm of the intended update of W over the stuck elements, as a fraction of its whole norm.
        NaN if no change was intended, such as in skipped steps. Without ``is_dead``, the only
        population is ``all``.

    Raises
    ------
    VariableNotRecorded
        If a variable or the optimizer is not recorded.
    InvalidArgument
        If steps are missing; for an unsupported optimizer, or amsgrad; and for a run with skipped
        steps whose first rows are missing, because skipped steps affect the bias correction.

    Examples
    --------
    >>> stuck = moment_stuck(ds).stuck_fraction.sel(variable="exp_avg_sq")
    >>> stuck.dims
    ('step', 'population')
    """
    ds = scan.ds
    input_checks.require_variables(ds, "W", "grad", "clip_coef", *MOMENTS, "lr")
    recurrence = Recurrence.of(scan, optimizer, "moment_stuck")
    counts = measure(
        _count_kernel,
        recurrence.gradient,
        *(recurrence.rows_of(name) for name in _VARIABLES),
        np.asarray(ds["lr"].values, np.float64),
        steps_taken(recurrence.scan, "moment_stuck"),
        recurrence.taken,
        recurrence.numbers,
        dims=("step", "token"),
        rule=recurrence.rule,
        dtype=_COUNTS,
    )
    names, groups = populations(ds)
    fractions = measure(
        _fraction_kernel,
        counts.rechunk({1: -1}),
        dims=("step", "population"),
        groups=groups,
        hidden=ds.sizes["hidden"],
        dtype=_FACTS,
        sizes={"population": len(groups)},
        by_row=True,
    )[1:]
    coords = {"step": ds["step"][1:], "population": names, "variable": list(_VARIABLES)}
    return table(fractions, _FACTS, ("step", "population", "variable"), coords)


def lost_by_parameter(ds: xr.Dataset, rows: Sequence[int]) -> xr.DataArray:
    """Fraction of a parameter's elements with a gradient ≠ 0 that a step did not change.

    Parameters
    ----------
    ds : Dataset
        A run of the tier ``everything``.
    rows : sequence of int
        Rows after the first. Each is read with the row before it, and no other row is.

    Returns
    -------
    DataArray, float64 (row, parameter)
        As ``param_update_lost``, from 0 to 1. NaN if the parameter has no gradient, or a gradient
        of zeros or with NaN. Also NaN if no step was taken, the learning rate is 0, or the row
        before is not the step before.
    """
    names = [entry["name"] for entry in ds.attrs["parameters"]]
    small = [name for name in ("params_lr", "params_count", "lr", "skipped") if name in ds]
    ds = ds[["W", "grad", "params", "params_grad", *small]]
    counts, known = [], []
    for row in rows:
        pair = ds.isel(step=slice(row - 1, row + 1))
        pair = pair.assign(pair[small].load())  # once, not for each parameter
        parameters = [parameter_dataset(pair, name) for name in names]
        counts.append(da.stack([_lost_counts(parameter) for parameter in parameters]))
        known.append([_is_taken(parameter) for parameter in parameters])
    counted = xr.DataArray(da.stack(counts), dims=("row", "parameter", "kind"))
    wanted, lost, nan = (counted.isel(kind=kind) for kind in range(3))
    fraction: xr.DataArray = (lost / wanted.where(wanted > 0)).where((nan == 0) & np.array(known))
    return fraction.assign_coords(parameter=names)


def _lost_kernel(before: Array, after: Array, gradient: Array) -> Array:
    wanted = gradient != 0
    lost = wanted & (before == after)
    return np.array([[[wanted.sum(), lost.sum(), np.isnan(gradient).sum()]]])


def _lost_counts(pair: xr.Dataset) -> da.Array:
    """Elements of a parameter with a gradient, of these the unchanged ones, and NaN: (3)."""
    before, after = pair["W"].data
    gradient = pair["grad"].data[1].rechunk(before.chunks)  # blocks are paired by position
    counts = measure(
        _lost_kernel,
        *(along(array, "row", "column") for array in (before, after, gradient)),
        dims=("row", "column", "count"),
        dtype=np.int64,
        sizes={"row": 1, "column": 1, "count": 3},
    )
    return counts.sum((0, 1))


def _is_taken(pair: xr.Dataset) -> bool:
    """True if the optimizer took the step between two rows, with a rate that is not 0."""
    last = pair.isel(step=1)
    return bool(
        np.diff(pair["step"].values) == 1
        and ("lr" not in last or last["lr"].values != 0)
        and ("skipped" not in last or last["skipped"].values != 1)
    )


_EDGES = np.logspace(-16, 4, 20 * 12 + 1)  # 12 classes per factor of ten
_LEVELS = (0.05, 0.5, 0.95)


def _counts(first: Array, second: Array, groups: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Elements of each population, (population, class of √v, class of |m|)."""
    classes = _EDGES.size - 1
    result = np.empty((len(groups), classes, classes), np.int64)
    root, size = np.sqrt(second.astype(np.float64)), np.abs(first.astype(np.float64))
    for number, group in enumerate(groups):
        result[number] = np.histogram2d(
            root[group].ravel(), size[group].ravel(), bins=(_EDGES, _EDGES)
        )[0]
    return result


def _thresholds(W: Array, native: str, per_spacing: Array) -> npt.NDArray[np.float64]:
    """Half of each quantile of the spacings times a factor per class: (quantile, class)."""
    spacings_of_W = spacing(W, native).astype(np.float64)
    spacings_of_W = spacings_of_W[np.isfinite(spacings_of_W)]
    spacings = (
        np.quantile(spacings_of_W, _LEVELS) if spacings_of_W.size else np.full(len(_LEVELS), np.nan)
    )
    return np.asarray(0.5 * spacings[:, None] * per_spacing)


@takes_scan
def moment_plane(
    scan: Scan, step: int | None = None, optimizer: Mapping[str, Any] | None = None
) -> xr.Dataset:
    """Distribution of Adam's moments at one step, and the line below which updates are lost.

    Without weight decay, Adam's update is lr/(1 − β₁ᵗ)·``|m|`` / (√v/√(1 − β₂ᵗ) + ε). It is lost
    if it is smaller than half the spacing of W, so for ``|m|`` below::

        ½ ulp(W) · (1 − β₁ᵗ)/lr · (√v/√(1 − β₂ᵗ) + ε)

    Parameters
    ----------
    ds : Dataset
        With ``W``, ``exp_avg``, ``exp_avg_sq`` and ``lr``.
    step : int, optional
        Default: the last step.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.

    Returns
    -------
    Dataset
        ``count``, int64 (population, root_class, size_class): elements with √v and ``|m|`` in each
        class, with the class limits ``lower`` and ``upper`` as coordinates; ``elsewhere``, int64
        (population): elements with a moment of 0, NaN, or outside the classes. ``threshold``,
        float64 (quantile, root_class): the ``|m|`` of the line in the middle of each class of √v,
        for the 5 %, 50 % and 95 % quantile of ulp(W) over all elements; NaN at step 0, infinite if
        lr is 0. The coordinate ``step`` is the step.

    Raises
    ------
    StepNotFound
        If the step was not recorded.
    VariableNotRecorded, InvalidArgument
        As for `adam_update`; also for amsgrad, which divides by another moment.

    Examples
    --------
    >>> found = moment_plane(ds, step=20).compute()
    >>> found["count"].sel(population="dead").sum().item()
    472
    """
    ds = scan.ds
    input_checks.require_variables(ds, "W", "exp_avg", "exp_avg_sq", "lr")
    scan.require_rows(1, "moment_plane")
    rule, numbers = input_checks.adam_rule(ds, optimizer)
    if rule.amsgrad:
        raise InvalidArgument(
            "got a run trained with amsgrad, expected another optimizer: amsgrad divides by the "
            "largest second moment so far instead of v"
        )
    row = scan.rows - 1 if step is None else input_checks.row_of_step(ds, int(step))
    names, groups = populations(ds)
    first, second, W = (
        scan.blocks(name)[row].rechunk(-1) for name in ("exp_avg", "exp_avg_sq", "W")
    )
    classes = _EDGES.size - 1
    counts = measure(
        _counts,
        along(first, "token", "hidden"),
        along(second, "token", "hidden"),
        dims=("population", "root_class", "size_class"),
        groups=groups,
        dtype=np.int64,
        sizes={"population": len(names), "root_class": classes, "size_class": classes},
    )
    steps_before = int(steps_taken(scan, "moment_plane")[row])
    rule = rule.at(numbers[row])
    middle = np.sqrt(_EDGES[:-1] * _EDGES[1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        correction, root = rule.corrections(steps_before)
        below = correction / np.float64(ds["lr"].values[row]) * (middle / root + rule.eps)
    thresholds = measure(
        _thresholds,
        along(W, "token", "hidden"),
        dims=("quantile", "root_class"),
        native=native_dtype(ds["W"]),
        per_spacing=below,
        dtype=np.float64,
        sizes={"quantile": len(_LEVELS), "root_class": classes},
    )
    elsewhere = groups.sum(-1) * ds.sizes["hidden"] - counts.sum((1, 2))
    lost = ResultVariable("f8", "|m| below which an update is lost", "nat")
    variables = {
        "count": (
            ("population", "root_class", "size_class"),
            counts,
            ResultVariable("i8", "elements"),
        ),
        "elsewhere": (
            "population",
            elsewhere,
            ResultVariable("i8", "elements outside the classes"),
        ),
        "threshold": (("quantile", "root_class"), thresholds, lost),
    }
    coords = {
        "step": steps_before,
        "population": names,
        "quantile": list(_LEVELS),
        "root": ("root_class", middle),
        "lower": ("root_class", _EDGES[:-1]),
        "upper": ("root_class", _EDGES[1:]),
    }
    return dataset(variables, coords)
