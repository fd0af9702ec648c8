"""A run of what would have become of W, had the same gradients met another optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.counterfactuals.changed_rates import (
    changed_clip_coefs,
    changed_learning_rates,
    changed_schedule,
)
from trainers.counterfactuals.open_loop import OpenLoop
from trainers.counterfactuals.settings import ChangedSettings, changed_settings
from trainers.recording.device_norms import token_norm, ulp_l1
from trainers.recording.parameter_rows import MOMENTS
from trainers.recording.provenance import provenance
from trainers.recording.token_selection import Tokens, select_tokens
from trainers.replay.parameter_placement import Placement, recorded_placement, tensor_of
from trainers.replay.recorded_optimizer import RecordedOptimizer, State, recorded_optimizer
from trainers.replay.recorded_rows import RecordedRow, RecordedRows
from trainers.replay.replay_device import replay_device, torch_threads
from trainers.replay.replay_result import CannotReplay
from trajstore.byte_sizes import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument, StepNotFound
from trajstore.schema import RECORDED, VARIABLES
from trajstore.store.create import check_target, staged_run
from trajstore.store.run_info import content_digest
from trajstore.store.tiled_reader import TiledRun, open_tiled
from trajstore.store.writer import RunWriter
from trajstore.values.native_types import NATIVE_TYPES, NativeType, as_bits

__all__ = ["CAVEAT", "WhatIf", "what_if"]

Array = npt.NDArray[Any]

CAVEAT = (
    "the gradients are those of the recorded path, whatever became of W: this is what another "
    "optimizer makes of them, not what training with these settings would have done"
)
"""What everybody who looks at a counterfactual has to know."""

_WINDOW = 128 << 20
_OF_W = ("W", *MOMENTS, "lr", "clip_coef", "W_step_norm", "W_ulp_l1")


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


def what_if(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    settings: Sequence[str] = (),
    *,
    from_step: int | None = None,
    tokens: Tokens = "all",
    seed: int = 0,
    encoding: str | None = None,
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
    seed : int
        Of stochastic rounding.
    encoding : {'delta', 'portable'}, optional
        Of the new run; the writer's own choice without it.
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
    >>> from trainers import preset, record
    >>> config = preset("gatsby").with_values(["training.steps=3", "training.batch_size=4"])
    >>> run = record(config, "run.zarr")
    >>> found = what_if(run, "other.zarr", ["optimizer.lr=1e-4"])
    >>> found.rows, found.first_step, found.last_step
    (4, 0, 3)
    """
    target = check_target(output, overwrite=overwrite)
    if target == Path(run).absolute():
        raise InvalidArgument(f"{output} is the run that the gradients are read from")
    source = open_tiled(run)
    rows = RecordedRows(source)
    device = replay_device(source.attributes)
    with torch_threads(device.threads):
        changed = Counterfactual.of(
            source, rows, settings, from_step=from_step, tokens=tokens, seed=seed,
            device=device.device,
        )  # fmt: skip
        origin = {
            "run": os.path.basename(os.path.normpath(run)),
            "created": source.attributes.get("created"),
            "sha256": content_digest(run),
            "from_step": int(rows.steps[changed.first]),
            "settings": [f"{name}={value}" for name, value in changed.settings.given.items()],
            "of_recorded_path": sorted(set(changed.variables) - set(_OF_W)),
            "caveat": CAVEAT,
        }
        with staged_run(target, overwrite=overwrite) as new:
            changed.write(new, origin, encoding=encoding, memory=memory, on_progress=on_progress)
    return WhatIf(
        path=target,
        rows=len(rows) - changed.first,
        first_step=int(rows.steps[changed.first]),
        last_step=int(rows.steps[-1]),
        notes=(*device.notes, *changed.notes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Counterfactual:
    """All that a counterfactual is made of. Made by `of`, which refuses what is impossible.

    Attributes
    ----------
    source : TiledRun
    rows : RecordedRows
    settings : ChangedSettings
    optimizer : RecordedOptimizer
        With the changed settings.
    recorded : RecordedOptimizer
        As the run had it.
    placement : Placement
        Of the chosen tokens.
    chosen : ndarray of int, optional
        Their positions; None for all that the run holds.
    first : int
        Row that it goes on from.
    lr : ndarray of float64, (step,)
    clip_coef : list of ndarray, ()
        Bits.
    variables : dict of str to NativeType
        Of the new run.
    """

    source: TiledRun
    rows: RecordedRows
    settings: ChangedSettings
    optimizer: RecordedOptimizer
    recorded: RecordedOptimizer
    placement: Placement
    chosen: Array | None
    first: int
    lr: npt.NDArray[np.float64]
    clip_coef: list[Array]
    variables: dict[str, NativeType]

    @classmethod
    def of(
        cls,
        source: TiledRun,
        rows: RecordedRows,
        assignments: Sequence[str],
        *,
        from_step: int | None,
        tokens: Tokens,
        seed: int,
        device: torch.device,
    ) -> Counterfactual:
        """Decide all of it, before anything is written.

        Raises
        ------
        StepNotFound, ConfigError, CannotReplay, InvalidArgument
            As `what_if`.
        """
        _require(rows, "W", "the run holds no weights")
        _require(rows, "grad", "the gradient was not recorded; the tiers weights+grads and all do")
        _require(rows, "lr", "the learning rate was not recorded; every tier holds it")
        _require(rows, "clip_coef", "what clipping did to the gradient was not recorded")
        first = _row_of(rows, from_step)
        held = rows.natives["W"].name
        settings = changed_settings(source.attributes, held, assignments, seed=seed)
        weights = getattr(torch, settings.weights_dtype)
        recorded = recorded_optimizer(source.attributes, getattr(torch, held), device)
        optimizer = recorded_optimizer({"optimizer": settings.optimizer}, weights, device)
        if _is_rebuilt(rows, recorded) and rows.steps[first] and not rows.from_start:
            raise CannotReplay(
                f"the optimizer's state is not recorded, and the run begins at step "
                f"{rows.steps[0]}, so it cannot be rebuilt; record the tier all"
            )
        _check_every_step(rows, 0 if _is_rebuilt(rows, recorded) else first)
        if not settings.keeps_state and optimizer.counts_steps and rows.steps[first] != 0:
            raise CannotReplay(
                f"{settings.optimizer['class'].rpartition('.')[2]} has no state at step "
                f"{rows.steps[first]}, where the run had another optimizer; begin where training "
                "began, without --from"
            )
        if first and _is_rebuilt(rows, recorded):
            recorded_lr = np.array([rows.value("lr", number) for number in range(len(rows))])
            _check_known(rows, recorded_lr, _recorded_clip_coefs(rows), range(1, first + 1))
        lr = changed_learning_rates(rows, source.attributes, settings)
        clip_coef = changed_clip_coefs(rows, settings)
        _check_known(rows, lr, clip_coef, range(first + 1, len(rows)))
        placement, chosen = _placement(source, tokens, device)
        return cls(
            source=source,
            rows=rows,
            settings=settings,
            optimizer=optimizer,
            recorded=recorded,
            placement=placement,
            chosen=chosen,
            first=first,
            lr=lr,
            clip_coef=clip_coef,
            variables=_variables(rows, settings, optimizer),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What should be known about it."""
        found = [CAVEAT]
        if not self.settings.keeps_state:
            found.append("the optimizer is of another class, and begins without a state")
        if self.variables["W"].itemsize < self.rows.natives["W"].itemsize:
            found.append(f"gradients were rounded to {self.variables['W'].name} first")
        return tuple(found)

    def write(
        self,
        path: Path,
        origin: Mapping[str, Any],
        *,
        encoding: str | None,
        memory: int | str,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Make the run, row after row.

        Parameters
        ----------
        path : Path
            Where nothing is yet.
        origin : mapping
            For its provenance.
        encoding, memory, on_progress
            As `what_if`.
        """
        total = len(self.rows) - self.first
        chosen: dict[str, Any] = {
            name: self._of_tokens(values) for name, values in self.source.coordinates.items()
        }
        if encoding is not None:
            chosen["encoding"] = encoding
        with RunWriter.create(
            path,
            hidden=self.source.series["W"].shape[2],
            variables={name: native.name for name, native in self.variables.items()},
            config=self.settings.config,
            attributes=self._attributes(origin),
            memory=memory,
            buffers=1,
            **chosen,
        ) as new:
            for done, (row, values) in enumerate(self._rows(), 1):
                for name, place in new.next_row().items():
                    place[...] = values[name]
                new.commit_row(row.step)
                if on_progress is not None:
                    on_progress(done, total)

    def _attributes(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        before = self.source.attributes
        known = before.get("provenance")
        kept = {
            name: known[name]
            for name in ("corpus", "tokenizer")
            if isinstance(known, Mapping) and name in known
        }
        attributes = {
            "optimizer": {
                **self.settings.optimizer,
                "schedule": changed_schedule(before, self.settings),
            },
            "provenance": provenance(self.placement.device, kept | {"what_if": dict(origin)}),
        }
        if "recording" in before:
            attributes["recording"] = before["recording"]
        return attributes

    def _rows(self) -> Iterator[tuple[RecordedRow, dict[str, Array]]]:
        """Each row of the new run with its bits."""
        names = {*self.variables, *self.recorded.state_names}
        (row,) = self.rows.read(names, first=self.first, stop=self.first + 1)
        loop = self._begin(row)
        recorded = {name: self.rows.scalar(name, row.number) for name in ("lr", "clip_coef")}
        yield row, self._values(loop, row, None) | recorded
        copied = [name for name in self.variables if name not in _OF_W]
        for row in self.rows.read(copied, first=self.first + 1, window=_WINDOW):
            last = loop.weights.clone() if self._has_motion else None
            self._step(loop, row, self.lr, self.clip_coef)
            yield row, self._values(loop, row, last)

    @property
    def _has_motion(self) -> bool:
        return "W_step_norm" in self.variables or "W_ulp_l1" in self.variables

    def _begin(self, row: RecordedRow) -> OpenLoop:
        """The optimizer with the recorded state of a row."""
        taken = self.rows.steps_taken(row.number)
        state: State | None = None
        if taken and self.settings.keeps_state:
            if _is_rebuilt(self.rows, self.recorded):
                before = self._rebuilt(row.number)
                state = {name: before.state(name) for name in self.recorded.state_names}
            else:
                state = {name: self._parameter(name, row) for name in self.recorded.state_names}
            if state and row.number == 0 and not any(value.any() for value in state.values()):
                raise CannotReplay(
                    f"the state of the optimizer at step {row.step} was not seen: recording began "
                    "there; begin a step later (--from)"
                )
        weights = self._parameter("W", row).to(getattr(torch, self.settings.weights_dtype))
        return OpenLoop(self.optimizer, self.placement, weights, state, taken)

    def _rebuilt(self, last: int) -> OpenLoop:
        """The recorded optimizer after all recorded steps up to a row, to have its state."""
        (start,) = self.rows.read(["W"], stop=1)
        loop = OpenLoop(self.recorded, self.placement, self._parameter("W", start), None, 0)
        for row in self.rows.read(["grad"], first=1, stop=last + 1, window=_WINDOW):
            self._step(loop, row, None, None)
        return loop

    def _step(
        self,
        loop: OpenLoop,
        row: RecordedRow,
        lr: npt.NDArray[np.float64] | None,
        clip_coef: list[Array] | None,
    ) -> None:
        """Take the step of a row, with changed rates or, without them, as it was recorded."""
        number = row.number
        if self.rows.skipped[number]:
            return
        rate = self.rows.value("lr", number) if lr is None else float(lr[number])
        bits = self.rows.scalar("clip_coef", number) if clip_coef is None else clip_coef[number]
        gradient = loop.gradient(self._of_tokens(row.bits["grad"]), self.rows.natives["grad"])
        loop.step(gradient, tensor_of(bits, self.rows.natives["clip_coef"]), rate)

    def _parameter(self, name: str, row: RecordedRow) -> torch.Tensor:
        return self.placement.parameter(self._of_tokens(row.bits[name]), self.rows.natives[name])

    def _values(
        self, loop: OpenLoop, row: RecordedRow, last: torch.Tensor | None
    ) -> dict[str, Array]:
        """Bits of a row of the new run."""
        values: dict[str, Array] = {}
        for name in self.variables:
            if name == "W":
                values[name] = loop.bits(loop.weights)
            elif name in MOMENTS:
                values[name] = loop.bits(loop.state(name))
            elif name == "lr":
                values[name] = self.lr[row.number].view(np.uint64)
            elif name == "clip_coef":
                values[name] = self.clip_coef[row.number]
            elif name == "grad":
                values[name] = self._gradient(row)
            elif last is not None and name in ("W_step_norm", "W_ulp_l1"):
                measure = token_norm if name == "W_step_norm" else ulp_l1
                values[name] = loop.bits(measure(loop.weights, last))
            elif VARIABLES[name].dims == ("step",):
                values[name] = self.rows.scalar(name, row.number)
            else:
                bits = row.bits[name]
                values[name] = self._of_tokens(bits) if "token" in VARIABLES[name].dims else bits
        return values

    def _gradient(self, row: RecordedRow) -> Array:
        """The gradient as the optimizer gets it, before clipping."""
        native, wanted = self.rows.natives["grad"], self.variables["grad"]
        bits = self._of_tokens(row.bits["grad"])
        if native == wanted:
            return bits
        return as_bits(tensor_of(bits, native).to(getattr(torch, wanted.name)), wanted, "grad")

    def _of_tokens(self, values: Array) -> Array:
        return values if self.chosen is None else values[self.chosen]


def _require(rows: RecordedRows, name: str, reason: str) -> None:
    if name not in rows:
        raise CannotReplay(reason)


def _row_of(rows: RecordedRows, step: int | None) -> int:
    if not len(rows):
        raise CannotReplay("the run has no rows yet")
    if step is None:
        return 0
    found = np.flatnonzero(rows.steps == step)
    if not found.size:
        raise StepNotFound(
            f"there is no row of step {step}; the run holds steps {rows.steps[0]} to "
            f"{rows.steps[-1]}"
        )
    return int(found[0])


def _is_rebuilt(rows: RecordedRows, optimizer: RecordedOptimizer) -> bool:
    """Whether some of the optimizer's state is not recorded."""
    return any(name not in rows for name in optimizer.state_names)


def _check_every_step(rows: RecordedRows, first: int) -> None:
    gaps = np.flatnonzero(np.diff(rows.steps[first:]) != 1)
    if gaps.size:
        at = first + int(gaps[0])
        raise CannotReplay(
            f"after step {rows.steps[at]} comes step {rows.steps[at + 1]}, and the gradients "
            "between were not recorded; record with every=1, or begin later (--from)"
        )


def _recorded_clip_coefs(rows: RecordedRows) -> list[Array]:
    return [rows.scalar("clip_coef", number) for number in range(len(rows))]


def _check_known(
    rows: RecordedRows, lr: npt.NDArray[np.float64], clip_coef: list[Array], numbers: range
) -> None:
    native = rows.natives["clip_coef"]
    for number in numbers:
        if rows.skipped[number]:
            continue
        if np.isnan(lr[number]):
            raise CannotReplay(f"the learning rate of step {rows.steps[number]} is not known")
        if tensor_of(clip_coef[number], native).isnan():
            raise CannotReplay(
                f"clip_coef is NaN at step {rows.steps[number]}, so what the gradient was "
                "multiplied by is not known; say how it is to be clipped, such as "
                "--set training.max_grad_norm=1"
            )


def _placement(
    source: TiledRun, tokens: Tokens, device: torch.device
) -> tuple[Placement, Array | None]:
    """Placement of the chosen tokens, and their positions in the run."""
    whole = recorded_placement(source, device)
    held = source.coordinates["token"].astype(np.int64)
    if isinstance(tokens, str):
        ids = select_tokens(tokens, len(held), source.coordinates.get("is_dead"))
        chosen = ids
    else:
        wanted = np.unique(np.asarray(tokens, np.int64))
        missing = wanted[~np.isin(wanted, held)]
        if missing.size or not wanted.size:
            raise InvalidArgument(
                f"tokens: the run does not hold {', '.join(map(str, missing[:5])) or 'none'}"
            )
        chosen = np.flatnonzero(np.isin(held, wanted))
    if chosen is None:
        return whole, None
    return replace(whole, ids=held[chosen]), chosen


def _variables(
    rows: RecordedRows, settings: ChangedSettings, optimizer: RecordedOptimizer
) -> dict[str, NativeType]:
    """Variables of the new run, each with its type."""
    found = {}
    for name in RECORDED:
        if name in ("W", "grad") and name in rows:
            found[name] = NATIVE_TYPES[settings.weights_dtype]
        elif name in MOMENTS:
            kept = name in rows or not settings.keeps_state
            if kept and name in optimizer.state_names:
                dtype = str(optimizer.example[name].dtype).removeprefix("torch.")
                found[name] = NATIVE_TYPES[dtype]
        elif name in rows:
            found[name] = rows.natives[name]
    return found
