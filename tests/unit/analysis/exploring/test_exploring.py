"""The page of `explore`: its data, the run behind it, what is linked on it, and its address."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import webbrowser
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import Cli
from growing_runs import HOSTILE, begin, extend

from trajstore import analysis, open_run
from trajstore.analysis.exploring import plots, server
from trajstore.analysis.exploring.page import _CURVES, LiveRun, Page
from trajstore.analysis.exploring.plots import (
    RunHistory,
    TokenList,
    cause_sentences,
    nearest,
    prepare,
    token_history,
)
from trajstore.analysis.figures.style import REGIME_COLORS
from trajstore.analysis.scan.rows import REGIMES
from trajstore.errors import InvalidArgument, RunNotFound, VariableNotRecorded

# Bokeh 3.9 makes a table of pandas' so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The inplace keyword in DataFrame.reset_index:pandas.errors.Pandas4Warning"
)


@pytest.fixture(scope="module")
def ds(example_run: Path) -> xr.Dataset:
    return open_run(example_run)


@pytest.fixture(scope="module")
def history(ds: xr.Dataset) -> RunHistory:
    return prepare(ds)


def test_the_history_equals_the_analysis(ds: xr.Dataset, history: RunHistory) -> None:
    data, shown = history.data, history.populations
    rest = analysis.freeze(ds).compute()
    assert data["tokens"].equals(rest[["last_motion", "moves"]])
    assert data["heatmap"].drop_attrs().identical(analysis.heatmap(ds).compute().drop_attrs())
    fraction = rest["unchanged_fraction"].sel(population=shown)
    assert data["freeze"]["unchanged_fraction"].equals(fraction)
    np.testing.assert_array_equal(data["loss"]["loss"], ds["loss"])
    for name in ("grad_norms", "displacement"):
        values = getattr(analysis, name)(ds)[1:]
        table = analysis.by_population(values, (0.05, 0.95)).sel(population=shown)
        for key in ("mean", "quantiles"):
            np.testing.assert_array_equal(data[name][key], table[key])
    np.testing.assert_array_equal(data["cause"]["cause"], analysis.freeze_cause(ds))
    found = analysis.pca(ds, components=2).compute()
    np.testing.assert_allclose(history.position, found["scores"], atol=1e-6)
    np.testing.assert_allclose(history.plane["share"].sum(), 1)
    assert (history.every, history.rows, history.last_step, history.unknown) == (1, 21, 20, {})
    order = np.argsort(history.last_motion.values, kind="stable")
    assert [history.rank(at) for at in order[:3]] == [0, 1, 2]


def test_a_run_that_is_long_or_holds_little(ds: xr.Dataset) -> None:
    long = prepare(ds, position_bytes=6 * 128 * 8)
    assert long.position["step"].values.tolist() == [0, 4, 8, 12, 16, 20]
    bare = prepare(ds.drop_vars(["grad", "loss", "is_dead"]))
    assert set(bare.unknown) == {"cause", "grad_norms", "loss"}
    assert "grad" in bare.unknown["cause"]
    assert "cause" not in bare.data
    assert bare.populations == ["all"]
    found = token_history(ds.drop_vars("grad"), ord("z"), bare)
    assert set(found) == {"position", "hop"}
    assert cause_sentences(found)[0].endswith("rows since.")
    for part, options, error, message in (
        (ds.drop_vars("W"), {}, VariableNotRecorded, "W"),
        (ds.isel(step=slice(1)), {}, InvalidArgument, "at least 2 rows, got 1"),
        (ds, {"map_bytes": 1000}, InvalidArgument, "21 rows of 128 tokens.*trajstore export"),
    ):
        with pytest.raises(error, match=message):
            prepare(part, **options)


def test_tokens_are_found_by_text_and_id_the_best_first() -> None:
    texts = np.array(["they", "Then", "bathed", " the ", "a20", "The", "the"], "T")
    coords = {"token": 10 * np.arange(len(texts)), "token_text": ("token", texts)}
    known = TokenList(xr.Dataset(coords=coords))
    for text, found in (
        ("the", [6, 3, 5, 0, 1, 2]),  # exact, but blanks, but case, begins with it, contains it
        ("The", [5, 3, 6, 0, 1, 2]),
        (" the ", [3, 6, 5]),
        (" THE ", [3, 5, 6]),
        ("20", [2, 4]),  # the id, then the text
        ("40", [4]),
        ("", [0, 1, 2, 3, 4, 5, 6]),
        ("xyz", []),
        ("²", []),  # which is a digit, and no number
    ):
        assert known.find(text).tolist() == found, text
    without = TokenList(xr.Dataset(coords={"token": [5, 50, 7]}))
    assert without.find("50").tolist() == [1]
    assert not without.find("the").size
    assert (without.label(1), without.kind(1)) == ("(50)", "")


def test_nothing_in_a_text_is_obeyed(tmp_path: Path) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(8))
    ds = open_run(tmp_path / "run.zarr")
    known = TokenList(ds)
    assert known.label(1) == r"'\x1b[31mred\x1b]0;title\x07' (3)"
    assert known.label(2) == r"'\u202elft' (6)"
    assert known.find("<script>").tolist() == [0]
    assert known.find(HOSTILE[1]).tolist() == [1]
    columns = known.columns(np.array([4, 0]), prepare(ds))
    assert list(columns) == ["id", "text", "kind", "last change", "changes"]
    assert columns["id"].tolist() == [12, 0]
    assert columns["text"] == ["'b'", "'<script>alert(1)</script>'"]
    assert columns["kind"].tolist() == ["dead", "live"]
    np.testing.assert_array_equal(columns["last change"], [np.nan, 5])
    assert columns["changes"].tolist() == [0, 5]


def test_the_nearest_token_is_measured_on_the_screen() -> None:
    position = np.array([[0, 0], [1, 30], [np.nan, 0]], np.float32)
    assert nearest(position, 1, 1, width=1, height=100) == 1
    assert nearest(position, 1, 1, width=100, height=1) == 0
    assert nearest(position[2:], 1, 1, 1, 1) is None


def test_a_token_is_what_the_analysis_of_all_finds_of_it(
    ds: xr.Dataset, example_run: Path, history: RunHistory
) -> None:
    opened = open_run(example_run, chunks=None)
    found = token_history(opened, at := ord("e"), history)
    np.testing.assert_array_equal(found["position"], history.position[:, at])
    hops = analysis.lattice_displacement(ds, ord=1)[:, at]
    np.testing.assert_array_equal(found["hop"], [np.nan, *hops.values])
    np.testing.assert_array_equal(found["gradient"], analysis.grad_norms(ds)[:, at])
    np.testing.assert_array_equal(found["cause"], [-1, *analysis.freeze_cause(ds)[:, at].values])
    # Rows that came since are not shown yet.
    shorter = prepare(ds.isel(step=slice(9)))
    assert token_history(opened, at, shorter).sizes["step"] == 9


def test_unchanged_steps_in_sentences() -> None:
    for hops, causes, sentences in (
        ([3, 2], [0, 0], ["Changed at the last row."]),
        ([0, 0], [2, 2], ["Never changed, in 2 rows: lost update."]),
        (
            [0, 4, 0, 0, 0],
            [1, 0, 2, 2, 3],
            [
                "Last change at step 20; unchanged for 3 rows since: "
                "66.7% lost update, 33.3% learning rate.",
                "Before that, unchanged in 1 row of 2: no gradient.",
            ],
        ),
        ([np.nan], [0], ["Changed at the last row."]),  # came to be NaN
    ):
        token = xr.Dataset(
            {"hop": ("step", [np.nan, *hops]), "cause": ("step", [-1, *causes])},
            {"step": 10 * np.arange(len(hops) + 1)},
        )
        assert cause_sentences(token) == sentences


def test_new_rows_come_while_the_run_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.zarr"
    with pytest.raises(RunNotFound):
        LiveRun(path)
    with pytest.raises(InvalidArgument, match="unknown kind"):
        LiveRun("file:///run.zarr")
    with begin(path) as run:
        extend(run, range(8))
        live = LiveRun(path)
        first = live.state
        assert (first.standing, first.history.rows) == ("recording", 8)
        live.look()
        assert live.state is first  # nothing is new
        extend(run, range(8, 12))
        live.look()
        assert live.state.history.rows == live.state.ds.sizes["step"] == 12
    live.look()
    assert (live.state.standing, live.state.history.rows) == ("complete", 12)
    # What cannot be read is reported, and what was seen stays.
    shutil.rmtree(path)
    waits = iter([False, False, True])
    monkeypatch.setattr(live._stop, "wait", lambda seconds: next(waits))
    live._follow()
    assert "no run at" in live.state.trouble
    assert live.state.history.rows == 12
    # Another run in its place, with fewer rows.
    with begin(path) as run:
        extend(run, range(4), seed=1)
    live.look()
    assert live.state.history.rows == 4
    assert live.state.trouble == ""
    assert float(live.state.history.data["loss"]["loss"][0]) == 6


def test_a_port_that_is_free_is_found() -> None:
    port = server.free_port("127.0.0.1", 0)
    assert server.free_port("127.0.0.1", port) == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(InvalidArgument, match=f"cannot listen on '127.0.0.1', port {port}"):
            server.free_port("127.0.0.1", port)


def test_only_the_names_of_its_own_address_may_talk_to_it() -> None:
    assert server._names("127.0.0.1") == ["127.0.0.1", "localhost"]
    assert server._names("192.0.2.7") == ["192.0.2.7"]
    assert {"127.0.0.1", socket.gethostname()} <= set(server._names("0.0.0.0"))
    assert server.address("127.0.0.1", 80) == "http://127.0.0.1:80/"
    assert server.address("0.0.0.0", 80) == f"http://{socket.gethostname()}:80/"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """One page, as making it takes long: each test sets what it looks at."""
    pytest.importorskip("datashader")
    hv, pn = pytest.importorskip("holoviews"), pytest.importorskip("panel")
    pn.extension("tabulator")
    hv.extension("bokeh")
    with begin(tmp_path_factory.mktemp("page") / "run.zarr") as run:
        extend(run, range(8))
    return Page(LiveRun(run.path))


def test_a_step_and_a_token_are_shown_in_all_that_is_linked(page: Page) -> None:
    from bokeh.models import Plot

    root = page._content.get_root()  # drawn, as for a browser
    page._player.value = 3
    assert "step 3 of 7, loss 4.7" in page._step.object
    assert {span.location for span in page._steps} == {3}
    here = plots.here_plot(page._one, 3)
    np.testing.assert_array_equal(here.dimension_values(0), page._one["position"][3, 0])
    assert len(page._steps) == 8  # hops and gradient of a token, layers, five curves
    position = page._state.history.position.values[3]
    np.testing.assert_array_equal(page._points().dimension_values("axis 1"), position[:, 0])
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
    for text in ("6", "no such token"):  # Enter selects the first match
        page._search.value_input = text
        page._search.enter_pressed = True
        assert "(6)" in page._token.object
    for at in (0, 5):  # the axes follow the token; the last one never changes
        page._choose(at)
        for column in ("hop of token", "gradient of token"):
            values, figure = next(
                (part.data_source.data[column], figure)
                for figure in root.select({"type": Plot})
                for part in figure.renderers
                if column in part.data_source.data
            )
            shown = values[np.isfinite(values)]
            start, end = figure.y_range.start, figure.y_range.end
            assert start > 0
            assert ((start < shown) & (shown < end)).all()
            assert not shown.size or end < 20 * shown.max()


@pytest.mark.nightly
def test_curves_and_layers_of_the_page(page: Page) -> None:
    # A logarithmic and a linear curve on one axis would leave a panel empty.
    data = page._state.history.data
    drawn = [plots.curve_plot(data[figure], figure, name) for figure, name in _CURVES.values()]
    axes = {curve.get(0).vdims[0].name for curve in drawn}
    assert len(axes) == len(drawn) == 5
    # The picture of layers is the heatmap.
    picture = plots.layer_plot(data["heatmap"])
    shown = np.stack([picture.dimension_values(name, flat=False) for name in "RGB"], -1)
    colors = np.array([[*bytes.fromhex(REGIME_COLORS[name][1:])] for name in REGIMES])
    sizes = data["heatmap"]["update_size"].transpose("group", "step").values
    assert shown.shape == (6, 7, 3)
    np.testing.assert_array_equal(shown, colors[sizes])


class Opened:
    """A browser that notes addresses, and ends the server as soon as it serves."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def open(self, url: str, *_: object) -> bool:
        from tornado.ioloop import IOLoop

        self.addresses.append(url)
        IOLoop.current().add_callback(os.kill, os.getpid(), signal.SIGTERM)
        return True


@pytest.mark.nightly
def test_the_page_is_opened_in_a_browser(page: Page, tmp_path: Path, trajstore_cli: Cli) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(2))
    browser = Opened()
    webbrowser.register("opened", None, browser, preferred=True)
    words = ("explore", run.path, "--port", 0, "--open")
    done = trajstore_cli(*words, rc=128 + signal.SIGTERM)
    (address,) = browser.addresses
    assert f"at {address} until Ctrl-C" in done.stdout
