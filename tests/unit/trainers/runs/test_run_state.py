"""Runs with everything resume from their last row and fork from any row, without checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import xarray as xr
from bits_and_calls import nightly_but

torch = pytest.importorskip("torch")
from small_trainings import Straight, same_values, small_config, stop_after  # noqa: E402

from trajstore import RunWriter, verify  # noqa: E402
from trajstore.store.storage.remote_path import checkpoint_folder  # noqa: E402
from trajstore.trainers import RunConfig, fork, record, recorded_config  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, EPOCH = 9, 6
EVERYTHING = "recording.variables=['everything']"
VARIANTS = {
    "trainer": ["gatsby"],
    "plain, every 3, accumulated": [
        "gatsby-adam", "recording.every=3", "training.accumulation=4", "schedule.name=cosine",
    ],
    "trainer, accumulated, float32 state, rounded at random": [
        "gatsby", "training.accumulation=4", "optimizer.state_dtype=float32",
        "optimizer.rounding=stochastic",
    ],
    "plain, sgd rounded at random": [
        "gatsby-adam", "optimizer.name=sgd", "optimizer.rounding=stochastic",
    ],
    "momentum": ["gatsby-adam", "optimizer.name=sgd", "optimizer.momentum=0.9"],
    "float32 masters": ["duckling", "model.heads=1", "training.accumulation=2"],
}  # fmt: skip


def config_of(name: str, *assignments: str) -> RunConfig:
    return small_config(VARIANTS[name], EVERYTHING, *assignments, steps=STEPS)


def test_a_run_resumes_from_its_last_row(straight: Straight, text: Path, tmp_path: Path) -> None:
    config, path = config_of("trainer"), tmp_path / "run.zarr"
    record(config, path, corpus=text, stop=stop_after(4))
    RunWriter.resume(path, rows=2).close("interrupted")  # as after a kill: the committed rows
    record(recorded_config(path), path, resume=True, stop=stop_after(EPOCH))
    record(recorded_config(path), path, resume=True)
    assert same_values(straight(config), path).attrs["status"] == "complete"
    assert not checkpoint_folder(path).exists()


@pytest.mark.parametrize("name", nightly_but(VARIANTS, "plain, every 3, accumulated", "momentum"))
def test_a_fork_starts_from_any_row(name: str, straight: Straight, tmp_path: Path) -> None:
    """And resumes from it, as every fork does."""
    source, notes = straight(config_of(name)), []  # type: ignore[var-annotated]
    other = fork(source, tmp_path / "fork.zarr", at=EPOCH, on_note=notes.append)
    same_values(source, other)
    assert not checkpoint_folder(other).exists()
    assert not [note for note in notes if "differs" in note or "again" in note]
    assert verify(other).clean


@pytest.mark.nightly
def test_a_fork_with_other_types_resumes_from_its_rows(straight: Straight, tmp_path: Path) -> None:
    settings = ["model.dtype=float32", "optimizer.lr=1e-4"]
    whole, other = (
        fork(
            straight(config_of("trainer")), tmp_path / name, at=6, settings=settings,
            stop=stop_after(steps),
        )
        for name, steps in (("whole.zarr", STEPS), ("other.zarr", 2))
    )  # fmt: skip
    record(recorded_config(other), other, resume=True)
    ds = same_values(whole, other)
    assert ds.params.attrs["native_dtype"] == ds.attrs["parameters"][1]["dtype"] == "float32"
    assert verify(other).clean


def test_a_fork_to_another_optimizer_has_none_of_the_state(
    straight: Straight, tmp_path: Path
) -> None:
    settings = ["optimizer.name=adam", "optimizer.momentum=0", "optimizer.lr=1e-4"]
    other = fork(straight(config_of("momentum")), tmp_path / "a.zarr", at=7, settings=settings)
    ds = xr.open_zarr(other)
    assert (ds.attrs["status"], ds.sizes["step"]) == ("complete", STEPS + 1)
    assert not {"momentum_buffer", "params_momentum_buffer", "param_kept"} & {*ds}
    assert verify(other).clean
