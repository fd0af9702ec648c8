"""Variance of the cloud of tokens along its principal axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.shape import build_pca
from trajstore.analysis.figures.axes_marks import log_scale, named, with_legend, with_units
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import population_colour
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["spectrum"]

_ROWS = {"all": "all steps", "last": "last step"}


def _collect(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    found = [
        xr.concat([_spectrum(history, name, rows) for rows in _ROWS], "rows") for name in shown
    ]
    whole = xr.concat(found, "population").assign_coords(population=shown, rows=list(_ROWS))
    whole["spectrum"].attrs["units"] = found[0]["spectrum"].attrs["units"]
    return whole


def _spectrum(history: Scan, population: str, rows: str) -> xr.Dataset:
    return build_pca(history, population, 1, rows)[["spectrum", "effective_rank"]].drop_attrs(
        deep=False
    )


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    values = data["spectrum"].transpose("population", "rows", "principal").values
    numbers = np.arange(1, values.shape[2] + 1)
    lines = (look.line, "-." if look.second else ":")
    for population, spectra, ranks in zip(
        data["population"].values.tolist(), values, data["effective_rank"].values, strict=True
    ):
        for line, rows, variances, rank in zip(lines, _ROWS.values(), spectra, ranks, strict=True):
            # Zero has no place on a logarithmic axis, and what is less than this is rounding.
            least = variances.max(initial=0) * variances.size * np.finfo(np.float64).eps
            shown = np.where(variances > least, variances, np.nan)
            label = f"{named(population)}, {rows}: effective rank {rank:.3g}"
            colour = population_colour(population)
            ax.plot(numbers, shown, line, marker=".", ms=4, color=colour, label=look.label(label))
    ax.set_xlabel("principal axis")
    ax.set_ylabel(with_units("variance along it", data["spectrum"].attrs["units"]))
    ax.grid(True, axis="y")
    log_scale(ax, "y", values)
    with_legend(ax)


spectrum = Figure(
    name="spectrum",
    title="Variance of the tokens along their principal axes",
    collect=_collect,
    draw=_draw,
    rows=1,
    overlays=True,
    reading="plane",
)
