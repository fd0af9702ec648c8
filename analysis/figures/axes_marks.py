"""What several figures put on their axes: labels with units, logarithmic scales, bands, notes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trajstore.analysis.figures.figure import Look

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.text import Text
    from matplotlib.transforms import Transform

__all__ = [
    "along_steps",
    "log_scale",
    "name_kinds",
    "named",
    "note",
    "population_band",
    "population_curves",
    "spread_edges",
    "spread_note",
    "with_legend",
    "with_units",
]

_NOTE = "_note"  # a label that no legend shows
_LINE_LENGTH = 105  # characters, in the narrowest panel of a sheet
_LINE_HEIGHT = 10  # points
_GAP = 38
"""Points from the axes to what is told below them; ticks and the label of the axis are there."""


def with_units(text: str, units: object) -> str:
    """Label of an axis; without what has no dimension.

    >>> with_units("speed", "1 per step"), with_units("share", "1")
    ('speed / W per step', 'share')
    """
    unit = re.sub("^1 per", "W per", str(units or "1"))
    return text if unit == "1" else f"{text} / {unit}"


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
        _instead(ax, "all values are 0")
    else:
        _instead(ax, "all values are NaN")


def _instead(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center")


def note(ax: Axes, text: str) -> None:
    """Say, once, what the lines do not: below the axes if there is a layout that makes room."""
    held = _noted(ax)
    lines = textwrap.wrap(text, _LINE_LENGTH)
    if held is not None:
        if text not in held.get_text().replace("\n", " "):
            held.set_text("\n".join([held.get_text(), *lines]))
        return
    below = _makes_room(ax)
    x, y = (0, 0) if below else (0.02, 0.02)
    ax.text(
        x,
        y,
        "\n".join(lines),
        transform=_below(ax, _GAP) if below else ax.transAxes,
        label=_NOTE,
        fontsize="x-small",
        va="top" if below else "bottom",
        linespacing=1.2,
        bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "alpha": 0.75, "pad": 2},
        zorder=10,
    )


def _noted(ax: Axes) -> Text | None:
    return next((text for text in ax.texts if text.get_label() == _NOTE), None)


def _makes_room(ax: Axes) -> bool:
    return ax.figure.get_layout_engine() is not None


def _below(ax: Axes, points: float) -> Transform:
    """Place so many points below the left end of the axes."""
    from matplotlib.transforms import ScaledTranslation

    return ax.transAxes + ScaledTranslation(0, -points / 72, ax.figure.dpi_scale_trans)


def population_band(ax: Axes, data: xr.Dataset, population: str, look: Look) -> None:
    """Mean over the tokens of a population, and the band between two quantiles.

    Of several runs the means alone; of the mean of many, the spread between them.
    """
    part = data.sel(population=population)
    kind = data["population"].values.tolist().index(population)
    steps, colour = part["step"].values, look.colour(population)
    spread_edges(ax, steps, look, "mean", population)
    if look.alone and look.band is None:
        low, high = part["quantiles"].transpose("quantile", "step").values
        ax.fill_between(steps, low, high, color=colour, alpha=look.style.band, lw=0)
    label = look.label(f"{named(population)} ({int(part['tokens']):,})", kind)
    ax.plot(steps, part["mean"].values, look.line(kind), color=colour, label=label)


def population_curves(ax: Axes, data: xr.Dataset, look: Look, labels: Mapping[str, str]) -> None:
    """Two variables over the steps, of each population: a whole line and a dotted one.

    Of several runs, both are shown of a single population only, and else the first.
    """
    steps = data["step"].values
    populations = data["population"].values.tolist()
    first = dict([*labels.items()][:1])
    shown = labels if look.alone or len(populations) == 1 else first
    kinds = [(population, name) for population in populations for name in shown]
    for kind, (population, name) in enumerate(kinds):
        spread_edges(ax, steps, look, name, population)
        ax.plot(
            steps,
            data[name].sel(population=population).values,
            ":" if look.alone and name not in first else look.line(kind),
            color=look.colour(population),
            label=look.label(f"{named(population)}: {labels[name]}", kind),
        )
    name_kinds(ax, look, [f"{named(population)}: {labels[name]}" for population, name in kinds])


def spread_edges(ax: Axes, steps: Any, look: Look, name: str, population: str) -> None:
    """Band of the spread between runs about their mean, where there is one."""
    if look.band is None:
        return
    low, high = (edge[name].sel(population=population).values for edge in look.band)
    opacity = look.style.band / look.runs**0.5
    ax.fill_between(steps, low, high, color=look.colour(population), alpha=opacity, lw=0)


def name_kinds(ax: Axes, look: Look, kinds: Sequence[str]) -> None:
    """Put into the legend what kinds of curves each run has, once: after the last run."""
    if look.number == look.runs - 1 and not look.alone:
        for kind, text in enumerate(kinds):
            ax.plot([], [], look.line(kind), color=look.style.ink, label=text)


def spread_note(ax: Axes, look: Look, *, over: str = "runs", alone: str = "") -> None:
    """Say what lines and bands of several runs are; of a single one, what is said of it alone."""
    if look.band is not None:
        note(ax, f"line: mean over {over}; band: ± one standard deviation between runs")
    elif alone and look.alone:
        note(ax, alone)


def named(population: str) -> str:
    """How a population is called."""
    return {"all": "all tokens", "mostly_dead": "mostly dead tokens"}.get(
        population, f"{population} tokens"
    )


def with_legend(ax: Axes, *others: Axes, handles: Sequence[Artist] | None = None) -> None:
    """Legend, after all notes, where there is something to tell apart.

    Below the axes, where it hides nothing, if there is a layout that makes room.

    Parameters
    ----------
    ax : Axes
    *others : Axes
        Whose lines are told there, too.
    handles : sequence of Artist, optional
        In place of all that have a label.
    """
    shown = list(handles or ())
    for each in () if shown else (ax, *others):
        shown += each.get_legend_handles_labels()[0]
    if not shown:
        return
    if not _makes_room(ax):
        ax.legend(handles=shown, loc="best")
        return
    held = _noted(ax)
    lines = len(held.get_text().splitlines()) if held else 0
    longest = max(len(str(handle.get_label())) for handle in shown)
    ax.legend(
        handles=shown,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=_below(ax, _GAP + _LINE_HEIGHT * lines),
        borderaxespad=0,
        frameon=False,
        ncols=max(1, _LINE_LENGTH // (longest + 9)),
    )
