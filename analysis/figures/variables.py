"""Variables over the steps: curves, or a map of many rows. Results of `trajstore evaluate` too."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trajstore.analysis.figures.across_runs import MOST_CURVES
from trajstore.analysis.figures.axes_marks import (
    along_steps,
    with_units,
)
from trajstore.analysis.figures.figure import Figure, Options, after_first_row, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 1 << 21
"""Most values that a map shows; of more, one of every few steps."""

NAMES = 40
"""Most rows of a map that have a name."""

_MOST_DIMS = 2


def _loss(scan: Scan, options: Options) -> xr.Dataset:
    input_checks.variables(scan.ds, "loss")
    return scan.in_window(scan.ds[["loss"]])


@figure(_loss, rows=1, overlays=True, averages=True, of_populations=False)
def loss(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Training loss."""
    _curve(ax, data, look, "loss")
    along_steps(ax, "training loss", data["loss"].attrs.get("units"))


def _curve(ax: Axes, data: xr.Dataset, look: Look, name: str) -> None:
    """Draw a number per step, or its mean and spread over runs."""
    steps, values = data["step"].values, data[name].values
    color = look.style.ink if look.alone else look.run_color
    if look.band is not None:
        low, high = (edge[name].values for edge in look.band)
        ax.fill_between(steps, low, high, color=color, alpha=look.style.band, lw=0)
    ax.plot(steps, values, color=color, lw=0.9, label=look.label(name) if look.run else None)
    last = np.flatnonzero(np.isfinite(values))
    if not look.run and last.size:
        look.note(
            f"{values[last[0]]:.3f} at step {steps[last[0]]}, "
            f"{values[last[-1]]:.3f} at step {steps[last[-1]]}",
        )


def variable(name: str, ds: xr.Dataset) -> Figure:
    """Figure of a variable: a curve of numbers, a curve per row, or a map of many rows.

    Parameters
    ----------
    name : str
    ds : Dataset
        With the variable, of dims step and at most two others that are longer than 1.
    """
    rows = math.prod(size for dim, size in ds[name].sizes.items() if dim not in ("step", "run"))
    return Figure(
        name=name,
        title=str(ds[name].attrs.get("long_name", name)),
        collect=partial(_rows, name=name),
        draw=partial(_draw, name=name),
        rows=1,
        overlays=rows == 1,
        averages=rows == 1,
        bounds=(-math.inf, math.inf),
        scales=rows <= MOST_CURVES,
        of_populations=False,
    )


def _rows(scan: Scan, options: Options, *, name: str) -> xr.Dataset:
    """Return the variable of dims (step), or (step, row) with a text per row."""
    input_checks.variables(scan.ds, name)
    array = scan.in_window(scan.ds[name])
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{name} has texts, and figures show numbers; print them in Python: ds.{name}.values"
        )
    dims = [dim for dim in array.dims if dim != "step" and array.sizes[dim] != 1]
    if "step" not in array.dims or len(dims) > _MOST_DIMS:
        chosen = ", ".join(f"{dim}=0" for dim in dims[_MOST_DIMS:])
        raise InvalidArgument(
            f"{name} has dimensions {', '.join(map(str, array.dims))}, expected step and at most "
            f"{_MOST_DIMS} others; select in Python, such as ds.isel({chosen}).traj.plot.{name}()"
        )
    array = array.squeeze([dim for dim in array.dims if dim not in ("step", *dims)], drop=True)
    if not dims:
        return array.to_dataset(name=name)
    every = max(1, -(-array.size // MOST_CELLS))
    thinned = array.transpose("step", *dims).isel(step=slice(None, None, every))
    parts = [[f"{dim} {value}" for value in thinned[dim].values] for dim in dims]
    labels = [", ".join(places) for places in product(*parts)]
    return xr.Dataset(
        {name: (("step", "row"), thinned.data.reshape(len(thinned), -1), array.attrs)},
        {"step": thinned["step"], "row": labels},
        {"every": every, "rows": " × ".join(map(str, dims))},
    )


def _draw(ax: Axes, data: xr.Dataset, look: Look, *, name: str) -> None:
    units = data[name].attrs.get("units")
    if "row" in data.dims:
        draw_rows(ax, data, look, name, name, units)
        return
    along_steps(ax, name, units)
    _curve(ax, data, look, name)


def draw_rows(
    ax: Axes, data: xr.Dataset, look: Look, name: str, label: str, units: Any, **colors: Any
) -> None:
    """Draw the values of dims (step, row): a curve per row, or a map of more than eight rows."""
    if data.sizes["row"] > MOST_CURVES:
        _map(ax, data, look, name, with_units(label, units), **colors)
        ax.set_ylabel(data.attrs["rows"])
        return
    along_steps(ax, label, units)
    for row, color in zip(data[name].transpose("row", "step"), look.style.runs, strict=False):
        ax.plot(row["step"].values, row.values, color=color, label=str(row["row"].values))
    if data.attrs["every"] > 1:
        look.note(f"1 of every {data.attrs['every']} steps")


def _param_update_lost(scan: Scan, options: Options) -> xr.Dataset:
    input_checks.variables(scan.ds, "param_update_lost")
    lost = after_first_row(scan.in_window(scan.ds[["param_update_lost"]]), scan)[
        "param_update_lost"
    ]
    every = max(1, -(-lost.size // MOST_CELLS))
    thinned = lost.isel(step=slice(None, None, every)).rename(parameter="row")
    return xr.Dataset({"lost": thinned}, attrs={"every": every})


@figure(_param_update_lost, scales=False, of_populations=False)
def param_update_lost(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Fraction of each parameter's elements that a step left unchanged."""
    _map(ax, data, look, "lost", "fraction of unchanged elements (lost updates)", vmin=0, vmax=1)
    ax.set_ylabel("parameter")


def _map(ax: Axes, data: xr.Dataset, look: Look, name: str, label: str, **limits: Any) -> None:
    """Draw the values of dims (step, row) as colors, with the names of at most 40 rows."""
    rows = data["row"].values
    places = np.arange(rows.size)
    mesh = ax.pcolormesh(
        data["step"].values,
        places,
        np.ma.masked_invalid(data[name].transpose("row", "step").values),
        cmap=look.style.density,
        shading="nearest",
        rasterized=True,
        **limits,
    )
    ax.figure.colorbar(mesh, ax=ax).set_label(label)
    ax.invert_yaxis()
    named = places[:: max(1, -(-rows.size // NAMES))]
    ax.set_yticks(named, [str(rows[at]) for at in named], fontsize="xx-small")
    ax.set_xlabel("optimizer step")
    if data.attrs["every"] > 1:
        look.note(f"1 of every {data.attrs['every']} steps")
