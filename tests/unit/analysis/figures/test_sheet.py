"""Several figures together, and files."""

from __future__ import annotations

import pytest

from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet, figures_named, save
from trajstore.errors import InvalidArgument, RunExists


def test_all_at_once_show_what_each_shows_alone(run):
    found = collect([run], figures_named(["all"]), Options())
    assert found.figures == figures_named(["all"])
    for name, (data,) in found.data.items():
        alone = collect([run], [FIGURES[name]], Options()).data[name][0]
        assert alone.identical(data), name


def test_figures_without_their_variables_are_left_out_with_a_reason(run):
    run = run.drop_vars(["grad", "exp_avg"])
    found = collect([run], figures_named(["all"]), Options(), leave_out=True)
    moments = {"moments", "moment_sizes", "moment_tracks"}
    assert set(found.left_out) == {"grad_norms", "freeze_cause", *moments}
    assert "grad" in found.left_out["grad_norms"]
    axes = [ax for part in draw_sheet(found).subfigs for ax in part.axes if ax.get_title("left")]
    assert len(axes) == len(figures_named(["all"])) - len(found.left_out)
    with pytest.raises(InvalidArgument, match="none of these figures can be drawn: loss: loss nee"):
        collect([run.isel(step=slice(0, 0))], figures_named(["all"]), Options(), leave_out=True)


def test_only_a_single_figure_takes_log(run):
    found = collect([run], figures_named(["loss", "speed"]), Options())
    with pytest.raises(InvalidArgument, match="for several figures; draw a single figure"):
        draw_sheet(found, log="y")
    alone = collect([run], figures_named(["loss"]), Options())
    assert draw_sheet(alone, log="y").axes[0].get_yscale() == "log"


def test_a_custom_title_and_size(run):
    alone = collect([run], figures_named(["loss"]), Options(), labels=["mine"])
    assert draw_sheet(alone).axes[0].get_title("left").startswith("Training loss\nmine · ")
    canvas = draw_sheet(alone, title="Mine", size=(3, 2))
    assert canvas.axes[0].get_title("left") == "Mine"
    assert canvas.get_size_inches().tolist() == [3, 2]
    sheet = collect([run], figures_named(["loss", "speed"]), Options())
    assert draw_sheet(sheet, title="Mine").get_suptitle() == "Mine"
    with pytest.raises(InvalidArgument, match="got 2 labels, expected one per run"):
        collect([run], figures_named(["loss"]), Options(), labels=["a", "b"])


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_sheet_is_saved_in_each_format(ending, run, tmp_path):
    canvas = draw_sheet(collect([run], figures_named(["loss"]), Options()), style="dark")
    path = save(canvas, tmp_path / f"loss.{ending}", dpi=50)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    with pytest.raises(RunExists, match="already exists"):
        save(canvas, path)
    save(canvas, path, overwrite=True, dpi=50)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(InvalidArgument, match="one of the extensions"):
        save(canvas, tmp_path / "loss.bmp")
    with pytest.raises(InvalidArgument, match="got 5 dpi"):
        save(canvas, tmp_path / "other.png", dpi=5)
