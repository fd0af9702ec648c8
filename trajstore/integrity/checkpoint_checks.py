"""Checks of the checkpoints next to a run: `NAME.ckpt/step-00000300.safetensors` and the like.

Other files in that folder are ignored. The metadata of a
checkpoint have two texts: ``trajstore``, a JSON object with dtype, shape and crc32c of every
tensor under ``tensors``; and ``crc32c``, the checksum of the first text, in decimal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from trajstore.errors import FormatError, ObjectStoreError
from trajstore.formats.safetensors import Entry, SafetensorsFile
from trajstore.integrity.problem import Problem
from trajstore.store.metadata.metadata_form import CHECKPOINT, checkpoint_folder
from trajstore.store.storage.remote_path import Location, RemotePath, local_file


def check_checkpoints(run: Location) -> Iterator[Problem]:
    """Check every checkpoint of a run.

    Parameters
    ----------
    run : Path or RemotePath
        A checkpoint in an object store is copied to a temporary file. A web server lists none.

    Yields
    ------
    Problem
        With array None; its path names the checkpoint.
    """
    folder: Location = checkpoint_folder(run)
    if (isinstance(folder, RemotePath) and not folder.listed) or not folder.is_dir():
        return
    try:
        names = sorted(path.name for path in folder.iterdir())
    except ObjectStoreError:
        raise
    except OSError as error:
        yield _unread(folder, error)
        return
    for path in (folder / name for name in names if CHECKPOINT.fullmatch(name)):
        try:
            with local_file(path) as local:
                yield from _check_file(path, local)
        except ObjectStoreError:
            raise
        except FileNotFoundError:
            # A recording removes older checkpoints at any time.
            if path.exists():
                yield _unread(path, "it is no file")
        except OSError as error:
            yield _unread(path, error)


def _check_file(path: Location, local: Path) -> Iterator[Problem]:
    """Check a checkpoint, or a local copy of it."""
    try:
        with SafetensorsFile(local) as file:
            yield from _check(path, file)
    except FormatError as error:
        yield _broken(path, str(error).replace(str(local), str(path)))


def _check(path: Location, file: SafetensorsFile) -> Iterator[Problem]:
    text = file.attributes.get("trajstore")
    if text is None or file.attributes.get("crc32c") != str(google_crc32c.value(text.encode())):
        yield _broken(path, "its description does not fit its checksum")
        return
    tensors = json.loads(text)["tensors"]
    for name in sorted(tensors.keys() ^ file.entries.keys()):
        where = "missing" if name in tensors else "not in its description"
        yield _broken(path, f"the tensor {name} is {where}")
    for name in sorted(tensors.keys() & file.entries.keys()):
        entry, described = file.entries[name], tensors[name]
        if entry.dtype != described["dtype"] or list(entry.shape) != described["shape"]:
            yield _broken(path, f"the tensor {name} is not of its type and shape", entry)
        elif _checksum(file, name) != described["crc32c"]:
            yield _broken(path, f"the tensor {name} does not fit its checksum", entry)


def _unread(path: Location, reason: OSError | str) -> Problem:
    cause = reason if isinstance(reason, str) else reason.strerror or reason
    message = f"the checkpoint cannot be read: {cause}"
    return Problem(array=None, path=path, message=message, remedy="none")


def _broken(path: Location, fault: str, entry: Entry | None = None) -> Problem:
    first, stop = (None, None) if entry is None else (entry.begin, entry.end)
    message = f"the checkpoint is broken: {fault}"
    return Problem(
        array=None, path=path, message=message, remedy="remove", first_byte=first, stop_byte=stop
    )


def _checksum(file: SafetensorsFile, name: str) -> int:
    """crc32c of a tensor's bytes."""
    value = 0
    for piece in file.pieces(name):
        value = google_crc32c.extend(value, piece)
    return value
