"""Tokens with identical vectors: how many vectors there are, and how many tokens share one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.cloud.identical_vectors import build_clusters
from trajstore.analysis.figures.axes_marks import (
    along_steps,
    population_curves,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["clusters"]


def _collect(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    found = build_clusters(history, None, options.lattice, ranks=1).sel(population=shown)
    vectors = found["groups"] + found["singles"]
    # Of single tokens only, the largest group is one of them.
    largest = found["group_sizes"].isel(rank=0).clip(min=1)
    return xr.Dataset({"vectors": vectors, "largest": largest})


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    told = {"vectors": "different vectors", "largest": "tokens that share the commonest"}
    population_curves(ax, data, look, told)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    along_steps(ax, "number of vectors, or of tokens")
    spread_note(ax, look)
    with_legend(ax)


clusters = Figure(
    name="clusters",
    title="Tokens that have become identical",
    collect=_collect,
    draw=_draw,
    rows=1,
    on_lattice=True,
    overlays=True,
    averages=True,
    reading="identical",
)
