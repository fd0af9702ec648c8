"""Statistics of the recorded logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

__all__ = ["logit_stats"]

_FACTS = {
    "logit_min": ("smallest logit", "nat"),
    "logit_max": ("largest logit", "nat"),
    "logit_range": ("largest minus smallest logit", "nat"),
    "logit_std": ("standard deviation of the logits", "nat"),
    "entropy": ("entropy of the softmax", "nat"),
    "dead_mass": ("total probability of all dead tokens", "1"),
}


def _statistics(
    logits: npt.NDArray[Any], dead: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float64]:
    """Statistics over the last axis: (…, token) to (…, statistic)."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = logits.astype(np.float64)
        largest = wide.max(-1, keepdims=True)
        shifted = wide - largest
        weights = np.exp(shifted)
        total = weights.sum(-1, keepdims=True)
        probabilities = weights / total
        # 0 · log 0 is 0.
        entropy = np.log(total[..., 0]) - np.where(
            probabilities == 0, 0, probabilities * shifted
        ).sum(-1)
        low, high = wide.min(-1), largest[..., 0]
        mass = probabilities[..., dead].sum(-1) if dead is not None else np.full_like(low, np.nan)
        return np.stack([low, high, high - low, wide.std(-1), entropy, mass], -1)


@quantity()
def logit_stats(scan: Scan) -> xr.Dataset:
    """Range, standard deviation and entropy of the prediction at each step.

    Parameters
    ----------
    ds : Dataset
        With ``logits`` (step, token) of the whole vocabulary, which the softmax requires.

    Returns
    -------
    Dataset, float64 (step)
        ``logit_min``, ``logit_max``, ``logit_range``, ``logit_std`` (population standard
        deviation), ``entropy`` of the softmax in nat, and ``dead_mass``, the total probability of
        all dead tokens, if ``is_dead`` is recorded. NaN at row 0, before the first forward pass.

    Raises
    ------
    VariableNotRecorded
        If the run holds no logits.

    Examples
    --------
    >>> logit_stats(ds).dead_mass.isel(step=[1, -1]).values.round(3)
    array([0.822, 0.747])
    """
    ds = scan.ds
    input_checks.variables(ds, "logits")
    logits = ds["logits"]
    if set(logits.dims) != {"step", "token"}:
        raise InvalidArgument(
            f"logits has dimensions {', '.join(map(str, logits.dims))}, expected step, token"
        )
    # An argument: a keyword would be copied into each task.
    masks = [np.asarray(ds["is_dead"].values, bool)] if "is_dead" in ds.coords else []
    table = xr.apply_ufunc(
        _statistics,
        logits.chunk({"token": -1}),
        *masks,
        input_core_dims=[["token"], ["token"]][: 1 + len(masks)],
        output_core_dims=[["statistic"]],
        dask="parallelized",
        output_dtypes=[np.float64],
        dask_gufunc_kwargs={"output_sizes": {"statistic": len(_FACTS)}},
        keep_attrs=False,
    )
    return xr.Dataset(
        {
            name: table.isel(statistic=number).assign_attrs(long_name=long_name, units=units)
            for number, (name, (long_name, units)) in enumerate(_FACTS.items())
            if name != "dead_mass" or masks
        }
    )
