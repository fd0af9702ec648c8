"""Summaries of several runs as one table, one line per run."""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr

__all__ = ["summary_table"]


def summary_table(found: Mapping[str, xr.Dataset]) -> tuple[str, list[str], list[list[str]]]:
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
        str(name)
        for facts in found.values()
        for name, number in zip(
            facts["population"].values, facts["population_tokens"].values, strict=True
        )
        if number
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
