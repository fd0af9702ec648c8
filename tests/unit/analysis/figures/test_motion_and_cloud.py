"""Figures of motion, of the freeze and of the cloud show the numbers of the analysis."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from drawn_figures import drawn, labels_of, notes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import StepPatch

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, RunStyle, collect, draw_sheet
from trajstore.analysis.figures.axes_marks import central_range
from trajstore.analysis.figures.cloud import _thinned
from trajstore.analysis.figures.motion import _lags, log_histogram
from trajstore.analysis.figures.style import (
    CAUSE_COLORS,
    POPULATION_COLORS,
    REGIME_COLORS,
    REGIME_MEANINGS,
)
from trajstore.analysis.scan.scan import Scan


def check_lines(ax, *expected):
    """The first lines show these numbers."""
    for line, values in zip(ax.lines[: len(expected)], expected, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values)


def second(ax):
    """The other axes of its figure: a second scale, or a color bar."""
    (other,) = (each for each in ax.figure.axes if each is not ax)
    return other


@pytest.mark.parametrize("name", ["displacement", "speed"])
def test_means_and_quantiles(name, run):
    quantity = getattr(analysis, name)(run)
    expected = analysis.by_population(quantity, (0.05, 0.95)).sel(step=run.step[1:])
    ax = drawn(name, run)
    assert ax.get_yscale() == ("linear" if name == "displacement" else "log"), "plateaus are seen"
    for line, band, population in zip(ax.lines, ax.collections, ("dead", "live"), strict=True):
        part = expected.sel(population=population)
        np.testing.assert_array_equal(line.get_xdata(), expected.step)
        np.testing.assert_array_equal(line.get_ydata(), part["mean"])
        assert line.get_color() == POPULATION_COLORS[population]
        assert population in line.get_label()
        heights = band.get_paths()[0].vertices[:, 1]
        assert np.isin(part.quantiles.values[np.isfinite(part.quantiles.values)], heights).all()
    for ax in (drawn(name, run, population="all"), drawn(name, run.drop_vars("is_dead"))):
        np.testing.assert_array_equal(
            ax.lines[0].get_ydata(), expected["mean"].sel(population="all")
        )


def test_each_run_has_a_color_and_each_population_a_line(run):
    ax = drawn("speed", run, other=run.isel(step=slice(0, 9)))
    lines = ax.lines[:4]
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    first, _, other, _ = colors = [line.get_color() for line in lines]
    assert colors == [first, first, other, other]
    assert first != other
    np.testing.assert_array_equal(lines[2].get_ydata(), lines[0].get_ydata()[:8])
    assert not ax.collections, "bands of several runs would hide each other"


def test_zeros_on_a_logarithmic_axis_are_counted(run):
    still = run.assign(W=run.W.where(run.step < 12, run.W.isel(step=11)))
    found = analysis.by_population(analysis.speed(still), (0.05,)).sel(population="dead").compute()
    low, mean = (int((found[name] == 0).sum()) for name in ("quantiles", "mean"))
    assert low >= mean >= 11
    noted = notes(drawn("speed", still))
    assert f"5 % quantile of dead tokens at {low} of 22 steps" in noted
    assert f"mean of dead tokens at {mean} of 22 steps" in noted


def test_discontinuities(run):
    W = run.W.where(run.step < 12, run.W + 5)
    run = run.assign(W=W.drop_attrs().chunk(step=6))
    expected = analysis.discontinuities(run).compute()
    ax = drawn("discontinuities", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), expected.discontinuity_score)
    marked = expected.step[expected.discontinuity]
    np.testing.assert_array_equal(ax.lines[-1].get_xdata(), marked)
    assert f"discontinuities at step {marked[0].item()}" in notes(ax)


def test_bulk_and_thermal_speed_of_each_step(run):
    later = run.W.isel(step=11) + np.float32(2) * (run.step > 15)  # all at once, at step 16
    run = run.assign(W=run.W.where(run.step < 12, later).drop_attrs())
    expected = analysis.bulk_thermal(run).compute()
    ax = drawn("bulk_thermal", run)
    for points, population in zip(ax.collections, ("dead", "live"), strict=True):
        part = expected.sel(population=population)
        moving = (part.bulk_speed > 0) & (part.thermal_speed > 0)
        np.testing.assert_array_equal(points.get_offsets()[:, 0], part.thermal_speed[moving])
        np.testing.assert_array_equal(points.get_offsets()[:, 1], part.bulk_speed[moving])
        np.testing.assert_array_equal(points.get_array(), part.step[moving])
    rest = int(((part.bulk_speed == 0) & (part.thermal_speed == 0)).sum())
    assert rest >= 10
    counts = f"{21 - rest} shown, {rest} unchanged, 1 all moving alike of 22 steps"
    assert f"live tokens: {counts}" in labels_of(ax)


def test_lags_up_to_half_of_the_rows_or_as_many_as_may_be_held(run):
    run = run.assign_coords(step=run.step * 10)
    expected = analysis.autocorrelation(run, range(1, 12)).autocorrelation
    ax = drawn("autocorrelation", run)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), np.arange(1, 12) * 10)
    check_lines(ax, *(expected.sel(population=name) for name in ("dead", "live")))
    large = np.broadcast_to(np.float32(0), (23, 1 << 12, 1 << 11))  # 64 MiB per row of float64
    assert _lags(Scan(xr.Dataset({"W": (run.W.dims, large)}, {"step": range(23)}))) == [1, 2, 3, 4]


def test_hops(run):
    length = analysis.lattice_displacement(run, ord=1).values
    ax = drawn("lattice_displacement", run)
    for steps, members in zip(ax.patches, (run.is_dead.values, ~run.is_dead.values), strict=True):
        counts, edges, _ = steps.get_data()
        moving = length[:, members][length[:, members] > 0]
        np.testing.assert_array_equal(counts, np.histogram(moving, edges)[0])
        assert counts.sum() == moving.size
        share = f"{1 - moving.size / length[:, members].size:.1%}"
        assert f"unchanged in {share}" in steps.get_label()


def test_speeds_are_counted_at_each_step_or_at_a_few_together(run, make_run):
    pace = analysis.speed(run).values
    ax = drawn("speed_density", run)
    np.testing.assert_array_equal(ax.collections[0].get_array().filled(0).sum(0), (pace > 0).sum(1))
    assert f"unchanged, not shown: {(pace == 0).mean():.1%}" in notes(ax)
    moves = np.random.default_rng(0).random(2005) < 0.5  # more steps than columns
    W = np.append(0, moves.cumsum()).astype("f4").reshape(-1, 1, 1)
    (mesh,) = drawn("speed_density", make_run(W, native="float32")).collections
    pooled = np.append(moves, [0, 0]).reshape(-1, 3).sum(1)
    np.testing.assert_array_equal(mesh.get_array().filled(0).sum(0), pooled)
    np.testing.assert_array_equal(mesh.get_coordinates()[0, :-1, 0], range(1, 2006, 3))


def test_outliers_are_beyond_the_axis_and_counted():
    edges = np.logspace(0, 6, 7)
    assert central_range(edges, np.array([0, 1, 5000, 5000, 0, 1])) == (100, 10_000)
    assert central_range(edges, np.array([0, 20, 5000, 5000, 0, 1])) == (10, 10_000)


def test_every_token_is_counted_once():
    rng = np.random.default_rng(0)
    data = 10 ** rng.uniform(-4, 4, (5, 40))
    data[0, :6] = [0, np.nan, np.inf, -1, 1.0, 0.1]
    dead = np.arange(40) % 3 == 0
    lengths = xr.DataArray(data, {"is_dead": ("token", dead)}, ("step", "token"), "length")
    found = log_histogram(lengths.chunk(step=2, token=7), -3, 3, 2).compute()
    edges = np.append(found.lower, found.upper[-1])
    np.testing.assert_allclose(edges, np.logspace(-3, 3, 13))
    for population, members in {"dead": dead, "live": ~dead, "all": slice(None)}.items():
        part, numbers = found.sel(population=population), data[:, members]
        # The last class of NumPy's takes its upper edge as well, and nothing lies on it.
        counts = [np.histogram(row[np.isfinite(row)], edges)[0] for row in numbers]
        np.testing.assert_array_equal(part["count"], counts)
        np.testing.assert_array_equal(part.zero, (numbers == 0).sum(1))
        np.testing.assert_array_equal(part.nan, np.isnan(numbers).sum(1))
        total = part["count"].sum("value_class") + part.zero + part.outside + part.nan
        assert (total == numbers.shape[1]).all()


def test_two_runs_from_their_first_difference_on(run):
    other = run.assign(W=run.W + (run.step >= 5) * np.float32(0.5)).isel(step=slice(0, 20))
    ax = drawn("divergence", run, other=other)
    found = analysis.divergence(run, other).compute()
    for axes, name in ((ax, "distance"), (second(ax), "differing")):
        for line, population in zip(axes.lines[:2], ("dead", "live"), strict=True):
            expected = found[name].sel(population=population)
            np.testing.assert_array_equal(line.get_ydata()[5:], expected[5:])
            assert np.isnan(line.get_ydata()[:5]).all()
    assert "since step 5" in notes(ax)
    three = [run, run.assign(W=run.W * 2), run]
    found = collect(three, [FIGURES["divergence"]], Options(), labels=["a", "b", "c"])
    (ax,) = draw_sheet(found).axes
    assert labels_of(ax)[:2] == ["b", "c"]
    assert "b: differs from run" in notes(ax)
    assert "c: never differs" in notes(ax)


@pytest.mark.parametrize("lattice", ["native", "float16"])
def test_freeze(lattice, run):
    expected = analysis.freeze(run, 4, lattice).compute()
    ax = drawn("freeze", run, lattice=lattice, min_unchanged=4)
    for population, lines in (("dead", ax.lines), ("live", ax.lines[2:])):
        part = expected.sel(population=population)
        early = part.frozen_fraction.where(part.step <= 19)
        np.testing.assert_array_equal(lines[0].get_ydata(), early)
        np.testing.assert_array_equal(lines[1].get_ydata(), part.unchanged_fraction)
        share = f"{part.frozen_fraction[-1].item():.0%}"  # all that the run knows
        assert lines[0].get_label() == f"{population} tokens: frozen ({share} at step 19)"


@pytest.mark.parametrize("kind", ["freeze", "last_motion", "lifecycle"])
def test_the_steps_that_the_end_decides_are_shaded(kind, run):
    later = kind == "freeze"  # a token is frozen after its last motion
    for options, expected in (
        ({}, [(17 + later, 22)]),
        ({"steps": "4:17"}, []),
        ({"steps": "4:20"}, [(17 + later, 19)]),
        ({"steps": "4:20", "within": True}, [(14 + later, 19)]),
    ):
        ax = drawn(kind, run, min_unchanged=5, **options)
        legend = zip(*ax.get_legend_handles_labels(), strict=True)
        shaded = [part for part, label in legend if label.startswith("last 5 steps: ")]
        ends = [(part.get_x(), part.get_x() + part.get_width()) for part in shaded]
        assert ends == expected
    assert ax.get_xlabel().endswith(" (computed from steps 4 to 19 alone)")


def test_a_window_shows_what_the_whole_run_gives(run):
    expected = analysis.freeze(run, 3).frozen_fraction.sel(step=slice(8, 14), population="live")
    line = drawn("freeze", run, steps="8:15", min_unchanged=3).lines[2]
    np.testing.assert_array_equal(line.get_xydata().T, [expected.step, expected])
    last = analysis.freeze(run).last_motion.values
    before, after = ((last >= 0) & (last < 8)).sum(), (last > 14).sum()
    noted = notes(drawn("last_motion", run, steps="8:15"))
    assert f"{before} tokens moved last before these steps, {after} after" in noted


def test_last_motion(run):
    last = analysis.freeze(run).last_motion.values
    ax = drawn("last_motion", run, min_unchanged=4)
    dead = run.is_dead.values
    bars = [container.patches for container in ax.containers]
    for label, members, shown in zip(("dead", "live"), (dead, ~dead), bars, strict=True):
        counts, _ = np.histogram(last[members][last[members] >= 0], np.arange(24))
        np.testing.assert_array_equal([bar.get_height() for bar in shown], counts)
        never, end = (last[members] < 0).sum(), (last[members] > 18).sum()
        (text,) = (text for text in labels_of(ax) if label in text)
        assert f"({members.sum()}): {never} never moved, {end} moved in the last 4 steps" in text
    assert bars[0][5].get_x() + bars[0][5].get_width() == bars[1][5].get_x(), "no overlap"
    still = run.assign(W=run.W.where(run.step < 12, run.W.isel(step=11)).chunk(step=6))
    ax = drawn("last_motion", run, other=still)
    highest = max(p.get_data().values.max() for p in ax.patches if isinstance(p, StepPatch))
    assert ax.get_ylim()[1] >= highest
    moving = np.ones(run.W.shape, np.float32) * np.arange(23)[:, None, None]
    ax = drawn("last_motion", run.assign(W=(run.W.dims, moving)), steps="0:9")
    assert "no token moved last at these steps" in [text.get_text() for text in ax.texts]


def test_lifecycle_and_centroid(run):
    expected = analysis.lifecycle(run).compute()
    lines = iter(drawn("lifecycle", run).lines)
    for members in (run.is_dead.values, ~run.is_dead.values):
        for name in ("last_jump", "last_local", "last_hop"):
            line = next(lines)
            steps = np.sort(np.maximum(expected[name].values[members], 0))
            np.testing.assert_array_equal(np.unique(line.get_xdata()), np.unique(steps))
            assert line.get_ydata().max() == 1
    parts = [analysis.centroid(run).sel(population=name) for name in ("dead", "live")]
    facts = ("centroid_norm", "mean_radius")
    check_lines(drawn("centroid", run), *(part[fact] for part in parts for fact in facts))


@pytest.mark.parametrize("color", ["regime", "hop"])
def test_a_heatmap_with_a_strip_of_dead_tokens(color, run):
    ax = drawn("heatmap", run, color=color)
    expected = analysis.heatmap(run, color).update_size.values.T
    np.testing.assert_array_equal(np.ma.filled(ax.collections[0].get_array(), 0), expected)
    assert ("blank: unchanged" in notes(ax)) == (color == "hop")
    order = np.argsort(analysis.freeze(run).last_motion.values, kind="stable")
    (strip,) = ax.child_axes
    np.testing.assert_array_equal(strip.collections[0].get_array()[:, 0], run.is_dead.values[order])
    assert not drawn("heatmap", run.drop_vars("is_dead")).child_axes
    pooled = analysis.heatmap(run, most_steps=4, most_groups=3).compute()
    ax, look = Canvas().subplots(), RunStyle()
    FIGURES["heatmap"].draw(ax, pooled, look)
    assert "of up to 4 tokens × up to 6 steps per cell; strip: mixed colors" in look.notes[0]
    assert ax.get_ylim() == (0, 11)


def test_regimes(run):
    counts = analysis.regimes(run).counts.sel(population="all").compute()
    there = [name for name in analysis.REGIMES if counts.sel(regime_name=name).any()]
    ax = drawn("regimes", run)
    labels = [layer.get_label() for layer in ax.collections]
    assert [label.partition(":")[0] for label in labels] == there
    assert REGIME_MEANINGS.keys() == REGIME_COLORS.keys() == {*analysis.REGIMES}
    expected = counts.sel(regime_name=there).values.T.cumsum(0)
    for layer, tops in zip(ax.collections, expected, strict=True):
        x, y = layer.get_paths()[0].vertices.T
        assert (np.array([y[x == step].max() for step in counts.step.values]) >= tops).all()
    assert y.max() == tops.min() == 11
    assert ax.get_ylim() == (0, 11)


def test_causes_of_a_population(run):
    cause = analysis.freeze_cause(run).sel(token=run.token[~run.is_dead.values]).values
    ax = drawn("freeze_cause", run, population="live")
    present = [name for at, name in enumerate(analysis.CAUSES) if (cause == at).any()]
    labels = [layer.get_label() for layer in ax.collections]
    assert labels == [name.replace("_", " ") for name in present]
    assert set(CAUSE_COLORS) == set(analysis.CAUSES)
    assert ax.get_ylim() == (0, cause.shape[1])
    (rate,) = second(ax).lines
    np.testing.assert_array_equal(rate.get_ydata(), run.lr[1:])


@pytest.mark.parametrize("population", [None, "live"])
def test_spectra_and_their_ranks(population, run):
    ax = drawn("spectrum", run, population=population)
    lines = iter(ax.lines)
    for name in ("dead", "live") if population is None else (population,):
        for basis, rows in (("all", "all steps"), ("last", "last step")):
            expected = analysis.pca(run, name, 1, basis).compute()
            line = next(lines)
            np.testing.assert_array_equal(line.get_xdata(), range(1, 7))
            shown = line.get_ydata()
            there = np.isfinite(shown)
            np.testing.assert_array_equal(shown[there], expected.spectrum[there])
            assert (expected.spectrum[~there] <= 1e-14 * expected.spectrum.max()).all()
            rank = expected.effective_rank.item()
            assert line.get_label() == f"{name} tokens: {rows}, effective rank {rank:.3g}"
    assert not list(lines)


def test_clusters(run):
    W = run.W.where(run.step < 9, 1.5)  # all are one vector from there on
    run = run.assign(W=W.drop_attrs().chunk(step=6)).assign_coords(rare=run.token > 6)
    expected = analysis.clusters(run).compute()
    for population, names in ((None, ("dead", "live")), ("rare", ("rare",))):
        parts = [expected.sel(population=name) for name in names]
        several = [part.groups + part.singles for part in parts]
        largest = [part.group_sizes[:, 0].where(part.step >= 9, 1) for part in parts]
        lines = [line for pair in zip(several, largest, strict=True) for line in pair]
        check_lines(drawn("clusters", run, population=population), *lines)


@pytest.mark.parametrize("plane", ["principal", "hidden_mean"])
def test_trajectory_draws_the_scores_with_start_and_end(plane, run):
    rng = np.random.default_rng(1)
    run = run.assign(hidden_mean=(("step", "hidden"), rng.normal(size=(23, 6))))
    first = None if plane == "principal" else plane
    found = analysis.pca(run, components=2, first=first).compute()
    ax = drawn("trajectory", run, plane=plane)
    dead = run.is_dead.values
    for paths, members in zip(ax.collections, (~dead, dead), strict=True):
        shown = np.stack([path.vertices for path in paths.get_paths()], 1)
        np.testing.assert_allclose(shown, found.scores.values[:, members])
    for line, row in zip(ax.lines[1:3], (0, -1), strict=True):
        np.testing.assert_allclose(line.get_xydata(), found.scores.values[row, ~dead])
    share = (found.spectrum[0] / found.spectrum.sum()).item()
    assert f"{share:.1%} of the variance" in ax.get_xlabel()


def test_cells_count_all_of_many_tokens(make_run):
    W = np.random.default_rng(0).normal(size=(3, 501, 2)).astype("f4")
    run = make_run(W, native="float32", is_dead=np.arange(501) < 200)
    ax = drawn("trajectory", run)
    assert [mesh.get_array().sum() for mesh in ax.collections] == [301 * 3, 200 * 3]
    assert "number of tokens × steps in a cell" in ax.get_legend().get_title().get_text()


def test_the_note_counts_omitted_steps(run):
    many = xr.Dataset({"position": (("step", "token"), np.broadcast_to(0, (80, 1 << 20)))})
    thinned = _thinned(many.assign_coords(step=range(80)))
    assert thinned.step.values.tolist() == list(range(0, 80, 3))
    (data,) = collect([run], [FIGURES["sky"]], Options()).data["sky"]
    ax, look = Canvas().add_subplot(projection="mollweide"), RunStyle()
    FIGURES["sky"].draw(ax, data.assign_attrs(every=3), look)
    assert look.notes[-1] == "1 of every 3 steps"


def test_the_outermost_token_of_each_part_is_named(run):
    texts = ["a", "$x$", " ", "\n", "é", "f", "g", "h", "i", "j", "k"]
    run = run.assign_coords(token_text=("token", texts))
    place = np.zeros((23, 11, 6), np.float32)
    place[:, 6:, 0] = np.arange(23)[:, None] * 0.1  # five go to one place, along one axis
    place[:, :6] = np.arange(6)[:, None] * 3 + place[:, 6:7] * np.arange(6)[:, None]
    ax = drawn("trajectory", run.assign(W=(run.W.dims, place)))
    written = {text.get_text() for text in ax.texts}
    assert written == {"a", "$x$", "' '", "'\\n'", "'\\xe9'", "f", "g +4"}


def test_names_cover_no_marks_and_no_names(run):
    run = run.assign_coords(token_text=("token", [f"long name {at}" for at in range(11)]))
    place = np.zeros((23, 11, 6), np.float32)
    place[:, :, 0] = np.arange(11)
    place[:, :, 1] = np.arange(11) % 3 * np.linspace(1, 2, 23)[:, None]
    canvas = Canvas(layout="constrained")
    ax = FIGURES["trajectory"](run.assign(W=(run.W.dims, place)), canvas.subplots())
    canvas.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) > 5
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])
    marks = ax.transData.transform(np.vstack([line.get_xydata() for line in ax.lines]))
    assert not any(box.contains(*mark) for box in boxes for mark in marks)
