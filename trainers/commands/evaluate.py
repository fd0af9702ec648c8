"""The command `evaluate`, which calls a function with the model of many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.options import RUN, SELECT
from trajstore.cli.output import StepsProgress, out
from trajstore.cli.stop_signals import StopRequest
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.trainers.commands.model_options import TOKENIZER

if TYPE_CHECKING:
    from trajstore.trainers.evaluations.evaluate import Evaluation

_OPTIONS = {
    "loss": ("text", "length"),
    "hidden-cosine": ("text", "length"),
    "attention": ("prompt",),
    "cka": ("prompt",),
    "logit-lens": ("prompt",),
    "generation": ("prompt", "length"),
}
"""Ready-made evaluations and their options; the first one is required."""


@click.command()
@RUN
@click.argument("function", metavar="FUNCTION")
@click.option("-o", "--output", required=True, type=click.Path(), help="Zarr store of the results.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    help="Evaluate the steps that are multiples of K; default: 1.",
    metavar="K",
)
@SELECT("step")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, help="Simultaneous processes; default: 1."
)
@click.option("--text", type=click.Path(), metavar="FILE", help="Text of loss or hidden-cosine.")
@click.option(
    "--prompt", metavar="TEXT", help="Prompt of attention, cka, logit-lens or generation."
)
@click.option(
    "--length",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens to read of --text (default: all) or to generate (default: 40).",
)
@TOKENIZER
@click.option(
    "--constructor",
    metavar="FILE.py:FUNCTION",
    help="Function that returns the model, for runs that do not record its configuration.",
)
@click.option("--overwrite", is_flag=True, help="Remove existing results.")
def evaluate(
    run: str, function: str, output: str, selected: dict[str, Any], **options: Any
) -> None:
    """Call a function with the model of each step, and append its results to a Zarr store.

    FUNCTION is FILE.py:NAME, MODULE:NAME, or a ready-made evaluation: loss and hidden-cosine
    (--text), attention, cka, logit-lens and generation (--prompt). A function is called with the
    model and the step, and returns a dict of numbers, arrays and texts.

    The run must be recorded with --variables everything. After a kill or an error, the same command
    evaluates the missing steps only. The results have the steps of the run: xr.merge joins both.

    \b
    Example:
      trajstore evaluate gatsby.zarr loss --text unseen.txt --every 10 -o loss.zarr
      trajstore evaluate gatsby.zarr cka --prompt "In my younger" --every 10 -o cka.zarr
      trajstore evaluate gatsby.zarr generation --prompt "In my younger" --every 50 -o texts.zarr
      trajstore evaluate gatsby.zarr probe.py:norms --select step=0:500 --jobs 2 -o norms.zarr
    """
    own = {name: options.pop(name) for name in ("text", "prompt", "length", "tokenizer")}
    check_options(function, own)
    from trajstore import trainers

    with StopRequest() as stop, StepsProgress("evaluating", stop=stop) as progress:
        found = trainers.evaluate(
            run,
            function if ":" in function else _ready_made(run, function, own),
            output,
            on_progress=progress.show,
            **selected,
            **options,
        )
    out.print(
        f"Wrote {output}: {', '.join(found.names)} of {found.steps} steps, {found.new} of them new."
    )
    out.print(f"Open it with: xr.open_zarr({output!r})")


def check_options(function: str, options: dict[str, Any]) -> None:
    """Check that the options belong to the function, before torch is imported.

    Raises
    ------
    InvalidArgument
        If the function is unknown, an option does not belong to it, or a required one is missing.
    """
    if ":" not in function and function not in _OPTIONS:
        raise InvalidArgument(
            f"got {function!r}{did_you_mean(function, _OPTIONS)}, expected FILE.py:FUNCTION or one "
            f"of {', '.join(_OPTIONS)}"
        )
    known = _OPTIONS.get(function, ())
    for name, value in options.items():
        if value is not None and name != "tokenizer" and name not in known:
            raise InvalidArgument(f"{function} has no option --{name}; leave it out")
    if function not in _OPTIONS and options["tokenizer"] is not None:
        raise InvalidArgument(f"{function} has no option --tokenizer; leave it out")
    if known and options[known[0]] is None:
        kind = "FILE" if known[0] == "text" else "TEXT"
        raise InvalidArgument(f"{function} needs --{known[0]}; add --{known[0]} {kind}")


def _ready_made(run: str, name: str, options: dict[str, Any]) -> Evaluation:
    from trajstore.trainers.evaluations import READY_MADE

    first, *others = _OPTIONS[name]
    chosen = {key: options[key] for key in (*others, "tokenizer")}
    evaluation: Evaluation = READY_MADE[name](run, options[first], **chosen)
    return evaluation
