"""Native floating-point types: bit patterns, stored form, rounding, lattice of values.

A run keeps every bit of the trainer's values. In memory a value is the *bits* of the native type
(uint16 for bfloat16 and float16). In the store it is the float32 that holds the value exactly,
including NaN payloads. `NativeType` defines the bit layout of each type. Only the functions that
say so round.

Spacing and order of the lattice take the *stored* form and return results for the native type.
Between 1 and the next bfloat16 there are 65,536 float32 values, so the spacing of float32 would be
too small by this factor.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FlushedSubnormals, InvalidArgument

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
        return native_type(self.stored.name).mantissa_bits - self.mantissa_bits

    @cached_property
    def is_cut_off(self) -> bool:
        """True if its bits are the highest bits of the stored form, with an equal exponent."""
        return self.exponent_bits == native_type(self.stored.name).exponent_bits


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
"""Type of the step coordinate, and of variables of integers. It has no exponent."""


def native_type(name: str) -> NativeType:
    """Native type with the given name.

    Raises
    ------
    InvalidArgument
        If the type is not supported.
    """
    try:
        return STEP_TYPE if name == STEP_TYPE.name else NATIVE_TYPES[name]
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


def lattice_type(native: str) -> NativeType:
    """Native type with the given name.

    Raises
    ------
    InvalidArgument
        If the type is not supported.
    """
    try:
        return NATIVE_TYPES[native]
    except KeyError:
        raise InvalidArgument(
            f"got type {native!r}, expected one of {', '.join(NATIVE_TYPES)} in the attribute "
            "native_dtype"
        ) from None


def unsigned_view(stored: Array) -> Array:
    """Bits of float32 or float64 values, of any memory layout, as unsigned integers."""
    return stored.view(f"u{stored.dtype.itemsize}")


def binade(stored: Array, native: str) -> Array:
    """Largest power of two ≤ each magnitude, at least the smallest normal; inf for inf and NaN.

    Parameters
    ----------
    stored : ndarray of float32 or float64
    native : str

    Returns
    -------
    ndarray, same type and shape
        2^(max(E, 1) − bias), E the biased exponent.
    """
    exponent = NATIVE_TYPES[stored.dtype.name].infinity_bits
    power: Array = (unsigned_view(stored) & exponent).view(stored.dtype)
    least = stored.dtype.type(lattice_type(native).least_normal)
    if power.min(initial=least) < least:  # rare; the check is faster than np.maximum
        np.maximum(power, least, out=power)
    return power


def spacing(stored: Array, native: str) -> Array:
    """Distance from each magnitude to the next larger value of the native type.

    For bfloat16 that is 2^(max(E, 1) − 134), E the biased exponent: 2^−133 at zero and for
    subnormals.

    Parameters
    ----------
    stored : ndarray of float32 or float64
    native : str

    Returns
    -------
    ndarray, same type and shape
        NaN if the value is infinite or NaN.
    """
    power = binade(stored, native)
    power *= stored.dtype.type(lattice_type(native).epsilon)
    power[np.isinf(power)] = np.nan
    return power


def ordinal_dtype(native: str) -> np.dtype[Any]:
    """Signed integer type that holds every difference of two ordinals.

    Raises
    ------
    InvalidArgument
        For float64, whose differences need 65 bits.
    """
    lattice_type(native)
    if native == "float64":
        raise InvalidArgument(
            "the number of float64 values between two values does not fit into 64-bit integers; "
            "use metric='ulp' for this run"
        )
    return np.dtype("int64" if native == "float32" else "int32")


def ordinal(stored: Array, native: str) -> Array:
    """Signed index of each value among all values of the native type, in order.

    −0.0 and +0.0 have index 0. Neighboring values have consecutive indices. Infinities follow the
    largest finite values, and NaN follows infinities.

    Parameters
    ----------
    stored : ndarray of float32
    native : {'bfloat16', 'float16', 'float32'}

    Returns
    -------
    ndarray of int32 (16-bit types) or int64, same shape
    """
    dtype, points = ordinal_dtype(native), lattice_type(native)
    if native == "float16":
        with np.errstate(invalid="ignore", over="ignore"):
            bits = stored.astype(np.float16).view(np.uint16).astype(dtype)
    else:
        bits = (unsigned_view(stored) >> np.uint32(points.spare_bits)).astype(dtype)
    magnitude: Array = bits & (points.sign_mask - 1)
    np.negative(magnitude, out=magnitude, where=(bits & points.sign_mask) != 0)
    return magnitude


_BFLOAT16 = NATIVE_TYPES["bfloat16"]
_SPARE = np.uint32(_BFLOAT16.spare_bits)
_SPARE_MASK = (1 << _BFLOAT16.spare_bits) - 1

_LEAST_NORMAL, _HALF = np.uint32(1 << 23).view(np.float32), np.float32(0.5)
_HALF_OF_LEAST = 1 << 22  # the bits of a subnormal number
_ENVIRONMENT = 256  # bytes, more than a fenv_t of C has


def convert(stored: Array, native: NativeType, wanted: NativeType) -> tuple[Array, int]:
    """Bits of `wanted` for stored values of `held`.

    Exact if `wanted` holds the values, otherwise rounded to nearest, ties to even, like a torch
    cast.

    Parameters
    ----------
    stored : ndarray of ``native.stored``
    native, wanted : NativeType

    Returns
    -------
    bits : ndarray of ``wanted.bits``, same shape
    changed : int
        Number of values that were rounded.
    """
    if wanted.name == native.name:
        return narrow(stored, native), 0
    if wanted.itemsize == wanted.stored.itemsize >= native.stored.itemsize:
        return np.asarray(stored, wanted.stored, order="C").view(wanted.bits), 0
    if wanted.name == "float16":  # the cast itself gives the bits
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            bits = stored.astype(np.float32, copy=False).astype(np.float16).view(np.uint16)
        values = widen(bits, wanted)
    else:
        values = cast(stored, wanted.name)
        bits = narrow(values, wanted)
    changed = (values != stored) & ~np.isnan(stored)
    return bits, int(np.count_nonzero(changed))


def cast(stored: Array, native: str) -> Array:
    """Values cast to a native type, in the stored form of that type.

    Parameters
    ----------
    stored : ndarray of float32 or float64
    native : str

    Returns
    -------
    ndarray, same shape
        Nearest values, ties to even. Values beyond the largest become infinity; values below the
        smallest become 0 with their sign. NaN keeps the part of its payload that the type holds.
        A float64 is rounded to float32 first, as in torch.
    """
    wanted = NATIVE_TYPES[native]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values: Array = np.ascontiguousarray(stored).astype(wanted.stored, copy=False)
        values = values.reshape(np.shape(stored))
        if native == "float16":
            return values.astype(np.float16).astype(wanted.stored)
    if native != "bfloat16":
        return values
    wide = unsigned_view(values)
    rounded = _to_even(wide)
    nan = is_nan(wide, NATIVE_TYPES["float32"])
    if nan.any():
        rounded = np.where(nan, wide | np.uint32(_BFLOAT16.nan_bits << int(_SPARE)), rounded)
    rounded &= ~np.uint32(_SPARE_MASK)
    return rounded.view(np.float32)


def result_bits(values: Array, native: NativeType) -> Array:
    """Bits of computed values in a native type, the same on every machine.

    Parameters
    ----------
    values : ndarray of ``native.stored``
        Rounded as by `cast`. A NaN becomes the quiet NaN without sign and payload, which otherwise
        depend on the processor.
    native : NativeType
    """
    bits = narrow(cast(values, native.name), native)
    nan = is_nan(bits, native)
    return np.where(nan, bits.dtype.type(native.nan_bits), bits) if nan.any() else bits


def _flushes_subnormals() -> bool:
    with np.errstate(under="ignore"):
        return bool((_LEAST_NORMAL * _HALF).view(np.uint32) != _HALF_OF_LEAST)


@contextmanager
def kept_subnormals() -> Iterator[None]:
    """Compute exactly in a thread that replaces subnormal numbers by 0, and put that back.

    Threads inherit that from the thread that starts them.

    Raises
    ------
    FlushedSubnormals
        If the C library of the system cannot do so.
    """
    if not _flushes_subnormals():
        yield
        return
    before = ctypes.create_string_buffer(_ENVIRONMENT)
    library = ctypes.CDLL(None)
    with suppress(AttributeError, ValueError):  # the next check raises an error
        usual: Any = ctypes.c_void_p(-1)  # FE_DFL_ENV
        if sys.platform == "darwin":
            usual = ctypes.byref(ctypes.c_char.in_dll(library, "_FE_DFL_ENV"))
        library.fegetenv(before)
        library.fesetenv(usual)
    if _flushes_subnormals():
        raise FlushedSubnormals(
            "rows of the encoding `compact` need exact arithmetic, but this thread replaces "
            "subnormal numbers by 0; call torch.set_flush_denormal(False) before"
        )
    try:
        yield
    finally:
        library.fesetenv(before)


def is_of_type(stored: Array, native: str) -> bool:
    """True if every value is exactly representable in a native type. Any NaN counts as such.

    Parameters
    ----------
    stored : ndarray of floating-point numbers
    native : str
    """
    if is_within(stored.dtype, native):
        return True
    # Fast path: one pass over the bits accepts bfloat16 values without NaN.
    if native == "bfloat16" and stored.dtype == np.float32 and is_bfloat16(unsigned_view(stored)):
        return True
    with np.errstate(invalid="ignore"):
        return bool(((cast(stored, native) == stored) | np.isnan(stored)).all())


def is_within(stored: npt.DTypeLike, native: str) -> bool:
    """True if a native type holds every value of a type, so that no check is needed.

    Examples
    --------
    >>> is_within("float16", "float32"), is_within("float16", "bfloat16")
    (True, False)
    """
    dtype = np.dtype(stored)
    return dtype.name == native or dtype.itemsize < NATIVE_TYPES[native].itemsize


def _to_even(wide: Array) -> Array:
    """Bits of float32 with the nearest bfloat16 in their upper half; invalid for NaN."""
    # Add half of the last kept bit, minus one if that bit is even.
    rounded: Array = wide >> _SPARE
    # In place: allocating a large temporary array costs more than the computation.
    rounded &= np.uint32(1)
    rounded += np.uint32(_SPARE_MASK >> 1)
    rounded += wide
    return rounded
