"""The commands `info`, `verify` and `repair`, about the run on disk."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.command_options import JSON, RUN, RUNS, SELECT
from trajstore.cli.output import (
    BytesProgress,
    StepsProgress,
    counted,
    out,
    print_error,
    print_json,
    print_notes,
    print_table,
    recorded_notes,
    table,
    without_tokens,
)
from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.provenance import RunAttributes
from trajstore.schema import STEP
from trajstore.units import format_bytes

if TYPE_CHECKING:
    from trajstore.integrity.repair import Repair
    from trajstore.integrity.verify import Verification


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
    from trajstore.store.reading.run_info import information, run_paths

    paths = run_paths(runs)
    if len(paths) == 1:
        facts = information(paths[0])
        if as_json:
            print_json(facts)
        else:
            print_information(paths[0], facts)
        return
    from trajstore.store.reading.open_run import final_loss, run_table  # imports xarray
    from trajstore.store.reading.run_attributes import differing_settings

    facts_of = {}
    for run in paths:
        try:
            facts_of[run] = information(run) | {"final_loss": final_loss(run)}
        except (FormatError, RunNotFound) as error:
            print_error(error)
    if as_json:
        differing = differing_settings(list(facts_of.values()))
        print_json(
            [
                {
                    "run": run,
                    **facts,
                    "differing_settings": {name: values[at] for name, values in differing.items()},
                }
                for at, (run, facts) in enumerate(facts_of.items())
            ]
        )
    elif facts_of:
        print_table("", *run_table(facts_of), words=(0, 1), fold=True)
    if len(facts_of) < len(paths):
        sys.exit(1)


def print_information(run: str, facts: dict[str, Any]) -> None:
    """Print what `trajstore.store.reading.run_info.information` found."""
    from trajstore.store.reading.run_info import run_status

    steps = facts["steps"]
    span = f"steps {steps['first']} to {steps['last']}" if steps else "no steps"
    out.print(f"{run}: {run_status(facts)}, {facts['committed_rows']} rows, {span}")
    recorded = RunAttributes.of(facts)
    if recorded.parameter:
        out.print(f"Recorded parameter: {recorded.parameter}.")
    if every := recorded.keyframe_every:
        out.print(f"Keyframes every {every} steps; their bytes are only in the sum on disk.")
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
    """Print which arrays are computed, and which are stored in place of that."""
    computed = [name for name, array in facts["arrays"].items() if array["kind"] == "computed"]
    out.print(f"Computed from the gradient: {', '.join(computed) or 'nothing'}.")
    from trajstore.store.writing.new_run import fallbacks

    print_notes(fallbacks(facts))


def _segments(facts: dict[str, Any]) -> list[str]:
    """Settings that differ between the segments of a run; empty if it has one segment."""
    from trajstore.store.metadata.metadata_form import listed_segments

    last = facts["steps"]["last"] if facts["steps"] else 0
    segments = [each for each in listed_segments(facts) if each["step"] < last]
    if not segments:
        return []
    flat = [dict(_flat(each["config"])) for each in segments]
    names = [name for name in flat[-1] if len({str(segment.get(name)) for segment in flat}) > 1]
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
        listed = isinstance(item, list) and item and all(isinstance(entry, dict) for entry in item)
        parts = {str(number): entry for number, entry in enumerate(item)} if listed else item
        rows += _flat(parts, f"{name}.") if isinstance(parts, dict) else [(name, item)]
    return rows


@click.command()
@RUN
@click.option(
    "--replay",
    "with_replay",
    is_flag=True,
    help="Recompute every step with the recorded optimizer and compare all bits. Requires torch.",
)
@click.option(
    "--gradients",
    is_flag=True,
    help="With --replay: train each step again from the row before it, and compare all "
    "variables. For runs of `trajstore record` with everything or keyframes.",
)
@SELECT("step", note="Needs --gradients.")
@click.option(
    "--corpus",
    type=click.Path(),
    metavar="FILE",
    help="With --gradients: text of the run. Default: as recorded.",
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="PATH",
    help="With --gradients: folder of the run's tokenizer. Default: as recorded.",
)
@JSON
def verify(run: str, with_replay: bool, gradients: bool, as_json: bool, **options: Any) -> None:
    """Read every byte of a run and compare it with its checksums. Changes nothing.

    RUN may be the common name of the two runs of untied weights, or a zip file, which is unpacked
    into a temporary folder. Exits with 1 if it finds a problem.

    \b
    Example:
      trajstore verify gatsby.zarr
      trajstore verify gatsby.zarr --replay
      trajstore verify gatsby.zarr --replay --gradients --select step=0:200
    """
    if gradients and not with_replay:
        raise InvalidArgument("--gradients needs --replay; give both")
    for name, value in options.items():
        if value and not gradients:
            option = name.replace("selected", "select")
            raise InvalidArgument(f"--{option} needs --gradients; leave it out or give both")
    chosen = options.pop("selected") | options
    from trajstore.integrity.verify import verify as check
    from trajstore.store.reading.run_info import all_matrix_runs

    reports: dict[str, dict[str, Any]] = {}
    clean = True
    for matrix in all_matrix_runs(run) or [run]:
        with BytesProgress("verifying") as progress:
            verification = check(matrix, on_progress=progress.show)
        parts: dict[str, Any] = {}
        if with_replay:
            parts["replay"] = (
                _replayed("optimizer", "replaying", matrix) if verification.clean else None
            )
        if gradients:
            parts["gradients"] = (
                _replayed("gradients", "training", matrix, **chosen) if verification.clean else None
            )
        clean = clean and verification.clean and all(part.clean for part in parts.values() if part)
        facts = {name: part and part.facts() for name, part in parts.items()}
        reports[matrix] = verification.facts() | facts
        if as_json:
            continue
        print_verification(verification)
        if facts.get("replay"):
            print_replay(facts["replay"])
        elif with_replay:
            out.print("Replay skipped: the run is damaged; repair it first.")
        if facts.get("gradients"):
            print_proof(facts["gradients"])
    if as_json:
        print_json(reports if len(reports) > 1 else reports.popitem()[1])
    if not clean:
        sys.exit(1)


def _replayed(name: str, verb: str, run: str, **options: Any) -> Any:
    """Result of an installed replay, with ``clean`` and ``facts()``."""
    from trajstore.store.reading.open_group import unzipped

    (installed,) = entry_points(group="trajstore.replays", name=name)
    replay = installed.load()
    with unzipped(run) as folder, StepsProgress(verb) as progress:
        return replay(folder, on_progress=progress.show, **options)


@click.command()
@RUN
@click.option("--dry-run", is_flag=True, help="Print the repair; change nothing.")
def repair(run: str, dry_run: bool) -> None:
    """Restore a damaged run to its last complete commit.

    Prints what it does, then does it. Dropped rows are lost: use --dry-run first, and copy the
    run. Exits with 1 if something cannot be repaired. To save more rows, export the run: --dry-run
    prints how.

    \b
    Example:
      trajstore repair gatsby.zarr --dry-run
      trajstore repair gatsby.zarr
    """
    from trajstore.integrity.repair import repair as mend
    from trajstore.schema import KEYFRAMES
    from trajstore.store.storage.remote_path import METADATA_KEY, location

    keyframes = location(run) / KEYFRAMES
    unrepaired: list[str] = []
    for part in (run, keyframes) if (keyframes / METADATA_KEY).exists() else (run,):
        with BytesProgress("checking") as progress:
            done = mend(part, dry_run=dry_run, on_progress=progress.show, on_plan=print_repair)
        unrepaired += done.unrepaired
        if done.actions and not dry_run:
            out.print(f"{done.path.name} is repaired.")
        elif dry_run:
            print_advice(done)
    if unrepaired:
        sys.exit(1)


def print_replay(facts: dict[str, Any]) -> None:
    """Print the facts of a replay."""
    out.print(
        f"Replayed {facts['replayed']:,} of {facts['steps']:,} steps"
        + (f" with {facts['optimizer']}" if facts["replayed"] else "")
        + (f", {facts['skipped']:,} skipped by the gradient scaler" if facts["skipped"] else "")
        + f": {facts['differing']:,} values differ{_not_proven(facts['unreplayed'])}."
    )
    if facts["variables"]:
        rows = []
        for name, compared in facts["variables"].items():
            first = compared["first"] or {}
            place = ", ".join(f"{key} {at}" for key, at in first.items() if at is not None)
            ulps = "" if compared["ulps"] is None else f"{compared['ulps']:,}"
            rows.append((name, f"{compared['steps']:,}", f"{compared['differing']:,}", place, ulps))
        print_table("", ("variable", "steps", "differ", "first at", "largest, ulp"), rows)
    if facts["rebuilt"]:
        out.print(f"Rebuilt from row 0 because not recorded: {', '.join(facts['rebuilt'])}.")
    for finding in facts["findings"]:
        out.print(f"Problem: {finding['sentence']}.")
    if facts["total_findings"] > len(facts["findings"]):
        out.print(f"{facts['total_findings'] - len(facts['findings']):,} more problems.")
    for part in facts["unreplayed"]:
        out.print(f"Not proven: {part['sentence']}.")
    print_notes(facts["notes"])


def _not_proven(parts: list[dict[str, Any]]) -> str:
    """Return how many steps are not proven, for the verdict; the reasons follow it."""
    steps = sum(part["steps"] for part in parts)
    return f"; {counted(steps, 'step')} not proven" if steps else ""


def print_proof(facts: dict[str, Any]) -> None:
    """Print the facts of a proof of steps from the data to the weights."""
    out.print(
        f"Trained {facts['proven'] + facts['differing']:,} of {counted(facts['steps'], 'step')} "
        f"again: {facts['proven']:,} agree in every bit, {facts['differing']:,} differ"
        f"{_not_proven(facts['unproven'])}."
    )
    out.print(f"Compared: {', '.join(facts['variables'])}.")
    if facts["differences"]:
        columns = ("step", "variable", "parameter", "elements", "largest, ulp")
        rows = []
        for difference in facts["differences"]:
            ulps = "" if difference["ulps"] is None else f"{difference['ulps']:,}"
            name = difference["parameter"] or ""
            rows.append(
                (
                    difference["step"],
                    difference["variable"],
                    name,
                    f"{difference['elements']:,}",
                    ulps,
                )
            )
        print_table("", columns, rows, words=(0, 1, 2))
    if facts["total"] > len(facts["differences"]):
        out.print(f"{facts['total'] - len(facts['differences']):,} more differences.")
    for part in facts["unproven"]:
        out.print(f"Not proven: {part['sentence']}.")
    print_notes(facts["notes"])


def print_verification(verification: Verification) -> None:
    """Print what `trajstore.integrity.verify.verify` found."""
    from trajstore.store.storage.remote_path import key_within

    if verification.problems:
        columns = ("array", "block", "bytes", "file", "problem")
        rows = []
        for problem in verification.problems:
            span = "" if problem.first_byte is None else f"{problem.first_byte}–{problem.stop_byte}"
            file = key_within(problem.path, verification.path.parent)
            rows.append((problem.array, problem.block, span, file, problem.message))
        print_table("Problems", columns, rows, words=(0, 3, 4))
    print_notes(verification.notes)
    verdict = "sound" if verification.clean else f"{counted(len(verification.problems), 'problem')}"
    out.print(
        f"{verification.path.name}: {verdict}; checked {counted(verification.rows, 'row')} in "
        f"{counted(verification.shards, 'shard')}, {counted(verification.chunks, 'chunk')}, "
        f"{format_bytes(verification.bytes)}."
    )
    run = shlex.quote(str(verification.path))
    if any(problem.remedy != "none" for problem in verification.problems):
        out.print(f"Print what a repair would do: trajstore repair {run} --dry-run")
    damaged = {problem.array for problem in verification.problems if problem.remedy == "cut"}
    if damaged and STEP.name not in damaged:
        copy = f"trajstore export {run} --format run --fill-damaged -o COPY.zarr"
        out.print(f"Copy all rows, with NaN for what is damaged: {copy}")


def print_repair(plan: Repair) -> None:
    """Print what `trajstore.integrity.repair.repair` does, or would do."""
    if not plan.actions and not plan.unrepaired:
        out.print(f"{plan.path.name} is sound; nothing to repair.")
        return
    if plan.damaged:
        damaged = (f"{name}, {where}" if where else name for name, where in plan.damaged.items())
        out.print(f"Damaged: {'; '.join(damaged)}. Whole: {', '.join(plan.whole)}.")
    if plan.actions:
        out.print("Repair:")
    for action in plan.actions:
        out.print(f"  {action}.")
    if plan.unrepaired:
        out.print("Cannot be repaired, because no other copy exists:")
    for sentence in plan.unrepaired:
        out.print(f"  {sentence}.")


def print_advice(plan: Repair) -> None:
    """Print what to do before and in place of a planned repair."""
    from trajstore.store.storage.remote_path import RemotePath

    run, remote = shlex.quote(str(plan.path)), isinstance(plan.path, RemotePath)
    if plan.exports:
        out.print("To keep more, copy the run instead:")
        for options in plan.exports:
            out.print(f"  trajstore export {run} --format run {options} -o COPY.zarr")
    if plan.rows < plan.rows_before and not remote:
        copy = shlex.quote(f"{plan.path}.copy")
        out.print(f"Dropped rows are lost; copy the run first: cp -r {run} {copy}")
    if plan.actions:
        out.print(f"Nothing was changed. To repair, run: trajstore repair {run}")
