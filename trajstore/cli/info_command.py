"""The command `info`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import click

from trajstore.arguments import format_bytes
from trajstore.cli.options import JSON, RUNS
from trajstore.cli.tables import (
    counted,
    err,
    out,
    print_json,
    print_notes,
    print_table,
    recorded_notes,
    table,
    without_tokens,
)
from trajstore.errors import FormatError, RunNotFound
from trajstore.store.metadata.segments import listed_segments
from trajstore.store.reading.run_settings import attribute

_WIDE = 100  # terminal width at which tables show all columns


@click.command()
@RUNS
@JSON
def info(runs: tuple[str, ...], as_json: bool) -> None:
    """Print what a run holds: rows, arrays, sizes, configuration, origin.

    Works while the run is recorded. For several runs or a folder of runs, prints a table with
    the settings that differ and the final loss, or a list with --json. Reports paths that are not
    runs and exits with 1.

    \b
    Example:
      trajstore info gatsby.zarr
      trajstore info runs/
    """
    from trajstore.store.reading.run_info import information
    from trajstore.store.reading.run_paths import run_paths

    paths = run_paths(runs)
    if len(paths) == 1:
        facts = information(paths[0])
        if as_json:
            print_json(facts)
        else:
            print_information(paths[0], facts)
        return
    from trajstore.store.reading.run_settings import differing_settings
    from trajstore.store.reading.run_table import final_loss, run_table  # imports xarray

    found = {}
    for run in paths:
        try:
            found[run] = information(run) | {"final_loss": final_loss(run)}
        except (FormatError, RunNotFound) as error:
            err.print(f"trajstore: {error}")
    if as_json:
        differing = differing_settings(list(found.values()))
        print_json(
            [
                {
                    "run": run,
                    **facts,
                    "differing_settings": {name: values[at] for name, values in differing.items()},
                }
                for at, (run, facts) in enumerate(found.items())
            ]
        )
    elif found:
        print_table("", *run_table(found), words=(0, 1), fold=True)
    if len(found) < len(paths):
        sys.exit(1)


def print_information(run: str, facts: dict[str, Any]) -> None:
    """Print what `trajstore.store.reading.run_info.information` found."""
    from trajstore.store.reading.run_info import run_status

    steps = facts["steps"]
    span = f"steps {steps['first']} to {steps['last']}" if steps else "no steps"
    out.print(f"{run}: {run_status(facts)}, {facts['committed_rows']} rows, {span}")
    parameter = attribute(facts, "recording", "parameter")
    if parameter:
        out.print(f"Recorded parameter: {parameter}.")
    out.print(
        f"Store format {facts['trajstore_format']}, encoding {facts['encoding']}, "
        f"blocks of {facts['block_rows']} rows, updated {facts['updated']}, {facts['files']} files."
    )
    out.print(f"Run {facts['runs'][-1][1]}")
    out.print(f"content digest {facts['content_digest']}")
    out.print(f"fingerprint    {facts['fingerprint']}")
    columns = ("array", "shape", "type", "native", "on disk", "ratio", "chunk")
    # A narrow terminal omits the last column instead of cutting the others.
    shown = len(columns) - (out.width < _WIDE)
    rows = [
        (
            name,
            _shape(array["shape"]),
            "text" if array["native_dtype"].startswith("String") else array["native_dtype"],
            *_sizes(array),
            _shape(array["chunk"]),
        )[:shown]
        for name, array in facts["arrays"].items()
    ]
    printed = table("", columns[:shown], rows)
    for column in printed.columns:
        column.no_wrap = True
    printed.add_section()
    printed.add_row(*("all", "", "", *_sizes(facts), "")[:shown])
    out.print(printed, soft_wrap=False)
    if facts.get("parameters"):
        _print_parameters(facts["parameters"])
    if facts["encoding"] == "compact":
        _print_forms(facts)
    for section in ("config", "optimizer", "provenance"):
        if isinstance(facts.get(section), dict) and facts[section]:
            at_first = " at the first step" if "hyperparameters" in facts["arrays"] else ""
            out.print(section + at_first * (section == "optimizer"), style="bold")
            for name, value in _flat(facts[section]):
                out.print(f"  {name} = {value}")
        if section == "config" and (lines := _segments(facts)):
            out.print("segments", style="bold")
            for line in lines:
                out.print(f"  {line}")
    if facts["populations"]:
        named = (f"{name} {counted(n, 'token')}" for name, n in facts["populations"].items())
        out.print(f"Populations: {', '.join(named)}.")
    print_notes(advice["sentence"] for advice in facts["advice"])
    print_notes(recorded_notes(facts["notes"]))
    print_notes(without_tokens(facts["populations"]))


def _print_parameters(parameters: list[dict[str, Any]]) -> None:
    """Print the parameters of the model, the variable that holds each, and its optimizer group."""
    rows = []
    for entry in parameters:
        group = "none" if entry["group"] is None else str(entry["group"])
        if not entry["requires_grad"]:
            group = "not trained"
        name = ", ".join([entry["name"], *entry.get("tied", [])])
        shape = _shape(entry["shape"]) or "scalar"
        rows.append((name, shape, entry["dtype"], entry["variable"], group))
    print_table("Parameters", ("parameter", "shape", "type", "in", "group"), rows)


def _print_forms(facts: dict[str, Any]) -> None:
    """Print which arrays are computed, and how their chunks are stored if that was counted."""
    computed = [name for name, array in facts["arrays"].items() if array["kind"] == "computed"]
    out.print(f"Computed from the gradient: {', '.join(computed) or 'nothing'}.")
    from trajstore.store.writing.compact_encoding import compact_rule, vector_rule
    from trajstore.values.vector_rule import VECTORS

    types = {name: array["native_dtype"] for name, array in facts["arrays"].items()}
    for name, rule in (("W", compact_rule), (VECTORS["W"], vector_rule)):
        if name not in computed:
            rule(facts, types, lambda note: print_notes([note]))


def _segments(facts: dict[str, Any]) -> list[str]:
    """Settings that differ between the segments of a run; empty if it has one segment."""
    last = facts["steps"]["last"] if facts["steps"] else 0
    segments = [each for each in listed_segments(facts) if each["step"] < last]
    if not segments:
        return []
    flat = [dict(_flat(each["config"])) for each in segments]
    names = [name for name in flat[-1] if len({str(one.get(name)) for one in flat}) > 1]
    ends = [*(each["step"] for each in segments[1:]), last]
    return [
        f"steps {each['step'] + 1} to {end}: "
        + ", ".join(f"{name} = {config.get(name)}" for name in names)
        for each, config, end in zip(segments, flat, ends, strict=True)
        if names
    ]


def _shape(sizes: Iterable[int]) -> str:
    return " × ".join(map(str, sizes))


def _sizes(facts: dict[str, Any]) -> tuple[str, str, str]:
    ratio = f"{facts['ratio']:.2f}" if facts["ratio"] else ""
    return format_bytes(facts["bytes_native"]), format_bytes(facts["bytes_on_disk"]), ratio


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        listed = isinstance(item, list) and item and all(isinstance(one, dict) for one in item)
        parts = {str(number): one for number, one in enumerate(item)} if listed else item
        rows += _flat(parts, f"{name}.") if isinstance(parts, dict) else [(name, item)]
    return rows
