"""What the commands print: tables and JSON on standard output."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trajstore.byte_sizes import format_bytes

if TYPE_CHECKING:
    import xarray as xr

    from trainers.replay.replay_result import Replay
    from trajstore.integrity.repair import Repair
    from trajstore.integrity.verify import Verification

__all__ = [
    "err",
    "out",
    "print_comparison",
    "print_description",
    "print_information",
    "print_json",
    "print_notes",
    "print_plan",
    "print_repair",
    "print_replay",
    "print_summary",
    "print_verification",
    "table",
]

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = 160  # in a file or a pipe, tables are not squeezed


def table(title: str, *columns: str) -> Table:
    """Empty table; all columns but the first hold numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made


def print_notes(notes: Iterable[str]) -> None:
    """Print what should be known about a result, a line each."""
    for note in notes:
        out.print(Text(f"Note: {note}."))


def print_json(facts: Any) -> None:
    """Print one JSON document; NaN and infinities, which JSON has not, become null."""
    click.echo(json.dumps(_json_value(facts), indent=2))


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_description(facts: dict[str, Any]) -> None:
    """Print what `analysis.write_results.describe` found."""
    printed = table("", "variable", "dimensions", "least", "mean", "largest", "NaN", "units")
    for name, fact in facts.items():
        sizes = " × ".join(f"{dim} {size}" for dim, size in fact["sizes"].items())
        numbers = (f"{fact[key]:.6g}" for key in ("min", "mean", "max"))
        printed.add_row(name, sizes, *numbers, str(fact["nan"]), fact["units"])
    out.print(printed)


def print_comparison(facts: dict[str, Any]) -> None:
    """Print what `analysis.compare` found, as the command `compare` puts it."""
    common, first, second = (facts["steps"][key] for key in ("common", "first", "second"))
    differing = [name for name, fact in facts["variables"].items() if fact["differing_steps"]]
    verdict = f"differ in {', '.join(differing)}" if differing else "are identical, bit for bit"
    out.print(
        f"Over {_counted(common, 'common step')} and "
        f"{_counted(len(facts['variables']), 'common variable')}, the runs {verdict}"
        f"{', by their content digests' if facts['same_content'] else ''}."
    )
    if not common == first == second:
        out.print(f"The first run has {_counted(first, 'step')}, the second {second:,}.")
    for which in ("first", "second"):
        if facts[f"only_{which}"]:
            out.print(f"Only the {which} run has {', '.join(facts[f'only_{which}'])}.")
    if facts["differing_settings"]:
        out.print(f"Their settings differ in {', '.join(facts['differing_settings'])}.")
    if not differing:
        return
    printed = table(
        "", "variable", "first differs at step", "steps", "distance there", "largest", "at the end"
    )
    for name in differing:
        fact = facts["variables"][name]
        distance = fact["distance"]
        at = facts["step"].index(fact["first_difference"])
        finite = [value for value in distance if math.isfinite(value)]
        printed.add_row(
            name,
            str(fact["first_difference"]),
            str(fact["differing_steps"]),
            *(f"{value:.6g}" for value in (distance[at], max(finite, default=math.nan))),
            f"{distance[-1]:.6g}",
        )
    out.print(printed)


def print_information(run: str, facts: dict[str, Any]) -> None:
    """Print what `trajstore.store.run_info.information` found."""
    steps = facts["steps"]
    span = f"steps {steps['first']} to {steps['last']}" if steps else "no steps"
    out.print(Text(f"{run}: {facts['status']}, {facts['committed_rows']} rows, {span}"))
    out.print(
        f"Store format {facts['trajstore_format']}, encoding {facts['encoding']}, "
        f"blocks of {facts['block_rows']} rows, updated {facts['updated']}, {facts['files']} files."
    )
    if "fingerprint" in facts:
        out.print(Text(f"Run {facts['runs'][-1][1]}"))
        out.print(Text(f"content digest {facts['content_digest']}"))
        out.print(Text(f"fingerprint    {facts['fingerprint']}"))
    printed = table("", "array", "shape", "type", "native", "on disk", "ratio", "chunk")
    for name, array in facts["arrays"].items():
        printed.add_row(
            name,
            " × ".join(map(str, array["shape"])),
            array["native_dtype"],
            *_sizes(array),
            " × ".join(map(str, array["chunk"])),
        )
    printed.add_section()
    printed.add_row("all", "", "", *_sizes(facts), "")
    out.print(printed)
    for section in ("config", "optimizer", "provenance"):
        if facts.get(section):
            out.print(f"[bold]{section}[/bold]")
            for name, value in _flat(facts[section]):
                out.print(Text(f"  {name} = {value}"))
    print_notes(advice["sentence"] for advice in facts["advice"])


