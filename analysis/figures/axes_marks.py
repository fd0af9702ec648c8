"""Parts that several figures share: labels with units, scales, bands, notes, legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xarray as xr

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

    from trajstore.analysis.figures.style import RunStyle

_COVERED = 0.9
"""Part of its points from which on a curve is covered."""

_CLOSE = 0.005
"""Distance of two points that look like one, in heights of the axes."""

_WIDER = 1.5
"""Points that a curve is wider than the one on top of it."""

_GAP = 38
"""Points between the axes and the legend below them, for ticks and the label of the axis."""

_SIDE = 60
"""Points that ticks and the label of a vertical axis take."""

_LETTER = 0.55
"""Mean width of a letter, in sizes of its font."""

_HANDLE = 9
"""Width of a handle in a legend and the gaps around it, in letters."""


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
        set_log(ax, axis)
    elif any(np.isfinite(np.asarray(value)).any() for value in values):
        message(ax, "all values are 0")
    else:
        message(ax, "all values are NaN")


def set_log(ax: Axes, axis: str) -> None:
    """Make an axis logarithmic, with numbers such as 0.3 if it spans less than two decades."""
    from trajstore.analysis.figures.log_ticks import PlainFormatter

    numbered = ax.xaxis if axis == "x" else ax.yaxis
    getattr(ax, f"set_{axis}scale")("log")
    for change in (numbered.set_major_formatter, numbered.set_minor_formatter):
        change(PlainFormatter(minor_thresholds=(2, 0.4)))


def message(ax: Axes, text: str) -> None:
    """Write a text into the middle of axes that show nothing else."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center")


def central_range(edges: Any, counted: Any) -> tuple[float, float]:
    """Edges of the classes that hold all counts but 0.1 % at each end."""
    total = np.cumsum(counted)
    low = np.searchsorted(total, total[-1] * 0.001, side="right")
    high = np.searchsorted(total, total[-1] * 0.999, side="left")
    return float(edges[low]), float(edges[min(high, edges.size - 2) + 1])


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
    name = f"{low:g} {high:g}"
    if any(patch.get_gid() == name for patch in ax.patches):
        return
    known = label in ax.get_legend_handles_labels()[1]
    ax.axvspan(
        low, high, color=color, alpha=0.35, lw=0, zorder=0, gid=name, label="" if known else label
    )


def draw_curves(
    ax: Axes,
    data: xr.Dataset,
    look: RunStyle,
    labels: Mapping[str, str],
    along: str = "step",
    about: Callable[[xr.Dataset, str], str] = lambda part, name: "",
    **line: Any,
) -> None:
    """Draw a line for each population and variable, with a band of its tokens or of its runs.

    Several runs have no band of tokens. They show all variables of a single population, or the
    first variable of several.

    Parameters
    ----------
    ax : Axes
    data : Dataset
        Variables of dims population and `along`; ``quantiles``, the lower and upper edge of the
        band of the first one.
    look : RunStyle
    labels : mapping
        Text by the name of each variable.
    along : str
        Coordinate to the right.
    about : callable
        Takes the data of a population and the name of a variable; returns the rest of the label.
    **line
        Of matplotlib.
    """
    places = data[along].values
    populations = data["population"].values.tolist()
    first = next(iter(labels))
    shown = labels if look.alone or len(populations) == 1 else [first]
    texts: list[str] = []
    for population, name in product(populations, shown):
        part, color, kind = data.sel(population=population), look.color(population), len(texts)
        edges: Any = None
        if look.band is not None:
            edges = [edge[name].sel(population=population).values for edge in look.band]
        elif look.alone and "quantiles" in part:
            edges = part["quantiles"].transpose("quantile", along).values
        if edges is not None:
            opacity = look.style.band / look.runs**0.5
            low, high = edges
            ax.fill_between(places, low, high, color=color, alpha=opacity, lw=0)
        texts.append(": ".join(filter(None, [named(population), labels[name]])))
        ax.plot(
            places,
            part[name].values,
            ":" if look.alone and name != first else look.line(kind),
            color=color,
            label=look.label(texts[-1] + about(part, name), kind),
            **line,
        )
    name_kinds(ax, look, texts)


def widen_covered(ax: Axes, drawn: Mapping[str, Sequence[Artist]]) -> list[str]:
    """Draw each curve wider that later runs cover, and return a note that names both.

    Parameters
    ----------
    ax : Axes
    drawn : mapping
        Artists of each run or mean of runs, by its label, in the order of drawing.
    """
    if len(drawn) < 2:
        return []
    ax.autoscale_view()
    curves = [
        [line for each in artists if (line := _curve(ax, each))] for artists in drawn.values()
    ]
    labels, covered = list(drawn), []
    for number, label in enumerate(labels):
        names: list[str] = []
        for kind, curve in enumerate(curves[number]):
            later = range(number + 1, len(labels))
            above = [labels[at] for at in later if _covers(curves[at][kind : kind + 1], curve)]
            curve.artist.set_linewidth(curve.artist.get_linewidth() + _WIDER * len(above))
            names += above
        if names:
            covered.append(f"{label} under {', '.join(dict.fromkeys(names))}")
    return [f"wider, as others cover it: {'; '.join(covered)}"] if covered else []


