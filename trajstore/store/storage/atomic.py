"""Objects of a run: each is replaced whole, or not at all, and never through a link."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from trajstore.errors import FormatError
from trajstore.store.storage.remote_path import Location, RemotePath

__all__ = [
    "PARTIAL_SUFFIX",
    "exchange",
    "flush_folder",
    "inner_links",
    "is_alive",
    "leftovers",
    "link_or_copy",
    "put",
    "refuse_links",
    "sweep",
]

PARTIAL_SUFFIX = ".partial"

_PIECE = 8 << 20

_HERE = -100  # AT_FDCWD of <fcntl.h>
_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def put(path: Location, parts: Iterable[bytes], *, fsync: bool = False) -> int:
    """Write an object from its parts and put it in place in one step.

    A reader, and whoever comes after a crash, sees the old object or the whole new one. A failed
    write leaves nothing behind.

    Parameters
    ----------
    path : Path or RemotePath
        Its folder must be there: one that has gone is an error, not made again.
    parts : iterable of bytes
        Consumed one at a time, so a file is never in memory as a whole.
    fsync : bool
        Return only when the object, and its name, would survive a loss of power.

    Returns
    -------
    int
        Bytes written.
    """
    if isinstance(path, RemotePath):
        data = b"".join(parts)
        path.write_bytes(data)
        return len(data)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            size = file.tell()
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if fsync:
        flush_folder(path.parent)
    return size


def link_or_copy(source: Path, target: Path, *, fsync: bool = False) -> None:
    """Have an object of another run, too: a hard link, as no object is ever written into.

    Parameters
    ----------
    source, target : Path
        There is nothing at `target`.
    fsync : bool
        As for `put`.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links, or too many of them
        put(target, _pieces(source), fsync=fsync)
        return
    if fsync:  # whoever wrote it may not have
        flush_file(target)
        flush_folder(target.parent)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    flush_file(folder)


def flush_file(path: Path) -> None:
    """Make what a file, or a folder, holds survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Have two folders change places, at once; False where the system cannot.

    Source: renameat2(2), of Linux.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(other))


def sweep(run: Location) -> list[Path]:
    """Remove what processes that died have left in a run's folder, or a file's, and beside it.

    Only whoever holds the lock may do that: unfinished objects of a writer that lives look the
    same. Of what lies beside it, nothing is removed that has the number of a living process other
    than this one.

    Parameters
    ----------
    run : Path or RemotePath
        A run, or any file or folder that is made beside its place.

    Returns
    -------
    list of Path
        What was removed.
    """
    left = leftovers(run, own=True)
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return left


def leftovers(run: Location, *, own: bool = False) -> list[Path]:
    """What `sweep` would remove; with `own` also what has the number of this process.

    In an object store, nothing is left of an unfinished write.
    """
    if isinstance(run, RemotePath):
        return []
    ours = re.compile(rf"\.{re.escape(run.name)}\.(\d+)({re.escape(PARTIAL_SUFFIX)}|\.old)")
    beside = [
        path
        for path in run.parent.iterdir()
        if (match := ours.fullmatch(path.name))
        and ((own and int(match[1]) == os.getpid()) or not is_alive(int(match[1])))
    ]
    inside = re.compile(rf"\..+\.\d+{re.escape(PARTIAL_SUFFIX)}")
    return beside + [
        path for path in run.rglob(".*") if inside.fullmatch(path.name) and path.is_file()
    ]


def is_alive(process: int) -> bool:
    """Whether there is a process of that number on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def inner_links(run: Location) -> list[Path]:
    """Links among what is in the folder of a run, and in the folders of its arrays.

    An object store has none.
    """
    found: list[Path] = []
    if isinstance(run, RemotePath):
        return found
    for folder in [run, *sorted(entry for entry in run.iterdir() if entry.is_dir())]:
        if folder != run and folder.is_symlink():
            continue
        with os.scandir(folder) as entries:
            found += sorted(Path(entry.path) for entry in entries if entry.is_symlink())
    return found


def refuse_links(run: Location) -> None:
    """Insist that whatever is written to a run, or removed from it, is in its own folder.

    Raises
    ------
    FormatError
        If there is a link in it.
    """
    links = inner_links(run)
    if links:
        raise FormatError(
            f"{links[0]} is a link to {os.readlink(links[0])}, and nothing is written or removed "
            "through a link inside a run; put what it leads to in its place, or make a copy of the "
            f"run without links (cp -rL {run.name} COPY)"
        )
