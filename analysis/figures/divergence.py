"""Distance between runs, from the first step at which they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    draw_curves,
    log_scale,
    named,
)
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.figures.titles import run_name
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several.divergence import divergence as divergence_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _divergence(scan: Scan, options: Options, first: Scan) -> xr.Dataset:
    found = divergence_of(first.ds, scan.ds).sel(population=options.populations(first))
    begin = found["first_difference"]
    apart = found[["distance", "differing"]].where((begin >= 0) & (found["step"] >= begin))
    return scan.in_window(apart).assign_attrs(first=run_name(first.ds))


@figure(_divergence, rows=1, reading="runs", overlays=True, averages=True, between=True)
def divergence(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Distance of W from the first run, since their first difference."""
    steps = data["step"].values
    draw_curves(ax, data, look, {"distance": "distance"})
    along_steps(ax, f"L2 distance of W from {data.attrs['first']}", data["distance"].attrs["units"])
    apart = np.isfinite(data["distance"].values).any(-1)
    if apart.any():
        log_scale(ax, "y", data["distance"].values)
    name = f"{look.run}: " if look.run else ""
    look.note(
        f"{name}differs from {data.attrs['first']} since step {steps[apart][0]:,}"
        if apart.any()
        else f"{name}never differs from {data.attrs['first']}",
    )
    if look.alone and apart.any():
        right = ax.twinx()
        text = "fraction of elements that differ"
        for population in data["population"].values.tolist():
            color, label = look.color(population), f"{named(population)}: {text} in bits"
            values = data["differing"].sel(population=population).values
            right.plot(steps, values, ":", color=color)
            ax.plot([], [], ":", color=color, label=label)
        right.set_ylabel(text)
        right.set_ylim(-0.02, 1.02)
        right.margins(x=0.01)
