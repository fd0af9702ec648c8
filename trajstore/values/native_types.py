"""Native floating-point types as bit patterns, and their exact float32 form.

A run keeps every bit of the trainer's values. In memory a value is the *bits* of the native type
(uint16 for bfloat16 and float16). In the store it is the float32 that holds the value exactly,
including NaN payloads. Nothing in this module rounds. `NativeType` defines the bit layout of each
type.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class NativeType:
    """A type of tensors in a trainer.

    Attributes
    ----------
    name : str
        Name in torch and ml_dtypes.
    bits : numpy.dtype
        Unsigned integer of the same width.
    stored : numpy.dtype
        Type in the store: float32 holds every bfloat16, float16 and float32 value.
    mantissa_bits : int
        Explicit mantissa bits. The exponent is between them and the sign.
    """

    name: str
    bits: np.dtype[Any]
    stored: np.dtype[Any]
    mantissa_bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one value in memory."""
        return self.bits.itemsize

    @property
    def exponent_bits(self) -> int:
        """Width of the exponent."""
        return 8 * self.itemsize - 1 - self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent field of 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_mask(self) -> int:
        """The highest bit."""
        return 1 << (8 * self.itemsize - 1)

    @property
    def infinity_bits(self) -> int:
        """Bits of +inf: all bits of the exponent. A NaN also has mantissa bits."""
        return self.sign_mask - (1 << self.mantissa_bits)

    @property
    def nan_bits(self) -> int:
        """Bits of the quiet NaN without sign and payload."""
        return self.infinity_bits | (1 << (self.mantissa_bits - 1))

    @property
    def least_normal(self) -> float:
        """Smallest positive value that is not subnormal."""
        return 2.0 ** (1 - self.bias)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @cached_property  # used for every small array that is widened
    def spare_bits(self) -> int:
        """Number of lowest bits of the stored form, which are 0 in each value of this type.

        For bfloat16 this is also sufficient: its exponent is float32's. float16 has fewer
        exponents.
        """
        return NATIVE_TYPES[self.stored.name].mantissa_bits - self.mantissa_bits

    @cached_property
    def is_cut_off(self) -> bool:
        """True if its bits are the highest bits of the stored form, with an equal exponent."""
        return self.exponent_bits == NATIVE_TYPES[self.stored.name].exponent_bits


NATIVE_TYPES: dict[str, NativeType] = {
    name: NativeType(
        name=name, bits=np.dtype(bits), stored=np.dtype(stored), mantissa_bits=mantissa_bits
    )
    for name, bits, stored, mantissa_bits in (
        ("bfloat16", "uint16", "float32", 7),
        ("float16", "uint16", "float32", 10),
        ("float32", "uint32", "float32", 23),
        ("float64", "uint64", "float64", 52),
    )
}

STEP_TYPE = NativeType(
    name="int64", bits=np.dtype("uint64"), stored=np.dtype("int64"), mantissa_bits=63
)
"""Type of the step coordinate, which is stored like a variable but has no exponent."""


def native_type(name: str) -> NativeType:
    """Native type with the given name.

    Raises
    ------
    InvalidArgument
        If the type is not supported.
    """
    try:
        return NATIVE_TYPES[name]
    except KeyError:
        raise InvalidArgument(
            f"got values of type {name!r}, expected {', '.join(NATIVE_TYPES)}"
        ) from None


def is_nan(bits: Array, native: NativeType) -> npt.NDArray[np.bool_]:
    """True for each NaN, of any sign and payload.

    Parameters
    ----------
    bits : ndarray of ``native.bits``
    native : NativeType
    """
    return np.asarray((bits & (native.sign_mask - 1)) > native.infinity_bits)


def is_zero_or_nan(bits: Array, native: NativeType) -> npt.NDArray[np.bool_]:
    """True for each NaN, and for 0 of either sign.

    Parameters
    ----------
    bits : ndarray of ``native.bits``
    native : NativeType
    """
    magnitude = bits & (native.sign_mask - 1)
    return np.asarray((magnitude == 0) | (magnitude > native.infinity_bits))


@cache
def _float16_table() -> npt.NDArray[np.uint32]:
    """Float32 bits of every float16 bit pattern. A cast would change signaling NaNs."""
    half, single = NATIVE_TYPES["float16"], NATIVE_TYPES["float32"]
    pattern = np.arange(1 << 16, dtype=np.uint32)
    sign = (pattern & half.sign_mask) << 16
    magnitude = pattern & (half.sign_mask - 1)
    wide = magnitude << half.spare_bits
    normal = wide + ((single.bias - half.bias) << single.mantissa_bits)
    special = wide | single.infinity_bits
    least = np.float32(half.least_normal * half.epsilon)
    subnormal = (magnitude.astype(np.float32) * least).view(np.uint32)
    finite = np.where(magnitude < (1 << half.mantissa_bits), subnormal, normal)
    table = sign | np.where(magnitude < half.infinity_bits, finite, special)
    return table.astype(np.uint32)


