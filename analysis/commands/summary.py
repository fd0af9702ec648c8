"""The command `summary`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.errors import sentences
from trajstore.cli.options import JSON, LATTICE, POPULATIONS, RUNS, given_populations
from trajstore.cli.tables import out, print_json, print_notes, print_table, table, without_tokens

if TYPE_CHECKING:
    import xarray as xr

    from trajstore.cli.tables import PlainTable


__all__ = ["summary"]


@click.command()
@RUNS
@LATTICE
@POPULATIONS
@JSON
@sentences
def summary(
    runs: tuple[str, ...], lattice: str, populations: tuple[str, ...], as_json: bool
) -> None:
    """Print gradients, displacement, centroid, logits and loss at the first and last step.

    For several runs or the folder of a sweep, prints one table with a line per run, or a list with
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
    from trajstore.store.reading.open_run import open_run
    from trajstore.store.reading.run_paths import run_paths
    from trajstore.store.reading.run_settings import run_labels

    given = given_populations(populations)
    paths = run_paths(runs)
    opened = [analysis.with_populations(open_run(path), given) for path in paths]
    found = [analysis.summary(ds, lattice).compute() for ds in opened]
    if as_json:
        listed = [_json_facts(facts) for facts in found]
        if len(paths) > 1:
            print_json([{"run": path, **facts} for path, facts in zip(paths, listed, strict=True)])
        else:
            print_json(listed[0])
        return
    if lattice != "native":
        out.print(f"W is rounded to {lattice}.")
    if len(paths) == 1:
        print_summary(found[0])
        return
    labels = run_labels([ds.attrs for ds in opened], paths)
    title, columns, rows = summary_table(dict(zip(labels, found, strict=True)))
    printed = table(title, *columns)
    printed.columns[0].no_wrap = False
    for row in rows:
        printed.add_row(*row)
    print_table(printed)


def _json_facts(facts: xr.Dataset) -> dict[str, dict[str, Any]]:
    return {
        str(name): {"dims": list(da.dims), "values": da.values.tolist()}
        for name, da in facts.variables.items()
    }


def _lost_table(lost: xr.DataArray, steps: list[str]) -> PlainTable:
    printed = table(
        "Lost updates: fraction of elements with a gradient that the step did not change",
        "parameter",
        *(f"step {step}" for step in steps),
    )
    for name in lost["parameter"].values:
        values = lost.sel(parameter=name).values.tolist()
        printed.add_row(str(name), *("" if math.isnan(v) else f"{v:.2%}" for v in values))
    return printed


def print_summary(summary: xr.Dataset) -> None:
    """Print the result of `analysis.summary`.

    Parameters
    ----------
    summary : Dataset
        A computed result.
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
        shown = [name for name in tokens if name != "all" and tokens[name]] or ["all"]
        for population in shown:
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
            out.print("There are no dead tokens: every token occurs in the corpus.")
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
    if "param_update_lost" in summary:
        print_table(_lost_table(summary["param_update_lost"], list(map(str, steps.values()))))
    print_notes(without_tokens({n: tokens[n] for n in tokens if n not in ("dead", "live", "all")}))
    if "dead" not in tokens:
        out.print("Dead tokens are not labeled; label them with trajstore annotate.")
