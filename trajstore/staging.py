"""Results that appear whole or not at all: made beside their target, then renamed.

A rename within one folder is atomic, so nobody ever sees half a file, and an error, a full disk or
Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trajstore.errors import RunExists
from trajstore.objects import PARTIAL_SUFFIX
from trajstore.target import check_target

__all__ = ["staged_file", "staged_run"]


@contextmanager
def staged_file(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Path of an empty file that becomes `target` when the block ends well, and is removed if not.

    Raises
    ------
    RunExists
        If there is a folder, or a file and `overwrite` is not set.
    """
    path = Path(target)
    _check_file(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path)
    try:
        partial.write_bytes(b"")
        yield partial
        _check_file(path, overwrite=overwrite)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def staged_run(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Free path for a new run that becomes `target` when the block ends well.

    Raises
    ------
    RunExists
        If something is there and `overwrite` is not set, or it is not a run.
    """
    path = check_target(target, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = _beside(path)
    # Of a killed process that had the same number.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    new, old = folder / "new", folder / "old"
    try:
        yield new
        check_target(path, overwrite=overwrite)
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(folder, ignore_errors=True)


def _check_file(path: Path, *, overwrite: bool) -> None:
    if path.is_dir():
        raise RunExists(f"{path} is a folder; choose the path of a file")
    if path.exists() and not overwrite:
        raise RunExists(
            f"{path} is already there; choose another path, or overwrite it (--overwrite)"
        )


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
