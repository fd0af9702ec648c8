"""Motion of tokens: distances, speeds, their autocorrelation and discontinuities."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    draw_curves,
    log_scale,
    named,
    with_units,
)
from trajstore.analysis.figures.figure import Figure, Options, after_first_row, figure
from trajstore.analysis.figures.style import Look, population_color, shades
from trajstore.analysis.motion import collective, norms, resume_discontinuities, velocity
from trajstore.analysis.motion.autocorrelation import autocorrelation as autocorrelation_at
from trajstore.analysis.scan.population_statistics import statistics
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import chosen_populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAND = (0.05, 0.95)


def _bands(values: xr.DataArray, scan: Scan, options: Options) -> xr.Dataset:
    """Mean, quantiles and number of tokens of each population."""
    shown = options.populations(scan)
    _, groups = chosen_populations(scan.ds, shown)
    found = statistics(values, np.array(_BAND), shown)
    return found[["mean", "quantiles"]].assign(tokens=("population", groups.sum(1)))


def _draw_bands(ax: Axes, data: xr.Dataset, look: Look) -> None:
    draw_curves(
        ax, data, look, {"mean": ""}, about=lambda part, name: f" ({int(part['tokens']):,})"
    )
    label = str(data["mean"].attrs["long_name"]).removeprefix("mean of ")
    along_steps(ax, label, data["mean"].attrs.get("units"))
    log_scale(ax, "y", data["mean"].values)
    if look.band is None:
        band = "; band: 5 % to 95 % of them" if look.alone else ""
        look.note(f"line: mean over tokens{band}")
        if zeros := _zeros(data, look):
            look.note(f"zeros, not shown: {zeros}")


def _zeros(data: xr.Dataset, look: Look) -> str:
    """Number of steps at which the mean or the lower end of the band is 0."""
    notes = []
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        low, mean = ((part[name] == 0).values for name in ("quantiles", "mean"))
        counts = {"5 % quantile": low.any(-1).sum() * look.alone, "mean": mean.sum()}
        of = f"of {part.sizes['step']:,} steps"
        notes += [
            f"{name} of {named(population)} at {count:,} {of}"
            for name, count in counts.items()
            if count
        ]
    run = f"{look.run}: " if notes and look.run else ""
    return run + "; ".join(notes)


def _grad_norms(scan: Scan, options: Options) -> xr.Dataset:
    lengths = norms.grad_norms(scan)
    lengths = lengths.assign_attrs(units=f"{lengths.attrs['units']} per unit of W")
    return after_first_row(_bands(lengths, scan, options), scan)


def _displacement(scan: Scan, options: Options) -> xr.Dataset:
    return after_first_row(_bands(norms.displacement(scan), scan, options), scan)


def _speed(scan: Scan, options: Options) -> xr.Dataset:
    return _bands(velocity.speed(scan), scan, options)


_MARKERS = {"dead": "o", "live": "^", "all": "s", "mostly_dead": "D"}


def _bulk_thermal(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    return collective.bulk_thermal(scan, shown)[["bulk_speed", "thermal_speed"]]


@figure(_bulk_thermal, reading="rows")
def bulk_thermal(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Bulk speed against thermal speed."""
    steps = data["step"].values
    any_shown = False
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        bulk, thermal = part["bulk_speed"].values, part["thermal_speed"].values
        shown = (bulk > 0) & (thermal > 0)
        any_shown |= bool(shown.any())
        color, marker = population_color(population), _MARKERS.get(population, "v")
        ax.scatter(
            thermal[shown],
            bulk[shown],
            c=steps[shown],
            vmin=steps[0],
            vmax=steps[-1],
            cmap=shades(color, look.style.ground),
            marker=marker,
            s=14,
            lw=0,
            rasterized=True,
        )
        label = f"{named(population)}: {_split(bulk, thermal)}"
        ax.plot([], [], color=color, marker=marker, ls="", label=label)
    if any_shown:
        ax.set_xscale("log")
        ax.set_yscale("log")
        limits = ax.get_xlim(), ax.get_ylim()
        ends = [min(*limits[0], *limits[1]), max(*limits[0], *limits[1])]
        ax.plot(ends, ends, "--", color=look.style.grid, lw=1, label="bulk = thermal", zorder=0)
        ax.set_xlim(limits[0])
        ax.set_ylim(limits[1])
    units = data["bulk_speed"].attrs["units"]
    ax.set_xlabel(with_units("thermal speed (rms about the mean velocity)", units))
    ax.set_ylabel(with_units("bulk speed (mean velocity)", units))
    look.note(
        f"one point per step: faint at step {steps[0]:,}, strong at step {steps[-1]:,}; the bulk "
        "speed is 0 without motion of the centroid, the thermal speed if all tokens move alike",
    )


