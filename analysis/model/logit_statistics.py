"""Statistics of the recorded logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import measure
from trajstore.analysis.scan.facts import Fact, named, record_of
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

__all__ = ["logit_stats"]

_FACTS = {
    "logit_min": Fact("f8", "smallest logit", "nat"),
    "logit_max": Fact("f8", "largest logit", "nat"),
    "logit_range": Fact("f8", "largest minus smallest logit", "nat"),
    "logit_std": Fact("f8", "standard deviation of the logits", "nat"),
    "entropy": Fact("f8", "entropy of the softmax", "nat"),
    "dead_mass": Fact("f8", "total probability of all dead tokens"),
}


def _statistics(
    logits: npt.NDArray[Any], dead: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.void]:
    """Statistics over the tokens, (row)."""
    result = np.full(len(logits), np.nan, record_of(_FACTS))
    with np.errstate(invalid="ignore", over="ignore"):
        wide = logits.astype(np.float64)
        largest = wide.max(-1, keepdims=True)
        shifted = wide - largest
        weights = np.exp(shifted)
        total = weights.sum(-1, keepdims=True)
        probabilities = weights / total
        # 0 · log 0 is 0.
        entropy = np.log(total[:, 0]) - np.where(
            probabilities == 0, 0, probabilities * shifted
        ).sum(-1)
        result["logit_min"], result["logit_max"] = low, high = wide.min(-1), largest[:, 0]
        result["logit_range"], result["logit_std"] = high - low, wide.std(-1)
        result["entropy"] = entropy
        if dead is not None:
            result["dead_mass"] = probabilities[:, dead].sum(-1)
    return result


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
    logits = logits.drop_attrs().transpose("step", "token").chunk({"token": -1})
    dead = np.asarray(ds["is_dead"].values, bool) if "is_dead" in ds.coords else None
    found = measure(_statistics, "s", logits.data, dead=dead, dtype=record_of(_FACTS))
    coords = {name: values for name, values in logits.coords.items() if "token" not in values.dims}
    result = named(found, _FACTS, lambda data: xr.DataArray(data, coords, ("step",)))
    if dead is None:
        del result["dead_mass"]
    return xr.Dataset(result)
