"""`record`: from a configuration to a recorded run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.config import RunConfig
from trainers.recording.capture import capture
from trainers.recording.hf_callback import TrajectoryCallback
from trainers.recording.options import RecordingOptions
from trainers.recording.step_hooks import Recorder
from trainers.recording.token_selection import Tokens, read_tokens, select_tokens
from trainers.runs.checkpoint import Checkpoint, CheckpointFolder
from trainers.runs.checkpoint_schedule import Checkpointing, TrainerCheckpoints
from trainers.runs.resume_checks import check_text, complete, find_checkpoint, notes
from trainers.runs.run_plan import numeric_advice
from trainers.runs.training_setup import Training, build_training
from trainers.runs.training_state import restore_random, restore_state
from trainers.texts.corpus import Corpus, load_corpus
from trajstore.errors import InvalidArgument
from trajstore.optimizer_advice import require_sound
from trajstore.store.create import check_target

__all__ = ["record"]


def record(
    config: RunConfig,
    path: str | os.PathLike[str],
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    fsync: bool = False,
    strict_numerics: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_corpus: Callable[[Corpus], None] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Path:
    """Train and record a run, or go on with one.

    Parameters
    ----------
    config : RunConfig
        To go on with a run it must be the run's (`trainers.recorded_config`), but for
        ``training.steps``, ``recording.memory`` and ``recording.checkpoint_every``.
    path : path-like
        Where the run will be, by custom ``NAME.zarr``.
    corpus, tokenizer : path-like, optional
        In place of those that the configuration names, which are taken from the cache where they
        have been fetched, and else embedded. A run that goes on finds those it was given.
    overwrite : bool
        Replace a run that is there.
    resume : bool
        Go on from the newest checkpoint of the run that is there. One that has all the steps is
        marked complete.
    fsync : bool
        Have every commit and checkpoint survive a loss of power.
    strict_numerics : bool
        Refuse to train where the type of the optimizer's state keeps it from decaying or growing,
        or that of the weights keeps them from decaying, instead of saying so.
    stop : callable
        Asked after every step; when it returns True the run is closed as ``interrupted``, with a
        checkpoint of that step.
    on_corpus, on_step, on_note : callable, optional
        Called with the `Corpus` when it is loaded, with the `Recorder` after every step, and with
        what should be known about a run that goes on, and about the numerics of any; without
        `on_note` the latter is logged.

    Returns
    -------
    Path
        Of the run, complete if it was not stopped. When training fails, what is whole is committed
        as ``interrupted``.

    Raises
    ------
    RunExists
        If something is at `path`, and it is neither to be replaced nor gone on with; or a run that
        is named alike has its checkpoints where this one's would be.
    RunNotFound
        If there is no run to go on with.
    NothingToResume
        If the run cannot go on.
    InvalidArgument
        If the text or the tokenizer cannot be read.
    CorpusError
        If the text cannot be trained on, or is not that of the run that goes on; nothing has been
        made.
    ConfigError
        If the device is not there, a field has changed that may not, or the numerics are not sound
        and `strict_numerics` is set.

    Examples
    --------
    >>> from trainers import preset
    >>> config = preset("gatsby").with_values(["training.steps=2", "training.batch_size=4"])
    >>> path = record(config, "run.zarr")
    >>> from trajstore import open_run
    >>> open_run(path).W.shape
    (3, 128, 64)
    """
    if resume and overwrite:
        raise InvalidArgument(
            "got both resume and overwrite; a run is either gone on with or replaced"
        )
    if strict_numerics:
        require_sound(numeric_advice(config))
    if resume:
        target = Path(path).absolute()
        taken = find_checkpoint(target, config)
        if taken.step >= config.training.steps:
            complete(target, fsync=fsync)
            return target
    else:
        target = check_target(path, overwrite=overwrite)
        CheckpointFolder(target).check()
        taken = None
    sources = _sources(taken, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(config, **sources)
    if taken is not None:
        check_text(target, text)
    if on_corpus is not None:
        on_corpus(text)
    if taken is not None and on_note is not None:
        for note in notes(target, config, taken):
            on_note(note)
    # Before anything is built: an impossible choice should not cost a minute.
    options = _options(
        config,
        text,
        overwrite=overwrite,
        resume=resume,
        fsync=fsync,
        strict_numerics=strict_numerics,
    )
    training = build_training(config, text)
    checkpointing = Checkpointing(
        training,
        target,
        every=config.recording.checkpoint_every,
        sources=sources,
        taken_from=taken,
        stop=stop,
        fsync=fsync,
    )
    run = _run_plain if config.training.loop == "plain" else _run_trainer
    run(training, target, options, checkpointing, taken, on_step, on_note)
    return target


def _sources(taken: Checkpoint | None, **given: str | os.PathLike[str] | None) -> dict[str, str]:
    """Paths of the text and the tokenizer: as given now, or else as the first time."""
    before = {} if taken is None else taken.sources
    sources = {name: file for name, file in before.items() if Path(file).exists()}
    return sources | {
        name: str(Path(file).absolute()) for name, file in given.items() if file is not None
    }


def _options(config: RunConfig, text: Corpus, **choices: Any) -> RecordingOptions:
    """What the configuration records, with what is known of the text.

    Raises
    ------
    InvalidArgument
        If the tokens are impossible.
    """
    recording = config.recording
    counts = text.counts()
    tokens: Tokens = recording.tokens
    if recording.tokens not in ("all", "dead", "live"):
        tokens = read_tokens(recording.tokens)
    select_tokens(tokens, config.model.vocab_size, counts == 0)
    return RecordingOptions(
        record=recording.record,
        every=recording.every,
        tokens=tokens,
        logits_mode=recording.logits_mode,
        is_dead=counts == 0,
        token_count=counts,
        token_text=text.token_text,
        config=config.model_dump(mode="json"),
        origin=text.provenance(),
        memory=recording.memory,
        block_rows=recording.block_rows,
        encoding=recording.encoding,
        schedule={
            "name": config.schedule.name,
            "warmup_steps": config.schedule.warmup_steps,
            "steps": config.decay_steps,
        },
        **choices,
    )


def _run_plain(
    training: Training,
    target: Path,
    options: RecordingOptions,
    checkpointing: Checkpointing,
    taken: Checkpoint | None,
    on_step: Callable[[Recorder], None] | None,
    on_note: Callable[[str], None] | None,
) -> None:
    first_step = 0
    if taken is not None:
        restore_state(training, taken, training.scaler)
        first_step = taken.step
    with capture(
        training.model,
        training.optimizer,
        target,
        scaler=training.scaler,
        max_grad_norm=training.config.training.max_grad_norm,
        first_step=first_step,
        on_step=on_step,
        on_note=on_note,
        **vars(options),
    ) as recorder:
        if taken is not None:
            restore_random(training, taken)
        training.run(
            first_step=first_step,
            on_step_end=lambda: checkpointing.after_step(recorder, training.scaler),
        )
    checkpointing.finish(recorder)


def _run_trainer(
    training: Training,
    target: Path,
    options: RecordingOptions,
    checkpointing: Checkpointing,
    taken: Checkpoint | None,
    on_step: Callable[[Recorder], None] | None,
    on_note: Callable[[str], None] | None,
) -> None:
    trajectory = TrajectoryCallback(target, on_step=on_step, on_note=on_note, **vars(options))
    checkpoints = TrainerCheckpoints(training, checkpointing, trajectory, taken)
    try:
        training.run([checkpoints, trajectory], first_step=0 if taken is None else taken.step)
    finally:
        trajectory.close()
    assert trajectory.recorder is not None
    checkpointing.finish(trajectory.recorder)
