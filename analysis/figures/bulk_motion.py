"""Motion of a population as a body against that of its tokens about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from analysis.collective_motion import build_bulk_thermal
from analysis.figures.axes_marks import named, note, with_legend, with_units
from analysis.figures.figure import Figure, Look, Options
from analysis.figures.style import population_colour
from analysis.streaming_scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bulk_thermal"]

_MARKERS = {"dead": "o", "live": "^", "all": "s", "mostly_dead": "D"}


def _collect(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    return build_bulk_thermal(history, shown)[["bulk_speed", "thermal_speed"]]


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    steps = data["step"].values
    off = []
    any_shown = False
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        bulk, thermal = part["bulk_speed"].values, part["thermal_speed"].values
        shown = (bulk > 0) & (thermal > 0)
        any_shown |= bool(shown.any())
        off.append(f"{named(population)}: {int((~shown).sum()):,} of {shown.size:,}")
        colour = population_colour(population)
        points = ax.scatter(
            thermal[shown],
            bulk[shown],
            c=steps[shown],
            vmin=steps[0],
            vmax=steps[-1],
            cmap=look.style.density,
            marker=_MARKERS.get(population, "v"),
            s=14,
            lw=0.5,
            edgecolors=colour,
            label=f"{named(population)}",
            rasterized=True,
        )
    bar = ax.figure.colorbar(points, ax=ax)
    bar.set_label("optimizer step")
    if any_shown:
        ax.set_xscale("log")
        ax.set_yscale("log")
        limits = ax.get_xlim(), ax.get_ylim()
        ends = [min(*limits[0], *limits[1]), max(*limits[0], *limits[1])]
        ax.plot(ends, ends, "--", color=look.style.grid, lw=1, label="equal", zorder=0)
        ax.set_xlim(limits[0])
        ax.set_ylim(limits[1])
    units = data["bulk_speed"].attrs["units"]
    ax.set_xlabel(with_units("thermal speed (rms about the mean velocity)", units))
    ax.set_ylabel(with_units("bulk speed (mean velocity)", units))
    if np.any([not each.split(": ")[1].startswith("0 ") for each in off]):
        note(ax, f"steps at which a speed is 0, not shown: {'; '.join(off)}")
    with_legend(ax, loc="upper left")


bulk_thermal = Figure(
    name="bulk-thermal",
    title="Motion as a body against motion about it",
    collect=_collect,
    draw=_draw,
    reading="rows",
)
