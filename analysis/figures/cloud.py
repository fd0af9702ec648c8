"""The cloud of tokens: its centre, its principal axes, paths in it, and shared vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.cloud import identical_vectors, shape
from trajstore.analysis.figures.axes_marks import (
    along_steps,
    log_scale,
    name_kinds,
    named,
    note,
    population_curves,
    spread_note,
    with_legend,
    with_units,
)
from trajstore.analysis.figures.figure import Look, Options, figure
from trajstore.analysis.figures.style import population_colour, shades
from trajstore.analysis.motion import collective
from trajstore.analysis.scan.scan import Scan
from trajstore.populations.masks import chosen_populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["centroid", "clusters", "spectrum", "trajectory"]


def _centroid(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    return collective.centroid(scan, shown)[["centroid_norm", "mean_radius"]]


@figure(_centroid, rows=1, reading="rows", overlays=True, averages=True)
def centroid(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Centre of the tokens, and their distance from it."""
    labels = {"centroid_norm": "norm of their centre", "mean_radius": "mean distance from it"}
    population_curves(ax, data, look, labels)
    along_steps(ax, "length", data["centroid_norm"].attrs["units"])
    lines = "whole: how far their centre is from 0; dotted: how far they are from it, on average"
    spread_note(ax, look, alone=lines)
    with_legend(ax)


_LINES = 500
"""Tokens up to which each has a line of its own; of more, the points are counted."""

_POINTS = 1 << 25
_CELLS = 500


