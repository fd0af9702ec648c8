"""One writer at a time.

The lock of a run is a file beside it, `.NAME.zarr.lock`, held with the system's own file lock for
as long as the writer lives, whatever ends it. What the file says (host, process, start) is for the
message that the second writer gets, and for file systems that several machines share and whose
locks do not reach from one to the other.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import socket
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, Self

from trajstore.errors import RunLocked
from trajstore.store.storage.atomic import is_alive
from trajstore.store.storage.remote_lock import RemoteLock, is_renewed, lock_object
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.strict_json import utc_now

__all__ = ["RunLock", "is_written_to", "lock_left"]


_TRIES = 3

_LOOKS = 1000
"""Tries while others look at the lock, ten seconds of them."""

_held: set[int] = set()
"""Descriptors of the locks of this process."""

_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
"""What a file system says that has none."""

_warned: set[Path] = set()
"""Where it was said that there are no locks."""


def _leave_to_parent() -> None:
    """Let go of the locks in a forked child, which would hold them after its parent's death."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class RunLock:
    """The right to write to a run. Made by `acquire`.

    Attributes
    ----------
    path : Path
        Of the lock file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(descriptor)
        # Of a writer that was dropped without being closed, nobody else could let go.
        self._dropped = weakref.finalize(self, _close, descriptor)

    @classmethod
    def acquire(cls, run: Location) -> Self | RemoteLock:
        """Lock a run, which need not be there yet; its parent folder must.

        A lock that a dead process of this machine has left is taken over.

        Raises
        ------
        RunLocked
            If another writer holds it, or a writer of another machine has left it, of which
            nobody can tell from here whether it lives.
        OSError
            If the lock file cannot be made.
        """
        if isinstance(run, RemotePath):
            return RemoteLock.acquire(run)
        path = _lock_file(run)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _take(descriptor, run)
            except BaseException:
                os.close(descriptor)
                raise
            if _is_still(path, descriptor):
                break
            os.close(descriptor)  # its owner removed it between our two calls
        try:
            owner = _owner(descriptor)
            if owner.get("host", socket.gethostname()) != socket.gethostname():
                raise RunLocked(
                    f"{run} is locked by {_owner_line(owner)}; "
                    f"if that process has ended, remove {path}"
                )
            facts = {"host": socket.gethostname(), "process": os.getpid(), "started": utc_now()}
            _write_owner(path, descriptor, facts)
        except BaseException:
            if not os.fstat(descriptor).st_size:  # nobody's but ours, and held
                path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Let others write. Twice does no harm."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        self._dropped.detach()
        _held.discard(descriptor)
        try:
            # Removed while it is held, so that whoever opens the path next makes a file of its
            # own; unless somebody has removed it by hand, and the file is another's by now.
            if _is_still(self.path, descriptor):
                self.path.unlink()
        finally:
            os.close(descriptor)

    def is_held(self) -> bool:
        """Whether it has not been released: nobody else can take it."""
        return self._descriptor is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_written_to(run: RunPath) -> bool | None:
    """Whether a writer holds the lock of a run, as far as can be told from here.

    Parameters
    ----------
    run : path-like
        Which need not be there. It is not locked: a writer that begins meanwhile notices nothing.

    Returns
    -------
    bool or None
        None if the lock is that of another machine, which may not show here.
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
        return _lives(owner) if owner.get("host") == socket.gethostname() else None
    else:
        here = socket.gethostname()
        return False if _owner(descriptor).get("host", here) == here else None
    finally:
        os.close(descriptor)


def lock_left(run: Location) -> Location | None:
    """The lock of a writer that died, if there is one; the next writer removes it."""
    path = lock_object(run) if isinstance(run, RemotePath) else _lock_file(run)
    return path if path.exists() and is_written_to(run) is False else None


def _lock_file(run: Path) -> Path:
    """Where the lock is, beside the run itself, by whichever link it was reached."""
    real = Path(os.path.realpath(run))
    return real.parent / f".{real.name}.lock"


def _take(descriptor: int, run: Path) -> None:
    """Lock a file, if need be after an instant: `is_written_to` holds it while it looks."""
    refused = 0
    for left in reversed(range(_LOOKS)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            refused += not _is_looked_at(descriptor)
            if refused == _TRIES:
                raise RunLocked(_refusal(run, _owner(descriptor))) from None
            if not left:
                raise RunLocked(
                    f"nobody writes to {run}, but a process that only looks whether somebody does "
                    f"has held {_lock_file(run).name} for ten seconds; wake or end it"
                ) from None
            if refused == _TRIES - 1 and _is_here(_owner(descriptor)):
                gc.collect()  # a writer that was dropped may still lie about
            time.sleep(0.01)  # flock has no time limit, and waiting without one may be for hours
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _warn_once(run, error)
            owner = _owner(descriptor)
            if owner.get("host") == socket.gethostname() and _lives(owner):
                raise RunLocked(_refusal(run, owner)) from error
            return


def _is_looked_at(descriptor: int) -> bool:
    """Whether nobody holds a lock but those who look at it, who may have been put to sleep."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _warn_once(run: Path, error: OSError) -> None:
    """Say what protects a run where the file system has no locks."""
    if not _warned:
        _warned.add(run.parent)
        warnings.warn(
            f"the file system of {run.parent} has no file locks ({error.strerror}); two writers "
            f"are kept apart only by what {_lock_file(run).name} says of host and process",
            RuntimeWarning,
            stacklevel=4,
        )


def _lives(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock file names lives, of this machine."""
    process = owner.get("process")
    return isinstance(process, int) and is_alive(process)


def _is_here(owner: dict[str, Any]) -> bool:
    return owner.get("host") == socket.gethostname() and owner.get("process") == os.getpid()


def _refusal(run: Path, owner: dict[str, Any]) -> str:
    if _is_here(owner):
        return (
            f"{run} is being written to by this process itself ({os.getpid()}), since "
            f"{owner.get('started')}; close() the writer, recorder or callback that does, and try "
            "again"
        )
    return f"{run} is being written to by {_owner_line(owner)}; wait for it, or end it"


def _close(descriptor: int) -> None:
    if descriptor in _held:  # or the process is a forked child
        _held.discard(descriptor)
        os.close(descriptor)


def _write_owner(path: Path, descriptor: int, facts: dict[str, Any]) -> None:
    """Write down who holds a lock; where that fails, the file goes, while it is held."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _owner(descriptor: int) -> dict[str, Any]:
    """What the lock file says; nothing, if its owner died before it wrote that."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _owner_line(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return (
        f"process {owner.get('process')} on {owner.get('host')}, which started at "
        f"{owner.get('started')}"
    )
