"""Parts that several figures share: labels with units, scales, bands, notes, legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.text import Text
    from matplotlib.transforms import Transform

    from trajstore.analysis.figures.style import Look

__all__ = [
    "along_steps",
    "central_range",
    "log_scale",
    "message",
    "name_kinds",
    "named",
    "note",
    "population_band",
    "population_curves",
    "set_title",
    "shade_region",
    "spread_edges",
    "spread_note",
    "text_width",
    "with_legend",
    "with_units",
]

_NOTE = "_note"  # a label that no legend shows
_LINE_HEIGHT = 10  # points
_GAP = 38
"""Points between the axes and the notes below them, for ticks and the label of the axis."""

_SIDE = 60
"""Points that ticks and the label of a vertical axis take."""

_LETTER = 0.55
"""Mean width of a letter, in sizes of its font."""

_HANDLE = 5
"""Width of a handle in a legend and the gaps around it, in sizes of its font."""

_HINTING = 1.06
"""Factor by which letters on screens are wider than their outlines."""

_REGION = "region"
"""Prefix of the identity of shaded regions, which a legend shows last."""


def with_units(text: str, units: object) -> str:
    """Label of an axis, with its unit unless it has no dimension.

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
    """Make an axis logarithmic, if any value is positive."""
    shown = [np.asarray(value)[np.asarray(value) > 0] for value in values]
    if any(np.isfinite(value).any() for value in shown):
        getattr(ax, f"set_{axis}scale")("log")
    elif any(np.isfinite(np.asarray(value)).any() for value in values):
        message(ax, "all values are 0")
    else:
        message(ax, "all values are NaN")


def message(ax: Axes, text: str) -> None:
    """Write a text into the middle of axes that show nothing else."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center")


def central_range(edges: Any, counted: Any) -> tuple[float, float]:
    """Edges of the classes that hold all counts but 0.1 % at each end."""
    total = np.cumsum(counted)
    low = np.searchsorted(total, total[-1] * 0.001, side="right")
    high = np.searchsorted(total, total[-1] * 0.999, side="left")
    return float(edges[low]), float(edges[min(high, edges.size - 2) + 1])


def note(ax: Axes, text: str) -> None:
    """Write a note once: below the axes if a layout makes room, else inside."""
    held = _noted(ax)
    lines = textwrap.wrap(text, _letters(ax, "x-small"))
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


def _room(ax: Axes) -> float:
    """Width of the axes in points, which a color bar reduces."""
    width = float(ax.figure.bbox.width * 72 / ax.figure.dpi)
    bars = sum(axes.get_label() == "<colorbar>" for axes in ax.figure.axes)
    return width - _SIDE - 0.22 * width * bars


def _letters(ax: Axes, size: str) -> int:
    from matplotlib.font_manager import FontProperties

    points = FontProperties(size=size).get_size_in_points()
    return max(20, int(_room(ax) / (_LETTER * points)))


def set_title(ax: Axes, text: str) -> None:
    """Title at the left of the axes, wrapped to their width."""
    lines = [textwrap.fill(line, _letters(ax, "medium")) for line in text.splitlines()]
    ax.set_title("\n".join(lines), loc="left")


def shade_region(ax: Axes, low: float, high: float, label: str, color: str) -> None:
    """Shade a range of steps once, also if several runs share it."""
    name = f"{_REGION} {low:g} {high:g}"
    if any(patch.get_gid() == name for patch in ax.patches):
        return
    known = label in ax.get_legend_handles_labels()[1]
    ax.axvspan(
        low, high, color=color, alpha=0.35, lw=0, zorder=0, gid=name, label="" if known else label
    )


def _below(ax: Axes, points: float) -> Transform:
    """Place so many points below the left end of the axes."""
    from matplotlib.transforms import ScaledTranslation

    return ax.transAxes + ScaledTranslation(0, -points / 72, ax.figure.dpi_scale_trans)


def population_band(ax: Axes, data: xr.Dataset, population: str, look: Look) -> None:
    """Draw the mean over the tokens of a population, and the band between two quantiles.

    Several runs have means only. The mean of many runs has a band of the spread between them.
    """
    part = data.sel(population=population)
    kind = data["population"].values.tolist().index(population)
    steps, color = part["step"].values, look.color(population)
    spread_edges(ax, steps, look, "mean", population)
    if look.alone and look.band is None:
        low, high = part["quantiles"].transpose("quantile", "step").values
        ax.fill_between(steps, low, high, color=color, alpha=look.style.band, lw=0)
    label = look.label(f"{named(population)} ({int(part['tokens']):,})", kind)
    ax.plot(steps, part["mean"].values, look.line(kind), color=color, label=label)


def population_curves(ax: Axes, data: xr.Dataset, look: Look, labels: Mapping[str, str]) -> None:
    """Draw two variables over the steps: a solid and a dotted line for each population.

    Several runs show both variables of a single population, or the first variable of several.
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
            color=look.color(population),
            label=look.label(f"{named(population)}: {labels[name]}", kind),
        )
    name_kinds(ax, look, [f"{named(population)}: {labels[name]}" for population, name in kinds])


