"""Locks in an object store: who holds one, who takes one over, and who finds that out."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from trajstore import RunWriter, open_run
from trajstore.errors import RunLocked
from trajstore.store.storage.lock import RemoteLock, RunLock, is_written_to
from trajstore.store.storage.remote_path import RemotePath, location

pytest.importorskip("obstore")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> RemotePath:
    found = location(f"memory://locks/{request.node.name}.zarr")
    assert isinstance(found, RemotePath)
    return found


def owned_by(place: RemotePath, **facts: Any) -> None:
    owner = {"host": "elsewhere", "process": 1, "started": "then", "writer": "1"} | facts
    place.with_name(f".{place.name}.lock").write_bytes(json.dumps(owner).encode())


def test_one_writer_at_a_time(place: RemotePath) -> None:
    assert is_written_to(place) is False
    with RunLock.acquire(place) as lock:
        assert is_written_to(place) is True
        with pytest.raises(RunLocked, match="being written to by process"):
            RunLock.acquire(place)
    lock.release()
    assert is_written_to(place) is False
    RunLock.acquire(place).release()


def test_a_lock_of_another_machine_is_void_when_it_is_not_renewed(place: RemotePath) -> None:
    owned_by(place)
    told = r"process 1 on elsewhere, which .* expires in 1[12]\d seconds, .* remove memory://locks/"
    with pytest.raises(RunLocked, match=told):
        RunLock.acquire(place)
    assert is_written_to(place) is True
    RemoteLock.acquire(place, dead_after=timedelta(seconds=-1)).release()


def test_a_lock_of_a_dead_process_of_this_machine_is_void(
    place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    owned_by(place, host="here", process=2**40)
    assert is_written_to(place) is False
    RunLock.acquire(place).release()


def test_a_lock_is_renewed(place: RemotePath) -> None:
    with RemoteLock.acquire(place, renew_every=0.001):
        lock = place.with_name(f".{place.name}.lock")
        first = lock.read_bytes()
        while lock.read_bytes() == first:
            pass
        assert "renewed" in json.loads(lock.read_bytes())
    assert not lock.exists()


@pytest.fixture
def two_writers(place: RemotePath) -> Iterator[tuple[RunWriter, RunWriter]]:
    """A writer that was suspended after a row, and the one that took over its lock."""
    options: Any = {"variables": {"W": "float32"}, "block_rows": 1, "commit_every": None}
    first = RunWriter.create(place, token=[0, 1], hidden=2, **options)
    first.append(0, W=np.ones((2, 2), "f4"))
    while first.committed_rows < 1:
        pass
    RemoteLock.acquire(place, dead_after=timedelta(seconds=-1)).release()
    second = RunWriter.resume(place)
    yield first, second
    second.close()
    assert open_run(place).W[1, 0, 0] == 2
    assert open_run(place).attrs["status"] == "complete"
    with pytest.raises(RunLocked, match="took over its lock"):
        first.close()


def test_a_writer_without_its_lock_uploads_nothing(
    place: RemotePath, two_writers: tuple[RunWriter, RunWriter]
) -> None:
    first, second = two_writers
    before = place.below()
    with pytest.raises(RunLocked, match="took over its lock"):
        late(first, np.full((2, 2), 3, "f4"))
    assert place.below() == before
    second.append(1, W=np.full((2, 2), 2, "f4"))


def test_an_upload_that_arrives_after_the_lock_was_taken_over_is_replaced(
    place: RemotePath, two_writers: tuple[RunWriter, RunWriter]
) -> None:
    (place / "W/c.1.0.0").write_bytes(b"from the suspended writer")
    two_writers[1].append(1, W=np.full((2, 2), 2, "f4"))


def late(run: RunWriter, value: Any) -> None:
    for step in range(1, 100):
        run.append(step, W=value)
    run.close()
