"""The command `sweep`, which records many runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from trajstore.cli.stop_signals import StopRequest
from trajstore.cli.tables import counted, err, out
from trajstore.errors import InvalidArgument
from trajstore.trainers.commands.configuration import (
    configuration,
    named_config,
    settings_of,
    stem_of,
)
from trajstore.trainers.commands.sweep_view import print_jobs, status_lines

if TYPE_CHECKING:
    from trajstore.trainers.sweeps.grid import SweptRun

_OWN = {"output", "assignments", "seeds", "jobs", "threads", "dry_run"}
"""Options of `sweep` itself; all others are options of `trajstore record` and are passed on."""


@click.command()
@configuration
@click.option("--seeds", metavar="A:B|LIST", help="Seeds: A to B - 1 for A:B, or a list: 1,2.")
@click.option(
    "-o", "--output", type=click.Path(), required=True, help="Folder of the runs, such as runs/."
)
@click.option("--jobs", type=click.IntRange(1), default=1, help="Simultaneous runs; default: 1.")
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of each run; default: OMP_NUM_THREADS, or the processors divided by --jobs. The "
    "first call fixes the number.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print one command per run, for a cluster's array job; record nothing.",
)
def sweep(
    seeds: str | None,
    output: str,
    jobs: int,
    threads: int | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Record many runs: every seed with every setting, each in its own process.

    A --set with several values, separated by commas, is swept: --set optimizer.lr=1e-3,3e-4. Commas
    within brackets and quotes belong to a value. Run the same command again to skip complete runs
    and resume the others. A failed run does not stop the others; the exit code is then 1. Ctrl-C
    and SIGTERM stop all runs after the current step.

    --set recording.every=10 and --set 'recording.variables="W,grad"' set what is recorded.

    \b
    Example:
      trajstore sweep --preset gatsby --seeds 1601:1617 --steps 300 -o runs/ --jobs 2
      trajstore sweep --preset gatsby --set initialization.sigma=1e-5,1e-4 --seeds 1,2 -o runs/
      trajstore sweep --preset gatsby --seeds 1:1001 -o runs/ --dry-run > commands.txt
    """
    if "://" in output:
        raise InvalidArgument(
            f"cannot sweep to {output}: a sweep records to a local folder; record single runs to "
            "this address, or copy complete runs there"
        )
    folder = Path(output)
    assignments = options.pop("assignments")
    common = settings_of(options | {"assignments": ()})
    base = named_config(options)  # names the missing extra, if any
    from trajstore.trainers.sweeps.grid import parse_seeds, swept_runs
    from trajstore.trainers.sweeps.sweep_folder import choose_threads, save_names

    chosen = None if seeds is None else parse_seeds(seeds)
    # All runs are parsed now, so that an error in any is reported before the first starts.
    runs = swept_runs(base, stem_of(options), assignments, chosen, common)
    if chosen is None and len(runs) == 1:
        raise InvalidArgument(
            "got a single run to sweep; give several seeds (--seeds 1:5) or a setting with several "
            "values (--set optimizer.lr=1e-3,3e-4), or record one run with trajstore record"
        )
    threads = choose_threads(folder, jobs, threads, keep=not dry_run)
    passed_on = _passed_on(click.get_current_context())
    commands = [_command(run, folder, passed_on) for run in runs]
    if dry_run:
        for command in commands:
            click.echo(f"OMP_NUM_THREADS={threads} {shlex.join(['trajstore', *command])}")
        return
    save_names(folder, (run.name for run in runs))
    steps_given = any(
        text.partition("=")[0].strip() == "training.steps" for text in (*assignments, *common)
    )
    _record(runs, commands, folder, jobs, threads, steps_given=steps_given)


def _passed_on(ctx: click.Context) -> list[str]:
    """Return the options of `trajstore record` that were given to this command."""
    words: list[str] = []
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if name in _OWN or ctx.get_parameter_source(name) != ParameterSource.COMMANDLINE:
            continue
        given = ctx.params[name]
        flag = parameter.secondary_opts[-1] if given is False else parameter.opts[-1]
        for value in given if isinstance(given, tuple) else [given]:
            words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return words


def _command(run: SweptRun, folder: Path, passed_on: list[str]) -> list[str]:
    """Return the arguments of `trajstore` that start or resume a run."""
    words = ["record", *passed_on]
    for assignment in run.assignments:
        words += ["--set", assignment]
    if run.seed is not None:
        words += ["--seed", str(run.seed)]
    return [*words, "--resume", "-o", str(folder / run.name)]


def _record(
    runs: Sequence[SweptRun],
    commands: Sequence[Sequence[str]],
    folder: Path,
    at_once: int,
    threads: int,
    *,
    steps_given: bool,
) -> None:
    """Run the processes, print the status of each run, and set the exit code."""
    from trajstore.trainers.sweeps.process_queue import Job, run_jobs
    from trajstore.trainers.sweeps.sweep_folder import is_done, planned_rows

    def job(run: SweptRun, command: Sequence[str]) -> Job:
        path = folder / run.name
        return Job(
            run=path,
            command=[sys.executable, "-m", "trajstore.trainers.commands.swept_record", *command],
            log=path.with_suffix(".log"),
            done=lambda: is_done(path, run.config, steps_given=steps_given),
        )

    jobs = [job(run, command) for run, command in zip(runs, commands, strict=True)]
    rows = [planned_rows(run.config) for run in runs]
    each = counted(threads, "thread")
    err.print(f"{len(jobs)} runs in {folder}, {at_once} at a time, {each} each")
    with StopRequest() as stop:
        stop.begin()
        run_jobs(
            jobs,
            at_once=at_once,
            environment=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stop=stop,
            report=status_lines(jobs),
        )
    print_jobs(jobs, rows)
    if stop():
        err.print("Stopped; run the same command again to resume the incomplete runs.")
        sys.exit(stop.exit_code)
    if any(job.state not in ("complete", "skipped") for job in jobs):
        err.print(
            "Some runs are incomplete; run the same command again to resume the incomplete runs."
        )
        sys.exit(1)
    pattern = shlex.quote(str(folder / "*.zarr"))
    out.print(f"Next command: trajstore plot {pattern} grad_norms")
