"""One writer at a time.

The lock of a run is a file beside it, `.NAME.zarr.lock`, held with the system's own file lock for
as long as the writer lives, whatever ends it. What the file says (host, process, start) is for the
message that the second writer gets, and for file systems that several machines share and whose
locks do not reach from one to the other.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from trajstore.errors import RunLocked
from trajstore.store.zarr_json import utc_now

__all__ = ["RunLock", "is_written_to"]


_TRIES = 3

_held: set[int] = set()
"""Descriptors of the locks of this process."""


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

    @classmethod
    def acquire(cls, run: Path) -> Self:
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
        path = _lock_file(run)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _take(descriptor)
            except BlockingIOError:
                owner = _owner(descriptor)
                os.close(descriptor)
                raise RunLocked(
                    f"{run} is being written to by {_named(owner)}; wait for it, or end it"
                ) from None
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
                    f"{run} is locked by {_named(owner)}; if that process has ended, remove {path}"
                )
            facts = {"host": socket.gethostname(), "process": os.getpid(), "started": utc_now()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Let others write. Twice does no harm."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(descriptor)
        try:
            # Removed while it is held, so that whoever opens the path next makes a file of its
            # own; unless somebody has removed it by hand, and the file is another's by now.
            if _is_still(self.path, descriptor):
                self.path.unlink()
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_written_to(run: str | os.PathLike[str]) -> bool | None:
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
    try:
        descriptor = os.open(_lock_file(Path(run)), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        here = socket.gethostname()
        return False if _owner(descriptor).get("host", here) == here else None
    finally:
        os.close(descriptor)


def _lock_file(run: Path) -> Path:
    """Where the lock is, beside the run itself, by whichever link it was reached."""
    real = Path(os.path.realpath(run))
    return real.parent / f".{real.name}.lock"


def _take(descriptor: int) -> None:
    """Lock a file, if need be after an instant: `is_written_to` holds it for microseconds."""
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.01)  # flock has no time limit, and waiting without one may be for hours


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


def _named(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return (
        f"process {owner.get('process')} on {owner.get('host')}, which started at "
        f"{owner.get('started')}"
    )
