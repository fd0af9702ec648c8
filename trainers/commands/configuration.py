"""Options that several training commands share, and the configuration that they set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.command_options import ENCODING, POPULATIONS, RECORD, Choice
from trajstore.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from trajstore.store.storage.remote_path import Location
    from trajstore.trainers import RunConfig


def preset_names(ctx: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """Return the presets that start with a text, for shell completion; none without the extra."""
    try:
        from trajstore.trainers import PRESETS
    except MissingExtra:
        return []
    return [name for name in PRESETS if name.startswith(begun)]


def _together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds several options, in this order."""
    return lambda command: reduce(
        lambda decorated, option: option(decorated), reversed(options), command
    )


SET = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change one field of the configuration, such as optimizer.lr=3e-4. Repeatable.",
)
STEPS = click.option("--steps", type=int, help="Optimizer steps to train.")
CORPUS = click.option(
    "--corpus", type=click.Path(), help="Text file; default: the fetched or embedded text."
)
TOKENIZER = click.option(
    "--tokenizer",
    type=click.Path(),
    help="Folder of a tokenizer; default: the fetched tokenizer, or none.",
)
RUN_TOKENIZER = click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="ascii|PATH",
    help="Tokenizer; default: that of the run.",
)
FSYNC = click.option(
    "--fsync/--no-fsync",
    default=True,
    help="Make every commit and checkpoint survive a loss of power; default: --fsync.",
)
THREADS = click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="CPU threads of torch, on which the bits depend. Default: those of the recorded run or "
    "the configuration, otherwise torch's own number.",
)

configuration = _together(
    click.option(
        "--preset",
        "preset_name",
        metavar="NAME",
        shell_complete=preset_names,
        help="A preset; `trajstore presets` lists them.",
    ),
    click.option(
        "--config",
        "config_file",
        type=click.Path(dir_okay=False),
        help="TOML file in place of a preset, in the form that `trajstore presets NAME` prints.",
    ),
    SET,
    STEPS,
    CORPUS,
    TOKENIZER,
)
"""Options that set a configuration, shared by all commands that take one."""

recording = _together(
    RECORD,
    click.option("--every", type=int, metavar="K", help="Record every K-th step."),
    click.option("--tokens", metavar="all|dead|live|FILE", help="Tokens to record."),
    POPULATIONS,
    ENCODING(
        help="delta: store each array as differences between steps (default); compact: store the "
        "gradient, and compute W and the moments from it.",
    ),
    click.option(
        "--memory", metavar="SIZE", help="Memory of all recording buffers, such as 512MiB."
    ),
    click.option("--device", type=Choice(["auto", "cpu", "cuda", "mps"]), help="Training device."),
    FSYNC,
)
"""Options of `record` for frequent fields of the configuration; ``--set`` sets all others."""

PLACES = {
    "steps": "training.steps",
    "device": "training.device",
    "threads": "training.threads",
    "seed": "training.seed",
    "variables": "recording.variables",
    "every": "recording.every",
    "tokens": "recording.tokens",
    "populations": "recording.populations",
    "encoding": "recording.encoding",
    "memory": "recording.memory",
}
"""Field of the configuration that each option sets."""


def configured(options: Mapping[str, Any], run: Location | None = None) -> RunConfig:
    """Return the configuration of a command; a resumed run supplies its own if none is given.

    A resumed run keeps its numbers of steps and threads, also if a preset or a file is given.

    Parameters
    ----------
    options : mapping
        Options of the command, by name.
    run : path-like, optional
        The run to resume, if it exists.
    """
    from trajstore import trainers
    from trajstore.trainers.runs.run_plan import existing_runs

    named = is_named(options)
    begins = run is not None and named and not existing_runs(run)
    recorded = None if run is None or begins else trainers.recorded_config(run)
    config = recorded if recorded and not named else named_config(options)
    if recorded is not None:
        kept = {name: getattr(recorded.training, name) for name in ("steps", "threads")}
        config = config.model_copy(update={"training": config.training.model_copy(update=kept)})
    return config.with_values(settings_of(options))


def is_named(options: Mapping[str, Any]) -> bool:
    """Return True if a preset or a file is given."""
    return options["preset_name"] is not None or options["config_file"] is not None


def named_config(options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a preset or a file."""
    from trajstore import trainers

    name, file = options["preset_name"], options["config_file"]
    if (name is None) == (file is None):
        raise InvalidArgument(
            "expected either a preset (--preset gatsby) or a file (--config FILE), got "
            + ("neither" if name is None else "both")
        )
    return trainers.RunConfig.from_toml(file) if name is None else trainers.preset(name)


def stem_of(options: Mapping[str, Any]) -> str:
    """Return the name of a preset or a file, from which names of runs are made."""
    return options["preset_name"] or Path(str(options["config_file"])).stem


def settings_of(options: Mapping[str, Any]) -> list[str]:
    """Return all changes of the configuration that the options make; others are ignored."""
    values = {PLACES[name]: option for name, option in options.items() if name in PLACES}
    return [
        *options["assignments"],
        *(
            f"{place}={json.dumps(option)}"
            for place, option in values.items()
            if option not in (None, ())
        ),
    ]
