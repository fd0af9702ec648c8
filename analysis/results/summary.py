"""Summary of a run at its first and last step, and tables of summaries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.motion.collective import per_population
from trajstore.analysis.motion.vectors import displacement, grad_norms
from trajstore.analysis.optimizer.lost_updates import lost_by_parameter
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array
from trajstore.analysis.scan.input_checks import hold_only_changes
from trajstore.analysis.scan.result_variables import ResultVariable, statistics, with_mostly_dead
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations import populations, row_vectors
from trajstore.store.reading.run_attributes import holds_all_parameters
from trajstore.values.norms import vector_norm

_FACTS = {"centroid_norm": ResultVariable("f8", "norm of the centroid")}
_STATISTICS = ("mean", "min", "max", "median")


def _table(da: xr.DataArray) -> xr.DataArray:
    made = statistics(da, np.empty(0))
    return made[list(_STATISTICS)].to_dataarray("statistic")


def _centroid_norm(now: Array) -> dict[str, Array]:
    return {"centroid_norm": vector_norm(now.astype(np.float64).sum(0) / len(now))}


def _of_ends(array: xr.DataArray, dim: str = "when") -> xr.DataArray:
    """The first and the last row along another dimension."""
    return array.isel(step=[0, -1]).rename(step=dim).drop_vars(dim)


@checks_types
def summary(ds: xr.Dataset, lattice: str = "native") -> xr.Dataset:
    """Gradients, displacement, centroid, logits and loss at the first and last step.

    Parameters
    ----------
    ds : Dataset
        A run with at least one step. Results that need missing variables are left out; without W,
        but with ``delta`` of every step, this is ``centroid_norm``.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type for ``displacement`` and ``centroid_norm``. A run with ``cells`` and
        without W has the lattice of bfloat16.

    Returns
    -------
    Dataset
        Along ``when`` (first and last training step, with the coordinate ``when_step``):
        ``grad_norms`` (statistic, when, population) and ``loss`` (when).
        ``max_dead_grad_norm``: the largest gradient norm of any dead token at any step, if
        ``is_dead`` is recorded. ``displacement`` (statistic, population): of the last row from the
        first. ``centroid_norm`` (state, population): at the first and last row. ``logits``
        (logit_statistic): at the first step. ``param_update_lost`` (when, parameter): recorded, or
        computed in a run that holds all parameters. The coordinate ``population_tokens`` is the
        number of tokens in each population.

    Raises
    ------
    InvalidArgument
        If no training step is recorded, the lattice is unknown, or W holds values that its
        ``native_dtype`` does not.

    Examples
    --------
    >>> summary(ds).grad_norms.sel(when="last", statistic="mean").to_series().round(3).to_dict()
    {'dead': 0.008, 'live': 0.093, 'all': 0.015}
    """
    ds = row_vectors(ds)
    if lattice != "native" or ("W" not in ds and "cells" in ds):
        scan = Scan(ds)
        points = scan.points(lattice)
        ds = ds.assign(
            W=scan.wrap(points.blocks, points.variable, dims=("step", "token", "hidden"))
        )
    if not hold_only_changes(ds):
        input_checks.require_variables(ds, "W")
    ds = with_mostly_dead(ds)
    names, groups = populations(ds)
    steps = ds["step"].values
    if steps.size < 2:
        raise InvalidArgument(
            f"got a run with {steps.size} rows, expected at least 2 (one training step)"
        )
    trained = [1, steps.size - 1]
    parts: dict[str, xr.DataArray] = {}
    if "grad" in ds:
        norms = grad_norms(Scan(ds.isel(step=slice(1, None))))
        parts["grad_norms"] = _table(_of_ends(norms))
        if "dead" in names:
            dead = groups[names.index("dead")].nonzero()[0]
            parts["max_dead_grad_norm"] = (
                norms.isel(token=dead).max(skipna=False) if dead.size else xr.DataArray(np.nan)
            )
    for name in ("loss", "param_update_lost"):
        if name in ds:
            parts[name] = _of_ends(ds[name].isel(step=slice(1, None)))
    if "param_update_lost" not in ds and holds_all_parameters(ds):
        parts["param_update_lost"] = lost_by_parameter(ds, trained).rename(row="when")
    parts["displacement"] = _table(displacement(Scan(ds)).isel(step=-1, drop=True))
    if "W" in ds:
        ends = Scan(ds.isel(step=[0, -1]))
        norm = per_population(ends, None, _centroid_norm, _FACTS, motion=False)["centroid_norm"]
        parts["centroid_norm"] = _of_ends(norm, "state")
    if "logits" in ds:
        logits = ds["logits"].isel(step=1, drop=True).astype(np.float64)
        of_logits = {
            "min": logits.min(),
            "max": logits.max(),
            "range": logits.max() - logits.min(),
            "std": logits.std(ddof=1),
        }
        parts["logits"] = xr.concat(list(of_logits.values()), dim="logit_statistic").assign_coords(
            logit_statistic=list(of_logits)
        )
    return xr.Dataset(
        {name: part.drop_attrs() for name, part in parts.items()},
        coords={
            "when": ["first", "last"],
            "when_step": ("when", steps[trained]),
            "state": ["first", "last"],
            "state_step": ("state", steps[[0, -1]]),
            "population": names,
            "population_tokens": ("population", groups.sum(-1)),
        },
    )


Table = tuple[str, list[str], list[list[str]]]
"""Title, columns and rows."""

_COLUMNS = ["mean", "median", "min", "max"]


def tokens_of(facts: xr.Dataset) -> dict[str, int]:
    """Number of tokens of each population, by name."""
    names = map(str, facts["population"].values)
    return dict(zip(names, facts["population_tokens"].values.tolist(), strict=True))


def summary_tables(facts: xr.Dataset, number: str) -> Iterator[Table]:
    """Tables of the gradients, displacement, centroid and lost updates of a run.

    Parameters
    ----------
    facts : Dataset
        A computed `trajstore.analysis.summary`.
    number : str
        Format of norms, such as ``.4e``.
    """

    def statistics(name: str, **at: Any) -> list[str]:
        return [f"{value:{number}}" for value in facts[name].sel(statistic=_COLUMNS, **at).values]

    labels = {name: f"{name} ({size:,})" for name, size in tokens_of(facts).items() if size}
    whens = zip(("first", "last"), facts["when_step"].values.tolist(), strict=True)
    of_step = {step: when for when, step in whens}  # of one trained step, only the last
    trained = {when: f"{step:,}" for step, when in of_step.items()}
    if "grad_norms" in facts:
        rows = [
            [label, step, *statistics("grad_norms", population=name, when=when)]
            for name, label in labels.items()
            for when, step in trained.items()
        ]
        yield "Gradient norms (L2)", ["tokens", "step", *_COLUMNS], rows
    first, last = (f"{step:,}" for step in facts["state_step"].values)
    rows = [[label, *statistics("displacement", population=name)] for name, label in labels.items()]
    yield f"Displacement from step {first} to {last}", ["tokens", *_COLUMNS], rows
    if "centroid_norm" in facts:  # a run of changes alone has no positions
        rows = [
            [label, *(f"{norm:.6f}" for norm in facts["centroid_norm"].sel(population=name).values)]
            for name, label in labels.items()
        ]
        yield "Norm of the centroid", ["tokens", f"step {first}", f"step {last}"], rows
    if "param_update_lost" in facts:
        lost = facts["param_update_lost"].sel(when=[*trained]).transpose("parameter", "when")
        rows = [
            [str(name), *("" if math.isnan(value) else f"{value:.2%}" for value in values)]
            for name, values in zip(lost["parameter"].values, lost.values, strict=True)
        ]
        title = "Lost updates: fraction of elements with a gradient that the step did not change"
        yield title, ["parameter", *(f"step {step}" for step in trained.values())], rows


def summary_table(summaries: Mapping[str, xr.Dataset]) -> Table:
    """Title, columns and rows of a table of runs.

    Parameters
    ----------
    summaries : mapping
        Computed `trajstore.analysis.summary` of each run, by its label.

    Returns
    -------
    title : str
    columns : list of str
        Run, last step, loss at the first and last step. Then the mean gradient norm at the last
        step and the mean displacement, for each population with tokens (dead and live, or all).
    rows : list of list of str
        Values that were not recorded are empty.
    """
    names = dict.fromkeys(
        name for facts in summaries.values() for name, number in tokens_of(facts).items() if number
    )
    if len(names) > 1:
        names.pop("all", None)
    kinds = {"|grad|": ("grad_norms", {"when": "last"}), "displacement": ("displacement", {})}
    columns = [f"{kind} {name}" for kind in kinds for name in names]
    rows = []
    for label, facts in summaries.items():
        losses = [f"{loss:.4f}" for loss in facts["loss"].values] if "loss" in facts else ["", ""]
        values = [
            facts[variable].sel({"population": name, "statistic": "mean", **at}).item()
            if variable in facts and name in facts["population"].values
            else None
            for variable, at in kinds.values()
            for name in names
        ]
        rows.append(
            [
                label,
                f"{int(facts['state_step'][-1]):,}",
                *losses,
                *("" if value is None else f"{value:.4e}" for value in values),
            ]
        )
    title = "Loss; mean gradient norm at the last step; mean displacement from the first row"
    return title, ["run", "last step", "first loss", "last loss", *columns], rows
