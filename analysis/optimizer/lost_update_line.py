"""The plane of √v and |m|, and the line below which updates are lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.moments import steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import takes_scan
from trajstore.analysis.scan.scan import Scan, native_dtype
from trajstore.errors import InvalidArgument
from trajstore.populations import populations
from trajstore.values.native_types import spacing

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
    found = spacing(W, native).astype(np.float64)
    found = found[np.isfinite(found)]
    spacings = np.quantile(found, _LEVELS) if found.size else np.full(len(_LEVELS), np.nan)
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
    input_checks.variables(ds, "W", "exp_avg", "exp_avg_sq", "lr")
    scan.require_rows(1, "moment_plane")
    rule, numbers = input_checks.adam_rule(ds, optimizer)
    if rule.amsgrad:
        raise InvalidArgument(
            "moment_plane does not support amsgrad, which divides by the largest second moment so "
            "far instead of v"
        )
    row = scan.rows - 1 if step is None else input_checks.row_of_step(ds, int(step))
    names, groups = populations(ds)
    first, second, W = (
        scan.blocks(name)[row].rechunk(-1) for name in ("exp_avg", "exp_avg_sq", "W")
    )
    classes = _EDGES.size - 1
    counts = measure(
        _counts,
        "pry",
        (first, "th"),
        (second, "th"),
        groups=groups,
        dtype=np.int64,
        sizes={"p": len(names), "r": classes, "y": classes},
    )
    at = int(steps_taken(scan, "moment_plane")[row])
    rule = rule.at(numbers[row])
    middle = np.sqrt(_EDGES[:-1] * _EDGES[1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        correction, root = rule.corrections(at)
        below = correction / np.float64(ds["lr"].values[row]) * (middle / root + rule.eps)
    thresholds = measure(
        _thresholds,
        "qr",
        (W, "th"),
        native=native_dtype(ds["W"]),
        per_spacing=below,
        dtype=np.float64,
        sizes={"q": len(_LEVELS), "r": classes},
    )
    elsewhere = groups.sum(-1) * ds.sizes["hidden"] - counts.sum((1, 2))
    lost = Fact("f8", "|m| below which an update is lost", "nat")
    found = {
        "count": (("population", "root_class", "size_class"), counts, Fact("i8", "elements")),
        "elsewhere": ("population", elsewhere, Fact("i8", "elements outside the classes")),
        "threshold": (("quantile", "root_class"), thresholds, lost),
    }
    coords = {
        "step": at,
        "population": names,
        "quantile": list(_LEVELS),
        "root": ("root_class", middle),
        "lower": ("root_class", _EDGES[:-1]),
        "upper": ("root_class", _EDGES[1:]),
    }
    return dataset(found, coords)
