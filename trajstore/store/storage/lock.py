"""One writer at a time, in a folder or an object store.

The lock of a run is a file or object next to it, ``.NAME.zarr.lock``. Its content (host, process,
start) appears in the message that a second writer gets.

On a file, the writer holds the system's file lock until its process ends, for whatever reason. The
content also protects the run on file systems that several machines share without sharing locks.

An object store has no file locks. There the object is created only if it does not exist, and its
writer renews it. A lock that was not renewed for two minutes belongs to a dead writer and is
taken over. Each of these steps is a conditional request, and of several at once the store accepts
one. The writer's commits are conditional, too. So a writer that was suspended until another took
over its lock gets an error and changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import secrets
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from trajstore.errors import ObjectStoreError, RunLocked
from trajstore.store.storage.atomic import check_writable, is_alive, read_only
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.strict_json import utc_now

_RENEW = 20.0  # seconds
_DEAD = timedelta(seconds=120)  # without renewal; clocks must differ by less


_given_up: set[str] = set()
"""Writers of this process that released their locks."""


class RemoteLock(AbstractContextManager["RemoteLock"]):
    """The right to write to a run in an object store. Created by `acquire`.

    Attributes
    ----------
    path : RemotePath
        Address of the lock.
    """

    def __init__(
        self, path: RemotePath, facts: Mapping[str, Any], tag: str, renew_every: float
    ) -> None:
        self.path = path
        self._renew_every = renew_every
        self._facts = facts
        self._tag: str | None = tag
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trajstore-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls, run: RemotePath, *, renew_every: float = _RENEW, dead_after: timedelta = _DEAD
    ) -> Self:
        """Lock a run, which need not exist.

        Parameters
        ----------
        run : RemotePath
        renew_every : float
            Seconds between two renewals.
        dead_after : timedelta
            Time without renewal after which the lock of another writer is void.

        Raises
        ------
        RunLocked
            If another writer holds it.
        ObjectStoreError
            If the store does not answer, or does not support conditional requests.
        """
        path = lock_object(run)
        facts = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": utc_now(),
            "writer": secrets.token_hex(16),
        }
        while True:
            try:
                tag = path.write_bytes(_dump(facts), new=True)
                return cls(path, facts, tag, renew_every)
            except FileExistsError:
                pass
            present = path.stat()
            if present is None:  # released between the two calls
                continue
            owner = owner_of(path.read_bytes)
            if not _is_dead(present, owner, dead_after):
                raise RunLocked(_remote_refusal(run, present, owner))
            with suppress(FileExistsError):  # raised if another process took it over first
                tag = path.write_bytes(_dump(facts), instead_of=present["e_tag"])
                return cls(path, facts, tag, renew_every)

    def release(self) -> None:
        """Release the lock. A second call has no effect."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        _given_up.add(self._facts["writer"])
        with suppress(ObjectStoreError):  # in an outage the lock expires
            if self.is_held():
                self.path.unlink()

    def is_held(self) -> bool:
        """True if no other writer has taken it over."""
        return bool(owner_of(self.path.read_bytes).get("writer") == self._facts["writer"])

    def __exit__(self, *error: object) -> None:
        self.release()

    def _renew(self) -> None:
        while self._tag is not None and not self._released.wait(self._renew_every):
            data = _dump({**self._facts, "renewed": utc_now()})
            try:
                self._tag = self.path.write_bytes(data, instead_of=self._tag)
            except FileExistsError:
                self._tag = None  # taken over: the next commit raises an error
            except ObjectStoreError:
                continue  # an outage; if it lasts, the commits raise an error


def lock_object(run: RemotePath) -> RemotePath:
    """Address of the lock of a run, next to the run."""
    return run.with_name(f".{run.name}.lock")


def taken_over(run: Location) -> RunLocked:
    """Error for a writer that finds objects of another one in its run."""
    return RunLocked(
        f"{run} was written to by another process, which took over its lock after two minutes "
        "without renewal; this writer stops"
    )


