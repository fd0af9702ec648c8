"""One block of random bits, as an object."""

from __future__ import annotations

from bits_and_calls import random_bits

from trajstore.codec.block_form import BlockForm
from trajstore.codec.codec_chain import chain
from trajstore.codec.shard import encoded_chunks, shard_parts
from trajstore.values.native_types import native_type

OWN = "2b" * 16

FORM = BlockForm(
    array="W",
    chain=chain(native_type("bfloat16"), 3, small=True),
    shape=(8, 6, 2),
    chunk=(4, 3, 2),
    runs=((0, OWN),),
)
BITS = random_bits(FORM.shape, 3)


def written(form: BlockForm = FORM, *, rows: int = 8, **place: int) -> bytes:
    """An object that holds the random bits of its shape; of `FORM` these are `BITS`."""
    chunks, at = encoded_chunks(form, random_bits(form.shape, 3)), {"block": 5, "part": 1} | place
    return b"".join(shard_parts(form, chunks, **at, rows=rows))
