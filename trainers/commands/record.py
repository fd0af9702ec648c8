"""The command `record`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.byte_sizes import format_bytes
from trajstore.cli.errors import sentences
from trajstore.cli.options import JSON
from trajstore.cli.stop_signals import StopRequest
from trajstore.cli.tables import err, out, print_json
from trajstore.durations import format_duration
from trajstore.errors import InvalidArgument
from trajstore.trainers.commands.configuration import (
    configuration,
    configured,
    recording,
    settings_of,
)
from trajstore.trainers.commands.recording_progress import RecordingProgress

if TYPE_CHECKING:
    from trajstore.store.storage.remote_path import Location, RunPath


__all__ = ["record"]


@click.command()
@configuration
@recording
@click.option("-o", "--output", type=click.Path(), help="The run, by default NAME.zarr.")
@click.option("--seed", type=int, help="Of everything random.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run if it is there, also with more --steps, and else begin it.",
)
@click.option(
    "--fork",
    "source",
    type=click.Path(),
    metavar="RUN",
    help="Train on from a step of another run, with the settings of --set.",
)
@click.option("--at", type=int, metavar="STEP", help="The step of --fork.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is there.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of torch on the CPU, on which the bits depend; default: as the run had, or "
    "torch's own number.",
)
@JSON
@sentences
def record(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    output: str | None,
    corpus: str | None,
    tokenizer: str | None,
    variables: str | None,
    resume: bool,
    source: str | None,
    at: int | None,
    overwrite: bool,
    threads: int | None,
    fsync: bool,
    strict_numerics: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Train a model and record every optimizer step.

    Ctrl-C and SIGTERM stop it after the step in progress, so that --resume can go on; killed, it
    loses the last seconds. Without a checkpoint, --resume trains the recorded steps again, and
    compares them. With --resume one and the same command line begins a run and goes on with it,
    whenever it was killed.

    --fork goes on from a step of another run, recorded or reached by training again, with other
    settings: any of optimizer and schedule, training.steps, training.max_grad_norm,
    training.autocast, model.dtype=float32. The rows until there are shared, not copied.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore record --preset gatsby --corpus book.txt --set optimizer.lr=3e-4
      trajstore record --preset wordybird-1b --every 10 --tokens dead
      trajstore record --preset gatsby -o long.zarr
      trajstore record --resume --steps 20000 -o long.zarr
      trajstore record --preset gatsby --steps 9000 --resume -o queued.zarr
      trajstore record --fork long.zarr --at 800 --set optimizer.lr=3e-4 -o slower.zarr
    """
    named = preset_name is not None or config_file is not None
    if resume and output is None and not named:
        raise InvalidArgument("name the run to go on with: --resume -o RUN.zarr")
    _check_fork(source, at, output, named=named, resume=resume)
    from trajstore.store.storage.remote_path import location
    from trajstore.store.writing.create import check_local_target, check_target

    path = location(output or f"{preset_name or Path(str(config_file)).stem}.zarr")
    if not resume:  # before torch is imported, which takes seconds
        check = check_target if source is None else check_local_target
        check(path, overwrite=overwrite)
    changes = settings_of(assignments, variables, fields)
    from trajstore import trainers

    with StopRequest() as stop, _report_early_stop(path):
        if source is None:
            config = configured(
                preset_name, config_file, assignments, variables, fields, path if resume else None
            )
        else:
            config = _forked(source, at, changes)
        with RecordingProgress(config.training.steps) as progress:

            def begin(text: Any) -> None:
                progress.show_corpus(text)
                stop.begin()

            common: dict[str, Any] = {
                "corpus": corpus,
                "tokenizer": tokenizer,
                "overwrite": overwrite,
                "fsync": fsync,
                "strict_numerics": strict_numerics,
                "threads": threads,
                "stop": stop,
                "on_corpus": begin,
                "on_step": progress.show_step,
                "on_note": progress.show_note,
                "on_retrain": progress.show_retrain,
            }
            if source is None or at is None:
                trainers.record(config, path, resume=resume, **common)
            else:
                trainers.fork(source, path, at=at, settings=changes, **common)
    from trajstore.store.reading.run_info import information

    facts = information(path)
    if as_json:
        print_json(facts)
    if facts["status"] == "interrupted":
        print_interrupted(path, facts, fsync=fsync)
        sys.exit(stop.exit_code)
    if not as_json:
        print_recorded(path, facts, progress.seconds, progress.rate)


@contextmanager
def _report_early_stop(path: Location) -> Iterator[None]:
    """Say what is there when a signal ends the command before its training."""
    try:
        yield
    except SystemExit:
        left = f"{path} is as it was" if path.exists() else "nothing has been recorded"
        err.print(f"Stopped before the training began; {left}.")
        raise


def _check_fork(
    source: str | None, at: int | None, output: str | None, *, named: bool, resume: bool
) -> None:
    """Refuse options that do not go with a fork, or only with one."""
    if source is None:
        if at is not None:
            raise InvalidArgument("--at is the step of a fork; name the run: --fork RUN.zarr")
        return
    if at is None:
        raise InvalidArgument("name the step to fork at: --at STEP")
    if output is None:
        raise InvalidArgument("name the run to be made: -o OTHER.zarr")
    if named:
        raise InvalidArgument(
            "a fork has the configuration of its run; leave out --preset and --config, and say "
            "with --set what changes"
        )
    if resume:
        raise InvalidArgument(
            f"got both --fork and --resume; a fork that is there goes on with: trajstore record "
            f"--resume -o {shlex.quote(output)}"
        )


def _forked(source: str, at: int | None, changes: list[str]) -> Any:
    """Configuration of a fork, before it is looked at more closely."""
    from trajstore import trainers
    from trajstore.store.reading.open_group import open_group

    if "://" not in source:
        open_group(source)
    return trainers.recorded_config(source, after=at).with_values(changes)


def print_recorded(
    path: RunPath, facts: dict[str, Any], seconds: float | None, rate: float | None
) -> None:
    """Print what was recorded, how long that took, and three commands to go on with.

    Parameters
    ----------
    path : path-like
        Of the run, as it was named.
    facts : dict
        Of `trajstore.store.reading.run_info.information`.
    seconds, rate : float or None
        That it took, and steps a second; None where nothing was trained, or a single step.
    """
    took = "" if seconds is None else f" in {format_duration(seconds)}"
    if rate is not None:
        took += f" ({rate:.3g} steps a second)"
    out.print(
        f"Recorded {facts['committed_rows']} rows to {path}{took}: "
        f"{format_bytes(facts['bytes_native'])} in {format_bytes(facts['bytes_on_disk'])} "
        f"on disk (ratio {facts['ratio']:.2f})."
    )
    run = shlex.quote(str(path))
    said = {
        f"trajstore summary {run}": "gradients, displacement, loss",
        f"trajstore analyze {run} freeze": "when each token stopped moving",
        f"trajstore verify {run}": "every byte, against its checksum",
    }
    longest = max(map(len, said))
    out.print("Go on with:")
    for command, what in said.items():
        out.print(f"  {command:<{longest}}   {what}")


def print_interrupted(path: RunPath, facts: dict[str, Any], *, fsync: bool) -> None:
    """Print, on standard error, how far it came, and the command that goes on."""
    again = f"trajstore record --resume -o {shlex.quote(str(path))}{' --no-fsync' * (not fsync)}"
    err.print(
        f"Interrupted after step {facts['steps']['last']}; "
        f"{facts['committed_rows']} rows are whole. Go on with: {again}"
    )
