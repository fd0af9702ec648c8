"""The fingerprint of a run, made again from all that is stored and held against the root's."""

from __future__ import annotations

from trajstore.errors import FormatError, ObjectStoreError
from trajstore.integrity.array_json_checks import is_series
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.chunk_checks import CheckedChunks
from trajstore.integrity.problem import Problem
from trajstore.integrity.root_attribute_checks import fixed_attributes
from trajstore.schema import STEP
from trajstore.store.metadata.fingerprint import (
    CONTENT,
    FINGERPRINT,
    Fingerprint,
    block_digest,
    coordinate_digests,
)
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.array_reader import StoredArray
from trajstore.strict_json import Document

__all__ = ["check_fingerprint", "made_again"]


def check_fingerprint(metadata: CheckedMetadata, chunks: CheckedChunks) -> list[Problem]:
    """Hold the fingerprint against what is stored.

    Where something else is wrong already, the fingerprint says nothing more.
    """
    if metadata.problems or chunks.problems:
        return []
    try:
        fixed = fixed_attributes(metadata.attributes)
        found = made_again(metadata, chunks, rows=metadata.rows, attributes=fixed)
    except ObjectStoreError:
        raise
    except (FormatError, OSError) as error:
        return [_problem(metadata, f"the fingerprint cannot be made again: {error}")]
    if found is None:
        return [_problem(metadata, "the fingerprint cannot be made again: not all could be read")]
    attributes = found.attributes()
    if attributes[CONTENT] != metadata.attributes[CONTENT]:
        return [
            _problem(
                metadata,
                "what is stored is not what was committed: each part is whole, and its content "
                "digest is another; a block of an older state has come back, or the metadata or "
                "coordinates of arrays have been changed throughout",
            )
        ]
    if attributes[FINGERPRINT] != metadata.attributes[FINGERPRINT]:
        return [
            _problem(
                metadata,
                "the attributes of the root are not those that were committed: the fingerprint is "
                "another; they have been changed in both places",
            )
        ]
    return []


def made_again(
    metadata: CheckedMetadata, chunks: CheckedChunks, *, rows: int, attributes: Document
) -> Fingerprint | None:
    """Digests of the first rows, from what was read of them; None if that is not all.

    Parameters
    ----------
    metadata : CheckedMetadata
    chunks : CheckedChunks
    rows : int
    attributes : dict
        Of the root, those that no commit changes.

    Raises
    ------
    FormatError, OSError
        If the last block has to be read again, and cannot be.
    """
    stored = {name: metadata.stored(name) for name in metadata.arrays if is_series(name)}
    if STEP.name not in stored:
        return None
    length = stored[STEP.name].shard[0]
    digests = coordinate_digests(metadata.path, metadata.arrays)
    found = Fingerprint(metadata.arrays, attributes, digests, length)
    for block in range(-(-rows // length)):
        held = min(rows - block * length, length)
        digest = _digest_of_block(chunks, stored, block, held)
        if digest is None:
            return None
        found = found.added(held, digest)
    return found


def _digest_of_block(
    chunks: CheckedChunks, stored: dict[str, StoredArray], block: int, rows: int
) -> bytes | None:
    shards = []
    for name, array in stored.items():
        for part in range(array.parts):
            place = name, block, part
            label, digest = chunks.labels.get(place), chunks.digests.get(place)
            if label is None or digest is None:
                return None
            if label.rows != rows:  # written, and not committed yet, or cut since
                digest = array.digest_of_rows(block, part, rows)
            shards.append((name, part, rows, digest))
    return block_digest(shards)


def _problem(metadata: CheckedMetadata, message: str) -> Problem:
    return Problem(array=None, path=metadata.path / DOCUMENT, message=message)
