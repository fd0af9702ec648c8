"""The `trajstore.delta` codec of Zarr v3: floating-point histories as folded integer differences.

From one optimizer step to the next most values of a history keep their exponent and high mantissa
bits, or do not change at all. Along the first axis of a chunk (step) this codec

1. takes each value's bits in its native type: of a bfloat16 or float16 that is stored as float32,
   the 16 bits it has, and refuses a value that has more;
2. takes the difference to the bits of the row before, modulo 2^width; the first row stays;
3. folds the sign of the difference into its lowest bit (zigzag), so that small differences have
   high bits of zero whichever way they point.

What comes out are unsigned integers of the native width. Exact for every bit pattern. zarr finds
the codec by its entry point; this module needs numpy and zarr only.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from zarr.abc.buffer import NDBuffer
from zarr.abc.codec import ArrayArrayCodec
from zarr.dtype import UInt16, UInt32, UInt64

from trajstore.codec.scratch_memory import scratch
from trajstore.compiled_loop import CompiledLoop, memory_of, values_side_by_side
from trajstore.values.native_types import NativeType, narrow, native_type, widen

if TYPE_CHECKING:
    # What every codec is given; zarr up to 3.4.2 has no public name for it.
    from zarr.core.array_spec import ArraySpec

__all__ = ["DELTA", "DeltaCodec", "fold", "unfold"]

DELTA = "trajstore.delta"

_UNSIGNED: dict[int, Any] = {2: UInt16(), 4: UInt32(), 8: UInt64()}

Bits = npt.NDArray[Any]

_GROUP = 1 << 20  # bytes that one call of NumPy goes over: more calls, more waiting of threads

_LOOP = CompiledLoop("trajstore.codec.unfold_loop", "unfold_rows")

_SHORT = 256  # values of a row, so few that calling NumPy for each takes longer than adding them


def fold(bits: Bits, out: Bits) -> None:
    """Differences along the first axis, with folded signs; some rows at a time.

    Parameters
    ----------
    bits : ndarray of unsigned integers, (step, …)
    out : ndarray, same shape and type
        Receives the result.
    """
    signed = np.dtype(f"i{bits.itemsize}")
    highest = 8 * bits.itemsize - 1
    length = _rows_of_a_group(bits)
    signs = scratch.array("signs", (length, *bits.shape[1:]), signed)
    np.copyto(out[:1], bits[:1])
    for first in range(0, len(bits), length):
        group = out[first : first + length]
        begin = max(first, 1)
        stop = first + len(group)
        np.subtract(bits[begin:stop], bits[begin - 1 : stop - 1], out=out[begin:stop])
        difference, sign = group.view(signed), signs[: len(group)]
        np.right_shift(difference, highest, out=sign)  # arithmetic: 0 or −1
        np.add(difference, difference, out=difference)
        np.bitwise_xor(difference, sign, out=difference)


def unfold(folded: Bits, native: NativeType, out: Bits, start: int = 0) -> None:
    """Inverse of `fold`, and stored form of the bits; some rows at a time.

    Parameters
    ----------
    folded : ndarray of ``native.bits``, (step, …)
        May be overwritten: a second array of its size would not stay in the cache.
    native : NativeType
    out : ndarray of unsigned integers of the stored or the native width, (step, …)
        Receives the bits of the stored values of the rows from `start` on, or the native bits.
    start : int
        Rows that are only added up.
    """
    if not _unfold_compiled(folded, native, out, start):
        _unfold_by_numpy(folded, native, out, start)


def _unfold_compiled(folded: Bits, native: NativeType, out: Bits, start: int) -> bool:
    """Do what `unfold` does, where there is a compiled loop that can; whether it was done."""
    widened = out.itemsize != native.itemsize
    if (widened and not native.is_cut_off) or not _LOOP.is_worth(folded.size):
        return False
    taken = folded[start:]  # of the same shape as what comes out
    axis, width = values_side_by_side(taken, out)
    rows = math.prod(taken.shape[1 : axis + 1])
    if not width or (axis and rows > taken.shape[axis]):
        return False  # more than one axis of rows
    return _LOOP.run(
        memory_of(folded),
        _strides(folded, axis),
        memory_of(out),
        _strides(out, axis),
        (len(folded), rows, width),
        start,
        out.dtype.type(native.spare_bits if widened else 0),
    )


def _strides(array: Bits, axis: int) -> tuple[int, int]:
    """Values from one step to the next, and from one row to the next."""
    row = array.strides[axis] if axis else 0
    return array.strides[0] // array.itemsize, row // array.itemsize


def _unfold_by_numpy(folded: Bits, native: NativeType, out: Bits, start: int) -> None:
    if not folded.flags.c_contiguous:
        ordered = scratch.array("ordered", folded.shape, folded.dtype)
        np.copyto(ordered, folded)
        folded = ordered
    one = native.bits.type(1)
    length = _rows_of_a_group(folded)
    signs = scratch.array("signs", (length, *folded.shape[1:]), native.bits)
    before: Bits | None = None  # what the rows so far add up to
    for first in range(0, len(folded), length):
        bits = folded[first : first + length]
        sign = signs[: len(bits)]
        np.bitwise_and(bits, one, out=sign)
        np.negative(sign, out=sign)  # modulo 2^width: 0 or all ones
        np.right_shift(bits, one, out=bits)
        np.bitwise_xor(bits, sign, out=bits)
        if before is not None:
            bits[:1] += before
        passed = min(max(start - first, 0), len(bits))
        if passed:
            before = np.add.reduce(bits[:passed], axis=0, keepdims=True, dtype=native.bits)
            bits = bits[passed:]
            if not len(bits):
                continue
            bits[:1] += before
        _add_up(bits)
        before = bits[-1:]
        place = out[first + passed - start :][: len(bits)]
        if out.itemsize == native.itemsize:
            np.copyto(place, bits)
        else:
            widen(bits, native, out=place)


def _rows_of_a_group(bits: Bits) -> int:
    return max(1, min(len(bits), _GROUP // max(1, bits[:1].nbytes)))


def _add_up(bits: Bits) -> None:
    """Add to each row all that are before it."""
    if bits[:1].size < _SHORT:  # NumPy's own way is slow for rows, but one call
        np.add.accumulate(bits, axis=0, out=bits)
        return
    for at in range(1, len(bits)):
        here = bits[at : at + 1]  # a view also where a row is a single number
        np.add(here, bits[at - 1 : at], out=here)


@dataclass(frozen=True)
class DeltaCodec(ArrayArrayCodec):
    """Array-to-array codec ``trajstore.delta``.

    Parameters
    ----------
    native_dtype : {'bfloat16', 'float16', 'float32', 'float64'}
        Type whose values the array holds exactly.

    Raises
    ------
    InvalidArgument
        On encoding, if a value is not of that type.
    """

    is_fixed_size = True

    native_dtype: str

    @property
    def native(self) -> NativeType:
        """The type of that name."""
        return native_type(self.native_dtype)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Codec from the metadata of an array."""
        configuration = data.get("configuration", {})
        if data.get("name") != DELTA or set(configuration) != {"native_dtype"}:
            raise ValueError(f"expected the codec {DELTA} with a native_dtype, got {data!r}")
        native_type(configuration["native_dtype"])
        return cls(**configuration)

    def to_dict(self) -> dict[str, Any]:
        """Metadata of the codec."""
        return {"name": DELTA, "configuration": {"native_dtype": self.native_dtype}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Check that the array can hold the native type, and has a first axis.

        Raises
        ------
        ValueError
            If not.
        """
        stored = self.native.stored
        if dtype.to_native_dtype() != stored:
            raise ValueError(
                f"{DELTA} of {self.native_dtype} encodes arrays of {stored}, got {dtype}"
            )
        if not shape:
            raise ValueError(f"{DELTA} takes differences along the first axis, and there is none")

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """Spec of what comes out: unsigned integers of the native width."""
        unsigned = _UNSIGNED[self.native.itemsize]
        return replace(chunk_spec, dtype=unsigned, fill_value=unsigned.to_native_dtype().type(0))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Bytes that come out for so many bytes."""
        native = self.native
        return input_byte_length // native.stored.itemsize * native.itemsize

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        bits = narrow(chunk_array.as_numpy_array(), self.native)
        out = np.empty_like(bits)
        fold(bits, out)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out)

    def _decode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        native = self.native
        folded = chunk_array.as_numpy_array().copy()  # zarr's own may be a view of bytes
        out = np.empty(folded.shape, f"u{native.stored.itemsize}")
        unfold(folded, native, out)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out.view(native.stored))

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._encode_sync, chunk_array, chunk_spec)

    async def _decode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        # numpy lets go of the interpreter's lock: chunks are decoded side by side.
        return await asyncio.to_thread(self._decode_sync, chunk_array, chunk_spec)
