"""Styles and colors that all figures share, names in titles, and the curves of several runs.

Dead, live, each regime and each cause have one color in all figures. Populations and causes have
the hues of Okabe and Ito (2008), which color-blind readers distinguish. Regimes have those of
viridis, from unchanged to the longest hops, ordered by lightness. Many runs are drawn as mean and
spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.populations import row_vectors
from trajstore.provenance import RunAttributes
from trajstore.schema import EVALUATION
from trajstore.store.reading.run_attributes import SEED, differing_settings, run_labels

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


_LINES = ("-", "--", ":", "-.")
"""Line styles of several runs, one for each kind of curve such as dead and live tokens."""


POPULATION_COLORS = {
    "dead": "#D55E00",
    "live": "#0072B2",
    "all": "#888888",
    "mostly_dead": "#CC79A7",
}

REGIME_COLORS = {
    "unchanged": "#46327E",
    "single": "#365C8D",
    "neighbor": "#1FA187",
    "local": "#7AD151",
    "jump": "#FDE725",
}

REGIME_MEANINGS = {
    "unchanged": "no element left its cell",
    "single": "one element moved, by one cell",
    "neighbor": "several, each by one cell at most",
    "local": "some further, in all up to √D cells (L2)",
    "jump": "more than √D cells (L2), D elements",
}
"""Meaning of each regime in cells of the lattice, as in `analysis.regimes`."""

CAUSE_COLORS = {
    "moved": "#BBBBBB",
    "no_gradient": "#56B4E9",
    "lost_update": "#E69F00",
    "learning_rate": "#009E73",
    "skipped": "#CC79A7",
    "unexplained": "#7B3FA0",
    "below_cell": "#F0E442",
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """Colors of a figure: ground, ink, map of densities, runs.

    Attributes
    ----------
    ground, ink, second, grid : str
        Colors; ``second`` is for lines of no population.
    density : str
        Color map of matplotlib for counts and lengths.
    band : float
        Opacity of a band between two quantiles.
    runs : tuple of str
        Colors of several runs in one axes; dead and live tokens have others.
    """

    ground: str
    ink: str
    second: str
    grid: str
    density: str
    band: float
    runs: tuple[str, ...]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of matplotlib for a new figure."""
        ink = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
            self.ink,
        )
        ground = dict.fromkeys(
            ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.ground
        )
        return {
            **ink,
            **ground,
            "legend.facecolor": self.ground,
            "legend.edgecolor": self.grid,
            "legend.framealpha": 0.85,
            "legend.fontsize": "small",
            "grid.color": self.grid,
            "grid.linewidth": 0.5,
            "axes.titlesize": "medium",
            "axes.titlelocation": "left",
            "lines.linewidth": 1.4,
            "svg.fonttype": "none",
        }


STYLES = {
    "light": Style(
        ground="white",
        ink="#222222",
        second="#009E73",
        grid="#D0D0D0",
        density="viridis",
        band=0.25,
        runs=(
            "#009E73",
            "#7B3FA0",
            "#E69F00",
            "#56B4E9",
            "#CC79A7",
            "#9A6A4F",
            "#A0A800",
            "#909090",
        ),
    ),
    "dark": Style(
        ground="black",
        ink="#E8E8E8",
        second="#2CC295",
        grid="#444444",
        density="inferno",
        band=0.5,
        runs=(
            "#2CC295",
            "#B48AD6",
            "#E69F00",
            "#56B4E9",
            "#CC79A7",
            "#C9A27E",
            "#D4DB3A",
            "#909090",
        ),
    ),
}


def population_color(name: str) -> str:
    """Color of a population. Those of users share one, as a figure shows one of them."""
    return POPULATION_COLORS.get(name, "#009E73")


