from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watched_runs import HIDDEN, TOKENS, begin, extend, norms, values

from trajstore import RunWriter, open_run
from trajstore.watching.measures import RowMeasures


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with begin(tmp_path / "run.zarr") as made:
        extend(made, range(10))
    return tmp_path / "run.zarr"


@pytest.mark.parametrize("at_once", [100, 1 << 20])
@pytest.mark.parametrize("rows", [range(10), range(3, 9), range(1)])
def test_norms_and_unchanged_are_those_of_the_rows(
    run: Path, rows: range, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.watching.measures._AT_ONCE", at_once)
    measures = RowMeasures(open_run(run, chunks=None))
    assert (measures.gradient_of, measures.unchanged_of) == ("grad", "W")
    assert measures.row_bytes == 2 * TOKENS * HIDDEN * 4
    found = measures.read(rows)
    for name, wanted in norms(rows).items():
        assert np.allclose(found.gradient[name], wanted)
    unchanged = np.array([np.nan, *[0.5] * 5, 1, 1, 1, 1])[rows.start : rows.stop]
    assert np.array_equal(found.unchanged["live"], unchanged, equal_nan=True)
    last = np.square(values(rows[-1])["grad"], dtype="f8").sum(-1)
    assert found.largest == (last.argmax(), pytest.approx(last.max() ** 0.5))


def recorded(path: Path, count: int = 3, **variables: Any) -> RowMeasures:
    types = dict.fromkeys(variables, "float32")
    with RunWriter.create(path, token=[0, 1], hidden=2, variables=types) as run:
        for step in range(count):
            run.append(step=step, **{name: made(step) for name, made in variables.items()})
    return RowMeasures(open_run(path, chunks=None))


def zeros(step: int) -> Any:
    return np.zeros((2, 2), "f4")


def test_recorded_summaries_are_read_in_place_of_the_matrices(tmp_path: Path) -> None:
    def hops(step: int) -> Any:
        return np.array([0, step], "f4") if step else np.full(2, np.nan, "f4")

    measures = recorded(
        tmp_path / "run.zarr",
        W=zeros,
        grad=zeros,
        grad_token_norm=lambda step: np.array([3, 5], "f4"),
        W_step_norm=lambda step: np.ones(2, "f4"),
        W_ulp_l1=hops,
    )
    assert (measures.gradient_of, measures.unchanged_of) == ("grad_token_norm", "W_ulp_l1")
    assert measures.row_bytes == 4 * 4
    found = measures.read(range(3))
    assert found.gradient["all"].tolist() == [4, 4, 4]
    assert np.array_equal(found.unchanged["all"], [np.nan, 0.5, 0.5], equal_nan=True)


def test_a_run_of_weights_has_no_gradients_and_a_zero_that_changes_its_sign_moves(
    tmp_path: Path,
) -> None:
    measures = recorded(
        tmp_path / "run.zarr", 4, W=lambda step: np.full((2, 2), -0.0 if step > 2 else 0.0, "f4")
    )
    found = measures.read(range(4))
    assert measures.gradient_of is None
    assert found.gradient == {}
    assert found.largest is None
    assert np.array_equal(found.unchanged["all"], [np.nan, 1, 1, 0], equal_nan=True)
