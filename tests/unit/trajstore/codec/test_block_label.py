from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from trajstore.codec.block_label import ANYWHERE, LABEL, BlockLabel, digest_of
from trajstore.codec.crc32c_check import checksum

INDEX = bytes(range(32))
A_LABEL = BlockLabel(
    run="0123456789abcdef" * 2,
    array="exp_avg_sq",
    block=70_000,
    part=3,
    rows=256,
    settings=b"s" * 32,
    digest=b"d" * 32,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"block": 0, "part": 0, "rows": 1},
        {"block": ANYWHERE},
        {"array": "x" * 32},
        {"array": "é" * 16},
        {"settings": bytes(32), "digest": b"\xff" * 32},
    ],
)
def test_a_label_comes_back_as_it_was(change: dict[str, Any]) -> None:
    label = replace(A_LABEL, **change)
    data = label.pack(INDEX)
    assert len(data) == LABEL == 140
    assert BlockLabel.unpack(data, INDEX) == label


def test_its_bytes_are_those_of_the_format() -> None:
    data = A_LABEL.pack(INDEX)
    assert data[:8] == b"trajblk2"
    assert data[8:24].hex() == A_LABEL.run
    assert data[24:56].rstrip(b"\0") == b"exp_avg_sq"
    numbers = [(56, 64, A_LABEL.block), (64, 68, A_LABEL.part), (68, 72, A_LABEL.rows)]
    for start, stop, number in numbers:
        assert int.from_bytes(data[start:stop], "little") == number
    assert data[72:104] == A_LABEL.settings
    assert data[104:136] == A_LABEL.digest
    assert data[136:] == checksum(data[:136] + INDEX)


def test_every_flipped_bit_is_found_also_of_the_index() -> None:
    data = A_LABEL.pack(INDEX) + INDEX
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


def test_a_label_describes_its_place() -> None:
    assert A_LABEL.place() == "exp_avg_sq, block 70000, part 3 of run 01234567"
    assert replace(A_LABEL, block=ANYWHERE).place() == (
        "exp_avg_sq, some block, part 3 of run 01234567"
    )


def test_a_digest_is_that_of_the_digests_in_their_order() -> None:
    first, second = (hashlib.sha256(data).digest() for data in (b"1", b"2"))
    assert digest_of([first, second]) == hashlib.sha256(first + second).digest()
    assert digest_of(iter([first, second])) != digest_of([second, first])
