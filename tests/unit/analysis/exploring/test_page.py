from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from growing_runs import begin, extend

from trajstore.analysis.exploring import plots
from trajstore.analysis.exploring.page import _CURVES, LiveRun, Page
from trajstore.analysis.figures.style import REGIME_COLORS
from trajstore.analysis.scan.rows import REGIMES

# Not imported here: most processes of a test run need none of them.
HAS_PANEL = all(map(find_spec, ("datashader", "holoviews", "panel")))
pytestmark = [
    pytest.mark.skipif(not HAS_PANEL, reason="needs the extra `explore`"),
    # Bokeh 3.9 makes a table of pandas' so.
    pytest.mark.filterwarnings(
        "ignore:The inplace keyword in DataFrame.reset_index:pandas.errors.Pandas4Warning"
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """One page, as making it takes long: each test sets what it looks at."""
    import holoviews as hv
    import panel as pn

    pn.extension("tabulator")
    hv.extension("bokeh")
    with begin(tmp_path_factory.mktemp("page") / "run.zarr") as run:
        extend(run, range(8))
    return Page(LiveRun(run.path))


def test_a_step_and_a_token_are_shown_in_all_that_is_linked(page: Page) -> None:
    assert page._content.get_root() is not None  # drawn, as for a browser
    page._player.value = 3
    assert "step 3 of 7, loss 4.7" in page._step.object
    assert {span.location for span in page._steps} == {3}
    here = plots.here_plot(page._one, 3)
    np.testing.assert_array_equal(here.dimension_values(0), page._one["position"][3, 0])
    assert len(page._steps) == 8  # hops and gradient of a token, layers, five curves
    shown = page._points()
    position = page._state.history.position.values[3]
    np.testing.assert_array_equal(shown.dimension_values("axis 1"), position[:, 0])
    page._find("<script>")
    assert len(page._table.value) == 1
    page._choose(0)
    assert "&#x27;&lt;script&gt;alert(1)&lt;/script&gt;&#x27; (0)" in page._token.object
    assert "Last change at step 5" in page._token.object
    assert page._ranks[0].location == page._state.history.rank(0) + 0.5
    page._go_to(5.4)
    assert page._player.value == 5
    page._go_to(float("nan"))
    assert page._player.value == 5
    page._tapped(*page._state.history.position.values[5, 4])
    assert "Never changed" in page._token.object


def test_enter_in_the_search_selects_the_first_match(page: Page) -> None:
    page._search.value_input = "6"
    page._search.enter_pressed = True
    assert "(6)" in page._token.object
    page._search.value_input = "no such token"
    page._search.enter_pressed = True
    assert "(6)" in page._token.object


@pytest.mark.nightly
def test_the_axes_of_a_token_follow_it(page: Page) -> None:
    from bokeh.models import Plot

    def shown(name: str) -> tuple[np.ndarray, float, float]:
        column = f"{name} of token"
        for figure in root.select({"type": Plot}):
            sources = [part.data_source for part in figure.renderers]
            values = [one.data[column] for one in sources if column in one.data]
            if values:
                axis = np.concatenate(values)
                return axis[np.isfinite(axis)], figure.y_range.start, figure.y_range.end
        raise AssertionError(f"nothing shows {column}")

    root = page._content.get_root()
    before = []
    for at in (0, 5):  # the last one never changes
        page._choose(at)
        for name in ("hop", "gradient"):
            values, start, end = shown(name)
            assert start > 0
            assert ((start < values) & (values < end)).all()
            assert not values.size or end < 20 * values.max()
            before.append(end)
    assert len(set(before)) > 2


def test_no_two_curves_share_an_axis(page: Page) -> None:
    """A logarithmic and a linear curve on one axis leave a panel empty."""
    data = page._state.history.data
    drawn = [plots.curve_plot(data[figure], figure, name) for figure, name in _CURVES.values()]
    axes = {curve.get(0).vdims[0].name for curve in drawn}
    assert len(axes) == len(drawn) == 5


def test_the_picture_of_layers_is_the_heatmap(page: Page) -> None:
    layers = page._state.history.data["heatmap"]
    picture = plots.layer_plot(layers)
    red, green, blue = (picture.dimension_values(name, flat=False) for name in "RGB")
    assert red.shape == (6, 7)
    for row in range(6):
        for column in range(7):
            regime = REGIMES[int(layers["update_size"].transpose("group", "step")[row, column])]
            wanted = tuple(bytes.fromhex(REGIME_COLORS[regime][1:]))
            assert (red[row, column], green[row, column], blue[row, column]) == wanted
