"""How the tokens come to rest: shares over the steps, and when each of them moved last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    named,
    note,
    population_curves,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import population_colour
from trajstore.analysis.motion.freezing import build_freeze
from trajstore.analysis.motion.ulp_motion import build_lifecycle
from trajstore.analysis.scan.scan import Scan
from trajstore.populations.masks import chosen_populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["freeze", "last_motion", "lifecycle"]

_BINS = 60
_LINES = {"last_jump": ":", "last_local": "--", "last_hop": "-"}
_BEHIND = {
    "last_jump": "last jump",
    "last_local": "last local move",
    "last_hop": "last small hop",
}


def _of_tokens(facts: xr.Dataset, history: Scan, options: Options) -> xr.Dataset:
    """Facts per token, who belongs to the populations to be shown, and the last step."""
    shown = options.populations(history)
    _, members = chosen_populations(history.ds, shown)
    return facts.assign(member=(("population", "token"), members)).assign_coords(
        population=shown, first_step=int(history.steps[0]), last_step=int(history.steps[-1])
    )


def _freeze(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    facts = build_freeze(history, lattice=options.lattice)
    return facts[["still_fraction", "frozen_fraction"]].sel(population=shown)


def _draw_freeze(ax: Axes, data: xr.Dataset, look: Look) -> None:
    told = {
        "frozen_fraction": "will not move again",
        "still_fraction": "did not move at this step",
    }
    population_curves(ax, data, look, told)
    along_steps(ax, "share of the tokens")
    ax.set_ylim(-0.02, 1.02)
    lines = "whole: share of the tokens whose last motion is past; dotted: that stood still then"
    spread_note(ax, look, alone=lines)
    with_legend(ax)


def _last_motion(history: Scan, options: Options) -> xr.Dataset:
    facts = build_freeze(history, lattice=options.lattice)
    return _of_tokens(facts[["last_motion"]], history, options)


def _draw_last_motion(ax: Axes, data: xr.Dataset, look: Look) -> None:
    first, last = int(data["first_step"]), int(data["last_step"])
    edges = np.linspace(first, last, min(_BINS, max(1, last - first)) + 1)
    for population in data["population"].values.tolist():
        steps = data["last_motion"].values[data["member"].sel(population=population).values]
        moved = steps[steps >= 0]
        ends = (moved == last).sum()
        ax.hist(
            moved,
            bins=edges.tolist(),
            color=population_colour(population),
            histtype="step" if look.second else "stepfilled",
            ls=look.line,
            alpha=0.6,
            label=look.label(
                f"{named(population)} ({steps.size:,}): {steps.size - moved.size:,} never moved, "
                f"{ends:,} still moved at the last step"
            ),
        )
    ax.set_xlabel("optimizer step of the last motion")
    ax.set_ylabel(f"tokens in {(last - first) / (edges.size - 1):.3g} steps")
    ax.grid(True, axis="y")
    with_legend(ax)


def _lifecycle(history: Scan, options: Options) -> xr.Dataset:
    return _of_tokens(build_lifecycle(history, options.lattice), history, options)


def _draw_lifecycle(ax: Axes, data: xr.Dataset, look: Look) -> None:
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
    note(ax, "small: single or neighbour; a token without such a motion is past it from the start")
    with_legend(ax)


freeze = Figure(
    name="freeze",
    title="Share of the tokens that never move again",
    collect=_freeze,
    draw=_draw_freeze,
    measures=("moved",),
    on_lattice=True,
    overlays=True,
    averages=True,
)

last_motion = Figure(
    name="last-motion",
    title="When the tokens moved for the last time",
    collect=_last_motion,
    draw=_draw_last_motion,
    measures=("moved",),
    on_lattice=True,
    overlays=True,
)

lifecycle = Figure(
    name="lifecycle",
    title="The way into rest: last jumps, last local moves, last hops",
    collect=_lifecycle,
    draw=_draw_lifecycle,
    measures=("regime",),
    on_lattice=True,
)
