"""Figures of the cloud: its centroid, spectrum, identical vectors, and paths in a plane or sky."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    draw_counts,
    draw_curves,
    log_scale,
    named,
    with_units,
)
from trajstore.analysis.figures.figure import Options, after_first_row, figure, with_members
from trajstore.analysis.figures.style import (
    CURVES,
    MEANS,
    RunStyle,
    population_color,
    shades,
    token_names,
)
from trajstore.analysis.geometry import directions, identical_vectors, shape
from trajstore.analysis.motion import collective
from trajstore.analysis.optimizer.moment_sizes import moment_sizes
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _centroid(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    return collective.centroid(scan, shown)[["centroid_norm", "mean_radius"]]


@figure(_centroid, rows=1, reading="rows", runs=MEANS)
def centroid(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Norm of the tokens' centroid, and their mean distance from it."""
    labels = {"centroid_norm": "norm of the centroid", "mean_radius": "mean distance from it"}
    draw_curves(ax, data, look, labels)
    along_steps(ax, "L2 norm, distance", data["centroid_norm"].attrs["units"])


_ROWS = {"all": "all steps", "last": "last step"}


def _spectra(scan: Scan, options: Options) -> xr.Dataset:
    """Variances ``all`` and ``last`` along the axes of each population, and effective ranks."""
    shown = options.populations(scan)
    spectra: dict[str, xr.DataArray] = {}
    for rows in _ROWS:
        parts = [shape.pca(scan, name, 1, rows)[["spectrum", "effective_rank"]] for name in shown]
        whole = xr.concat(parts, "population", combine_attrs="drop")
        whole["spectrum"].attrs = parts[0]["spectrum"].attrs
        spectra |= {rows: whole["spectrum"], f"{rows}_rank": whole["effective_rank"]}
    return xr.Dataset(spectra).assign_coords(population=shown)


