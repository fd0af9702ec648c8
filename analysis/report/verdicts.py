"""Sentences about the tokens of a run, with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.norms import grad_norms
from trajstore.analysis.motion.resume_discontinuities import discontinuities
from trajstore.analysis.optimizer.freeze_causes import CAUSES, freeze_cause
from trajstore.analysis.scan.input_checks import available
from trajstore.analysis.scan.population_statistics import count_by_population
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import populations


def evidence(scan: Scan, min_unchanged: int) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    """Lazy data for the sentences, and the reason for what is not available, by name."""
    questions: dict[str, Callable[[Scan], xr.Dataset]] = {
        "gradients": _gradients,
        "freezing": partial(_freezing, min_unchanged=min_unchanged),
        "causes": _causes,
        "discontinuities": lambda scan: discontinuities(scan)[["discontinuity"]],
    }

    def answer(name: str) -> xr.Dataset:
        scan.require_rows(2, name)
        return questions[name](scan)

    return available({name: partial(answer, name) for name in questions})


def _gradients(scan: Scan) -> xr.Dataset:
    norms = grad_norms(scan).isel(step=slice(1, None))
    counts = count_by_population((norms == 0).astype(np.int8), 2, "zero")
    return xr.Dataset({"counts": counts.sum("step")})


def _freezing(scan: Scan, min_unchanged: int) -> xr.Dataset:
    names, groups = populations(scan.ds)
    facts = freeze(scan, min_unchanged)[["last_motion", "frozen_since", "moves"]]
    return facts.assign(member=(("population", "token"), groups)).assign_coords(population=names)


def _causes(scan: Scan) -> xr.Dataset:
    counts = count_by_population(freeze_cause(scan), len(CAUSES), "cause")
    return xr.Dataset({"counts": counts.sum("step").assign_coords(cause=list(CAUSES))})


def verdicts(found: dict[str, xr.Dataset], population: str, min_unchanged: int) -> list[str]:
    """Write the sentences about one population.

    Parameters
    ----------
    found : dict
        Computed `evidence`.
    population : str
        Name of a population with tokens.
    min_unchanged : int
        As for `evidence`.
    """
    sentences: list[str] = []
    if "gradients" in found:
        sentences.append(_of_gradients(found["gradients"]["counts"].sel(population=population)))
    if "freezing" in found:
        sentences.append(_of_freezing(found["freezing"], population, min_unchanged))
    if "causes" in found:
        sentences.append(_of_causes(found["causes"]["counts"].sel(population=population)))
    return [sentence for sentence in sentences if sentence]


def _of_gradients(counts: xr.DataArray) -> str:
    other, zero = (int(number) for number in counts.values)
    if not zero:
        return f"No gradient was zero, of {other:,} gradients (tokens × steps)."
    share = zero / (zero + other)
    return f"{share:.1%} of the gradients were exactly zero: {zero:,} of {zero + other:,}."


def _of_freezing(freezing: xr.Dataset, population: str, min_unchanged: int) -> str:
    member = freezing["member"].sel(population=population).values
    since, last = freezing["frozen_since"].values[member], freezing["last_motion"].values[member]
    frozen = since >= 0
    unchanged = f"unchanged for the last {min_unchanged:,} step{'s' * (min_unchanged > 1)} or more"
    if not frozen.any():
        return f"No token was frozen ({unchanged})."
    if frozen.all():
        first, final = int(since.min()), int(since.max())
        when = f"by step {final:,}" if first < final else f"at step {final:,}"
        return f"All tokens were frozen {when} ({unchanged})" + (
            f"; the first at step {first:,}." if first < final else "."
        )
    never = int((last < 0).sum())
    return (
        f"{int(frozen.sum()):,} of {frozen.size:,} were frozen, {frozen.mean():.1%} ({unchanged}); "
        f"the first at step {int(since[frozen].min()):,}"
        + (f"; {never:,} never changed." if never else ".")
    )


def _of_causes(counts: xr.DataArray) -> str:
    unchanged = counts.drop_sel(cause="moved")
    total = int(unchanged.sum())
    if not total:
        return "Every token changed at every step."
    parts = [
        f"{int(number) / total:.1%} {str(cause).replace('_', ' ')}"
        for cause, number in zip(unchanged["cause"].values, unchanged.values, strict=True)
        if number
    ]
    return f"Causes of {total:,} steps without change (tokens × steps): {', '.join(parts)}."


def discontinuity_verdict(found: dict[str, xr.Dataset]) -> str:
    """Sentence about discontinuities of the motion."""
    if "discontinuities" not in found:
        return ""
    found_at = found["discontinuities"]["discontinuity"]
    steps = found_at["step"].values[found_at.values]
    if not steps.size:
        return "No discontinuity was found."
    shown = ", ".join(f"{step:,}" for step in steps[:10])
    return (
        f"The speed changes abruptly at {steps.size} steps (discontinuities): {shown}"
        f"{', …' if steps.size > 10 else ''}."
    )


def latest(freezing: xr.Dataset, ds: xr.Dataset, most: int) -> list[dict[str, Any]]:
    """Tokens in the order of their last change, the latest first."""
    last = freezing["last_motion"].values
    order = np.argsort(-last, kind="stable")[:most]
    texts = ds["token_text"].values if "token_text" in ds else None
    dead = ds["is_dead"].values if "is_dead" in ds else None
    count = ds["token_count"].values if "token_count" in ds else None
    return [
        {
            "id": int(ds["token"].values[at]),
            "text": "" if texts is None else str(texts[at]),
            "kind": "" if dead is None else ("dead" if dead[at] else "live"),
            "count": "" if count is None or count[at] < 0 else f"{int(count[at]):,}",
            "last": "never" if last[at] < 0 else f"{int(last[at]):,}",
            "moves": f"{int(freezing['moves'].values[at]):,}",
        }
        for at in order
    ]
