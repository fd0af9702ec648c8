"""`record`: trains a configuration and records the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument, RunExists
from trajstore.optimizer_advice import require_sound
from trajstore.store.metadata.metadata_form import recorded_threads
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.create import check_target
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.recording.notes import report_notes
from trajstore.trainers.recording.options import slower_threads, torch_threads
from trajstore.trainers.runs.changed_settings import (
    check_text,
    find_resume_point,
    recorded_config,
    resume_notes,
)
from trajstore.trainers.runs.checkpoint import CheckpointFolder, Checkpointing
from trajstore.trainers.runs.retraining import recording_options, retrain_to_last_row, run_recorded
from trajstore.trainers.runs.run_plan import existing_runs, numeric_advice, planned_runs
from trajstore.trainers.runs.run_state import RunState, holds_state
from trajstore.trainers.runs.training_setup import build_training, find_device, with_products
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
    threads: Count | None = None,
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
        ``training.steps``, ``recording.memory``, ``recording.commit_every`` and
        ``recording.checkpoint_every`` may change.
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
    threads : int, optional
        Threads of torch on the CPU, on which the bits of the training depend. `provenance` stores
        the number. Default: a resumed run keeps its number; a new run uses torch's default.
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
        If the text or the tokenizer cannot be read, or `threads` is less than 1.
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
    taken: RunState | None = None
    in_rows = False
    found = location(path).absolute()
    existing = existing_runs(found) if resume else ()
    runs = existing or planned_runs(found, config)
    target, last = runs[0], 0
    if existing:
        if config.training.products == "auto":
            chosen = recorded_config(target).training.products
            config = config.with_values([f"training.products={chosen}"])
        in_rows = holds_state(target, config)
        before = find_resume_point(existing, config, in_rows=in_rows)
        if before.has_all(config.training.steps):
            if before.complete:
                note = (
                    f"{found} has all {before.last_step} steps already, so no step is trained; "
                    f"to extend it, use resume=True and training.steps={2 * before.last_step}"
                )
                report_notes([note], on_note)
            else:  # its configuration must stay that of its rows
                for run in runs:
                    RunWriter.resume(run, commit_every=None, fsync=fsync).close("complete")
            return found
        taken, last = before.taken, before.last_step
    resume = last > 0
    # An existing run without steps was killed before its first commit.
    overwrite = not resume and (overwrite or bool(existing))
    if not resume:
        target, *others = (
            check_target(run, overwrite=overwrite) for run in planned_runs(path, config)
        )
        if others and found.exists():
            raise RunExists(
                f"{path} exists, but is the common name of the two runs of untied weights; choose "
                "another path"
            )
        CheckpointFolder(target).check()
    config, products = with_products(config)
    recorded = open_group(target).attrs.asdict() if resume else None
    sources = text_sources(taken, recorded, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(config, **sources)
    if existing:
        check_text(target, text)
    # Before the training, so that an impossible choice is reported at once.
    options = recording_options(
        config,
        text,
        overwrite=overwrite,
        resume=resume,
        fsync=fsync,
        strict_numerics=strict_numerics,
        sources=sources,
    )
    if resume and in_rows:
        taken = RunState.from_row(
            target, last, recorded_config(target, after=last), sources=sources
        )
    elif resume and taken is None:
        note = (
            f"{target} has no checkpoint, so its {last} steps are trained again and "
            "compared with the recorded rows before it resumes"
        )
        report_notes([note], on_note)
        taken = retrain_to_last_row(
            target, text, sources=sources, fsync=fsync, on_retrain=on_retrain
        )
    if on_corpus is not None:
        on_corpus(text)
    if products is not None and on_products is not None:
        on_products(products)
    if threads is None and recorded is not None:
        threads = recorded_threads(recorded, last)
    with torch_threads(threads):
        if taken is not None:
            report_notes(resume_notes(target, config, taken), on_note)
        training = build_training(config, text)
        if threads is None and training.device.type == "cpu":
            report_notes(filter(None, [slower_threads()]), on_note)
        checkpointing = Checkpointing(
            training,
            target,
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
    return found


def text_sources(
    taken: RunState | None,
    recorded: Mapping[str, Any] | None,
    **given: str | os.PathLike[str] | None,
) -> dict[str, str]:
    """Return paths of the text and the tokenizer.

    Parameters
    ----------
    taken : RunState or None
        State with the paths that were given before.
    recorded : mapping or None
        Attributes of a run, which name them if it needs no checkpoint.
    **given : path-like or None
        Paths that precede these.
    """
    before: Mapping[str, str] = attribute(recorded or {}, "provenance", "sources") or {}
    if taken is not None:
        before = taken.sources
    sources = {name: file for name, file in before.items() if Path(file).exists()}
    return sources | {
        name: str(Path(file).absolute()) for name, file in given.items() if file is not None
    }
