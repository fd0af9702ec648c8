"""`record`, `presets` and `fetch` as a user types them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SMALL = [
    "--set", "model.context=16", "--set", "training.batch_size=2", "--set", "training.device=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJSTORE_CACHE", str(tmp_path / "cache"))


SMALL_ONES = ("gatsby", "gatsby-gradients", "gatsby-adam")
PRESETS = (
    *SMALL_ONES, "wordybird-1", "wordybird-1b", "duckling", "flannel", "thimble", "crucible",
)  # fmt: skip


def test_presets_are_listed_and_printed_as_files(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    listed = trajstore_cli("presets").stdout.splitlines()
    assert {line.split()[0] for line in listed} == set(PRESETS)
    file = tmp_path / "mine.toml"
    file.write_text(trajstore_cli("presets", "gatsby-adam").stdout)
    one, other = (
        trajstore_cli("record", *source, "--dry-run").stdout
        for source in (("--preset", "gatsby-adam"), ("--config", file))
    )
    assert one == other


@pytest.mark.parametrize(
    "name", nightly_but([name for name in PRESETS if name != "wordybird-1b"], *SMALL_ONES)
)
def test_a_preset_records_without_files(
    name: str, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    done = trajstore_cli("record", "--preset", name, "--steps", 2, *SMALL, "-o", path)
    assert "embedded" in done.stderr
    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == [0, 1, 2]
    vocabulary = ds.attrs["config"]["model"]["vocab_size"]
    assert abs(ds.loss.values[1] - np.log(vocabulary)) < 0.1
    assert (np.abs(ds.grad.values[1, ds.is_dead.values]).max(axis=-1) > 0).all()


def test_a_dry_run_says_what_record_then_does(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("101 7 32\n")
    call = [
        "--preset", "gatsby", "--steps", 10, "--set", "recording.every=4",
        "--set", f"recording.tokens={tokens}", "--set", "recording.block_rows=2",
        "--set", "recording.variables=matrix,W_ulp_l1", *SMALL,
    ]  # fmt: skip
    path = tmp_path / "run.zarr"
    planned = trajstore_cli("record", *call, "--dry-run", "-o", path).stdout
    assert not path.exists()
    trajstore_cli("record", *call, "-o", path)
    happened = json.loads(trajstore_cli("info", path, "--json").stdout)
    assert happened["committed_rows"] == 4
    assert planned.startswith("4 rows of 3 tokens: steps 0 to 10, every 4;")
    assert f"; {happened['files']} files." in planned
    for tier in ("weights", "weights+grads", "matrix", "norms", "everything"):
        assert f"  {tier} " in planned
    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == [0, 4, 8, 10]
    assert ds.token.values.tolist() == [7, 32, 101]


def test_a_device_that_is_not_there_is_refused(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    missing = "mps" if torch.cuda.is_available() else "cuda"  # no machine has both
    call = ["record", "--preset", "gatsby", "--device", missing, "-o", tmp_path / "run.zarr"]
    assert "torch finds no such device" in trajstore_cli(*call, rc=2).stderr


def test_a_recording_ends_with_its_pace_and_what_to_type_next(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    call = ["record", "--preset", "gatsby", "--steps", 3, *SMALL, "-o", tmp_path / "my run.zarr"]
    said = trajstore_cli(*call).stdout.splitlines()
    assert re.match(r"Recorded 4 rows to .* in [\d.]+ m?s \([\d.e+]+ steps per second\): ", said[0])
    typed = [line.split("   ")[0] for line in said[2:]]
    assert len(typed) == 3
    for command in typed[:2]:
        trajstore_cli(*shlex.split(command)[1:])


@pytest.mark.nightly
def test_a_closed_output_does_not_end_a_training(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    readable, writable = os.pipe()
    os.close(readable)
    command = Path(sys.executable).with_name("trajstore")
    call = [command, "record", "--preset", "gatsby", "--steps", "3", *SMALL, "-o", path]
    done = subprocess.run(call, stderr=writable, stdout=subprocess.PIPE, text=True, timeout=300)
    os.close(writable)
    assert done.returncode == 0
    assert "Recorded 4 rows" in done.stdout


def test_advice_is_given_before_while_and_after(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    call = ["--preset", "gatsby", "--steps", 2, *SMALL]
    said = "Note: exp_avg_sq can never decay: 0.999·v rounds back to v for 100 % of bfloat16 values"
    path = tmp_path / "run.zarr"
    assert said in trajstore_cli("record", *call, "--dry-run").stdout
    assert trajstore_cli("record", *call, "-o", path).stderr.count(said) == 1
    assert said in trajstore_cli("info", path).stdout
    sound = ["--set", "model.dtype=float32", "-o", tmp_path / "sound.zarr"]
    assert "Note" not in trajstore_cli("record", *call, *sound).stderr
