"""Addresses: what is like a path, the requests that are conditional, and locks."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from object_stores import Answers, faulty, s3_server, serving, to_s3

from trajstore import RunWriter, open_run
from trajstore.errors import ObjectStoreError, RunLocked
from trajstore.store.storage.atomic import metadata_in, opened
from trajstore.store.storage.lock import RemoteLock, RunLock, is_written_to
from trajstore.store.storage.remote_path import (
    ObjectReplaced,
    ReadStore,
    RemotePath,
    local_file,
    location,
)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> RemotePath:
    found = location(f"memory://paths/{request.node.name}/run.zarr/")
    assert isinstance(found, RemotePath)
    return found


def test_parts_of_an_address() -> None:
    path = location("s3://bucket/a/b.zarr")
    assert str(path) == "s3://bucket/a/b.zarr"
    parts = path.parent, path.with_name(".b"), path / "W/c.0" / "x"
    told = ["s3://bucket/a", "s3://bucket/a/.b", "s3://bucket/a/b.zarr/W/c.0/x"]
    assert (path.name, [*map(str, parts)]) == ("b.zarr", told)
    assert location(path) is path
    assert location("a/b") == Path("a/b")
    assert location("~/a.zarr") == location(Path("~/a.zarr")) == Path.home() / "a.zarr"
    with pytest.raises(TypeError):  # it would be a folder ``s3:``
        os.fspath(path)  # type: ignore[arg-type]


def test_objects_are_written_read_and_listed(place: RemotePath) -> None:
    assert not place.exists()
    assert place.stat() is None
    (place / "zarr.json").write_bytes(b"root")
    (place / "W/c.0").write_bytes(b"0123456789")
    place.with_name("run.zarr2").write_bytes(b"another")
    assert place.exists()
    assert place.is_dir()
    assert [path.name for path in place.iterdir()] == ["W", "zarr.json"]
    assert place.below() == {place / "W/c.0": 10, place / "zarr.json": 4}
    chunk = place / "W/c.0"
    assert [chunk.end_and_facts(length)[0] for length in (3, 99)] == [b"789", b"0123456789"]
    with opened(chunk) as file:
        assert (file.end(2), file.read(3, 4), file.read(8, 9)) == (b"89", b"3456", b"89")
    with local_file(chunk) as local:
        assert local.read_bytes() == b"0123456789"
    assert not local.exists()
    chunk.unlink()
    chunk.unlink()
    with pytest.raises(FileNotFoundError):
        chunk.read_bytes()
    place.remove_below()
    assert not place.exists()
    assert place.with_name("run.zarr2").exists()


def test_a_write_with_a_condition_fails_if_the_object_changed(place: RemotePath) -> None:
    first = place.write_bytes(b"one", new=True)
    with pytest.raises(FileExistsError):
        place.write_bytes(b"two", new=True)
    second = place.write_bytes(b"two", instead_of=first)
    with pytest.raises(FileExistsError):
        place.write_bytes(b"three", instead_of=first)
    place.write_bytes(b"three", instead_of=second)
    assert place.read_bytes() == b"three"


def test_a_conditional_write_whose_answer_was_lost_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is carried out, and refused when it is tried again; an object may be empty."""
    lost = iter(["lose"])

    def fault(method: str, path: str, number: int) -> str | None:
        return next(lost, None) if method == "PUT" else None

    with s3_server() as s3, faulty(s3, fault) as (address, seen), to_s3(address, monkeypatch):
        place = location("s3://bucket/object")
        assert isinstance(place, RemotePath)
        tag = place.write_bytes(b"one", new=True)
        assert place.write_bytes(b"two", instead_of=tag) != tag
        assert sum(request.startswith("PUT") for request in seen) == 3
        place.write_bytes(b"")
        assert place.end_and_facts(5)[0] == b""


