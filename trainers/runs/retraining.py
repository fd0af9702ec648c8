"""The training of a run with a recorder, and the same training repeated.

`run_recorded` trains from the start or from a state, with either loop. `train_again` compares every
row with the recorded one, all its variables, bit for bit. So it ends in the state that the run had,
and the run may resume from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.errors import NothingToResume, RecordingError
from trajstore.populations import populations_from
from trajstore.schema import resolve_variables
from trajstore.store.metadata.metadata_form import Segment, trained_segments
from trajstore.store.reading.open_group import open_group, root_attributes
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.config import RunConfig
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.capture import Recorder, open_recorder
from trajstore.trainers.recording.existing_run import Comparison, RowDifference
from trajstore.trainers.recording.hf_callback import TrajectoryCallback
from trajstore.trainers.recording.options import (
    RecordingOptions,
    Tokens,
    TrainingLoop,
    read_tokens,
    select_tokens,
)
from trajstore.trainers.runs.changed_settings import recorded_config
from trajstore.trainers.runs.checkpoint import CheckpointFolder
from trajstore.trainers.runs.differences import explain_difference
from trajstore.trainers.runs.run_plan import matrices, planned_runs, shared_path
from trajstore.trainers.runs.run_state import RunState
from trajstore.trainers.runs.training_setup import Training, build_training
from trajstore.trainers.texts import Corpus

Progress = Callable[[int, int], None]
"""Called with the step and the last one to repeat."""


_WHOLE = "recording.variables=everything,params_digest,step_digest"
"""Setting with which developed steps are recorded."""


def recording_options(
    config: RunConfig, text: Corpus, *, sources: Mapping[str, str] | None = None, **choices: Any
) -> RecordingOptions:
    """Return the options of a configuration with the facts about the text.

    Parameters
    ----------
    config : RunConfig
    text : Corpus
    sources : mapping of str to str, optional
        Given paths of the text and the tokenizer, for a run with everything.
    **choices
        Options of `RecordingOptions` that no configuration has, such as ``overwrite``.

    Raises
    ------
    InvalidArgument
        If the tokens are impossible.
    """
    recording = config.recording
    counts = text.counts()
    origin = text.provenance()
    if sources and {"params", "params_digest"}.intersection(resolve_variables(recording.variables)):
        origin["sources"] = dict(sources)
    tokens: Tokens = recording.tokens
    if recording.tokens not in ("all", "dead", "live"):
        tokens = read_tokens(recording.tokens)
    select_tokens(tokens, config.model.vocab_size, counts == 0)
    return RecordingOptions(
        variables=recording.variables,
        every=recording.every,
        tokens=tokens,
        logits_mode=recording.logits_mode,
        is_dead=counts == 0,
        token_count=counts,
        token_text=text.token_text,
        parameter=matrices(config),
        populations=populations_from(recording.populations),
        config=config.model_dump(mode="json"),
        origin=origin,
        encoding=recording.encoding,
        memory=recording.memory,
        block_rows=recording.block_rows,
        keyframe_every=recording.keyframe_every,
        commit_every=recording.commit_every or None,
        strict=True,
        schedule={
            "name": config.schedule.name,
            "warmup_steps": config.schedule.warmup_steps,
            "steps": config.decay_steps,
        },
        **choices,
    )


def run_recorded(
    training: Training,
    target: Location,
    options: RecordingOptions,
    state: RunState | None,
    *,
    after_step: Callable[[Recorder, Any], bool],
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    comparison: Comparison | None = None,
) -> Recorder:
    """Train, and record every step or compare it with an existing run.

    Parameters
    ----------
    training : Training
    target : Path or RemotePath
        Path of the run, or of the first run.
    options : RecordingOptions
    state : RunState or None
        State from which the training starts.
    after_step : callable
        Called after every step, when everything is ready for the next one, with the recorder and
        the loop's gradient scaler; returns True to stop.
    on_step : callable, optional
        Called with the recorder after every optimizer step.
    on_note : callable, optional
        Called with each sentence of advice about the numerics; default: they are logged.
    comparison : Comparison, optional
        Compare instead of recording.

    Returns
    -------
    Recorder
        The closed recorder.
    """
    first_step = 0 if state is None else state.step
    target = shared_path(target, training.config)

    def begin(scaler: Any) -> None:
        if state is not None:
            state.apply(training, scaler)

    if training.batches is None:
        trajectory = TrajectoryCallback(target, on_step=on_step, on_note=on_note, **vars(options))
        trajectory.comparison = comparison
        trajectory.prints_end = False
        try:
            training.run(
                [trajectory],
                first_step=first_step,
                on_begin=begin,
                on_step_end=lambda scaler: after_step(_attached(trajectory), scaler),
            )
        finally:
            trajectory.close()
        return _attached(trajectory)
    begin(training.scaler)
    max_grad_norm = training.config.training.max_grad_norm
    loop = TrainingLoop(
        scaler=training.scaler,
        max_grad_norm=max_grad_norm,
        first_step=first_step,
        schedule={"max_grad_norm": max_grad_norm},
        examples=training.config.examples,
    )
    with open_recorder(
        training.model,
        training.optimizer,
        target,
        options,
        loop,
        on_step=on_step,
        on_note=on_note,
        comparison=comparison,
    ) as recorder:
        training.run(first_step=first_step, on_step_end=lambda scaler: after_step(recorder, scaler))
    if recorder.writer is None:
        raise RecordingError(
            f"the gradient scaler skipped every step, so {target} was not written; train more "
            "steps, or set another training.autocast"
        )
    return recorder


def _attached(trajectory: TrajectoryCallback) -> Recorder:
    assert trajectory.recorder is not None
    return trajectory.recorder


@dataclass(frozen=True, kw_only=True, eq=False)
class Retrained:
    """Result of a repeated training.

    Attributes
    ----------
    agreed : int
        Rows that agree, before the difference.
    state : RunState or None
        State after the requested step; None if an earlier row differed and no writer took the
        following rows.
    difference : RowDifference or None
        The first row that differs from the recorded one.
    """

    agreed: int
    state: RunState | None
    difference: RowDifference | None


def train_again(
    run: Location,
    text: Corpus,
    start: RunState | None,
    step: int,
    *,
    sources: Mapping[str, str],
    make_writer: Callable[[int], RunWriter] | None = None,
    first_row: int = 0,
    part: Path | None = None,
    on_retrain: Progress | None = None,
) -> Retrained:
    """Repeat the training of a run up to a step. The run is only read.

    Each segment has its own configuration, and on the CPU its number of threads.

    Parameters
    ----------
    run : Path or RemotePath
    text : Corpus
        Text of the run.
    start : RunState or None
        Earlier state of the run to start from; None for its start.
    step : int
        Step to reach, which has a row; 1 or more.
    sources : mapping of str to str
        Given paths of the text and the tokenizer.
    make_writer : callable, optional
        Called with the number of the first different row; returns a writer for that row and all
        later ones. Without it, training stops there.
    first_row : int
        Number of the first row to compare.
    part : Path, optional
        Compare nothing, but record the steps to this path, with the whole state and the digests.
    on_retrain : callable, optional
        Called after every step with the step and the step to reach.

    Raises
    ------
    ConfigError
        If the device of the configuration is not available.
    """
    attributes = root_attributes(run)
    created = str(attributes["created"])
    comparison = Comparison(make_writer, first_row=first_row)
    reached = start

    def train(segment: Segment) -> RunState | None:
        """Return the state after a segment; None if rows after a difference are lost."""
        states: list[RunState] = []
        config = RunConfig.parse(segment.config)
        if part is not None:
            config = config.with_values([_WHOLE])
        training = build_training(config, text)

        def after_step(recorder: Recorder, scaler: Any) -> bool:
            if on_retrain is not None:
                on_retrain(recorder.step, step)
            lost = comparison.difference is not None and comparison.successor is None
            ends = lost or recorder.step >= segment.last
            if ends and not lost:
                states.append(
                    RunState.take(
                        training, scaler, recorder, run=created, name=run.name, sources=sources
                    )
                )
            return ends

        run_recorded(
            training,
            run if part is None else part,
            recording_options(
                config,
                text,
                sources=sources if part is not None else None,
                resume=part is None or part.exists(),
            ),
            reached,
            after_step=after_step,
            on_note=lambda note: None,  # the recording reported its notes
            comparison=comparison if part is None else None,
        )
        return states[0] if states else None

    try:
        for segment in trained_segments(attributes, 0 if start is None else start.step, step):
            with process_mode(segment.threads, segment.modes):
                reached = train(segment)
            if reached is None:
                break
    finally:
        comparison.close()
    return Retrained(agreed=comparison.agreed, state=reached, difference=comparison.difference)


def retrain_to_last_row(
    run: Location,
    text: Corpus,
    *,
    sources: Mapping[str, str],
    fsync: bool = True,
    on_retrain: Progress | None = None,
) -> RunState:
    """Return the state after the last row of a run without one, by repeating all its steps.

    It is stored as a checkpoint for the next time.

    Raises
    ------
    NothingToResume
        If a row differs from the recorded one; the run stays unchanged.
    RunLocked
        If another process writes to the run.
    """
    with RunLock.acquire(run):
        config = recorded_config(run)
        runs = planned_runs(shared_path(run, config), config)
        groups: list[Any] = [open_group(path) for path in runs]
        rows = min(int(group.attrs["committed_rows"]) for group in groups)
        step = int(groups[0]["step"][rows - 1])
        reached = train_again(run, text, None, step, sources=sources, on_retrain=on_retrain)
        if reached.difference is not None:
            reason = explain_difference(run, reached.difference)
            raise NothingToResume(
                f"{run} has no checkpoint, and repeating its training gives other rows: {reason}; "
                "the run is unchanged; resume it on the machine and with the versions that "
                "recorded it"
            )
        assert reached.state is not None
        CheckpointFolder(run, fsync=fsync).add(reached.state, rows)
    return reached.state
