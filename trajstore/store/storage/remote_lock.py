"""One writer at a time where there are no file locks: an object that is made only if there is none.

The lock of a run is an object beside it, ``.NAME.zarr.lock``. Its writer renews it, so a lock that
has not been renewed for long is that of a writer that died, and is taken over. Each of these steps
is a conditional request, of which the store lets one of several through. So is whatever a writer
puts in place: one that was stopped for so long that another took its lock finds that out, and harms
nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from trajstore.errors import ObjectStoreError, RunLocked
from trajstore.store.storage.atomic import is_alive
from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.strict_json import utc_now

__all__ = ["RemoteLock", "is_renewed", "lock_object", "taken_over"]

_RENEW = 20.0  # seconds
_DEAD = timedelta(seconds=120)  # without renewal; clocks may differ by less than that


_given_up: set[str] = set()
"""Writers of this process that have let go of their locks."""


class RemoteLock:
    """The right to write to a run in an object store. Made by `acquire`.

    Attributes
    ----------
    path : RemotePath
        Of the lock.
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
        """Lock a run, which need not be there yet.

        Raises
        ------
        RunLocked
            If another writer holds it.
        ObjectStoreError
            If the store does not answer, or knows no conditional requests.
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
            if found is None:  # released between our two calls
                continue
            owner = _owner(path)
            if not _is_dead(found, owner):
                raise RunLocked(_refusal(run, found, owner))
            with suppress(FileExistsError):  # else another takes it over, too, and was faster
                return cls(path, facts, path.write_bytes(_dump(facts), instead_of=found["e_tag"]))

    def release(self) -> None:
        """Let others write. Twice does no harm."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        _given_up.add(self._facts["writer"])
        with suppress(ObjectStoreError):  # in an outage: the lock is void in any case
            if self.is_held():
                self.path.unlink()

    def is_held(self) -> bool:
        """Whether no other writer has taken it over."""
        return bool(_owner(self.path).get("writer") == self._facts["writer"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _renew(self) -> None:
        while self._tag is not None and not self._released.wait(_RENEW):
            data = _dump({**self._facts, "renewed": utc_now()})
            try:
                self._tag = self.path.write_bytes(data, instead_of=self._tag)
            except FileExistsError:
                self._tag = None  # taken over: the next commit is refused
            except ObjectStoreError:
                continue  # an outage; if it lasts, the commits will say so


def lock_object(run: RemotePath) -> RemotePath:
    """Where the lock of a run is: beside it."""
    return run.with_name(f".{run.name}.lock")


def taken_over(run: Location) -> RunLocked:
    """What a writer is told that finds objects of another one where it writes."""
    return RunLocked(
        f"{run} has been written to by another process, which took its lock over as it was not "
        "renewed for long; this one ends"
    )


def is_renewed(run: RemotePath) -> bool:
    """Whether a writer holds the lock of a run, as far as can be told from here."""
    path = lock_object(run)
    found = path.stat()
    return found is not None and not _is_dead(found, _owner(path))


def _is_dead(found: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    """Whether a lock is that of a writer that died: here, or somewhere and some time ago."""
    if owner.get("writer") in _given_up:
        return True
    if owner.get("host") == socket.gethostname() and not is_alive(int(owner.get("process", 0))):
        return True
    return bool(datetime.now(UTC) - found["last_modified"] > _DEAD)


def _refusal(run: RemotePath, found: Mapping[str, Any], owner: Mapping[str, Any]) -> str:
    """Who writes to a run, and how long that keeps others from it should it have ended."""
    left = _DEAD - (datetime.now(UTC) - found["last_modified"])
    return (
        f"{run} is being written to by process {owner.get('process')} on {owner.get('host')}, "
        f"since {owner.get('started')}; wait for it, or end it; if it has ended, its lock is void "
        f"in {max(round(left.total_seconds()), 1)} seconds, or at once when you remove "
        f"{lock_object(run)}"
    )


def _owner(path: RemotePath) -> dict[str, Any]:
    """What a lock says of its writer; nothing of one that has just gone."""
    try:
        facts = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _dump(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts).encode()
