"""A metric of every layer over the steps: a map, or curves of chosen layers."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xarray as xr

from trajstore.analysis.figures.across_runs import MOST_CURVES
from trajstore.analysis.figures.axes_marks import log_scale, message
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.figures.variables import MOST_CELLS, NAMES, draw_rows
from trajstore.analysis.model.attention_circuits import CIRCUITS
from trajstore.analysis.model.layer_metrics import METRICS
from trajstore.analysis.model.layers import layers as measured_layers
from trajstore.analysis.model.layers import recorded_norm
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 200
"""Most steps at which metrics are computed for a figure."""


def _layers(scan: Scan, options: Options) -> xr.Dataset:
    of, _, metric = ("params:" * (":" not in options.metric) + options.metric).partition(":")
    recorded = metric == "frobenius" and recorded_norm(scan.ds, of)
    most = MOST_CELLS // max(1, scan.ds.sizes.get("parameter", 1)) if recorded else _COLUMNS
    every = max(1, -(-scan.window.size // most))
    measure = cast(Any, measured_layers)  # it checks its literal at run time
    found: xr.DataArray = measure(scan, of, metric, scan.window[::every])[metric]
    names = [str(name) for name in found["parameter"].values]
    patterns = (options.parameters or "*").replace(" ", "").split(",")
    chosen = [at for at, name in enumerate(names) if any(fnmatchcase(name, p) for p in patterns)]
    if not chosen:
        raise InvalidArgument(
            f"got parameter={options.parameters}, which no layer matches; the first ones are "
            f"{', '.join(names[:3])}"
        )
    kinds = list(dict.fromkeys(map(_kind, names)))
    chosen.sort(key=lambda at: kinds.index(_kind(names[at])))  # layers stay in their order
    data = found.isel(parameter=chosen).rename(parameter="row").to_dataset(name=metric)
    return data.assign_attrs(
        every=every, rows="attention head" if of in CIRCUITS else "parameter", metric=metric
    )


def _kind(name: str) -> str:
    """Name of a parameter with a star in place of each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@figure(_layers, rows=1, scales=False, of_populations=False, of_layers=True, reading="layers")
def layers(ax: Axes, data: xr.Dataset, look: Look) -> None:
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


def _mark_kinds(ax: Axes, names: list[str], look: Look) -> None:
    """Divide the kinds of parameters by lines; name them, if there are too many rows to name."""
    kinds = [(kind, len(list(group))) for kind, group in groupby(names, _kind)]
    ends = np.cumsum([size for _, size in kinds])
    for end in ends[:-1]:
        ax.axhline(end - 0.5, color=look.style.ground, lw=1)
    if len(names) > NAMES:
        middles = ends - [(size + 1) / 2 for _, size in kinds]
        ax.set_yticks(middles, [kind for kind, _ in kinds], fontsize="xx-small")
