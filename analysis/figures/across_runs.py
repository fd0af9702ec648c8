"""Several runs in one figure: the runs of each curve, their mean and spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import xarray as xr

from trajstore.analysis.figures.style import run_name
from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_attributes import SEED, differing_settings, run_labels

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
