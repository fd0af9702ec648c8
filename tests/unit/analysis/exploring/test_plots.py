""""""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from growing_runs import HOSTILE, begin, extend

from trajstore import analysis, open_run
from trajstore.analysis.exploring.plots import (
    RunHistory,
    TokenList,
    cause_sentences,
    nearest,
    prepare,
    token_history,
)
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture
def ds(example_run: Path) -> xr.Dataset:
    return open_run(example_run)


@pytest.fixture(scope="module")
def history(example_run: Path) -> RunHistory:
    return prepare(open_run(example_run))


def test_the_history_equals_the_analysis(ds: xr.Dataset, history: RunHistory) -> None:
    data, shown = history.data, history.populations
    rest = analysis.freeze(ds).compute()
    assert data["tokens"].equals(rest[["last_motion", "moves"]])
    assert data["heatmap"].drop_attrs().identical(analysis.heatmap(ds).compute().drop_attrs())
    assert data["freeze"]["unchanged_fraction"].equals(
        rest["unchanged_fraction"].sel(population=shown)
    )
    np.testing.assert_array_equal(data["loss"]["loss"], ds["loss"])
    for name, values in (
        ("grad_norms", analysis.grad_norms(ds)),
        ("displacement", analysis.displacement(ds)),
    ):
        table = analysis.by_population(values[1:], (0.05, 0.95)).sel(population=shown)
        np.testing.assert_array_equal(data[name]["mean"], table["mean"])
        np.testing.assert_array_equal(data[name]["quantiles"], table["quantiles"])
    assert np.array_equal(data["cause"]["cause"], analysis.freeze_cause(ds))
    found = analysis.pca(ds, components=2).compute()
    np.testing.assert_allclose(history.position, found["scores"], atol=1e-6)
    np.testing.assert_allclose(history.plane["share"].sum(), 1)
    assert (history.every, history.rows, history.last_step, history.unknown) == (1, 21, 20, {})
    order = np.argsort(history.last_motion.values, kind="stable")
    assert [history.rank(at) for at in order[:3]] == [0, 1, 2]


def test_positions_of_long_runs_are_those_of_every_nth_row(ds: xr.Dataset) -> None:
    history = prepare(ds, position_bytes=6 * 128 * 8)
    assert history.position["step"].values.tolist() == [0, 4, 8, 12, 16, 20]


def test_what_a_run_does_not_hold_is_reported(tmp_path: Path) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(12))
    ds = open_run(tmp_path / "run.zarr")
    history = prepare(ds)
    assert "cause" not in history.data
    assert list(history.unknown) == ["cause"]
    assert "exp_avg" in history.unknown["cause"]
    bare = prepare(ds.drop_vars(["grad", "loss", "is_dead"]))
    assert set(bare.unknown) == {"cause", "grad_norms", "loss"}
    assert bare.populations == ["all"]


def test_a_run_that_cannot_be_explored_is_refused(ds: xr.Dataset) -> None:
    with pytest.raises(VariableNotRecorded, match="W"):
        prepare(ds.drop_vars("W"))
    with pytest.raises(InvalidArgument, match="at least 2 rows, got 1"):
        prepare(ds.isel(step=slice(1)))
    with pytest.raises(InvalidArgument, match=r"21 rows of 128 tokens.*trajstore export"):
        prepare(ds, map_bytes=1000)


def tokens(*texts: str) -> TokenList:
    coords = {"token": 10 * np.arange(len(texts)), "token_text": ("token", np.array(texts, "T"))}
    return TokenList(xr.Dataset(coords=coords))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the", [6, 3, 5, 0, 1, 2]),  # exact, but blanks, but case, begins with it, contains it
        ("The", [5, 3, 6, 0, 1, 2]),
        (" the ", [3, 6, 5]),
        (" THE ", [3, 5, 6]),
        ("20", [2, 4]),  # the id, then the text
        ("40", [4]),
        ("", [0, 1, 2, 3, 4, 5, 6]),
        ("xyz", []),
        ("²", []),  # which is a digit, and no number
    ],
)
def test_tokens_are_found_by_text_and_id_the_best_first(text: str, found: list[int]) -> None:
    known = tokens("they", "Then", "bathed", " the ", "a20", "The", "the")
    assert sorted(known.find(text)) == sorted(found)
    assert known.find(text).tolist() == found


def test_tokens_without_texts_are_found_by_id() -> None:
    known = TokenList(xr.Dataset(coords={"token": [5, 50, 7]}))
    assert known.find("50").tolist() == [1]
    assert known.find("the").tolist() == []
    assert (known.label(1), known.kind(1)) == ("(50)", "")


def test_nothing_in_a_text_is_obeyed(tmp_path: Path) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(8))
    ds = open_run(tmp_path / "run.zarr")
    known = TokenList(ds)
    assert known.label(1) == r"'\x1b[31mred\x1b]0;title\x07' (3)"
    assert known.label(2) == r"'\u202eright' (6)"
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


@pytest.mark.parametrize("at", [ord("e"), ord("z")])
def test_a_token_is_what_the_analysis_of_all_finds_of_it(
    example_run: Path, history: RunHistory, at: int
) -> None:
    ds = open_run(example_run)
    found = token_history(open_run(example_run, chunks=None), at, history)
    np.testing.assert_array_equal(found["position"], history.position[:, at])
    hops = analysis.lattice_displacement(ds, ord=1)[:, at]
    np.testing.assert_array_equal(found["hop"][1:], hops)
    np.testing.assert_array_equal(found["gradient"], analysis.grad_norms(ds)[:, at])
    np.testing.assert_array_equal(found["cause"][1:], analysis.freeze_cause(ds)[:, at])
    assert np.isnan(found["hop"][0])
    assert found["cause"][0] == -1


def test_rows_that_came_since_are_not_shown_yet(example_run: Path, history: RunHistory) -> None:
    shorter = prepare(open_run(example_run).isel(step=slice(9)))
    assert token_history(open_run(example_run, chunks=None), 3, shorter).sizes["step"] == 9


def test_what_was_not_recorded_is_left_out(example_run: Path, history: RunHistory) -> None:
    bare = open_run(example_run, chunks=None).drop_vars(["grad"])
    without = prepare(open_run(example_run).drop_vars(["grad"]))
    found = token_history(bare, ord("z"), without)
    assert set(found) == {"position", "hop"}
    assert cause_sentences(found)[0].endswith("rows since.")


@pytest.mark.parametrize(
    ("hops", "causes", "sentences"),
    [
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
        ([float("nan")], [0], ["Changed at the last row."]),  # came to be NaN
    ],
)
def test_unchanged_steps_in_sentences(
    hops: list[float], causes: list[int], sentences: list[str]
) -> None:
    token = xr.Dataset(
        {"hop": ("step", [np.nan, *hops]), "cause": ("step", [-1, *causes])},
        {"step": 10 * np.arange(len(hops) + 1)},
    )
    assert cause_sentences(token) == sentences
