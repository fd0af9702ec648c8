"""W on a lattice of choice: its values checked against their type, and rounded to another.

What is rounded is what a cast of torch gives, so a question about float32 master weights on the
lattice of bfloat16 is one about what the forward pass under autocast sees of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.nearest_name import did_you_mean
from trajstore.schema import LATTICES
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.rounding import cast, is_of_type, is_within
from trajstore.values.ulp_lattice import lattice_type

__all__ = [
    "Points",
    "chosen_type",
    "lattice_attributes",
    "on_lattice",
    "place_on_lattice",
    "with_lattice_attributes",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """A matrix whose values are points of a lattice, or the ways between such points.

    Attributes
    ----------
    variable : str
        What was rounded: ``W``, or ``cells``; or ``delta``.
    type : str
        Whose values are the points.
    blocks : dask Array, (step, token, hidden)
    boundaries : dask Array, (1 per block, token, hidden)
        Row before each block.
    are_changes : bool
        Whether a row is the way that led to it, and not a place.
    """

    variable: str
    type: str
    blocks: da.Array
    boundaries: da.Array
    are_changes: bool = False


def chosen_type(lattice: str, native: str) -> str:
    """Name of the type whose values are the points of a lattice.

    Parameters
    ----------
    lattice : str
        Of `trajstore.schema.LATTICES`.
    native : str
        Type in which the trainer held the values.

    Raises
    ------
    InvalidArgument
        If there is no such lattice, or no run can hold the native type.
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
        Their name, for the message.
    native : str
        Type in which the trainer held them.
    chosen : str
        Type whose values are the points.

    Raises
    ------
    InvalidArgument
        If a value is not of the type that is said to be the native one.
    """
    if not is_of_type(values, native):
        wrong = (cast(values, native) != values) & ~np.isnan(values)
        raise InvalidArgument(
            f"the attribute native_dtype of {variable} says {native}, and "
            f"{np.count_nonzero(wrong):,} of {values.size:,} values that were looked at are not "
            f"{native}, the first is {values[wrong][0]!s}; set the attribute to the type in which "
            f"the trainer held them (it is stored as {values.dtype}), and choose the lattice with "
            f"lattice={native!r}"
        )
    return values if chosen == native else cast(values, chosen)


def place_on_lattice(blocks: da.Array, variable: str, native: str, chosen: str) -> da.Array:
    """The same of blocks, lazily; the blocks themselves, if there is nothing to check or round."""
    if chosen == native and is_within(blocks.dtype, native):
        return blocks
    dtype = blocks.dtype if chosen == native else NATIVE_TYPES[chosen].stored
    return blocks.map_blocks(
        on_lattice,
        variable=variable,
        native=native,
        chosen=chosen,
        dtype=dtype,
        meta=np.empty((0,) * blocks.ndim, dtype),
    )


def with_lattice_attributes(result: xr.Dataset, lattice: str, **others: str) -> xr.Dataset:
    """Result all of whose variables say their lattice, and other attributes.

    Not by `Dataset.map`, which may give the variables the attributes back that they had before.
    """
    attributes = {**others, **lattice_attributes(lattice)}
    return result.assign(
        {name: array.assign_attrs(attributes) for name, array in result.data_vars.items()}
    )


def lattice_attributes(lattice: str) -> dict[str, str]:
    """What a result says of its lattice, unless that is the native one."""
    return {} if lattice == "native" else {"lattice": lattice}