def shades(color: str, ground: str) -> Colormap:
    """Color map from a pale color on this ground to the full color."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb

    # A pale color is harder to see on black than on white.
    share = 0.25 if sum(to_rgb(ground)) > 1.5 else 0.45
    pairs = zip(to_rgb(ground), to_rgb(color), strict=True)
    red, green, blue = ((1 - share) * under + share * over for under, over in pairs)
    return LinearSegmentedColormap.from_list("shades", [to_hex((red, green, blue)), color])


def style(name: str) -> Style:
    """Style of that name.

    Raises
    ------
    InvalidArgument
        For an unknown name.
    """
    try:
        return STYLES[name]
    except KeyError:
        raise InvalidArgument(f"got style={name!r}, expected {' or '.join(STYLES)}") from None


@dataclass(frozen=True, kw_only=True)
class RunStyle:
    """Style of a figure, and the run that it draws.

    Attributes
    ----------
    style : Style
    run : str
        Label of the run or runs, if the figure shows others.
    number : int
        Position of this run among those of the axes.
    runs : int
        Number of runs. A single run has the colors of the populations.
    band : tuple of Dataset, optional
        Lower and upper edge of the spread between runs, for a mean of several.
    notes : list of str
        Notes of all runs.
    """

    style: Style = field(default_factory=lambda: STYLES["light"])
    run: str = ""
    number: int = 0
    runs: int = 1
    band: tuple[xr.Dataset, xr.Dataset] | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note to the legend, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def alone(self) -> bool:
        """True for the only run of the axes, or the mean of all."""
        return self.runs == 1

    @property
    def run_color(self) -> str:
        """Color of this run among several."""
        return self.style.runs[self.number]

    def color(self, population: str) -> str:
        """Color of a population, or with several runs that of the run."""
        return population_color(population) if self.alone else self.run_color

    def line(self, kind: int) -> str:
        """Line style of a kind of curve, such as dead or live tokens."""
        return "-" if self.alone else _LINES[kind % len(_LINES)]

    def label(self, text: str, kind: int = 0) -> str:
        """Label in a legend; with several runs, one label per run."""
        if self.alone:
            return f"{self.run}: {text}" if self.run else text
        return "" if kind else self.run


def run_name(ds: xr.Dataset) -> str:
    """Name of the run's folder, else the first digits of its identity."""
    source = ds.encoding.get("source")
    if source:
        return Path(str(source).rstrip("/")).name
    runs = ds.attrs.get("runs") or [[0, ""]]
    return f"run {runs[-1][1][:8]}".strip()


def run_system(*runs: xr.Dataset) -> str:
    """Corpus, shape of W, optimizer and type, as far as all runs share them."""
    facts = [_facts(run) for run in runs]
    return ", ".join(
        fact
        for at, fact in enumerate(facts[0])
        if fact and all(fact == others[at] for others in facts)
    )


def _facts(ds: xr.Dataset) -> list[str]:
    if EVALUATION in ds.attrs:
        return [ds.attrs[EVALUATION]["function"], "", "", ds.attrs[EVALUATION]["run"]]
    ds = row_vectors(ds)
    config = ds.attrs.get("config") or {}
    sizes = " × ".join(f"{ds.sizes[dim]:,}" for dim in ("token", "hidden") if dim in ds.sizes)
    parameter = ds.attrs.get("parameter")
    vectors = ds.attrs.get("vectors", None if parameter else "W")
    shown = " of ".join(filter(None, (vectors, parameter)))
    return [
        str((config.get("data") or {}).get("corpus") or ""),
        f"{shown} {sizes}" if sizes else "",
        RunAttributes.of(ds.attrs).optimizer.name,
        str(ds["W"].attrs.get("native_dtype", "")) if "W" in ds else "",
    ]


def titled_runs(runs: Sequence[xr.Dataset], labels: Sequence[str] | None = None) -> str:
    """Name and settings of a run, or the number of several runs and their common settings."""
    name = f"{len(runs)} runs" if len(runs) > 1 else (labels or [run_name(runs[0])])[0]
    return " · ".join(filter(None, (name, run_system(*runs))))


def token_names(ds: xr.Dataset) -> list[str]:
    """Text of each token, quoted where letters alone would mislead, else its id."""
    if "token_text" not in ds.coords:
        return [str(token) for token in ds["token"].values]
    return [_shown(str(text)) for text in ds["token_text"].values]


def _shown(text: str) -> str:
    plain = text.isascii() and text.isprintable() and text.strip() == text != ""
    return text if plain else ascii(text)


