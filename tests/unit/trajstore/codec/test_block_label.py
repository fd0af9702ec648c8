from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trajstore.codec.block import ANYWHERE, LABEL, BlockLabel
from trajstore.codec.chunk import checksum

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
