"""What several figures put on their axes: labels with units, logarithmic scales, bands, notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from analysis.figures.figure import Look
from analysis.figures.style import population_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "along_steps",
    "log_scale",
    "named",
    "note",
    "population_band",
    "population_curves",
    "spread_note",
    "with_legend",
    "with_units",
]


def with_units(text: str, units: object) -> str:
    """Label of an axis; without what has no dimension.

    >>> with_units("speed", "1 per step"), with_units("share", "1")
    ('speed / per step', 'share')
    """
    unit = str(units or "").removeprefix("1 ").strip()
    return text if unit in ("", "1") else f"{text} / {unit}"


def along_steps(ax: Axes, label: str, units: object = "1") -> None:
    """Steps from left to right, a quantity upwards."""
    ax.set_xlabel("optimizer step")
    ax.set_ylabel(with_units(label, units))
    ax.grid(True, axis="y")
    ax.margins(x=0.01)


def log_scale(ax: Axes, axis: str, *values: Any) -> None:
    """Make an axis logarithmic, if there is anything that it can show."""
    shown = [np.asarray(value)[np.asarray(value) > 0] for value in values]
    if any(np.isfinite(value).any() for value in shown):
        getattr(ax, f"set_{axis}scale")("log")
    elif any(np.isfinite(np.asarray(value)).any() for value in values):
        note(ax, "all values are 0")
    else:
        note(ax, "all values are NaN")


def note(ax: Axes, text: str, *, place: tuple[float, float] = (0.02, 0.02)) -> None:
    """Say on the figure what its lines do not."""
    ax.text(
        *place,
        text,
        transform=ax.transAxes,
        fontsize="x-small",
        va="bottom" if place[1] < 0.5 else "top",
        ha="left" if place[0] < 0.5 else "right",
        bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "alpha": 0.75, "pad": 2},
        zorder=10,
    )


def population_band(ax: Axes, data: xr.Dataset, population: str, look: Look) -> None:
    """Mean over the tokens of a population, and the band between two quantiles.

    Of several runs the mean of that, and the band of one standard deviation between them.
    """
    part = data.sel(population=population)
    colour = population_colour(population)
    if look.spread is None:
        low, high = part["quantiles"].transpose("quantile", "step").values
    else:
        low, high = _around(part, "mean", look, population)
    steps = part["step"].values
    tokens = int(part["tokens"])
    ax.fill_between(steps, low, high, color=colour, alpha=0.12 if look.second else 0.25, lw=0)
    ax.plot(
        steps,
        part["mean"].values,
        look.line,
        color=colour,
        label=look.label(f"{named(population)} ({tokens:,})"),
    )


def population_curves(ax: Axes, data: xr.Dataset, look: Look, labels: Mapping[str, str]) -> None:
    """Two variables over the steps, of each population: a whole line and a dotted one."""
    steps = data["step"].values
    lines = (look.line, "-." if look.second else ":")
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        for line, (name, label) in zip(lines, labels.items(), strict=True):
            if look.spread is not None:
                low, high = _around(part, name, look, population)
                colour = population_colour(population)
                ax.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
            ax.plot(
                steps,
                part[name].values,
                line,
                color=population_colour(population),
                label=look.label(f"{named(population)}: {label}"),
            )


def _around(part: xr.Dataset, name: str, look: Look, population: str) -> tuple[Any, Any]:
    """One standard deviation between runs below and above their mean."""
    spreads = look.spread or xr.Dataset()
    spread = spreads[name].sel(population=population).values
    mean = part[name].values
    return mean - spread, mean + spread


def spread_note(ax: Axes, look: Look, over: str = "runs") -> None:
    """Say once what lines and bands of several runs are; nothing of a single one."""
    if look.spread is not None and not look.second:
        note(ax, f"line: mean over {over}; band: ± one standard deviation between runs")


def named(population: str) -> str:
    """How a population is called."""
    return {"all": "all tokens", "mostly_dead": "mostly dead tokens"}.get(
        population, f"{population} tokens"
    )


def with_legend(ax: Axes, **options: Any) -> None:
    """Legend, where there is something to tell apart."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**{"loc": "upper right", **options})
