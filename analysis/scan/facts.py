"""Tables of the variables of a result: their types and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from trajstore.analysis.scan.flags import flag_attributes


class Fact(NamedTuple):
    """One variable of a result.

    Attributes
    ----------
    type : str
        NumPy type of one value. A type with a shape adds dimensions.
    long_name : str
    units : str, optional
        Default: 1. None: no units.
    flags : mapping of int to str, or sequence of str
        As for `flag_attributes`.
    """

    type: str
    long_name: str
    units: str | None = "1"
    flags: Mapping[int, str] | Sequence[str] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        """CF attributes of the variable."""
        units = {} if self.units is None else {"units": self.units}
        flags = flag_attributes(self.flags, np.dtype(self.type).base) if self.flags else {}
        return {"long_name": self.long_name, **units, **flags}


Facts = Mapping[str, Fact]
"""Variables of a result by name."""


def record_of(facts: Facts) -> np.dtype[Any]:
    """Structured type with one field per variable."""
    return np.dtype([(name, fact.type) for name, fact in facts.items()])


def dataset(
    variables: Mapping[str, tuple[Any, Any, Fact]], coords: Mapping[Any, Any]
) -> xr.Dataset:
    """Dataset of variables: dimensions, data, and the fact that gives the attributes."""
    found = {name: (dims, data, fact.attributes) for name, (dims, data, fact) in variables.items()}
    return xr.Dataset(found, coords)
