"""Figures of motion: distances, speeds, hops, and the distance between runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    central_range,
    draw_counts,
    draw_curves,
    log_scale,
    message,
    name_kinds,
    named,
    set_log,
    step_edges,
    with_units,
)
from trajstore.analysis.figures.figure import Options, after_first_row, figure
from trajstore.analysis.figures.style import (
    CURVES,
    MEANS,
    RunStyle,
    SeveralRuns,
    population_color,
    run_name,
    shades,
)
from trajstore.analysis.motion import collective, crossings, ulp_motion, vectors
from trajstore.analysis.motion.paths import autocorrelation as autocorrelation_at
from trajstore.analysis.scan.result_variables import over_groups, statistics
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several_runs import divergence as divergence_of
from trajstore.populations import chosen_populations, populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_BAND = (0.05, 0.95)


def _bands(values: xr.DataArray, scan: Scan, options: Options) -> xr.Dataset:
    """Mean, quantiles and number of tokens of each population."""
    shown = options.populations(scan)
    _, groups = chosen_populations(scan.ds, shown)
    curves = statistics(values, np.array(_BAND), shown)
    return curves[["mean", "quantiles"]].assign(tokens=("population", groups.sum(1)))


def _draw_bands(ax: Axes, data: xr.Dataset, look: RunStyle, log: bool = True) -> None:
    draw_curves(
        ax, data, look, {"mean": ""}, about=lambda part, name: f" ({int(part['tokens']):,})"
    )
    label = str(data["mean"].attrs["long_name"]).removeprefix("mean of ")
    along_steps(ax, label, data["mean"].attrs.get("units"))
    if log:
        log_scale(ax, "y", data["mean"].values)
    elif not np.isfinite(data["mean"].values).any():
        message(ax, "all values are NaN")
    if look.band is None:
        band = "; band: 5 % to 95 % of them" if look.alone else ""
        look.note(f"line: mean over tokens{band}")
        if log and (zeros := _zeros(data, look)):
            look.note(f"zeros, not shown: {zeros}")


def _zeros(data: xr.Dataset, look: RunStyle) -> str:
    """Number of steps at which the mean or the lower end of the band is 0."""
    notes = []
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        low, mean = ((part[name] == 0).values for name in ("quantiles", "mean"))
        counts = {"5 % quantile": low.any(-1).sum() * look.alone, "mean": mean.sum()}
        of = f"of {part.sizes['step']:,} steps"
        notes += [
            f"{name} of {named(population)} at {count:,} {of}"
            for name, count in counts.items()
            if count
        ]
    run = f"{look.run}: " if notes and look.run else ""
    return run + "; ".join(notes)


def _grad_norms(scan: Scan, options: Options) -> xr.Dataset:
    lengths = vectors.grad_norms(scan)
    lengths = lengths.assign_attrs(units=f"{lengths.attrs['units']} per unit of W")
    return after_first_row(_bands(lengths, scan, options), scan)


@figure(_grad_norms, reading="moments", runs=MEANS)
def grad_norms(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Gradient norm per token."""
    _draw_bands(ax, data, look)


def _displacement(scan: Scan, options: Options) -> xr.Dataset:
    return after_first_row(_bands(vectors.displacement(scan), scan, options), scan)


