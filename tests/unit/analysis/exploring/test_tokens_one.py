from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from example_run import write_example_run

from trajstore import analysis, open_run
from trajstore.analysis.exploring.run_history import RunHistory, prepare
from trajstore.analysis.exploring.tokens import cause_sentences, token_history


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    write_example_run(path)
    return path


@pytest.fixture(scope="module")
def history(run: Path) -> RunHistory:
    return prepare(open_run(run))


@pytest.mark.parametrize("at", [ord("e"), ord("z")])
def test_a_token_is_what_the_analysis_of_all_finds_of_it(
    run: Path, history: RunHistory, at: int
) -> None:
    ds = open_run(run)
    found = token_history(open_run(run, chunks=None), at, history)
    np.testing.assert_array_equal(found["position"], history.position[:, at])
    hops = analysis.lattice_displacement(ds, ord=1)[:, at]
    np.testing.assert_array_equal(found["hop"][1:], hops)
    np.testing.assert_array_equal(found["gradient"], analysis.grad_norms(ds)[:, at])
    np.testing.assert_array_equal(found["cause"][1:], analysis.freeze_cause(ds)[:, at])
    assert np.isnan(found["hop"][0])
    assert found["cause"][0] == -1


def test_rows_that_came_since_are_not_shown_yet(run: Path, history: RunHistory) -> None:
    shorter = prepare(open_run(run).isel(step=slice(9)))
    assert token_history(open_run(run, chunks=None), 3, shorter).sizes["step"] == 9


def test_what_was_not_recorded_is_left_out(run: Path, history: RunHistory) -> None:
    bare = open_run(run, chunks=None).drop_vars(["grad"])
    without = prepare(open_run(run).drop_vars(["grad"]))
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
