"""One number a step: loss, prediction, centre of the tokens, seams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    along_steps,
    note,
    population_curves,
    spread_note,
    with_legend,
)
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import POPULATION_COLOURS
from trajstore.analysis.model.logit_statistics import build_logit_stats
from trajstore.analysis.motion.collective import build_centroid
from trajstore.analysis.motion.resume_seams import build_seams
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["centroid", "logits", "loss", "seams"]


def _loss(history: Scan, options: Options) -> xr.Dataset:
    input_checks.variables(history.ds, "loss")
    return history.ds[["loss"]]


def _draw_loss(ax: Axes, data: xr.Dataset, look: Look) -> None:
    steps, values = data["step"].values, data["loss"].values
    colour = look.style.second if look.second else look.style.ink
    if look.spread is not None:
        spread = look.spread["loss"].values
        ax.fill_between(
            steps, values - spread, values + spread, color=colour, alpha=look.band, lw=0
        )
        spread_note(ax, look)
    ax.plot(steps, values, look.line, color=colour, lw=0.9, label=look.label("loss"))
    along_steps(ax, "training loss", data["loss"].attrs.get("units"))
    last = np.flatnonzero(np.isfinite(values))
    if not look.run and look.spread is None and last.size:
        note(
            ax,
            f"{values[last[0]]:.3f} at step {steps[last[0]]}, "
            f"{values[last[-1]]:.3f} at step {steps[last[-1]]}",
        )
    if look.run:
        with_legend(ax)


def _logits(history: Scan, options: Options) -> xr.Dataset:
    whole = (history.ds.attrs.get("recording") or {}).get("vocabulary")
    here = history.ds.sizes["token"]
    if "logits" in history.ds and whole is not None and here != whole:
        raise InvalidArgument(
            f"the softmax is over all {whole:,} tokens of the vocabulary, and {here:,} are here; "
            "ask about all tokens"
        )
    return build_logit_stats(history).isel(step=slice(1, None))


def _draw_logits(ax: Axes, data: xr.Dataset, look: Look) -> None:
    steps = data["step"].values
    ax.fill_between(
        steps,
        data["logit_min"].values,
        data["logit_max"].values,
        color=POPULATION_COLOURS["all"],
        alpha=0.3,
        lw=0,
        label="smallest to largest logit",
    )
    ax.plot(steps, data["entropy"].values, color=look.style.ink, label="entropy of the softmax")
    along_steps(ax, "logits, entropy", data["entropy"].attrs["units"])
    others = []
    if "dead_mass" in data:
        others.append(ax.twinx())
        colour, label = POPULATION_COLOURS["dead"], "probability of all dead tokens"
        (right,) = others
        right.plot(steps, data["dead_mass"].values, color=colour, label=label)
        right.set_ylabel(label, color=colour)
        right.set_ylim(0, 1)
        right.margins(x=0.01)
        right.tick_params(axis="y", colors=colour)
    with_legend(ax, *others)


def _centroid(history: Scan, options: Options) -> xr.Dataset:
    shown = options.populations(history)
    return build_centroid(history, shown)[["centroid_norm", "mean_radius"]]


def _draw_centroid(ax: Axes, data: xr.Dataset, look: Look) -> None:
    told = {"centroid_norm": "norm of their centre", "mean_radius": "mean distance from it"}
    population_curves(ax, data, look, told)
    along_steps(ax, "length", data["centroid_norm"].attrs["units"])
    lines = "whole: how far their centre is from 0; dotted: how far they are from it, on average"
    spread_note(ax, look, alone=lines)
    with_legend(ax)


_THRESHOLD = 8.0


def _seams(history: Scan, options: Options) -> xr.Dataset:
    return build_seams(history, threshold=_THRESHOLD)


def _draw_seams(ax: Axes, data: xr.Dataset, look: Look) -> None:
    steps, scores = data["step"].values, data["seam_score"].values
    at = np.flatnonzero(data["seam"].values)
    ax.plot(steps, scores, color=look.style.ink, lw=0.8, label="score of a step")
    for sign in (1, -1):
        label = f"±{_THRESHOLD:g}: a seam lies beyond" if sign > 0 else None
        ax.axhline(sign * _THRESHOLD, color=look.style.second, ls="--", lw=0.9, label=label)
    ax.plot(
        steps[at],
        scores[at],
        "o",
        color=POPULATION_COLOURS["dead"],
        ms=4,
        label=f"seams ({at.size})" if at.size else None,
    )
    top = max(_THRESHOLD, float(np.nanmax(abs(scores), initial=0))) * 1.15
    ax.set_ylim(-top, top)
    along_steps(ax, "robust z-score of the change of log mean speed")
    shown = ", ".join(map(str, steps[at][:12])) + (", …" if at.size > 12 else "")
    note(ax, f"seams at step {shown}" if at.size else f"no seam: no score beyond ±{_THRESHOLD:g}")
    with_legend(ax)


loss = Figure(
    name="loss",
    title="Training loss",
    collect=_loss,
    draw=_draw_loss,
    rows=1,
    overlays=True,
    averages=True,
    of_populations=False,
)

logits = Figure(
    name="logits",
    title="What the model predicts, of the logits that are recorded",
    collect=_logits,
    draw=_draw_logits,
    scales=False,
    of_populations=False,
)

centroid = Figure(
    name="centroid",
    title="Centre of the tokens, and their distance from it",
    collect=_centroid,
    draw=_draw_centroid,
    rows=1,
    reading="rows",
    overlays=True,
    averages=True,
)

seams = Figure(
    name="seams",
    title="Seams: steps at which the run does not go on as it was",
    collect=_seams,
    draw=_draw_seams,
    measures=("step_norm",),
    scales=False,
    of_populations=False,
)
