"""All kinds of figures by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xarray as xr

from trajstore.analysis.figures.cloud import centroid, clusters, spectrum
from trajstore.analysis.figures.densities import hops, speed_density
from trajstore.analysis.figures.divergence import divergence
from trajstore.analysis.figures.figure import Figure
from trajstore.analysis.figures.freezing import freeze, heatmap, last_motion, lifecycle
from trajstore.analysis.figures.motion import (
    autocorrelation,
    bulk_thermal,
    discontinuities,
    displacement,
    gradients,
    speed,
)
from trajstore.analysis.figures.regimes import causes, regimes
from trajstore.analysis.figures.training import logits, moment_sizes, moments
from trajstore.analysis.figures.trajectory import moment_tracks, sky, trajectory
from trajstore.analysis.figures.variables import loss, parameters, variable
from trajstore.errors import InvalidArgument
from trajstore.nearest_name import did_you_mean
from trajstore.schema import EVALUATION, VARIABLES

__all__ = ["FIGURES", "figures_named", "figures_of"]

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        loss,
        gradients,
        displacement,
        speed,
        freeze,
        last_motion,
        lifecycle,
        regimes,
        causes,
        hops,
        heatmap,
        bulk_thermal,
        speed_density,
        centroid,
        trajectory,
        sky,
        spectrum,
        autocorrelation,
        moments,
        moment_sizes,
        moment_tracks,
        clusters,
        logits,
        parameters,
        discontinuities,
        divergence,
    )
}
"""Figures of ``trajstore plot`` and ``ds.traj.plot``, in the order of a sheet."""


def figures_of(ds: xr.Dataset) -> dict[str, Figure]:
    """Figures of a Dataset by name: those of a run, and a figure of each variable of no run.

    The results of `trajstore evaluate` have only the latter.
    """
    known = {} if EVALUATION in ds.attrs else FIGURES
    others = [str(name) for name in ds.data_vars if name not in VARIABLES and name not in known]
    return {**known, **{name: variable(name, ds) for name in others}}


def figures_named(
    names: Sequence[str], runs: int = 1, known: Mapping[str, Figure] = FIGURES
) -> list[Figure]:
    """Figures of these names, each once; ``all`` means every known figure of so many runs.

    Raises
    ------
    InvalidArgument
        For an unknown name, or without any.
    """
    unknown = [name for name in names if name not in known and name != "all"]
    unknown_names = [f"{name!r}{did_you_mean(name, ['all', *known])}" for name in unknown]
    if unknown or not names:
        raise InvalidArgument(
            f"got {', '.join(unknown_names) or 'no figure'}, "
            f"expected one or more of all, {', '.join(known)}"
        )
    every = [name for name, figure in known.items() if runs > 1 or not figure.between]
    wanted = dict.fromkeys(every if "all" in names else names)
    return [known[name] for name in wanted]
