"""Table and figure of docs/studies/freeze.md, from the folders of its runs.

python tools/freeze_study.py STUDY OPEN docs

Complete runs are read, missing open loops computed. The tables of dead and live tokens are printed;
that of dead tokens replaces the table of the page, and the figure
docs/figures/freeze-last-motion.png.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import numpy as np
import numpy.typing as npt
from matplotlib import pyplot as plt

from trajstore import analysis, open_run
from trajstore.trainers import what_if

SCHEDULES = {
    "linear-1000": "linear, 1,000 steps",
    "linear-3000": "linear, 3,000 steps",
    "constant-5000": "constant, 5,000 steps",
}
# Settings of the counterfactuals; None marks the runs that were trained.
LOOPS = {
    "recorded": None,
    "open, float32 state": ("optimizer.state_dtype=float32",),
    "closed, float32 state": None,
    "open, float32 weights": ("model.dtype=float32",),
}
# Colors of Okabe and Ito, which color-blind readers can distinguish.
COLORS = dict(zip(LOOPS, ("#000000", "#56B4E9", "#0072B2", "#D55E00"), strict=True))

MOVING = 50
"""A token that moved in this many last steps is moving: the default of `freeze`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Freeze:
    """Last motions of a population of a run.

    Attributes
    ----------
    steps : int
        Last recorded step.
    last : ndarray of int, (token, hidden)
        Step of the last motion of each element, 0 if none.
    rank : ndarray of int, (token, hidden)
        Rank of the magnitude of each element among those of its token, at the end; 1 for the
        smallest.
    """

    steps: int
    last: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Step of the last motion of each token."""
        return self.last.max(1)

    @property
    def moving(self) -> npt.NDArray[np.bool_]:
        """True for tokens that moved near the end of the recording."""
        return self.tokens > self.steps - MOVING

    @property
    def rank_of_last(self) -> float:
        """Median rank of the element that moved last in its token; NaN if most still move."""
        if np.median(self.moving) > 0:
            return np.nan
        return float(np.median(np.take_along_axis(self.rank, self.last.argmax(1)[:, None], 1)))


def read(path: Path) -> dict[str, Freeze]:
    """Last motions of a run, by population."""
    ds = open_run(path)
    last = np.maximum(analysis.freeze(ds, per="element").last_motion.values, 0)
    is_dead = ds.is_dead.values.astype(bool)
    rank = np.abs(ds.W.values[-1]).argsort(1).argsort(1) + 1
    return {
        name: Freeze(steps=int(ds.step[-1]), last=last[chosen], rank=rank[chosen])
        for name, chosen in (("dead", is_dead), ("live", ~is_dead))
    }


Found = dict[tuple[str, str], dict[int, dict[str, Freeze]]]
"""Last motions by schedule and loop, by seed, and by population."""


def trained(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Complete runs of a folder: type of the state, seed and path."""
    for path in sorted(folder.glob("*.zarr")):
        found = re.search(r"state_dtype=(\w+)_seed=(\d+)", path.name)
        if found and (path / "zarr.json").exists():
            if open_run(path).attrs["status"] == "complete":
                yield found[1], int(found[2]), path
            else:
                print(f"{path}: not complete, omitted")


def study(folder: Path, counterfactuals: Path) -> Found:
    """Last motions by schedule and loop, and by seed. Missing open loops are computed."""
    found: Found = defaultdict(dict)
    for schedule in SCHEDULES:
        for state, seed, path in trained(folder / schedule):
            if state == "float32":
                found[schedule, "closed, float32 state"][seed] = read(path)
                continue
            found[schedule, "recorded"][seed] = read(path)
            for loop, settings in LOOPS.items():
                if settings is None:
                    continue
                other = counterfactuals / schedule / f"{settings[0]}_seed={seed}.zarr"
                if not other.exists():
                    other.parent.mkdir(parents=True, exist_ok=True)
                    what_if(path, other, settings)
                found[schedule, loop][seed] = read(other)
    return found


def spread(values: Iterable[float]) -> str:
    """Median and range over seeds."""
    numbers = [value for value in values if not np.isnan(value)]
    if not numbers:
        return "—"
    middle, low, high = (
        f"{each:,.0f}" for each in (np.median(numbers), min(numbers), max(numbers))
    )
    return middle if low == high else f"{middle} ({low}–{high})"


def table(found: Found, population: str) -> str:
    """A table, a line per schedule and loop."""
    heads = ["schedule", "loop", "token", "element", "moving", "rank"]
    lines = [heads, ["---"] * len(heads)]
    for schedule, title in SCHEDULES.items():
        for loop in LOOPS:
            runs = [run[population] for run in found[schedule, loop].values()]
            cells = (
                [float(np.median(run.tokens)) for run in runs],
                [float(np.median(run.last)) for run in runs],
                [float(np.count_nonzero(run.moving)) for run in runs],
                [run.rank_of_last for run in runs],
            )
            lines.append([title, loop, *map(spread, cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_table(page: Path, text: str) -> None:
    """Replace the table of the page."""
    written, count = re.subn(r"(?:^\|.*\n)+", f"{text}\n", page.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{page} has {count} tables, expected 1")
    page.write_text(written)


def draw(found: Found, file: Path) -> None:
    """Draw the fraction of dead tokens and elements that move again after each step."""
    figure, axes = plt.subplots(
        2, len(SCHEDULES), figsize=(11, 6), sharey=True, layout="constrained"
    )
    for (schedule, loop), runs in found.items():
        column = [*SCHEDULES].index(schedule)
        for seed, run in runs.items():
            dead = run["dead"]
            for row, last in enumerate((dead.tokens, dead.last.ravel())):
                at = np.arange(dead.steps + 1)
                later = 1 - np.searchsorted(np.sort(last), at, side="right") / last.size
                label = loop if seed == min(runs) else None
                axes[row, column].plot(at, later, color=COLORS[loop], lw=1, alpha=0.8, label=label)
        axes[0, column].set_title(SCHEDULES[schedule])
        axes[1, column].set_xlabel("optimizer step")
    for row, what in enumerate(("tokens", "elements")):
        axes[row, 0].set_ylabel(f"fraction of dead {what}")
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.suptitle("Dead tokens, and their elements, that move after each step; a line per seed")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Print the tables, and write one and the figure into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of the runs of each schedule")
    parser.add_argument("open", type=Path, help="folder for the open loops")
    parser.add_argument("docs", type=Path, help="folder of the documentation")
    options = parser.parse_args()
    found = study(options.study, options.open)
    for population in ("dead", "live"):
        print(f"{population.capitalize()} tokens:\n\n{table(found, population)}\n")
    replace_table(options.docs / "studies" / "freeze.md", table(found, "dead"))
    draw(found, options.docs / "figures" / "freeze-last-motion.png")


if __name__ == "__main__":
    main()
