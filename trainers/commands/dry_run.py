"""What `trajstore record --dry-run` prints: rows, files, memory and sizes of a planned run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trajstore.arguments import format_bytes
from trajstore.cli.output import out, print_notes, print_table
from trajstore.errors import InvalidArgument
from trajstore.schema import ENCODINGS, TIERS

if TYPE_CHECKING:
    from trajstore.trainers import RunConfig

_SIZES = ("native", *(f"expected, {encoding}" for encoding in ENCODINGS))


def print_plan(config: RunConfig, texts: Mapping[str, Any]) -> None:
    """Print what a run would hold and take, and a table of the tiers.

    Parameters
    ----------
    config : RunConfig
    texts : mapping
        ``corpus`` and ``tokenizer``, as for `trainers.plan`.
    """
    from trajstore import trainers

    facts = trainers.plan(config, **texts).facts()
    tiers = {}
    for tier in TIERS:
        changes: dict[str, Any] = {"variables": (tier,)}
        if tier == "everything":
            changes["tokens"] = "all"
        recording = config.recording.model_copy(update=changes)
        try:
            planned = trainers.plan(config.model_copy(update={"recording": recording}), **texts)
        except InvalidArgument as error:  # it needs more memory than the one that is wanted
            facts["notes"].append(f"the tier {tier} is not possible: {error}")
        else:
            tiers[tier] = planned.totals()
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
        for tier, totals in tiers.items()
    ]
    print_table("Tiers", ("tier", *_SIZES, "memory", "rows per block"), rows)
    print_notes([*facts["notes"], *(advice["sentence"] for advice in facts["advice"])])


def _sizes(facts: dict[str, Any]) -> list[str]:
    return [*map(format_bytes, (facts["bytes_native"], *facts["bytes_by_encoding"].values()))]
