"""Options that make the configuration of a training, and that configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
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
    "named_config",
    "preset_names",
    "recording",
    "settings_of",
]


def preset_names(ctx: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """Presets that begin so, for the completion of a shell; none where they cannot be imported."""
    try:
        from trajstore.trainers import PRESETS
    except MissingExtra:
        return []
    return [name for name in PRESETS if name.startswith(begun)]


def _together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds several options, in this order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


configuration = _together(
    click.option(
        "--preset",
        "preset_name",
        metavar="NAME",
        shell_complete=preset_names,
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
    click.option("--corpus", type=click.Path(), help="A text; default: as fetched, or embedded."),
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
    ENCODING(
        help="delta: store each array as differences between steps (default); replay: store the "
        "gradient, and compute W and the moments from it.",
    ),
    click.option(
        "--memory", metavar="SIZE", help="For all buffers of the recorder, such as 512MiB."
    ),
    click.option(
        "--block-rows", type=int, help="Rows of a block; default: planned from the memory."
    ),
)
"""Options that make a configuration, the same for all commands that take one."""

recording = _together(
    click.option("--device", type=Choice(["auto", "cpu", "cuda", "mps"]), help="Where to train."),
    click.option(
        "--commit-every",
        type=float,
        metavar="SECONDS",
        help="How late a row is safe, and seen, at most; default: 10; 0: whole blocks only.",
    ),
    click.option(
        "--checkpoint-every",
        type=int,
        metavar="K",
        help="Steps between checkpoints, rounded up to whole blocks; default: by time, so that "
        "they cost at most a hundredth of it.",
    ),
    click.option(
        "--fsync/--no-fsync",
        default=True,
        help="Whether every commit and checkpoint survives a loss of power; default: it does.",
    ),
    click.option(
        "--strict-numerics",
        is_flag=True,
        help="Refuse types in which the optimizer's state, or the weight decay, can do nothing.",
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


def configured(
    preset_name: str | None,
    config_file: str | None,
    assignments: tuple[str, ...],
    variables: str | None,
    fields: dict[str, Any],
    run: Location | None = None,
) -> RunConfig:
    """Configuration that is asked for; of a run that goes on, where none is named, its own.

    `run` is the one that goes on, if it is there. The steps of a preset or a file are those of a
    new run: one that goes on keeps its own.
    """
    from trajstore import trainers

    named = preset_name is not None or config_file is not None
    begins = run is not None and named and not run.exists()
    recorded = None if run is None or begins else trainers.recorded_config(run)
    config = recorded if recorded and not named else named_config(preset_name, config_file)
    if recorded is not None:
        config = config.with_values([f"training.steps={recorded.training.steps}"])
    return config.with_values(settings_of(assignments, variables, fields))


def named_config(preset_name: str | None, config_file: str | None) -> RunConfig:
    """Configuration of a preset or of a file."""
    from trajstore import trainers

    if (preset_name is None) == (config_file is None):
        raise InvalidArgument("name either a preset (--preset gatsby) or a file (--config FILE)")
    if preset_name is not None:
        return trainers.preset(preset_name)
    return trainers.RunConfig.from_toml(str(config_file))


def settings_of(
    assignments: tuple[str, ...], variables: str | None, fields: dict[str, Any]
) -> list[str]:
    """All that is to be changed of a configuration, whichever option says so."""
    given = [
        f"{PLACES[name]}={json.dumps(value)}"
        for name, value in fields.items()
        if value not in (None, ())
    ]
    if variables is not None:
        given.append(f"recording.record={json.dumps(variables.split(','))}")
    return [*assignments, *given]
