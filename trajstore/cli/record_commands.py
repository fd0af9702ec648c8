"""Commands that train, or prepare a training: record, plan, fetch, presets.

torch, and the packages that need it, are imported inside them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from trajstore.cli.next_commands import print_interrupted, print_recorded
from trajstore.cli.options import JSON, RECORD, Choice, sentences
from trajstore.cli.progress import RecordingProgress
from trajstore.cli.stop_signals import StopRequest
from trajstore.cli.tables import err, out, print_json, print_plan
from trajstore.errors import InvalidArgument, MissingExtra, TrajstoreError
from trajstore.schema import ENCODINGS

if TYPE_CHECKING:
    from trajstore.store.remote_path import Location

__all__ = ["configuration", "fetch", "plan", "presets", "record", "settings_of"]


def _preset_names(ctx: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """Presets that begin so, for the completion of a shell; none where they cannot be imported."""
    try:
        from trainers import PRESETS
    except MissingExtra:
        return []
    return [name for name in PRESETS if name.startswith(begun)]


def configuration(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make a configuration, the same for all commands that take one."""
    options = (
        click.option(
            "--preset",
            "preset_name",
            metavar="NAME",
            shell_complete=_preset_names,
            help="One of `trajstore presets`.",
        ),
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False),
            help="A TOML file instead of a preset, as `trajstore presets NAME` prints it.",
        ),
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Change one field of the configuration, such as optimizer.lr=3e-4. Repeatable.",
        ),
        click.option("--steps", type=int, help="Optimizer steps to train."),
        click.option(
            "--corpus", type=click.Path(), help="A text; default: as fetched, or embedded."
        ),
        click.option(
            "--tokenizer",
            type=click.Path(),
            help="Folder of a tokenizer; default: as fetched, or none.",
        ),
        RECORD,
        click.option("--every", type=int, metavar="K", help="Steps from one row to the next."),
        click.option("--tokens", metavar="all|dead|live|FILE", help="Which tokens to record."),
        click.option(
            "--population",
            "populations",
            multiple=True,
            metavar="NAME=EXPR|FILE",
            help="A group of tokens that the run names: an expression over what is known of them, "
            "such as 'rare=token_count < 10', or a file with a mask or ids. Repeatable.",
        ),
        click.option(
            "--memory", metavar="SIZE", help="For all buffers of the recorder, such as 512MiB."
        ),
        click.option(
            "--block-rows", type=int, help="Rows of a block; default: planned from the memory."
        ),
        click.option(
            "--encoding",
            type=Choice(ENCODINGS),
            help="delta (default): smaller, faster; portable: for any reader of Zarr v3.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


_PLACES = {
    "steps": "training.steps",
    "device": "training.device",
    "seed": "training.seed",
    "every": "recording.every",
    "tokens": "recording.tokens",
    "populations": "recording.populations",
    "memory": "recording.memory",
    "block_rows": "recording.block_rows",
    "encoding": "recording.encoding",
    "commit_every": "recording.commit_every",
    "checkpoint_every": "recording.checkpoint_every",
}


def _configured(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    variables: str | None,
    fields: dict[str, Any],
    run: Location | None = None,
) -> Any:
    """Configuration that is asked for; of a run that goes on, where none is named, its own.

    `run` is the one that goes on, if it is there. The steps of a preset or a file are those of a
    new run: one that goes on keeps its own.
    """
    import trainers

    named = preset_name is not None or config_file is not None
    begins = run is not None and named and not run.exists()
    recorded = None if run is None or begins else trainers.recorded_config(run)
    if not named and recorded is not None:
        config = recorded
    elif (preset_name is None) == (config_file is None):
        raise InvalidArgument("name either a preset (--preset gatsby) or a file (--config FILE)")
    elif preset_name is not None:
        config = trainers.preset(preset_name)
    else:
        config = trainers.RunConfig.from_toml(str(config_file))
    if recorded is not None:
        config = config.with_values([f"training.steps={recorded.training.steps}"])
    return config.with_values(settings_of(assignments, variables, fields))


def settings_of(
    assignments: tuple[str, ...], variables: str | None, fields: dict[str, Any]
) -> list[str]:
    """All that is to be changed of a configuration, whichever option says so."""
    given = [
        f"{_PLACES[name]}={json.dumps(value)}"
        for name, value in fields.items()
        if value not in (None, ())
    ]
    if variables is not None:
        given.append(f"recording.record={json.dumps(variables.split(','))}")
    return [*assignments, *given]


@click.command()
@configuration
@click.option("-o", "--output", type=click.Path(), help="The run, by default NAME.zarr.")
@click.option("--device", type=Choice(["auto", "cpu", "cuda", "mps"]), help="Where to train.")
@click.option("--seed", type=int, help="Of everything random.")
@click.option(
    "--commit-every",
    type=float,
    metavar="SECONDS",
    help="How late a row is safe, and seen, at most; default: 10; 0: whole blocks only.",
)
@click.option(
    "--checkpoint-every",
    type=int,
    metavar="K",
    help="Steps between checkpoints, rounded up to whole blocks; default: by time, so that they "
    "cost at most a hundredth of it.",
)
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
@click.option("--fsync", is_flag=True, help="Have every commit survive a loss of power.")
@click.option(
    "--strict-numerics",
    is_flag=True,
    help="Refuse types in which the optimizer's state, or the weight decay, can do nothing.",
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
    import trainers

    named = preset_name is not None or config_file is not None
    if resume and output is None and not named:
        raise InvalidArgument("name the run to go on with: --resume -o RUN.zarr")
    _check_fork(source, at, output, named=named, resume=resume)
    from trajstore.store.remote_path import location

    path = location(output or f"{preset_name or Path(str(config_file)).stem}.zarr")
    changes = settings_of(assignments, variables, fields)
    with StopRequest() as stop, _stopping_told(path):
        if source is None:
            config = _configured(
                preset_name, config_file, assignments, variables, fields, path if resume else None
            )
        else:
            config = _forked(source, changes)
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
                "stop": stop,
                "on_corpus": begin,
                "on_step": progress.show_step,
                "on_note": progress.show_note,
                "on_proof": progress.show_proof,
            }
            if source is None or at is None:
                trainers.record(config, path, resume=resume, **common)
            else:
                trainers.fork(source, path, at=at, settings=changes, **common)
    from trajstore.store.run_info import information

    facts = information(path)
    if as_json:
        print_json(facts)
    if facts["status"] == "interrupted":
        print_interrupted(path, facts, fsync=fsync)
        sys.exit(stop.exit_code)
    if not as_json:
        print_recorded(path, facts, progress.seconds, progress.rate)


@contextmanager
def _stopping_told(path: Location) -> Iterator[None]:
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


def _forked(source: str, changes: list[str]) -> Any:
    """Configuration of a fork, before it is looked at more closely."""
    import trainers
    from trajstore.store.open_group import open_group

    if "://" not in source:
        open_group(source)
    return trainers.recorded_config(source).with_values(changes)


@click.command()
@configuration
@click.option(
    "--no-timing",
    is_flag=True,
    help="Do not train a few steps on this machine to tell how long the whole will take.",
)
@JSON
@sentences
def plan(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    corpus: str | None,
    tokenizer: str | None,
    variables: str | None,
    no_timing: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Tell what a run will cost before it is made: rows, chunks, bytes, memory, files, time.

    For the time, a few steps are trained here, and recorded to a temporary folder.

    \b
    Example:
      trajstore plan --preset wordybird-1b
      trajstore plan --preset wordybird-1b --no-timing
    """
    import trainers
    from trajstore.schema import TIERS

    config = _configured(preset_name, config_file, assignments, variables, fields)
    wanted = trainers.plan(config, corpus=corpus, tokenizer=tokenizer)
    tiers = {}
    for tier in TIERS:
        recording = config.recording.model_copy(update={"record": (tier,)})
        alternative = config.model_copy(update={"recording": recording})
        tiers[tier] = trainers.plan(alternative, corpus=corpus, tokenizer=tokenizer)
    facts = wanted.facts() | {"tiers": {tier: made.totals() for tier, made in tiers.items()}}
    if not no_timing:
        try:
            timed = trainers.time_steps(config, corpus=corpus, tokenizer=tokenizer)
        except TrajstoreError as error:  # the plan may be of another machine
            facts["notes"].append(f"no time was measured: {error}")
        else:
            facts["time"] = timed.facts(steps=wanted.steps, rows=wanted.rows)
    if as_json:
        print_json(facts)
    else:
        print_plan(facts)


@click.command()
@click.argument("name", metavar="gatsby|fineweb|gpt2")
@click.option("--source", help="Another place: an address, a data set, or a local path.")
@click.option("--sha256", metavar="HEX", help="What the result must have.")
@JSON
@sentences
def fetch(name: str, source: str | None, sha256: str | None, as_json: bool) -> None:
    """Download a corpus or tokenizer into the cache, where `record` finds it.

    \b
    Example:
      trajstore fetch gpt2
    """
    import trainers

    fetched = trainers.fetch(name, source=source, sha256=sha256)
    if as_json:
        print_json({**vars(fetched), "path": str(fetched.path)})
    else:
        unit = "tokens" if fetched.path.is_dir() else "bytes"
        out.print(
            f"Fetched {fetched.path}: {fetched.size:,} {unit} from {fetched.source}, "
            f"sha256 {fetched.sha256}"
        )


@click.command()
@click.argument("name", required=False, shell_complete=_preset_names)
@JSON
@sentences
def presets(name: str | None, as_json: bool) -> None:
    """List the presets, or print one as TOML that `record --config` takes.

    \b
    Example:
      trajstore presets gatsby > mine.toml
    """
    import trainers

    if name is not None:
        config = trainers.preset(name)
        if as_json:
            print_json(config.model_dump(mode="json"))
        else:
            click.echo(config.to_toml(), nl=False)
        return
    listed = {key: (make.__doc__ or "").strip() for key, make in trainers.PRESETS.items()}
    if as_json:
        print_json(listed)
    else:
        for key, text in listed.items():
            out.print(Text(f"{key}  {text}"))
