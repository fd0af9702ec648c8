"""Sizes of Adam's moments of each token, with bias correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.moments import steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, measure
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.values.norms import hidden_sum
from trajstore.values.optimizer_rule import MOMENTS, OptimizerRule

_FACTS = {
    "first_moment_size": Fact("f8", "mean of |m̂| over hidden", "nat"),
    "second_moment_root": Fact("f8", "mean of √v̂ over hidden", "nat"),
    "moment_ratio": Fact("f8", "mean of |m̂|/√v̂ over hidden"),
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
    input_checks.variables(scan.ds, *MOMENTS)
    rule, numbers = input_checks.adam_rule(scan.ds, optimizer)
    first, second = MOMENTS
    found = measure(
        _sizes,
        "st",
        scan.blocks(first),
        scan.aligned(first, second),
        steps_taken(scan, "moment_sizes"),
        numbers,
        rule=rule,
        dtype=_FACTS,
        by_row=True,
    )
    return scan.of_tokens(found, _FACTS, first)
