"""The command `plan`."""

from __future__ import annotations

from typing import Any

import click

from trajstore.byte_sizes import format_bytes
from trajstore.cli.options import JSON
from trajstore.cli.tables import counted, err, out, print_json, print_notes, print_table
from trajstore.durations import format_duration
from trajstore.errors import InvalidArgument, TrajstoreError
from trajstore.extras import needs_extra
from trajstore.schema import ENCODINGS, TIERS
from trajstore.trainers.commands.configuration import configuration, configured

_SIZES = ("native", *(f"expected, {encoding}" for encoding in ENCODINGS))


@click.command()
@configuration
@click.option(
    "--no-timing",
    is_flag=True,
    help="Skip the time estimate, which trains a few steps on this machine.",
)
@JSON
@needs_extra("plan", "train")
def plan(no_timing: bool, as_json: bool, **options: Any) -> None:
    """Print the cost of a run before it starts: rows, chunks, bytes, memory, files, time.

    The sizes are printed at once. The time estimate trains a few steps on this machine and records
    them to a temporary folder. This takes minutes for a large model.

    \b
    Example:
      trajstore plan --preset wordybird-1b
      trajstore plan --preset wordybird-1b --no-timing
    """
    from trajstore import trainers

    config = configured(options)
    text = {name: options[name] for name in ("corpus", "tokenizer")}
    wanted = trainers.plan(config, **text)
    tiers, impossible = {}, []
    for tier in TIERS:
        changes: dict[str, Any] = {"variables": (tier,)}
        if tier == "everything":
            changes["tokens"] = "all"
        recording = config.recording.model_copy(update=changes)
        alternative = config.model_copy(update={"recording": recording})
        try:
            tiers[tier] = trainers.plan(alternative, **text)
        except InvalidArgument as error:  # it needs more memory than the one that is wanted
            impossible.append(f"the tier {tier} is not possible: {error}")
    facts = wanted.facts() | {"tiers": {tier: made.totals() for tier, made in tiers.items()}}
    facts["notes"] += impossible
    if not as_json:
        print_plan(facts)
    if not no_timing:
        err.print("Timing a few steps on this machine …")
        try:
            timed = trainers.time_steps(config, **text)
        except TrajstoreError as error:  # the plan may be for another machine
            facts["notes"].append(f"the time was not measured: {error}")
            if not as_json:
                print_notes(facts["notes"][-1:])
        else:
            facts["time"] = timed.facts(steps=wanted.steps, rows=wanted.rows)
            if not as_json:
                out.print(time_sentence(facts["time"]))
    if as_json:
        print_json(facts)


def print_plan(facts: dict[str, Any]) -> None:
    """Print the sizes in `facts`, and a table of the tiers."""
    out.print(
        f"{facts['rows']} rows of {facts['tokens']} tokens: steps 0 to {facts['steps']}, every "
        f"{facts['every']}; encoding {facts['encoding']}; blocks of {facts['block_rows']} rows; at "
        f"most {format_bytes(facts['memory'])} of memory; {facts['files']} files."
    )
    rows = [
        (name, array["native_dtype"], *_sizes(array), " × ".join(map(str, array["chunk"])))
        for name, array in facts["arrays"].items()
    ]
    print_table("", ("array", "type", *_SIZES, "chunk"), rows)
    rows = [
        (tier, *_sizes(totals), format_bytes(totals["memory"]), totals["block_rows"])
        for tier, totals in facts["tiers"].items()
    ]
    print_table("Tiers", ("tier", *_SIZES, "memory", "rows per block"), rows)
    print_notes([*facts["notes"], *(advice["sentence"] for advice in facts["advice"])])


def _sizes(facts: dict[str, Any]) -> list[str]:
    return [*map(format_bytes, (facts["bytes_native"], *facts["bytes_by_encoding"].values()))]


def time_sentence(time: dict[str, Any]) -> str:
    """Return a sentence with the duration of a planned run, and what was timed.

    Parameters
    ----------
    time : dict
        From `TimedSteps.facts`.
    """
    return (
        f"About {format_duration(time['seconds'])} on this machine ({time['device']}), "
        f"{format_duration(time['seconds_recording'])} of it for recording: "
        f"{format_duration(time['step_seconds'])} per step and "
        f"{format_duration(time['row_seconds'])} per row. "
        f"Timed: {counted(time['timed_steps'], 'step')} and {time['timed_rows']} "
        f"rows ({format_bytes(time['row_bytes'])} each on disk). Checkpoints and other programs "
        "add to this."
    )
