"""What the commands print: tables and JSON on standard output."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.text import Text

from trajstore.byte_sizes import format_bytes
from trajstore.cli.printable import PlainConsole, PlainTable

if TYPE_CHECKING:
    import xarray as xr

    from trainers.replay.replay_result import Replay
    from trajstore.integrity.repair import Repair
    from trajstore.integrity.verify import Verification

__all__ = [
    "err",
    "json_value",
    "out",
    "print_comparison",
    "print_description",
    "print_information",
    "print_json",
    "print_notes",
    "print_plan",
    "print_repair",
    "print_replay",
    "print_runs",
    "print_summary",
    "print_table",
    "print_verification",
    "table",
    "without_tokens",
]

_SETTINGS = 12  # that differ and are named
_WIDE = 100  # columns of a terminal from which on tables have all of theirs

out = PlainConsole(soft_wrap=True)
err = PlainConsole(stderr=True, soft_wrap=True)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = 160  # in a file or a pipe, tables are not squeezed


def table(title: str, *columns: str) -> PlainTable:
    """Empty table; all columns but the first, whose names are never cut, hold numbers."""
    made = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    return made


def print_table(printed: PlainTable) -> None:
    """Print a table that fits the terminal: what does not fit its column goes on below."""
    out.print(printed, soft_wrap=False)


def print_notes(notes: Iterable[str]) -> None:
    """Print what should be known about a result, a line each."""
    for note in notes:
        out.print(Text(f"Note: {note}."))


def without_tokens(populations: Mapping[str, int]) -> list[str]:
    """What should be known of populations, by their numbers of tokens: those that have none."""
    return [f"the population {name} has no token" for name, n in populations.items() if not n]


def print_json(facts: Any) -> None:
    """Print one JSON document; NaN and infinities, which JSON has not, become null."""
    click.echo(json.dumps(json_value(facts), indent=2))


def json_value(value: Any) -> Any:
    """A value that JSON has: NaN and infinities are null."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_description(facts: dict[str, Any]) -> None:
    """Print what `analysis.write_results.describe` found: a line for each population."""
    printed = table("", "variable", "dimensions", "least", "mean", "largest", "NaN", "units")
    for name, fact in facts.items():
        parts = {f"{name} {one}": part for one, part in fact["populations"].items()}
        dims = {d: size for d, size in fact["sizes"].items() if not (parts and d == "population")}
        sizes = " × ".join(f"{dim} {size}" for dim, size in dims.items())
        for row, part in (parts or {name: fact}).items():
            numbers = (f"{part[key]:.6g}" for key in ("min", "mean", "max"))
            printed.add_row(row, sizes, *numbers, str(part["nan"]), fact["units"])
    print_table(printed)
    print_notes(
        f"{name}: {fact['long_name']}"
        for name, fact in facts.items()
        if fact["min"] == -1 and "-1" in fact["long_name"]
    )
    for name, fact in facts.items():
        if "values" in fact:
            _print_census(name, fact["labels"], fact["values"])


def _print_census(name: str, labels: dict[str, list[str]], values: list[Any]) -> None:
    """Print a table of counts: the labels of its last dimension are the columns."""
    *dims, last = labels
    printed = table(name, *dims, *labels[last])
    for column in printed.columns[: len(dims)]:
        column.justify = "left"
    for place in itertools.product(*(range(len(labels[dim])) for dim in dims)):
        row: Any = values
        for at in place:
            row = row[at]
        named = (labels[dim][at] for dim, at in zip(dims, place, strict=True))
        printed.add_row(*named, *(f"{count:,}" for count in row))
    print_table(printed)


