"""Distance between runs, from the first step at which they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    log_scale,
    name_kinds,
    named,
    note,
    spread_edges,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.figures.titles import run_name
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several.divergence import divergence as divergence_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["divergence"]


def _divergence(scan: Scan, options: Options, first: Scan) -> xr.Dataset:
    found = divergence_of(first.ds, scan.ds).sel(population=options.populations(first))
    begin = found["first_difference"]
    apart = found[["distance", "differing"]].where((begin >= 0) & (found["step"] >= begin))
    return scan.in_window(apart).assign_attrs(first=run_name(first.ds))


@figure(_divergence, rows=1, reading="runs", overlays=True, averages=True, between=True)
def divergence(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Distance of W from the first run, since their first difference."""
    steps = data["step"].values
    populations = data["population"].values.tolist()
    texts = [f"{named(population)}: distance" for population in populations]
    for kind, (population, text) in enumerate(zip(populations, texts, strict=True)):
        part = data.sel(population=population)
        spread_edges(ax, steps, look, "distance", population)
        ax.plot(
            steps,
            part["distance"].values,
            look.line(kind),
            color=look.color(population),
            label=text if look.alone else look.label(text, kind),
        )
    name_kinds(ax, look, texts)
    along_steps(ax, f"L2 distance of W from {data.attrs['first']}", data["distance"].attrs["units"])
    spread_note(ax, look)
    apart = np.isfinite(data["distance"].values).any(-1)
    if apart.any():
        log_scale(ax, "y", data["distance"].values)
    name = f"{look.run}: " if look.run else ""
    note(
        ax,
        f"{name}differs from {data.attrs['first']} since step {steps[apart][0]:,}"
        if apart.any()
        else f"{name}never differs from {data.attrs['first']}",
    )
    others = []
    if look.alone and apart.any():
        others.append(ax.twinx())
        for population in populations:
            others[0].plot(
                steps,
                data["differing"].sel(population=population).values,
                ":",
                color=look.color(population),
                label=f"{named(population)}: fraction of elements that differ in bits",
            )
        others[0].set_ylabel("fraction of elements that differ")
        others[0].set_ylim(-0.02, 1.02)
        others[0].margins(x=0.01)
    with_legend(ax, *others)
