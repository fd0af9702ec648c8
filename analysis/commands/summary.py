"""The command `summary`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trajstore.cli.options import JSON, LATTICE, POPULATIONS, RUNS, given_populations
from trajstore.cli.output import (
    counted,
    out,
    print_json,
    print_notes,
    print_table,
    recorded_notes,
    without_tokens,
)

if TYPE_CHECKING:
    import xarray as xr


@click.command()
@RUNS
@LATTICE
@POPULATIONS
@JSON
def summary(
    runs: tuple[str, ...], lattice: str, populations: tuple[str, ...], as_json: bool
) -> None:
    """Print gradients, displacement, centroid, logits and loss at the first and last step.

    Also prints the notes of the recording: what the run does not hold, or not as the loop suggests.
    For several runs or a folder of runs, prints one table with a line per run, or a list with
    --json.

    \b
    Example:
      trajstore summary gatsby.zarr
      trajstore summary duckling.zarr --lattice bfloat16
      trajstore summary gatsby.zarr --population 'rare=0 < token_count <= 10'
      trajstore summary runs/
    """
    from trajstore import analysis
    from trajstore.analysis.results.summary_table import summary_table
    from trajstore.store.metadata.zarr_json import notes_of
    from trajstore.store.reading.open_run import open_run
    from trajstore.store.reading.open_runs import run_paths
    from trajstore.store.reading.run_info import run_labels

    given = given_populations(populations)
    paths = run_paths(runs)
    opened = [analysis.with_populations(open_run(path), given) for path in paths]
    found = [analysis.summary(ds, lattice).compute() for ds in opened]
    if as_json:
        listed = [
            {
                str(name): {"dims": list(da.dims), "values": da.values.tolist()}
                for name, da in facts.variables.items()
            }
            for facts in found
        ]
        if len(paths) > 1:
            print_json([{"run": path, **facts} for path, facts in zip(paths, listed, strict=True)])
        else:
            print_json(listed[0])
        return
    if lattice != "native":
        out.print(f"W is rounded to {lattice}.")
    if len(paths) == 1:
        print_summary(found[0])
        print_notes(recorded_notes(notes_of(opened[0].attrs)))
        return
    labels = run_labels([ds.attrs for ds in opened], paths)
    print_table(*summary_table(dict(zip(labels, found, strict=True))), fold=True)
    runs_of: dict[str, list[str]] = {}
    for label, ds in zip(labels, opened, strict=True):
        for note in notes_of(ds.attrs):
            runs_of.setdefault(note["note"], []).append(label)
    print_notes(
        f"{note} ({named[0] if len(named) == 1 else counted(len(named), 'run')})"
        for note, named in runs_of.items()
    )


def print_summary(summary: xr.Dataset) -> None:
    """Print the computed result of `analysis.summary`."""
    from trajstore.analysis.results.summary_table import summary_tables, tokens_of

    tokens = tokens_of(summary)
    for title, columns, rows in summary_tables(summary, ".6e"):
        print_table(title, columns, rows)
    if "max_dead_grad_norm" in summary:
        largest = summary["max_dead_grad_norm"].item()
        if not tokens["dead"]:
            out.print("There are no dead tokens: every token occurs in the corpus.")
        elif largest == 0:
            out.print("Dead token gradients are EXACTLY ZERO: only weight decay can move them.")
        else:
            out.print(f"Dead token gradients are NON-ZERO, at most {largest:.6e} at any step.")
    first, last = summary["when_step"].values.tolist()
    if "logits" in summary:
        names = summary["logit_statistic"].values
        values = (
            f"{name} {value:.4f}"
            for name, value in zip(names, summary["logits"].values, strict=True)
        )
        out.print(f"Logits at step {first}: {', '.join(values)}")
    if "loss" in summary:
        before, after = summary["loss"].values
        begin = f"{before:.4f} at step {first}, " if first != last else ""
        out.print(f"Loss: {begin}{after:.4f} at step {last}")
    print_notes(without_tokens({n: tokens[n] for n in tokens if n not in ("dead", "live", "all")}))
    if "dead" not in tokens:
        out.print("Dead tokens are not labeled; label them with trajstore annotate.")