def print_comparison(facts: dict[str, Any]) -> None:
    """Print what `analysis.compare` found, as the command `compare` puts it."""
    common, first, second = (facts["steps"][key] for key in ("common", "first", "second"))
    differing = [name for name, fact in facts["variables"].items() if fact["differing_steps"]]
    verdict = f"differ in {', '.join(differing)}" if differing else "are identical, bit for bit"
    unread = ", by their content digests; nothing was read (`trajstore verify` does)"
    out.print(
        f"Over {_counted(common, 'common step')} and "
        f"{_counted(len(facts['variables']), 'common variable')}, the runs {verdict}"
        f"{unread if facts['same_content'] else ''}."
    )
    tokens = facts["tokens"]
    if not tokens["common"] == tokens["first"] == tokens["second"]:
        out.print(
            f"The first run has {tokens['first']:,} tokens, the second {tokens['second']:,}; only "
            f"the {tokens['common']:,} that both have are compared."
        )
    if not common == first == second:
        out.print(f"The first run has {_counted(first, 'row')}, the second {second:,}.")
    for which in ("first", "second"):
        if facts[f"only_{which}"]:
            out.print(f"Only the {which} run has {', '.join(facts[f'only_{which}'])}.")
    if facts["differing_settings"]:
        named, more = facts["differing_settings"][:_SETTINGS], ""
        if len(facts["differing_settings"]) > _SETTINGS:
            more = f" and {len(facts['differing_settings']) - _SETTINGS} others (--json)"
        out.print(f"Their settings differ in {', '.join(named)}{more}.")
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
    print_table(printed)


def print_information(run: str, facts: dict[str, Any]) -> None:
    """Print what `trajstore.store.run_info.information` found."""
    steps = facts["steps"]
    span = f"steps {steps['first']} to {steps['last']}" if steps else "no steps"
    out.print(f"{run}: {_standing(facts)}, {facts['committed_rows']} rows, {span}")
    parameter = (facts.get("recording") or {}).get("parameter")
    if parameter:
        out.print(f"Recorded is {parameter}.")
    out.print(
        f"Store format {facts['trajstore_format']}, encoding {facts['encoding']}, "
        f"blocks of {facts['block_rows']} rows, updated {facts['updated']}, {facts['files']} files."
    )
    if "fingerprint" in facts:
        out.print(Text(f"Run {facts['runs'][-1][1]}"))
        out.print(Text(f"content digest {facts['content_digest']}"))
        out.print(Text(f"fingerprint    {facts['fingerprint']}"))
    columns = ("array", "shape", "type", "native", "on disk", "ratio", "chunk")
    # In a narrow terminal without the last one: what is there is not cut.
    shown = len(columns) - (out.width < _WIDE)
    printed = table("", *columns[:shown])
    for column in printed.columns:
        column.no_wrap = True
    for name, array in facts["arrays"].items():
        kind = "text" if array["native_dtype"].startswith("String") else array["native_dtype"]
        row = (name, _shape(array["shape"]), kind, *_sizes(array), _shape(array["chunk"]))
        printed.add_row(*row[:shown])
    printed.add_section()
    printed.add_row(*("all", "", "", *_sizes(facts), "")[:shown])
    print_table(printed)
    for section in ("config", "optimizer", "provenance"):
        if facts.get(section):
            out.print(section, style="bold")
            for name, value in _flat(facts[section]):
                out.print(Text(f"  {name} = {value}"))
    if facts["populations"]:
        told = (f"{name} {_counted(n, 'token')}" for name, n in facts["populations"].items())
        out.print(Text(f"Populations: {', '.join(told)}."))
    print_notes(advice["sentence"] for advice in facts["advice"])
    print_notes(without_tokens(facts["populations"]))


def print_runs(found: dict[str, dict[str, Any]]) -> None:
    """Print a line about each of several runs."""
    printed = table("", "run", "status", "rows", "last step", "tokens", "on disk", "ratio")
    for run, facts in found.items():
        _, on_disk, ratio = _sizes(facts)
        last = "" if facts["steps"] is None else f"{facts['steps']['last']:,}"
        tokens = f"{facts['arrays']['token']['shape'][0]:,}"
        row = (f"{facts['committed_rows']:,}", last, tokens, on_disk, ratio)
        printed.add_row(run, _standing(facts), *row)
    printed.columns[0].no_wrap = False  # a path goes on below rather than being cut
    printed.columns[0].overflow = "fold"
    printed.columns[1].justify = "left"
    print_table(printed)


