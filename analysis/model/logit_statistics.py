"""Statistics of the recorded logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

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
) -> dict[str, npt.NDArray[Any]]:
    """Statistics over the tokens, (row)."""
    wide = logits.astype(np.float64)
    low, high = wide.min(-1), wide.max(-1)
    shifted = wide - high[:, None]
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    probabilities = weights / total
    # 0 · log 0 is 0.
    products = np.where(probabilities == 0, 0, probabilities * shifted)
    return {
        "logit_min": low,
        "logit_max": high,
        "logit_range": high - low,
        "logit_std": wide.std(-1),
        "entropy": np.log(total[:, 0]) - products.sum(-1),
        "dead_mass": low * np.nan if dead is None else probabilities[:, dead].sum(-1),
    }


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
    found = measure(_statistics, "s", logits.data, dead=dead, dtype=_FACTS)
    coords = {name: values for name, values in logits.coords.items() if "token" not in values.dims}
    result = table(found, _FACTS, ("step",), coords)
    return result if dead is not None else result.drop_vars("dead_mass")
