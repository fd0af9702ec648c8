"""Figures of the page, drawn with HoloViews on Bokeh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.exploring.run_history import RunHistory
from trajstore.analysis.figures.style import CAUSE_COLORS, REGIME_COLORS, population_color
from trajstore.analysis.optimizer.freeze_causes import CAUSES
from trajstore.analysis.scan.rows import REGIMES

MANY = 3000
"""Number of tokens above which Datashader counts them in cells."""

Limits = tuple[float, float]

_AXES = ("axis 1", "axis 2")
_INK = "#222222"
_HERE = "#cc0077"
_CELLS = (700, 500)
_WIDTH = 1000  # cells of the heatmap along the steps


def limits(history: RunHistory) -> tuple[Limits, Limits]:
    """Limits of both axes that contain all tokens at all steps."""
    found = []
    for axis in range(2):
        values = history.position.values[..., axis]
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = 0.04 * (high - low) or 1.0
        found.append((low - margin, high + margin))
    return found[0], found[1]


def plane_points(position: npt.NDArray[np.float32], of: Mapping[str, Any]) -> Any:
    """Tokens in the plane at one step, with tooltips."""
    import holoviews as hv

    columns = {_AXES[0]: position[:, 0], _AXES[1]: position[:, 1], **of}
    points = hv.Points(columns, list(_AXES), list(of))
    if len(position) > MANY:
        return points
    tooltips = [("token", "@token"), ("kind", "@kind")]
    return points.opts(
        color=hv.dim("kind").categorize(_colors(of["kind"]), default="#888888"),
        size=6,
        alpha=0.7,
        line_color=None,
        tools=["hover"],
        hover_tooltips=tooltips,
    )


def _colors(of_kind: npt.NDArray[np.str_]) -> dict[str, str]:
    return {str(name): population_color(str(name)) for name in np.unique(of_kind)}


def shaded(points: Any, of_kind: npt.NDArray[np.str_], xlim: Limits, ylim: Limits) -> Any:
    """Many tokens, counted in cells of the plane: a stronger color for more tokens."""
    import datashader
    from holoviews.operation.datashader import datashade, dynspread

    cells = datashade(
        points,
        aggregator=datashader.by("kind", datashader.count()),
        color_key=_colors(of_kind),
        cnorm="log",
        min_alpha=90,
        x_range=xlim,
        y_range=ylim,
        width=_CELLS[0],
        height=_CELLS[1],
        streams=[],  # the ranges of the screen lag behind, and would cut tokens off
    )
    return dynspread(cells, threshold=0.8, max_px=2)


MARKS = ("○ start", "■ end", "◯ current step")
"""Legend of the marks on a token's path."""


def path_plot(token: xr.Dataset) -> Any:
    """Path of a token in the plane: an open circle at the start, a square at the end."""
    import holoviews as hv

    place = token["position"].values
    start = hv.Points(place[:1], list(_AXES)).opts(
        size=9, marker="circle", fill_color="white", line_color=_INK, line_width=1.5
    )
    end = hv.Points(place[-1:], list(_AXES)).opts(
        size=9, marker="square", fill_color=_INK, line_color="white"
    )
    return hv.Curve(place, *_AXES).opts(color=_INK, line_width=1.5) * start * end


def here_plot(token: xr.Dataset, step: int) -> Any:
    """Ring around the position of a token at a step, or at the nearest step in memory."""
    import holoviews as hv

    place = token["position"].sel(step=[step], method="nearest").values
    return hv.Points(place, list(_AXES)).opts(
        size=17, marker="circle", fill_alpha=0, line_color=_HERE, line_width=3
    )


def layer_plot(layers: xr.Dataset) -> Any:
    """Update-size heatmap: tokens in the order of their last change, colored by regime."""
    import holoviews as hv

    steps = layers["step"].values.astype(np.float64)
    stop = steps[-1] + (steps[-1] - steps[-2] if steps.size > 1 else 1)
    cells = min(_WIDTH, int(stop - steps[0]))
    # Steps may have gaps, pixels have none: each pixel shows the group at its beginning.
    places = steps[0] + np.arange(cells) * (stop - steps[0]) / cells
    group = np.searchsorted(steps, places, side="right") - 1
    colors = np.array([_rgb(REGIME_COLORS[name]) for name in REGIMES], np.uint8)
    picture = colors[layers["update_size"].transpose("group", "step").values[:, group]]
    tokens = int(layers["tokens"].sum())
    return hv.RGB(
        np.ascontiguousarray(picture[::-1]),
        bounds=(steps[0], 0, stop, tokens),
        kdims=["step", "rank"],
    )


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(color.removeprefix("#")))


def curve_plot(data: xr.Dataset, figure: str, name: str) -> Any:
    """One curve of a run: a line for each population, with a band of its tokens."""
    import holoviews as hv

    steps = data["step"].values
    value = f"{name} of {figure}"  # Panel gives plots of one name one axis
    if "population" not in data.dims:
        return hv.Overlay([hv.Curve((steps, data[name].values), "step", value).opts(color=_INK)])
    parts = []
    for population in data["population"].values.tolist():
        part, color = data.sel(population=population), population_color(population)
        if "quantiles" in part:
            low, high = part["quantiles"].transpose("quantile", "step").values
            band = hv.Area((steps, low, high), "step", [value, "high"])
            parts.append(band.opts(color=color, alpha=0.2, line_alpha=0))
        parts.append(hv.Curve((steps, part[name].values), "step", value).opts(color=color))
    return hv.Overlay(parts)


def token_curve(token: xr.Dataset, name: str) -> Any:
    """Hops or gradient of a token over the steps; below the hops, causes of unchanged steps."""
    import holoviews as hv

    steps = token["step"].values
    values = token[name].values.astype(np.float64)
    value = f"{name} of token"
    shown = np.where(values > 0, values, np.nan)  # on a logarithmic axis
    there = np.isfinite(np.pad(shown, 1, constant_values=np.nan))
    alone = there[1:-1] & ~there[:-2] & ~there[2:]  # no line reaches these
    # Always the same parts: HoloViews updates them in place.
    parts = [
        hv.Curve((steps, shown), "step", value).opts(color=_INK, line_width=1),
        hv.Scatter((steps[alone], shown[alone]), "step", value).opts(color=_INK, size=2),
    ]
    if name == "hop":
        parts += _causes(token, shown, value)
    return hv.Overlay(parts)


def token_range(token: xr.Dataset, name: str) -> dict[str, float]:
    """Limits of a logarithmic axis that contain all of `token_curve`."""
    values = token[name].values.astype(np.float64)
    shown = values[np.isfinite(values) & (values > 0)]
    low, high = (shown.min(), shown.max()) if shown.size else (3.0, 3.0)
    return {"start": float(low / 5), "end": float(high * 2)}


def _causes(token: xr.Dataset, shown: npt.NDArray[np.float64], value: str) -> list[Any]:
    """A row of squares below the hops for each cause, at the unchanged steps."""
    import holoviews as hv

    steps = token["step"].values
    causes = token["cause"].values if "cause" in token else np.zeros(steps.size, np.int8)
    least = np.nanmin(shown, initial=np.inf)
    below = least / 3 if np.isfinite(least) else 1.0
    rows = []
    for number, name in enumerate(CAUSES[1:], 1):
        at = steps[causes == number]
        squares = hv.Scatter((at, np.full(at.size, below)), "step", value)
        rows.append(squares.opts(color=CAUSE_COLORS[name], marker="square", size=5))
    return rows
