"""The Zarr group of a run, checked; and a run in a zip file, unpacked for what reads a folder."""

from __future__ import annotations

import glob
import json
import lzma
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import ZipStore

from trajstore.errors import (
    FormatError,
    ObjectStoreError,
    RunNotFound,
    TrajstoreError,
    did_you_mean,
)
from trajstore.store.reading.checked_metadata import (
    checked_root,
    not_opened,
    remedy,
    root_metadata,
)
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    Location,
    ReadStore,
    RemotePath,
    RunPath,
    location,
)
from trajstore.strict_json import LARGEST_METADATA, too_large
from trajstore.threads import in_parallel
from trajstore.units import format_bytes

_SHOWN = 5  # runs in a message


def open_group(path: RunPath, *, zipped: bool = False) -> zarr.Group:
    """Open the root group of a run, read-only, at its last commit, and check its metadata.

    The root is checked before zarr reads it, with its copies of the arrays' metadata. The
    arrays' own metadata are read only if it has no copies, or by writers
    (`check_own_metadata`). The declared shapes are compared with the stored objects.

    Parameters
    ----------
    path : path-like, str or RemotePath
    zipped : bool
        True if it may be a zip file with the content of a run, whose values zarr reads.

    Raises
    ------
    RunNotFound
        If `path` does not exist.
    FormatError
        If it is not a run, or has another format; if a metadata file has an impossible member, or
        declares rows that are not stored; if the metadata of an array differs from the schema
        (`trajstore.store.metadata.zarr_json`).
    InvalidArgument, MissingExtra
        If `path` is an unsupported address (`location`).
    """
    place = location(path)
    if isinstance(place, Path) and not place.exists():
        raise RunNotFound(f"there is no run at {path}{similar_runs(place)}")
    in_zip = zipped and isinstance(place, Path) and place.suffix == ".zip" and place.is_file()
    metadata = _zipped_root(place) if in_zip else root_metadata(place)
    return _zarr_group(place, metadata, checked_root(place, metadata))


def whole(path: RunPath, group: zarr.Group, name: str) -> npt.NDArray[Any]:
    """All values of an array of a run, such as a coordinate.

    Raises
    ------
    FormatError
        If they cannot be decoded.
    """
    array: Any = group[name]
    with named_errors(path, f"the values of {name}: "):
        return np.asarray(array[...])


@contextmanager
def named_errors(path: RunPath, what: str = "") -> Iterator[None]:
    """Name a run, and what is read of it, in the errors of a ``with`` block.

    Raises
    ------
    FormatError
        Instead of the many types that xarray, zarr and codecs raise for damaged data.
    """
    try:
        yield
    except (TrajstoreError, OSError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(
            f"{path} cannot be read: {what}{error}{remedy(location(path))}"
        ) from error


def is_run(path: Location) -> bool:
    """True if there is a run, which may be damaged."""
    try:
        metadata = json.loads((path / METADATA_KEY).read_bytes())
        return "trajstore_format" in metadata["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def ends(array: Any) -> tuple[int, int]:
    """First and last value of a one-dimensional array that is not empty.

    Only these two are read, whatever length the array declares.
    """
    rows = array.shape[0]
    reads = [partial(_value, array, row) for row in (0, rows - 1)]
    first, last = in_parallel(reads, 2)
    return first, last


def _value(array: Any, row: int) -> int:
    return int(array[row : row + 1][0])


def similar_runs(path: Path) -> str:
    """End of a message about a missing run: runs with a similar name, or an empty text.

    These are the runs of several parameters with this name, or one whose name is nearly the same,
    or else those in the folder.

    Parameters
    ----------
    path : Path
        Path of the missing run.
    """
    stem = glob.escape(path.name.removesuffix(".zarr"))
    found = sorted(str(run) for run in path.parent.glob(f"{stem}.*.zarr"))
    if found:
        return f"; similar names: {', '.join(found[:9])}"
    try:
        entries = sorted(path.parent.iterdir())
    except OSError:
        return ""
    runs = [entry for entry in entries if (entry / METADATA_KEY).exists()]
    # Names are compared without their common ending.
    near = [run.name for run in runs if did_you_mean(path.stem, [run.stem])]
    if near or not runs:
        return did_you_mean(path.name, near)
    shown = ", ".join(run.name for run in runs[:_SHOWN]) + (" …" if len(runs) > _SHOWN else "")
    return f"; runs in {path.parent.absolute()}: {shown}"


def _zipped_root(path: Location) -> bytes:
    """Bytes of the metadata of the root in a zip file."""
    try:
        with zipfile.ZipFile(str(path)) as file:
            size = file.getinfo(METADATA_KEY).file_size
            if size > LARGEST_METADATA:
                raise FormatError(f"{path} is not a run: {METADATA_KEY}: {too_large(size)}")
            return file.read(METADATA_KEY)
    except (zipfile.BadZipFile, KeyError) as error:
        raise no_zipped_run(path) from error


def no_zipped_run(path: Location) -> FormatError:
    """Error about a zip file that holds no run."""
    return FormatError(
        f"{path} is not a zip file, or has no {METADATA_KEY} at its top; pack a run from inside "
        f"its folder: zip -0r ../{path.name} ."
    )


def _zarr_group(place: Location, metadata: bytes, arrays: Mapping[str, Any]) -> zarr.Group:
    """Open the group and its arrays."""
    try:
        if isinstance(place, RemotePath):
            cached = {(place / METADATA_KEY).key: metadata}
            store = ReadStore(place.store, root=place.root, cached=cached)
            group = zarr.open_group(store, path=place.key, mode="r", zarr_format=3)
        else:
            stored = ZipStore(place, mode="r") if place.is_file() else str(place)
            group = zarr.open_group(stored, mode="r", zarr_format=3)
        dict(group.arrays())  # opens each
        return group
    except ObjectStoreError:
        raise
    except Exception as error:  # zarr raises many types for a damaged metadata file
        if isinstance(place, Path) and not place.exists():  # it was removed a moment ago
            raise RunNotFound(f"there is no run at {place}") from error
        raise not_opened(place, arrays, error) from error


# An encrypted member is a RuntimeError, of which an unknown compression is a kind.
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


@contextmanager
def unzipped(path: RunPath) -> Iterator[Location]:
    """Place of a run; of a zip file, a temporary folder of the same name with its content.

    The checksums of the zip file are not compared: those of the run name the damaged block.

    Raises
    ------
    FormatError
        If it is no zip file, or its content cannot be unpacked, or does not fit.
    """
    place = location(path)
    if not (isinstance(place, Path) and place.suffix == ".zip" and place.is_file()):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="trajstore-") as temporary:
        folder = Path(temporary) / place.name
        folder.mkdir()
        try:
            with zipfile.ZipFile(place) as packed:
                members = packed.infolist()
                if METADATA_KEY not in [member.filename for member in members]:
                    raise no_zipped_run(place)
                size, free = sum(each.file_size for each in members), shutil.disk_usage(folder).free
                if size > free:
                    raise FormatError(
                        f"{place} unpacks to {format_bytes(size)}, but {temporary} has "
                        f"{format_bytes(free)} free; set TMPDIR to a folder with more"
                    )
                for member in members:
                    del member.CRC  # ZipExtFile then compares none
                    packed.extract(member, folder)
        except OSError as error:
            raise FormatError(f"{place} cannot be unpacked: {error.strerror or error}") from error
        except _DAMAGED as error:
            raise FormatError(f"{place} cannot be unpacked: {error}") from error
        yield folder
