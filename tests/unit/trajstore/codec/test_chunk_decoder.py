"""What a decoder refuses; what it makes of chunks is tested with the arrays that hold them."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.codec_chain import LENGTH, OWN_FORM, chain
from trajstore.codec.crc32c_check import checksum
from trajstore.values.native_types import native_type


@pytest.mark.parametrize("kind", ["bytes copied", "bytes packed"])
def test_a_forged_chunk_is_an_error(kind: str) -> None:
    """Its checksum fits, but its header promises more than there is."""
    coding = chain(native_type("bfloat16"), 3, small=False)
    shape = (8, 20_120, 64)
    size = int(np.prod(shape)) * 2
    flags = 0x06 if kind == "bytes copied" else 0x24
    data = struct.pack("<BBBBIII", 2, 1, flags, 2, size, size, size + 16) + b"x" * 100
    with pytest.raises(ValueError, match="not a whole Blosc frame"):
        Decoder(coding, shape).unpack(data + checksum(data))


def test_a_chunk_of_another_shape_is_an_error() -> None:
    coding = chain(native_type("bfloat16"), 3, small=True)
    data = coding.encode(random_bits((4, 6, 5), 1, 16), (4, 6, 5))
    assert Decoder(coding, (4, 6, 5)).unpack(data).shape == (4, 6, 5)
    with pytest.raises(ValueError, match="its size differs"):
        Decoder(coding, (4, 6, 6)).unpack(data)


def test_a_chunk_of_too_many_terms_takes_no_memory() -> None:
    """A frame of zeros is short, however many they are."""
    coding = replace(chain(native_type("bfloat16"), 3, small=True), kind="predicted")
    shape, terms = (2, 3, 4), 9
    head = coding.compress(np.zeros((2, terms, 7), np.uint16))
    body = coding.compress(np.zeros(shape, np.uint16))
    data = OWN_FORM + LENGTH.pack(len(head)) + head + body
    with pytest.raises(ValueError, match="9 terms"):
        Decoder(coding, shape).unpack(data + checksum(data))
