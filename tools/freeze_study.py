"""Table and figures of docs/studies/freeze.md, from the runs of its commands.

python tools/freeze_study.py FOLDER docs/figures
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import numpy as np
import numpy.typing as npt
import xarray as xr
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from trajstore import open_run
from trajstore.analysis import displacement, exact_moments, freeze, speed

# Colors of Okabe and Ito, which color-blind readers can distinguish.
RUNS = (
    ("recorded", "as recorded", "#000000", "-"),
    ("open-state", "open loop, float32 state", "#0072B2", "--"),
    ("open-weights", "open loop, float32 weights", "#D55E00", "--"),
    ("open-constant", "open loop, constant rate", "#009E73", "--"),
    ("open-constant-state", "open loop, both", "#CC79A7", "--"),
    ("open-stochastic", "open loop, stochastic rounding", "#E69F00", ":"),
    ("fork-state", "closed loop, float32 state", "#0072B2", "-"),
    ("fork-weights", "closed loop, float32 weights", "#D55E00", "-"),
)

_WINDOW = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """Curves of a run: medians over its dead tokens, (step,)."""

    label: str
    color: str
    line: str
    steps: npt.NDArray[np.int64]
    distance: npt.NDArray[np.float64]
    speed: npt.NDArray[np.float64]


def dead(values: xr.DataArray) -> xr.DataArray:
    """Return the median over dead tokens."""
    return values.isel(token=np.flatnonzero(values.is_dead.values)).median("token")


def row(name: str, label: str, ds: xr.Dataset, curves: Curves) -> str:
    """Return one line of the table."""
    found = freeze(ds, min_unchanged=1).compute()  # the text names those near the end of the run
    since = found.frozen_since
    cells = [label]
    for population, mask in (("dead", ds.is_dead), ("live", ~ds.is_dead)):
        steps = since.values[mask.values]
        frozen = steps[steps >= 0]
        when = "none" if not frozen.size else f"{int(np.median(frozen)):,}"
        cells.append(f"{frozen.size} of {steps.size} {population}, median {when}")
    fell = (ds.exp_avg_sq.diff("step") < 0).any("step").mean().compute().item()
    cells += [f"{curves.distance[-1]:.2f}", f"{100 * fell:.0f} %"]
    return f"| {' | '.join(cells)} |"


def draw(axes: Axes, curves: list[Curves], quantity: str, title: str) -> None:
    """Draw one quantity of several runs."""
    for run in curves:
        values = getattr(run, quantity)
        shown = np.where(values > 0, values, np.nan)
        axes.plot(run.steps, shown, run.line, color=run.color, label=run.label, lw=1.2)
    axes.set(xlabel="optimizer step", yscale="log", title=title)
    axes.legend(fontsize=8, frameon=False)


def main() -> None:
    """Print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("figures", type=Path, help="folder for the figures")
    options = parser.parse_args()
    lines, curves = [], []
    for name, label, color, line in RUNS:
        ds = open_run(options.runs / f"{name}.zarr")
        distance = dead(displacement(ds)).compute()
        # In most steps a bfloat16 weight does not change; in the others it changes by whole ulps.
        pace = dead(speed(ds)).rolling(step=_WINDOW, center=True).mean().compute()
        curves.append(
            Curves(
                label=label,
                color=color,
                line=line,
                steps=pace.step.values,
                distance=distance.sel(step=pace.step).values,
                speed=pace.values,
            )
        )
        lines.append(row(name, label, ds, curves[-1]))
    print("| run | frozen | frozen | distance of the dead tokens | v that decreased |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    options.figures.mkdir(parents=True, exist_ok=True)
    for quantity, title in (
        ("distance", "Distance of dead tokens from their start (median of ‖W − W₀‖)"),
        ("speed", f"Speed of dead tokens (‖ΔW‖, mean of {_WINDOW} steps)"),
    ):
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        draw(axes, curves, quantity, title)
        figure.savefig(options.figures / f"freeze-{quantity}.png", dpi=110)
    ds = open_run(options.runs / "recorded.zarr")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    exact = exact_moments(ds).exact_exp_avg_sq
    for label, moment, line in (("recorded, bfloat16", ds.exp_avg_sq, "-"), ("exact", exact, "--")):
        for population, mask, color in (
            ("dead", ds.is_dead.values, "#0072B2"),
            ("live", ~ds.is_dead.values, "#D55E00"),
        ):
            chosen = moment.isel(token=np.flatnonzero(mask))
            mean = np.sqrt(chosen.astype("f8").mean(["token", "hidden"])).compute()
            axes.plot(ds.step, mean, line, color=color, label=f"{population}, {label}", lw=1.2)
    axes.set(xlabel="optimizer step", yscale="log", title="√ of the mean second moment")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(options.figures / "freeze-moment.png", dpi=110)


if __name__ == "__main__":
    main()
