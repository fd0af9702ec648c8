"""Objects of a run, in a folder or an object store: atomic replacement, and reads of their parts.

By default, written objects survive a loss of power: the data of a file is on the disk before the
rename, and the name is on the disk before the call returns. Flushes without a required order run
in parallel threads, because the file system then writes its journal once for all of them. Nothing
is written through a link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

from trajstore.codec.open_block import BlockObject, LocalObject
from trajstore.errors import FormatError, InvalidArgument
from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.strict_json import LARGEST_METADATA, metadata_bytes
from trajstore.threads import in_parallel, submit

PARTIAL_SUFFIX = ".partial"

_HERE = -100  # AT_FDCWD of <fcntl.h>
_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)

_FLUSHES = 16
"""Number of simultaneous flushes."""

WRITES = 2
"""Number of threads that write parts of a file; as many parts wait, in memory."""

_NO_FLUSH = (errno.EBADF, errno.EINVAL)
"""Errors of a file system that cannot flush folders; source: `fsync_fname_ext` of PostgreSQL."""


def put(path: Location, parts: Iterable[bytes], *, fsync: bool = True) -> int:
    """Write an object from its parts, and replace the old one atomically.

    Readers see the complete old or new object, also after a crash. A failed write leaves no files.

    Parameters
    ----------
    path : Path or RemotePath
        Its folder must exist; it is not created.
    parts : iterable of bytes
        Consumed one at a time, so a file is never in memory as a whole.
    fsync : bool
        Return only when the object and its name survive a loss of power.

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


def put_all(
    objects: Iterable[tuple[Path, Iterable[bytes]]],
    *,
    fsync: bool = True,
    writers: ThreadPoolExecutor | None = None,
) -> int:
    """Write several objects as `put` does: first the data of all, then their names.

    Parameters
    ----------
    objects : iterable of (Path, iterable of bytes)
        Paths and parts, consumed one at a time.
    fsync : bool
        See `put`.
    writers : ThreadPoolExecutor, optional
        Writes a few parts at once (default: one after another in this thread).

    Returns
    -------
    int
        Bytes written.
    """
    written: dict[Path, Path] = {}
    size = 0
    try:
        for path, parts in objects:
            temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
            written[temporary] = path
            with temporary.open("wb") as file, named_errors(path):
                if writers is None:
                    file.writelines(parts)
                else:
                    _write_at_once(writers, file.fileno(), parts)
                size += file.seek(0, os.SEEK_END)
        if fsync:
            flush(written)
        for temporary, path in written.items():
            temporary.replace(path)
    except BaseException:
        for temporary in written:
            temporary.unlink(missing_ok=True)
        raise
    if fsync:
        flush({path.parent for path in written.values()})
    return size


def _write_at_once(writers: ThreadPoolExecutor, file: int, parts: Iterable[bytes]) -> None:
    """Write parts one after another in a file, several at once."""
    waiting: deque[Future[None]] = deque()
    offset = 0
    try:
        for part in parts:
            waiting.append(submit(writers, _write_part, file, part, offset))
            offset += len(part)
            if len(waiting) > WRITES:
                waiting[0].result()
                waiting.popleft()
        for future in waiting:
            future.result()
    finally:
        wait(waiting)  # another file may get the number next


def _write_part(file: int, part: bytes, offset: int) -> None:
    view = memoryview(part)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Name a file in the errors of writes and flushes, to which the system gives no name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Link an object of another run, or copy it. Links are safe, as objects are never modified.

    The target is not flushed: callers link into a temporary folder and flush that as a whole.

    Parameters
    ----------
    source, target : Path
        `target` must not exist.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links, or too many links
        shutil.copyfile(source, target)


def check_writable(path: Path) -> None:
    """Raise an error if a file or folder cannot be created at a path, whose folder may be missing.

    A temporary file without a name is created: permissions alone do not tell, as for root.

    Raises
    ------
    InvalidArgument
        With the name of the folder, if this user cannot write to it, or it is a file.
    """
    folder = next(each for each in path.absolute().parents if os.path.exists(each))
    if not folder.is_dir():
        raise InvalidArgument(f"cannot write {path}: {folder} is not a folder; choose another path")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except PermissionError as error:
        raise read_only(folder / path.name) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise read_only(folder / path.name) from error
        raise InvalidArgument(
            f"cannot write to the folder {folder}: {error.strerror}; choose another path"
        ) from error


def read_only(path: Path) -> InvalidArgument:
    """Error about a path in a folder that this user cannot write to."""
    return InvalidArgument(
        f"cannot write to the folder {path.parent}, which is read-only; choose another path"
    )


def make_folder(folder: Path, *, fsync: bool = True) -> None:
    """Create a folder and its missing parents. Do nothing if it exists.

    Parameters
    ----------
    folder : Path
    fsync : bool
        Return only when the names of all new folders survive a loss of power.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if fsync:
        flush(each.parent for each in missing)


def flush(paths: Iterable[Path]) -> None:
    """Flush the data of files and the names in folders to disk, in any order."""
    jobs = [partial(_flush, path) for path in paths]
    if len(jobs) == 1:
        jobs[0]()
    else:
        for _ in in_parallel(jobs, _FLUSHES):
            pass


def flush_tree(path: Path) -> None:
    """Flush a file, or a folder with all its content, except its own name.

    Linked files are flushed, too, as their writer may not have flushed them.
    """
    flush([path, *(each for each in path.rglob("*") if not each.is_symlink())])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named_errors(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def exchange(path: Path, other: Path) -> bool:
    """Exchange two folders atomically. Return False if the system does not support it.

    Source: renameat2(2), of Linux.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(path), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(other))


