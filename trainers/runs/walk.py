"""The training of a run with a recorder, and the same training repeated.

`run_recorded` trains from the start or from a state, with either loop. `walk` compares every row
with the recorded one, all its variables, bit for bit. So it ends in the state that the run had.
Resume, fork, develop and prove walk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trajstore.errors import RecordingError
from trajstore.populations import populations_from
from trajstore.schema import resolve_variables
from trajstore.store.metadata.metadata_form import Segment, trained_segments
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.config import RunConfig
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.capture import Recorder, open_recorder
from trajstore.trainers.recording.existing_run import Comparison
from trajstore.trainers.recording.hf_callback import TrajectoryCallback
from trajstore.trainers.recording.options import (
    RecordingOptions,
    Tokens,
    TrainingLoop,
    read_tokens,
    select_tokens,
)
from trajstore.trainers.runs.run_plan import matrices, shared_path
from trajstore.trainers.runs.training_setup import Training, build_training
from trajstore.trainers.states.state import State
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
    state: State | None,
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
    state : State or None
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
    first_step, states = 0 if state is None else state.step, [state]
    del state  # it is as large as the training
    target = shared_path(target, training.config)

    def begin(scaler: Any) -> None:
        if (start := states.pop()) is not None:
            training.load(start, scaler)

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


def walk(
    run: Location,
    text: Corpus,
    start: State | None,
    stop: int,
    compared: Comparison,
    *,
    sources: Mapping[str, str],
    part: Path | None = None,
    on_step: Progress | None = None,
) -> State | None:
    """Repeat the training of a run from a state, and compare its rows. The run is only read.

    Each segment has its own configuration, and on the CPU its number of threads.

    Parameters
    ----------
    run : Path or RemotePath
    text : Corpus
        Text of the run.
    start : State or None
        Earlier state of the run; None for its start.
    stop : int
        Step to reach, which has a row; 1 or more.
    compared : Comparison
        Takes the first difference. The training ends there, unless rows after it are wanted.
    sources : mapping of str to str
        Given paths of the text and the tokenizer.
    part : Path, optional
        Compare nothing, but record the steps to this path, with the whole state and the digests.
    on_step : callable, optional
        Called after every step with the step and the last one.

    Returns
    -------
    State or None
        The state after the last step; None if a difference has ended the training.

    Raises
    ------
    ConfigError
        If the device of the configuration is not available.
    """
    attributes = root_attributes(run)
    reached = start

    def train(segment: Segment) -> State | None:
        states: list[State] = []
        config = RunConfig.parse(segment.config)
        if part is not None:
            config = config.with_values([_WHOLE])
        training = build_training(config, text)

        def after_step(recorder: Recorder, scaler: Any) -> bool:
            if on_step is not None:
                on_step(recorder.step, stop)
            if compared.is_over:
                return True
            if recorder.step >= segment.last:
                created = str(attributes["created"])
                states.append(training.state(recorder, scaler, run=created, sources=sources))
            return bool(states)

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
            comparison=compared if part is None else None,
        )
        return states[0] if states else None

    try:
        for segment in trained_segments(attributes, 0 if start is None else start.step, stop):
            with process_mode(segment.threads, segment.modes):
                reached = train(segment)
            if reached is None:
                break
    finally:
        compared.close()
    return reached
