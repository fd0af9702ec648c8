"""Commands that check a run and mend it: verify, repair."""

from __future__ import annotations

import sys
from typing import Any

import click

from trajstore.cli.options import JSON, RUN, sentences
from trajstore.cli.progress import BytesProgress, StepsProgress
from trajstore.cli.tables import out, print_json, print_repair, print_replay, print_verification
from trajstore.errors import MissingExtra

__all__ = ["repair", "verify"]


@click.command()
@RUN
@click.option(
    "--replay",
    "with_replay",
    is_flag=True,
    help="Recompute every step with the recorded optimizer, and compare bit for bit. Needs torch.",
)
@JSON
@sentences
def verify(run: str, with_replay: bool, as_json: bool) -> None:
    """Read everything that is stored of a run against its checksums. Nothing is changed.

    Exits with 1 if anything is wrong.

    \b
    Example:
      trajstore verify gatsby.zarr
      trajstore verify gatsby.zarr --replay
    """
    from trajstore.integrity.verify import verify as check

    with BytesProgress("verifying") as progress:
        found = check(run, on_progress=progress.show)
    # What is broken is not worth replaying.
    replayed = _replay(run) if with_replay and found.clean else None
    if as_json:
        facts = None if replayed is None else replayed.facts()
        print_json(found.facts() | ({"replay": facts} if with_replay else {}))
    else:
        print_verification(found)
        if replayed is not None:
            print_replay(replayed)
        elif with_replay:
            out.print("The replay was left out, because the run is damaged; repair it first.")
    if not found.clean or (replayed is not None and not replayed.clean):
        sys.exit(1)


def _replay(run: str) -> Any:
    try:
        from trainers.replay.replay import replay
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("trajstore", "trainers", "analysis"):
            raise
        raise MissingExtra(
            f"replaying carries out every step with torch, and {error.name or error} is missing; "
            "install trajstore[train]"
        ) from error
    with StepsProgress("replaying") as progress:
        return replay(run, on_progress=progress.show)


@click.command()
@RUN
@click.option("--yes", is_flag=True, help="Do it; without this, only say what would be done.")
@JSON
@sentences
def repair(run: str, yes: bool, as_json: bool) -> None:
    """Bring a damaged run back to its last whole commit.

    Says what would be done, and does it with --yes. Exits with 1 if something cannot be repaired.

    \b
    Example:
      trajstore repair gatsby.zarr
      trajstore repair gatsby.zarr --yes
    """
    from trajstore.integrity.repair import repair as mend

    with BytesProgress("checking") as progress:
        found = mend(run, yes=yes, on_progress=progress.show)
    if as_json:
        print_json(found.facts())
    else:
        print_repair(found)
    if found.unrepaired:
        sys.exit(1)
