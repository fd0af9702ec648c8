"""The part of a run that stays in memory: quantities of many rows and many tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.cloud.shape import pca, scores_along_axes
from trajstore.analysis.figures.figure import Options, compute_together
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.norms import displacement, grad_norms
from trajstore.analysis.motion.ulp_motion import regimes
from trajstore.analysis.motion.unchanged import MIN_UNCHANGED
from trajstore.analysis.motion.update_heatmap import pool_heatmap
from trajstore.analysis.optimizer.freeze_causes import freeze_cause
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.population_statistics import by_population
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.scan.task_progress import progress_of_tasks
from trajstore.byte_sizes import format_bytes
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.populations.masks import populations

__all__ = ["RunHistory", "grown", "prepare"]

BAND = (0.05, 0.95)
POSITION_BYTES = 512 << 20
MAP_BYTES = 2 << 30

Array = npt.NDArray[Any]
Report = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as it was read, small enough for memory.

    Attributes
    ----------
    runs : list
        Identities of the run and of the runs it continues, with their first blocks.
    steps : ndarray of int64, (row,)
    every : int
        Positions are in memory for rows 0, `every`, 2·`every`, …
    plane : Dataset
        ``basis`` and ``basis_mean`` of `analysis.pca`, ``share`` of the variance along each axis.
    plane_rows : int
        Rows that the plane was computed from.
    position : DataArray, float32 (step, token, component)
        Positions at these rows.
    regime : DataArray, int8 (step, token)
        Result of `analysis.regimes`, for all rows after the first.
    cause : DataArray, int8 (step, token), or None
        Result of `analysis.freeze_cause`; None if not available.
    last_motion, moves : DataArray, int64 (token)
        Results of `analysis.freeze`.
    layers : Dataset
        Result of `analysis.heatmap`.
    curves : Dataset
        ``loss`` (step); ``gradient`` and ``displacement`` (step, population, statistic): mean,
        5 % and 95 % of the tokens; ``unchanged`` and ``frozen`` (step, population). As available.
    populations : list of str
        Populations with curves.
    unknown : mapping
        Reason for each quantity that is not available, by name.
    """

    runs: list[Any]
    steps: npt.NDArray[np.int64]
    every: int
    plane: xr.Dataset
    plane_rows: int
    position: xr.DataArray
    regime: xr.DataArray
    cause: xr.DataArray | None
    last_motion: xr.DataArray
    moves: xr.DataArray
    layers: xr.Dataset
    curves: xr.Dataset
    populations: list[str]
    unknown: Mapping[str, str]

    @property
    def rows(self) -> int:
        """Number of rows of the run."""
        return int(self.steps.size)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        causes = 0 if self.cause is None else self.cause.nbytes
        return self.position.nbytes + self.regime.nbytes + causes + self.curves.nbytes

    def rank(self, at: int) -> int:
        """Rank of a token in the order of the last changes."""
        order = np.argsort(self.last_motion.values, kind="stable")
        return int(np.flatnonzero(order == at)[0])


def prepare(ds: xr.Dataset, report: Report | None = None) -> RunHistory:
    """Read a run block by block: once for the plane, once for everything else.

    Parameters
    ----------
    ds : Dataset
        A run with ``W``, opened with dask.
    report : callable, optional
        Called with the number of finished tasks and of all tasks.

    Raises
    ------
    VariableNotRecorded
        If the run has no W.
    InvalidArgument
        If there are fewer than two rows, or too many for two bytes per token and step.
    """
    input_checks.variables(ds, "W")
    rows, tokens = ds.sizes["step"], ds.sizes["token"]
    if rows < 2:
        raise InvalidArgument(f"explore needs at least 2 rows, got {rows}; wait for more rows")
    if 2 * rows * tokens > MAP_BYTES:
        raise InvalidArgument(
            f"explore keeps two bytes per token and step: {format_bytes(2 * rows * tokens)} for "
            f"{rows:,} rows of {tokens:,} tokens, expected at most {format_bytes(MAP_BYTES)}; "
            "export a smaller run with trajstore export --steps or --tokens"
        )
    with progress_of_tasks(report):
        (made,) = compute_together(
            [pca(Scan(ds), components=2)[["basis", "basis_mean", "spectrum"]]]
        )
        plane = made.assign(share=made["spectrum"] / made["spectrum"].sum())
        found, unknown = _measure(ds, plane, 0)
    found["position"] = found["position"].isel(step=slice(None, None, _every(rows, tokens)))
    return RunHistory(
        runs=ds.attrs.get("runs") or [],
        steps=ds["step"].values.astype(np.int64),
        every=_every(rows, tokens),
        plane=plane,
        plane_rows=rows,
        position=found["position"],
        regime=found["regime"],
        cause=found.get("cause"),
        last_motion=found["last_motion"],
        moves=found["moves"],
        layers=pool_heatmap(found["regime"], found["last_motion"]).compute(),
        curves=_with_frozen(_curves(found), found["last_motion"], ds),
        populations=Options().populations(Scan(ds)),
        unknown=unknown,
    )


