"""Runs in an object store, through a server of S3 and what may happen on the way to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import Cli
from crashing import check_rows, create, extend, recorded, row
from example_run import write_example_run
from object_stores import copied, faulty, s3_server, to_s3, web_server

from trajstore import RunWriter, open_run, verify
from trajstore.analysis.results.report_page import write_report
from trajstore.errors import InvalidArgument, ObjectStoreError, RunNotFound
from trajstore.store.storage import remote_path
from trajstore.store.storage.remote_path import location

KINDS = ("500", "503", "cut", "lose", "slow")
ROWS = 21
URL = "s3://bucket/runs/run.zarr"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("local") / "run.zarr", ROWS)


def check_same_there(address: str, local: Path) -> None:
    recorded(location(address), 9, overwrite=True)
    with RunWriter.resume(address, rows=6) as run:
        extend(run, ROWS)
    here, far = open_run(local), open_run(address)
    assert far.attrs["content_digest"] == here.attrs["content_digest"]
    xr.testing.assert_equal(far.load(), here.load())
    xr.testing.assert_equal(open_run(address, chunks=None).load(), here)
    assert verify(address).clean
    assert {path.name for path in location(address).parent.iterdir()} == {"run.zarr"}  # no lock


def test_a_run_is_the_same_there(local: Path) -> None:
    check_same_there("memory://same/runs/run.zarr", local)


@pytest.mark.nightly
def test_what_fails_for_a_while_is_tried_again(
    s3: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the server, cut connections, answers that are lost, of one request in four."""

    def fault(method: str, path: str, number: int) -> str | None:
        return KINDS[number // 4 % len(KINDS)] if number % 4 == 1 else None

    with faulty(s3, fault) as (address, seen), to_s3(address, monkeypatch):
        check_same_there(URL, local)
    assert len(seen) > 100


PROGRAM = f"""
import crashing
from trajstore.store.storage.remote_path import location
crashing.extend(crashing.create(location({URL!r}), overwrite=True), 10**6)
"""


@pytest.mark.nightly
def test_a_recording_that_is_killed_beside_a_reader_goes_on(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with to_s3(s3, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", paths)
        with subprocess.Popen([sys.executable, "-c", PROGRAM]) as recorder:
            try:
                rows = 0
                while rows < 8:
                    assert recorder.poll() is None, "it ended before it was killed"
                    with suppress(RunNotFound):
                        rows = open_run(URL).sizes["step"]
            finally:
                recorder.kill()
        rows = open_run(URL).sizes["step"]
        with RunWriter.resume(URL) as run:
            assert run.rows == rows
            extend(run, rows + 5)
        assert verify(URL).clean
        check_rows(open_run(URL).load())


@pytest.mark.nightly
@pytest.mark.parametrize("status", ["403", "500", "503"])
def test_a_server_that_refuses_ends_a_recording_and_loses_no_commit(
    s3: str, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """At once, or after all retries, of which there are few here."""
    monkeypatch.setitem(remote_path.RETRIES, "max_retries", 1)
    refuses = False

    def until_it_fails() -> None:
        nonlocal refuses
        with create(location(URL), overwrite=True) as run:
            for stop in range(1, 101):
                refuses = run.committed_rows >= 8
                extend(run, stop)

    with (
        faulty(s3, lambda *request: status if refuses else None) as (address, _),
        to_s3(address, monkeypatch),
    ):
        with pytest.raises(ObjectStoreError, match=rf"^s3://bucket/runs/\.?run\.zarr.*{status}"):
            until_it_fails()
        refuses = False
        far = open_run(URL).load()
        committed = far.sizes["step"]
        assert committed >= 8
        assert committed % 4 == 0
        check_rows(far)
        with RunWriter.resume(URL) as run:  # though its lock could not be removed
            extend(run, committed + 1)
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
            create(location("hf://datasets/user/name/mine.zarr"))


def test_steps_that_leave_some_out_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with create(path) as run:
        for step in (0, 1, 2, 5, *range(10, 30)):
            run.append(step, **row(step))
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


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("here") / "here.zarr"
    write_example_run(path)
    np.save(path.with_name("dead_mask.npy"), np.arange(128) > 99)
    return path


@pytest.mark.parametrize(
    "line",
    [
        "analyze {here} freeze -o memory://out/freeze.zarr",
        "plot {here} loss -o memory://out/loss.png",
        "report {here} -o memory://out/page.html",
        "export {here} -o memory://out/a.safetensors",
        "import memory://out/a.safetensors -o a.zarr",
        "annotate memory://here/run.zarr --masks {here.parent}/dead_mask.npy",
    ],
)
def test_a_command_that_needs_a_folder_says_so(line: str, here: Path, trajstore_cli: Cli) -> None:
    copied(here, "memory://here/run.zarr")
    result = trajstore_cli(*line.format(here=here).split(), rc=2)
    told = "copy it to a new address" if "annotate" in line else "only runs can be at addresses"
    assert told in " ".join(result.output.split())
    assert "://" in result.output


def test_commands_work_on_an_address_and_sizes_may_be_unknown(
    here: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    with web_server(here.parent) as (server, _):
        run = f"{server}/here.zarr"
        assert "unknown" in trajstore_cli("info", run).output
        facts = json.loads(trajstore_cli("info", "--json", run).output)
        arrays = facts["arrays"].values()
        for fact in ("bytes_on_disk", "ratio"):
            assert {facts[fact], *(array[fact] for array in arrays)} == {None}
        assert facts["files"] is None
        page = write_report(run, tmp_path / "run.html", check=True, figures=[])
        assert "<td>unknown</td>" in page.read_text()
        assert "the runs are identical" in trajstore_cli("compare", run, here).output
        trajstore_cli("export", run, "-o", tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").exists()
