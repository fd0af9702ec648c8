"""Options of the commands that rebuild recorded models."""

from __future__ import annotations

import click

TOKENIZER = click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="ascii|PATH",
    help="Tokenizer; default: that of the run.",
)
