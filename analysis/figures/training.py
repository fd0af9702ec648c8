"""The logits and Adam's moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    central_range,
    draw_counts,
    draw_curves,
    log_scale,
    named,
)
from trajstore.analysis.figures.figure import Options, after_first_row, figure
from trajstore.analysis.figures.style import CAUSE_COLORS, POPULATION_COLORS, Look
from trajstore.analysis.model import logit_statistics
from trajstore.analysis.optimizer import lost_update_line
from trajstore.analysis.optimizer import moment_sizes as optimizer_sizes
from trajstore.analysis.scan.population_statistics import statistics
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _logit_stats(scan: Scan, options: Options) -> xr.Dataset:
    whole = (scan.ds.attrs.get("recording") or {}).get("vocabulary")
    here = scan.ds.sizes["token"]
    if "logits" in scan.ds and whole is not None and here != whole:
        raise InvalidArgument(
            f"the softmax needs all {whole:,} tokens of the vocabulary, got {here:,}; "
            "select all tokens"
        )
    return after_first_row(logit_statistics.logit_stats(scan), scan)


@figure(_logit_stats, scales=False, of_populations=False)
def logit_stats(ax: Axes, data: xr.Dataset, look: Look) -> None:
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
    plane = lost_update_line.moment_plane(scan).sel(population=shown)
    return plane.assign(lr=scan.ds["lr"].isel(step=-1))


@figure(_moments, of_window=True, reading="last row")
def moments(ax: Axes, data: xr.Dataset, look: Look) -> None:
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
    found = {
        name: statistics(sizes[name], np.array([]), options.populations(scan))["mean"]
        for name in _MOMENT_LABELS
    }
    return after_first_row(xr.Dataset(found), scan)


_MOMENT_LABELS = {
    "first_moment_size": "|m̂|, first moment",
    "second_moment_root": "√v̂, second moment",
}


@figure(_moment_sizes, overlays=True, averages=True, reading="moments")
def moment_sizes(ax: Axes, data: xr.Dataset, look: Look) -> None:
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
