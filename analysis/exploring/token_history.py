"""One token: its path, its hops, its gradient, and why it stood still."""

from __future__ import annotations

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.shape import scores_along_axes
from trajstore.analysis.exploring.run_history import RunHistory
from trajstore.analysis.motion.norms import grad_norms
from trajstore.analysis.motion.ulp_motion import lattice_displacement
from trajstore.analysis.optimizer.freeze_causes import CAUSES
from trajstore.analysis.scan.scan import Scan

__all__ = ["cause_sentences", "token_history"]


def token_history(ds: xr.Dataset, at: int, history: RunHistory) -> xr.Dataset:
    """What is known of a token at each row that is held; its vectors are read for that.

    Parameters
    ----------
    ds : Dataset
        The run, opened without dask, of which the history is.
    at : int
        Position of the token.
    history : RunHistory

    Returns
    -------
    Dataset
        ``position``, float32 (step, component), at every row; ``hop``, float32, the L1 norm in
        lattice spacings, NaN at the first row; ``gradient``, float32, the L2 norm, where it was
        recorded; ``cause``, int8, where it is known, −1 at the first row; all (step).
    """
    names = [name for name in ("W", "grad") if name in ds]
    one = ds[names].isel(token=slice(at, at + 1), step=slice(history.rows)).load()
    scan = Scan(one)
    steps = one["step"]
    found = {
        "position": scores_along_axes(scan, history.plane).astype(np.float32),
        "hop": lattice_displacement(scan, ord=1).reindex(step=steps),
    }
    if "grad" in one:
        found["gradient"] = grad_norms(scan)
    if history.cause is not None:
        cause = history.cause.isel(token=slice(at, at + 1))
        found["cause"] = cause.reindex(step=steps, fill_value=-1)
    return xr.Dataset({name: array.isel(token=0) for name, array in found.items()}).compute()


def cause_sentences(token: xr.Dataset) -> list[str]:
    """How long a token stood still and why, in sentences.

    Parameters
    ----------
    token : Dataset
        Of `token_history`.

    Examples
    --------
    >>> import xarray as xr
    >>> told = {"hop": ("step", [float("nan"), 3, 0]), "cause": ("step", [-1, 0, 2])}
    >>> cause_sentences(xr.Dataset(told, {"step": [0, 1, 2]}))
    ['It moved last at step 1, and has stood still for 1 row since: underflow.']
    """
    moved = np.flatnonzero(token["hop"].values[1:] != 0) + 1  # a hop of NaN is one
    ways = token.sizes["step"] - 1
    told = []
    last = int(moved[-1]) if moved.size else 0
    rest = ways - last
    if not moved.size:
        told.append(f"It never moved, in {_rows(ways)}{_why(token, 1)}.")
    elif rest:
        step = int(token["step"][last])
        told.append(
            f"It moved last at step {step:,}, and has stood still for {_rows(rest)} since"
            f"{_why(token, last + 1)}."
        )
    else:
        told.append("It moved at the last row.")
    before = last - moved.size
    if before > 0:
        why = _why(token, 1, last)
        told.append(f"Before that it stood still in {_rows(before)} of {last:,}{why}.")
    return told


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def _why(token: xr.Dataset, first: int, stop: int | None = None) -> str:
    """The causes in those rows, the most common first, with their shares if there are several."""
    if "cause" not in token:
        return ""
    causes = token["cause"].values[first:stop]
    counts = np.bincount(causes[causes > 0], minlength=len(CAUSES))
    order = [at for at in np.argsort(-counts, kind="stable") if counts[at]]
    if not order:
        return ""
    if len(order) == 1:
        return f": {CAUSES[order[0]].replace('_', ' ')}"
    shares = (f"{counts[at] / counts.sum():.1%} {CAUSES[at].replace('_', ' ')}" for at in order)
    return ": " + ", ".join(shares)
