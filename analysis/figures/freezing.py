"""How tokens come to rest, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    name_kinds,
    named,
    note,
    population_curves,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Look, Options, figure
from trajstore.analysis.figures.style import REGIME_COLOURS, REGIME_MEANINGS, population_colour
from trajstore.analysis.motion import freezing, ulp_motion, update_heatmap
from trajstore.analysis.scan.consecutive_rows import REGIMES
from trajstore.analysis.scan.scan import Scan
from trajstore.populations.masks import chosen_populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

__all__ = ["freeze", "last_motion", "lifecycle", "stratigraphy"]

_BINS = 60
_LINES = {"last_jump": ":", "last_local": "--", "last_hop": "-"}
_BEHIND = {
    "last_jump": "last jump",
    "last_local": "last local move",
    "last_hop": "last small hop",
}


def _of_tokens(facts: xr.Dataset, scan: Scan, options: Options) -> xr.Dataset:
    """Facts per token, who belongs to the populations to be shown, and the last step."""
    shown = options.populations(scan)
    _, members = chosen_populations(scan.ds, shown)
    facts = facts.assign(member=(("population", "token"), members)).assign_coords(
        population=shown, first_step=int(scan.window[0]), last_step=int(scan.window[-1])
    )
    return _with_end(facts, scan, options)


def _with_end(facts: xr.Dataset, scan: Scan, options: Options) -> xr.Dataset:
    """The same, with the end of the run, which decides what is still for good."""
    return facts.assign_attrs(run_end=int(scan.steps[-1]), min_unchanged=options.min_unchanged)


def _shade_end(ax: Axes, data: xr.Dataset, look: Look, first: int, last: int) -> None:
    """Shade the steps after which the run ends too soon to call a still token frozen."""
    end, min_unchanged = data.attrs["run_end"], data.attrs["min_unchanged"]
    if last <= end - min_unchanged:
        return
    label = f"last {min_unchanged:,} steps: a token that moves here is not called frozen"
    known = label in ax.get_legend_handles_labels()[1]
    name = f"end {end} {last}"
    if any(patch.get_gid() == name for patch in ax.patches):
        return  # of another run, which ends there, too
    ax.axvspan(
        max(first, end - min_unchanged),
        last,
        color=look.style.grid,
        alpha=0.35,
        lw=0,
        zorder=0,
        gid=name,
        label="" if known else label,
    )


def _freeze(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    facts = freezing.freeze(scan, options.min_unchanged, options.lattice)
    facts = facts[["unchanged_fraction", "frozen_fraction"]].sel(population=shown)
    return _with_end(facts, scan, options)


@figure(_freeze, measures=("moved",), on_lattice=True, overlays=True, averages=True, bounds=(0, 1))
def freeze(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Share of the tokens that never move again."""
    labels = {
        "frozen_fraction": "will not move again",
        "unchanged_fraction": "did not move at this step",
    }
    population_curves(ax, data, look, labels)
    along_steps(ax, "share of the tokens")
    ax.set_ylim(-0.02, 1.02)
    lines = "whole: share of the tokens whose last motion is past; dotted: that stood still then"
    spread_note(ax, look, alone=lines)
    end, min_unchanged = data.attrs["run_end"], data.attrs["min_unchanged"]
    note(
        ax, f"never again: unchanged to the end, step {end:,}, for {min_unchanged:,} steps or more"
    )
    _shade_end(ax, data, look, *data["step"].values[[0, -1]].tolist())
    with_legend(ax)


def _last_motion(scan: Scan, options: Options) -> xr.Dataset:
    facts = freezing.freeze(scan, lattice=options.lattice)
    return _of_tokens(facts[["last_motion"]], scan, options)


