"""A counterfactual run: W from the recorded gradients and another optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.arguments import EXCHANGE_MEMORY, checks_types
from trajstore.errors import InvalidArgument
from trajstore.store.metadata.metadata_form import FINGERPRINT
from trajstore.store.reading.run_info import attribute
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.counterfactuals.counterfactual_rows import CounterfactualRows
from trajstore.trainers.counterfactuals.planned_counterfactual import PlannedCounterfactual
from trajstore.trainers.recording.options import Tokens, torch_threads
from trajstore.trainers.replays.recorded_rows import RecordedRows
from trajstore.trainers.replays.replay_device import replay_device


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A finished counterfactual.

    Attributes
    ----------
    path : Path
    rows : int
    first_step, last_step : int
    notes : tuple of str
        Notes about its interpretation.
    """

    path: Path
    rows: int
    first_step: int
    last_step: int
    notes: tuple[str, ...]


@checks_types
def what_if(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    settings: Sequence[str] = (),
    *,
    at: int | None = None,
    tokens: Tokens = "all",
    seed: int | None = None,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Apply the recorded gradients of a run with other settings, and write a new run (open loop).

    The real optimizer of `torch.optim` starts from the recorded state and takes each step with its
    recorded gradient. Without settings the result equals the recorded run, bit for bit. Variables
    that do not depend on the optimizer (gradient, loss, logits, norms of gradients) are copied from
    the recorded run.

    Parameters
    ----------
    run : path-like
        A run with W, its gradient, ``lr`` and ``clip_coef`` of every step.
    output : path-like
        Path of the new run, by custom ``NAME.zarr``; it appears there when it is complete, in the
        encoding of `run`.
    settings : sequence of str
        ``section.field=value`` as for a recording, such as ``optimizer.lr=3e-4``,
        ``optimizer.state_dtype=float32``, ``model.dtype=float32``, ``schedule.name=constant``,
        ``training.max_grad_norm=0`` or ``rounding=stochastic``.
    at : int, optional
        Step whose recorded state is the start; default: the first row.
    tokens : {'all', 'dead', 'live'} or array_like of int
        Tokens whose rows are computed; each element of W is independent of the others.
    seed : int, optional
        Seed of stochastic rounding; default: 0.
    memory : int or str, default 320 MiB
        Memory of the writer's buffer.
    overwrite : bool
        Replace an existing run.
    on_progress : callable, optional
        Called with the number of finished rows and the number of all rows.

    Returns
    -------
    WhatIf

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or a chunk is damaged.
    RunExists
        If `output` exists.
    StepNotFound
        If there is no row of `at`.
    ConfigError
        If a setting does not exist, does not act on recorded gradients, or is missing in the
        optimizer.
    CannotReplay
        If the run lacks gradients of every step, the optimizer or its state.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(["training.steps=3", "training.batch_size=4"])
    >>> run = record(config, "run.zarr")
    >>> found = what_if(run, "other.zarr", ["optimizer.lr=1e-4"])
    >>> found.rows, found.first_step, found.last_step
    (4, 0, 3)
    """
    target = check_local_target(output, overwrite=overwrite)
    if target.exists() and target.samefile(run):
        raise InvalidArgument(
            f"{output} is the run with the gradients; choose another path for the new run"
        )
    source = open_tiled(run)
    rows = RecordedRows(source)
    device = replay_device(source.attributes)
    with torch_threads(device.threads):
        planned = PlannedCounterfactual(
            source, rows, settings, at=at, tokens=tokens, seed=seed,
            device=device.device,
        )  # fmt: skip
        origin: dict[str, Any] = {
            "run": os.path.basename(os.path.normpath(run)),
            "created": source.attributes.get("created"),
            FINGERPRINT: source.attributes.get(FINGERPRINT),
            "tokens": tokens if isinstance(tokens, str) else "a list of ids",
        }
        earlier = attribute(source.attributes, "provenance", "what_if")
        if earlier is not None:
            origin["earlier"] = earlier
        remarks: list[str] = []
        with staged_run(target, overwrite=overwrite) as new:
            first_difference = _write(
                new, planned, origin, memory=memory, on_progress=on_progress, on_note=remarks.append
            )
    again = () if planned.settings.given else (_nothing_changed(first_difference),)
    return WhatIf(
        path=target,
        rows=len(rows) - planned.first,
        first_step=int(rows.steps[planned.first]),
        last_step=int(rows.steps[-1]),
        notes=(*device.notes, *planned.notes, *remarks, *again),
    )


def _nothing_changed(first_difference: int | None) -> str:
    """Return a note about a run with unchanged settings."""
    if first_difference is None:
        return "no setting was changed; the result equals the recorded run, bit for bit"
    return (
        "no setting was changed, but W or a moment differs from the recorded run from step "
        f"{first_difference} on. Either the run was changed after recording, which "
        "`trajstore verify` detects, or this machine or version of torch rounds differently"
    )


def _write(
    path: Path,
    planned: PlannedCounterfactual,
    origin: Mapping[str, Any],
    *,
    memory: int | str,
    on_progress: Callable[[int, int], None] | None,
    on_note: Callable[[str], None],
) -> int | None:
    """Write the new run row by row; return `CounterfactualRows.first_difference`."""
    made = CounterfactualRows(planned)
    total = len(planned.rows) - planned.first
    chosen: dict[str, Any] = {
        name: planned.of_tokens(values)
        for name, values in planned.source.coordinates.items()
        if name not in planned.source.populations
    }
    chosen["populations"] = {
        name: planned.of_tokens(values) for name, values in planned.source.populations.items()
    }
    with RunWriter.create(
        path,
        hidden=planned.source.series["W"].shape[2],
        hyperparameter=tuple(planned.numbers[0]),
        **planned.source.row_lengths,
        variables={name: native.name for name, native in planned.variables.items()},
        config=planned.settings.config,
        attributes=planned.attributes(origin),
        memory=memory,
        encoding=planned.source.attributes.get("encoding", "delta"),
        on_note=on_note,
        buffers=1,
        commit_every=None,
        fsync=False,  # the complete run is flushed before it gets its name
        **chosen,
    ) as new:
        for done, (row, values) in enumerate(made, 1):
            for name, place in new.next_row().items():
                place[...] = values[name]
            new.commit_row(row.step)
            if on_progress is not None:
                on_progress(done, total)
    return made.first_difference
