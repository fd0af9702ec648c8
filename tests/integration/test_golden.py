"""Stores that an earlier build of the same format wrote are read, bit for bit.

Release 0.3.0 wrote release-0.3.0.zarr: record --preset gatsby --steps 6 --threads 1 --set
model.hidden=4 --set model.layers=1 --set model.heads=1 --set model.context=16
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trajstore
from trajstore.schema import FORMAT
from trajstore.values.native_types import native_type, widen

DATA = Path(__file__).parents[1] / "data"

_spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


FINGERPRINTS = {
    "delta": "31451b6087303a6b3350cda1da930f5a39c234d7e8542d22d70c0016c19747c6",
    "delta-large": "551445c84adf9bcb14363539d17f7728c1074d0f9ad2e53ef18f2a8706ab57eb",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
@pytest.mark.parametrize("opener", [trajstore.open_run, xr.open_zarr])
def test_a_golden_store_reads_as_it_was_written(name: str, opener: object) -> None:
    ds = opener(DATA / f"format3-{name}.zarr")
    assert ds.attrs["trajstore_format"] == FORMAT
    assert ds.attrs["status"] == "complete"
    assert ds.step.values.tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert ds.token.values.tolist() == [2, 3, 5, 7]
    assert ds.is_dead.values.tolist() == [True, False, False, True]
    assert ds.token_text.values.tolist() == ["a", "b", "é", "\\n"]
    for variable, dtype in golden.TYPES.items():
        expected = widen(golden.golden_bits(variable), native_type(dtype))
        assert ds[variable].attrs["native_dtype"] == dtype
        assert ds[variable].values.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_golden_store_is_sound(name: str) -> None:
    """Labels, content digest and fingerprint are made again from what is stored."""
    found = trajstore.verify(DATA / f"format3-{name}.zarr")
    assert found.clean, found.problems
    attributes = trajstore.open_run(DATA / f"format3-{name}.zarr").attrs
    assert attributes["fingerprint"] == FINGERPRINTS[name]


@pytest.mark.torch
def test_a_run_of_the_last_release_is_opened_verified_exported_and_resumed(tmp_path: Path) -> None:
    trainers = pytest.importorskip("trajstore.trainers", exc_type=ImportError)
    from safetensors.torch import load_file

    for kind in ("zarr", "ckpt"):
        shutil.copytree(DATA / f"release-0.3.0.{kind}", tmp_path / f"run.{kind}")
    run = tmp_path / "run.zarr"
    before = trajstore.open_run(run).load()
    assert before.attrs["provenance"]["trajstore"] == "0.3.0"
    assert trajstore.verify(run).clean
    assert trainers.replay(run).clean
    trajstore.export(run, tmp_path / "run.safetensors")
    exported = load_file(tmp_path / "run.safetensors")["W"].float()
    assert exported.numpy().tobytes() == before.W.values.tobytes()
    config = trainers.recorded_config(run).with_values(["training.steps=8"])
    trainers.record(config, run, resume=True, threads=1)
    after = trajstore.open_run(run)
    assert after.step.values.tolist() == list(range(9))
    assert after.isel(step=slice(7)).W.values.tobytes() == before.W.values.tobytes()
    assert trajstore.verify(run).clean
    assert trainers.replay(run).clean