def is_renewed(run: RemotePath) -> bool:
    """True if a writer holds the lock of a run."""
    path = lock_object(run)
    facts = path.stat()
    return facts is not None and not _is_dead(facts, owner_of(path.read_bytes))


def _is_dead(facts: Mapping[str, Any], owner: Mapping[str, Any], after: timedelta = _DEAD) -> bool:
    """True if the lock was released or expired, or its process on this machine died."""
    if owner.get("writer") in _given_up:
        return True
    if owner.get("host") == socket.gethostname() and not is_alive(int(owner.get("process", 0))):
        return True
    return bool(datetime.now(UTC) - facts["last_modified"] > after)


def _remote_refusal(run: RemotePath, facts: Mapping[str, Any], owner: dict[str, Any]) -> str:
    """Message that states the writer of a run, and when its lock expires."""
    left = _DEAD - (datetime.now(UTC) - facts["last_modified"])
    return (
        f"{run} is being written to by {_owner_line(owner)}; wait for it, or end it; if it has "
        f"ended, its lock expires in {max(round(left.total_seconds()), 1)} seconds, or at once if "
        f"you remove {lock_object(run)}"
    )


def owner_of(read: Callable[[], bytes]) -> dict[str, Any]:
    """Content of a lock; empty if it was removed meanwhile, or its owner died before writing it.

    Parameters
    ----------
    read : callable
        Returns the bytes of the lock.
    """
    try:
        facts = json.loads(read())
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _dump(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts).encode()


_TRIES = 3

_CHECKS = 1000  # over ten seconds

_descriptors: set[int] = set()
"""Descriptors of the locks of this process."""

