"""The states of a run of `record`: the one search for the state to start from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore.errors import FormatError, NothingToResume
from trajstore.provenance import RunAttributes
from trajstore.schema import KEYFRAMES, STEP
from trajstore.store.metadata.metadata_form import listed_segments
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.storage.remote_path import METADATA_KEY, Location
from trajstore.trainers.states.checkpoints import CheckpointFolder
from trajstore.trainers.states.state import State
from trajstore.trainers.states.stored_model import StoredModel, rows_hold_state


class States:
    """The states of a run: its start, those in rows and keyframes, and its checkpoints.

    Parameters
    ----------
    run : Path or RemotePath
    rows : int, optional
        Use its first rows only; default: all.

    Attributes
    ----------
    run : Path or RemotePath
    attributes : dict
        Attributes of its root.
    steps : list of int
        Steps of these rows.
    stored : StoredModel or None
        Its rows or keyframes, if they hold the whole state.
    in_rows : bool
        True if each row holds the whole state.
    keyframes : set of int
        Steps of the keyframes.
    """

    def __init__(self, run: Location, rows: int | None = None) -> None:
        self.run = run
        self._group: Any = open_group(run)
        self.attributes: dict[str, Any] = self._group.attrs.asdict()
        self.steps: list[int] = whole(run, self._group, STEP.name)[:rows].tolist()
        config = attribute(self.attributes, "config") or {}
        self.in_rows = "parameters" in self.attributes and rows_hold_state(
            config, tuple(self._group.array_keys())
        )
        self._made = made = RunAttributes.of(self.attributes)
        keyframes = made.keyframe_every and (run / KEYFRAMES / METADATA_KEY).exists()
        self.stored = StoredModel(run) if self.steps and (self.in_rows or keyframes) else None
        self.keyframes: set[int] = set()
        if self.stored is not None and keyframes:
            self.keyframes = {*self.stored.steps.tolist()}
        self._folder = CheckpointFolder(run)

    def before(self, step: int | None = None) -> State | None:
        """Return the newest state at or before a step, or of all; None for the training's start.

        With `every`, a checkpoint may be of a step after the last row.

        Raises
        ------
        NothingToResume
            If the run has none, and does not begin at the start of its training.
        FormatError
            If the newest one is damaged; the message names the next older one.
        """
        until = math.inf if step is None else step
        last = self.steps[-1] if self.steps else -1
        saved = [number for number in self._folder.steps() if number <= until]
        held: list[int] = []
        if self.stored is not None:
            held = self.stored.steps[self.stored.steps <= min(until, last)][-1:].tolist()
        candidates = sorted({*saved, *held}, reverse=True)
        for place, number in enumerate(candidates):
            try:
                state = self._checkpoint(number) if number in saved else None
                if state is None and number in held:
                    state = self._from_row(number)
            except FormatError as error:
                older = candidates[place + 1 :]
                hint = f"the state before it is that of step {older[0]}" if older else "no older"
                raise FormatError(f"{error} ({hint})") from error
            if state is not None:
                return state
        if self._made.other_optimizer_until:
            fork = self._made.fork
            raise NothingToResume(
                f"{self.run} is a fork of {fork['run']} at step {fork['step']}, before which "
                f"another optimizer or type trained it, and has no state there; use {fork['run']}"
            )
        if self.steps and self.steps[0]:
            where = "" if step is None else f" at or before step {step}"
            raise NothingToResume(
                f"{self.run} begins at step {self.steps[0]}, and has no state{where}; use a later "
                "step"
            )
        return None

    def _checkpoint(self, step: int) -> State | None:
        return self._folder.read(step, str(self.attributes.get("created")), len(self.steps))

    def _from_row(self, step: int) -> State:
        """Return the state in the row or keyframe of a step."""
        assert self.stored is not None
        config = [e["config"] for e in listed_segments(self.attributes) if e["step"] <= step][-1]
        steps, every = self.stored.all_steps, attribute(config, "recording", "every") or 1
        regular = (steps % every == 0) | (np.arange(steps.size) == 0)
        state = self.stored.state(step)
        return State(
            step=step,
            weights=state.weights,
            kept=state.kept,
            counters=self._counters(step),
            run=str(self.attributes["created"]),
            rows=int(np.count_nonzero(regular & (steps <= step))),
            config=config,
            sources=self._made.sources,
        )

    def _counters(self, step: int) -> Mapping[str, Any]:
        """Return the steps that were not skipped, and the state of the gradient scaler, if any."""
        stored = self.stored
        if stored is None or not (stored.has_keyframes and "scale" in stored and step):
            return {"taken": step, "scaler": None}
        skipped = np.asarray(self._group["skipped"][:])[stored.all_steps <= step][1:] == 1
        scaler = torch.amp.GradScaler("cpu").state_dict()
        scale, tracker = float(self._group["scale"][1]), 0
        for is_skipped in skipped.tolist():  # the rule of `GradScaler.update`
            tracker = 0 if is_skipped else (tracker + 1) % scaler["growth_interval"]
            if is_skipped or not tracker:
                scale *= scaler["backoff_factor" if is_skipped else "growth_factor"]
        scaler |= {"scale": scale, "_growth_tracker": tracker}
        return {"taken": step - int(skipped.sum()), "scaler": scaler}
