"""Digests of the stored content of a run, updated with each block.

The *content digest* is a chain over the blocks. It starts from the arrays' metadata and the
coordinates, and each block is added to it. Runs with the same content digest hold the same rows.
The *fingerprint* also covers all attributes of the root that no commit changes, including the
identity of the run. Both cover the committed rows. After a run is cut, they are the digests it had
at that number of rows.

Source: docs/reference/format.md, *Fingerprint*.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from trajstore.schema import belongs, coordinate, variables_of
from trajstore.store.metadata.object_keys import chunk_key
from trajstore.store.storage.remote_path import Location
from trajstore.strict_json import canonical

CONTENT = "content_digest"
FINGERPRINT = "fingerprint"
"""Attributes of the root."""

ShardDigest = tuple[str, int, int, bytes]
"""Array, part, rows and digest of a shard."""

_SHARD = struct.Struct("<II32s")
NOTES = "notes"
"""Attribute of the root: what the recording could not see, or not as its loop suggests."""

CHANGING = ("status", "committed_rows", "updated", CONTENT, FINGERPRINT, NOTES)
"""Attributes of the root that commits set."""

COPY = "root_attributes"
"""Attribute of ``step`` that holds a copy of the root's other attributes."""

_BY_RESUMING = "resumed"


class Fingerprint:
    """Digests of the rows of a run.

    Parameters
    ----------
    arrays : mapping of str to dict
        Metadata of each array.
    attributes : mapping
        Attributes of the root. Those that commits change are ignored.
    coordinates : mapping of str to bytes
        SHA-256 of each stored object of the coordinates, by its key.
    block_rows : int
    """

    def __init__(
        self,
        arrays: Mapping[str, Mapping[str, Any]],
        attributes: Mapping[str, Any],
        coordinates: Mapping[str, bytes],
        block_rows: int,
    ) -> None:
        stored = {key: digest.hex() for key, digest in coordinates.items()}
        # Other arrays in the group do not belong to the run.
        held = variables_of(attributes)
        lasting = {name: _lasting(name, arrays[name]) for name in arrays if belongs(name, held)}
        self._block_rows = block_rows
        self._metadata = _sha256_of(_fixed(attributes))
        self._whole = _sha256_of({"arrays": lasting, "coordinates": stored})
        self._tip = self._whole

    def added(self, rows: int, digest: bytes) -> Fingerprint:
        """Add the next block. It replaces the last one, if that was not full.

        Parameters
        ----------
        rows : int
            Rows of the block.
        digest : bytes
            Result of `block_digest`.
        """
        longer = copy(self)
        longer._tip = hashlib.sha256(self._whole + digest).digest()
        if rows == self._block_rows:
            longer._whole = longer._tip
        return longer

    def ended(self, shards: Sequence[ShardDigest]) -> Fingerprint:
        """Add the shards of the last, unfinished block; none if the last block is full."""
        return self.added(shards[0][2], block_digest(shards)) if shards else self

    def of_attributes(self, attributes: Mapping[str, Any]) -> Fingerprint:
        """Digests of the same rows, with other attributes of the root."""
        other = copy(self)
        other._metadata = _sha256_of(_fixed(attributes))
        return other

    def attributes(self) -> dict[str, str]:
        """Both digests of the added blocks, as attributes of the root."""
        return {
            CONTENT: self._tip.hex(),
            FINGERPRINT: hashlib.sha256(self._metadata + self._tip).hexdigest(),
        }


def fingerprint_of(attributes: Mapping[str, Any], content: bytes) -> str:
    """Fingerprint of a run with these attributes of the root and this content digest."""
    return hashlib.sha256(_sha256_of(_fixed(attributes)) + content).hexdigest()


def block_digest(shards: Iterable[ShardDigest]) -> bytes:
    """Digest of a block."""
    total = hashlib.sha256()
    for name, part, rows, digest in sorted(shards):
        total.update(name.encode() + b"\0" + _SHARD.pack(part, rows, digest))
    return total.digest()


def coordinate_digests(path: Location, names: Iterable[str]) -> dict[str, bytes]:
    """SHA-256 of the stored objects of a run's coordinates, by their keys.

    Raises
    ------
    OSError
        If one cannot be read.
    """
    found = {}
    for name in names:
        key = chunk_key(name, 0, 1)
        if coordinate(name):
            with suppress(FileNotFoundError):
                found[key] = hashlib.sha256((path / key).read_bytes()).digest()
    return found


def _lasting(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Part of an array's metadata that depends neither on the number of rows nor on the run."""
    lasting = dict(metadata)
    lasting["attributes"] = {
        key: value for key, value in metadata["attributes"].items() if key != COPY
    }
    lasting["codecs"] = [_without_runs(codec) for codec in metadata["codecs"]]
    if coordinate(name) is None:
        lasting["shape"] = [0, *metadata["shape"][1:]]
    return lasting


def _without_runs(codec: Mapping[str, Any]) -> dict[str, Any]:
    if "configuration" not in codec:
        return dict(codec)
    configuration = {key: value for key, value in codec["configuration"].items() if key != "runs"}
    return dict(codec) | {"configuration": configuration}


def _fixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the root that never change."""
    fixed = {key: value for key, value in attributes.items() if key not in CHANGING}
    provenance = fixed.get("provenance")
    if isinstance(provenance, Mapping):
        fixed["provenance"] = {
            key: value for key, value in provenance.items() if key != _BY_RESUMING
        }
    return fixed


def _sha256_of(value: Any) -> bytes:
    return hashlib.sha256(canonical(value).encode()).digest()
