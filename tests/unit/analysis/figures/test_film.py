"""What each frame of a film shows, and the files of a film."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import rc_context
from PIL import Image

import trajstore.analysis.figures  # noqa: F401
from trajstore import analysis
from trajstore.analysis.figures.film import _chosen_rows, film, save_film
from trajstore.errors import InvalidArgument, RunExists


def made(run, **options):
    """A film that may be deleted without being shown."""
    animation = film(run, **options)
    animation._draw_was_started = True
    return animation


def texts_of(animation, frame):
    """Step, number of frozen tokens and cursor of a frame."""
    animation._draw_frame(frame)
    plane, below = animation._fig.axes
    frozen = animation._fig.legends[0].get_texts()[-1].get_text()
    return plane.texts[0].get_text(), frozen, np.unique(below.lines[1].get_xdata()).tolist()


def test_each_frame_shows_its_row(run):
    position = analysis.pca(run, components=2).scores.values
    since = analysis.freeze(run, min_unchanged=3).frozen_since.values
    dead = run.is_dead.values
    animation = made(run, min_unchanged=3)
    assert animation._save_count == 23
    plane, below = animation._fig.axes
    for row in (0, 12, 22):
        still = (since >= 0) & (since <= row)
        counts = f"frozen ({(dead & still).sum()} dead, {(~dead & still).sum()} live)"
        assert texts_of(animation, row) == (f"step {row}", counts, [row])
        groups = (dead & ~still, dead & still, ~dead & ~still, ~dead & still)
        for dots, members in zip(plane.lines, groups, strict=False):
            np.testing.assert_array_equal(dots.get_xydata(), position[row, members])
        for lines, members in zip(plane.collections, groups[::2], strict=True):
            tails = np.array(lines.get_segments())
            expected = position[max(0, row - 6) : row + 1, members].transpose(1, 0, 2)
            np.testing.assert_array_equal(tails, expected)
    assert still.any()
    np.testing.assert_allclose(np.diff(plane.get_xlim()), 1.1 * np.ptp(position[..., 0]))
    np.testing.assert_array_equal(below.lines[0].get_ydata(), run.loss.values)
    dead, frozen_dead, live, frozen_live, _ = plane.lines
    fronts = [line.zorder for line in (frozen_live, frozen_dead, live, dead)]
    assert fronts == sorted(fronts)
    assert live.get_color() == frozen_live.get_markeredgecolor() != dead.get_color()


def test_frames_are_chosen_by_motion_or_evenly():
    position = np.zeros((101, 2, 2), np.float32)
    position[1:11, :, 0] = np.arange(1, 11)[:, None]  # at first fast, then slow
    position[11:, :, 0] = 10 + np.arange(90)[:, None] / 90
    assert _chosen_rows(position, 12, False).tolist() == [*range(11), 100]
    assert _chosen_rows(position, 5, True).tolist() == [0, 25, 50, 75, 100]
    assert _chosen_rows(position * np.nan, 5, False).tolist() == [0, 100]
    assert _chosen_rows(position, 200, False).tolist() == [*range(101)]


def test_windows_and_populations(run):
    animation = made(run, frames="even:4", steps="5:15", population="live", style="dark")
    texts = [texts_of(animation, frame) for frame in range(4)]
    assert texts == [(f"step {step}", "frozen (0)", [step]) for step in (5, 8, 11, 14)]
    assert animation._fig.get_facecolor()[:3] == (0, 0, 0)
    np.testing.assert_array_equal(
        animation._fig.axes[1].lines[0].get_ydata(), run.loss.values[5:15]
    )
    within = made(run, steps="5:15", within=True)._fig.axes[0].get_title("left")
    assert "computed from steps 5 to 14 alone" in " ".join(within.split())


def test_runs_without_loss_or_with_many_tokens(make_run):
    W = np.random.default_rng(0).normal(size=(3, 501, 2)).astype("f4")
    animation = made(make_run(W, native="float32", is_dead=np.arange(501) < 200))
    animation._draw_frame(2)
    (plane,) = animation._fig.axes
    assert [lines.get_segments() for lines in plane.collections] == [[], []]


def test_moving_pictures_frames_and_a_player(run, tmp_path):
    animation = made(run, frames="even:2", size=(2, 2))
    reports, path = [], tmp_path / "film.gif"
    path.write_text("mine")
    with pytest.raises(RunExists, match="already exists; choose another path, or replace it"):
        save_film(animation, path)
    assert path.read_text() == "mine"
    for ending in ("gif", "webp"):
        path = tmp_path / f"film.{ending}"
        save_film(animation, path, overwrite=True, report=lambda *of: reports.append(of))
        with Image.open(path) as picture:
            assert (picture.format.lower(), picture.n_frames) == (ending, 2)
            assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
            assert picture.size == (220, 220)
    assert reports == [(0, 2), (1, 2)] * 2
    folder, still = tmp_path / "frames", tmp_path / "film.png"
    save_film(animation, folder)
    save_film(animation, still)
    first, second, last = (
        np.asarray(Image.open(path)) for path in (*sorted(folder.iterdir()), still)
    )
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(second, last)
    with pytest.raises(RunExists, match="is a folder; choose another path"):
        save_film(animation, folder, overwrite=True)
    assert len([*tmp_path.iterdir()]) == 4, "nothing else is left"


@pytest.mark.nightly
def test_a_notebook_shows_a_player(run):
    assert "<script" in made(run, frames="even:2", size=(2, 2))._repr_html_()


def test_wrong_options_and_outputs_write_no_film(run, tmp_path):
    for ds, options, message in (
        (run, {"frames": 1}, "got frames=1, expected a number from 2 to 1,000, or even:NUMBER"),
        (run, {"frames": "odd:5"}, "got frames='odd:5'"),
        (run, {"steps": "3"}, "film needs at least 2 rows, and the window has 1"),
        (run, {"lattice": "bfloat16"}, "film has no lattice"),
        (run, {"speed": 2}, "got 'speed'"),
        (run.expand_dims(run=2), {}, "film shows one run, got 2; choose one"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            film(ds, **options)
    with rc_context({"animation.ffmpeg_path": "not installed"}):
        for name, message in (
            ("film.avi", r"extensions \.gif, .* or a folder without"),
            ("film.mp4", r"ffmpeg, .* or write \.gif or \.webp"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                save_film(None, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
