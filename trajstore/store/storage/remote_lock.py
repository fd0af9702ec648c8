"""One writer at a time in an object store, which has no file locks.

The lock of a run is an object next to it, ``.NAME.zarr.lock``, created only if it does not exist.
Its writer renews it. A lock that was not renewed for two minutes belongs to a dead writer and is
taken over. Each of these steps is a conditional request, and of several at once the store accepts
one. The writer's commits are conditional, too. So a writer that was suspended until another took
over its lock gets an error and changes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from trajstore.errors import ObjectStoreError, RunLocked
from trajstore.store.storage.atomic import is_alive
from trajstore.store.storage.remote_path import Location, RemotePath
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

    def __init__(self, path: RemotePath, facts: Mapping[str, Any], tag: str) -> None:
        self.path = path
        self._facts = facts
        self._tag: str | None = tag
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trajstore-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, run: RemotePath) -> Self:
        """Lock a run, which need not exist.

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
                return cls(path, facts, path.write_bytes(_dump(facts), new=True))
            except FileExistsError:
                pass
            found = path.stat()
            if found is None:  # released between the two calls
                continue
            owner = owner_of(path.read_bytes)
            if not _is_dead(found, owner):
                raise RunLocked(_refusal(run, found, owner))
            with suppress(FileExistsError):  # raised if another process took it over first
                return cls(path, facts, path.write_bytes(_dump(facts), instead_of=found["e_tag"]))

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
        while self._tag is not None and not self._released.wait(_RENEW):
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
    found = path.stat()
    return found is not None and not _is_dead(found, owner_of(path.read_bytes))


def _is_dead(found: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    """True if the lock was released or expired, or its process on this machine died."""
    if owner.get("writer") in _given_up:
        return True
    if owner.get("host") == socket.gethostname() and not is_alive(int(owner.get("process", 0))):
        return True
    return bool(datetime.now(UTC) - found["last_modified"] > _DEAD)


def _refusal(run: RemotePath, found: Mapping[str, Any], owner: Mapping[str, Any]) -> str:
    """Message that states the writer of a run, and when its lock expires."""
    left = _DEAD - (datetime.now(UTC) - found["last_modified"])
    return (
        f"{run} is being written to by process {owner.get('process')} on {owner.get('host')}, "
        f"since {owner.get('started')}; wait for it, or end it; if it has ended, its lock expires "
        f"in {max(round(left.total_seconds()), 1)} seconds, or at once if you remove "
        f"{lock_object(run)}"
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
