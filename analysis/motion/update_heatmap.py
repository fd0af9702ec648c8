"""Update-size heatmap: tokens × steps, with tokens in the order of their last motion."""

from __future__ import annotations

from typing import Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.ulp_motion import lattice_displacement, regimes
from trajstore.analysis.scan.block_tasks import Array, measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import takes_scan
from trajstore.analysis.scan.rows import REGIMES
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Count

_FACTS = {
    "dead_fraction": Fact("f8", "fraction of dead tokens"),
    "last_motion": Fact("i8", "last motion of any of its tokens", None, flags={-1: "never"}),
}


def _starts(length: int, most: int) -> npt.NDArray[np.intp]:
    """First indices of at most `most` groups, whose sizes differ by at most one."""
    groups = max(1, min(length, most))
    return np.asarray(np.arange(groups) * length // groups, np.intp)


def _most_common(values: Array, rows: Array, columns: Array) -> npt.NDArray[np.int8]:
    """Most common regime of each group; of equally common ones, that of longer hops."""
    kinds = len(REGIMES)
    sizes = np.diff(columns, append=values.shape[1])
    firsts = np.repeat(np.arange(columns.size) * kinds, sizes)
    result = np.empty((rows.size, columns.size), np.int8)
    for number, group in enumerate(np.split(values, rows[1:])):
        found = np.bincount((firsts + group).ravel(), minlength=kinds * columns.size)
        longest_first = found.reshape(-1, kinds)[:, ::-1]
        result[number] = kinds - 1 - longest_first.argmax(1)
    return result


def _mean(values: Array, rows: Array, columns: Array) -> npt.NDArray[np.float64]:
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=0, dtype=np.float64), columns, axis=1)
    sizes = np.outer(
        np.diff(rows, append=values.shape[0]), np.diff(columns, append=values.shape[1])
    )
    return np.asarray(sums / sizes)


def _groups(values: Array, last: Array, rows: Array, columns: Array, regime: bool) -> Array:
    sorted_ = values[:, np.argsort(last, kind="stable")]
    return (_most_common if regime else _mean)(sorted_, rows, columns)


def _of_tokens(last: Array, columns: Array, members: Array) -> dict[str, Array]:
    """Last motion of each group, and the fraction of its tokens that are members."""
    order = np.argsort(last, kind="stable")
    ends = np.append(columns[1:], last.size) - 1
    fraction = _mean(members[None, order], np.zeros(1, np.intp), columns)[0]
    return {"last_motion": last[order][ends], "dead_fraction": fraction}


@takes_scan
def heatmap(
    scan: Scan,
    of: Literal["regime", "hop"] = "regime",
    lattice: str = "native",
    most_steps: Count = 1000,
    most_groups: Count = 600,
) -> xr.Dataset:
    """Update size of the tokens at each step, with tokens sorted by their last motion.

    Long runs are pooled: consecutive steps, and tokens that are consecutive in this order, form
    groups whose sizes differ by at most one. No step or token is left out.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    of : {'regime', 'hop'}
        The most common regime of each group (of equally common ones, that of longer hops), or the
        mean hop (L1 norm, in lattice spacings).
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        As for `regimes`.
    most_steps, most_groups : int
        Maximum number of groups of steps and of tokens.

    Returns
    -------
    Dataset
        ``update_size`` (step, group), int8 with CF flags or float64. Groups run from the tokens
        that froze first to those that moved longest. ``step`` is the first step of a group of
        steps, and ``steps`` their number. Along ``group``: ``tokens``, the number of tokens, and
        ``last_motion``, int64, the last step at which any of them moved, −1 if none ever did. If
        the run has ``is_dead``: ``dead_fraction``, float64, the fraction of dead tokens.

    Raises
    ------
    InvalidArgument
        For an unknown `of` or lattice, fewer than one group, or a run of fewer than two rows.

    Examples
    --------
    >>> found = heatmap(ds, most_groups=4)
    >>> found.last_motion.values, found.tokens.values
    (array([16, 16, 16, 16]), array([32, 32, 32, 32]))
    """
    scan.require_rows(2, "heatmap")
    regime = of == "regime"
    values = (
        regimes(scan, lattice)["regime"]
        if regime
        else lattice_displacement(scan, ord=1, lattice=lattice)
    )
    last = freeze(scan, lattice=lattice)["last_motion"]
    rows = _starts(values.sizes["step"], most_steps)
    columns = _starts(values.sizes["token"], most_groups)
    sizes = {"r": rows.size, "g": columns.size}
    data = measure(
        _groups,
        "rg",
        _whole(values.transpose("step", "token")),
        (_whole(last), "t"),
        rows=rows,
        columns=columns,
        regime=regime,
        dtype=np.int8 if regime else np.float64,
        sizes=sizes,
    )
    dead = values.coords.get("is_dead", xr.zeros_like(last, bool)).values
    of_tokens = measure(
        _of_tokens,
        "g",
        (_whole(last), "t"),
        columns=columns,
        members=dead,
        dtype=_FACTS,
        sizes={"g": columns.size},
    )
    coords = {
        "step": values["step"].values[rows],
        "steps": ("step", np.diff(rows, append=values.sizes["step"])),
        "tokens": ("group", np.diff(columns, append=values.sizes["token"])),
    }
    result = table(of_tokens, _FACTS, ("group",), coords)
    result["update_size"] = ("step", "group"), data, values.attrs
    names = ["dead_fraction"] * ("is_dead" in values.coords) + ["update_size", "last_motion"]
    return result[names]


def _whole(values: xr.DataArray) -> da.Array:
    """The values as a dask array of a single chunk."""
    return da.asarray(values.data).rechunk(-1)
