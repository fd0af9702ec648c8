from __future__ import annotations

import pytest

pytest.importorskip("pydantic")
from trajstore.errors import ConfigError, InvalidArgument
from trajstore.trainers import preset
from trajstore.trainers.sweeps.grid import parse_seeds, split_values, swept_runs


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "3:3", "1,1", "0:2,1", "-1:2", "1.5"])
def test_wrong_seeds_are_errors(text: str) -> None:
    with pytest.raises(InvalidArgument, match="seed"):
        parse_seeds(text)


def test_commas_within_a_value() -> None:
    assert split_values("[0.9,0.99], [0.9,0.999]") == ["[0.9,0.99]", "[0.9,0.999]"]
    assert split_values("'a,b',c") == ["'a,b'", "c"]
    assert split_values("") == [""]
    with pytest.raises(InvalidArgument, match="one is empty"):
        split_values("1,,2")


def test_a_sweep_has_a_run_for_each_combination() -> None:
    sweeping = ["optimizer.betas=[0.9,0.99],[0.9,0.999]", "optimizer.lr=1e-3"]
    runs = swept_runs(preset("gatsby"), "gatsby", sweeping, [7, 8], ["training.steps=3"])
    assert [run.name for run in runs] == [
        f"gatsby_optimizer.betas={betas}_optimizer.lr=0.001_seed={seed}.zarr"
        for betas in ("0.9+0.99", "0.9+0.999")
        for seed in (7, 8)
    ]
    assert [run.config.optimizer.betas[1] for run in runs] == [0.99, 0.99, 0.999, 0.999]
    assert {run.config.training.seed for run in runs} == {7, 8}
    assert {run.config.training.steps for run in runs} == {3}
    more = swept_runs(preset("gatsby"), "gatsby", [sweeping[0], "optimizer.lr=1e-3,2"], [7, 8, 9])
    assert {run.name for run in runs} <= {run.name for run in more}, "names are stable"


def test_one_value_written_in_two_ways_is_one_run() -> None:
    with pytest.raises(
        InvalidArgument, match=r"two runs have the name g_initialization.sigma=1e-5.zarr"
    ):
        swept_runs(preset("gatsby"), "g", ["initialization.sigma=1e-5,0.00001"])


@pytest.mark.parametrize(
    ("assignments", "error", "message"),
    [
        (["optimizer.lr=1e-3,-1"], ConfigError, "optimizer.lr = -1"),
        (["optimizer.lr=1", "optimizer.lr=2"], InvalidArgument, "optimizer.lr is given twice"),
        (["training.seed=1,2"], InvalidArgument, "training.seed is given twice"),
        ([f"recording.tokens={'x' * 300}"], InvalidArgument, "too long for a file system"),
    ],
)
def test_wrong_assignments_are_errors(assignments: list[str], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        swept_runs(preset("gatsby"), "g", assignments, [1])
