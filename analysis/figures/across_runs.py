"""Several runs in one figure: which curve is of which of them, and their mean and spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xarray as xr

from trajstore.analysis.figures.titles import run_name
from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_settings import SEED, differing_settings, run_labels

__all__ = ["MOST_CURVES", "Group", "mean_and_spread", "run_groups"]

MOST_CURVES = 8
"""Runs up to which each has a curve of its own; of more, those that differ in their seeds only
have one. So many have a place in one axes."""

_NO_SEED = frozenset({SEED})


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that one curve is of.

    Attributes
    ----------
    label : str
        What they have in common and others have not, ``sigma=1e-05``; of several also how many.
    members : tuple of int
        Their places among the runs.
    """

    label: str
    members: tuple[int, ...]


def run_groups(runs: Sequence[xr.Dataset], labels: Sequence[str] | None = None) -> list[Group]:
    """Curves of several runs: each run by itself, or if they are many, those of one setting.

    Parameters
    ----------
    runs : sequence of Dataset
    labels : sequence of str, optional
        Of the runs, in place of their settings; those of one label have one curve.

    Raises
    ------
    InvalidArgument
        If there are not as many labels as runs.
    """
    if labels is not None and len(labels) != len(runs):
        raise InvalidArgument(f"got {len(labels)} labels of {len(runs)} runs; give one for each")
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
    """Mean over runs of what a figure shows, and the band of one standard deviation about it.

    Parameters
    ----------
    data : sequence of Dataset
        Computed, one for each of several runs.
    bounds : tuple of float
        Least and largest value that there can be: the band ends there.

    Returns
    -------
    mean : Dataset
    band : tuple of Dataset
        Its lower and upper edge. The deviation is that of a sample (with n − 1). A NaN of any run
        is one of the mean and the band.

    Raises
    ------
    InvalidArgument
        If the runs do not have the same steps.
    """
    try:
        joined = xr.concat(
            data, "run", data_vars="all", coords="minimal", compat="override", join="exact"
        )
    except ValueError as error:
        raise InvalidArgument(
            f"these runs have no mean, as they have different steps or populations: {error}"
        ) from error
    mean = joined.mean("run", skipna=False, keep_attrs=True)
    for name, array in data[0].data_vars.items():
        mean[name] = mean[name].transpose(*array.dims)
    spread = joined.std("run", ddof=1, skipna=False)
    low, high = ((mean + sign * spread).clip(*bounds) for sign in (-1, 1))
    return mean, (low, high)
