"""What a block is, and that another one in its place is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from one_block import FORM, OWN, written

from trajstore.codec.block import ANYWHERE, LABEL, BlockForm, BlockLabel, Tail
from trajstore.codec.chunk import checksum
from trajstore.values.native_types import native_type

OLD, OTHER = "1a" * 16, "3c" * 16


def tail_of(data: bytes, form: BlockForm = FORM, place: Any = (5, 1)) -> Tail:
    return form.read_tail(data[-form.tail_length :], place)


def refused(data: bytes, message: str, form: BlockForm = FORM, place: Any = (5, 1)) -> None:
    with pytest.raises(ValueError, match=message):
        tail_of(data, form, place)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: written(replace(FORM, runs=((0, OTHER),))), "W, block 5, part 1 of run 3c3c3c3c"),
        (lambda: written(replace(FORM, array="grad")), "grad, block 5, part 1 of run 2b2b2b2b"),
        (lambda: written(block=4), "W, block 4, part 1 of run 2b2b2b2b"),
        (lambda: written(part=0), "W, block 5, part 0 of run 2b2b2b2b"),
    ],
    ids=["run", "array", "block", "part"],
)
def test_a_block_of_another_place_is_refused(make: Callable[[], bytes], found: str) -> None:
    """The message names both."""
    refused(make(), f"^it is {found}, expected W, block 5, part 1 of run 2b2b2b2b$")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (8, 12, 2)},
        {"chunk": (4, 6, 2)},
        {"chain": replace(FORM.chain, native=native_type("float16"))},
        {"chain": replace(FORM.chain, token_first=True)},
    ],
)
def test_a_block_that_was_stored_otherwise_is_refused(change: dict[str, Any]) -> None:
    other = replace(FORM, **change)
    assert other.settings != FORM.settings
    label = other.label(block=5, part=1, rows=8, digest=b"d" * 32)
    index = [(0, 10)] * int(np.prod(FORM.grid))
    refused(FORM.tail(index, label), "the metadata differs from that")


def test_a_fork_has_the_blocks_of_the_run_it_was_made_of_up_to_its_own() -> None:
    fork = replace(FORM, runs=((0, OTHER), (2, OLD), (5, OWN)))
    of_other, of_old, own = (replace(FORM, runs=((0, run),)) for run in (OTHER, OLD, OWN))
    for form, block, fits in (
        (of_other, 1, True),
        (of_old, 1, True),  # in another type, since it was forked
        (of_other, 2, False),
        (of_old, 4, True),
        (of_old, 5, False),
        (own, 5, True),
        (own, 9, True),
        (own, 3, True),  # it was written again, since the fork was cut there
    ):
        data = written(form, block=block)
        if fits:
            assert tail_of(data, fork, (block, 1)).label
        else:
            refused(data, f"expected W, block {block}, part 1 of run 2b2b2b2b", fork, (block, 1))
    assert fork.label(block=7, part=0, rows=8, digest=b"").run == OWN  # type: ignore[union-attr]


def test_without_a_place_array_and_run_still_have_to_fit() -> None:
    assert tail_of(written(block=3), place=None).label
    refused(written(replace(FORM, array="grad")), "it is grad", place=None)
    refused(written(replace(FORM, runs=((0, OTHER),))), "of run 3c3c3c3c, expected", place=None)


def test_a_copy_of_another_program_fits_everywhere_in_its_array() -> None:
    for place in ((0, 0), (5, 1), None):
        assert tail_of(written(block=ANYWHERE, part=0), place=place).label
    refused(written(replace(FORM, array="grad"), block=ANYWHERE), "it is grad, some block")
    other = written(replace(FORM, runs=((0, OTHER),)), block=ANYWHERE)
    refused(other, "some block, part 1 of run 3c3c3c3c")


def test_a_tail_that_is_cut_or_broken_is_refused() -> None:
    tail = written()[-FORM.tail_length :]
    for cut in (tail[1:], tail[-FORM.index_length :], tail[:-1], b""):
        refused(cut, r"index, the last 68 bytes of it, is broken|label")
    for position in range(0, len(tail), 5):
        broken = bytearray(tail)
        broken[position] ^= 4
        refused(bytes(broken), "label" if position < LABEL else "index")


INDEX = bytes(range(32))
A_LABEL = BlockLabel(
    run="0123456789abcdef" * 2,
    array="é" * 16,  # all 32 bytes
    block=70_000,
    part=3,
    rows=256,
    settings=b"s" * 32,
    digest=b"d" * 32,
)


def test_every_flipped_bit_of_a_label_and_its_index_is_found() -> None:
    data = A_LABEL.pack(INDEX) + INDEX
    assert BlockLabel.unpack(data[:LABEL], INDEX) == A_LABEL
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="label"):
            BlockLabel.unpack(bytes(broken[:LABEL]), bytes(broken[LABEL:]))


def test_what_is_no_label_is_refused_though_its_checksum_fits() -> None:
    fields_of_another = b"trajblk9" + A_LABEL.pack(INDEX)[8:-4]
    data = fields_of_another + checksum(fields_of_another + INDEX)
    with pytest.raises(ValueError, match="it has no label"):
        BlockLabel.unpack(data, INDEX)
