"""Objects of a run: each is replaced whole, or not at all, and never through a link.

What is written survives a loss of power, unless the caller wants it otherwise: the data of a file
is on the disk before its name changes, and the name before the call returns. Flushes that need no
order are made at once, in threads, since a file system then writes its journal once for all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from trajstore.errors import FormatError
from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.threads import in_parallel

__all__ = [
    "PARTIAL_SUFFIX",
    "exchange",
    "flush",
    "flush_tree",
    "inner_links",
    "is_alive",
    "leftovers",
    "link_or_copy",
    "make_folder",
    "put",
    "put_all",
    "refuse_links",
    "sweep",
]

PARTIAL_SUFFIX = ".partial"

_PIECE = 8 << 20

_HERE = -100  # AT_FDCWD of <fcntl.h>
_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)

_FLUSHES = 16
"""Flushes at once."""

_NO_FLUSH = (errno.EBADF, errno.EINVAL)
"""What a file system says that cannot flush folders; source: `fsync_fname_ext` of PostgreSQL."""


def put(path: Location, parts: Iterable[bytes], *, fsync: bool = True) -> int:
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
    return put_all([(path, parts)], fsync=fsync)


def put_all(objects: Iterable[tuple[Path, Iterable[bytes]]], *, fsync: bool = True) -> int:
    """Write several objects, each as `put`: first the data of all, and then their names.

    Parameters
    ----------
    objects : iterable of (Path, iterable of bytes)
        Consumed one at a time.
    fsync : bool
        As for `put`.

    Returns
    -------
    int
        Bytes written.
    """
    written: dict[Path, Path] = {}
    size = 0
    try:
        for path, parts in objects:
            beside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
            written[beside] = path
            with beside.open("wb") as file:
                for part in parts:
                    file.write(part)
                size += file.tell()
        if fsync:
            flush(written)
        for beside, path in written.items():
            beside.replace(path)
    except BaseException:
        for beside in written:
            beside.unlink(missing_ok=True)
        raise
    if fsync:
        flush({path.parent for path in written.values()})
    return size


def link_or_copy(source: Path, target: Path) -> None:
    """Have an object of another run, too: a hard link, as no object is ever written into.

    It is not flushed: what is made of links is made beside its place, and flushed as a whole.

    Parameters
    ----------
    source, target : Path
        There is nothing at `target`.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links, or too many of them
        put(target, _pieces(source), fsync=False)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def make_folder(folder: Path, *, fsync: bool = True) -> None:
    """Make a folder, and those above it that are missing, unless it is there.

    Parameters
    ----------
    folder : Path
    fsync : bool
        Return only when the names of all that were made would survive a loss of power.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if fsync:
        flush(each.parent for each in missing)


def flush(paths: Iterable[Path]) -> None:
    """Make what files hold, and the names in folders, survive a loss of power; in any order."""
    jobs = [partial(_flush, path) for path in paths]
    if len(jobs) == 1:
        jobs[0]()
    else:
        for _ in in_parallel(jobs, _FLUSHES):
            pass


def flush_tree(path: Path) -> None:
    """Make a file, or a folder with all that is in it, survive a loss of power, but for its name.

    Files that are linked from elsewhere are flushed, too: whoever wrote them may not have.
    """
    flush([path, *(each for each in path.rglob("*") if not each.is_symlink())])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH or not path.is_dir():
            raise
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
