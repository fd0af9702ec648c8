"""`record`: from a configuration to a recorded run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.attachment import capture
from trainers.callback import TrajectoryCallback
from trainers.checkpoint import Checkpoint, CheckpointFolder
from trainers.checkpointing import Checkpointing, TrainerCheckpoints
from trainers.config import RunConfig
from trainers.continuation import check_text, complete, find_checkpoint, notes
from trainers.corpus import Corpus, load_corpus
from trainers.recorder import Recorder
from trainers.state import restore_random, restore_state
from trainers.tokens import read_tokens, select_tokens
from trainers.training import Training, build_training
from trajstore.errors import InvalidArgument
from trajstore.target import check_target

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
    stop : callable
        Asked after every step; when it returns True the run is closed as ``interrupted``, with a
        checkpoint of that step.
    on_corpus, on_step, on_note : callable, optional
        Called with the `Corpus` when it is loaded, with the `Recorder` after every step, and with
        what should be known about a run that goes on.

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
        If the device is not there, or a field has changed that may not.

    Examples
    --------
    >>> from trainers import PRESETS
    >>> config = PRESETS["gatsby"]().with_values(["training.steps=200"])
    >>> record(config, "gatsby.zarr")                                # doctest: +SKIP
    """
    if resume and overwrite:
        raise InvalidArgument(
            "got both resume and overwrite; a run is either gone on with or replaced"
        )
    taken: Checkpoint | None = None
    sources = {}
    if resume:
        target = Path(path).absolute()
        taken = find_checkpoint(target, config)
        if taken.step >= config.training.steps:
            complete(target, fsync=fsync)
            return target
        sources = {name: file for name, file in taken.sources.items() if Path(file).exists()}
    else:
        target = check_target(path, overwrite=overwrite)
        CheckpointFolder(target).check()
    given = {"corpus": corpus, "tokenizer": tokenizer}
    sources |= {
        name: str(Path(file).absolute()) for name, file in given.items() if file is not None
    }
    text = load_corpus(config, **sources)
    if taken is not None:
        check_text(target, text)
    if on_corpus is not None:
        on_corpus(text)
    if taken is not None and on_note is not None:
        for note in notes(target, config, taken):
            on_note(note)
    counts = text.counts()
    recording = config.recording
    tokens: Any = recording.tokens
    if tokens not in ("all", "dead", "live"):
        tokens = read_tokens(tokens)
    # Before anything is built: an impossible choice should not cost a minute.
    select_tokens(tokens, config.model.vocab_size, counts == 0)
    training = build_training(config, text)
    options: dict[str, Any] = {
        "record": recording.record,
        "every": recording.every,
        "tokens": tokens,
        "logits_mode": recording.logits_mode,
        "is_dead": counts == 0,
        "token_count": counts,
        "token_text": text.token_text,
        "config": config.model_dump(mode="json"),
        "origin": text.provenance(),
        "memory": recording.memory,
        "block_rows": recording.block_rows,
        "encoding": recording.encoding,
        "overwrite": overwrite,
        "resume": resume,
        "fsync": fsync,
        "schedule": {
            "name": config.schedule.name,
            "warmup_steps": config.schedule.warmup_steps,
            "steps": config.decay_steps,
        },
        "on_step": on_step,
    }
    checkpointing = Checkpointing(
        training,
        target,
        every=recording.checkpoint_every,
        sources=sources,
        taken_from=taken,
        stop=stop,
        fsync=fsync,
    )
    run = _run_plain if config.training.loop == "plain" else _run_trainer
    run(training, target, options, checkpointing, taken)
    return target


def _run_plain(
    training: Training,
    target: Path,
    options: dict[str, Any],
    checkpointing: Checkpointing,
    taken: Checkpoint | None,
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
        **options,
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
    options: dict[str, Any],
    checkpointing: Checkpointing,
    taken: Checkpoint | None,
) -> None:
    trajectory = TrajectoryCallback(target, **options)
    checkpoints = TrainerCheckpoints(training, checkpointing, trajectory, taken)
    try:
        training.run([checkpoints, trajectory], first_step=0 if taken is None else taken.step)
    finally:
        trajectory.close()
    assert trajectory.recorder is not None
    checkpointing.finish(trajectory.recorder)
