"""Figures of training: loss, logits, Adam's moments, layers, and any variable along the steps.

Results of `trajstore evaluate` are such variables.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xarray as xr

from trajstore.analysis import predictions
from trajstore.analysis.figures.axes_marks import (
    along_steps,
    central_range,
    draw_counts,
    draw_curves,
    log_scale,
    message,
    named,
    with_units,
)
from trajstore.analysis.figures.figure import Computation, Figure, Options, after_first_row, figure
from trajstore.analysis.figures.style import (
    CAUSE_COLORS,
    MEANS,
    MOST_CURVES,
    PANELS,
    POPULATION_COLORS,
    RunStyle,
)
from trajstore.analysis.layer_metrics import CIRCUITS, METRICS, recorded_norm
from trajstore.analysis.layer_metrics import layers as measured_layers
from trajstore.analysis.optimizer import lost_updates
from trajstore.analysis.optimizer import moment_sizes as optimizer_sizes
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.result_variables import statistics
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.provenance import RunAttributes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _logit_stats(scan: Scan, options: Options) -> xr.Dataset:
    whole = RunAttributes.of(scan.ds.attrs).vocabulary
    here = scan.ds.sizes["token"]
    if "logits" in scan.ds and whole is not None and here != whole:
        raise InvalidArgument(
            f"the softmax needs all {whole:,} tokens of the vocabulary, got {here:,}; "
            "select all tokens"
        )
    return after_first_row(predictions.logit_stats(scan), scan)


@figure(_logit_stats, options=())
def logit_stats(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Range of the logits, and the entropy of their softmax."""
    steps = data["step"].values
    ax.fill_between(
        steps,
        data["logit_min"].values,
        data["logit_max"].values,
        color=POPULATION_COLORS["all"],
        alpha=0.3,
        lw=0,
        label="smallest to largest logit",
    )
    ax.plot(steps, data["entropy"].values, color=look.style.ink, label="entropy of the softmax")
    along_steps(ax, "logits, entropy", data["entropy"].attrs["units"])
    if "dead_mass" in data:
        color, label = POPULATION_COLORS["dead"], "probability of all dead tokens"
        ax.plot([], [], color=color, label=label)
        right = ax.twinx()
        right.plot(steps, data["dead_mass"].values, color=color)
        right.set_ylabel(label, color=color)
        right.set_ylim(0, 1)
        right.margins(x=0.01)
        right.tick_params(axis="y", colors=color)


def _moments(scan: Scan, options: Options) -> xr.Dataset:
    (shown,) = options.populations(scan, ("all",))
    plane = lost_updates.moment_plane(scan).sel(population=shown)
    return plane.assign(lr=scan.ds["lr"].isel(step=-1))


