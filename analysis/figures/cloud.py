"""The cloud of tokens: its centroid, its principal axes, and identical vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.cloud import identical_vectors, shape
from trajstore.analysis.figures.axes_marks import (
    along_steps,
    log_scale,
    name_kinds,
    named,
    population_curves,
    spread_note,
    with_legend,
    with_units,
)
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.motion import collective
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["centroid", "clusters", "spectrum"]


def _centroid(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    return collective.centroid(scan, shown)[["centroid_norm", "mean_radius"]]


@figure(_centroid, rows=1, reading="rows", overlays=True, averages=True)
def centroid(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Norm of the tokens' centroid, and their mean distance from it."""
    labels = {"centroid_norm": "norm of the centroid", "mean_radius": "mean distance from it"}
    population_curves(ax, data, look, labels)
    along_steps(ax, "L2 norm, distance", data["centroid_norm"].attrs["units"])
    spread_note(ax, look)
    with_legend(ax)


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
        # A logarithmic axis has no zero, and smaller variances are rounding errors.
        least = variances.max(initial=0) * variances.size * np.finfo(np.float64).eps
        drawn = np.where(variances > least, variances, np.nan)
        line = ":" if look.alone and rows else look.line(kind)
        label = look.label(f"{texts[kind]}: effective rank {rank:.3g}", kind)
        color = look.color(populations[place])
        ax.plot(numbers, drawn, line, marker=".", ms=4, color=color, label=label)
    name_kinds(ax, look, texts)
    ax.set_xlabel("principal axis, by decreasing variance")
    ax.set_ylabel(with_units("variance along the axis", data["spectrum"].attrs["units"]))
    ax.grid(True, axis="y")
    log_scale(ax, "y", values)
    with_legend(ax)


def _clusters(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    found = identical_vectors.clusters(scan, None, options.lattice, ranks=1).sel(population=shown)
    vectors = found["groups"] + found["singles"]
    # Without groups, the most common vector is that of one token.
    largest = found["group_sizes"].isel(rank=0).clip(min=1)
    return xr.Dataset({"vectors": vectors, "largest": largest})


@figure(_clusters, rows=1, on_lattice=True, overlays=True, averages=True, reading="identical")
def clusters(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Tokens with identical vectors."""
    from matplotlib.ticker import LogLocator, NullFormatter

    labels = {"vectors": "distinct vectors", "largest": "tokens at the most common vector"}
    population_curves(ax, data, look, labels)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    along_steps(ax, "number of vectors or tokens")
    spread_note(ax, look)
    with_legend(ax)