def grown(history: RunHistory, ds: xr.Dataset, report: Report | None = None) -> RunHistory:
    """Update the history of a run that may have grown, been cut, or been replaced.

    Only new rows are read, and projected onto the same plane. Everything is computed again when
    the run has twice the rows of the plane.

    Parameters
    ----------
    history : RunHistory
    ds : Dataset
        The run, opened again.
    report : callable, optional
        Called with the number of finished tasks and of all tasks.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        As `prepare`.
    """
    rows = ds.sizes["step"]
    if not _continues(history, ds) or rows >= 2 * history.plane_rows:
        return prepare(ds, report)
    if rows == history.rows:
        return history
    with progress_of_tasks(report):
        found, unknown = _measure(ds, history.plane, history.rows)
    if unknown.keys() != history.unknown.keys():  # the rule needs the first step
        return prepare(ds, report)
    every = max(history.every, _every(rows, ds.sizes["token"]))
    old = history.position.isel(step=slice(None, None, every // history.every))
    new = found["position"].isel(step=slice(-history.rows % every, None, every))
    regime = _joined(history.regime, found["regime"])
    last = found["last_motion"]
    last_motion = last.where(last >= 0, history.last_motion)
    curves = xr.concat([history.curves.drop_vars("frozen"), _curves(found)], "step", join="exact")
    return replace(
        history,
        runs=ds.attrs.get("runs") or [],
        steps=ds["step"].values.astype(np.int64),
        every=every,
        position=_joined(old, new),
        regime=regime,
        cause=None if history.cause is None else _joined(history.cause, found["cause"]),
        last_motion=last_motion,
        moves=history.moves + found["moves"],
        layers=pool_heatmap(regime, last_motion).compute(),
        curves=_with_frozen(curves, last_motion, ds),
    )


def _every(rows: int, tokens: int) -> int:
    """Power of two, so that rows kept of a longer run were kept before."""
    every = 1
    while -(-rows // every) * tokens * 8 > POSITION_BYTES and every < rows:
        every *= 2
    return every


def _continues(history: RunHistory, ds: xr.Dataset) -> bool:
    """True if the rows in memory are still rows of the run."""
    earlier = [part for part in ds.attrs.get("runs") or [] if part[0] < history.rows]
    steps = ds["step"].values[: history.rows]
    return earlier == history.runs and np.array_equal(steps, history.steps)


def _joined(old: xr.DataArray, new: xr.DataArray) -> xr.DataArray:
    return xr.concat([old, new], "step", join="exact", coords="minimal", compat="override")


def _measure(
    ds: xr.Dataset, plane: xr.Dataset, first: int
) -> tuple[dict[str, xr.DataArray], dict[str, str]]:
    """Computed quantities of the rows from `first` on, and the reason for missing ones."""
    whole = Scan(ds, {"native": ("regime", "moved")})
    since = Scan(ds.isel(step=slice(first - 1, None)), {"native": ("regime", "moved")})
    pairs = whole if first == 0 else since
    # The displacement from the first row needs that row, too.
    far = whole if first == 0 else Scan(ds.isel(step=np.r_[0, first : ds.sizes["step"]]))
    rest = freeze(pairs)
    shown = Options().populations(whole)
    lazy: dict[str, xr.DataArray] = {
        "regime": regimes(pairs)["regime"],
        "last_motion": rest["last_motion"],
        "moves": rest["moves"],
        "unchanged": rest["unchanged_fraction"].sel(population=shown),
    }
    unknown: dict[str, str] = {}
    questions: dict[str, Callable[[], xr.DataArray]] = {
        "cause": lambda: freeze_cause(pairs),
        "gradient": lambda: _band(grad_norms(whole), shown),
        "displacement": lambda: _band(displacement(far), shown),
        "loss": lambda: _scalar(ds, "loss"),
    }
    position = scores_along_axes(whole, plane).astype(np.float32)
    for name, question in questions.items():
        try:
            lazy[name] = question()
        except (VariableNotRecorded, InvalidArgument) as error:
            unknown[name] = str(error)
    lazy["position"] = position
    if first:
        new = whole.steps[first:]
        lazy = {
            name: array.sel(step=new) if "step" in array.dims else array
            for name, array in lazy.items()
        }
    values: dict[str, xr.DataArray] = {}
    # Causes need four matrices at once: a separate reading keeps fewer blocks in memory.
    for names in (lazy.keys() - {"cause"}, lazy.keys() & {"cause"}):
        found = compute_together([lazy[name].to_dataset(name=name) for name in sorted(names)])
        values |= {name: ds[name] for name, ds in zip(sorted(names), found, strict=True)}
    return values, unknown


def _scalar(ds: xr.Dataset, name: str) -> xr.DataArray:
    input_checks.variables(ds, name)
    return ds[name]


def _band(values: xr.DataArray, shown: list[str]) -> xr.DataArray:
    """Mean and quantiles of populations, (step, population, statistic)."""
    if "is_dead" not in values.coords:  # one population of all tokens
        values = values.assign_coords(is_dead=("token", np.zeros(values.sizes["token"], bool)))
    table = by_population(values, BAND).sel(population=shown)
    parts = [table["mean"], *(table["quantiles"].sel(quantile=level, drop=True) for level in BAND)]
    named = [
        part.expand_dims(statistic=[name])
        for part, name in zip(parts, ("mean", "low", "high"), strict=True)
    ]
    band: xr.DataArray = xr.concat(named, "statistic")
    return band.transpose("step", "population", "statistic")


def _curves(found: Mapping[str, xr.DataArray]) -> xr.Dataset:
    names = ("loss", "gradient", "displacement", "unchanged")
    return xr.merge(
        [found[name].rename(name) for name in names if name in found],
        join="outer",
        compat="override",
        combine_attrs="drop",
    )


def _with_frozen(curves: xr.Dataset, last_motion: xr.DataArray, ds: xr.Dataset) -> xr.Dataset:
    """Curves with the fraction of each population that is frozen at each step."""
    names, groups = populations(ds)
    steps = curves["step"].values
    last = last_motion.values
    frozen = steps[-1] - np.maximum(last, steps[0]) >= MIN_UNCHANGED
    shares = [
        np.searchsorted(np.sort(last[frozen & groups[names.index(name)]]), steps)
        / groups[names.index(name)].sum()
        for name in curves["population"].values.tolist()
    ]
    return curves.assign(frozen=(("step", "population"), np.stack(shares, -1)))
