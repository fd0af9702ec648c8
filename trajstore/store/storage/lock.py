"""One writer at a time.

The lock of a run is a file next to it, `.NAME.zarr.lock`. The writer holds the system's file lock
on it until its process ends, for whatever reason. The content of the file (host, process, start)
appears in the message that a second writer gets. It also protects the run on file systems that
several machines share without sharing locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import socket
import time
import warnings
import weakref
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

from trajstore.errors import RunLocked
from trajstore.store.storage.atomic import check_writable, is_alive, read_only
from trajstore.store.storage.remote_lock import RemoteLock, is_renewed, lock_object, owner_of
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.strict_json import utc_now

_TRIES = 3

_CHECKS = 1000
"""Tries while other processes check the lock, over ten seconds."""

_held: set[int] = set()
"""Descriptors of the locks of this process."""

_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system without locks."""

_warned: set[Path] = set()
"""Folders for which a warning about missing locks was given."""


def _leave_to_parent() -> None:
    """Close the locks in a forked child, which would keep them after its parent's death."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


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
        _held.add(descriptor)
        # Nothing else could release the lock of a writer that was dropped without being closed.
        self._dropped = weakref.finalize(self, _close, descriptor)

    @classmethod
    def acquire(cls, run: Location) -> Self | RemoteLock:
        """Lock a run. The run need not exist, but its parent folder must.

        The lock of a dead process on this machine is taken over.

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
                _take(descriptor, run)
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
        _held.discard(descriptor)
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


def _take(descriptor: int, run: Path) -> None:
    """Lock a file. Retry while `is_written_to` holds it for its check."""
    refused = 0
    for left in reversed(range(_CHECKS)):
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
    if descriptor in _held:  # or the process is a forked child
        _held.discard(descriptor)
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
