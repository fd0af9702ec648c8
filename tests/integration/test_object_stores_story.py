"""A training that goes to S3, is read meanwhile, killed, resumed and verified.

It takes minutes: `make objects` runs it, with as many steps as `TRAJSTORE_OBJECTS` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import xarray as xr
from object_stores import faulty, s3_server, to_s3
from zarr.storage import ObjectStore

from trajstore import open_run
from trajstore.store.storage.remote_path import RemotePath, location

STEPS = int(os.environ.get("TRAJSTORE_OBJECTS", "0"))
KINDS = ("500", "503", "cut", "lose", "slow")

from_url = pytest.importorskip("obstore.store").from_url

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not STEPS, reason="takes minutes: make objects"),
]


def command(*words: object) -> list[str]:
    start = "from trajstore.cli.start import main; main()"
    return [sys.executable, "-c", start, *map(str, words)]


def recording(target: object) -> list[str]:
    options = ("--preset", "gatsby", "--steps", STEPS, "--set", "recording.commit_every=2")
    return command("record", *options, "-o", target)


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def started(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    with subprocess.Popen(words, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def rows_there(place: RemotePath, truth: xr.Dataset) -> int:
    """Rows that plain xarray sees, by zarr's own way to a store; the last must be what it was."""
    if not (place / "zarr.json").exists():
        return 0
    store = ObjectStore(from_url(str(place), client_options={"allow_http": True}), read_only=True)
    far = xr.open_zarr(store, chunks=None)
    if far.sizes["step"]:
        xr.testing.assert_equal(far.W[-1].compute(), truth.W[far.sizes["step"] - 1].compute())
    return far.sizes["step"]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    """The same training, recorded to a folder, without an interruption."""
    here = tmp_path_factory.mktemp("local") / "run.zarr"
    run(recording(here))
    return open_run(here, chunks=None)


@pytest.mark.parametrize("faults", [False, True])
def test_a_training_at_s3_survives_its_death(
    truth: xr.Dataset, faults: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket/faults-{faults}/run.zarr"  # one memory serves all servers of a process

    def fault(method: str, path: str, number: int) -> str | None:
        return KINDS[number // 8 % len(KINDS)] if faults and number % 8 == 1 else None

    with s3_server() as s3, faulty(s3, fault) as (address, seen), to_s3(address, monkeypatch):
        place = location(url)
        assert isinstance(place, RemotePath)
        looks, rows = 0, 0
        with started(recording(url), stderr=subprocess.DEVNULL) as recorder:
            while rows < STEPS // 3:
                assert recorder.poll() is None, "it ended before it was killed"
                rows, looks = rows_there(place, truth), looks + 1
                time.sleep(0.2)  # between two looks, as a reader has them beside a training
            recorder.kill()
        killed = open_run(url).sizes["step"]
        assert STEPS // 3 <= killed <= STEPS
        run(command("verify", url))
        run([*recording(url), "--resume"])
        told = run(command("verify", url))
        assert "sound" in told
        far = open_run(url)
        assert far.attrs["status"] == "complete"
        assert far.attrs["content_digest"] == truth.attrs["content_digest"]
        print(
            f"\nfaults {faults}: {looks} looks before the kill at {killed - 1} steps of {STEPS}, "
            f"{len(seen)} requests; {told.strip()}"
        )
