"""`fork`: continues a recorded training from one of its steps with other settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.arguments import checks_types
from trajstore.errors import ConfigError, InvalidArgument, NothingToResume
from trajstore.exchange.export_run import branch_run
from trajstore.optimizer_advice import require_sound
from trajstore.provenance import OptimizerAttributes, RunAttributes
from trajstore.schema import variables_of
from trajstore.store.metadata.metadata_form import segments_attribute
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import RunPath
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.strict_json import utc_now
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.recording.existing_run import Comparison
from trajstore.trainers.recording.notes import group_attributes, optimizer_attributes, report_notes
from trajstore.trainers.recording.parameters import JoinedOptimizer, find_group
from trajstore.trainers.runs.changed_settings import (
    changed_fields,
    check_device,
    check_recorded,
    check_text,
    fork_notes,
    forked_config,
    forked_types,
    keeps_state,
    recorded_config,
)
from trajstore.trainers.runs.differences import explain_difference
from trajstore.trainers.runs.record import record, text_sources
from trajstore.trainers.runs.run_plan import numeric_advice
from trajstore.trainers.runs.training_setup import (
    build_model,
    build_optimizer,
    build_schedule,
    with_products,
)
from trajstore.trainers.runs.walk import walk
from trajstore.trainers.states.checkpoints import CheckpointFolder
from trajstore.trainers.states.state import State
from trajstore.trainers.states.states import States
from trajstore.trainers.states.stored_model import row_of, rows_hold_state
from trajstore.trainers.texts import Corpus, load_corpus
from trajstore.values.native_types import as_bits, native_type


@checks_types
def fork(
    run: str | os.PathLike[str],
    output: RunPath,
    *,
    at: int,
    settings: Sequence[str] = (),
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    fsync: bool = True,
    strict_numerics: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_corpus: Callable[[Corpus], None] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    on_retrain: Callable[[int, int], None] | None = None,
) -> Path:
    """Continue a recorded run from one of its steps with other settings, as a new run.

    The training starts from the state of that step, if the run has it in a row, a keyframe or a
    checkpoint. Otherwise the steps from the nearest earlier state, or from the start, are
    trained again. Each row is compared with the recorded one, bit for bit. If a row
    differs (for example on another machine), a note reports it, and the new run has the repeated
    rows from there on. The other rows are those of the source. Their blocks are hard links, unless
    the type of a variable or the rule of the encoding ``compact`` changes. The root
    attribute ``provenance.fork`` records all this. The source is only read.

    Parameters
    ----------
    run : path-like
        A local run of `trainers.record`.
    output : path-like
        Path of the new run, by custom ``NAME.zarr``.
    at : int
        Step of the run that has a row, and is not 0.
    settings : sequence of str
        Changes, ``section.field=value``: any field of ``optimizer`` and ``schedule``,
        ``training.steps``, ``.max_grad_norm``, ``.autocast``, ``.device`` and ``.threads``,
        ``model.dtype`` from bfloat16 to float32, ``recording.memory``, ``.commit_every`` and
        ``.checkpoint_every``. The optimizer's state is converted, and kept between adam and adamw;
        to and from sgd the optimizer starts without state.
    corpus, tokenizer, overwrite, fsync, strict_numerics
        As for `trainers.record`.
    stop, on_corpus, on_step, on_note, on_retrain
        As for `trainers.record`. `stop` is not called while steps are trained again.

    Returns
    -------
    Path
        Path of the new run; `trainers.record` can resume it.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or its format cannot be extended by this version.
    NothingToResume
        If the run's training cannot be repeated, or differs from its configuration.
    StepNotFound
        If the step has no row.
    ConfigError
        If a setting is unknown or impossible, or cannot change at a fork.
    RunExists
        If `output` exists, and `overwrite` is not set.
    CorpusError
        If the text differs from that of the run.

    Nothing is written in these cases.

    Examples
    --------
    >>> other = fork("everything.zarr", "other.zarr", at=2, settings=["optimizer.lr=3e-4"])
    >>> from trajstore import open_run
    >>> changed = (open_run("everything.zarr").W != open_run(other).W).any(["token", "hidden"])
    >>> changed.values.tolist()
    [False, False, False, True]
    """
    source = _Source(run, at)
    config, _ = with_products(forked_config(source.config, settings))
    source.check_step(config)
    check_device(source.path, config, source.origin.provenance)
    types = forked_types(source.types, source.config, config)
    target = check_local_target(output, overwrite=overwrite)
    if target.exists() and target.samefile(source.path):
        raise InvalidArgument(f"{output} is the run to fork; choose another path for the fork")
    CheckpointFolder(target).check()
    newest = source.states.before()  # with the sources
    sources = text_sources(newest, source.attributes, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(config, **sources)
    check_text(source.path, text)
    advice = numeric_advice(config)
    if strict_numerics:
        require_sound(advice)
    notes = fork_notes(source.path, source.attributes, source.config, config, at)
    report_notes(notes, on_note)
    folder = CheckpointFolder(target, fsync=fsync)
    stays_in_rows = source.states.in_rows and rows_hold_state(config.model_dump(), types)
    try:
        with staged_run(target, overwrite=overwrite) as new:
            path, state, proven = source.reach(new, text, sources, on_note, on_retrain)
            attributes = source.forked_attributes(config, proven)
            memory, created = config.recording.memory, attributes["created"]
            branch_run(path, new, state.rows, types=types, attributes=attributes, memory=memory,
                       on_note=on_note)  # fmt: skip
            kept = state.kept if keeps_state(source.config, config) else {}
            state = replace(state, run=created, config=attributes["config"], kept=kept)
            if not stays_in_rows:  # before the fork has its name, so it always has a checkpoint
                folder.add(state, state.rows)
    except BaseException:
        folder.remove(at)
        raise
    del state  # it is as large as the training that follows
    report_notes((item.sentence for item in advice), on_note)
    record(
        config,
        target,
        resume=True,
        corpus=corpus,
        tokenizer=tokenizer,
        fsync=fsync,
        strict_numerics=strict_numerics,
        stop=stop,
        on_corpus=on_corpus,
        on_step=on_step,
        on_note=on_note,
    )
    return target


def _optimizer_attributes(config: RunConfig, parameter: str, *, groups: bool) -> dict[str, Any]:
    """Return the class and hyperparameters of the optimizer for the attributes of a run.

    Parameters
    ----------
    config : RunConfig
    parameter : str
        Name of the recorded parameter.
    groups : bool
        Add all parameter groups, for a run with everything.
    """
    with torch.device("meta"):  # no weights
        model = build_model(config.model)
    optimizer = build_optimizer(model, config)
    build_schedule(optimizer, config.schedule, config.decay_steps)  # sets the first step's rate
    group = find_group(optimizer, dict(model.named_parameters())[parameter])
    assert group is not None  # it trains the whole model
    attributes = optimizer_attributes(optimizer, group, {})
    if groups:
        attributes["groups"] = group_attributes(JoinedOptimizer(optimizer))
    return attributes


class _Source:
    """The run to fork.

    Parameters
    ----------
    run : path-like
    at : int
        Step of the fork.

    Attributes
    ----------
    path : Path
    config : RunConfig
        Configuration of the step after the fork.
    attributes : dict
        Attributes of its root.
    origin : RunAttributes
        What they say.
    types : dict of str to str
        Native type of each variable.
    step : int
        Step of the fork.
    steps : list of int
        Steps of its rows.
    states : States

    Raises
    ------
    RunNotFound, FormatError, InvalidArgument, NothingToResume
        If it cannot be forked.
    """

    def __init__(self, run: str | os.PathLike[str], at: int) -> None:
        if "://" in os.fspath(run):
            raise InvalidArgument(f"cannot fork the address {run}; copy the run to a local folder")
        self.path = path = Path(run).absolute()
        group: Any = open_group(path)
        self.states = States(path)
        self.attributes, self.steps = self.states.attributes, self.states.steps
        self.origin = RunAttributes.of(self.attributes)
        check_recorded(path, self.attributes)
        self.config = recorded_config(path, after=at)
        if not self.config.model.tied:
            raise InvalidArgument(
                f"cannot fork {path}: it holds one of the two matrices of its training "
                "(model.tied = false); record a new training with the other settings"
            )
        if "W" not in group:
            raise InvalidArgument(
                f"cannot fork {path}: it has no W, which is needed to compare a repeated training; "
                "fork a run that was recorded with W"
            )
        self.types = {
            name: str(array.attrs["native_dtype"])
            for name, array in group.arrays()
            if name in variables_of(self.attributes)
        }
        self.step = at

    @property
    def parameter(self) -> str:
        """Name of the recorded parameter."""
        return str(self.origin.parameter)

    def check_step(self, config: RunConfig) -> None:
        """Check that the step exists, and that the configuration has steps after it."""
        row_of(self.path, np.array(self.steps), self.step)
        if self.step == 0:
            raise InvalidArgument(
                "a fork at step 0 would only share the initial state; record a run with these "
                "settings, or fork at a later step"
            )
        if config.training.steps <= self.step:
            raise ConfigError(
                f"training.steps = {config.training.steps}: no step remains after step "
                f"{self.step}; give more: training.steps={2 * self.step}"
            )

    def reach(
        self,
        new: Path,
        text: Corpus,
        sources: dict[str, str],
        on_note: Callable[[str], None] | None,
        on_retrain: Callable[[int, int], None] | None,
    ) -> tuple[Path, State, int]:
        """Return a run with the common rows, the state after the step, and the last proven step.

        The state is a stored one, or that of the repeated training. Different rows are stored in a
        sibling of `new`.

        Raises
        ------
        NothingToResume
            If the state cannot be reached.
        """
        at, start = self.step, self.states.before(self.step)
        if start is not None and start.step == at:
            self._check_weights(start)
            return self.path, start, at
        first = 0 if start is None else start.step
        note = (
            f"{self.path} has no checkpoint or keyframe of step {at}, so steps {first + 1} to {at} "
            "are trained again and compared with the recorded rows"
        )
        report_notes([note], on_note)
        repeated, memory = new.with_name("repeated.zarr"), self.config.recording.memory

        def make_writer(rows: int) -> RunWriter:
            branch_run(self.path, repeated, rows, types=self.types, attributes={}, memory=memory)
            return RunWriter.resume(
                repeated, memory=memory, commit_every=None, fsync=False, on_note=lambda note: None
            )

        compared = Comparison(make_writer)
        state = walk(self.path, text, start, at, compared, sources=sources, on_step=on_retrain)
        difference = compared.difference
        if difference is None and state is not None:
            return self.path, state, at
        assert difference is not None
        reason = explain_difference(self.path, difference)
        if state is None or "lr" in difference.variables:
            raise NothingToResume(
                f"{self.path} cannot be forked at step {at}, because repeating its training gives "
                f"other rows: {reason}"
            )
        proven = self.steps[difference.row - 1]
        note = (
            f"the repeated training differs from the recorded one from step {difference.step} on: "
            f"{reason}; the fork has the rows of {self.path} up to step {proven}, and then the "
            "repeated rows"
        )
        report_notes([note], on_note)
        return repeated, state, proven

    def forked_attributes(self, config: RunConfig, proven_until: int) -> dict[str, Any]:
        """Return the attributes of a fork that differ from those of the source."""
        before, values = self.origin.optimizer, config.model_dump(mode="json")
        optimizer = _optimizer_attributes(config, self.parameter, groups=bool(before.groups))
        entry: dict[str, Any] = {
            "run": str(self.path),
            "created": self.attributes.get("created"),
            "step": self.step,
            "settings": changed_fields(self.config, config),
            "proven_until": proven_until,
            "weights_sha256": hashlib.sha256(self._weights()).hexdigest(),
            "time": utc_now(),
        }
        clipping = {self.config.training.max_grad_norm, config.training.max_grad_norm}
        casts = config.model.dtype != self.config.model.dtype
        if casts or len(clipping) > 1 or _rule(before) != _rule(OptimizerAttributes.of(optimizer)):
            entry["optimizer"] = before.stored  # the optimizer of the earlier steps
        if self.origin.fork:
            entry["forked_before"] = self.origin.fork
        provenance = {**self.origin.provenance, "fork": entry}
        if self.origin.resumed:
            kept = [item for item in self.origin.resumed if item["step"] < self.step]
            provenance["resumed"] = kept
        table = self.attributes.get("parameters")
        retyped = [{**each, "dtype": config.model.dtype} for each in table or ()] if casts else ()
        return {
            "created": utc_now(),
            "config": values,
            "optimizer": optimizer,
            "provenance": provenance,
            **segments_attribute(self.attributes, values, self.step),
            **({"parameters": retyped} if retyped else {}),
        }

    def _weights(self) -> bytes:
        """Return the native bits of W at the step."""
        W: Any = open_group(self.path)["W"]
        native = native_type(self.types["W"])
        return as_bits(np.asarray(W[self.steps.index(self.step)]), native, "W").tobytes()

    def _check_weights(self, checkpoint: State) -> None:
        """Check that the weights of the step's checkpoint are those of its row."""
        group: Any = open_group(self.path)
        token = torch.from_numpy(np.asarray(group["token"][...]).astype(np.int64))
        weights = checkpoint.weights[self.parameter].index_select(0, token)
        if as_bits(weights, native_type(self.types["W"]), "W").tobytes() != self._weights():
            raise NothingToResume(
                f"the weights of the checkpoint of step {self.step} differ from {self.path}; "
                "remove that checkpoint, and fork again"
            )


def _rule(optimizer: OptimizerAttributes) -> dict[str, Any]:
    """Return the attributes of an optimizer that determine a step, without its rate."""
    settings = optimizer.hyperparameters.items()
    constant = {key: value for key, value in settings if key not in ("lr", "initial_lr")}
    return {"class": optimizer.path, **constant}
