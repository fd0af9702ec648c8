"""A run in a zip file, unpacked for what reads a folder."""

from __future__ import annotations

import lzma
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trajstore.arguments import format_bytes
from trajstore.errors import FormatError
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.reading.open_group import no_zipped_run
from trajstore.store.storage.remote_path import Location, RunPath, location

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
