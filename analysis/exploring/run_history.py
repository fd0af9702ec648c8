"""The part of a run that stays in memory: quantities of many rows and many tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.shape import pca, scores_along_axes
from trajstore.analysis.figures.figure import Options, compute_together
from trajstore.analysis.figures.sheet import FIGURES
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.optimizer.freeze_causes import freeze_cause
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Report, progress_of_tasks
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import format_bytes
from trajstore.errors import InvalidArgument

POSITION_BYTES = 512 << 20
MAP_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as it was read, small enough for memory.

    Attributes
    ----------
    last_step, rows : int
    every : int
        Positions are in memory for rows 0, `every`, 2·`every`, …
    plane : Dataset
        ``basis`` and ``basis_mean`` of `analysis.pca`, ``share`` of the variance along each axis.
    data : mapping
        By name. ``position``: ``scores`` (step, token, component), float32, at these rows.
        ``tokens``: ``last_motion`` and ``moves`` (token) of `analysis.freeze`. ``heatmap``,
        ``freeze``, ``loss``, ``gradients`` and ``displacement``: data of these figures. ``cause``
        (step, token), int8, of `analysis.freeze_cause`. As available.
    populations : list of str
        Populations with curves.
    unknown : mapping
        Reason for each quantity that is not available, by name.
    """

    last_step: int
    rows: int
    every: int
    plane: xr.Dataset
    data: Mapping[str, xr.Dataset]
    populations: list[str]
    unknown: Mapping[str, str]

    @property
    def position(self) -> xr.DataArray:
        """Positions of the tokens in the plane, (step, token, component)."""
        return self.data["position"]["scores"]

    @property
    def last_motion(self) -> xr.DataArray:
        """Step of the last change of each token, −1 if none."""
        return self.data["tokens"]["last_motion"]

    def rank(self, at: int) -> int:
        """Rank of a token in the order of the last changes."""
        order = np.argsort(self.last_motion.values, kind="stable")
        return int(np.flatnonzero(order == at)[0])


def prepare(ds: xr.Dataset, report: Report | None = None) -> RunHistory:
    """Read a run block by block: once for the plane, once for causes, once for everything else.

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
            "export a smaller run with trajstore export --select"
        )
    every = -(-rows * tokens * 8 // POSITION_BYTES)
    with progress_of_tasks(report):
        (made,) = compute_together(
            [pca(Scan(ds), components=2)[["basis", "basis_mean", "spectrum"]]]
        )
        plane = made.assign(share=made["spectrum"] / made["spectrum"].sum())
        data, unknown = _measure(ds, plane, every)
    return RunHistory(
        last_step=int(ds["step"][-1]),
        rows=rows,
        every=every,
        plane=plane,
        data=data,
        populations=Options().populations(Scan(ds)),
        unknown=unknown,
    )


def _measure(
    ds: xr.Dataset, plane: xr.Dataset, every: int
) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    """Computed quantities, and the reason for missing ones."""
    scan = Scan(ds, {"native": ("regime", "moved")})
    position = scores_along_axes(scan, plane).astype(np.float32).isel(step=slice(None, None, every))
    questions: dict[str, Callable[[], xr.Dataset]] = {
        "position": lambda: position.to_dataset(name="scores"),
        "tokens": lambda: freeze(scan)[["last_motion", "moves"]],
        "cause": lambda: freeze_cause(scan).to_dataset(name="cause"),
    }
    for name in ("heatmap", "freeze", "loss", "grad_norms", "displacement"):
        questions[name] = partial(FIGURES[name].collect, scan, Options())
    lazy, unknown = input_checks.available(questions)
    found: dict[str, xr.Dataset] = {}
    # Causes need four matrices at once: a separate reading keeps fewer blocks in memory.
    for names in (lazy.keys() - {"cause"}, lazy.keys() & {"cause"}):
        found |= zip(names, compute_together([lazy[name] for name in names]), strict=True)
    return found, unknown
