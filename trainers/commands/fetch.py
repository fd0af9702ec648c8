"""The command `fetch`."""

from __future__ import annotations

import click

from trajstore.cli.output import out


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
