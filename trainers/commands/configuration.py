"""Options that set the configuration of a training run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.options import ENCODING, RECORD, Choice
from trajstore.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from trajstore.store.storage.remote_path import Location
    from trajstore.trainers import RunConfig


__all__ = [
    "PLACES",
    "configuration",
    "configured",
    "is_named",
    "named_config",
    "preset_names",
    "recording",
    "settings_of",
    "stem_of",
]


def preset_names(ctx: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """Return the presets that start with a text, for shell completion; none without the extra."""
    try:
        from trajstore.trainers import PRESETS
    except MissingExtra:
        return []
    return [name for name in PRESETS if name.startswith(begun)]


def _together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds several options, in this order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


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
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Change one field of the configuration, such as optimizer.lr=3e-4. Repeatable.",
    ),
    click.option("--steps", type=int, help="Optimizer steps to train."),
    click.option(
        "--corpus", type=click.Path(), help="Text file; default: the fetched or embedded text."
    ),
    click.option(
        "--tokenizer",
        type=click.Path(),
        help="Folder of a tokenizer; default: the fetched tokenizer, or none.",
    ),
    RECORD,
    click.option("--every", type=int, metavar="K", help="Record every K-th step."),
    click.option("--tokens", metavar="all|dead|live|FILE", help="Tokens to record."),
    click.option(
        "--population",
        "populations",
        multiple=True,
        metavar="NAME=EXPR|FILE",
        help="Named group of tokens: an expression over the coordinates of the tokens, such as "
        "'rare=token_count < 10', or a file with a mask or ids. Repeatable.",
    ),
    ENCODING(
        help="delta: store each array as differences between steps (default); compact: store the "
        "gradient, and compute W and the moments from it.",
    ),
    click.option(
        "--memory", metavar="SIZE", help="Memory of all recording buffers, such as 512MiB."
    ),
    click.option("--block-rows", type=int, help="Rows per block; default: chosen to fit --memory."),
)
"""Options that set a configuration, shared by all commands that take one."""

recording = _together(
    click.option("--device", type=Choice(["auto", "cpu", "cuda", "mps"]), help="Training device."),
    click.option(
        "--commit-every",
        type=float,
        metavar="SECONDS",
        help="Maximum seconds between commits; default: 10; 0: commit complete blocks only.",
    ),
    click.option(
        "--checkpoint-every",
        type=int,
        metavar="K",
        help="Steps between checkpoints, rounded up to whole blocks; default: timed to take at "
        "most 1 % of the training.",
    ),
    click.option(
        "--fsync/--no-fsync",
        default=True,
        help="Make every commit and checkpoint survive a loss of power; default: --fsync.",
    ),
    click.option(
        "--strict-numerics",
        is_flag=True,
        help="Refuse types in which the optimizer's state or the weight decay has no effect.",
    ),
)
"""Options of commands that record with a configuration."""

PLACES = {
    "steps": "training.steps",
    "device": "training.device",
    "seed": "training.seed",
    "every": "recording.every",
    "tokens": "recording.tokens",
    "populations": "recording.populations",
    "encoding": "recording.encoding",
    "memory": "recording.memory",
    "block_rows": "recording.block_rows",
    "commit_every": "recording.commit_every",
    "checkpoint_every": "recording.checkpoint_every",
}
"""Field of the configuration that each option sets."""


def configured(options: Mapping[str, Any], run: Location | None = None) -> RunConfig:
    """Return the configuration of a command; a resumed run supplies its own if none is given.

    A resumed run keeps its number of steps, also if a preset or a file is given.

    Parameters
    ----------
    options : mapping
        Options of the command, by name.
    run : path-like, optional
        The run to resume, if it exists.
    """
    from trajstore import trainers
    from trajstore.trainers.runs.matrix_runs import existing_runs

    named = is_named(options)
    begins = run is not None and named and not existing_runs(run)
    recorded = None if run is None or begins else trainers.recorded_config(run)
    config = recorded if recorded and not named else named_config(options)
    if recorded is not None:
        config = config.with_values([f"training.steps={recorded.training.steps}"])
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
    given = {PLACES[name]: value for name, value in options.items() if name in PLACES}
    if options["variables"] is not None:
        given["recording.variables"] = options["variables"].split(",")
    return [
        *options["assignments"],
        *(
            f"{place}={json.dumps(value)}"
            for place, value in given.items()
            if value not in (None, ())
        ),
    ]
