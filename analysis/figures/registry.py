"""All kinds of figures by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xarray as xr

from trajstore.analysis.figures.cloud import centroid, clusters, spectrum
from trajstore.analysis.figures.densities import lattice_displacement, speed_density
from trajstore.analysis.figures.divergence import divergence
from trajstore.analysis.figures.figure import Figure
from trajstore.analysis.figures.freezing import freeze, heatmap, last_motion, lifecycle
from trajstore.analysis.figures.layers import layers
from trajstore.analysis.figures.motion import (
    autocorrelation,
    bulk_thermal,
    discontinuities,
    displacement,
    grad_norms,
    speed,
)
from trajstore.analysis.figures.regimes import freeze_cause, regimes
from trajstore.analysis.figures.training import logit_stats, moment_sizes, moments
from trajstore.analysis.figures.trajectory import moment_tracks, sky, trajectory
from trajstore.analysis.figures.variables import loss, param_update_lost, variable
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import EVALUATION, variables_of


class Figures(dict[str, Figure]):
    """Figures by name. A hyphen finds the same figure as an underscore."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        super().__init__((figure.name, figure) for figure in figures)

    def __missing__(self, name: str) -> Figure:
        for figure in self.values():
            if _spelled(figure.name) == _spelled(name):
                return figure
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _spelled(name) in map(_spelled, self)


def _spelled(name: str) -> str:
    return name.replace("-", "_")


FIGURES = Figures(
    (
        loss,
        grad_norms,
        displacement,
        speed,
        freeze,
        last_motion,
        lifecycle,
        regimes,
        freeze_cause,
        lattice_displacement,
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
        logit_stats,
        param_update_lost,
        layers,
        discontinuities,
        divergence,
    )
)
"""Figures of ``trajstore plot`` and ``ds.traj.plot``, in the order of a sheet."""


def figures_of(ds: xr.Dataset) -> Figures:
    """Figures of a Dataset by name: those of a run, and a figure of each variable of no run.

    The results of `trajstore evaluate` have only the latter.
    """
    known = Figures(() if EVALUATION in ds.attrs else FIGURES.values())
    recorded = {*known, *variables_of(ds.attrs)}
    others = [str(name) for name in ds.data_vars if name not in recorded]
    return Figures([*known.values(), *(variable(name, ds) for name in others)])


def figures_named(names: Sequence[str], runs: int = 1, known: Figures = FIGURES) -> list[Figure]:
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
    wanted = (known[name] for name in (every if "all" in names else names))
    return list({figure.name: figure for figure in wanted}.values())
