"""Runs in an object store, through a server of S3 and what may happen on the way to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from object_stores import faulty, s3_server, to_s3, web_server

from trajstore import RunWriter, open_run, verify
from trajstore.errors import InvalidArgument, ObjectStoreError, RunNotFound
from trajstore.store.storage import remote_path
from trajstore.store.storage.remote_path import location

pytest.importorskip("obstore")

ROWS = 21
TOKENS, HIDDEN = 40, 8
URL = "s3://bucket/runs/run.zarr"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


def row(step: int) -> dict[str, Any]:
    values = np.random.default_rng(step).integers(-3, 4, (TOKENS, HIDDEN))
    return {"step": step, "W": values.astype("f4"), "loss": np.float32(step)}


def create(place: Any) -> RunWriter:
    return RunWriter.create(
        place,
        token=np.arange(TOKENS),
        hidden=HIDDEN,
        variables={"W": "bfloat16", "loss": "float32"},
        block_rows=4,
        overwrite=True,
    )


def record(place: Any, rows: int = ROWS) -> None:
    with create(place) as run:
        for step in range(rows):
            run.append(**row(step))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "run.zarr"
    record(path)
    return path


def test_a_run_is_the_same_there(s3: str, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with to_s3(s3, monkeypatch):
        record(URL, 9)
        with RunWriter.resume(URL, rows=6) as run:
            for step in range(6, ROWS):
                run.append(**row(step))
        far = open_run(URL)
        assert far.attrs["content_digest"] == open_run(local).attrs["content_digest"]
        for chunks in ("blocks", None):
            xr.testing.assert_equal(
                open_run(URL, chunks=chunks).load(),  # type: ignore[arg-type]
                open_run(local).load(),
            )
        assert verify(URL).clean
        assert {path.name for path in location(URL).parent.iterdir()} == {"run.zarr"}  # no lock


@pytest.mark.nightly
def test_what_fails_for_a_while_is_tried_again(
    s3: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the server, cut connections, answers that are lost, of one request in four."""
    kinds = ["500", "503", "cut", "lose", "slow"]

    def fault(method: str, path: str, number: int) -> str | None:
        return kinds[number // 4 % len(kinds)] if number % 4 == 1 else None

    with faulty(s3, fault) as (address, seen), to_s3(address, monkeypatch):
        record(URL)
        with RunWriter.resume(URL):
            pass
        far = open_run(URL)
        assert far.attrs["content_digest"] == open_run(local).attrs["content_digest"]
        xr.testing.assert_equal(far.load(), open_run(local).load())
    assert len(seen) > 100


@pytest.mark.nightly
def test_a_long_outage_ends_a_recording_and_loses_no_commit(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=1)}
    monkeypatch.setattr(remote_path, "RETRIES", retries)
    is_out = False

    def until_it_fails() -> None:
        nonlocal is_out
        with create(URL) as run:
            for step in range(100):
                is_out = run.committed_rows >= 8
                run.append(**row(step))

    with (
        faulty(s3, lambda *request: "503" if is_out else None) as (address, _),
        to_s3(address, monkeypatch),
    ):
        with pytest.raises(ObjectStoreError, match=r"^s3://bucket/runs/\.?run\.zarr.*503"):
            until_it_fails()
        is_out = False
        far = open_run(URL).load()
        committed = far.sizes["step"]
        assert committed >= 8
        assert committed % 4 == 0
        for step in range(committed):
            np.testing.assert_array_equal(far.W[step], row(step)["W"])
        with RunWriter.resume(URL) as run:  # though its lock could not be removed
            run.append(**row(committed))
        assert open_run(URL).sizes["step"] == committed + 1


def test_a_run_on_a_hub_is_read_in_place(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("datasets/user/name/resolve/main", "user/name/resolve/refs%2Fpr%2F1"):
        shutil.copytree(local, tmp_path / name / "runs" / "run.zarr")
    here = open_run(local, chunks=None)
    with web_server(tmp_path, token="secret") as (address, seen):
        monkeypatch.setenv("HF_ENDPOINT", f"{address}/")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with pytest.raises(ObjectStoreError, match=r"^hf://datasets/user/name/.*401"):
            verify("hf://datasets/user/name/runs/run.zarr")
        remote_path._store.cache_clear()
        monkeypatch.setenv("HF_TOKEN", "secret")
        seen.clear()
        far = open_run("hf://datasets/user/name/runs/run.zarr", chunks=None)
        assert len(seen) == 4, seen
        xr.testing.assert_identical(far, here)
        assert verify("hf://user/name@refs%2Fpr%2F1/runs/run.zarr").clean
        with pytest.raises(RunNotFound, match="there is no run at hf://user/name/run"):
            open_run("hf://user/name/run.zarr")
        with pytest.raises(InvalidArgument, match="web servers are read-only"):
            record("hf://datasets/user/name/mine.zarr")


def test_steps_that_leave_some_out_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with create(path) as run:
        for step in (0, 1, 2, 5, *range(10, 30)):
            run.append(**row(step))
    with web_server(tmp_path) as (address, seen):
        far = open_run(f"{address}/run.zarr", chunks=None)
        assert len(seen) == 4 + 6, seen  # the ends were looked at, in vain
        xr.testing.assert_identical(far.step, open_run(path).step)


def test_a_run_on_a_web_server_is_opened_with_few_requests(local: Path) -> None:
    with web_server(local.parent) as (address, seen):
        far = open_run(f"{address}/run.zarr", chunks=None)
        blocks = -(-ROWS // 4)
        assert len(seen) == 4, seen  # root, tokens, and the steps of the first and last block
        seen.clear()
        history = far.W.sel(token=7).values
        assert len(seen) == blocks, seen
        here = open_run(local, chunks=None)
        np.testing.assert_array_equal(history, here.W.sel(token=7))
        xr.testing.assert_identical(far, here)
        assert far.step.encoding == here.step.encoding
        with pytest.raises(ObjectStoreError, match="a web server cannot list objects"):
            location(f"{address}/run.zarr").below()  # type: ignore[union-attr]
