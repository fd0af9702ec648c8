"""Motion of a population as a body against that of its tokens about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import named, note, with_legend, with_units
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import population_colour, shades
from trajstore.analysis.motion.collective import build_bulk_thermal
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bulk_thermal"]

_MARKERS = {"dead": "o", "live": "^", "all": "s", "mostly_dead": "D"}


def _collect(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    return build_bulk_thermal(history, shown)[["bulk_speed", "thermal_speed"]]


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    steps = data["step"].values
    any_shown = False
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        bulk, thermal = part["bulk_speed"].values, part["thermal_speed"].values
        shown = (bulk > 0) & (thermal > 0)
        any_shown |= bool(shown.any())
        colour, marker = population_colour(population), _MARKERS.get(population, "v")
        ax.scatter(
            thermal[shown],
            bulk[shown],
            c=steps[shown],
            vmin=steps[0],
            vmax=steps[-1],
            cmap=shades(colour, look.style.ground),
            marker=marker,
            s=14,
            lw=0,
            rasterized=True,
        )
        label = f"{named(population)}: {_split(bulk, thermal)}"
        ax.plot([], [], color=colour, marker=marker, ls="", label=label)
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
    note(
        ax,
        f"a point is a step: faint the first, {steps[0]}, strong the last, {steps[-1]}; at rest "
        "both speeds are 0; if all move exactly alike, the thermal one",
    )
    with_legend(ax)


def _split(bulk: npt.NDArray[Any], thermal: npt.NDArray[Any]) -> str:
    """Of all steps, how many a point shows, and why the others have none."""
    shown = (bulk > 0) & (thermal > 0)
    counts = {
        "shown": shown,
        "at rest": (bulk == 0) & (thermal == 0),
        "all moving exactly alike": (bulk > 0) & (thermal == 0),
        "about a resting centre": (bulk == 0) & (thermal > 0),
        "NaN": np.isnan(bulk) | np.isnan(thermal),
    }
    told = [f"{count:,} {name}" for name, at in counts.items() if (count := int(at.sum()))]
    return f"of {bulk.size:,} steps {', '.join(told)}"


bulk_thermal = Figure(
    name="bulk-thermal",
    title="Motion as a body against motion about it",
    collect=_collect,
    draw=_draw,
    reading="rows",
)