def sweep(run: Location) -> list[Path]:
    """Remove temporary files that dead processes left in and next to a run, or next to a file.

    The caller must hold the lock, as the temporary files of a running writer look the same. Next to
    the run, files with the number of another running process are kept.

    Parameters
    ----------
    run : Path or RemotePath
        A run, or any file or folder that is created under a temporary name next to it.

    Returns
    -------
    list of Path
        Removed files and folders.
    """
    left = leftovers(run, of_this_process=True)
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return left


def leftovers(run: Location, *, of_this_process: bool = False) -> list[Path]:
    """Files and folders that `sweep` would remove; optionally also those of this process.

    In an object store, unfinished writes leave nothing.
    """
    if isinstance(run, RemotePath):
        return []
    temporary = re.compile(rf"\.{re.escape(run.name)}\.(\d+)({re.escape(PARTIAL_SUFFIX)}|\.old)")
    adjacent = [
        path
        for path in run.parent.iterdir()
        if (match := temporary.fullmatch(path.name))
        and ((of_this_process and int(match[1]) == os.getpid()) or not is_alive(int(match[1])))
    ]
    inside = re.compile(rf"\..+\.\d+{re.escape(PARTIAL_SUFFIX)}")
    return adjacent + [
        path for path in run.rglob(".*") if inside.fullmatch(path.name) and path.is_file()
    ]


def is_alive(process: int) -> bool:
    """True if a process with that number runs on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def inner_links(run: Location) -> list[Path]:
    """Symbolic links in the folder of a run and in the folders of its arrays.

    An object store has no links.
    """
    links: list[Path] = []
    if isinstance(run, RemotePath):
        return links
    for folder in [run, *sorted(entry for entry in run.iterdir() if entry.is_dir())]:
        if folder != run and folder.is_symlink():
            continue
        with os.scandir(folder) as entries:
            links += sorted(Path(entry.path) for entry in entries if entry.is_symlink())
    return links


def refuse_links(run: Location) -> None:
    """Raise an error if a run contains a link, so that no write leaves its folder.

    Raises
    ------
    FormatError
        If there is a link in the run.
    """
    links = inner_links(run)
    if links:
        raise FormatError(
            f"{links[0]} is a link to {os.readlink(links[0])}, and runs with links are not "
            "changed; replace the link by its target, or copy the run without links "
            f"(cp -rL {run.name} COPY)"
        )


class OpenObject(BlockObject, Protocol):
    """An open object.

    Attributes
    ----------
    size : int
        Size in bytes. Of a remote object, it is known after `end`.
    """

    size: int


class _RemoteObject(OpenObject):
    """A remote object for one thread, with the content it had when its end was read.

    It keeps the last part that was read.

    Parameters
    ----------
    path : RemotePath
    window : int
        Smallest number of bytes of a request.
    """

    def __init__(self, path: RemotePath, window: int) -> None:
        self.size = 0
        self._path = path
        self._window = window
        self._tag: str | None = None
        self._first, self._piece = 0, b""

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        self._piece, facts = self._path.end_and_facts(max(length, self._window))
        self.size, self._tag = facts["size"], facts["e_tag"]
        self._first = self.size - len(self._piece)
        return self._piece[-length:]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object."""
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        if not self._first <= offset <= stop <= self._first + len(self._piece):
            self._load(offset, min(max(stop, offset + self._window), self.size))
        return self._piece[offset - self._first : stop - self._first]

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read all bytes from the first range to the last, by one request."""
        stop = min(max(stop for _, stop in ranges), self.size)
        start = min(start for start, _ in ranges)
        if start < stop:
            self._load(start, stop)

    async def sibling(self, key: str, end: int) -> _RemoteObject:
        """Open another object of the run."""
        return _RemoteObject(self._path.parent.parent / key, self._window)

    def _load(self, start: int, stop: int) -> None:
        self._piece = self._path.read_range(start, stop, self._tag)
        self._first = start


def opened(path: Location, window: int = 0) -> AbstractContextManager[OpenObject]:
    """Open an object within a ``with`` block, for consistent reads of its parts.

    Parameters
    ----------
    path : Path or RemotePath
    window : int
        Smallest number of bytes of a request to an object store. They are kept in memory.

    Raises
    ------
    FileNotFoundError
        If the object does not exist. For a remote object, `end` raises it.
    OSError
        If it is not a regular file, such as a pipe.
    ObjectReplaced
        During a read, if the remote object was replaced.
    """
    if isinstance(path, RemotePath):
        return nullcontext(_RemoteObject(path, window))
    return LocalObject(path)


def metadata_in(path: Location) -> bytes:
    """Content of a metadata file; for a file, see `trajstore.strict_json.metadata_bytes`.

    Raises
    ------
    ValueError
        If it is not a metadata file, or too large.
    OSError
        If it cannot be read.
    """
    if isinstance(path, Path):
        return metadata_bytes(path)
    return path.read_bytes(LARGEST_METADATA)


def size_of(path: Location) -> int:
    """Size of an object in bytes.

    Raises
    ------
    FileNotFoundError
        If the object does not exist.
    """
    if isinstance(path, Path):
        return path.stat().st_size
    facts = path.stat()
    if facts is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return int(facts["size"])
