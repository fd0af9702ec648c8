"""Summaries as tables: of one run, or of several runs, one line per run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import xarray as xr

Table = tuple[str, list[str], list[list[str]]]
"""Title, columns and rows."""

_STATISTICS = ["mean", "median", "min", "max"]


def tokens_of(facts: xr.Dataset) -> dict[str, int]:
    """Number of tokens of each population, by name."""
    names = map(str, facts["population"].values)
    return dict(zip(names, facts["population_tokens"].values.tolist(), strict=True))


def summary_tables(facts: xr.Dataset, number: str) -> Iterator[Table]:
    """Tables of the gradients, displacement, centroid and lost updates of a run.

    Parameters
    ----------
    facts : Dataset
        A computed `trajstore.analysis.summary`.
    number : str
        Format of norms, such as ``.4e``.
    """

    def statistics(name: str, **at: Any) -> list[str]:
        return [
            f"{value:{number}}" for value in facts[name].sel(statistic=_STATISTICS, **at).values
        ]

    labels = {name: f"{name} ({size:,})" for name, size in tokens_of(facts).items() if size}
    whens = zip(("first", "last"), facts["when_step"].values.tolist(), strict=True)
    of_step = {step: when for when, step in whens}  # of one trained step, only the last
    trained = {when: f"{step:,}" for step, when in of_step.items()}
    if "grad_norms" in facts:
        rows = [
            [label, step, *statistics("grad_norms", population=name, when=when)]
            for name, label in labels.items()
            for when, step in trained.items()
        ]
        yield "Gradient norms (L2)", ["tokens", "step", *_STATISTICS], rows
    first, last = (f"{step:,}" for step in facts["state_step"].values)
    rows = [[label, *statistics("displacement", population=name)] for name, label in labels.items()]
    yield f"Displacement from step {first} to {last}", ["tokens", *_STATISTICS], rows
    if "centroid_norm" in facts:  # a run of changes alone has no positions
        rows = [
            [label, *(f"{norm:.6f}" for norm in facts["centroid_norm"].sel(population=name).values)]
            for name, label in labels.items()
        ]
        yield "Norm of the centroid", ["tokens", f"step {first}", f"step {last}"], rows
    if "param_update_lost" in facts:
        lost = facts["param_update_lost"].sel(when=[*trained]).transpose("parameter", "when")
        rows = [
            [str(name), *("" if math.isnan(value) else f"{value:.2%}" for value in values)]
            for name, values in zip(lost["parameter"].values, lost.values, strict=True)
        ]
        title = "Lost updates: fraction of elements with a gradient that the step did not change"
        yield title, ["parameter", *(f"step {step}" for step in trained.values())], rows


def summary_table(found: Mapping[str, xr.Dataset]) -> Table:
    """Title, columns and rows of a table of runs.

    Parameters
    ----------
    found : mapping
        Computed `trajstore.analysis.summary` of each run, by its label.

    Returns
    -------
    title : str
    columns : list of str
        Run, last step, loss at the first and last step. Then the mean gradient norm at the last
        step and the mean displacement, for each population with tokens (dead and live, or all).
    rows : list of list of str
        Values that were not recorded are empty.
    """
    names = dict.fromkeys(
        name for facts in found.values() for name, number in tokens_of(facts).items() if number
    )
    if len(names) > 1:
        names.pop("all", None)
    kinds = {"|grad|": ("grad_norms", {"when": "last"}), "displacement": ("displacement", {})}
    columns = [f"{kind} {name}" for kind in kinds for name in names]
    rows = []
    for label, facts in found.items():
        losses = [f"{loss:.4f}" for loss in facts["loss"].values] if "loss" in facts else ["", ""]
        values = [
            facts[variable].sel({"population": name, "statistic": "mean", **at}).item()
            if variable in facts and name in facts["population"].values
            else None
            for variable, at in kinds.values()
            for name in names
        ]
        rows.append(
            [
                label,
                f"{int(facts['state_step'][-1]):,}",
                *losses,
                *("" if value is None else f"{value:.4e}" for value in values),
            ]
        )
    title = "Loss; mean gradient norm at the last step; mean displacement from the first row"
    return title, ["run", "last step", "first loss", "last loss", *columns], rows