@figure(_displacement, runs=MEANS)
def displacement(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Distance of the tokens from their start."""
    _draw_bands(ax, data, look, log=False)


def _speed(scan: Scan, options: Options) -> xr.Dataset:
    return _bands(vectors.speed(scan), scan, options)


@figure(_speed, measures=("step_norm",), runs=MEANS)
def speed(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Speed of the tokens."""
    _draw_bands(ax, data, look)


_MARKERS = {"dead": "o", "live": "^", "all": "s", "mostly_dead": "D"}


def _bulk_thermal(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    return collective.bulk_thermal(scan, shown)[["bulk_speed", "thermal_speed"]]


@figure(_bulk_thermal, reading="rows")
def bulk_thermal(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Bulk speed against thermal speed."""
    steps = data["step"].values
    any_shown = False
    for population in data["population"].values.tolist():
        part = data.sel(population=population)
        bulk, thermal = part["bulk_speed"].values, part["thermal_speed"].values
        shown = (bulk > 0) & (thermal > 0)
        any_shown |= bool(shown.any())
        color, marker = population_color(population), _MARKERS.get(population, "v")
        ax.scatter(
            thermal[shown],
            bulk[shown],
            c=steps[shown],
            vmin=steps[0],
            vmax=steps[-1],
            cmap=shades(color, look.style.ground),
            marker=marker,
            s=14,
            lw=0,
            rasterized=True,
        )
        label = f"{named(population)}: {_split(bulk, thermal)}"
        ax.plot([], [], color=color, marker=marker, ls="", label=label)
    if any_shown:
        for axis in "xy":
            set_log(ax, axis)
        limits = ax.get_xlim(), ax.get_ylim()
        ends = [min(*limits[0], *limits[1]), max(*limits[0], *limits[1])]
        ax.plot(ends, ends, "--", color=look.style.grid, lw=1, label="bulk = thermal", zorder=0)
        ax.set_xlim(limits[0])
        ax.set_ylim(limits[1])
    units = data["bulk_speed"].attrs["units"]
    ax.set_xlabel(with_units("thermal speed (rms about the mean velocity)", units))
    ax.set_ylabel(with_units("bulk speed (mean velocity)", units))
    look.note(
        f"one point per step: faint at step {steps[0]:,}, strong at step {steps[-1]:,}; the bulk "
        "speed is 0 without motion of the centroid, the thermal speed if all tokens move alike",
    )


def _split(bulk: npt.NDArray[Any], thermal: npt.NDArray[Any]) -> str:
    """Number of steps with a point, and the reasons why others have none."""
    shown = (bulk > 0) & (thermal > 0)
    counts = {
        "shown": shown,
        "unchanged": (bulk == 0) & (thermal == 0),
        "all moving alike": (bulk > 0) & (thermal == 0),
        "with an unchanged centroid": (bulk == 0) & (thermal > 0),
        "NaN": np.isnan(bulk) | np.isnan(thermal),
    }
    parts = [f"{count:,} {name}" for name, at in counts.items() if (count := int(at.sum()))]
    return f"{', '.join(parts)} of {bulk.size:,} steps"


_LAGS = 28
_HELD = 1 << 28
"""Bytes of the rows in memory, as many as the largest lag."""


def _lags(scan: Scan) -> list[int]:
    """Numbers of rows, evenly spaced on a logarithmic axis, up to half of all."""
    sizes = scan.variable("W").sizes
    lags_in_memory = _HELD // max(8 * sizes["token"] * sizes["hidden"], 1)
    largest = max(1, min((scan.rows - 1) // 2, lags_in_memory))
    return [int(lag) for lag in np.unique(np.geomspace(1, largest, _LAGS).round())]


def _autocorrelation(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    correlation = autocorrelation_at(scan, _lags(scan))
    return correlation[["autocorrelation"]].sel(population=shown)


@figure(_autocorrelation, rows=3, of_window=True, reading="lags", runs=CURVES)
def autocorrelation(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Autocorrelation of the velocity."""
    draw_curves(ax, data, look, {"autocorrelation": ""}, "lag_steps", marker=".", ms=4)
    ax.set_xscale("log")
    ax.axhline(0, color=look.style.grid, lw=1, zorder=0)
    ax.set_xlabel("lag / optimizer steps")
    ax.set_ylabel("autocorrelation of the velocity")
    ax.grid(True, axis="y")
    if not np.isfinite(data["autocorrelation"]).any():
        look.note("all values are NaN")


_THRESHOLD = 8.0


def _discontinuities(scan: Scan, options: Options) -> xr.Dataset:
    return crossings.discontinuities(scan, threshold=_THRESHOLD)


@figure(_discontinuities, measures=("step_norm",), options=())
def discontinuities(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Discontinuities: steps at which the mean speed jumps."""
    steps, scores = data["step"].values, data["discontinuity_score"].values
    at = np.flatnonzero(data["discontinuity"].values)
    ax.plot(steps, scores, color=look.style.ink, lw=0.8, label="score of each step")
    for sign in (1, -1):
        label = f"threshold of a discontinuity: ±{_THRESHOLD:g}" if sign > 0 else None
        ax.axhline(sign * _THRESHOLD, color=look.style.second, ls="--", lw=0.9, label=label)
    ax.plot(
        steps[at],
        scores[at],
        "o",
        color=look.style.second,
        ms=5,
        label=f"discontinuities ({at.size})" if at.size else None,
    )
    top = max(_THRESHOLD, float(np.nanmax(abs(scores), initial=0))) * 1.15
    ax.set_ylim(-top, top)
    along_steps(ax, "robust z-score: change of log mean speed")
    shown = ", ".join(map(str, steps[at][:12])) + (", …" if at.size > 12 else "")
    look.note(f"discontinuities at step {shown}" if at.size else "no discontinuity")


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
    for row, kinds_of_row in enumerate(kind):
        for number, group in enumerate(groups):
            result[row, number] = np.bincount(kinds_of_row[group], minlength=classes + 3)
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
    >>> classes = log_histogram(speed(ds), -4, 0, 1).sel(step=15).compute()
    >>> classes["count"].sel(population="all").values, classes.zero.sel(population="all").item()
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


@figure(
    _lattice_displacement,
    measures=("ulp_1",),
    options=("population", "lattice", "log"),
    runs=CURVES,
)
def lattice_displacement(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
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


def _crop(ax: Axes, axis: str, edges: Any, counted: Any, look: RunStyle) -> None:
    """Limit an axis to all counts but the outliers at each end, and note how many those are."""
    if not counted.any():
        return
    low, high = central_range(edges, counted)
    if not look.alone:  # room for every run, and for what is an outlier of one only
        filled = np.flatnonzero(counted)
        low, high = edges[filled[0]], edges[filled[-1] + 1]
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
    pace = vectors.speed(scan)
    counts = log_histogram(pace, -12, 4, 12).sel(population=shown)
    return counts.assign_attrs(units=pace.attrs["units"])


@figure(_speed_density, measures=("step_norm",))
def speed_density(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
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


def _divergence(scan: Scan, options: Options, first: Scan) -> xr.Dataset:
    distances = divergence_of(first.ds, scan.ds).sel(population=options.populations(first))
    begin = distances["first_difference"]
    apart = distances[["distance", "differing"]].where((begin >= 0) & (distances["step"] >= begin))
    return scan.in_window(apart).assign_attrs(first=run_name(first.ds))


@figure(
    _divergence,
    rows=1,
    reading="runs",
    runs=SeveralRuns(overlays=True, averages=True, between=True),
)
def divergence(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Distance of W from the first run, since their first difference."""
    steps = data["step"].values
    draw_curves(ax, data, look, {"distance": "distance"})
    along_steps(ax, f"L2 distance of W from {data.attrs['first']}", data["distance"].attrs["units"])
    apart = np.isfinite(data["distance"].values).any(-1)
    if apart.any():
        log_scale(ax, "y", data["distance"].values)
    name = f"{look.run}: " if look.run else ""
    look.note(
        f"{name}differs from {data.attrs['first']} since step {steps[apart][0]:,}"
        if apart.any()
        else f"{name}never differs from {data.attrs['first']}",
    )
    if look.alone and apart.any():
        right = ax.twinx()
        text = "fraction of elements that differ"
        for population in data["population"].values.tolist():
            color, label = look.color(population), f"{named(population)}: {text} in bits"
            values = data["differing"].sel(population=population).values
            right.plot(steps, values, ":", color=color)
            ax.plot([], [], ":", color=color, label=label)
        right.set_ylabel(text)
        right.set_ylim(-0.02, 1.02)
        right.margins(x=0.01)
