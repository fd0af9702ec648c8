"""What training computes: the loss, the prediction, Adam's moments, lost updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    log_scale,
    named,
    note,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Look, Options, after_first_row, figure
from trajstore.analysis.figures.style import CAUSE_COLOURS, POPULATION_COLOURS
from trajstore.analysis.model import logit_statistics
from trajstore.analysis.optimizer import lost_update_line
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["logits", "loss", "moments", "parameters"]


def _loss(scan: Scan, options: Options) -> xr.Dataset:
    input_checks.variables(scan.ds, "loss")
    return scan.in_window(scan.ds[["loss"]])


@figure(_loss, rows=1, overlays=True, averages=True, of_populations=False)
def loss(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Training loss."""
    steps, values = data["step"].values, data["loss"].values
    colour = look.style.ink if look.alone else look.run_colour
    if look.band is not None:
        low, high = (edge["loss"].values for edge in look.band)
        ax.fill_between(steps, low, high, color=colour, alpha=look.style.band, lw=0)
        spread_note(ax, look)
    ax.plot(steps, values, color=colour, lw=0.9, label=look.label("loss"))
    along_steps(ax, "training loss", data["loss"].attrs.get("units"))
    last = np.flatnonzero(np.isfinite(values))
    if not look.run and last.size:
        note(
            ax,
            f"{values[last[0]]:.3f} at step {steps[last[0]]}, "
            f"{values[last[-1]]:.3f} at step {steps[last[-1]]}",
        )
    if look.run:
        with_legend(ax)


def _logits(scan: Scan, options: Options) -> xr.Dataset:
    whole = (scan.ds.attrs.get("recording") or {}).get("vocabulary")
    here = scan.ds.sizes["token"]
    if "logits" in scan.ds and whole is not None and here != whole:
        raise InvalidArgument(
            f"the softmax is over all {whole:,} tokens of the vocabulary, and {here:,} are here; "
            "ask about all tokens"
        )
    return after_first_row(logit_statistics.logit_stats(scan), scan)


@figure(_logits, scales=False, of_populations=False)
def logits(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """What the model predicts, of the logits that are recorded."""
    steps = data["step"].values
    ax.fill_between(
        steps,
        data["logit_min"].values,
        data["logit_max"].values,
        color=POPULATION_COLOURS["all"],
        alpha=0.3,
        lw=0,
        label="smallest to largest logit",
    )
    ax.plot(steps, data["entropy"].values, color=look.style.ink, label="entropy of the softmax")
    along_steps(ax, "logits, entropy", data["entropy"].attrs["units"])
    others = []
    if "dead_mass" in data:
        others.append(ax.twinx())
        colour, label = POPULATION_COLOURS["dead"], "probability of all dead tokens"
        (right,) = others
        right.plot(steps, data["dead_mass"].values, color=colour, label=label)
        right.set_ylabel(label, color=colour)
        right.set_ylim(0, 1)
        right.margins(x=0.01)
        right.tick_params(axis="y", colors=colour)
    with_legend(ax, *others)


def _moments(scan: Scan, options: Options) -> xr.Dataset:
    (shown,) = options.populations(scan, ("all",))
    plane = lost_update_line.moment_plane(scan).sel(population=shown)
    return plane.assign(lr=scan.ds["lr"].isel(step=-1))


@figure(_moments, of_window=True, reading="last row")
def moments(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Adam's moments, and the line of underflow."""
    from matplotlib.colors import LogNorm

    counts = data["count"].transpose("size_class", "root_class").values
    edges = np.append(data["lower"].values, data["upper"].values[-1:])
    by_root, by_size = counts.sum(0), counts.sum(1)
    if counts.any():
        mesh = ax.pcolormesh(
            edges,
            edges,
            np.ma.masked_equal(counts, 0),
            norm=LogNorm(1, max(2, counts.max())),
            cmap=look.style.density,
            rasterized=True,
        )
        ax.figure.colorbar(mesh, ax=ax).set_label("elements")
    log_scale(ax, "x", by_root)
    log_scale(ax, "y", by_size)
    root, colour = data["root"].values, CAUSE_COLOURS["lost_update"]
    low, middle, high = data["threshold"].transpose("quantile", "root_class").values
    if np.isfinite(middle).all():
        ax.fill_between(root, low, high, color=colour, alpha=0.3, lw=0)
        ax.plot(root, middle, color=colour, label="below, updates are rounded away")
    _show_counted(ax, edges, by_root, by_size, middle)
    unit = "nat per unit of W"
    ax.set_xlabel(f"√v, root of the second moment / {unit}")
    ax.set_ylabel(f"|m|, first moment / {unit}")
    beyond = int(data["elsewhere"])
    note(
        ax,
        f"step {int(data['step'])}, learning rate {float(data['lr']):.3g}, "
        f"{named(str(data['population'].item()))}; line: for the median spacing of W, band: 5 % "
        f"to 95 %; moments of 0, or beyond all classes: {beyond:,} of "
        f"{beyond + int(counts.sum()):,} elements",
    )
    with_legend(ax)


def _show_counted(ax: Axes, edges: Any, by_root: Any, by_size: Any, line: Any) -> None:
    """Show all that was counted, and the line there."""
    roots, sizes = np.flatnonzero(by_root), np.flatnonzero(by_size)
    if not roots.size:
        return
    ax.set_xlim(edges[max(0, roots[0] - 3)], edges[min(roots[-1] + 4, edges.size - 1)])
    there = line[roots[0] : roots[-1] + 1]
    there = there[np.isfinite(there) & (there > 0)]
    low, high = edges[sizes[0]], edges[sizes[-1] + 1]
    ax.set_ylim(min([low, *there[:1]]) / 3, max([high, *there[-1:]]) * 3)


_CELLS = 1 << 21
_NAMES = 40


def _parameters(scan: Scan, options: Options) -> xr.Dataset:
    input_checks.variables(scan.ds, "param_update_lost")
    lost = after_first_row(scan.in_window(scan.ds[["param_update_lost"]]), scan)[
        "param_update_lost"
    ]
    every = -(-lost.size // _CELLS)
    thinned = lost.isel(step=slice(None, None, max(every, 1)))
    return xr.Dataset({"lost": thinned}, attrs={"every": every})


@figure(_parameters, scales=False, of_populations=False)
def parameters(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Updates of the model's parameters that rounding left undone."""
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