def spread_edges(ax: Axes, steps: Any, look: Look, name: str, population: str) -> None:
    """Draw the band of the spread between runs, if `look` has one."""
    if look.band is None:
        return
    low, high = (edge[name].sel(population=population).values for edge in look.band)
    opacity = look.style.band / look.runs**0.5
    ax.fill_between(steps, low, high, color=look.color(population), alpha=opacity, lw=0)


def name_kinds(ax: Axes, look: Look, kinds: Sequence[str]) -> None:
    """Add the kinds of curves to the legend, once: after the last run."""
    if look.number == look.runs - 1 and not look.alone:
        for kind, text in enumerate(kinds):
            ax.plot([], [], look.line(kind), color=look.style.ink, label=text)


def spread_note(ax: Axes, look: Look, *, over: str = "runs", alone: str = "") -> None:
    """Write what lines and bands of several runs are, or the note of a single run."""
    if look.band is not None:
        note(ax, f"line: mean over {over}; band: ± one standard deviation between runs")
    elif alone and look.alone:
        note(ax, alone)


def named(population: str) -> str:
    """Name of a population in labels."""
    own = {"all": "all tokens", "mostly_dead": "mostly dead tokens", "hidden_mean": "h̄"}
    return own.get(population, f"{population} tokens")


def with_legend(ax: Axes, *others: Axes, handles: Sequence[Artist] | None = None) -> None:
    """Add a legend after all notes: below the axes if a layout makes room, else inside.

    Parameters
    ----------
    ax : Axes
    *others : Axes
        More axes whose lines the legend shows.
    handles : sequence of Artist, optional
        By default everything that has a label.
    """
    shown = list(handles or ())
    for each in () if shown else (ax, *others):
        shown += each.get_legend_handles_labels()[0]
    if not shown:
        return
    shown.sort(key=_is_region)
    if not _makes_room(ax):
        ax.legend(handles=shown, loc="best")
        return
    held = _noted(ax)
    lines = len(held.get_text().splitlines()) if held else 0
    length = _letters(ax, "small") - _HANDLE * 2
    labels = [textwrap.fill(str(handle.get_label()), length) for handle in shown]
    ax.legend(
        handles=shown,
        labels=labels,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=_below(ax, _GAP + _LINE_HEIGHT * lines),
        borderaxespad=0,
        frameon=False,
        ncols=_columns(labels, _room(ax)),
    )


def _is_region(handle: object) -> bool:
    from matplotlib.patches import Patch

    return isinstance(handle, Patch) and str(handle.get_gid() or "").startswith(_REGION)


def _columns(labels: Sequence[str], room: float) -> int:
    """Most columns that fit, each as wide as its longest label."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size="small")
    points = font.get_size_in_points()
    widths = [
        max(text_width(line, points) for line in label.splitlines() or [""]) + _HANDLE * points
        for label in labels
    ]
    for number in range(len(labels), 1, -1):
        # As matplotlib distributes them.
        columns = [column for column in np.array_split(widths, number) if column.size]
        if sum(column.max() for column in columns) <= room:
            return number
    return 1


def text_width(text: str, points: float) -> float:
    """Width of a line of text in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=points)
    width = text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
    return float(width) * _HINTING