def _standing(facts: dict[str, Any]) -> str:
    """Status of a run, and whether it can be true."""
    dead = facts["status"] == "recording" and facts["written_to"] is False
    return f"{facts['status']}, but its process is gone" if dead else str(facts["status"])


def _shape(sizes: Iterable[int]) -> str:
    return " × ".join(map(str, sizes))


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
    print_table(printed)
    printed = table("Tiers", "tier", "native", "expected on disk", "memory", "rows a block")
    for tier, totals in facts["tiers"].items():
        printed.add_row(
            tier,
            format_bytes(totals["bytes_native"]),
            format_bytes(totals["bytes_on_disk"]),
            format_bytes(totals["memory"]),
            str(totals["block_rows"]),
        )
    print_table(printed)
    if "time" in facts:
        out.print(_time_sentence(facts))
    print_notes([*facts["notes"], *(advice["sentence"] for advice in facts["advice"])])


def _time_sentence(facts: dict[str, Any]) -> str:
    """How long a planned run will take, and what that stands on."""
    time = facts["time"]
    steps = f"{time['timed_steps']} {'step' if time['timed_steps'] == 1 else 'steps'}"
    return (
        f"About {timedelta(seconds=max(round(time['seconds']), 1))} on this machine "
        f"({time['device']}), {timedelta(seconds=round(time['seconds_recording']))} of it for "
        f"recording: {time['step_seconds']:.2g} s a step and {time['row_seconds']:.2g} s a row, as "
        f"{steps} took that {'was' if time['timed_steps'] == 1 else 'were'} trained now, and "
        f"{time['timed_rows']} rows "
        f"({format_bytes(time['row_bytes'])} each on disk) that were recorded to a temporary "
        "folder. Other programs that run meanwhile, and checkpoints, come on top."
    )


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
        print_table(printed)
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
        told = [name for name in tokens if name != "all" and tokens[name]] or ["all"]
        for population in told:
            for when, step in steps.items():
                norms = summary["grad_norms"].sel(population=population, when=when)
                values = (norms.sel(statistic=name).item() for name in ("mean", "min", "max"))
                printed.add_row(
                    f"{population} ({tokens[population]})", str(step), *(f"{v:.6e}" for v in values)
                )
        print_table(printed)
        largest = summary["max_dead_grad_norm"].item() if "dead" in tokens else math.nan
        if "dead" not in tokens:
            pass
        elif not tokens["dead"]:
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
        if not number:
            continue
        moved = summary["displacement"].sel(population=population)
        values = (moved.sel(statistic=name).item() for name in ("mean", "median", "min", "max"))
        printed.add_row(f"{population} ({number})", *(f"{value:.4e}" for value in values))
    print_table(printed)
    clouds = ("all", "dead") if tokens.get("dead") else ("all",)
    for population in clouds if "centroid_norm" in summary else ():
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
    print_notes(without_tokens({n: tokens[n] for n in tokens if n not in ("dead", "live", "all")}))
    if "dead" not in tokens:
        out.print("Nothing says which tokens are dead; tell it with: trajstore annotate --help")


def print_verification(found: Verification) -> None:
    """Print what `trajstore.integrity.verify.verify` found: what is broken, and where."""
    from trajstore.store.remote_path import key_within

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
                Text(key_within(problem.path, found.path.parent)),
                Text(problem.message),
            )
        print_table(printed)
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
        run = shlex.quote(str(found.path))
        out.print(Text(f"Nothing has been changed. Do it with: trajstore repair {run} --yes"))


def _counted(number: int, noun: str) -> str:
    """A number of things.

    >>> _counted(1, "row"), _counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
