"""Runs with everything resume from their last row and fork from any row, without checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but

torch = pytest.importorskip("torch")
from altered_runs import rewrite  # noqa: E402
from small_trainings import same_values, small_config, stop_after  # noqa: E402

from trajstore import RunWriter, verify  # noqa: E402
from trajstore.store.storage.remote_path import checkpoint_folder  # noqa: E402
from trajstore.trainers import RunConfig, fork, record, recorded_config  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, EPOCH = 16, 6
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


@pytest.mark.parametrize("name", nightly_but(VARIANTS, "trainer", "momentum"))
def test_a_run_resumes_from_its_last_row(
    name: str, straight: Callable[[RunConfig], Path], text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    record(
        config_of(name),
        path,
        corpus=None if name == "float32 masters" else text,
        stop=stop_after(4),
    )
    for rows in (2, 5):  # as after a kill, with the rows that were committed
        kept = min(rows, xr.open_zarr(path).sizes["step"])
        RunWriter.resume(path, rows=kept).close("interrupted")
        record(recorded_config(path), path, resume=True, stop=stop_after(EPOCH))
    record(recorded_config(path), path, resume=True)
    assert same_values(straight(config_of(name)), path).attrs["status"] == "complete"
    assert not checkpoint_folder(path).exists()


@pytest.mark.parametrize("name", nightly_but(VARIANTS, "plain, every 3, accumulated", "momentum"))
def test_a_fork_starts_from_any_row(
    name: str, straight: Callable[[RunConfig], Path], tmp_path: Path
) -> None:
    source, notes = straight(config_of(name)), []  # type: ignore[var-annotated]
    for at in (EPOCH, 15):
        other = fork(source, tmp_path / f"{at}.zarr", at=at, on_note=notes.append)
        same_values(source, other)
        assert not checkpoint_folder(other).exists()
    assert not [note for note in notes if "differs" in note or "again" in note]
    assert verify(other).clean


def test_a_fork_with_other_types_resumes_from_its_rows(
    straight: Callable[[RunConfig], Path], tmp_path: Path
) -> None:
    settings = ["model.dtype=float32", "optimizer.lr=1e-4"]
    whole = fork(straight(config_of("trainer")), tmp_path / "whole.zarr", at=9, settings=settings)
    other = fork(
        straight(config_of("trainer")),
        tmp_path / "a.zarr",
        at=9,
        settings=settings,
        stop=stop_after(2),
    )
    record(recorded_config(other), other, resume=True)
    ds = same_values(whole, other)
    assert ds.params.attrs["native_dtype"] == ds.attrs["parameters"][1]["dtype"] == "float32"
    assert verify(other).clean


def test_a_fork_to_another_optimizer_has_none_of_the_state(
    straight: Callable[[RunConfig], Path], tmp_path: Path
) -> None:
    settings = ["optimizer.name=adam", "optimizer.momentum=0", "optimizer.lr=1e-4"]
    other = fork(straight(config_of("momentum")), tmp_path / "a.zarr", at=9, settings=settings)
    ds = xr.open_zarr(other)
    assert (ds.attrs["status"], ds.sizes["step"]) == ("complete", STEPS + 1)
    assert not {"momentum_buffer", "params_momentum_buffer", "param_kept"} & {*ds}
    assert verify(other).clean


def test_a_fork_reports_that_the_next_row_differs(
    straight: Callable[[RunConfig], Path], tmp_path: Path
) -> None:
    source, notes = tmp_path / "run.zarr", []  # type: ignore[var-annotated]
    shutil.copytree(straight(config_of("trainer")), source)
    rewrite(source, "params_grad", (10, 5))
    other = fork(source, tmp_path / "other.zarr", at=9, on_note=notes.append)
    assert "at step 10 params_grad differs" in next(note for note in notes if "differs" in note)
    W = xr.open_zarr(other).W.values
    assert np.array_equal(W, xr.open_zarr(source).W.values)
