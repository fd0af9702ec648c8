"""The command `what-if`, which applies recorded gradients with other settings."""

from __future__ import annotations

import shlex
from typing import Any

import click

from trajstore.cli.options import RUN
from trajstore.cli.output import StepsProgress, out, print_notes
from trajstore.cli.stop_signals import StopRequest


@click.command("what-if")
@RUN
@click.option("-o", "--output", required=True, type=click.Path(), help="Path of the new run.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.FIELD=VALUE",
    help="Change one setting, such as optimizer.state_dtype=float32. Repeatable.",
)
@click.option("--at", type=int, metavar="STEP", help="Step to start from; default: the first.")
@click.option("--tokens", default="all", metavar="all|dead|live|FILE", help="Tokens to compute.")
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
def what_if(run: str, output: str, tokens: str, **options: Any) -> None:
    """Apply a run's recorded gradients with other optimizer settings, as a new run.

    The gradients stay those of the recorded run; the new settings do not affect them (open loop).
    Settings that may change: optimizer.name, lr, betas, eps, momentum, weight_decay, state_dtype
    and rounding; schedule.name, warmup_steps and steps; training.max_grad_norm; model.dtype.
    Without a change, the result equals the run bit for bit.

    \b
    Example:
      trajstore what-if gatsby.zarr --set optimizer.state_dtype=float32 -o wide.zarr
      trajstore what-if gatsby.zarr --set schedule.name=constant --at 500 -o constant.zarr
      trajstore what-if gatsby.zarr --set rounding=stochastic --tokens dead -o dither.zarr
      trajstore compare gatsby.zarr wide.zarr
    """
    from trajstore.store.writing.create import check_local_target

    check_local_target(output, overwrite=options["overwrite"])  # before torch is imported
    from trajstore import trainers
    from trajstore.trainers.recording.options import read_tokens

    with StopRequest() as stop, StepsProgress("computing", stop=stop) as progress:
        found = trainers.what_if(
            run,
            output,
            tokens=tokens if tokens in ("all", "dead", "live") else read_tokens(tokens),
            on_progress=progress.show,
            **options,
        )
    out.print(
        f"Wrote {output}: {found.rows} rows, steps {found.first_step} to {found.last_step}, "
        f"from the gradients of {run}."
    )
    print_notes(found.notes)
    if tokens == "all":  # runs of other tokens cannot be compared value by value
        out.print(f"Compare the runs with: trajstore compare {shlex.join([run, output])}")
