"""The commands `record`, `fork`, `presets` and `fetch`.

`record` and `fork` share the progress of a training and the report at its end.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from trajstore.cli.command_options import RUN
from trajstore.cli.output import Bar, err, in_command, out, print_notes, print_table
from trajstore.cli.stop_signals import StopRequest
from trajstore.errors import InvalidArgument, needs_extra
from trajstore.schema import KEYFRAMES, TIERS
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
    preset_names,
    recording,
    settings_of,
    stem_of,
)
from trajstore.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from trajstore.store.storage.remote_path import Location, RunPath
    from trajstore.store.writing.writer import RunWriter
    from trajstore.trainers import RunConfig
    from trajstore.trainers.recording.capture import Recorder
    from trajstore.trainers.recording.existing_run import ComparedRun
    from trajstore.trainers.texts import Corpus


_SOON = 3.0  # seconds from the first line to the second
_WIDE = 120  # columns of a terminal that fit all columns and a bar


class _Rate(ProgressColumn):
    """Steps per second."""

    def render(self, task: Any) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:.1f} steps/s")


class RecordingProgress(Bar):
    """Progress of a recording: a bar on a terminal, occasional lines elsewhere.

    Parameters
    ----------
    steps : int
        Optimizer steps of the whole run.
    console : Console
        Where it is shown.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        steps: int,
        *,
        console: Console = err,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        # Seconds between reads of the loss, which may wait for the device.
        self._interval = 0.2 if console.is_terminal else 30.0
        self._wide = console.width >= _WIDE
        super().__init__(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),  # the rest of the width
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            speed_estimate_period=10,
            expand=True,
            console=console,
            get_time=clock,
        )
        self._began: float | None = None
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._steps = steps
        self.show(0, steps)
        self._next = 0.0  # the first step is shown at once
        self._waited = 0.0

    def show_corpus(self, corpus: Corpus) -> None:
        """Print which text is trained on, and start to measure the duration."""
        self._began = self._clock()
        dead = int((corpus.counts() == 0).sum())
        self._console.print(
            f"Corpus: {corpus.name}, {corpus.size:,} bytes, {corpus.ids.size:,} tokens, "
            f"{dead} of {corpus.vocab_size} ids dead (sha256 {corpus.sha256[:12]}…)"
        )

    def show_products(self, sentence: str) -> None:
        """Print how products of matrices are computed, and why."""
        self._console.print(f"{sentence}.")

    def show_note(self, note: str) -> None:
        """Print a note about the run."""
        self._console.print(f"Note: {in_command(note)}.")

    def show_retrain(self, step: int, last: int) -> None:
        """Show how many of the recorded steps have been trained again."""
        if self._console.is_terminal:
            state = f"comparing step {step} of {last} with the recorded rows"
            self._bar.update(self._task, completed=step, state=state)
            return
        now = self._clock()
        if now >= self._next or step == last:
            self._next = now + self._interval
            self._console.print(f"comparing step {step} of {last} with the recorded rows")

    def show_step(self, recorder: Recorder) -> None:
        """Show the step, its loss, the recorded bytes and the rows in memory."""
        now = self._clock()
        self._last = now, recorder.step
        self._first = self._first or self._last
        if now < self._next and recorder.step != self._steps:
            return
        # The second line comes soon, because only it can estimate the time.
        self._next = now + (self._interval if self._first != self._last else _SOON)
        state = f"loss {recorder.loss.item():.3f}"
        if self.rate is not None and recorder.step < self._steps and not self._console.is_terminal:
            left = (self._steps - recorder.step) / self.rate
            state = f"{format_duration(left)} left, {state}"
        writer = recorder.writer
        if writer is not None:
            state += self._written(writer)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=recorder.step, state=state)
        else:
            self._console.print(f"step {recorder.step}/{self._steps}: {state}")

    @property
    def seconds(self) -> float | None:
        """Seconds of the recording so far; None before the first step."""
        if self._began is None or self._last is None:
            return None
        return self._last[0] - self._began

    @property
    def rate(self) -> float | None:
        """Steps per second since the first step; None before the second."""
        if self._first is None or self._last is None or self._first == self._last:
            return None
        return (self._last[1] - self._first[1]) / max(self._last[0] - self._first[0], 1e-9)

    def _written(self, writer: RunWriter | ComparedRun) -> str:
        """Return the recorded and written bytes; a narrow terminal gets the most important."""
        waiting = writer.seconds_waited > self._waited
        self._waited = writer.seconds_waited
        if self._console.is_terminal and not self._wide:
            text = ", waiting for the disk" if waiting else ""
            return text or f", {format_bytes(writer.bytes_recorded)}"
        state = f", {format_bytes(writer.bytes_recorded)} recorded"
        if writer.bytes_written:
            state += f", {format_bytes(writer.bytes_written)} on disk"
        waits = writer.rows - writer.committed_rows
        state += f", {waits} row{'' if waits == 1 else 's'} in memory"
        if waiting:
            state += f", waiting for the disk ({format_duration(writer.seconds_waited)} so far)"
        return state


