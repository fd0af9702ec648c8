"""Figures of when tokens stop moving, in which order, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    draw_curves,
    message,
    name_kinds,
    named,
    shade_region,
    step_edges,
)
from trajstore.analysis.figures.figure import Options, figure, with_members
from trajstore.analysis.figures.style import (
    CAUSE_COLORS,
    CURVES,
    REGIME_COLORS,
    REGIME_MEANINGS,
    RunStyle,
    SeveralRuns,
    population_color,
)
from trajstore.analysis.motion import freezing, ulp_motion
from trajstore.analysis.optimizer import freeze_causes
from trajstore.analysis.scan.result_variables import count_by_population
from trajstore.analysis.scan.rows import REGIMES
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_BINS = 60
_LINES = {"last_jump": ":", "last_local": "--", "last_hop": "-"}
_BEHIND = {
    "last_jump": "last jump",
    "last_local": "last local move",
    "last_hop": "last small hop",
}


def _of_tokens(facts: xr.Dataset, scan: Scan, options: Options) -> xr.Dataset:
    """Facts per token, the members of each population, and the last step."""
    ends = {"first_step": int(scan.window[0]), "last_step": int(scan.window[-1])}
    return _with_end(with_members(facts, scan, options).assign_coords(ends), scan, options)


def _with_end(facts: xr.Dataset, scan: Scan, options: Options) -> xr.Dataset:
    """Add the end of the run, which decides what counts as frozen."""
    return facts.assign_attrs(run_end=int(scan.steps[-1]), min_unchanged=options.min_unchanged)


def _shade_end(ax: Axes, data: xr.Dataset, look: RunStyle, first: int, last: int) -> None:
    """Shade the steps that leave too few others to count a token as frozen."""
    end, min_unchanged = data.attrs["run_end"], data.attrs["min_unchanged"]
    begin = max(first, data.attrs.get("last_start", end - min_unchanged))
    if begin < last:
        label = f"last {min_unchanged:,} steps: too late to count as frozen"
        shade_region(ax, begin, last, label, look.style.grid)


def _freeze(scan: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(scan)
    facts = freezing.freeze(scan, options.min_unchanged, options.lattice)
    facts = facts[["unchanged_fraction", "frozen_fraction"]].sel(population=shown)
    last = freezing.last_start(scan.steps, options.min_unchanged)
    facts["frozen_fraction"] = facts["frozen_fraction"].where(facts["step"] <= last)
    return _with_end(facts, scan, options).assign_attrs(last_start=last)


@figure(
    _freeze,
    measures=("moved",),
    options=("population", "lattice", "log"),
    runs=SeveralRuns(overlays=True, averages=True, bounds=(0, 1)),
)
def freeze(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Frozen and unchanged tokens."""
    labels = {"frozen_fraction": "frozen", "unchanged_fraction": "unchanged at this step"}
    draw_curves(ax, data, look, labels, about=_frozen_at_last)
    along_steps(ax, "fraction of the tokens")
    ax.set_ylim(-0.02, 1.02)
    end, min_unchanged = data.attrs["run_end"], data.attrs["min_unchanged"]
    text = f"unchanged to the end, step {end:,}, for {min_unchanged:,} steps or more"
    look.note(f"frozen: {text}")
    _shade_end(ax, data, look, *data["step"].values[[0, -1]].tolist())


def _frozen_at_last(part: xr.Dataset, name: str) -> str:
    if name != "frozen_fraction":
        return ""
    known = part[name].dropna("step")
    return f" ({known[-1].item():.0%} at step {known['step'][-1].item():,})" if known.size else ""


def _last_motion(scan: Scan, options: Options) -> xr.Dataset:
    facts = freezing.freeze(scan, lattice=options.lattice)
    return _of_tokens(facts[["last_motion"]], scan, options)