def print_plan(facts: dict[str, Any]) -> None:
    """Print what `trainers.runs.run_plan.RunPlan.facts` says, and the tiers beside each other."""
    out.print(
        f"{facts['rows']} rows of {facts['tokens']} tokens: steps 0 to {facts['steps']}, every "
        f"{facts['every']}; blocks of {facts['block_rows']} rows; at most "
        f"{format_bytes(facts['memory'])} of memory; {facts['files']} files."
    )
    printed = table("", "array", "type", "native", "expected on disk", "chunk")
    for name, array in facts["arrays"].items():
        printed.add_row(
            name,
            array["native_dtype"],
            format_bytes(array["bytes_native"]),
            format_bytes(array["bytes_on_disk"]),
            " × ".join(map(str, array["chunk"])),
        )
    out.print(printed)
    printed = table("Tiers", "tier", "native", "expected on disk", "memory", "rows a block")
    for tier, totals in facts["tiers"].items():
        printed.add_row(
            tier,
            format_bytes(totals["bytes_native"]),
            format_bytes(totals["bytes_on_disk"]),
            format_bytes(totals["memory"]),
            str(totals["block_rows"]),
        )
    out.print(printed)
    print_notes([*facts["notes"], *(advice["sentence"] for advice in facts["advice"])])


def print_replay(result: Replay) -> None:
    """Print what `trainers.replay.replay.replay` found."""
    out.print(
        f"Replayed {result.replayed:,} of {result.steps:,} steps"
        + (f" with {result.optimizer}" if result.replayed else "")
        + (f", {result.skipped:,} of them skipped by the scaler" if result.skipped else "")
        + f": {result.differing:,} values differ."
    )
    if result.variables:
        printed = table("", "variable", "steps", "differ", "first at", "largest, ulp")
        for name, compared in result.variables.items():
            first = compared.first or {}
            place = ", ".join(f"{key} {at}" for key, at in first.items() if at is not None)
            ulps = "" if compared.ulps is None else f"{compared.ulps:,}"
            printed.add_row(name, f"{compared.steps:,}", f"{compared.differing:,}", place, ulps)
        out.print(printed)
    if result.rebuilt:
        out.print(f"Rebuilt from row 0, because it is not recorded: {', '.join(result.rebuilt)}.")
    for finding in result.findings:
        out.print(Text(f"Wrong: {finding.sentence}."))
    if result.total > len(result.findings):
        out.print(f"And {result.total - len(result.findings):,} findings more.")
    for part in result.unreplayed:
        out.print(Text(f"Not proven: {part.sentence}."))
    print_notes(result.notes)


def _sizes(facts: dict[str, Any]) -> tuple[str, str, str]:
    ratio = f"{facts['ratio']:.2f}" if facts["ratio"] else ""
    return format_bytes(facts["bytes_native"]), format_bytes(facts["bytes_on_disk"]), ratio


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        rows += _flat(item, f"{name}.") if isinstance(item, dict) else [(name, item)]
    return rows


