"""Several runs: one lazy Dataset along ``run``, and a table of their facts and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.schema import OF_RUN
from trajstore.store.reading.open_run import open_run
from trajstore.store.reading.run_attributes import (
    SEED,
    differing_settings,
    setting_text,
    settings,
    short_names,
)
from trajstore.store.reading.run_info import Paths, run_paths, run_status
from trajstore.store.storage.remote_path import RunPath
from trajstore.units import format_bytes

_SHOWN = 5  # differing names that a message lists


@checks_types
def open_runs(paths: Paths, *, join: Literal["exact", "inner"] = "exact") -> xr.Dataset:
    """Open many runs as one lazy Dataset, along the dimension ``run``.

    Parameters
    ----------
    paths : path-like or iterable of path-like
        Runs, patterns such as ``"runs/*.zarr"``, or a folder of runs. The
        runs of a pattern or folder are sorted by name, with numbers in numeric order.
    join : {'exact', 'inner'}
        Treatment of runs with different steps or variables. ``'exact'`` raises an error;
        ``'inner'`` keeps the steps and variables that all runs have.

    Returns
    -------
    Dataset
        The first dimension is ``run``: ``W`` is (run, step, token, hidden). The coordinate ``run``
        holds the names of the folders. Every setting in which the configurations differ is a
        coordinate along ``run``, with its short name (``sigma``), or with its full name if the
        short one is ambiguous (``optimizer.name``). Token coordinates that differ between runs,
        such as ``is_dead`` for different texts, have the dimension ``run``, too. The attributes
        are those that all runs share. ``of_run`` holds the other attributes of each run, which the
        functions of `analysis` use.

    Raises
    ------
    RunNotFound
        If a path does not exist, or no run matches a pattern.
    InvalidArgument
        If tokens or hidden dimensions differ, or, with ``'exact'``, steps or variables. The message
        states the difference.
    FormatError, MissingExtra
        See `trajstore.open_run`.

    Examples
    --------
    >>> import shutil
    >>> _ = shutil.copytree("gatsby.zarr", "other.zarr")
    >>> runs = open_runs("*.zarr")
    >>> runs.run.values.tolist(), runs.W.dims
    (['gatsby', 'other'], ('run', 'step', 'token', 'hidden'))
    >>> runs.traj.freeze().last_motion.sel(token=ord("e")).values
    array([13, 13])
    """
    opened = {path: open_run(path) for path in run_paths(paths)}
    names = _names(list(opened))
    runs = dict(zip(names, opened.values(), strict=True))
    _check_same(runs, "token")
    _check_same(runs, "hidden")
    runs = _with_common(runs, join)
    combined = xr.concat(
        [run.drop_attrs(deep=False) for run in runs.values()],
        "run",
        data_vars="all",
        coords="different",
        compat="equals",
        join="exact",
        combine_attrs="drop_conflicts",
    )
    shared = _shared([run.attrs for run in runs.values()])
    of_run = {name: _distinct(run, shared, combined) for name, run in runs.items()}
    combined = combined.assign_coords(run=("run", np.array(names)))
    return combined.assign_coords(_swept(combined, list(runs.values()))).assign_attrs(
        {**shared, OF_RUN: of_run}
    )


def _names(paths: Sequence[str]) -> list[str]:
    """Names of the folders, or full paths if two names are equal."""
    short = [Path(path.rstrip("/")).name.removesuffix(".zarr") for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _check_same(runs: dict[str, xr.Dataset], dim: str) -> None:
    """Raise an error unless all runs have the same coordinate along a dimension."""
    (first, reference), *others = runs.items()
    for name, run in others:
        if run.sizes.get(dim) != reference.sizes.get(dim):
            what = f"lengths {run.sizes.get(dim)} and {reference.sizes.get(dim)} along {dim}"
        elif dim in run.coords and not np.array_equal(run[dim].values, reference[dim].values):
            what = f"different {dim}s"
        else:
            continue
        raise InvalidArgument(
            f"the runs {name} and {first} have {what}, so they cannot be opened together; open "
            "each one alone, and select what they share"
        )


def _with_common(runs: dict[str, xr.Dataset], join: str) -> dict[str, xr.Dataset]:
    """Runs, reduced to common steps and variables."""
    (first, reference), *others = runs.items()
    steps, variables = reference["step"].values, list(reference.data_vars)
    for name, run in others:
        common = np.intersect1d(steps, run["step"].values)
        there = [variable for variable in variables if variable in run]
        if join == "exact":
            _refuse_others(name, run, first, reference)
        steps, variables = common, there
    if not steps.size or not variables:
        what = "variable" if steps.size else "step"
        raise InvalidArgument(f"these runs have no {what} in common; open each one alone")
    return {
        name: run[variables].isel(step=np.flatnonzero(np.isin(run["step"].values, steps)))
        if not np.array_equal(run["step"].values, steps)
        else run[variables]
        for name, run in runs.items()
    }


def _refuse_others(name: str, run: xr.Dataset, first: str, reference: xr.Dataset) -> None:
    differing = set(map(str, run.data_vars)) ^ set(map(str, reference.data_vars))
    if differing:
        what = f"{_listed(sorted(differing))} {'is' if len(differing) == 1 else 'are'} in only one"
    elif not np.array_equal(run["step"].values, reference["step"].values):
        what = f"{name} has {_span(run)}, {first} {_span(reference)}"
    else:
        return
    raise InvalidArgument(
        f"the runs {name} and {first} differ: {what}; to use what all runs have, open them "
        "with join='inner' (--common-steps)"
    )


def _span(run: xr.Dataset) -> str:
    steps = run["step"].values
    if not steps.size:
        return "no steps"
    return f"{steps.size:,} steps from {steps[0]} to {steps[-1]}"


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shared(attributes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Attributes that are equal in all runs."""
    first, *others = attributes
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def _distinct(run: xr.Dataset, shared: dict[str, Any], combined: xr.Dataset) -> dict[str, Any]:
    """Source, attributes and attributes of variables that belong to this run only."""
    variables = {
        str(name): dict(variable.attrs)
        for name, variable in run.variables.items()
        if variable.attrs != combined.variables[name].attrs
    }
    return {
        "source": run.encoding.get("source"),
        "attributes": {key: value for key, value in run.attrs.items() if key not in shared},
        "variables": variables,
    }