@pytest.mark.parametrize("replaced", [0, 1, 9])
def test_what_is_replaced_meanwhile_is_read_again_once(replaced: int) -> None:
    """By a server that knows no end of a file; another file is there after each two requests."""
    requests: list[str] = []

    class Handler(Answers):
        def do_GET(self) -> None:
            requests.append(self.command)
            tag = f'"{min(len(requests), 2 * replaced + 1)}"'
            is_part = self.headers.get("Range", "").startswith("bytes=7-")
            is_same = self.headers.get("If-Match", tag) == tag
            data = (b"789" if is_part else b"0123456789") if is_same else b""
            headers = {"Content-Range": "bytes 7-9/10", "ETag": tag}
            self.answer((206 if is_part else 200) if is_same else 412, headers, data)

        do_HEAD = do_GET  # noqa: N815

    with serving(Handler) as address:
        place = location(f"{address}/object")
        assert isinstance(place, RemotePath)
        if replaced == 9:
            with pytest.raises(ObjectReplaced, match=f"{address}/object was replaced"):
                place.end_and_facts(3)
        else:
            assert place.end_and_facts(3)[0] == b"789"
    again = ["HEAD", "GET"] if replaced else []
    assert requests == ["GET", "HEAD", "GET", *again]


@pytest.mark.parametrize(("cut", "whole"), [(1, True), (2, False)])
def test_a_metadata_that_changes_under_way_is_read_again_once(cut: int, whole: bool) -> None:
    """An answer that is cut is gone on with; if that is another object's, it is begun again."""
    requests: list[str] = []

    class Handler(Answers):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            requests.append(asked or "whole")
            headers = {"ETag": f'"{len(requests)}"'}
            if asked:
                self.answer(206, headers | {"Content-Range": "bytes 4-9/10"}, b"456789")
                return
            self.close_connection = is_cut = requests.count("whole") <= cut
            self.answer(200, headers, b"0123" if is_cut else b"0123456789", 10)

    with serving(Handler) as address:
        place = location(f"{address}/zarr.json")
        if whole:
            assert metadata_in(place) == b"0123456789"
        else:
            with pytest.raises(ObjectStoreError, match=f"{address}/zarr.json: "):
                metadata_in(place)
    assert requests.count("whole") == 2


def test_a_refusal_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty("", lambda *_: "403") as (address, seen), to_s3(address, monkeypatch):
        place = location("s3://bucket/object")
        assert isinstance(place, RemotePath)
        with pytest.raises(ObjectStoreError, match="s3://bucket/object: "):
            place.end_and_facts(5)
        assert len(seen) == 1
        with pytest.raises(ObjectStoreError, match=r"s3://bucket/W/zarr\.json: "):
            zarr.open_array(
                ReadStore(place.store, root=place.root), path="W", mode="r", zarr_format=3
            )


# Locks: who holds one, who takes one over, and who finds that out.


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
    told = r"process 1 on elsewhere, which .* expires in 1[12]\d seconds, .* remove memory://paths/"
    with pytest.raises(RunLocked, match=told):
        RunLock.acquire(place)
    assert is_written_to(place) is True
    RemoteLock.acquire(place, dead_after=timedelta(seconds=-1)).release()
    # One of a dead process of this machine is void at once.
    owned_by(place, host=socket.gethostname(), process=2**40)
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


@pytest.mark.parametrize("writes_late", [False, True])
def test_a_writer_that_was_suspended_until_its_lock_was_taken_over_changes_nothing(
    place: RemotePath, writes_late: bool
) -> None:
    """It uploads nothing; an upload that arrives later is replaced."""
    options: Any = {"variables": {"W": "float32"}, "block_rows": 1, "commit_every": None}
    first = RunWriter.create(place, token=[0, 1], hidden=2, **options)
    first.append(0, W=np.ones((2, 2), "f4"))
    while first.committed_rows < 1:
        pass
    RemoteLock.acquire(place, dead_after=timedelta(seconds=-1)).release()
    with RunWriter.resume(place) as second:
        if writes_late:
            (place / "W/c.1.0.0").write_bytes(b"from the suspended writer")
        before = place.below()
        with pytest.raises(RunLocked, match="took over its lock"):  # noqa: PT012
            for step in range(1, 100):
                first.append(step, W=np.full((2, 2), 3, "f4"))
            first.close()
        assert place.below() == before
        second.append(1, W=np.full((2, 2), 2, "f4"))
    ds = open_run(place)
    assert ds.W[:, 0, 0].values.tolist() == [1, 2]
    assert ds.attrs["status"] == "complete"
    with pytest.raises(RunLocked, match="took over its lock"):
        first.close()
