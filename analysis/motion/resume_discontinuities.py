"""Steps at which the pace of motion changes abruptly."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.velocity import speed
from trajstore.analysis.scan.block_tasks import measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Bound, Positive

# Changes of the mean motion by less than 5 % per row are never significant. Neither is motion below
# 1 % of the run's maximum: when nearly all tokens are frozen, one moving token is no discontinuity.
_LEAST_SCATTER = 0.05
_LEAST_MOTION = 0.01
# A median absolute deviation of normal scatter, in standard deviations.
_MAD_TO_SIGMA = 1.4826
_FEWEST_NEIGHBORS = 4


def _mean(pace: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.asarray(pace.astype(np.float64).mean(-1))


def _scores(motion: npt.NDArray[Any], window: int) -> npt.NDArray[np.float64]:
    """Robust z-score of the change of log motion per row; NaN with too few neighbors."""
    scores = np.full(motion.shape, np.nan)
    finite = motion[np.isfinite(motion)]
    floor = _LEAST_MOTION * finite.max(initial=0)
    if floor == 0:
        return scores
    change = np.diff(np.log(np.where(np.isfinite(motion), motion, np.inf) + floor), prepend=np.nan)
    for row in range(1, motion.size):
        near = np.concatenate(
            [change[max(1, row - window) : row], change[row + 1 : row + 1 + window]]
        )
        near = near[np.isfinite(near)]
        if near.size >= _FEWEST_NEIGHBORS:
            usual = np.median(near)
            scatter = _MAD_TO_SIGMA * np.median(np.abs(near - usual)) + _LEAST_SCATTER
            scores[row] = (change[row] - usual) / scatter
    return scores


@quantity(measures=("step_norm",))
def discontinuities(
    scan: Scan, window: Annotated[int, Bound("of at least", 2)] = 10, threshold: Positive = 8.0
) -> xr.Dataset:
    """Steps at which the mean speed changes abruptly.

    A run that was resumed from a wrong checkpoint moves smoothly before and after, but its pace
    changes at the resume. The score of a row is the change of log(mean speed) from the previous
    row, minus the median change at up to `window` rows on either side, in robust standard
    deviations (1.4826 × the median absolute deviation, plus 0.05). Speeds below 1 % of the run's
    maximum are set to this value.

    Parameters
    ----------
    ds : Dataset
        With ``W``, or a stored ``W_step_norm``.
    window : int
        Neighbors on either side, at least 2.
    threshold : float
        Absolute score above which a row is a discontinuity. Clean runs stay below 5.

    Returns
    -------
    Dataset, (step), one row fewer than `ds`
        ``mean_speed``, float64; ``discontinuity_score``, float64, NaN with fewer than 4 neighbors;
        ``discontinuity``, bool.

    Raises
    ------
    InvalidArgument
        If `window` is below 2, or `threshold` is not positive.

    Examples
    --------
    >>> found = discontinuities(ds).compute()
    >>> found.step[found.discontinuity].values  # the dead tokens stop together
    array([10, 17])
    """
    pace = speed(scan)
    pace = pace.drop_attrs().transpose("step", "token").chunk({"token": -1})
    mean = measure(_mean, "s", pace.data, dtype=np.float64).rechunk(-1)
    score = measure(_scores, "s", mean, window=window, dtype=np.float64)
    speeds = Fact("f8", "mean speed of all tokens", f"{scan.units} per step")
    scores = Fact("f8", "robust z-score of the change of log mean speed")
    found = {
        "mean_speed": ("step", mean, speeds),
        "discontinuity_score": ("step", score, scores),
        "discontinuity": (
            "step",
            abs(score) > threshold,
            Fact("bool", "abrupt change of pace", None),
        ),
    }
    coords = {name: values for name, values in pace.coords.items() if "token" not in values.dims}
    return dataset(found, coords)
