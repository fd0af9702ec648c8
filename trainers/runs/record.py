"""`record`: trains a configuration and records the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, NothingToResume, RunExists
from trajstore.optimizer_advice import require_sound
from trajstore.provenance import RunAttributes
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.create import check_target
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.config import RunConfig
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.recording.existing_run import Comparison
from trajstore.trainers.recording.notes import report_notes
from trajstore.trainers.recording.options import slower_threads
from trajstore.trainers.runs.changed_settings import (
    ResumePoint,
    check_text,
    find_resume_point,
    recorded_config,
    resume_notes,
)
from trajstore.trainers.runs.checkpointing import Checkpointing
from trajstore.trainers.runs.differences import explain_difference
from trajstore.trainers.runs.run_plan import (
    existing_runs,
    numeric_advice,
    planned_runs,
    shared_path,
)
from trajstore.trainers.runs.training_setup import build_training, find_device, with_products
from trajstore.trainers.runs.walk import Progress, recording_options, run_recorded, walk
from trajstore.trainers.states.checkpoints import CheckpointFolder
from trajstore.trainers.states.state import State
from trajstore.trainers.texts import Corpus, load_corpus


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
    stop: Callable[[], bool] = lambda: False,
    on_corpus: Callable[[Corpus], None] | None = None,
    on_products: Callable[[str], None] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    on_retrain: Callable[[int, int], None] | None = None,
) -> Location:
    """Train and record a run, or resume one.

    Parameters
    ----------
    config : RunConfig
        A resumed run needs its own configuration (`trainers.recorded_config`). Only
        ``training.steps``, ``training.threads``, ``recording.memory``, ``recording.commit_every``
        and ``recording.checkpoint_every`` may change.
    path : path-like
        Path of the run, by custom ``NAME.zarr``. With untied weights each matrix has a run,
        ``NAME.<parameter>.zarr``.
    corpus, tokenizer : path-like, optional
        Replace the text and tokenizer of the configuration, which come from the cache or are
        embedded. A resumed run uses the paths that it was given before.
    overwrite : bool
        Replace an existing run.
    resume : bool
        Resume the run from its newest checkpoint; a run with everything, from its last row. Without
        either, repeat its steps and compare each row with the recorded one. Without a run or rows,
        start the training. A run with all its steps is marked complete.
    fsync : bool
        Make every commit and checkpoint survive a loss of power.
    strict_numerics : bool
        Raise an error instead of a note if the optimizer's state cannot decay or grow in its type,
        or the weights cannot decay in theirs.
    stop : callable
        Called after every recorded step. If it returns True, the run is closed as ``interrupted``,
        with a checkpoint of that step.
    on_corpus, on_products, on_step, on_note : callable, optional
        Called with the `Corpus` when the recording starts, with a sentence about the choice of
        ``training.products`` if it was ``auto``, with the `Recorder` after every step, and with
        notes about a resumed run and about the numerics. Without `on_note` the notes are
        logged.
    on_retrain : callable, optional
        Called after every repeated step, with the step and the last one to repeat.

    Returns
    -------
    Path or RemotePath
        `path` as an absolute path. The run is complete unless it was stopped. If training fails,
        all complete rows are committed, and the run is ``interrupted``.

    Raises
    ------
    RunExists
        If `path` exists, and neither `overwrite` nor `resume` is set; or if another run stores its
        checkpoints at the same path.
    NothingToResume
        If the run cannot be resumed: it was imported or computed, or repeating its training gives
        other rows. It stays unchanged.
    InvalidArgument
        If the text or the tokenizer cannot be read.
    CorpusError
        If the text cannot be trained on, or differs from that of the resumed run; nothing is
        written.
    ConfigError
        If the device is not available, a fixed field has changed, or the numerics are unsound and
        `strict_numerics` is set.

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
            "got both resume and overwrite; use either resume or overwrite, not both"
        )
    if strict_numerics:
        require_sound(numeric_advice(config))
    find_device(config.training.device)  # first, because an existing run would hide this error
    name = location(path).absolute()
    runs = existing_runs(name) if resume else ()
    if runs and config.training.products == "auto":
        recorded = recorded_config(runs[0]).training.products
        config = config.with_values([f"training.products={recorded}"])
    existing = find_resume_point(runs, config) if runs else None
    if existing is not None and existing.has_all(config.training.steps):
        _complete(name, existing, fsync=fsync, on_note=on_note)
        return name
    # Without steps, an existing run was killed before its first commit or checkpoint.
    point = existing if existing is not None and existing.has_steps else None
    overwrite = point is None and (overwrite or existing is not None)
    new = shared_path(existing.runs[0], config) if existing else path
    target = point.runs[0] if point else _check_new(new, config, overwrite=overwrite)
    CheckpointFolder(target).check()
    config, products = with_products(config)
    attributes = root_attributes(target) if point else {}
    state = point.state if point else None
    threads = config.training.threads
    sources = text_sources(state, attributes, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(config, **sources)
    if existing is not None:
        check_text(target, text)
    # Before the training, so that an impossible choice is reported at once.
    options = recording_options(
        config,
        text,
        overwrite=overwrite,
        resume=point is not None,
        fsync=fsync,
        strict_numerics=strict_numerics,
        sources=sources,
    )
    if point is not None:
        if state is None:
            state = _repeated(point, text, sources, fsync, on_note, on_retrain)
        if threads is None:
            threads = RunAttributes.of(attributes).threads_after(point.last_step)
    if on_corpus is not None:
        on_corpus(text)
    if products is not None and on_products is not None:
        on_products(products)
    with process_mode(threads):
        if state is not None:
            report_notes(resume_notes(target, config, state), on_note)
        training = build_training(config, text)
        if threads is None and training.device.type == "cpu":
            report_notes(filter(None, [slower_threads()]), on_note)
        checkpointing = Checkpointing(
            training, target, sources=sources, taken_from=state, stop=stop, fsync=fsync
        )
        states = [state]
        del state, point, existing  # it is as large as the training that follows
        with closing(checkpointing):
            recorder = run_recorded(
                training,
                target,
                options,
                states.pop(),
                after_step=checkpointing.after_step,
                on_step=on_step,
                on_note=on_note,
            )
        checkpointing.finish(recorder)
    return name


def _complete(
    name: Location, point: ResumePoint, *, fsync: bool, on_note: Callable[[str], None] | None
) -> None:
    """Mark the runs of a training complete, which has all its steps; note it if they are."""
    if point.complete:
        note = (
            f"{name} has all {point.last_step} steps already, so no step is trained; to extend "
            f"it, use resume=True and training.steps={2 * point.last_step}"
        )
        report_notes([note], on_note)
        return
    for run in point.runs:  # its configuration must stay that of its rows
        RunWriter.resume(run, commit_every=None, fsync=fsync, on_note=on_note).close("complete")


def _check_new(path: RunPath, config: RunConfig, *, overwrite: bool) -> Location:
    """Check that the runs of a new training may be created, and return the path of the first.

    Raises
    ------
    RunExists
        If a path is taken.
    """
    target, *others = (check_target(run, overwrite=overwrite) for run in planned_runs(path, config))
    if others and location(path).exists():
        raise RunExists(
            f"{path} exists, but is the common name of the two runs of untied weights; choose "
            "another path"
        )
    return target


def _repeated(
    point: ResumePoint,
    text: Corpus,
    sources: dict[str, str],
    fsync: bool,
    on_note: Callable[[str], None] | None,
    on_retrain: Progress | None,
) -> State:
    """Return the state after the last row by repeating all steps; keep it as a checkpoint."""
    run, last = point.runs[0], point.last_step
    note = (
        f"{run} has no checkpoint, so its {last} steps are trained again and compared with the "
        "recorded rows before it resumes"
    )
    report_notes([note], on_note)
    with RunLock.acquire(run):
        compared = Comparison()
        state = walk(run, text, None, last, compared, sources=sources, on_step=on_retrain)
        if compared.difference is not None or state is None:
            assert compared.difference is not None
            reason = explain_difference(run, compared.difference)
            raise NothingToResume(
                f"{run} has no checkpoint, and repeating its training gives other rows: {reason}; "
                "the run is unchanged; resume it on the machine and with the versions that "
                "recorded it"
            )
        CheckpointFolder(run, fsync=fsync).add(state, state.rows)
    return state


def text_sources(
    state: State | None,
    attributes: Mapping[str, Any],
    **given: str | os.PathLike[str] | None,
) -> dict[str, str]:
    """Return paths of the text and the tokenizer.

    Parameters
    ----------
    state : State or None
        State with the paths that were given before.
    attributes : mapping
        Attributes of a run, which name them if it needs no checkpoint.
    **given : path-like or None
        Paths that precede these.
    """
    if state is not None:
        before: Mapping[str, str] = state.sources
    else:
        before = RunAttributes.of(attributes).sources
    sources = {name: file for name, file in before.items() if Path(file).exists()}
    return sources | {
        name: str(Path(file).absolute()) for name, file in given.items() if file is not None
    }
