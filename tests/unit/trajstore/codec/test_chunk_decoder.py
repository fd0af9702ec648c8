"""What a decoder refuses and needs; what it makes of chunks is tested with their arrays."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from bits_and_calls import random_bits
from numcodecs import blosc

from trajstore.codec.chunk import LENGTH, OWN_FORM, Decoder, chain, checksum
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


@pytest.mark.parametrize("history", [True, False])
def test_only_what_is_needed_is_decompressed(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordered by token, blocks of the tokens alone; otherwise the rows so far."""
    native, shape = native_type("bfloat16"), (8, 2_000, 64)
    coding = chain(native, 3, small=False, history=history)
    changes = np.random.default_rng(3).integers(-2, 3, shape)
    bits = (0x3F80 + changes.cumsum(axis=0)).astype(np.uint16)
    data, real = coding.encode(bits, shape), blosc.decompress
    decompressed: list[int] = []

    def decompress(frame: memoryview, out: np.ndarray) -> object:
        decompressed.append(out.nbytes)
        return real(frame, out)

    monkeypatch.setattr("trajstore.codec.chunk.blosc.decompress", decompress)
    for steps, few in ((slice(0, 8), history), (slice(2, 3), True)):
        decompressed.clear()
        window = (steps, slice(700, 703), slice(0, 64))
        out = np.empty_like(bits[window])
        Decoder(coding, shape).decode(data, window, out)
        np.testing.assert_array_equal(out, bits[window])
        assert 0 < sum(decompressed) <= (0.6 if few else 1) * bits.nbytes