def widen(bits: Array, native: NativeType, out: Array | None = None) -> Array:
    """Exact stored form of native bits.

    Parameters
    ----------
    bits : ndarray of ``native.bits``
    native : NativeType
    out : ndarray of ``native.bits`` widened to the stored width, optional
        Unsigned integers that receive the bits of the stored values.

    Returns
    -------
    ndarray of ``native.stored``, same shape
    """
    unsigned = np.dtype(f"u{native.stored.itemsize}")
    if out is None:
        out = np.empty(bits.shape, unsigned)
    if native.name == "bfloat16":
        np.left_shift(bits, np.uint32(native.spare_bits), out=out, dtype=unsigned)
    elif native.name == "float16":
        np.take(_float16_table(), bits, out=out)
    else:
        out[...] = bits
    return out.view(native.stored)


def is_bfloat16(values: Array) -> bool:
    """True if every float32 value, given by its uint32 bits, is exactly a bfloat16."""
    return not int(np.bitwise_or.reduce(values, axis=None)) & 0xFFFF


def as_bfloat16(values: Array) -> Array:
    """Upper halves of the uint32 bits of float32 values that are all bfloat16.

    Returns
    -------
    ndarray of uint16, same shape
    """
    if values.ndim == 0:
        return (values >> np.uint32(16)).astype(np.uint16)
    halves = np.ascontiguousarray(values).view(np.uint16)
    return np.ascontiguousarray(halves[..., sys.byteorder == "little" :: 2])


def narrow(stored: Array, native: NativeType) -> Array:
    """Native bits of stored values.

    Returns
    -------
    ndarray of ``native.bits``, same shape

    Raises
    ------
    InvalidArgument
        If any value is not exactly representable in the native type.
    """
    wide: Array = np.ascontiguousarray(stored, native.stored).view(f"u{native.stored.itemsize}")
    wide = wide.reshape(np.shape(stored))
    if native.stored.itemsize == native.itemsize:
        return wide
    if native.name == "bfloat16":
        if is_bfloat16(wide):
            return as_bfloat16(wide)
        exact = (wide & 0xFFFF) == 0
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            rounded = wide.view(np.float32).astype(np.float16).view(np.uint16)
        mantissa = (1 << native.mantissa_bits) - 1
        nan = ((wide >> 16) & native.sign_mask) | ((wide >> native.spare_bits) & mantissa)
        nan = (nan | native.infinity_bits).astype(np.uint16)
        bits = np.where(is_nan(wide, NATIVE_TYPES["float32"]), nan, rounded)
        exact = _float16_table()[bits] == wide
        if exact.all():
            return bits
    first = wide.view(np.float32)[~exact].ravel()[0]
    raise InvalidArgument(
        f"{np.count_nonzero(~exact)} of {exact.size} float32 values are not exactly "
        f"representable in {native.name} (the first is {first}); pass its bits as "
        "uint16, or declare the variable as float32"
    )


def _bits_of_tensor(tensor: Any, native: NativeType) -> Array:
    """Bits of a torch tensor of the native type, without importing torch."""
    # torch has few unsigned types; the signed type of the same width holds the same bits.
    signed = getattr(sys.modules["torch"], f"int{8 * native.itemsize}")
    bits: Array = tensor.contiguous().view(signed).numpy().view(native.bits)
    return bits


@cache  # NumPy makes the name at each access, which takes longer than the rest of `as_bits`
def _order_of(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """Name of a type, and True if its bytes have the order of this machine."""
    return dtype.name, dtype.isnative


def as_bits(value: Any, native: NativeType, variable: str) -> Array:
    """Native bits of values in any supported form.

    Parameters
    ----------
    value : array_like
        Values of the native type (a torch tensor, an ml_dtypes or NumPy array), uint16 bit
        patterns for a 16-bit type, or float32 values and Python floats that are exactly
        representable in it.
    native : NativeType
    variable : str
        Name for error messages.

    Raises
    ------
    InvalidArgument
        For any other type, and for values that are not exactly representable.
    """
    if type(value).__module__.split(".")[0] == "torch":
        tensor = value.detach().cpu()
        name = str(tensor.dtype).removeprefix("torch.")
        if name == native.name:
            return _bits_of_tensor(tensor, native)
        array = tensor.float().numpy() if name == "bfloat16" else tensor.numpy()
    else:
        array = np.asarray(value)
        name, has_own_order = _order_of(array.dtype)
        if not has_own_order:
            array = array.astype(array.dtype.newbyteorder("="))
        if value is not array and np.ma.is_masked(value):
            raise InvalidArgument(f"{variable}: got masked values, expected values or NaN")
        if name == native.name:
            return np.ascontiguousarray(array).view(native.bits).reshape(array.shape)
        if native.itemsize == 2 and array.dtype == np.uint16:
            return array
    try:
        if name == "float32":
            return narrow(array.astype(native.stored, copy=False), native)
        if name == "float64" and array.ndim == 0:
            with np.errstate(over="ignore", under="ignore"):
                stored = array.astype(native.stored)
            if stored == array or np.isnan(array):
                return narrow(stored, native)
    except InvalidArgument as error:
        raise InvalidArgument(f"{variable}: {error}") from None
    expected = f"{native.name} values"
    if native.itemsize == 2:
        expected += ", their uint16 bits, or float32 that is exactly representable"
    raise InvalidArgument(
        f"{variable}: got {name} of shape {array.shape}, expected {expected}; cast the "
        "values, or declare the variable with another type"
    )
