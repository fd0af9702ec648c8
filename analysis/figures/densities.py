"""Histograms with logarithmic classes: lengths of hops, and speeds at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    central_range,
    draw_counts,
    log_scale,
    name_kinds,
    named,
    step_edges,
    with_units,
)
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import Look
from trajstore.analysis.motion import ulp_motion, velocity
from trajstore.analysis.scan.population_statistics import over_groups
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 1000
"""Most columns of a map: about one per dot."""

_HOP_CLASSES = 4
"""Classes per decade: with more, some would hold no whole number."""


def _class_counts(
    values: npt.NDArray[Any], groups: npt.NDArray[np.bool_], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Counts (…, population, kind) of values (…, token): classes, then zero, outside and NaN."""
    classes = edges.size - 1
    rows = values.reshape(-1, values.shape[-1])
    kind = np.searchsorted(edges, rows, side="right") - 1
    kind[(kind < 0) | (kind >= classes)] = classes + 1
    kind[rows == 0] = classes
    kind[np.isnan(rows)] = classes + 2
    result = np.empty((len(rows), len(groups), classes + 3), np.int64)
    for row, found in enumerate(kind):
        for number, group in enumerate(groups):
            result[row, number] = np.bincount(found[group], minlength=classes + 3)
    return result.reshape(*values.shape[:-1], len(groups), classes + 3)


def log_histogram(
    da: xr.DataArray, lowest: float = -12, highest: float = 6, per_decade: int = 10
) -> xr.Dataset:
    """Count the tokens of each population by value, in classes of one ratio.

    Every token counts once: in a class, as zero, as outside all classes, or as NaN.

    Parameters
    ----------
    da : DataArray, (…, token)
        Lengths, or other values that are not negative.
    lowest, highest : float
        Powers of ten at the ends of the classes.
    per_decade : int
        Classes per factor of ten.

    Returns
    -------
    Dataset, int64
        ``count`` (…, population, value_class), class i being lower ≤ value < upper with the
        coordinates ``lower`` and ``upper``; (…, population): ``zero``, ``outside`` (negative values
        and infinities among them) and ``nan``. Without ``is_dead`` the only population is
        ``all``.

    Examples
    --------
    >>> from trajstore.analysis import speed
    >>> found = log_histogram(speed(ds), -4, 0, 1).sel(step=15).compute()
    >>> found["count"].sel(population="all").values, found.zero.sel(population="all").item()
    (array([  0, 118,   0,   0]), 10)
    """
    edges = np.logspace(lowest, highest, round((highest - lowest) * per_decade) + 1)
    size = edges.size + 2
    table = over_groups(
        _class_counts, da, *populations(da), "value_class", size, np.int64, edges=edges
    )
    classes = edges.size - 1
    lower, upper = (("value_class", ends) for ends in (edges[:-1], edges[1:]))
    counts = table.isel(value_class=slice(None, classes)).assign_coords(lower=lower, upper=upper)
    kinds = {
        kind: table.isel(value_class=classes + at)
        for at, kind in enumerate(("zero", "outside", "nan"))
    }
    return xr.Dataset({"count": counts, **kinds})


def _lattice_displacement(scan: Scan, options: Options) -> xr.Dataset:
    distance = ulp_motion.lattice_displacement(scan, ord=1, lattice=options.lattice)
    shown = options.populations(scan)
    counts = log_histogram(distance, -1, 12, _HOP_CLASSES).sel(population=shown).sum("step")
    return counts.assign_attrs(units=distance.attrs["units"])


@figure(_lattice_displacement, measures=("ulp_1",), on_lattice=True, overlays=True)
def lattice_displacement(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Lengths of the hops between consecutive steps."""
    edges = np.append(data["lower"].values, data["upper"].values[-1:])
    populations = data["population"].values.tolist()
    for kind, population in enumerate(populations):
        part = data.sel(population=population)
        total = sum(int(part[name].sum()) for name in ("count", "zero", "outside", "nan"))
        unchanged = int(part["zero"]) / total if total else np.nan
        ax.stairs(
            part["count"].values,
            edges,
            color=look.color(population),
            ls=look.line(kind),
            lw=1.4,
            label=look.label(
                f"{named(population)}: unchanged in {unchanged:.1%} of {total:,}", kind
            ),
        )
        lost = int(part["outside"] + part["nan"])
        if lost:
            run = f"{look.run}: " if look.run else ""
            look.note(f"{run}{named(population)}: {lost:,} beyond all classes or NaN")
    name_kinds(ax, look, [named(population) for population in populations])
    counted = data["count"].values.sum(0)
    ax.set_xlabel(f"length of a hop (L1 norm) / {data.attrs['units']}")
    ax.set_ylabel("count, tokens × steps")
    log_scale(ax, "x", counted * edges[1:])
    log_scale(ax, "y", counted)
    _crop(ax, "x", edges, counted, look)
    if counted.any() and ax.get_xlim()[0] < 1:
        look.note("below 1: down across a power of two, where the spacing halves")
    ax.grid(True)


def _crop(ax: Axes, axis: str, edges: Any, counted: Any, look: Look) -> None:
    """Limit an axis to all counts but the outliers at each end, and note how many those are."""
    if not counted.any():
        return
    low, high = central_range(edges, counted)
    if not look.alone:  # room for every run, and for what is an outlier of one only
        held = np.flatnonzero(counted)
        low, high = edges[held[0]], edges[held[-1] + 1]
        if look.number:
            before = getattr(ax, f"get_{axis}lim")()
            low, high = min(low, before[0]), max(high, before[1])
    getattr(ax, f"set_{axis}lim")(low, high)
    below, above = int(counted[edges[1:] <= low].sum()), int(counted[edges[:-1] >= high].sum())
    if below or above:
        look.note(f"outliers beyond the axis: {below:,} smaller, {above:,} larger")


def pooled_steps(counts: xr.DataArray) -> tuple[xr.DataArray, int]:
    """Counts summed over as many steps as one column of a map takes, and that number."""
    width = -(-counts.sizes["step"] // _COLUMNS)
    pooled: xr.DataArray = counts.coarsen(step=width, boundary="pad").sum() if width > 1 else counts
    return pooled.assign_coords(step=counts["step"].values[::width]), width


def _speed_density(scan: Scan, options: Options) -> xr.Dataset:
    (shown,) = options.populations(scan, ("all",))
    pace = velocity.speed(scan)
    counts = log_histogram(pace, -12, 4, 12).sel(population=shown)
    return counts.assign_attrs(units=pace.attrs["units"])


@figure(_speed_density, measures=("step_norm",))
def speed_density(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Distribution of the tokens' speeds at every step."""
    counts, width = pooled_steps(data["count"])
    values = counts.transpose("value_class", "step").values
    edges = np.append(data["lower"].values, data["upper"].values[-1:])
    label = "tokens" if width == 1 else f"tokens × steps, {width} steps per column"
    draw_counts(ax, step_edges(counts["step"]), edges, values, look.style.density, label)
    counted = values.sum(1)
    log_scale(ax, "y", counted)
    _crop(ax, "y", edges, counted, look)
    unchanged, lost = int(data["zero"].sum()), int((data["outside"] + data["nan"]).sum())
    total = int(data["count"].sum()) + unchanged + lost
    text = f"{named(str(data['population'].item()))}; unchanged, not shown: {unchanged / total:.1%}"
    look.note(text + (f"; {lost:,} beyond all classes or NaN" if lost else ""))
    ax.set_xlabel("optimizer step")
    ax.set_ylabel(with_units("speed", data.attrs["units"]))
