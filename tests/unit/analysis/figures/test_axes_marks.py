"""Legends use the room that the figure has, and axes have numbers that are read at once."""

from __future__ import annotations

from matplotlib.figure import Figure as Canvas

from trajstore.analysis.figures.axes_marks import add_legend, set_log, set_title
from trajstore.analysis.figures.figure import in_style


def legend_of(labels, width=8):
    canvas = Canvas(figsize=(width, 5), layout="constrained")
    ax = canvas.subplots()
    for label in labels:
        ax.plot([1, 2], label=label)
    with in_style("light"):
        add_legend(ax, ["a note"])
    canvas.draw_without_rendering()
    return ax, ax.get_legend()


def test_one_long_label_does_not_make_one_column():
    ax, legend = legend_of(["short"] * 6 + ["a label that takes half of the width of the figure"])
    assert len({text.get_window_extent().x0 for text in legend.get_texts()}) >= 3
    assert legend.get_window_extent().x1 <= ax.bbox.x1


def test_labels_and_titles_are_wrapped_in_a_narrow_figure():
    ax, legend = legend_of(["setting=1, " * 12], width=3)
    assert "\n" in legend.get_texts()[0].get_text()
    set_title(ax, "title " * 20)
    ax.figure.draw_without_rendering()
    assert ax.title.get_window_extent().width <= ax.figure.bbox.width


def test_a_short_logarithmic_axis_has_plain_numbers():
    ax = Canvas().subplots()
    set_log(ax, "y")
    shown = {}
    for low in (0.15, 1e-9):
        ax.set_ylim(low, 3.5)
        ax.figure.draw_without_rendering()
        shown[low] = {tick.get_text() for tick in ax.get_yticklabels(which="both")} - {""}
    assert shown[0.15] >= {"0.2", "1", "3"}
    assert r"$\mathdefault{10^{-6}}$" in shown[1e-9]