def _trajectory(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    first: Any = None if options.plane == "principal" else options.plane
    found = shape.pca(scan, components=2, first=first)
    position, variance = found["scores"], found["spectrum"].rename(principal="component")
    whole = variance.sum()
    every = -(-position.sizes["step"] * position.sizes["token"] // _POINTS)
    _, members = chosen_populations(scan.ds, shown)
    return xr.Dataset(
        {
            "position": position.isel(step=slice(None, None, every)),
            "share": variance[:2] / whole.where(whole > 0, 1),
            "member": (("population", "token"), members),
        },
        coords={"population": shown},
        attrs={"every": every, "plane": options.plane},
    )


@figure(_trajectory, rows=1, scales=False, reading="plane")
def trajectory(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Paths of the tokens in the plane of their largest spread."""
    position = data["position"].transpose("component", "step", "token")
    few = position.sizes["token"] <= _LINES
    # Live tokens first: the dead ones, mostly together in one place, lie above them.
    for population in reversed(data["population"].values.tolist()):
        paths = position.values[..., data["member"].sel(population=population).values]
        colour = population_colour(population)
        if few:
            _draw_lines(ax, paths, colour)
        else:
            _draw_counts(ax, paths, colour, look)
        label = f"{named(population)} ({paths.shape[-1]:,})"
        ax.plot([], [], color=colour, lw=3, label=label)
    first, last = (int(data["step"][at]) for at in (0, -1))
    if few:
        style: dict[str, Any] = {"color": look.style.ink, "ls": "", "ms": 5}
        ax.plot([], [], "o", mfc="none", label=f"step {first}", **style)
        ax.plot([], [], "o", label=f"step {last}", **style)
    ax.autoscale()  # hist2d has set the limits of its own points
    ax.set_aspect("equal", adjustable="datalim")
    share = data["share"].values
    label = {"principal": "principal component", "hidden_mean": "direction"}[data.attrs["plane"]]
    texts = []
    for axis in range(2):
        which = f"{label} {axis + 1}"
        if data.attrs["plane"] == "hidden_mean":
            which = ("along h̄, the mean hidden state", "largest spread orthogonal to h̄")[axis]
        text = f"{which} ({share[axis]:.1%} of the variance)"
        texts.append(with_units(text, data["position"].attrs.get("units")))
    ax.set_xlabel(texts[0])
    ax.set_ylabel(texts[1])
    notes = (
        []
        if few
        else ["all tokens at all steps, counted in cells: the stronger the colour, the more (log)"]
    )
    notes += [f"every {data.attrs['every']}th step"] if data.attrs["every"] > 1 else []
    if notes:
        note(ax, "; ".join(notes))
    with_legend(ax)


def _draw_lines(ax: Axes, paths: npt.NDArray[Any], colour: str) -> None:
    from matplotlib.collections import LineCollection

    lines = LineCollection(
        list(paths.transpose(2, 1, 0)), colors=colour, linewidths=0.6, alpha=0.5, rasterized=True
    )
    ax.add_collection(lines)
    ax.plot(*paths[:, 0], "o", mfc="none", mec=colour, ms=5, mew=1)
    ax.plot(*paths[:, -1], "o", color=colour, ms=4)


def _draw_counts(ax: Axes, paths: npt.NDArray[Any], colour: str, look: Look) -> None:
    from matplotlib.colors import LogNorm

    if not np.isfinite(paths).any():
        return
    limits = [(float(np.nanmin(axis)), float(np.nanmax(axis))) for axis in paths]
    (left, right), (bottom, top) = (
        (low - (low == high) / 2, high + (low == high) / 2) for low, high in limits
    )
    counts = np.zeros(_CELLS**2, np.int64)
    # Step by step: of all points at once, histograms have copies of many times their size.
    for x, y in paths.transpose(1, 0, 2):
        there = np.isfinite(x)
        columns, rows = _cells(x[there], left, right), _cells(y[there], bottom, top)
        counts += np.bincount(rows * _CELLS + columns, minlength=counts.size)
    ax.pcolormesh(
        np.linspace(left, right, _CELLS + 1),
        np.linspace(bottom, top, _CELLS + 1),
        np.ma.masked_equal(counts.reshape(_CELLS, _CELLS), 0),
        cmap=shades(colour, look.style.ground),
        norm=LogNorm(1, max(2, counts.max())),
        rasterized=True,
    )


def _cells(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.int64]:
    """In which of the cells of equal width each value lies; the last one has its upper edge."""
    places = (values.astype(np.float64) - low) * (_CELLS / (high - low))
    return np.minimum(places.astype(np.int64), _CELLS - 1)


_ROWS = {"all": "all steps", "last": "last step"}


def _spectra(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    found = [xr.concat([_spectrum(scan, name, rows) for rows in _ROWS], "rows") for name in shown]
    whole = xr.concat(found, "population").assign_coords(population=shown, rows=list(_ROWS))
    whole["spectrum"].attrs["units"] = found[0]["spectrum"].attrs["units"]
    return whole


def _spectrum(scan: Scan, population: str, rows: str) -> xr.Dataset:
    return shape.pca(scan, population, 1, rows)[["spectrum", "effective_rank"]].drop_attrs(
        deep=False
    )


@figure(_spectra, rows=1, overlays=True, of_window=True, reading="plane")
def spectrum(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Variance of the tokens along their principal axes."""
    values = data["spectrum"].transpose("population", "rows", "principal").values
    numbers = np.arange(1, values.shape[2] + 1)
    populations = data["population"].values.tolist()
    shown = _ROWS if look.alone or len(populations) == 1 else {"all": _ROWS["all"]}
    kinds = [(place, rows) for place in range(len(populations)) for rows in range(len(shown))]
    texts = [f"{named(populations[place])}, {[*shown.values()][rows]}" for place, rows in kinds]
    for kind, (place, rows) in enumerate(kinds):
        variances, rank = values[place, rows], data["effective_rank"].values[place, rows]
        # Zero has no place on a logarithmic axis, and what is less than this is rounding.
        least = variances.max(initial=0) * variances.size * np.finfo(np.float64).eps
        drawn = np.where(variances > least, variances, np.nan)
        line = ":" if look.alone and rows else look.line(kind)
        label = look.label(f"{texts[kind]}: effective rank {rank:.3g}", kind)
        colour = look.colour(populations[place])
        ax.plot(numbers, drawn, line, marker=".", ms=4, color=colour, label=label)
    name_kinds(ax, look, texts)
    ax.set_xlabel("principal axis")
    ax.set_ylabel(with_units("variance along it", data["spectrum"].attrs["units"]))
    ax.grid(True, axis="y")
    log_scale(ax, "y", values)
    with_legend(ax)


def _clusters(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    found = identical_vectors.clusters(scan, None, options.lattice, ranks=1).sel(population=shown)
    vectors = found["groups"] + found["singles"]
    # Of single tokens only, the largest group is one of them.
    largest = found["group_sizes"].isel(rank=0).clip(min=1)
    return xr.Dataset({"vectors": vectors, "largest": largest})


@figure(_clusters, rows=1, on_lattice=True, overlays=True, averages=True, reading="identical")
def clusters(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Tokens that have become identical."""
    labels = {"vectors": "different vectors", "largest": "tokens that share the commonest"}
    population_curves(ax, data, look, labels)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    along_steps(ax, "number of vectors, or of tokens")
    spread_note(ax, look)
    with_legend(ax)