@figure(
    _last_motion,
    measures=("moved",),
    options=("population", "lattice", "log"),
    runs=CURVES,
)
def last_motion(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Step at which each token moved last."""
    first, last = int(data["first_step"]), int(data["last_step"])
    width = max(1, -(-(last - first + 1) // _BINS))
    edges = np.arange(last + 1, first - width, -width)[::-1]
    populations = data["population"].values.tolist()
    counts = []
    for kind, population in enumerate(populations):
        steps = data["last_motion"].values[data["member"].sel(population=population).values]
        moved = steps[steps >= 0]
        counts.append(np.histogram(moved[moved <= last], edges)[0])
        ends = (moved > data.attrs["run_end"] - data.attrs["min_unchanged"]).sum()
        label = look.label(
            f"{named(population)} ({steps.size:,}): {steps.size - moved.size:,} never moved, "
            f"{ends:,} moved in the last {data.attrs['min_unchanged']:,} steps",
            kind,
        )
        color = look.color(population)
        if look.alone:
            # Side by side: where bars overlap, their colors would mix.
            part = width / len(populations)
            places = edges[:-1] + kind * part
            ax.bar(places, counts[-1], part, align="edge", color=color, lw=0, label=label)
        else:
            ax.stairs(counts[-1], edges, color=color, ls=look.line(kind), lw=1.4, label=label)
    name_kinds(ax, look, [named(population) for population in populations])
    ax.set_xlabel("optimizer step of the last motion")
    ax.set_ylabel("tokens per step" if width == 1 else f"tokens per {width:,} steps")
    ax.grid(True, axis="y")
    ax.set_axisbelow(True)
    _shade_end(ax, data, look, first, last)
    everyone = data["last_motion"].values[data["member"].values.any(0)]
    before, after = int(((everyone >= 0) & (everyone < first)).sum()), int((everyone > last).sum())
    if look.alone and not np.any(counts):
        ax.set_ylim(0, 1)
        message(ax, "no token moved last at these steps")
    if before or after:
        look.note(f"not shown: {before:,} tokens moved last before these steps, {after:,} after")


def _lifecycle(scan: Scan, options: Options) -> xr.Dataset:
    return _of_tokens(ulp_motion.lifecycle(scan, options.lattice), scan, options)


@figure(_lifecycle, measures=("regime",), options=("population", "lattice", "log"))
def lifecycle(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Fraction of the tokens past their last jump, local move and small hop."""
    first = int(data["first_step"])
    for population in data["population"].values.tolist():
        member = data["member"].sel(population=population).values
        for name, line in _LINES.items():
            steps = data[name].values[member]
            ax.ecdf(
                np.where(steps < 0, first, steps),
                color=population_color(population),
                ls=line,
                label=f"{named(population)}: {_BEHIND[name]}",
            )
    along_steps(ax, "fraction of the tokens past it")
    ax.set_xlim(first, max(int(data["last_step"]), first + 1))
    ax.set_ylim(-0.02, 1.02)
    _shade_end(ax, data, look, first, int(data["last_step"]))
    look.note("small hop: single or neighbor; a token without one is past it from the start")


def _heatmap(scan: Scan, options: Options) -> xr.Dataset:
    of = "hop" if options.color == "hop" else "regime"
    return ulp_motion.heatmap(scan, of, options.lattice)  # type: ignore[arg-type]


@figure(_heatmap, measures=("regime", "moved"), options=("lattice",))
def heatmap(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Update-size heatmap: tokens sorted by their last motion."""
    from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm

    size = data["update_size"].transpose("group", "step")
    sizes = data["tokens"].values
    edges = step_edges(size["step"])
    depths = np.append(0, sizes.cumsum())
    if size.dtype == np.int8:
        colors = ListedColormap(list(REGIME_COLORS.values()))
        norm = BoundaryNorm(np.arange(len(REGIMES) + 1) - 0.5, len(REGIMES))
        ax.pcolormesh(edges, depths, size.values, cmap=colors, norm=norm, rasterized=True)
        for name in REGIMES:
            label = f"{name}: {REGIME_MEANINGS[name]}"
            ax.plot([], [], "s", color=REGIME_COLORS[name], label=label)
        pooled, single = "color: the most common regime", "color: the regime"
    else:
        values = np.ma.masked_where(~(size.values > 0), size.values)
        if values.count():
            scale = LogNorm(values.min(), max(values.max(), values.min() * 2))
            mesh = ax.pcolormesh(
                edges, depths, values, norm=scale, cmap=look.style.density, rasterized=True
            )
            ax.figure.colorbar(mesh, ax=ax).set_label(f"mean hop (L1) / {size.attrs['units']}")
        single = "blank: unchanged; color: the hop"
        pooled = "blank: unchanged; color: the mean hop"
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("tokens, sorted by last motion")
    tokens, rows = int(sizes.max()), int(data["steps"].max())
    if tokens == rows == 1:
        cell = f"{single} of one token at one step"
    else:
        cell = f"{pooled} of {_up_to(tokens, 'token')} × {_up_to(rows, 'step')} per cell"
    mixed = tokens > 1 and "dead_fraction" in data
    look.note(cell + ("; strip: mixed colors where a cell holds both kinds" if mixed else ""))
    if "dead_fraction" in data:
        _draw_populations(ax, data["dead_fraction"].values, depths)


def _up_to(number: int, noun: str) -> str:
    return f"up to {number:,} {noun}s" if number > 1 else f"1 {noun}"


def _draw_populations(ax: Axes, dead: npt.NDArray[Any], depths: npt.NDArray[Any]) -> None:
    """Draw the strip that marks dead tokens, or the fraction of dead tokens in a cell."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = {name: population_color(name) for name in ("live", "dead")}
    strip = ax.inset_axes((1.005, 0, 0.02, 1), sharey=ax)
    strip.set_axis_off()
    shares = LinearSegmentedColormap.from_list("shares", list(colors.values()))
    strip.pcolormesh([0, 1], depths, dead[:, None], cmap=shares, vmin=0, vmax=1, rasterized=True)
    for name, color in colors.items():
        ax.plot([], [], "s", color=color, label=f"strip at the right: {named(name)}")


def _counts(counts: xr.DataArray, scan: Scan, options: Options) -> xr.Dataset:
    """Counts of a single population: the stacks of two would cover each other."""
    (population,) = options.populations(scan, ("all",))
    return counts.sel(population=population).to_dataset(name="counts")


def _draw(
    ax: Axes, data: xr.Dataset, colors: Mapping[str, str], meanings: Mapping[str, str]
) -> None:
    stacked = data["counts"]
    (dim,) = (name for name in stacked.dims if name != "step")
    kinds = [str(kind) for kind in stacked[dim].values]
    counts = stacked.transpose(dim, "step").values
    shown = [at for at, row in enumerate(counts) if row.any()]
    ax.stackplot(
        stacked["step"].values,
        counts[shown],
        colors=[colors[kinds[at]] for at in shown],
        labels=[_label(kinds[at], meanings) for at in shown],
        lw=0,
        step="pre",
        rasterized=True,
    )
    tokens = int(counts[:, :1].sum())
    along_steps(ax, f"{named(str(data['population'].item()))} ({tokens:,})")
    ax.set_ylim(0, max(1, tokens))
    ax.margins(x=0)
    ax.grid(False)


def _label(kind: str, meanings: Mapping[str, str]) -> str:
    return ": ".join(filter(None, [kind.replace("_", " "), meanings.get(kind, "")]))


def _regimes(scan: Scan, options: Options) -> xr.Dataset:
    return _counts(ulp_motion.regimes(scan, options.lattice)["counts"], scan, options)


@figure(_regimes, measures=("regime",), options=("population", "lattice"))
def regimes(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Tokens by regime of motion."""
    _draw(ax, data, REGIME_COLORS, REGIME_MEANINGS)


def _freeze_cause(scan: Scan, options: Options) -> xr.Dataset:
    causes_of = freeze_causes.freeze_cause(scan, lattice=options.lattice)
    counts = count_by_population(causes_of, len(freeze_causes.CAUSES), "cause")
    counts_by_cause = _counts(counts.assign_coords(cause=list(freeze_causes.CAUSES)), scan, options)
    return counts_by_cause.assign({"lr": scan.ds["lr"].sel(step=counts_by_cause["step"])})


@figure(_freeze_cause, reading="moments", options=("population", "lattice"))
def freeze_cause(ax: Axes, data: xr.Dataset, look: RunStyle) -> None:
    """Tokens by cause of an unchanged step."""
    _draw(ax, data, CAUSE_COLORS, {})
    right = ax.twinx()
    steps, rates = data["step"].values, data["lr"].values
    right.plot(steps, rates, "--", color=look.style.ink, lw=1)
    ax.plot([], [], "--", color=look.style.ink, lw=1, label="learning rate")
    right.set_ylabel("learning rate")
    right.set_ylim(bottom=0)
    right.margins(x=0)
