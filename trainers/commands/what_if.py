"""Commands that carry a run out differently: what-if."""

from __future__ import annotations

import shlex

import click
from rich.text import Text

from trajstore.cli.errors import sentences
from trajstore.cli.options import JSON, RUN
from trajstore.cli.progress import StepsProgress, stopped_by_signals
from trajstore.cli.tables import out, print_json, print_notes

__all__ = ["what_if"]


@click.command("what-if")
@RUN
@click.option("-o", "--output", required=True, type=click.Path(), help="The new run.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.FIELD=VALUE",
    help="What is to be different, such as optimizer.state_dtype=float32. Repeatable.",
)
@click.option(
    "--from", "from_step", type=int, metavar="STEP", help="Go on from this step's recorded state."
)
@click.option("--tokens", default="all", metavar="all|dead|live|FILE", help="Of which tokens.")
@click.option("--seed", type=int, help="Of stochastic rounding; default: 0.")
@click.option("--memory", metavar="SIZE", help="For the buffer of the writer, such as 512MiB.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is there.")
@JSON
@sentences
def what_if(
    run: str,
    output: str,
    settings: tuple[str, ...],
    from_step: int | None,
    tokens: str,
    seed: int | None,
    memory: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Apply a run's recorded gradients with other settings of the optimizer, as a new run.

    Open loop: the gradients stay those of the recorded path. What can be changed: optimizer.name,
    lr, betas, eps, momentum, weight_decay, state_dtype and rounding; schedule.name, warmup_steps
    and steps; training.max_grad_norm; model.dtype. With nothing changed it is the run again, bit
    for bit.

    \b
    Example:
      trajstore what-if gatsby.zarr --set optimizer.state_dtype=float32 -o wide.zarr
      trajstore what-if gatsby.zarr --set schedule.name=constant --from 500 -o constant.zarr
      trajstore what-if gatsby.zarr --set rounding=stochastic --tokens dead -o dither.zarr
      trajstore compare gatsby.zarr wide.zarr
    """
    from trajstore.store.writing.create import check_local_target

    check_local_target(output, overwrite=overwrite)  # before torch is imported
    from trajstore import trainers
    from trajstore.byte_sizes import EXCHANGE_MEMORY
    from trajstore.trainers.recording.token_selection import read_tokens

    with stopped_by_signals(), StepsProgress("computing") as progress:
        found = trainers.what_if(
            run,
            output,
            settings,
            from_step=from_step,
            tokens=tokens if tokens in ("all", "dead", "live") else read_tokens(tokens),
            seed=seed,
            memory=memory or EXCHANGE_MEMORY,
            overwrite=overwrite,
            on_progress=progress.show,
        )
    if as_json:
        print_json({**vars(found), "path": str(found.path), "notes": list(found.notes)})
        return
    out.print(
        Text(
            f"Made {output}: {found.rows} rows, steps {found.first_step} to {found.last_step}, "
            f"of the gradients of {run}."
        )
    )
    print_notes(found.notes)
    if tokens == "all":  # runs of other tokens cannot be compared value by value
        out.print(Text(f"Compare them with: trajstore compare {shlex.join([run, output])}"))
