"""Counts of tokens by regime of motion, and by cause of an unchanged step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.figures.axes_marks import along_steps, named
from trajstore.analysis.figures.figure import Options, figure
from trajstore.analysis.figures.style import CAUSE_COLORS, REGIME_COLORS, REGIME_MEANINGS, Look
from trajstore.analysis.motion import ulp_motion
from trajstore.analysis.optimizer import freeze_causes
from trajstore.analysis.scan.population_statistics import count_by_population
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


@figure(_regimes, measures=("regime",), on_lattice=True, scales=False)
def regimes(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Tokens by regime of motion."""
    _draw(ax, data, REGIME_COLORS, REGIME_MEANINGS)


def _freeze_cause(scan: Scan, options: Options) -> xr.Dataset:
    causes_of = freeze_causes.freeze_cause(scan, lattice=options.lattice)
    counts = count_by_population(causes_of, len(freeze_causes.CAUSES), "cause")
    found = _counts(counts.assign_coords(cause=list(freeze_causes.CAUSES)), scan, options)
    return found.assign({"lr": scan.ds["lr"].sel(step=found["step"])})


@figure(_freeze_cause, on_lattice=True, reading="moments", scales=False)
def freeze_cause(ax: Axes, data: xr.Dataset, look: Look) -> None:
    """Tokens by cause of an unchanged step."""
    _draw(ax, data, CAUSE_COLORS, {})
    right = ax.twinx()
    steps, rates = data["step"].values, data["lr"].values
    right.plot(steps, rates, "--", color=look.style.ink, lw=1)
    ax.plot([], [], "--", color=look.style.ink, lw=1, label="learning rate")
    right.set_ylabel("learning rate")
    right.set_ylim(bottom=0)
    right.margins(x=0)
