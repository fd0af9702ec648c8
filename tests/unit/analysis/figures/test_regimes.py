"""Figures of the freeze show what `freeze`, `lifecycle` and `heatmap` find."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import StepPatch

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.figures.style import CAUSE_COLORS, REGIME_COLORS, REGIME_MEANINGS


def test_freeze(run):
    for lattice in ("native", "float16"):
        expected = analysis.freeze(run, 4, lattice).compute()
        ax = FIGURES["freeze"](run, Canvas().subplots(), lattice=lattice, min_unchanged=4)
        lines = iter(ax.lines)
        for population in ("dead", "live"):
            part = expected.sel(population=population)
            frozen = next(lines)
            early = part.frozen_fraction.where(part.step <= 19)
            np.testing.assert_array_equal(frozen.get_ydata(), early)
            share = f"{part.frozen_fraction[-1].item():.0%}"  # all that the run knows
            assert frozen.get_label() == f"{population} tokens: frozen ({share} at step 19)"
            np.testing.assert_array_equal(next(lines).get_ydata(), part.unchanged_fraction)


def shaded(ax):
    """First and last shaded step, and the label of the shade."""
    handles, labels = ax.get_legend_handles_labels()
    return next(
        ((part.get_x(), part.get_x() + part.get_width(), label)
         for part, label in zip(handles, labels, strict=True) if label.startswith("last ")),
        None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["freeze", "last_motion", "lifecycle"])
def test_the_steps_that_the_end_decides_are_shaded(kind, run):
    draw, later = FIGURES[kind], kind == "freeze"  # a token is frozen after its last motion
    first, last, label = shaded(draw(run, Canvas().subplots(), min_unchanged=5))
    assert (first, last) == (17 + later, 22)
    assert label.startswith("last 5 steps: ")
    assert shaded(draw(run, Canvas().subplots(), min_unchanged=5, steps="4:17")) is None
    within = draw(run, Canvas().subplots(), min_unchanged=5, steps="4:20")
    assert shaded(within)[:2] == (17 + later, 19)
    within = draw(run, Canvas().subplots(), min_unchanged=5, steps="4:20", within=True)
    assert shaded(within)[:2] == (14 + later, 19)
    assert within.get_xlabel().endswith(" (computed from steps 4 to 19 alone)")


def test_a_window_shows_what_the_whole_run_gives(run):
    expected = analysis.freeze(run, 3).frozen_fraction.sel(step=slice(8, 14), population="live")
    ax = FIGURES["freeze"](run, Canvas().subplots(), steps="8:15", min_unchanged=3)
    line = ax.lines[2]
    np.testing.assert_array_equal(line.get_xdata(), expected.step)
    np.testing.assert_array_equal(line.get_ydata(), expected)
    last = analysis.freeze(run).last_motion.values
    ax = FIGURES["last_motion"](run, Canvas().subplots(), steps="8:15")
    before, after = ((last >= 0) & (last < 8)).sum(), (last > 14).sum()
    assert (
        f"{before} tokens moved last before these steps, {after} after"
        in ax.get_legend().get_title().get_text()
    )


def test_last_motion(run):
    last = analysis.freeze(run).last_motion.values
    ax = FIGURES["last_motion"](run, Canvas().subplots(), min_unchanged=4)
    dead = run.is_dead.values
    edges = np.arange(24)
    bars = [container.patches for container in ax.containers]
    for label, members, shown in zip(("dead", "live"), (dead, ~dead), bars, strict=True):
        counts, _ = np.histogram(last[members][last[members] >= 0], edges)
        np.testing.assert_array_equal([bar.get_height() for bar in shown], counts)
        never, end = (last[members] < 0).sum(), (last[members] > 18).sum()
        (text,) = (t.get_text() for t in ax.get_legend().get_texts() if label in t.get_text())
        assert f"({members.sum()}): {never} never moved, {end} moved in the last 4 steps" in text
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in (bars[0][5], bars[1][5])]
    assert spans == [(5, 5.5), (5.5, 6)], "overlapping bars would mix their colors"


def test_last_motion_of_several_runs_fits_the_axes(run):
    still = run.assign(W=run.W.where(run.step < 12, run.W.isel(step=11)).chunk(step=6))
    ax = FIGURES["last_motion"](run, Canvas().subplots(), other=still)
    highest = max(p.get_data().values.max() for p in ax.patches if isinstance(p, StepPatch))
    assert ax.get_ylim()[1] >= highest


def test_last_motion_without_any(run):
    moving = np.ones(run.W.shape, np.float32) * np.arange(23)[:, None, None]
    run = run.assign(W=(run.W.dims, moving))
    ax = FIGURES["last_motion"](run, Canvas().subplots(), steps="0:9")
    assert "no token moved last at these steps" in [text.get_text() for text in ax.texts]
    assert ax.get_ylim() == (0, 1)


def test_lifecycle(run):
    expected = analysis.lifecycle(run).compute()
    lines = iter(FIGURES["lifecycle"](run, Canvas().subplots()).lines)
    for members in (run.is_dead.values, ~run.is_dead.values):
        for name in ("last_jump", "last_local", "last_hop"):
            line = next(lines)
            steps = np.sort(np.maximum(expected[name].values[members], 0))
            np.testing.assert_array_equal(np.unique(line.get_xdata()), np.unique(steps))
            assert line.get_ydata().max() == 1


def test_regimes_and_hops(run):
    for color in ("regime", "hop"):
        expected = analysis.heatmap(run, color).update_size.values.T
        ax = FIGURES["heatmap"](run, Canvas().subplots(), color=color)
        (mesh,) = ax.collections
        shown = mesh.get_array()
        np.testing.assert_array_equal(np.ma.filled(shown, 0), expected)
        assert "of one token at one step" in ax.get_legend().get_title().get_text()
        assert ("blank: unchanged" in ax.get_legend().get_title().get_text()) == (color == "hop")


def test_a_strip_marks_dead_tokens(run):
    order = np.argsort(analysis.freeze(run).last_motion.values, kind="stable")
    ax = FIGURES["heatmap"](run, Canvas().subplots())
    (strip,) = ax.child_axes
    shown = strip.collections[0].get_array()
    np.testing.assert_array_equal(shown[:, 0], run.is_dead.values[order])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[0].startswith("unchanged: no element")
    assert labels[-2:] == ["strip at the right: live tokens", "strip at the right: dead tokens"]
    ax = FIGURES["heatmap"](run.drop_vars("is_dead"), Canvas().subplots())
    assert not ax.child_axes


def test_the_note_gives_the_size_of_pooled_cells(run, monkeypatch):
    pooled = analysis.heatmap(run, most_steps=4, most_groups=3)
    monkeypatch.setattr("trajstore.analysis.figures.regimes.ulp_motion.heatmap", lambda *_: pooled)
    ax = FIGURES["heatmap"](run, Canvas().subplots())
    expected = "color: the most common regime of up to 4 tokens × up to 6 steps per cell"
    assert ax.get_legend().get_title().get_text().replace("\n", " ") == (
        expected + "; strip: mixed colors where a cell holds both kinds"
    )
    assert ax.get_ylim() == (0, 11)


def heights(ax, steps):
    """Of each stack at every step, from below."""
    tops = [
        dict.fromkeys(steps, 0.0)
        | {x: max(y for at, y in layer.get_paths()[0].vertices if at == x) for x in steps}
        for layer in ax.collections
    ]
    return np.array([[top[x] for x in steps] for top in tops])


def test_regimes(run):
    counts = analysis.regimes(run).counts.sel(population="all").compute()
    there = [name for name in analysis.REGIMES if counts.sel(regime_name=name).any()]
    ax = FIGURES["regimes"](run, Canvas().subplots())
    labels = [layer.get_label() for layer in ax.collections]
    assert [label.partition(":")[0] for label in labels] == there
    assert labels[-1] == "jump: more than √D cells (L2), D elements"
    assert REGIME_MEANINGS.keys() == REGIME_COLORS.keys()
    assert set(REGIME_COLORS) == set(analysis.REGIMES)
    expected = counts.sel(regime_name=there).values.T.cumsum(0)
    assert (expected[-1] == 11).all()
    assert (heights(ax, counts.step.values) >= expected).all()
    np.testing.assert_array_equal(heights(ax, counts.step.values)[-1], 11)
    assert ax.get_ylim() == (0, 11)


def test_causes_of_a_population(run):
    cause = analysis.freeze_cause(run).sel(token=run.token[~run.is_dead.values]).values
    ax = FIGURES["freeze_cause"](run, Canvas().subplots(), population="live")
    present = [name for at, name in enumerate(analysis.CAUSES) if (cause == at).any()]
    assert [layer.get_label() for layer in ax.collections] == [
        name.replace("_", " ") for name in present
    ]
    assert set(CAUSE_COLORS) == set(analysis.CAUSES)
    assert ax.get_ylim() == (0, cause.shape[1])
    assert "live tokens (7)" in ax.get_ylabel()
    (right,) = (other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(right.lines[0].get_ydata(), run.lr[1:])
    np.testing.assert_array_equal(right.lines[0].get_xdata(), run.step[1:])
