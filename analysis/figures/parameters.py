"""Every parameter of the model at every step: what of its update was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import note
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["parameters"]

_CELLS = 1 << 21
_NAMES = 40


def _collect(history: Scan, options: Options) -> xr.Dataset:
    input_checks.variables(history.ds, "param_update_lost")
    lost = history.ds["param_update_lost"].isel(step=slice(1, None))
    every = -(-lost.size // _CELLS)
    thinned = lost.isel(step=slice(None, None, max(every, 1)))
    return xr.Dataset({"lost": thinned}, attrs={"every": every})


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    lost = data["lost"].transpose("parameter", "step")
    steps, places = data["step"].values, np.arange(lost.sizes["parameter"])
    mesh = ax.pcolormesh(
        steps,
        places,
        np.ma.masked_invalid(lost.values),
        vmin=0,
        vmax=1,
        cmap=look.style.density,
        shading="nearest",
        rasterized=True,
    )
    bar = ax.figure.colorbar(mesh, ax=ax)
    bar.set_label("share of the elements that a step left as they were")
    ax.invert_yaxis()
    if places.size <= _NAMES:
        ax.set_yticks(places, [str(name) for name in data["parameter"].values], fontsize="xx-small")
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("parameter")
    if data.attrs["every"] > 1:
        note(ax, f"every {data.attrs['every']}th step")


parameters = Figure(
    name="parameters",
    title="Updates of the model's parameters that rounding left undone",
    collect=_collect,
    draw=_draw,
    scales=False,
    of_populations=False,
)
