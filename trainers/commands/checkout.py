"""The command `checkout`, which writes the model of a recorded step to a folder."""

from __future__ import annotations

from typing import Any

import click

from trajstore.cli.options import RUN
from trajstore.cli.output import out, print_notes
from trajstore.cli.stop_signals import StopRequest
from trajstore.errors import needs_extra
from trajstore.trainers.commands.model_options import TOKENIZER


@click.command()
@RUN
@click.option(
    "--at",
    "step",
    type=int,
    required=True,
    metavar="STEP",
    help="Step after which the model is written.",
)
@click.option("-o", "--output", required=True, type=click.Path(), help="Path of the new folder.")
@click.option(
    "--optimizer", is_flag=True, help="Also write optimizer.pt, the optimizer's state dict."
)
@TOKENIZER
@click.option("--overwrite", is_flag=True, help="Replace an existing folder.")
@needs_extra("checkout", "train")
def checkout(run: str, output: str, **options: Any) -> None:
    """Write the model of a recorded step to a folder that transformers loads.

    The run must be recorded with --variables everything. The weights have the recorded bits.
    AutoModelForCausalLM.from_pretrained reads the folder. AutoTokenizer.from_pretrained reads the
    tokenizer, if the run has one.

    \b
    Example:
      trajstore checkout gatsby.zarr --at 300 -o step-300/
      trajstore checkout gatsby.zarr --at 300 --optimizer -o step-300-optimizer/
    """
    from transformers.utils import logging

    from trajstore import trainers

    logging.disable_progress_bar()
    with StopRequest():
        found = trainers.checkout(run, output, **options)
    parts = ["model", *(["tokenizer"] if found.tokenizer else [])]
    parts += ["optimizer.pt"] if options["optimizer"] else []
    out.print(f"Wrote {output}: {', '.join(parts)} of step {options['step']} of {run}.")
    print_notes(found.notes)
    out.print(f"Load it with: AutoModelForCausalLM.from_pretrained({output!r})")