@figure(_spectra, rows=1, of_window=True, reading="plane", runs=CURVES)
def spectrum(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
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
    clusters_of_size = identical_vectors.clusters(scan, None, options.lattice, ranks=1).sel(
        population=shown
    )
    vectors = clusters_of_size["groups"] + clusters_of_size["singles"]
    # Without groups, the most common vector is that of one token.
    largest = clusters_of_size["group_sizes"].isel(rank=0).clip(min=1)
    return xr.Dataset({"vectors": vectors, "largest": largest})


@figure(
    _clusters,
    rows=1,
    reading="identical",
    options=("population", "lattice", "log"),
    runs=MEANS,
)
def clusters(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Tokens with identical vectors."""
    from matplotlib.ticker import LogLocator, NullFormatter

    labels = {"vectors": "distinct vectors", "largest": "tokens at the most common vector"}
    draw_curves(ax, data, look, labels)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    along_steps(ax, "number of vectors or tokens")


LINES = 500
"""Most tokens that have a line each."""

_POINTS = 1 << 25
_CELLS = 500

_NAMED = np.array([[8], [20]])
"""Columns and rows of the cells that have one name each."""

_FONT, _MARK = 7, 5
"""Size of a name, and its distance from the middle of a mark, in points."""

_SIDES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)])
"""Places of a name about its end, the best first."""


def _trajectory(scan: Scan, options: Options) -> xr.Dataset:
    first: Any = None if options.plane == "principal" else options.plane
    components = shape.pca(scan, components=2, first=first)
    position, variance = components["scores"], components["spectrum"].rename(principal="component")
    whole = variance.sum()
    path = xr.Dataset(
        {
            "position": position,
            "share": variance[:2] / whole.where(whole > 0, 1),
            "name": ("token", token_names(scan.ds)),
        },
        attrs={"plane": options.plane},
    )
    return _thinned(with_members(path, scan, options))


def _thinned(data: xr.Dataset) -> xr.Dataset:
    """Data of at most `_POINTS` tokens × steps: one of every few steps."""
    every = max(1, -(-data.sizes["step"] * data.sizes["token"] // _POINTS))
    return data.isel(step=slice(None, None, every)).assign_attrs(every=every)


@figure(_trajectory, rows=1, reading="plane", options=("population",))
def trajectory(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Paths of the tokens in a plane."""
    look.note("the axes have different scales")
    _draw_paths(ax, data, look)
    label_plane(ax, data)


def _draw_paths(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Draw the paths of each population."""
    position = data["position"].transpose("component", "step", "token")
    few = position.sizes["token"] <= LINES
    # Dead tokens last: most of them share one place, which live ones would cover.
    for population in reversed(data["population"].values.tolist()):
        paths = position.values[..., data["member"].sel(population=population).values]
        draw = _draw_lines if few else _draw_cells
        draw(ax, paths, _color_of(ax, population, paths.shape[-1]), look)
    fit_axes(ax, position.values)
    if few:
        _mark_ends(ax, data, look, start=True)
        _name_ends(ax, data, look)
        look.note(
            "names: one token of each part of the plane with room; +n: more tokens at its place"
        )
    else:
        look.note("color: number of tokens × steps in a cell, logarithmic")
    _note_thinning(data, look)


def _note_thinning(data: xr.Dataset, look: RunStyle) -> None:
    if data.attrs["every"] > 1:
        look.note(f"1 of every {data.attrs['every']} steps")


def _color_of(ax: Axes, population: str, tokens: int) -> str:
    """Color of a population, which it adds to the legend."""
    color = population_color(population)
    ax.plot([], [], color=color, lw=3, label=f"{named(population)} ({tokens:,})")
    return color


def _mark_ends(ax: Axes, data: xr.Dataset, look: RunStyle, start: bool) -> None:
    """Add the marks of the ends of paths to the legend."""
    first, last = (int(data["step"][at]) for at in (0, -1))
    ground, ink = look.style.ground, look.style.ink
    if start:
        ax.plot([], [], "o", mfc=ground, mec=ink, ms=7, label=f"start, step {first:,}")
    ax.plot([], [], "o", color=ink, ms=4, label=f"end, step {last:,}")


def _moment_tracks(scan: Scan, options: Options) -> xr.Dataset:
    sizes = moment_sizes(scan)
    pair = [sizes[name].rename("position") for name in ("second_moment_root", "first_moment_size")]
    whole = after_first_row(xr.concat(pair, "component").to_dataset(), scan)
    named = whole.assign(name=("token", token_names(scan.ds)))
    return _thinned(with_members(named, scan, options))


@figure(_moment_tracks, reading="moments", options=("population",))
def moment_tracks(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Paths of the tokens in the plane of Adam's moments."""
    zeros = int((data["position"] == 0).any("component").sum())
    with np.errstate(divide="ignore"):
        # Logarithms, so that distances between names and ends are those on paper.
        places = np.log10(data["position"].where(data["position"] > 0))
    look.note("means over hidden, with bias correction")
    if zeros:
        look.note(f"zeros, not shown: {zeros:,} tokens × steps")
    _draw_paths(ax, data.assign(position=places), look)
    ends = [min(ax.get_xlim()[0], ax.get_ylim()[0]), max(ax.get_xlim()[1], ax.get_ylim()[1])]
    limits = ax.get_xlim(), ax.get_ylim()
    for power in range(0, -4, -1):
        label = "|m̂| = √v̂, a tenth, a hundredth, …" if power == 0 else None
        line = [end + power for end in ends]
        ax.plot(ends, line, "--", color=look.style.grid, lw=1, label=label, zorder=0)
    ax.set_xlim(limits[0])
    ax.set_ylim(limits[1])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda power, _: f"{10**power:.2g}")
    ax.set_xlabel("√v̂, root of the second moment / nat per unit of W")
    ax.set_ylabel("|m̂|, first moment / nat per unit of W")


_AXES = {"principal": "centroid", "hidden_mean": "hidden_mean"}
"""Axis of the sky by the plane of the trajectory."""


def _sky(scan: Scan, options: Options) -> xr.Dataset:
    axis: Any = _AXES[options.plane]
    name = scan.ds.attrs.get("vectors")
    of: Any = "displacement" if name is None else "W"
    angles = directions.sky(scan, axis, of)[["longitude", "latitude"]]
    return _thinned(with_members(angles, scan, options)).assign_attrs(
        of=name or "W minus its first row",
        axis="h̄" if axis == "hidden_mean" else name or "W",
    )


@figure(
    _sky,
    rows=1,
    reading="plane",
    options=("population",),
    projection="mollweide",
)
def sky(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Directions of the tokens about an axis."""
    # A displacement has no direction at the first row.
    known = np.flatnonzero(np.isfinite(data["latitude"].values).any(1))
    data = data.isel(step=known) if known.size else data
    angles = np.radians([data[name].values for name in ("longitude", "latitude")])
    few = data.sizes["token"] <= LINES
    for population in reversed(data["population"].values.tolist()):
        paths = angles[..., data["member"].sel(population=population).values]
        color = _color_of(ax, population, paths.shape[-1])
        if few:
            for x, y in paths.transpose(2, 0, 1):
                ax.plot(_unwrapped(x), y, color=color, lw=0.6, alpha=0.5, rasterized=True)
            ax.plot(*paths[:, 0], "o", mfc=look.style.ground, mec=color, ms=6, mew=1.2, zorder=4)
        ax.plot(*paths[:, -1], "o", color=color, ms=4 if few else 1.5, zorder=3, rasterized=True)
    _mark_ends(ax, data, look, few)
    # Stretched, areas keep their ratios. With a fixed aspect, the layout would cut off the notes.
    ax.set_aspect("auto")
    ax.grid(True)
    ax.tick_params(labelsize="x-small")
    ax.set_xlabel("longitude / degrees")
    ax.set_ylabel("latitude / degrees")
    look.note(
        f"directions of {data.attrs['of']}; north pole: mean of {data.attrs['axis']}; longitude: "
        "in the plane of largest variance across this axis",
    )
    _note_thinning(data, look)


def _unwrapped(longitude: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Longitudes with a gap, in place of a line across the map, where a path leaves its edge."""
    broken = longitude.copy()
    broken[1:][np.abs(np.diff(longitude)) > np.pi] = np.nan
    return broken


def label_plane(ax: Axes, data: xr.Dataset) -> None:
    """Label the axes with what the plane shows, and its part of the variance."""
    which = ["principal component 1", "principal component 2"]
    if data.attrs["plane"] == "hidden_mean":
        which = ["along h̄, the mean hidden state", "largest variance orthogonal to h̄"]
    texts = [
        with_units(f"{text} ({share:.1%} of the variance)", data["position"].attrs.get("units"))
        for text, share in zip(which, data["share"].values, strict=True)
    ]
    ax.set_xlabel(texts[0])
    ax.set_ylabel(texts[1])


def fit_axes(ax: Axes, position: npt.NDArray[Any]) -> None:
    """Fit each axis to the paths."""
    if not np.isfinite(position).any():
        return
    low, high = np.nanmin(position, axis=(1, 2)), np.nanmax(position, axis=(1, 2))
    margin = 0.05 * np.where(high > low, high - low, 1.0)
    ax.set_xlim(low[0] - margin[0], high[0] + margin[0])
    ax.set_ylim(low[1] - margin[1], high[1] + margin[1])


def _draw_lines(ax: Axes, paths: npt.NDArray[Any], color: str, look: RunStyle) -> None:
    from matplotlib.collections import LineCollection

    lines = LineCollection(
        list(paths.transpose(2, 1, 0)), colors=color, linewidths=0.6, alpha=0.5, rasterized=True
    )
    ax.add_collection(lines)
    # Starts above ends and lines: a ring of the ground's color shows what is inside.
    ax.plot(*paths[:, 0], "o", mfc=look.style.ground, mec=color, ms=7, mew=1.3, zorder=4)
    ax.plot(*paths[:, -1], "o", color=color, ms=4, zorder=3)


def _name_ends(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Write the name of an outer end in each cell of a grid, and the number of others below it.

    No name covers a mark or another name; a cell without room has none.
    """
    from matplotlib.patheffects import withStroke

    marks = data["position"].transpose("step", "component", "token").values[[-1, 0]]
    shown = data["member"].values.any(0) & np.isfinite(marks[0]).all(0)
    if not shown.any():
        return
    names, marks = data["name"].values[shown], marks[..., shown]
    low, high = np.array([ax.get_xlim(), ax.get_ylim()]).T[..., None]
    places = (marks - low) / (high - low)
    ends = places[0]
    outermost = np.argsort(-np.linalg.norm(ends - np.median(ends, 1, keepdims=True), axis=0))
    cells = [tuple(cell) for cell in np.floor(ends * _NAMED).T]
    # In points; the legend below takes up to a quarter of the height.
    size = np.array(ax.bbox.size) * (72, 54) / ax.figure.dpi
    taken = np.hstack([*places]).T * size + np.array([-_MARK, _MARK])[:, None, None]
    apart = np.linalg.norm((ends[:, None] - ends[..., None]).T * size, axis=-1)
    others = (apart < _MARK).sum(0) - 1
    named: set[Any] = set()
    for token, side in product(outermost, _SIDES):
        if cells[token] in named:
            continue
        text = names[token] + (f" +{others[token]}" if others[token] else "")
        half = np.array([len(text) * _FONT * 0.3, _FONT * 0.6])
        middle = ends[:, token] * size + side * (half + _MARK)
        box = np.array([[middle - half], [middle + half]])
        covers = ((box[0] < taken[1]) & (box[1] > taken[0])).all(1).any()
        if covers or (box[0] < 0).any() or (box[1] > size).any():
            continue
        named.add(cells[token])
        taken = np.hstack([taken, box])
        ax.annotate(
            text,
            tuple(marks[0, :, token]),
            tuple(side * _MARK),
            textcoords="offset points",
            fontsize=_FONT,
            color=look.style.ink,
            ha=("center", "left", "right")[side[0]],
            va=("center", "bottom", "top")[side[1]],
            parse_math=False,
            path_effects=[withStroke(linewidth=2, foreground=look.style.ground)],
            zorder=5,
        )


def _draw_cells(ax: Axes, paths: npt.NDArray[Any], color: str, look: RunStyle) -> None:
    if not np.isfinite(paths).any():
        return
    limits = [(float(np.nanmin(axis)), float(np.nanmax(axis))) for axis in paths]
    (left, right), (bottom, top) = (
        (low - (low == high) / 2, high + (low == high) / 2) for low, high in limits
    )
    counts = np.zeros(_CELLS**2, np.int64)
    # Step by step: a histogram of all points at once copies them several times.
    for x, y in paths.transpose(1, 0, 2):
        there = np.isfinite(x)
        columns, rows = _cells(x[there], left, right), _cells(y[there], bottom, top)
        counts += np.bincount(rows * _CELLS + columns, minlength=counts.size)
    x, y = (np.linspace(*ends, _CELLS + 1) for ends in ((left, right), (bottom, top)))
    colors = shades(color, look.style.ground)
    draw_counts(ax, x, y, counts.reshape(_CELLS, _CELLS), colors)


def _cells(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.int64]:
    """Number of the cell of each value; the last cell includes its upper edge."""
    places = (values.astype(np.float64) - low) * (_CELLS / (high - low))
    return np.minimum(places.astype(np.int64), _CELLS - 1)
