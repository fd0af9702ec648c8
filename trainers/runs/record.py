"""`record`: from a configuration to a recorded run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from trajstore.argument_types import checks_types
from trajstore.errors import InvalidArgument
from trajstore.optimizer_advice import require_sound
from trajstore.store.metadata.stretches import recorded_threads
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.create import check_target
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.numeric_advice import report_notes
from trajstore.trainers.recording.step_hooks import Recorder
from trajstore.trainers.recording.torch_threads import check_threads, torch_threads
from trajstore.trainers.runs.checkpoint import Checkpoint, CheckpointFolder
from trajstore.trainers.runs.checkpoint_schedule import Checkpointing
from trajstore.trainers.runs.recorded_training import recording_options, run_recorded
from trajstore.trainers.runs.resume_checks import (
    ResumePoint,
    check_text,
    find_resume_point,
    resume_notes,
)
from trajstore.trainers.runs.retraining import retrain_to_last_row
from trajstore.trainers.runs.run_plan import numeric_advice
from trajstore.trainers.runs.training_setup import build_training, find_device
from trajstore.trainers.texts.corpus import Corpus, load_corpus

__all__ = ["record", "text_sources"]


@checks_types
def record(
    config: RunConfig,
    path: RunPath,
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    fsync: bool = True,
    strict_numerics: bool = False,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_corpus: Callable[[Corpus], None] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    on_retrain: Callable[[int, int], None] | None = None,
) -> Location:
    """Train and record a run, or go on with one.

    Parameters
    ----------
    config : RunConfig
        To go on with a run it must be the run's (`trainers.recorded_config`), but for
        ``training.steps``, ``recording.memory``, ``recording.commit_every`` and
        ``recording.checkpoint_every``.
    path : path-like
        Where the run will be, by custom ``NAME.zarr``.
    corpus, tokenizer : path-like, optional
        In place of those that the configuration names, which are taken from the cache where they
        have been fetched, and else embedded. A run that goes on finds those it was given.
    overwrite : bool
        Replace a run that is there.
    resume : bool
        Go on with the run that is there from its newest checkpoint. Without one, its steps are
        trained again, and each row is compared with the recorded one. Without rows, or a run, it
        begins; one that has all the steps is marked complete.
    fsync : bool
        Have every commit and checkpoint survive a loss of power.
    strict_numerics : bool
        Refuse to train where the type of the optimizer's state keeps it from decaying or growing,
        or that of the weights keeps them from decaying, instead of saying so.
    threads : int, optional
        Of torch on the CPU, on which the bits of a training depend; `provenance` keeps the number.
        Without it, a run that goes on has the number that it had, and another one torch's own.
    stop : callable
        Asked after every step that is recorded; when it returns True the run is closed as
        ``interrupted``, with a checkpoint of that step.
    on_corpus, on_step, on_note : callable, optional
        Called with the `Corpus` when the recording begins, with the `Recorder` after every step,
        and with what should be known about a run that goes on, and about the numerics of any;
        without `on_note` the notes are logged.
    on_retrain : callable, optional
        Called after every step that is trained again, with it and the last of them.

    Returns
    -------
    Path or RemotePath
        Of the run, complete if it was not stopped. When training fails, what is whole is committed
        as ``interrupted``.

    Raises
    ------
    RunExists
        If something is at `path`, and it is neither to be replaced nor gone on with; or a run that
        is named alike has its checkpoints where this one's would be.
    NothingToResume
        If the run cannot go on: it was imported or computed, or trained again it is not what was
        recorded. It stays as it was.
    InvalidArgument
        If the text or the tokenizer cannot be read, or `threads` is less than 1.
    CorpusError
        If the text cannot be trained on, or is not that of the run that goes on; nothing has been
        made.
    ConfigError
        If the device is not there, a field has changed that may not, or the numerics are not sound
        and `strict_numerics` is set.

    Examples
    --------
    >>> from trajstore.trainers import preset
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
    check_threads(threads)
    if strict_numerics:
        require_sound(numeric_advice(config))
    find_device(config.training.device)  # before what is there, which would hide that
    before: ResumePoint | None = None
    target = location(path).absolute()
    resume = resume and target.exists()
    if resume:
        before = find_resume_point(target, config)
        if before.has_all(config.training.steps):
            if before.complete:
                note = (
                    f"{target} has all {before.last_step} steps already, so nothing is trained; "
                    f"to extend it, give more: --resume --steps {2 * before.last_step}"
                )
                report_notes([note], on_note)
            else:  # its configuration stays that which its rows were made with
                RunWriter.resume(target, commit_every=None, fsync=fsync).close("complete")
            return target
        resume = before.last_step > 0
    if not resume:
        # What is there has no steps: whoever made it was killed before the first was committed.
        target = check_target(path, overwrite=overwrite or before is not None)
        CheckpointFolder(target).check()
    taken = before.taken if before is not None else None
    sources = text_sources(taken, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(config, **sources)
    if before is not None:
        check_text(target, text)
    # Before anything is trained: an impossible choice should not cost a minute.
    options = recording_options(
        config,
        text,
        overwrite=overwrite or (before is not None and not resume),
        resume=resume,
        fsync=fsync,
        strict_numerics=strict_numerics,
    )
    if before is not None and resume and taken is None:
        note = (
            f"{target} has no checkpoint, so its {before.last_step} steps are trained again and "
            "compared with what was recorded, before it goes on"
        )
        report_notes([note], on_note)
        taken = retrain_to_last_row(
            target, text, sources=sources, fsync=fsync, on_retrain=on_retrain
        )
    if on_corpus is not None:
        on_corpus(text)
    if threads is None and before is not None and resume:
        threads = recorded_threads(open_group(target).attrs.asdict(), before.last_step)
    with torch_threads(threads):
        if taken is not None:
            report_notes(resume_notes(target, config, taken), on_note)
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
        with closing(checkpointing):
            recorder = run_recorded(
                training,
                target,
                options,
                taken,
                after_step=checkpointing.after_step,
                on_step=on_step,
                on_note=on_note,
            )
        checkpointing.finish(recorder)
    return target


def text_sources(
    taken: Checkpoint | None, **given: str | os.PathLike[str] | None
) -> dict[str, str]:
    """Paths of the text and the tokenizer: as given now, or else as the first time."""
    before = {} if taken is None else taken.sources
    sources = {name: file for name, file in before.items() if Path(file).exists()}
    return sources | {
        name: str(Path(file).absolute()) for name, file in given.items() if file is not None
    }
