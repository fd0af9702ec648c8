"""Laws that hold in every real run: a short one of Lil Gatsby is recorded and asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trajstore
from trajstore import analysis
from trajstore.values.rounding import cast

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.nightly]

STEPS = 80


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, trajstore_cli: Callable[..., Any]) -> Path:
    path = tmp_path_factory.mktemp("laws") / "gatsby.zarr"
    options = ("--steps", STEPS, "--set", "recording.block_rows=32", "-o", path)
    trajstore_cli("record", "--preset", "gatsby", *options)
    return path


@pytest.fixture
def ds(path: Path) -> xr.Dataset:
    return trajstore.open_run(path)


def test_the_intended_update_rounds_to_the_next_weights(ds: xr.Dataset) -> None:
    W = ds.W.values
    update = analysis.adam_update(ds).adam_update.values
    rounded = cast((W[:-1].astype(np.float64) + update).astype(np.float32), "bfloat16")
    assert (rounded == W[1:]).mean() >= 0.999


def test_no_motion_is_a_lost_update_of_a_gradient_that_is_not_zero(ds: xr.Dataset) -> None:
    cause = analysis.freeze_cause(ds).compute()
    still = cause.values[cause.values != 0]
    assert still.size > 0
    assert (still == analysis.CAUSES.index("lost_update")).mean() > 0.99
    norms = analysis.grad_norms(ds).values[1:]
    assert (norms[cause.values == analysis.CAUSES.index("lost_update")] > 0).all()


def test_freeze_regimes_and_causes_agree(ds: xr.Dataset) -> None:
    got = analysis.compute(ds, ["freeze", "regimes", "lifecycle", "freeze_cause"]).compute()
    after = got.isel(step=slice(1, None))
    still = after.regime == 0
    np.testing.assert_array_equal(still, after.freeze_cause != 0)
    np.testing.assert_allclose(
        still.mean("token"), after.unchanged_fraction.sel(population="all", drop=True)
    )
    last = np.maximum.reduce([got[name] for name in ("last_jump", "last_local", "last_hop")])
    np.testing.assert_array_equal(last, got.last_motion)
    dead = after.counts.sel(population="dead", regime_name="unchanged") / int(ds.is_dead.sum())
    np.testing.assert_allclose(dead, after.unchanged_fraction.sel(population="dead"))


def test_bulk_and_thermal_squares_add_up(ds: xr.Dataset) -> None:
    got = analysis.bulk_thermal(ds).compute()
    speed = analysis.by_population(analysis.speed(ds).astype(np.float64) ** 2)["mean"]
    np.testing.assert_allclose(got.bulk_speed**2 + got.thermal_speed**2, speed, rtol=1e-6)


def test_dead_tokens_start_as_one(ds: xr.Dataset) -> None:
    early = analysis.coherence(ds, "dead").sel(step=slice(1, 20))
    assert (early > 0.99).all()
    assert (analysis.coherence(ds, "live").sel(step=slice(1, 20)) < 0.9).all()
    norms = analysis.by_population(analysis.grad_norms(ds)).sel(step=1).compute()
    assert norms["std"].sel(population="dead") < 1e-3 * norms["mean"].sel(population="dead")


def test_a_clean_run_has_no_seam_and_a_bad_one_has(ds: xr.Dataset) -> None:
    assert not analysis.discontinuities(ds).discontinuity.any()
    W = ds.W.values.copy()
    W[60:] += W[10] - W[30]  # a checkpoint of another moment
    found = analysis.discontinuities(ds.assign(W=ds.W.copy(data=W))).compute()
    assert found.step.values[found.discontinuity.values].tolist()[0] == 60


def test_chunks_do_not_change_results(ds: xr.Dataset, path: Path) -> None:
    names = ["freeze", "lifecycle", "regimes", "freeze_cause", "centroid", "coherence"]
    expected = analysis.compute(ds, names).compute()
    halved = ds.chunk(step=16, token=64)
    xr.testing.assert_identical(analysis.compute(halved, names).compute(), expected)
    plain = xr.open_zarr(path)
    xr.testing.assert_identical(analysis.compute(plain, names).compute(), expected)


def test_a_run_against_itself_and_its_changed_self(ds: xr.Dataset) -> None:
    assert (analysis.compare(ds, ds).first_difference == -1).all()
    W = ds.W.values.copy()
    W[70, 3] *= 2
    got = analysis.compare(ds, ds.assign(W=ds.W.copy(data=W))).compute()
    assert got.first_difference.sel(variable="W") == 70
