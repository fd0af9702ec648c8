"""The commands `record` and `fork`, which train a model and record it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.arguments import format_bytes, format_duration
from trajstore.cli.options import RUN
from trajstore.cli.output import err, out
from trajstore.cli.stop_signals import StopRequest
from trajstore.errors import InvalidArgument, needs_extra
from trajstore.trainers.commands.configuration import (
    CORPUS,
    FSYNC,
    SET,
    STEPS,
    THREADS,
    TOKENIZER,
    configuration,
    configured,
    is_named,
    recording,
    settings_of,
    stem_of,
)
from trajstore.trainers.commands.dry_run import print_plan
from trajstore.trainers.commands.recording_progress import RecordingProgress

if TYPE_CHECKING:
    from trajstore.store.storage.remote_path import Location, RunPath
    from trajstore.trainers import RunConfig


_PASSED_ON = ("corpus", "tokenizer", "overwrite", "fsync", "threads")
"""Options that the training takes as they are; the configuration holds the others."""


@click.command()
@configuration
@recording
@click.option("-o", "--output", type=click.Path(), help="Path of the run; default: NAME.zarr.")
@click.option("--seed", type=int, help="Random seed.")
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run if it exists, otherwise start it. --steps may be larger.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
@click.option("--dry-run", is_flag=True, help="Print rows, files, memory and sizes; train nothing.")
@THREADS
@needs_extra("record", "train")
def record(output: str | None, resume: bool, dry_run: bool, **options: Any) -> None:
    """Train a model and record every optimizer step.

    Ctrl-C and SIGTERM stop the training after the current step; --resume continues it. If the
    process is killed, the rows of the last seconds are lost. With --resume, the same command line
    starts a run and resumes it after a kill. Without a checkpoint, --resume trains the recorded
    steps again and compares them.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore record --preset wordybird-1b --dry-run
      trajstore record --preset gatsby --corpus book.txt --set optimizer.lr=3e-4
      trajstore record --preset wordybird-1b --every 10 --tokens dead
      trajstore record --preset gatsby -o long.zarr
      trajstore record --resume --steps 20000 -o long.zarr
      trajstore record --preset gatsby --steps 9000 --resume -o queued.zarr
      trajstore record --preset gatsby --set recording.block_rows=64 -o blocks.zarr
    """
    named = is_named(options)
    if resume and output is None and not named:
        raise InvalidArgument("no run to resume; name it: --resume -o RUN.zarr")
    from trajstore.store.storage.remote_path import location
    from trajstore.store.writing.create import check_folder, check_target

    path = location(output or f"{stem_of(options)}.zarr")
    if dry_run:
        config = configured(options, path if resume else None)
        print_plan(config, {name: options[name] for name in ("corpus", "tokenizer")})
        return
    if not resume:  # before torch is imported, which takes seconds
        check_target(path, overwrite=options["overwrite"])
    check_folder(path)

    def train(config: RunConfig, progress: RecordingProgress, **common: Any) -> None:
        from trajstore import trainers

        trainers.record(config, path, resume=resume, on_products=progress.show_products, **common)

    _train_and_print(path, lambda: configured(options, path if resume else None), train, options)


@click.command()
@RUN
@click.option("--at", type=int, required=True, metavar="STEP", help="Step to start from.")
@SET
@click.option("-o", "--output", type=click.Path(), required=True, help="Path of the new run.")
@STEPS
@CORPUS
@TOKENIZER
@FSYNC
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
@THREADS
@needs_extra("fork", "train")
def fork(run: str, at: int, output: str, **options: Any) -> None:
    """Continue a run from one of its steps with other settings, as a new run.

    Settings that may change: optimizer and schedule, training.steps, training.max_grad_norm,
    training.autocast, model.dtype=float32. A run with --variables everything forks from any row.
    Otherwise, without a checkpoint of that step, the earlier steps are trained again. The fork
    shares the rows before that step; it does not copy them. `trajstore record --resume -o FORK`
    resumes a fork.

    \b
    Example:
      trajstore fork long.zarr --at 800 --set optimizer.lr=3e-4 -o slower.zarr
      trajstore fork long.zarr --at 800 --steps 20000 -o longer.zarr
    """
    from trajstore.store.storage.remote_path import location
    from trajstore.store.writing.create import check_local_target

    path = location(output)
    check_local_target(path, overwrite=options["overwrite"])  # before torch is imported
    settings = settings_of(options)

    def train(config: RunConfig, progress: RecordingProgress, **common: Any) -> None:
        from trajstore import trainers

        trainers.fork(run, path, at=at, settings=settings, **common)

    _train_and_print(path, lambda: _forked(run, at, settings), train, options)


def _train_and_print(
    path: Location,
    configure: Callable[[], RunConfig],
    train: Callable[..., None],
    options: Mapping[str, Any],
) -> None:
    """Train with a progress bar, stop at a signal, and print what was recorded.

    Parameters
    ----------
    path : path-like
        The run to record.
    configure : callable
        Returns the configuration.
    train : callable
        Takes the configuration, the progress, and the common options of `trainers.record` and
        `trainers.fork`.
    options : mapping
        Options of the command, by name.
    """
    with StopRequest() as stop, _report_early_stop(path):
        config = configure()
        with RecordingProgress(config.training.steps) as progress:

            def begin(text: Any) -> None:
                progress.show_corpus(text)
                stop.begin()

            train(
                config,
                progress,
                stop=stop,
                on_corpus=begin,
                on_step=progress.show_step,
                on_note=progress.show_note,
                on_retrain=progress.show_retrain,
                **{name: options[name] for name in _PASSED_ON},
            )
    from trajstore.store.reading.run_info import information
    from trajstore.trainers.runs.matrix_runs import planned_runs

    facts = {run: information(run) for run in planned_runs(path, config)}
    least = min(facts.values(), key=lambda one: int(one["committed_rows"]))
    if least["status"] == "interrupted":
        print_interrupted(path, least, fsync=options["fsync"])
        sys.exit(stop.exit_code)
    print_recorded(path, facts, progress.seconds, progress.rate)


@contextmanager
def _report_early_stop(path: Location) -> Iterator[None]:
    """Print what the run contains if a signal ends the command before its training."""
    try:
        yield
    except SystemExit:
        left = f"{path} is unchanged" if _is_there(path) else "nothing was recorded"
        err.print(f"Stopped before the training started; {left}.")
        raise


def _is_there(path: Location) -> bool:
    from trajstore.store.reading.open_runs import matrix_runs

    return path.exists() or (isinstance(path, Path) and bool(matrix_runs(path)))


def _forked(source: str, at: int, changes: list[str]) -> RunConfig:
    """Return the configuration of a fork, before its settings are checked."""
    from trajstore import trainers
    from trajstore.store.reading.open_run import open_group

    if "://" not in source:
        open_group(source)
    config: RunConfig = trainers.recorded_config(source, after=at).with_values(changes)
    return config


def print_recorded(
    path: Location,
    recorded: Mapping[Location, dict[str, Any]],
    seconds: float | None,
    rate: float | None,
) -> None:
    """Print what was recorded, its duration, and commands to run next.

    Parameters
    ----------
    path : path-like
        Path of the run, or common name of several, as the user gave it.
    recorded : mapping
        By the path of each run, what `trajstore.store.reading.run_info.information` returns.
    seconds, rate : float or None
        Duration, and steps per second; None if no step or a single one was trained.
    """
    took = "" if seconds is None else f" in {format_duration(seconds)}"
    if rate is not None:
        took += f" ({rate:.3g} steps per second)"
    for place, facts in recorded.items():
        out.print(
            f"Recorded {facts['committed_rows']} rows to {place}{took}: "
            f"{format_bytes(facts['bytes_native'])} in {format_bytes(facts['bytes_on_disk'])} "
            f"on disk (ratio {facts['ratio']:.2f})."
        )
    name, run = shlex.quote(str(path)), shlex.quote(str(next(iter(recorded))))
    next_commands = {
        f"trajstore summary {name}": "gradients, displacement, loss",
        f"trajstore analyze {run} freeze": "the step at which each token stopped moving",
        f"trajstore verify {run if '://' in name else name}": "every byte against its checksum",
    }
    if len(recorded) > 1:
        next_commands[f"trajstore compare {name}"] = "the two matrices of this training"
    longest = max(map(len, next_commands))
    out.print("Next commands:")
    for command, purpose in next_commands.items():
        out.print(f"  {command:<{longest}}   {purpose}")


def print_interrupted(path: RunPath, facts: dict[str, Any], *, fsync: bool) -> None:
    """Print, on standard error, the last recorded step and the command that resumes the run."""
    again = f"trajstore record --resume -o {shlex.quote(str(path))}{' --no-fsync' * (not fsync)}"
    err.print(
        f"Interrupted after step {facts['steps']['last']}; "
        f"{facts['committed_rows']} rows are committed. Resume with: {again}"
    )