def print_plan(config: RunConfig, texts: Mapping[str, Any]) -> None:
    """Print what a run would hold and take, and a table of the tiers.

    Parameters
    ----------
    config : RunConfig
    texts : mapping
        ``corpus`` and ``tokenizer``, as for `trainers.plan`.
    """
    from trajstore import trainers

    summary = trainers.plan(config, **texts).facts()
    tiers = {}
    for tier in TIERS:
        changes: dict[str, Any] = {"variables": (tier,)}
        if tier in ("everything", "state", KEYFRAMES):
            changes["tokens"] = "all"
        recording = config.recording.model_copy(update=changes)
        try:
            planned = trainers.plan(config.model_copy(update={"recording": recording}), **texts)
        except InvalidArgument as error:  # it needs more memory than the one that is wanted
            summary["notes"].append(f"the tier {tier} is not possible: {error}")
        else:
            tiers[tier] = planned.facts()
    out.print(
        f"{summary['rows']} rows of {summary['tokens']} tokens: steps 0 to {summary['steps']}, "
        f"every {summary['every']}; encoding {summary['encoding']}; blocks of "
        f"{summary['block_rows']} rows; at most {format_bytes(summary['memory'])} of memory; "
        f"{summary['files']} files."
    )
    rows = [
        (name, array["native_dtype"], format_bytes(array["bytes_native"]),
         " × ".join(map(str, array["chunk"])))
        for name, array in summary["arrays"].items()
    ]  # fmt: skip
    print_table("", ("array", "type", "native", "chunk"), rows)
    rows = [
        (
            tier,
            format_bytes(facts["bytes_native"]),
            format_bytes(facts["memory"]),
            facts["block_rows"],
        )
        for tier, facts in tiers.items()
    ]
    print_table("Tiers", ("tier", "native", "memory", "rows per block"), rows)
    print_notes([*summary["notes"], *(advice["sentence"] for advice in summary["advice"])])


_PASSED_ON = ("corpus", "tokenizer", "overwrite", "fsync")
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
    training.autocast, model.dtype=float32. A run with --variables everything forks from any row,
    one with keyframes trains from the keyframe before the step. Otherwise, without a checkpoint of
    that step, the earlier steps are trained again. The fork shares the rows before that step; it
    does not copy them. `trajstore record --resume -o FORK` resumes a fork.

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
    from trajstore.trainers.runs.run_plan import planned_runs

    runs = {run: information(run) for run in planned_runs(path, config)}
    least = min(runs.values(), key=lambda entry: int(entry["committed_rows"]))
    if least["status"] == "interrupted":
        print_interrupted(path, least, fsync=options["fsync"])
        sys.exit(stop.exit_code)
    print_recorded(path, runs, progress.seconds, progress.rate)


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
    from trajstore.store.reading.run_info import matrix_runs

    return path.exists() or (isinstance(path, Path) and bool(matrix_runs(path)))


def _forked(source: str, at: int, changes: list[str]) -> RunConfig:
    """Return the configuration of a fork, before its settings are checked."""
    from trajstore import trainers
    from trajstore.store.reading.open_group import open_group

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
    for place, info in recorded.items():
        out.print(
            f"Recorded {info['committed_rows']} rows to {place}{took}: "
            f"{format_bytes(info['bytes_native'])} in {format_bytes(info['bytes_on_disk'])} "
            f"on disk (ratio {info['ratio']:.2f})."
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


def print_interrupted(path: RunPath, info: dict[str, Any], *, fsync: bool) -> None:
    """Print, on standard error, the last recorded step and the command that resumes the run."""
    again = f"trajstore record --resume -o {shlex.quote(str(path))}{' --no-fsync' * (not fsync)}"
    err.print(
        f"Interrupted after step {info['steps']['last']}; "
        f"{info['committed_rows']} rows are committed. Resume with: {again}"
    )


@click.command()
@click.argument("name", required=False, shell_complete=preset_names)
def presets(name: str | None) -> None:
    """List the presets, or print one as TOML for `record --config`.

    \b
    Example:
      trajstore presets gatsby > mine.toml
    """
    from trajstore import trainers

    if name is not None:
        click.echo(trainers.preset(name).to_toml(), nl=False)
        return
    for key, make in trainers.PRESETS.items():
        out.print(f"{key}  {(make.__doc__ or '').strip()}")


@click.command()
@click.argument("name", metavar="gatsby|fineweb|gpt2")
@click.option("--source", help="Another source: an address, a data set, or a local path.")
@click.option("--sha256", metavar="HEX", help="Expected SHA-256 of the result.")
def fetch(name: str, source: str | None, sha256: str | None) -> None:
    """Download a corpus or tokenizer into the cache, where `record` finds it.

    \b
    Example:
      trajstore fetch gpt2
    """
    from trajstore import trainers

    fetched = trainers.fetch(name, source=source, sha256=sha256)
    unit = "tokens" if fetched.path.is_dir() else "bytes"
    out.print(
        f"Fetched {fetched.path}: {fetched.size:,} {unit} from {fetched.source}, "
        f"sha256 {fetched.sha256}"
    )