def _swept(combined: xr.Dataset, runs: Sequence[xr.Dataset]) -> dict[str, Any]:
    """Coordinates along run: the settings in which the configurations differ."""
    attributes = [run.attrs for run in runs]
    differing = differing_settings(attributes)
    coordinates = {}
    for field, short in short_names(attributes, differing).items():
        whole = field.partition(".")[2]
        name = whole if short in combined.variables or short in combined.dims else short
        coordinates[name] = ("run", _values(differing[field]), {"long_name": whole})
    return coordinates


def _values(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Numbers as numbers, other values as text."""
    if all(isinstance(value, int | float) for value in values):
        return np.array(values)
    return np.array([setting_text(value) for value in values])


_MOST = 4  # columns of settings


def final_loss(run: RunPath) -> float | None:
    """Loss of the last row; None if there is none, or if it is not finite.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at the path.
    """
    ds = open_run(run, chunks=None)
    if "loss" not in ds or not ds.sizes["step"]:
        return None
    loss = float(ds["loss"][-1])
    return loss if math.isfinite(loss) else None


def run_table(information: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs.

    Parameters
    ----------
    information : mapping
        For the name of each run, `trajstore.store.reading.run_info.information` and
        ``final_loss``.

    Returns
    -------
    columns : list of str
        Run, status, rows, last step, seed, up to four settings that differ, loss, size on disk.
    rows : list of list of str
    """
    runs = list(information.values())
    differing = differing_settings(runs)
    shown = [name for name in differing if name != SEED][:_MOST]
    values = {name: [setting_text(value) for value in differing[name]] for name in shown}
    seeds = [settings(run).get(SEED) for run in runs]
    titles = list(short_names(runs, shown).values())
    rows = [
        [
            name,
            run_status(facts),
            f"{facts['committed_rows']:,}",
            f"{facts['steps']['last']:,}" if facts["steps"] else "",
            "" if seed is None else str(seed),
            *(values[setting][at] for setting in shown),
            "" if facts["final_loss"] is None else f"{facts['final_loss']:.4f}",
            format_bytes(facts["bytes_on_disk"]),
        ]
        for at, ((name, facts), seed) in enumerate(zip(information.items(), seeds, strict=True))
    ]
    return ["run", "status", "rows", "last step", "seed", *titles, "final loss", "on disk"], rows
