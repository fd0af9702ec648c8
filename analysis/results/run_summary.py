"""Summary of a run at its first and last step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.norms import displacement, grad_norms
from trajstore.analysis.optimizer.lost_by_parameter import lost_by_parameter
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.input_checks import hold_only_changes
from trajstore.analysis.scan.population_statistics import statistics, with_mostly_dead
from trajstore.analysis.scan.scan import Scan
from trajstore.argument_types import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations.masks import populations
from trajstore.populations.row_vectors import row_vectors
from trajstore.store.reading.recorded_parameters import holds_all_parameters
from trajstore.values.token_norms import vector_norm

__all__ = ["summary"]

_STATISTICS = ("mean", "min", "max", "median")


def _table(da: xr.DataArray) -> xr.DataArray:
    made = statistics(da, np.empty(0))
    return made[list(_STATISTICS)].to_dataarray("statistic")


def _centroid_norms(W: npt.NDArray[Any], groups: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Norm of the mean vector of each group: (row, token, hidden) to (row, population)."""
    wide = W.astype(np.float64)
    with np.errstate(invalid="ignore"):
        centroids = [
            wide[:, group].sum(1) / group.sum()
            if group.any()
            else np.full(wide[:, 0].shape, np.nan)
            for group in groups
        ]
    return np.stack([vector_norm(centroid) for centroid in centroids], -1)


def _ends(ds: xr.Dataset, groups: npt.NDArray[np.bool_], populations: int) -> xr.DataArray:
    """Norm of the centroids at the first and the last row, (state, population)."""
    ends = ds["W"].isel(step=[0, -1])
    result: xr.DataArray = xr.apply_ufunc(
        _centroid_norms,
        ends.chunk({"step": -1, "token": -1}) if ends.chunks is not None else ends,
        kwargs={"groups": groups},
        input_core_dims=[["step", "token", "hidden"]],
        output_core_dims=[["state", "population"]],
        dask="parallelized",
        output_dtypes=[np.float64],
        dask_gufunc_kwargs={"output_sizes": {"state": 2, "population": populations}},
    )
    return result


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
        ends = norms.isel(step=[0, -1]).rename(step="when").drop_vars("when")
        parts["grad_norms"] = _table(ends)
        if "dead" in names:
            dead = groups[names.index("dead")].nonzero()[0]
            parts["max_dead_grad_norm"] = (
                norms.isel(token=dead).max(skipna=False) if dead.size else xr.DataArray(np.nan)
            )
    if "loss" in ds:
        parts["loss"] = ds["loss"].isel(step=trained).rename(step="when").drop_vars("when")
    if "param_update_lost" in ds:
        recorded = ds["param_update_lost"].isel(step=trained)
        parts["param_update_lost"] = recorded.rename(step="when").drop_vars("when")
    elif holds_all_parameters(ds):
        parts["param_update_lost"] = lost_by_parameter(ds, trained).rename(row="when")
    parts["displacement"] = _table(displacement(Scan(ds)).isel(step=-1, drop=True))
    if "W" in ds:
        parts["centroid_norm"] = _ends(ds, groups, len(names))
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
