"""Every version reads the runs of all earlier ones; tools/write_golden_runs.py wrote them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import xarray as xr
from bits_and_calls import nightly_but
from golden_runs import DATA, LOOPS, digests, train, unpack

import trajstore
from trajstore.schema import FORMAT

WRITTEN = {
    (archive.stem.removeprefix("runs-"), run): written
    for archive in sorted(DATA.glob("runs-*.zip"))
    for run, written in json.loads(zipfile.ZipFile(archive).read("digests.json")).items()
}


QUICK = {  # each form of storage once
    ("0.3.0", "delta.zarr"), ("0.3.0", "parts.zarr"), ("0.3.0", "compact.zarr"),
    ("0.4.0", "everything-compact.zarr"), ("0.4.0", "sharded.zarr"),
}  # fmt: skip


@pytest.mark.parametrize("key", nightly_but(WRITTEN, *QUICK), ids="-".join)
def test_a_run_is_read_verified_and_exported(tmp_path: Path, key: tuple[str, str]) -> None:
    version, name = key
    written = WRITTEN[version, name]
    run = unpack(tmp_path, version, name)
    opened = trajstore.open_run(run, chunks=None)
    assert opened.attrs["trajstore_format"] == FORMAT
    assert opened.attrs["fingerprint"] == written["fingerprint"]
    assert digests(opened) == written["values"]
    assert digests(xr.open_zarr(run, chunks=None)) == written["values"]
    found = trajstore.verify(run)
    assert found.clean, found.problems
    trajstore.export(run, tmp_path / "plain.zarr", format="zarr")
    exported = digests(xr.open_zarr(tmp_path / "plain.zarr", chunks=None))
    assert exported == written["values"]


RESUMED = ("matrix", "compact", "everything", "fork", "keyframes", *LOOPS)


@pytest.mark.torch
@pytest.mark.parametrize(
    "key",
    nightly_but(
        [key for key in WRITTEN if key[1].removesuffix(".zarr") in RESUMED],
        ("0.3.0", "matrix.zarr"),
    ),
    ids="-".join,
)
def test_a_run_is_resumed(tmp_path: Path, key: tuple[str, str]) -> None:
    version, name = key
    trainers = pytest.importorskip("trajstore.trainers", exc_type=ImportError)
    kind = name.removesuffix(".zarr")
    run = unpack(tmp_path, version, name)
    rows = trajstore.open_run(run).sizes["step"]
    if kind in LOOPS:
        train(run, LOOPS[kind], range(rows, rows + 2), resume=True)
    else:
        config = trainers.recorded_config(run)
        steps = config.training.steps + 2
        trainers.record(config.with_values([f"training.steps={steps}"]), run, resume=True)
    after = trajstore.open_run(run, chunks=None)
    assert after.sizes["step"] == rows + 2
    first = digests(after.isel(step=slice(rows)))
    assert first == WRITTEN[version, name]["values"]
    assert trajstore.verify(run).clean


KEYFRAMES = [version for version, name in WRITTEN if name == "keyframes.zarr"]


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("version", KEYFRAMES)
def test_a_run_with_keyframes_is_developed(tmp_path: Path, version: str) -> None:
    """Another processor may give other bits."""
    trainers = pytest.importorskip("trajstore.trainers", exc_type=ImportError)
    run = unpack(tmp_path, version, "keyframes.zarr")
    part = tmp_path / "part.zarr"
    done = trainers.develop_run(run, part, steps="6:8", allow_different=True)
    assert (done.steps, done.keyframe) == (2, 4)
    assert {"W", "params", "params_grad"} <= {*trajstore.open_run(part).data_vars}
    W = trainers.model_at(run, 4).lm_head.weight.detach().float().numpy()
    assert (trajstore.open_run(run).W.sel(step=4).values == W).all()
    assert trainers.optimizer_state_at(run, 8)["state"]
    proof = trainers.prove(run)
    assert (proof.steps, proof.unproven) == (10, ())
