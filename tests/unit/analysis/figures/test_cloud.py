"""Figures of the cloud show the numbers of `centroid`, `pca` and `clusters`."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, RunStyle, collect
from trajstore.analysis.figures.cloud import _thinned


def drawn(name, ds, **options):
    return FIGURES[name](ds, Canvas().subplots(), **options)


def test_centroid(run):
    expected = analysis.centroid(run)
    lines = iter(drawn("centroid", run).lines)
    for population in ("dead", "live"):
        part = expected.sel(population=population)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.centroid_norm)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.mean_radius)


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
    expected = analysis.clusters(run)
    for population, names in ((None, ("dead", "live")), ("rare", ("rare",))):
        lines = iter(drawn("clusters", run, population=population).lines)
        for name in names:
            part = expected.sel(population=name)
            np.testing.assert_array_equal(next(lines).get_ydata(), part.groups + part.singles)
            largest = next(lines).get_ydata()
            assert (largest[:9] == 1).all()
            np.testing.assert_array_equal(largest[9:], part.group_sizes[9:, 0])


@pytest.mark.parametrize("plane", ["principal", "hidden_mean"])
def test_trajectory_draws_the_scores_with_start_and_end(plane, run):
    rng = np.random.default_rng(1)
    run = run.assign(hidden_mean=(("step", "hidden"), rng.normal(size=(23, 6))))
    first = None if plane == "principal" else plane
    found = analysis.pca(run, components=2, first=first).compute()
    ax = drawn("trajectory", run, plane=plane)
    for paths, members in zip(
        ax.collections, (~run.is_dead.values, run.is_dead.values), strict=True
    ):
        shown = np.stack([path.vertices for path in paths.get_paths()], 1)
        np.testing.assert_allclose(shown, found.scores.values[:, members])
    start, end = ax.lines[1:3]
    live = found.scores.values[:, ~run.is_dead.values]
    np.testing.assert_allclose(start.get_xydata(), live[0])
    np.testing.assert_allclose(end.get_xydata(), live[-1])
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
