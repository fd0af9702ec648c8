"""Quantities per token over the steps: mean and spread of each population."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    log_scale,
    named,
    note,
    population_band,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.motion.norms import build_displacement, build_grad_norms
from trajstore.analysis.motion.velocity import build_speed
from trajstore.analysis.scan.population_statistics import statistics
from trajstore.analysis.scan.scan import Scan
from trajstore.populations.masks import chosen_populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["displacement", "gradients", "speed"]

_BAND = (0.05, 0.95)


def _bands(values: xr.DataArray, history: Scan, options: Options) -> xr.Dataset:
    """Mean and quantiles of the populations to be shown, and how many tokens they have."""
    shown = options.populations(history)
    _, groups = chosen_populations(history.ds, shown)
    found = statistics(values, np.array(_BAND), shown)
    return found[["mean", "quantiles"]].assign(tokens=("population", groups.sum(1)))


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    for population in data["population"].values.tolist():
        population_band(ax, data, population, look)
    label = str(data["mean"].attrs["long_name"]).removeprefix("mean of ")
    along_steps(ax, label, data["mean"].attrs.get("units"))
    log_scale(ax, "y", data["mean"].values)
    told = "line: mean over tokens; band: 5 % to 95 % of them"
    spread_note(ax, look, over="tokens and runs", alone=told)
    if look.spread is None and (zeros := _zeros(data, look)):
        note(ax, f"0, which a logarithmic axis does not show: {zeros}")
    with_legend(ax)


def _zeros(data: xr.Dataset, look: Look) -> str:
    """At how many steps the lower end of a band is 0, and the mean is."""
    told = []
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        low, mean = ((part[name] == 0).values for name in ("quantiles", "mean"))
        counts = {"5 % quantile": low.any(-1).sum(), "mean": mean.sum()}
        of = f"of {part.sizes['step']:,} steps"
        told += [
            look.label(f"{name} of {named(population)} at {count:,} {of}")
            for name, count in counts.items()
            if count
        ]
    return "; ".join(told)


def _gradients(history: Scan, options: Options) -> xr.Dataset:
    norms = build_grad_norms(history)
    norms = norms.assign_attrs(units=f"{norms.attrs['units']} per unit of W")
    return _bands(norms, history, options).isel(step=slice(1, None))


def _displacement(history: Scan, options: Options) -> xr.Dataset:
    since = int(history.steps[0])
    return _bands(build_displacement(history, since), history, options).isel(step=slice(1, None))


def _speed(history: Scan, options: Options) -> xr.Dataset:
    return _bands(build_speed(history), history, options)


gradients = Figure(
    name="gradients",
    title="Gradient norm per token",
    collect=_gradients,
    draw=_draw,
    overlays=True,
    averages=True,
    reading="moments",
)

displacement = Figure(
    name="displacement",
    title="Distance of the tokens from where they began",
    collect=_displacement,
    draw=_draw,
    overlays=True,
    averages=True,
)

speed = Figure(
    name="speed",
    title="Speed of the tokens",
    collect=_speed,
    draw=_draw,
    measures=("step_norm",),
    overlays=True,
    averages=True,
)