class _Curve(NamedTuple):
    artist: Any
    places: npt.NDArray[Any]
    heights: npt.NDArray[Any]


def _curve(ax: Axes, artist: Artist) -> _Curve | None:
    """A line or histogram with points, and their heights in those of the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import StepPatch

    if isinstance(artist, StepPatch):
        values, edges, _ = artist.get_data()
        x, y = edges[:-1], values
    elif isinstance(artist, Line2D) and artist.get_transform() == ax.transData:
        x, y = (np.asarray(each, np.float64) for each in artist.get_data(orig=False))
    else:
        return None
    with np.errstate(all="ignore"):
        points = (ax.transScale + ax.transLimits).transform(np.column_stack([x, y]))
    return _Curve(artist, x, points[:, 1]) if np.isfinite(points[:, 1]).any() else None


def _covers(above: Sequence[_Curve], curve: _Curve) -> bool:
    for other in above:
        _, here, there = np.intersect1d(curve.places, other.places, return_indices=True)
        close = np.abs(curve.heights[here] - other.heights[there]) < _CLOSE
        if close.sum() >= _COVERED * np.isfinite(curve.heights).sum():
            return True
    return False


def name_kinds(ax: Axes, look: RunStyle, kinds: Sequence[str]) -> None:
    """Add the kinds of curves to the legend, once: after the last run. One kind is a note."""
    if look.alone:
        return
    if len(kinds) == 1:
        look.note(f"shown: {kinds[0]}")
    elif look.number == look.runs - 1:
        for kind, text in enumerate(kinds):
            ax.plot([], [], look.line(kind), color=look.style.ink, label=text)


def step_edges(steps: xr.DataArray) -> npt.NDArray[np.float64]:
    """Edges of the columns of a map: each step, and the end of the last column."""
    starts = steps.values.astype(np.float64)
    spacing = starts[-1] - starts[-2] if starts.size > 1 else 1.0
    return np.append(starts, starts[-1] + spacing)


def draw_counts(
    ax: Axes, x: Any, y: Any, counts: Any, colors: str | Colormap, label: str = ""
) -> None:
    """Draw a map of counts with logarithmic colors, blank where none are; label its color bar."""
    from matplotlib.colors import LogNorm

    if not counts.any():
        return
    mesh = ax.pcolormesh(
        x,
        y,
        np.ma.masked_equal(counts, 0),
        norm=LogNorm(1, max(2, counts.max())),
        cmap=colors,
        rasterized=True,
    )
    if label:
        ax.figure.colorbar(mesh, ax=ax).set_label(label)


def named(population: str) -> str:
    """Name of a population in labels."""
    own = {"all": "all tokens", "mostly_dead": "mostly dead tokens", "hidden_mean": "h̄"}
    return own.get(population, f"{population} tokens")


def reword(ax: Axes, change: Callable[[str], str]) -> None:
    """Change the labels of axes, those of the legend to come, and the texts in the axes."""
    for text in (ax.xaxis.label, ax.yaxis.label, *ax.texts):
        text.set_text(change(text.get_text()))
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
        handle.set_label(change(label))


def add_legend(ax: Axes, notes: Sequence[str]) -> None:
    """Add a legend headed by notes: below the axes if a layout makes room, else inside."""
    from matplotlib.transforms import offset_copy

    handles, labels = ax.get_legend_handles_labels()
    if not handles and not notes:
        return
    place: dict[str, Any] = {"loc": "best"}
    canvas: Any = ax.figure
    if ax.figure.get_layout_engine() is not None:
        room = _letters(ax, "small")
        labels = [textwrap.fill(label, room - _HANDLE) for label in labels]
        widths = [max(map(len, label.splitlines()), default=0) + _HANDLE for label in labels]
        fitting = (number for number in range(len(labels), 1, -1) if _fits(widths, number, room))
        place = {
            "loc": "upper left",
            "bbox_to_anchor": (0, 0),
            "bbox_transform": offset_copy(ax.transAxes, canvas, 0, -_GAP, units="points"),
            "borderaxespad": 0,
            "frameon": False,
            "ncols": next(fitting, 1),
        }
    lines = (line for text in notes for line in textwrap.wrap(text, _letters(ax, "x-small")))
    ax.legend(
        handles, labels, title="\n".join(lines), title_fontsize="x-small", alignment="left", **place
    )


def _fits(widths: Sequence[int], number: int, room: int) -> bool:
    """True if so many columns fit, each as wide as its longest label."""
    columns = np.array_split(widths, number)
    return bool(sum(column.max(initial=0) for column in columns) <= room)
