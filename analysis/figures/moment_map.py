"""Where the elements of Adam's moments lie, and which updates are rounded away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import log_scale, named, note, with_legend
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import CAUSE_COLOURS
from trajstore.analysis.optimizer.underflow_line import build_moment_plane
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["moments"]


def _collect(history: Scan, options: Options) -> xr.Dataset:
    (shown,) = options.populations(history, ("all",))
    plane = build_moment_plane(history).sel(population=shown)
    return plane.assign(lr=history.ds["lr"].isel(step=-1))


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    from matplotlib.colors import LogNorm

    counts = data["count"].transpose("size_class", "root_class").values
    edges = np.append(data["lower"].values, data["upper"].values[-1:])
    by_root, by_size = counts.sum(0), counts.sum(1)
    if counts.any():
        mesh = ax.pcolormesh(
            edges,
            edges,
            np.ma.masked_equal(counts, 0),
            norm=LogNorm(1, max(2, counts.max())),
            cmap=look.style.density,
            rasterized=True,
        )
        ax.figure.colorbar(mesh, ax=ax).set_label("elements")
    log_scale(ax, "x", by_root)
    log_scale(ax, "y", by_size)
    root, colour = data["root"].values, CAUSE_COLOURS["underflow"]
    low, middle, high = data["threshold"].transpose("quantile", "root_class").values
    if np.isfinite(middle).all():
        ax.fill_between(root, low, high, color=colour, alpha=0.3, lw=0)
        ax.plot(root, middle, color=colour, label="below, updates are rounded away")
    _limits(ax, edges, by_root, by_size, middle)
    unit = "nat per unit of W"
    ax.set_xlabel(f"√v, root of the second moment / {unit}")
    ax.set_ylabel(f"|m|, first moment / {unit}")
    beyond = int(data["elsewhere"])
    note(
        ax,
        f"step {int(data['step'])}, learning rate {float(data['lr']):.3g}, "
        f"{named(str(data['population'].item()))}; line: for the median spacing of W, band: 5 % "
        f"to 95 %; moments of 0, or beyond all classes: {beyond:,} of "
        f"{beyond + int(counts.sum()):,} elements",
    )
    with_legend(ax)


def _limits(ax: Axes, edges: Any, by_root: Any, by_size: Any, line: Any) -> None:
    """Show all that was counted, and the line there."""
    roots, sizes = np.flatnonzero(by_root), np.flatnonzero(by_size)
    if not roots.size:
        return
    ax.set_xlim(edges[max(0, roots[0] - 3)], edges[min(roots[-1] + 4, edges.size - 1)])
    there = line[roots[0] : roots[-1] + 1]
    there = there[np.isfinite(there) & (there > 0)]
    low, high = edges[sizes[0]], edges[sizes[-1] + 1]
    ax.set_ylim(min([low, *there[:1]]) / 3, max([high, *there[-1:]]) * 3)


moments = Figure(
    name="moments",
    title="Adam's moments, and the line of underflow",
    collect=_collect,
    draw=_draw,
    reading="last row",
)
