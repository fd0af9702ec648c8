"""The cloud of tokens: its centroid, its principal axes, and identical vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.cloud import identical_vectors, shape
from trajstore.analysis.figures.axes_marks import (
    along_steps,
    draw_curves,
    log_scale,
    with_units,
)
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.motion import collective
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _centroid(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    return collective.centroid(scan, shown)[["centroid_norm", "mean_radius"]]


@figure(_centroid, rows=1, reading="rows", overlays=True, averages=True)
def centroid(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Norm of the tokens' centroid, and their mean distance from it."""
    labels = {"centroid_norm": "norm of the centroid", "mean_radius": "mean distance from it"}
    draw_curves(ax, data, look, labels)
    along_steps(ax, "L2 norm, distance", data["centroid_norm"].attrs["units"])


_ROWS = {"all": "all steps", "last": "last step"}


def _spectra(scan: Scan, options: Options) -> xr.Dataset:
    """Variances ``all`` and ``last`` along the axes of each population, and effective ranks."""
    shown = options.populations(scan)
    found: dict[str, xr.DataArray] = {}
    for rows in _ROWS:
        parts = [shape.pca(scan, name, 1, rows)[["spectrum", "effective_rank"]] for name in shown]
        whole = xr.concat(parts, "population", combine_attrs="drop")
        whole["spectrum"].attrs = parts[0]["spectrum"].attrs
        found |= {rows: whole["spectrum"], f"{rows}_rank": whole["effective_rank"]}
    return xr.Dataset(found).assign_coords(population=shown)


@figure(_spectra, rows=1, overlays=True, of_window=True, reading="plane")
def spectrum(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Variance of the tokens along their principal axes."""
    values = data[[*_ROWS]].to_array()
    # A logarithmic axis has no zero, and smaller variances are rounding errors.
    least = values.max("principal") * data.sizes["principal"] * np.finfo(np.float64).eps
    draw_curves(
        ax,
        data.assign(values.where(values > least).to_dataset("variable")).assign_coords(
            principal=np.arange(1, data.sizes["principal"] + 1)
        ),
        look,
        _ROWS,
        "principal",
        lambda part, rows: f", effective rank {float(part[f'{rows}_rank']):.3g}",
        marker=".",
        ms=4,
    )
    ax.set_xlabel("principal axis, by decreasing variance")
    ax.set_ylabel(with_units("variance along the axis", data["all"].attrs["units"]))
    ax.grid(True, axis="y")
    log_scale(ax, "y", values)


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
    draw_curves(ax, data, look, labels)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    along_steps(ax, "number of vectors or tokens")
