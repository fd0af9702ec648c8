"""Fraction of intended changes that rounding discarded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.exact_recurrence import intended_change
from trajstore.analysis.optimizer.moments import Recurrence, steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import tiles
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import populations
from trajstore.values.optimizer_rule import MOMENTS, OptimizerRule

_VARIABLES = (*MOMENTS, "W")

_KIND = f"({len(_VARIABLES)},)f8"
_FACTS = {
    "meant_fraction": Fact(_KIND, "fraction of elements with an intended change"),
    "stuck_fraction": Fact(_KIND, "fraction of these elements that rounding left unchanged"),
    "update_lost": Fact("f8", "fraction of the norm of the update of W that rounding lost"),
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
    input_checks.variables(ds, "W", "grad", "clip_coef", *MOMENTS, "lr")
    recurrence = Recurrence.of(scan, optimizer, "moment_stuck")
    counts = measure(
        _count_kernel,
        "st",
        recurrence.gradient,
        *(recurrence.rows_of(name) for name in _VARIABLES),
        np.asarray(ds["lr"].values, np.float64),
        steps_taken(recurrence.scan, "moment_stuck"),
        recurrence.taken,
        recurrence.numbers,
        rule=recurrence.rule,
        dtype=_COUNTS,
    )
    names, groups = populations(ds)
    found = measure(
        _fraction_kernel,
        "sp",
        counts.rechunk({1: -1}),
        groups=groups,
        hidden=ds.sizes["hidden"],
        dtype=_FACTS,
        sizes={"p": len(groups)},
        by_row=True,
    )[1:]
    coords = {"step": ds["step"][1:], "population": names, "variable": list(_VARIABLES)}
    return table(found, _FACTS, ("step", "population", "variable"), coords)