def print_summary(summary: xr.Dataset) -> None:
    """Print what `analysis.summary` computed.

    Parameters
    ----------
    summary : Dataset
        Computed.
    """
    steps = dict(zip(("first", "last"), summary["when_step"].values.tolist(), strict=True))
    tokens = dict(
        zip(
            summary["population"].values.tolist(),
            summary["population_tokens"].values.tolist(),
            strict=True,
        )
    )
    if "grad_norms" in summary:
        printed = table("Gradient norms (L2)", "tokens", "step", "mean", "min", "max")
        for population in (name for name in tokens if name != "all"):
            for when, step in steps.items():
                norms = summary["grad_norms"].sel(population=population, when=when)
                values = (norms.sel(statistic=name).item() for name in ("mean", "min", "max"))
                printed.add_row(
                    f"{population} ({tokens[population]})", str(step), *(f"{v:.6e}" for v in values)
                )
        out.print(printed)
        largest = summary["max_dead_grad_norm"].item()
        if not tokens["dead"]:
            out.print("There are no dead tokens: every id occurs in the text.")
        elif largest == 0:
            out.print("Dead token gradients are EXACTLY ZERO: only weight decay can move them.")
        else:
            out.print(f"Dead token gradients are NON-ZERO, at most {largest:.6e} at any step.")
    first, last = summary["state_step"].values.tolist()
    printed = table(
        f"Displacement from step {first} to {last}", "tokens", "mean", "median", "min", "max"
    )
    for population, number in tokens.items():
        moved = summary["displacement"].sel(population=population)
        values = (moved.sel(statistic=name).item() for name in ("mean", "median", "min", "max"))
        printed.add_row(f"{population} ({number})", *(f"{value:.4e}" for value in values))
    out.print(printed)
    for population in ("all", "dead") if "centroid_norm" in summary else ():
        centroid = summary["centroid_norm"].sel(population=population).values
        out.print(
            f"Centroid norm of {population} tokens: "
            f"{centroid[0]:.6f} at step {first}, {centroid[1]:.6f} at step {last}"
        )
    if "logits" in summary:
        values = (
            f"{name} {summary['logits'].sel(logit_statistic=name).item():.4f}"
            for name in ("min", "max", "range", "std")
        )
        out.print(f"Logits at step {steps['first']}: {', '.join(values)}")
    if "loss" in summary:
        losses = ", ".join(
            f"{loss:.4f} at step {step}"
            for loss, step in zip(summary["loss"].values, steps.values(), strict=True)
        )
        out.print(f"Loss: {losses}")


def print_verification(found: Verification) -> None:
    """Print what `trajstore.integrity.verify.verify` found: what is broken, and where."""
    if found.problems:
        printed = table("Problems", "array", "block", "bytes", "file", "what is wrong")
        for column in printed.columns[3:]:
            column.justify = "left"
        for problem in found.problems:
            span = "" if problem.first_byte is None else f"{problem.first_byte}–{problem.stop_byte}"
            printed.add_row(
                problem.array or "",
                "" if problem.block is None else str(problem.block),
                span,
                Text(os.path.relpath(problem.path, found.path.parent)),
                Text(problem.message),
            )
        out.print(printed)
    print_notes(found.notes)
    verdict = "sound" if found.clean else f"{_counted(len(found.problems), 'problem')}"
    out.print(
        Text(
            f"{found.path.name}: {verdict}; checked {_counted(found.rows, 'row')} in "
            f"{_counted(found.shards, 'shard')}, {_counted(found.chunks, 'chunk')}, "
            f"{format_bytes(found.bytes)}."
        )
    )


def print_repair(found: Repair) -> None:
    """Print what `trajstore.integrity.repair.repair` has done, or would do."""
    if not found.actions and not found.unrepaired:
        out.print(Text(f"{found.path.name} is sound: there is nothing to repair."))
        return
    if found.actions:
        out.print(Text("Done:" if found.done else "Would be done:"))
    for action in found.actions:
        out.print(Text(f"  {action}."))
    if found.unrepaired:
        out.print(Text("Cannot be repaired, as it is written down nowhere else:"))
    for sentence in found.unrepaired:
        out.print(Text(f"  {sentence}."))
    if found.actions and not found.done:
        out.print(
            Text(f"Nothing has been changed. Do it with: trajstore repair {found.path} --yes")
        )


def _counted(number: int, noun: str) -> str:
    """A number of things.

    >>> _counted(1, "row"), _counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