_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system without locks."""

_warned: set[Path] = set()
"""Folders for which a warning about missing locks was given."""


def _leave_to_parent() -> None:
    """Close the locks in a forked child, which would keep them after its parent's death."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class RunLock(AbstractContextManager["RunLock"]):
    """The right to write to a run. Created by `acquire`.

    Attributes
    ----------
    path : Path
        Path of the lock file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _descriptors.add(descriptor)
        # Nothing else could release the lock of a writer that was dropped without being closed.
        self._dropped = weakref.finalize(self, _close, descriptor)

    @classmethod
    def acquire(cls, run: Location, *, checks: int = _CHECKS) -> Self | RemoteLock:
        """Lock a run. The run need not exist, but its parent folder must.

        The lock of a dead process on this machine is taken over.

        Parameters
        ----------
        run : Path or RemotePath
        checks : int
            Most tries, every hundredth of a second, while other processes check a local lock.

        Raises
        ------
        RunLocked
            If another writer holds the lock, or it belongs to a process on another machine, whose
            state is unknown.
        InvalidArgument
            If the folder is read-only.
        OSError
            If the lock file cannot be created.
        """
        if isinstance(run, RemotePath):
            return RemoteLock.acquire(run)
        path = _lock_file(run)
        while True:
            check_writable(path)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except PermissionError as error:
                raise read_only(path) from error
            try:
                _take(descriptor, run, checks)
            except BaseException:
                os.close(descriptor)
                raise
            if _is_still(path, descriptor):
                break
            os.close(descriptor)  # its owner removed it between the two calls
        try:
            owner = _owner(descriptor)
            if owner.get("host", socket.gethostname()) != socket.gethostname():
                raise RunLocked(
                    f"{run} is locked by {_owner_line(owner)}; "
                    f"if that process has ended, remove {path}"
                )
            facts = {"host": socket.gethostname(), "process": os.getpid(), "started": utc_now()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        except BaseException:
            if not os.fstat(descriptor).st_size:  # this process holds it and wrote nothing
                path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Release the lock. A second call has no effect."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        self._dropped.detach()
        _descriptors.discard(descriptor)
        try:
            # The file is removed while it is held, so that the next process creates a new one.
            # If a user removed it by hand, the present file may belong to another process.
            if _is_still(self.path, descriptor):
                self.path.unlink()
        finally:
            os.close(descriptor)

    def is_held(self) -> bool:
        """True until the lock is released. No other process can take it meanwhile."""
        return self._descriptor is not None

    def __exit__(self, *error: object) -> None:
        self.release()


def is_written_to(run: RunPath) -> bool | None:
    """True if a writer holds the lock of a run.

    Parameters
    ----------
    run : path-like
        Need not exist. The check does not prevent a writer from starting at the same time.

    Returns
    -------
    bool or None
        None if the lock belongs to another machine, whose locks may not be visible.
    """
    place = location(run).absolute()
    if isinstance(place, RemotePath):
        return is_renewed(place)
    try:
        descriptor = os.open(_lock_file(place), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner = _owner(descriptor)
        return _is_running(owner) if owner.get("host") == socket.gethostname() else None
    else:
        here = socket.gethostname()
        return False if _owner(descriptor).get("host", here) == here else None
    finally:
        os.close(descriptor)


def check_unlocked(run: Path) -> None:
    """Raise an error if another process writes to a run. This process may, as before `acquire`.

    Raises
    ------
    RunLocked
        If it does.
    """
    if is_written_to(run):
        owner: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # the lock may be released meanwhile
            owner = owner_of(_lock_file(run).read_bytes)
        if not _is_here(owner):
            raise RunLocked(_refusal(run, owner))


def lock_left(run: Location) -> Location | None:
    """Path of the lock that a dead writer left, or None. The next writer removes it."""
    path = lock_object(run) if isinstance(run, RemotePath) else _lock_file(run)
    return path if path.exists() and is_written_to(run) is False else None


def _lock_file(run: Path) -> Path:
    """Path of the lock, next to the run itself, even if `run` is a link."""
    real = Path(os.path.realpath(run))
    return real.parent / f".{real.name}.lock"


def _take(descriptor: int, run: Path, checks: int) -> None:
    """Lock a file. Retry while `is_written_to` holds it for its check."""
    refused = 0
    for left in reversed(range(checks)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            refused += not _is_being_checked(descriptor)
            if refused == _TRIES:
                raise RunLocked(_refusal(run, _owner(descriptor))) from None
            if not left:
                raise RunLocked(
                    f"no process writes to {run}, but a process that checks for writers has held "
                    f"{_lock_file(run).name} for ten seconds; resume or end that process"
                ) from None
            if refused == _TRIES - 1 and _is_here(_owner(descriptor)):
                gc.collect()  # a dropped writer may not have been collected yet
            time.sleep(0.01)  # flock has no timeout
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _warn_once(run, error)
            owner = _owner(descriptor)
            if owner.get("host") == socket.gethostname() and _is_running(owner):
                raise RunLocked(_refusal(run, owner)) from error
            return


def _is_being_checked(descriptor: int) -> bool:
    """True if only processes that check the lock hold it. They may be stopped."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _warn_once(run: Path, error: OSError) -> None:
    """Warn once for each folder that the file system has no locks."""
    if run.parent not in _warned:
        _warned.add(run.parent)
        warnings.warn(
            f"the file system of {run.parent} has no file locks ({error.strerror}); only the host "
            f"and process recorded in {_lock_file(run).name} prevent two writers at once",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_running(owner: dict[str, Any]) -> bool:
    """True if the process recorded in a lock file runs on this machine."""
    process = owner.get("process")
    return isinstance(process, int) and is_alive(process)


def _is_here(owner: dict[str, Any]) -> bool:
    return owner.get("host") == socket.gethostname() and owner.get("process") == os.getpid()


def _refusal(run: Path, owner: dict[str, Any]) -> str:
    if _is_here(owner):
        return (
            f"{run} is being written to by this process itself ({os.getpid()}), since "
            f"{owner.get('started')}; close() its writer, recorder or callback, and try again"
        )
    return f"{run} is being written to by {_owner_line(owner)}; wait for it, or end it"


def _close(descriptor: int) -> None:
    if descriptor in _descriptors:  # or the process is a forked child
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _owner(descriptor: int) -> dict[str, Any]:
    """Content of the lock file; empty if its owner died before writing it."""
    return owner_of(partial(os.pread, descriptor, 4096, 0))


def _owner_line(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return (
        f"process {owner.get('process')} on {owner.get('host')}, which started at "
        f"{owner.get('started')}"
    )
