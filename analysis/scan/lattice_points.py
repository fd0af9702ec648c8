"""W on a chosen lattice: values checked against their type, and rounded to another.

Rounding equals a cast in torch. Thus float32 master weights on the lattice of bfloat16 are the
values that the forward pass uses under autocast.
"""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.scan.array_types import Array
from trajstore.analysis.scan.block_tasks import measure
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import LATTICES
from trajstore.values.native_types import NATIVE_TYPES, cast, is_of_type, is_within, lattice_type


def chosen_type(lattice: str, native: str) -> str:
    """Name of the type that defines a lattice.

    Parameters
    ----------
    lattice : str
        One of `trajstore.schema.LATTICES`.
    native : str
        Type in which the trainer held the values.

    Raises
    ------
    InvalidArgument
        If the lattice is unknown, or the native type is not supported.
    """
    if lattice not in LATTICES:
        expected = ", ".join(map(repr, LATTICES))
        near = did_you_mean(lattice, LATTICES)
        raise InvalidArgument(f"got lattice={lattice!r}{near}, expected one of {expected}")
    lattice_type(native)
    return native if lattice == "native" else lattice


def on_lattice(values: Array, variable: str, native: str, chosen: str) -> Array:
    """Values rounded to a lattice.

    Parameters
    ----------
    values : ndarray of stored values, any shape
    variable : str
        Name for the error message.
    native : str
        Type in which the trainer held the values.
    chosen : str
        Type that defines the lattice.

    Raises
    ------
    InvalidArgument
        If a value is not representable in the type ``native``.
    """
    if not is_of_type(values, native):
        wrong = (cast(values, native) != values) & ~np.isnan(values)
        raise InvalidArgument(
            f"the attribute native_dtype of {variable} is {native}, but "
            f"{np.count_nonzero(wrong):,} of {values.size:,} checked values are not "
            f"representable in {native}, the first is "
            f"{values[wrong][0]!s}; set the attribute to the type of the trainer (stored as "
            f"{values.dtype}), and select the lattice with lattice={native!r}"
        )
    return values if chosen == native else cast(values, chosen)


def place_on_lattice(blocks: da.Array, variable: str, native: str, chosen: str) -> da.Array:
    """Lazy `on_lattice` of blocks; the blocks themselves if no check or rounding is needed."""
    if chosen == native and is_within(blocks.dtype, native):
        return blocks
    dtype = blocks.dtype if chosen == native else NATIVE_TYPES[chosen].stored
    return measure(
        on_lattice, "sth", blocks, variable=variable, native=native, chosen=chosen, dtype=dtype
    )


def with_lattice_attributes(result: xr.Dataset, lattice: str, **others: str) -> xr.Dataset:
    """Add the lattice and other attributes to all variables of a result.

    `Dataset.map` is not used, because it may restore previous attributes.
    """
    attributes = {**others, **lattice_attributes(lattice)}
    return result.assign(
        {name: array.assign_attrs(attributes) for name, array in result.data_vars.items()}
    )


def lattice_attributes(lattice: str) -> dict[str, str]:
    """Attributes for the lattice of a result; empty for the native lattice."""
    return {} if lattice == "native" else {"lattice": lattice}
