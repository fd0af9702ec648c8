"""A run of what would have become of W, had the same gradients met another optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.argument_types import checks_types
from trajstore.byte_sizes import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument
from trajstore.store.metadata.fingerprint import FINGERPRINT
from trajstore.store.reading.run_settings import attribute
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.counterfactuals.counterfactual_rows import CounterfactualRows
from trajstore.trainers.counterfactuals.planned_counterfactual import PlannedCounterfactual
from trajstore.trainers.recording.token_selection import Tokens
from trajstore.trainers.recording.torch_threads import torch_threads
from trajstore.trainers.replay.recorded_rows import RecordedRows
from trajstore.trainers.replay.replay_device import replay_device

__all__ = ["WhatIf", "what_if"]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A counterfactual that was made.

    Attributes
    ----------
    path : Path
    rows : int
    first_step, last_step : int
    notes : tuple of str
        What should be known about it.
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
    from_step: int | None = None,
    tokens: Tokens = "all",
    seed: int | None = None,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Apply the recorded gradients of a run with other settings, as a run of its own (open loop).

    The real optimizer of `torch.optim` goes on from the recorded state, step by step, with each
    step's recorded gradient. With nothing set it gives the recorded run again, bit for bit. What
    does not hang on the optimizer (gradient, loss, logits, norms of gradients) is that of the
    recorded path.

    Parameters
    ----------
    run : path-like
        With W, its gradient, ``lr`` and ``clip_coef`` of every step.
    output : path-like
        Where the new run will be, by custom ``NAME.zarr``; it appears there whole.
    settings : sequence of str
        ``section.field=value`` as for a recording, such as ``optimizer.lr=3e-4``,
        ``optimizer.state_dtype=float32``, ``model.dtype=float32``, ``schedule.name=constant``,
        ``training.max_grad_norm=0`` or ``rounding=stochastic``.
    from_step : int, optional
        Step whose recorded state it goes on from; the first row without it.
    tokens : {'all', 'dead', 'live'} or array_like of int
        Whose rows are calculated: each element of W goes its own way.
    seed : int, optional
        Of stochastic rounding; 0 without it.
    memory : int or str, default 320 MiB
        For the buffer of the writer.
    overwrite : bool
        Replace a run that is there.
    on_progress : callable, optional
        Called with the number of rows that are done, and of all rows.

    Returns
    -------
    WhatIf

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or a chunk is broken.
    RunExists
        If something is at `output`.
    StepNotFound
        If there is no row of `from_step`.
    ConfigError
        If a setting does not exist, does not act on recorded gradients, or is not one of the
        optimizer.
    CannotReplay
        If the run lacks what is needed: gradients of every step, the optimizer, its state.

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
        raise InvalidArgument(f"{output} is the run that the gradients are read from")
    source = open_tiled(run)
    rows = RecordedRows(source)
    device = replay_device(source.attributes)
    with torch_threads(device.threads):
        planned = PlannedCounterfactual.of(
            source, rows, settings, from_step=from_step, tokens=tokens, seed=seed,
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
        with staged_run(target, overwrite=overwrite) as new:
            first_difference = _write(new, planned, origin, memory=memory, on_progress=on_progress)
    again = () if planned.settings.given else (_nothing_changed(first_difference),)
    return WhatIf(
        path=target,
        rows=len(rows) - planned.first,
        first_step=int(rows.steps[planned.first]),
        last_step=int(rows.steps[-1]),
        notes=(*device.notes, *planned.notes, *again),
    )


def _nothing_changed(first_difference: int | None) -> str:
    """What is known of a run that was made with nothing set."""
    if first_difference is None:
        return "nothing was changed, and this is the recorded run again, bit for bit"
    return (
        "nothing was changed, and yet this is not the recorded run: W or a moment differs from "
        f"step {first_difference} on. Either the run is no more as it was recorded, which "
        "`trajstore verify` tells, or another machine or version of torch rounds otherwise"
    )


def _write(
    path: Path,
    planned: PlannedCounterfactual,
    origin: Mapping[str, Any],
    *,
    memory: int | str,
    on_progress: Callable[[int, int], None] | None,
) -> int | None:
    """Make the run where nothing is yet, row after row; `CounterfactualRows.first_difference`."""
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
        **planned.source.room_for_examples,
        variables={name: native.name for name, native in planned.variables.items()},
        config=planned.settings.config,
        attributes=planned.attributes(origin),
        memory=memory,
        buffers=1,
        commit_every=None,
        fsync=False,  # the whole of it is flushed before it gets its name
        **chosen,
    ) as new:
        for done, (row, values) in enumerate(made, 1):
            for name, place in new.next_row().items():
                place[...] = values[name]
            new.commit_row(row.step)
            if on_progress is not None:
                on_progress(done, total)
    return made.first_difference
