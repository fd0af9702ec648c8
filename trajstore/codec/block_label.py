"""The label of a stored block: which run, array and rows it belongs to, and a digest of it.

Source: docs/reference/format.md, *Labels*.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from trajstore.codec.crc32c_check import checksum, is_intact

_MAGIC = b"trajblk2"
_FIELDS = struct.Struct("<8s16s32sQII32s32s")

LABEL = _FIELDS.size + 4
"""Bytes of a label, with its checksum."""

ANYWHERE = (1 << 64) - 1
"""Block number in the label of a copy that another program made: the block is unknown."""


class LabelError(ValueError):
    """A label cannot be read. The block may be intact, if another program wrote it."""


@dataclass(frozen=True, kw_only=True)
class BlockLabel:
    """Identity, place and digest of a block.

    Attributes
    ----------
    run : str
        Identity of the run: 32 hexadecimal digits.
    array : str
    block, part : int
        Number of the block along ``step``, and of the object along ``token``.
    rows : int
        Number of valid rows of the block; the others are padding.
    settings : bytes
        SHA-256 of the block's encoding (`trajstore.codec.block_form.BlockForm.settings`).
    digest : bytes
        SHA-256 of the stored chunks (`digest_of`).
    """

    run: str
    array: str
    block: int
    part: int
    rows: int
    settings: bytes
    digest: bytes

    def pack(self, index: bytes) -> bytes:
        """Bytes of the label. Its checksum covers the index after it, too."""
        fields = _FIELDS.pack(
            _MAGIC,
            bytes.fromhex(self.run),
            self.array.encode(),
            self.block,
            self.part,
            self.rows,
            self.settings,
            self.digest,
        )
        return fields + checksum(fields + index)

    @classmethod
    def unpack(cls, data: bytes, index: bytes) -> BlockLabel:
        """Label, from its bytes and those of the index after it.

        Raises
        ------
        LabelError
            If the checksum does not match, or the bytes are no label.
        """
        fields = data[:-4]
        if not is_intact(fields + index + data[-4:]):
            known = "the checksum of its label does not match"
            raise LabelError(known if data.startswith(_MAGIC) else "it has no label")
        magic, run, array, block, part, rows, settings, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC:
            raise LabelError("it has no label")
        return cls(
            run=run.hex(),
            array=array.rstrip(b"\0").decode(),
            block=block,
            part=part,
            rows=rows,
            settings=settings,
            digest=digest,
        )

    def place(self) -> str:
        """Run, array, block and part, for a message."""
        number = "some block" if self.block == ANYWHERE else f"block {self.block}"
        return f"{self.array}, {number}, part {self.part} of run {self.run[:8]}"


def new_identity() -> str:
    """Identity of a new run: 128 random bits, in hexadecimal digits."""
    return uuid.uuid4().hex


def digest_of(pieces: Iterable[bytes]) -> bytes:
    """Digest of a block, from the SHA-256 of each inner chunk, in order."""
    return hashlib.sha256(b"".join(pieces)).digest()
