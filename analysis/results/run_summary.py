"""Summary of a run at its first and last step."""

from __future__ import annotations

import numpy as np
import xarray as xr

from trajstore.analysis.motion.collective import per_population
from trajstore.analysis.motion.norms import displacement, grad_norms
from trajstore.analysis.optimizer.lost_by_parameter import lost_by_parameter
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array
from trajstore.analysis.scan.input_checks import Fact, hold_only_changes
from trajstore.analysis.scan.population_statistics import statistics, with_mostly_dead
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations import populations, row_vectors
from trajstore.store.reading.run_info import holds_all_parameters
from trajstore.values.norms import vector_norm

_FACTS = {"centroid_norm": Fact("f8", "norm of the centroid")}
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
        input_checks.variables(ds, "W")
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
