"""One story, through the installed command: record, and look; as a user would."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import Cli

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

STEPS = 16


@pytest.fixture(scope="module")
def gatsby(trajstore_cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("story") / "gatsby.zarr"
    # Native products take four times as long on processors without bfloat16 units.
    changes = ("recording.block_rows=8", "training.device=cpu", "training.products=float32")
    settings = [word for change in changes for word in ("--set", change)]
    options = ("--steps", STEPS, "--memory", "64MiB", *settings, "-o", path)
    done = trajstore_cli("record", "--preset", "gatsby", *options)
    assert "gatsby stand-in (embedded)" in done.stderr
    assert f"step {STEPS}/{STEPS}" in done.stderr
    assert f"Recorded {STEPS + 1} rows" in done.stdout
    return path


def test_the_run_obeys_the_laws_of_the_notebook(gatsby: Path) -> None:
    ds = xr.open_zarr(gatsby)
    assert ds.step.values.tolist() == list(range(STEPS + 1))
    dead = ds.is_dead.values
    assert dead.sum() == 51
    assert (ds.token_count.values[dead] == 0).all()
    assert float(ds.loss[1]) == pytest.approx(math.log(128), abs=0.001)
    assert float(ds.loss[-1]) < 4.4
    logits = ds.logits[1].values
    assert logits.max() == logits.min()
    norms = np.linalg.norm(ds.grad[1].values, axis=-1)
    assert norms[dead].mean() == pytest.approx(6.17e-2, rel=0.02)
    assert norms[dead].std() < 1e-3 * norms[dead].mean()
    assert norms[~dead].max() > 1
    for name in ("grad", "logits", "loss", "lr", "grad_norm", "clip_coef"):
        assert np.isnan(ds[name][0].values).all(), name
    assert (ds.exp_avg[0].values == 0).all()
    assert (ds.exp_avg_sq[0].values == 0).all()
    np.testing.assert_allclose(ds.lr[1:], 1e-3 * (1 - np.arange(STEPS) / STEPS))
    assert ds.lr.dtype == "float64"


def test_all_tokens_start_near_one_point_and_the_dead_move_as_one(gatsby: Path) -> None:
    ds = xr.open_zarr(gatsby)
    start = ds.W[0].values
    assert np.linalg.norm(start.mean(0)) == pytest.approx(1, abs=0.002)
    assert np.linalg.norm(start - start.mean(0), axis=-1).max() < 0.01
    assert (ds.traj.coherence("dead") > 0.99).all()
    assert (ds.traj.coherence("live") < 0.9).all()


def test_info_and_summary_tell_what_happened(gatsby: Path, trajstore_cli: Cli) -> None:
    facts = json.loads(trajstore_cli("info", gatsby, "--json").stdout)
    assert facts["status"] == "complete"
    assert facts["committed_rows"] == STEPS + 1
    assert facts["steps"] == {"first": 0, "last": STEPS}
    assert facts["arrays"]["W"]["native_dtype"] == "bfloat16"
    assert facts["arrays"]["W"]["bytes_native"] == (STEPS + 1) * 128 * 64 * 2
    assert facts["config"]["data"]["target_offset"] == 2
    assert facts["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert facts["optimizer"]["hyperparameters"]["weight_decay"] == 0.01
    assert facts["provenance"]["corpus"]["bytes"] == 265_905
    text = trajstore_cli("info", gatsby).stdout
    assert f"complete, {STEPS + 1} rows, steps 0 to {STEPS}" in text
    text = trajstore_cli("summary", gatsby).stdout
    assert "Loss: 4.8520 at step 1" in text
    assert "NON-ZERO" in text
    json.loads(trajstore_cli("summary", gatsby, "--json").stdout)