@figure(_last_motion, measures=("moved",), on_lattice=True, overlays=True)
def last_motion(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """When the tokens moved for the last time."""
    first, last = int(data["first_step"]), int(data["last_step"])
    edges = np.linspace(first, last, min(_BINS, max(1, last - first)) + 1)
    populations = data["population"].values.tolist()
    for kind, population in enumerate(populations):
        steps = data["last_motion"].values[data["member"].sel(population=population).values]
        moved = steps[steps >= 0]
        ends = (moved > data.attrs["run_end"] - data.attrs["min_unchanged"]).sum()
        ax.hist(
            moved,
            bins=edges.tolist(),
            color=look.colour(population),
            histtype="stepfilled" if look.alone else "step",
            ls=look.line(kind),
            alpha=0.6 if look.alone else 1,
            label=look.label(
                f"{named(population)} ({steps.size:,}): {steps.size - moved.size:,} never moved, "
                f"{ends:,} moved in the last {data.attrs['min_unchanged']:,} steps",
                kind,
            ),
        )
    name_kinds(ax, look, [named(population) for population in populations])
    ax.set_xlabel("optimizer step of the last motion")
    ax.set_ylabel(f"tokens in {(last - first) / (edges.size - 1):.3g} steps")
    ax.grid(True, axis="y")
    _shade_end(ax, data, look, first, last)
    everyone = data["last_motion"].values[data["member"].values.any(0)]
    beyond = int((everyone > last).sum()), int(((everyone >= 0) & (everyone < first)).sum())
    if any(beyond):
        note(
            ax,
            f"not shown: {beyond[1]:,} tokens moved last before these steps, {beyond[0]:,} after",
        )
    with_legend(ax)


def _lifecycle(scan: Scan, options: Options) -> xr.Dataset:
    return _of_tokens(ulp_motion.lifecycle(scan, options.lattice), scan, options)


@figure(_lifecycle, measures=("regime",), on_lattice=True)
def lifecycle(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """The way into rest: last jumps, last local moves, last hops."""
    first = int(data["first_step"])
    for population in data["population"].values.tolist():
        member = data["member"].sel(population=population).values
        for name, line in _LINES.items():
            steps = data[name].values[member]
            ax.ecdf(
                np.where(steps < 0, first, steps),
                color=population_colour(population),
                ls=line,
                label=f"{named(population)}: {_BEHIND[name]}",
            )
    along_steps(ax, "share of the tokens past it")
    ax.set_xlim(first, max(int(data["last_step"]), first + 1))
    ax.set_ylim(-0.02, 1.02)
    _shade_end(ax, data, look, first, int(data["last_step"]))
    note(ax, "small: single or neighbour; a token without such a motion is past it from the start")
    with_legend(ax)


def _stratigraphy(scan: Scan, options: Options) -> xr.Dataset:
    of = "hop" if options.colour == "hop" else "regime"
    return update_heatmap.heatmap(scan, of, options.lattice)  # type: ignore[arg-type]


@figure(
    _stratigraphy, measures=("regime", "moved"), on_lattice=True, scales=False, of_populations=False
)
def stratigraphy(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Tokens in the order in which they came to rest."""
    from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
    from matplotlib.patches import Patch

    stratum = data["update_size"].transpose("group", "step")
    steps = stratum["step"].values.astype(np.float64)
    sizes = data["tokens"].values
    spacing = steps[-1] - steps[-2] if steps.size > 1 else 1.0
    edges = np.append(steps, steps[-1] + spacing)
    depths = np.append(0, sizes.cumsum())
    if stratum.dtype == np.int8:
        colours = ListedColormap(list(REGIME_COLOURS.values()))
        norm = BoundaryNorm(np.arange(len(REGIMES) + 1) - 0.5, len(REGIMES))
        ax.pcolormesh(edges, depths, stratum.values, cmap=colours, norm=norm, rasterized=True)
        patches = [
            Patch(color=REGIME_COLOURS[name], label=f"{name}: {REGIME_MEANINGS[name]}")
            for name in REGIMES
        ]
        pooled = "the most common regime"
    else:
        values = np.ma.masked_where(~(stratum.values > 0), stratum.values)
        if values.count():
            scale = LogNorm(values.min(), max(values.max(), values.min() * 2))
            mesh = ax.pcolormesh(
                edges, depths, values, norm=scale, cmap=look.style.density, rasterized=True
            )
            ax.figure.colorbar(mesh, ax=ax).set_label(
                f"mean hop (L1) / {data['update_size'].attrs['units']}"
            )
        patches = []
        pooled = "blank: did not move; the mean hop"
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("tokens, sorted by their last motion")
    tokens, rows = int(sizes.max()), int(data["steps"].max())
    cell = f"{pooled} of {_up_to(tokens, 'token')} × {_up_to(rows, 'step')} to a cell"
    mixed = tokens > 1 and "dead_fraction" in data
    note(ax, cell + ("; strip: mixed colours where both kinds are pooled" if mixed else ""))
    if "dead_fraction" in data:
        patches += _draw_populations(ax, data["dead_fraction"].values, depths)
    with_legend(ax, handles=patches)


def _up_to(number: int, noun: str) -> str:
    return f"up to {number:,} {noun}s" if number > 1 else f"1 {noun}"


def _draw_populations(ax: Axes, dead: npt.NDArray[Any], depths: npt.NDArray[Any]) -> list[Patch]:
    """Strip beside the layers that says which tokens are dead: of many, what share."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch

    colours = {name: population_colour(name) for name in ("live", "dead")}
    strip = ax.inset_axes((1.005, 0, 0.02, 1), sharey=ax)
    strip.set_axis_off()
    shares = LinearSegmentedColormap.from_list("shares", list(colours.values()))
    strip.pcolormesh([0, 1], depths, dead[:, None], cmap=shares, vmin=0, vmax=1, rasterized=True)
    return [Patch(color=colour, label=f"strip: {named(name)}") for name, colour in colours.items()]
