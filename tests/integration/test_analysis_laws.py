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


def test_dead_tokens_start_as_one(ds: xr.Dataset) -> None:
    early = analysis.coherence(ds, "dead").sel(step=slice(1, 20))
    assert (early > 0.99).all()
    assert (analysis.coherence(ds, "live").sel(step=slice(1, 20)) < 0.9).all()
    norms = analysis.by_population(analysis.grad_norms(ds)).sel(step=1).compute()
    assert norms["std"].sel(population="dead") < 1e-3 * norms["mean"].sel(population="dead")