def _split(bulk: npt.NDArray[Any], thermal: npt.NDArray[Any]) -> str:
    """Number of steps with a point, and the reasons why others have none."""
    shown = (bulk > 0) & (thermal > 0)
    counts = {
        "shown": shown,
        "unchanged": (bulk == 0) & (thermal == 0),
        "all moving alike": (bulk > 0) & (thermal == 0),
        "with an unchanged centroid": (bulk == 0) & (thermal > 0),
        "NaN": np.isnan(bulk) | np.isnan(thermal),
    }
    parts = [f"{count:,} {name}" for name, at in counts.items() if (count := int(at.sum()))]
    return f"{', '.join(parts)} of {bulk.size:,} steps"


_LAGS = 28
_HELD = 1 << 28
"""Bytes of the rows in memory, as many as the largest lag."""


def _lags(scan: Scan) -> list[int]:
    """Numbers of rows, evenly spaced on a logarithmic axis, up to half of all."""
    sizes = scan.variable("W").sizes
    held = _HELD // max(8 * sizes["token"] * sizes["hidden"], 1)
    largest = max(1, min((scan.rows - 1) // 2, held))
    return [int(lag) for lag in np.unique(np.geomspace(1, largest, _LAGS).round())]


def _autocorrelation(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    found = autocorrelation_at(scan, _lags(scan))
    return found[["autocorrelation"]].sel(population=shown)


@figure(_autocorrelation, rows=3, overlays=True, of_window=True, reading="lags")
def autocorrelation(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Autocorrelation of the velocity."""
    draw_curves(ax, data, look, {"autocorrelation": ""}, "lag_steps", marker=".", ms=4)
    ax.set_xscale("log")
    ax.axhline(0, color=look.style.grid, lw=1, zorder=0)
    ax.set_xlabel("lag / optimizer steps")
    ax.set_ylabel("autocorrelation of the velocity")
    ax.grid(True, axis="y")
    if not np.isfinite(data["autocorrelation"]).any():
        look.note("all values are NaN")


_THRESHOLD = 8.0


def _discontinuities(scan: Scan, options: Options) -> xr.Dataset:
    return resume_discontinuities.discontinuities(scan, threshold=_THRESHOLD)


@figure(_discontinuities, measures=("step_norm",), scales=False, of_populations=False)
def discontinuities(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Discontinuities: steps at which the mean speed jumps."""
    steps, scores = data["step"].values, data["discontinuity_score"].values
    at = np.flatnonzero(data["discontinuity"].values)
    ax.plot(steps, scores, color=look.style.ink, lw=0.8, label="score of each step")
    for sign in (1, -1):
        label = f"threshold of a discontinuity: ±{_THRESHOLD:g}" if sign > 0 else None
        ax.axhline(sign * _THRESHOLD, color=look.style.second, ls="--", lw=0.9, label=label)
    ax.plot(
        steps[at],
        scores[at],
        "o",
        color=look.style.second,
        ms=5,
        label=f"discontinuities ({at.size})" if at.size else None,
    )
    top = max(_THRESHOLD, float(np.nanmax(abs(scores), initial=0))) * 1.15
    ax.set_ylim(-top, top)
    along_steps(ax, "robust z-score: change of log mean speed")
    shown = ", ".join(map(str, steps[at][:12])) + (", …" if at.size > 12 else "")
    look.note(f"discontinuities at step {shown}" if at.size else "no discontinuity")


_of_bands = partial(Figure, draw=_draw_bands, overlays=True, averages=True)
grad_norms = _of_bands(
    name="grad_norms", title="Gradient norm per token", collect=_grad_norms, reading="moments"
)
displacement = _of_bands(
    name="displacement", title="Distance of the tokens from their start", collect=_displacement
)
speed = _of_bands(
    name="speed", title="Speed of the tokens", collect=_speed, measures=("step_norm",)
)