@figure(_moments, of_window=True, reading="last row")
def moments(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Adam's moments, and the threshold of lost updates."""
    counts = data["count"].transpose("size_class", "root_class").values
    edges = np.append(data["lower"].values, data["upper"].values[-1:])
    by_root, by_size = counts.sum(0), counts.sum(1)
    draw_counts(ax, edges, edges, counts, look.style.density, "elements")
    log_scale(ax, "x", by_root)
    log_scale(ax, "y", by_size)
    root, color = data["root"].values, CAUSE_COLORS["lost_update"]
    low, middle, high = data["threshold"].transpose("quantile", "root_class").values
    if np.isfinite(middle).all():
        # Lines: a transparent band would change the colors of the counts.
        label = "updates below the line are lost: at the median spacing of W"
        ax.plot(root, middle, color=color, label=label)
        ax.plot(root, low, "--", color=color, lw=1, label="at its 5 % and 95 % quantiles")
        ax.plot(root, high, "--", color=color, lw=1)
    outside = _show_central(ax, edges, counts, middle)
    unit = "nat per unit of W"
    ax.set_xlabel(f"√v, root of the second moment / {unit}")
    ax.set_ylabel(f"|m|, first moment / {unit}")
    beyond = int(data["elsewhere"])
    look.note(
        f"step {int(data['step']):,}, learning rate {float(data['lr']):.3g}, "
        f"{named(str(data['population'].item()))}",
    )
    look.note(
        f"{beyond + int(counts.sum()):,} elements, of which not shown: {outside:,} outliers, "
        f"{beyond:,} that are 0 or beyond all classes",
    )


def _moment_sizes(scan: Scan, options: Options) -> xr.Dataset:
    sizes = optimizer_sizes.moment_sizes(scan)
    means = {
        name: statistics(sizes[name], np.array([]), options.populations(scan))["mean"]
        for name in _MOMENT_LABELS
    }
    return after_first_row(xr.Dataset(means), scan)


_MOMENT_LABELS = {
    "first_moment_size": "|m̂|, first moment",
    "second_moment_root": "√v̂, second moment",
}


@figure(_moment_sizes, reading="moments", runs=MEANS)
def moment_sizes(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Sizes of Adam's moments, with bias correction."""
    draw_curves(ax, data, look, _MOMENT_LABELS)
    along_steps(ax, "mean over tokens and hidden", "nat per unit of W")
    log_scale(ax, "y", *(data[name].values for name in _MOMENT_LABELS))
    if look.alone and look.band is None:
        look.note("vertical distance of two curves: ratio of these means")


def _show_central(ax: Axes, edges: Any, counts: Any, line: Any) -> int:
    """Limit the axes to all counts but outliers, and to the line at the median of the roots.

    Returns
    -------
    int
        Number of outliers.
    """
    if not counts.any():
        return 0
    by_root, by_size = counts.sum(0), counts.sum(1)
    (left, right), (bottom, top) = (central_range(edges, each) for each in (by_root, by_size))
    middle = line[np.searchsorted(by_root.cumsum(), by_root.sum() / 2)]
    if np.isfinite(middle) and middle > 0:
        bottom, top = min(bottom, middle), max(top, middle)
    ax.set_xlim(left, right)
    ax.set_ylim(bottom / 1.5, top * 1.5)
    roots = (edges[:-1] >= left) & (edges[1:] <= right)
    sizes = (edges[1:] > bottom / 1.5) & (edges[:-1] < top * 1.5)
    return int(counts.sum() - counts[np.ix_(sizes, roots)].sum())


MOST_CELLS = 1 << 21
"""Most values that a map shows; of more, one of every few steps."""

NAMES = 40
"""Most rows of a map that have a name."""

_MOST_DIMS = 2


def _loss(scan: Scan, options: Options) -> xr.Dataset:
    input_checks.require_variables(scan.ds, "loss")
    return scan.in_window(scan.ds[["loss"]])


@figure(_loss, rows=1, options=("log",), runs=MEANS)
def loss(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Training loss."""
    _curve(ax, data, look, "loss")
    along_steps(ax, "training loss", data["loss"].attrs.get("units"))


def _curve(ax: Axes, data: xr.Dataset, look: RunStyle, name: str) -> None:
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
        computation=Computation(collect=partial(_rows, name=name), rows=1),
        draw=partial(_draw, name=name),
        options=("log",) if rows <= MOST_CURVES else (),
        runs=replace(MEANS, bounds=(-math.inf, math.inf)) if rows == 1 else PANELS,
    )


def _rows(scan: Scan, options: Options, *, name: str) -> xr.Dataset:
    """Return the variable of dims (step), or (step, row) with a text per row."""
    input_checks.require_variables(scan.ds, name)
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


def _draw(ax: Axes, data: xr.Dataset, look: RunStyle, *, name: str) -> None:
    units = data[name].attrs.get("units")
    if "row" in data.dims:
        draw_rows(ax, data, look, name, name, units)
        return
    along_steps(ax, name, units)
    _curve(ax, data, look, name)


def draw_rows(
    ax: Axes, data: xr.Dataset, look: RunStyle, name: str, label: str, units: Any, **colors: Any
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
    input_checks.require_variables(scan.ds, "param_update_lost")
    lost = after_first_row(scan.in_window(scan.ds[["param_update_lost"]]), scan)[
        "param_update_lost"
    ]
    every = max(1, -(-lost.size // MOST_CELLS))
    thinned = lost.isel(step=slice(None, None, every)).rename(parameter="row")
    return xr.Dataset({"lost": thinned}, attrs={"every": every})


@figure(_param_update_lost, options=())
def param_update_lost(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Fraction of each parameter's elements that a step left unchanged."""
    _map(ax, data, look, "lost", "fraction of unchanged elements (lost updates)", vmin=0, vmax=1)
    ax.set_ylabel("parameter")


def _map(ax: Axes, data: xr.Dataset, look: RunStyle, name: str, label: str, **limits: Any) -> None:
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


_COLUMNS = 200
"""Most steps at which metrics are computed for a figure."""


def _layers(scan: Scan, options: Options) -> xr.Dataset:
    of, _, metric = ("params:" * (":" not in options.metric) + options.metric).partition(":")
    recorded = metric == "frobenius" and recorded_norm(scan.ds, of)
    most = MOST_CELLS // max(1, scan.ds.sizes.get("parameter", 1)) if recorded else _COLUMNS
    every = max(1, -(-scan.window.size // most))
    measure = cast(Any, measured_layers)  # it checks its literal at run time
    values: xr.DataArray = measure(scan, of, metric, scan.window[::every])[metric]
    names = [str(name) for name in values["parameter"].values]
    patterns = (options.parameters or "*").replace(" ", "").split(",")
    chosen = [at for at, name in enumerate(names) if any(fnmatchcase(name, p) for p in patterns)]
    if not chosen:
        raise InvalidArgument(
            f"got parameter={options.parameters}, which no layer matches; the first ones are "
            f"{', '.join(names[:3])}"
        )
    kinds = list(dict.fromkeys(map(_kind, names)))
    chosen.sort(key=lambda at: kinds.index(_kind(names[at])))  # layers stay in their order
    data = values.isel(parameter=chosen).rename(parameter="row").to_dataset(name=metric)
    return data.assign_attrs(
        every=every, rows="attention head" if of in CIRCUITS else "parameter", metric=metric
    )


def _kind(name: str) -> str:
    """Name of a parameter with a star in place of each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@figure(_layers, rows=1, reading="layers", options=("metric",))
def layers(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Layers of the model."""
    from matplotlib.colors import LogNorm

    metric = data.attrs["metric"]
    shown = data.isel(row=np.isfinite(data[metric]).any("step").values)
    if left := data.sizes["row"] - shown.sizes["row"]:
        look.note(f"not shown: {left} without finite values, such as vectors")
    if not shown.sizes["row"]:
        message(ax, "all values are NaN")
        return
    names = shown["row"].values.tolist()
    model = f"{names[0].partition('.')[0]}."
    if all(name.startswith(model) for name in names):
        names = [name.removeprefix(model) for name in names]
    values = shown[metric].values
    is_logarithmic = metric == "condition_number" or METRICS[metric].has_units
    scale = {"norm": LogNorm()} if is_logarithmic and (values > 0).any() else {}
    about = shown[metric].attrs
    shown = shown.assign_coords(row=names)
    draw_rows(ax, shown, look, metric, about["long_name"], about["units"], **scale)
    if len(names) > MOST_CURVES:
        _mark_kinds(ax, names, look)
    elif is_logarithmic:
        log_scale(ax, "y", values)
    if scale and (zeros := int((values == 0).sum())):
        look.note(f"zeros, not shown: {zeros:,} layers × steps")


def _mark_kinds(ax: Axes, names: list[str], look: RunStyle) -> None:
    """Divide the kinds of parameters by lines; name them, if there are too many rows to name."""
    kinds = [(kind, len(list(group))) for kind, group in groupby(names, _kind)]
    ends = np.cumsum([size for _, size in kinds])
    for end in ends[:-1]:
        ax.axhline(end - 0.5, color=look.style.ground, lw=1)
    if len(names) > NAMES:
        middles = ends - [(size + 1) / 2 for _, size in kinds]
        ax.set_yticks(middles, [kind for kind, _ in kinds], fontsize="xx-small")
