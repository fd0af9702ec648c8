"""The fingerprint of the stored content, compared with the root's."""

from __future__ import annotations

from trajstore.errors import FormatError, ObjectStoreError
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.chunk_checks import CheckedChunks
from trajstore.integrity.problem import Problem
from trajstore.integrity.root_attribute_checks import fixed_attributes
from trajstore.schema import STEP
from trajstore.store.metadata.array_metadata import is_series
from trajstore.store.metadata.fingerprint import (
    CONTENT,
    FINGERPRINT,
    Fingerprint,
    block_digest,
    coordinate_digests,
)
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.reading.array_reader import StoredArray
from trajstore.strict_json import JsonObject


def check_fingerprint(metadata: CheckedMetadata, chunks: CheckedChunks) -> list[Problem]:
    """Compare the fingerprint of a run without other problems with the stored content."""
    message = _fault(metadata, chunks)
    path = metadata.path / METADATA_KEY
    return [Problem(array=None, path=path, message=message)] if message else []


def _fault(metadata: CheckedMetadata, chunks: CheckedChunks) -> str | None:
    """What is wrong with the fingerprint."""
    fixed = fixed_attributes(metadata.attributes)
    try:
        found = made_again(metadata, chunks, rows=metadata.rows, attributes=fixed)
    except ObjectStoreError:
        raise
    except (FormatError, OSError) as error:
        return f"the fingerprint cannot be computed: {error}"
    assert found is not None  # all parts were readable
    attributes = found.attributes()
    if attributes[CONTENT] != metadata.attributes[CONTENT]:
        return (
            "the content digest differs from the committed one, but no part is damaged; an "
            "older block was restored, or metadata or coordinates were changed in all copies"
        )
    if attributes[FINGERPRINT] != metadata.attributes[FINGERPRINT]:
        return (
            "the fingerprint differs from the committed one: attributes of the root were "
            "changed in both copies"
        )
    return None


def made_again(
    metadata: CheckedMetadata, chunks: CheckedChunks, *, rows: int, attributes: JsonObject
) -> Fingerprint | None:
    """Digests of the first rows, from checked chunks; None if a chunk is missing.

    Parameters
    ----------
    metadata : CheckedMetadata
    chunks : CheckedChunks
    rows : int
    attributes : dict
        Attributes of the root that no commit changes.

    Raises
    ------
    FormatError, OSError
        If the last block has to be read again and is not readable.
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
            if label.rows != rows:  # not yet committed, or cut since
                digest = array.digest_of_rows(block, part, rows)
            shards.append((name, part, rows, digest))
    return block_digest(shards)
