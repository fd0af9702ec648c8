"""How long the motion of the tokens remembers its direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import named, note, with_legend
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import population_colour
from trajstore.analysis.motion.autocorrelation import build_autocorrelation
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["autocorrelation"]

_LAGS = 28
_HELD = 1 << 28
"""Bytes of the rows that are held, as many as the largest lag."""


def _lags(history: Scan) -> list[int]:
    """Numbers of rows, evenly spaced on a logarithmic axis, up to half of all."""
    sizes = history.variable("W").sizes
    held = _HELD // max(8 * sizes["token"] * sizes["hidden"], 1)
    largest = max(1, min((history.rows - 1) // 2, held))
    return [int(lag) for lag in np.unique(np.geomspace(1, largest, _LAGS).round())]


def _collect(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    found = build_autocorrelation(history, _lags(history))
    return found[["autocorrelation"]].sel(population=shown)


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    values = data["autocorrelation"].transpose("population", "lag").values
    for population, curve in zip(data["population"].values.tolist(), values, strict=True):
        ax.plot(
            data["lag_steps"].values,
            curve,
            look.line,
            marker=".",
            ms=4,
            color=population_colour(population),
            label=look.label(named(population)),
        )
    ax.set_xscale("log")
    ax.axhline(0, color=look.style.grid, lw=1, zorder=0)
    ax.set_xlabel("lag / optimizer steps")
    ax.set_ylabel("autocorrelation of the velocity")
    ax.grid(True, axis="y")
    if not np.isfinite(values).any():
        note(ax, "all values are NaN")
    with_legend(ax)


autocorrelation = Figure(
    name="autocorrelation",
    title="How long motion keeps its direction",
    collect=_collect,
    draw=_draw,
    rows=3,
    overlays=True,
    reading="lags",
)
