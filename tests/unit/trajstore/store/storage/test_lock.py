from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from disk import stand_in

from trajstore.errors import InvalidArgument, RunExists, RunLocked
from trajstore.store.storage.lock import RunLock, is_written_to, lock_left
from trajstore.store.writing.create import check_file_target, check_target


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run.zarr"


@pytest.fixture
def left(run: Path) -> Path:
    """The file of its lock."""
    return run.with_name(f".{run.name}.lock")


@contextmanager
def forked(run: Path, *, locks: bool) -> Iterator[int]:
    """Let another process, which may hold the lock, run until it is killed."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with RunLock.acquire(run) if locks else nullcontext():
                os.write(here, b"!")
                signal.pause()
        finally:
            os._exit(1)
    os.close(here)
    try:
        assert os.read(there, 1) == b"!"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_another_process_holds_it_until_it_is_killed(run: Path, left: Path) -> None:
    """Whether the run exists does not matter: it is locked before."""
    run.mkdir()
    with RunLock.acquire(run), pytest.raises(RunExists):  # of this process: see acquire
        check_target(run)
    with forked(run, locks=True) as process:
        for overwrite in (False, True):
            with pytest.raises(RunLocked, match=f"process {process} on"):
                check_target(run, overwrite=overwrite)
        with pytest.raises(RunLocked, match=f"process {process} on .* wait for it"):
            RunLock.acquire(run)
    assert json.loads(left.read_text())["process"] == process, "killed, it could not tidy up"
    RunLock.acquire(run).release()
    assert not left.exists()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EROFS, "is read-only"),
        (errno.EACCES, "is read-only"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_RDWR and run.parent in (Path(path), Path(path).parent):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *more, **options)

    stand_in(monkeypatch, open=refuse)  # root may write despite the permissions
    missing = run.parent / "missing" / run.name
    for check, place in (
        (check_target, run), (check_file_target, run), (RunLock.acquire, run),
        (check_target, missing),
    ):  # fmt: skip
        with pytest.raises(
            InvalidArgument, match=f"the folder {run.parent}.*{reason}; choose another"
        ):
            check(place)


def test_a_place_that_is_no_path_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="is not a folder"):
        check_target(Path(__file__) / "run.zarr")
    with pytest.raises(InvalidArgument, match="expected a path such as"):
        check_target("")


def test_another_machines_lock_counts_and_one_without_an_owner_not(run: Path, left: Path) -> None:
    left.write_text(json.dumps({"host": "elsewhere", "process": 7, "started": "2026-01-01"}))
    with pytest.raises(RunLocked, match=f"process 7 on elsewhere.*remove {left}"):
        RunLock.acquire(run)
    for text in ("", "{", "[1]", "\x00\x01"):
        left.write_text(text)  # its owner died before it wrote
        RunLock.acquire(run).release()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_release_keeps_the_lock_of_another(run: Path, by_hand: bool) -> None:
    """A second one, or one after a user removed the file."""
    first = RunLock.acquire(run)
    first.path.unlink() if by_hand else first.release()
    with RunLock.acquire(run):
        first.release()
        with pytest.raises(RunLocked):
            RunLock.acquire(run)


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_a_lock_that_cannot_be_written_or_read_is_not_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        stand_in(patch, **{call: broken})
        with pytest.raises(OSError, match="Input/output"):
            RunLock.acquire(run)
    assert not list(run.parent.iterdir())
    RunLock.acquire(run).release()


def test_a_forked_child_does_not_keep_its_parents_lock(run: Path) -> None:
    lock = RunLock.acquire(run)
    with forked(run, locks=False):
        os.close(lock._descriptor or -1)  # what the system does when the parent is killed
        RunLock.acquire(run).release()
    lock._descriptor = None


def test_whether_somebody_writes_is_reported_and_changes_nothing(run: Path, left: Path) -> None:
    for _ in range(2):
        assert is_written_to(run) is False
        assert lock_left(run) is None
        assert not list(run.parent.iterdir())
        with RunLock.acquire(run):
            assert is_written_to(run) is True
            assert lock_left(run) is None
            with pytest.raises(RunLocked, match=rf"this process itself \({os.getpid()}\)"):
                RunLock.acquire(run)
    left.write_text(json.dumps({"process": 7}))
    assert is_written_to(run) is False, "its process died, and the system let go of it"
    assert lock_left(run) == left
    left.write_text(json.dumps({"host": "elsewhere", "process": 7}))
    assert is_written_to(run) is None
    assert json.loads(left.read_text())["host"] == "elsewhere"


def test_a_look_at_the_lock_delays_a_writer_and_a_lasting_one_is_reported(
    run: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left.write_text("{}")
    looking, waits = os.open(left, os.O_RDONLY), itertools.count(1)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_written_to` does for its check

    def wait(_: float) -> None:
        if next(waits) == 30:  # it was put to sleep while it looked
            os.close(looking)

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(RunLocked, match=r"no process writes to .* checks for writers"):
        RunLock.acquire(run, checks=4)
    with RunLock.acquire(run):
        assert is_written_to(run) is True
    assert next(waits) == 31


def test_without_file_locks_the_lock_file_protects_and_that_is_reported_once(
    run: Path, left: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with RunLock.acquire(run):
        with pytest.raises(RunLocked):
            RunLock.acquire(run)
        assert is_written_to(run) is True
    left.write_text(json.dumps({"host": socket.gethostname(), "process": 2**30}))
    assert is_written_to(run) is False
    RunLock.acquire(run).release()
    other = run.parent / "other"
    other.mkdir()
    for _ in range(2):
        RunLock.acquire(other / run.name).release()
    assert [str(one.message).split(";")[0] for one in recwarn] == [
        f"the file system of {folder} has no file locks (No locks available)"
        for folder in (run.parent, other)
    ]