MOST_CURVES = 8
"""Most curves in one axes. With more runs, those that differ only in their seeds share a curve."""

_NO_SEED = frozenset({SEED})


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one curve.

    Attributes
    ----------
    label : str
        Settings that differ from other groups, ``sigma=1e-05``, and the number of several runs.
    members : tuple of int
        Their positions among the runs.
    """

    label: str
    members: tuple[int, ...]


def run_groups(runs: Sequence[xr.Dataset], labels: Sequence[str] | None = None) -> list[Group]:
    """Groups of runs that share a curve: single runs, or with many runs those of one setting.

    Parameters
    ----------
    runs : sequence of Dataset
    labels : sequence of str, optional
        Labels of the runs, by default their settings. Runs of one label share a curve.

    Raises
    ------
    InvalidArgument
        Unless there is one label per run.
    """
    if labels is not None and len(labels) != len(runs):
        raise InvalidArgument(f"got {len(labels)} labels, expected one per run ({len(runs)})")
    if len(runs) == 1:
        return [Group(label="", members=(0,))]
    attributes = [run.attrs for run in runs]
    names = [run_name(run).removesuffix(".zarr") for run in runs]
    if labels is not None:
        keys = list(labels)
    elif len(runs) <= MOST_CURVES:
        keys = run_labels(attributes, names)
    else:
        differing = differing_settings(attributes, _NO_SEED)
        keys = [repr([values[at] for values in differing.values()]) for at in range(len(runs))]
    members: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        members.setdefault(key, []).append(number)
    places = list(members.values())
    shown = list(members)
    if labels is None and len(runs) > MOST_CURVES:
        first = [group[0] for group in places]
        shown = run_labels([attributes[at] for at in first], [names[at] for at in first], _NO_SEED)
        shown = shown if len(places) > 1 else [""]
    if len(places) < len(runs):
        shown = [_counted(label, group) for label, group in zip(shown, places, strict=True)]
    return [
        Group(label=label, members=tuple(group)) for label, group in zip(shown, places, strict=True)
    ]


def _counted(label: str, members: Sequence[int]) -> str:
    number = f"{len(members)} run{'' if len(members) == 1 else 's'}"
    return f"{label} ({number})" if label else number


def mean_and_spread(
    data: Sequence[xr.Dataset], bounds: tuple[float, float]
) -> tuple[xr.Dataset, tuple[xr.Dataset, xr.Dataset]]:
    """Mean over runs of a figure's data, and a band of one standard deviation about it.

    Parameters
    ----------
    data : sequence of Dataset
        Computed data of each run.
    bounds : tuple of float
        Smallest and largest possible value, at which the band ends.

    Returns
    -------
    mean : Dataset
    band : tuple of Dataset
        Its lower and upper edge, from the deviation of a sample (n − 1). A NaN of any run makes
        the mean and the band NaN.

    Raises
    ------
    InvalidArgument
        If the runs have different steps.
    """
    try:
        joined = xr.concat(
            data, "run", data_vars="all", coords="minimal", compat="override", join="exact"
        )
    except ValueError as error:
        raise InvalidArgument(
            f"runs with different steps or populations have no mean: {error}"
        ) from error
    mean = joined.mean("run", skipna=False, keep_attrs=True)
    for name, array in data[0].data_vars.items():
        mean[name] = mean[name].transpose(*array.dims)
    spread = joined.std("run", ddof=1, skipna=False)
    low, high = ((mean + sign * spread).clip(*bounds) for sign in (-1, 1))
    return mean, (low, high)


@dataclass(frozen=True, kw_only=True)
class SeveralRuns:
    """How a figure shows several runs.

    Attributes
    ----------
    overlays : bool
        True if one axes shows several runs; else each run has a panel.
    averages : bool
        True if it can show the mean and spread of many runs.
    bounds : tuple of float
        Smallest and largest possible value, at which a spread ends.
    between : bool
        True if it compares runs with the first.
    """

    overlays: bool = False
    averages: bool = False
    bounds: tuple[float, float] = (0, math.inf)
    between: bool = False


PANELS = SeveralRuns()
CURVES = SeveralRuns(overlays=True)
MEANS = SeveralRuns(overlays=True, averages=True)
