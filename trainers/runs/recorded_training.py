"""A training run with a recorder: from its start or a checkpoint, with either loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trajstore.errors import RecordingError
from trajstore.populations import populations_from
from trajstore.schema import resolve_variables
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.capture import open_recorder
from trajstore.trainers.recording.device_to_host import Comparison
from trajstore.trainers.recording.hf_callback import TrajectoryCallback
from trajstore.trainers.recording.options import (
    RecordingOptions,
    Tokens,
    TrainingLoop,
    read_tokens,
    select_tokens,
)
from trajstore.trainers.recording.step_hooks import Recorder
from trajstore.trainers.runs.matrix_runs import matrices, shared_path
from trajstore.trainers.runs.run_state import RunState
from trajstore.trainers.runs.training_setup import Training
from trajstore.trainers.texts.corpus import Corpus


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
    if sources and "params" in resolve_variables(recording.variables):
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
    taken: RunState | None,
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
    taken : RunState or None
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
    first_step = 0 if taken is None else taken.step
    target = shared_path(target, training.config)

    def begin(scaler: Any) -> None:
        if taken is not None:
            taken.apply(training, scaler)

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
