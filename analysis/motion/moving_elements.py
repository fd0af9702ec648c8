"""Last element of each vector that moves."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import field, of_only_blocks, per_row
from trajstore.analysis.scan.consecutive_rows import changed_vectors, moved_vectors, tiles
from trajstore.analysis.scan.flags import flag_attributes
from trajstore.analysis.scan.lattice_points import lattice_attributes
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.ulp_lattice import unsigned_view

__all__ = ["last_moving_element", "moved_elements"]

Array = npt.NDArray[Any]

_FACTS = np.dtype([("step", "i8"), ("element", "i8"), ("moving", "i8"), ("size", "f8")])
_NOTHING = np.array((-1, -1, 0, np.nan), _FACTS)


def _last_moves(block: Array, boundary: Array, steps: Array) -> npt.NDArray[np.void]:
    """Facts about the last motion of each token in consecutive rows, (1, token)."""
    rows, tokens, hidden = block.shape
    result = np.full((1, tokens), _NOTHING)
    for part in tiles(rows, tokens, hidden):
        later = np.ascontiguousarray(block[:, part])
        earlier = np.concatenate([boundary[:, part], later[:-1]])
        moved = moved_vectors(earlier, later, changed_vectors(earlier, later))
        at = np.nonzero(moved.any(0))[0]
        row = rows - 1 - moved[::-1].argmax(0)[at]
        elements = moved_elements(earlier[row, at], later[row, at])
        size = np.abs(earlier[row, at].astype(np.float64))
        # Of several, the smallest; if none is finite, the first.
        order = np.where(elements, np.nan_to_num(size, nan=np.inf), np.inf)
        none = np.isinf(order).all(-1)
        element = np.where(none, elements.argmax(-1), order.argmin(-1))
        found = result[0, part]
        found["step"][at] = steps[row, 0, 0]
        found["element"][at] = element
        found["moving"][at] = elements.sum(-1)
        found["size"][at] = size[np.arange(at.size), element]
    return result


def moved_elements(before: Array, after: Array) -> npt.NDArray[np.bool_]:
    """True for elements that differ in more than the sign of a zero."""
    bits, new = unsigned_view(before), unsigned_view(after)
    magnitude = NATIVE_TYPES[before.dtype.name].sign_mask - 1
    return np.asarray((bits != new) & (((bits | new) & magnitude) != 0))


def _latest(stretches: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Facts of the rows in which each token moved last: (stretch, token) to (token)."""
    last = stretches["step"].argmax(0)
    return np.asarray(stretches[last, np.arange(stretches.shape[1])])


@quantity()
def last_moving_element(scan: Scan, lattice: str = "native") -> xr.Dataset:
    """Element of each token's vector that moved last, and its size.

    The spacing of a floating-point type decreases with the size of a value. Thus the smallest
    element of a vector is the last one that an update of a given size can move.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type, as in `freeze`.

    Returns
    -------
    Dataset, (token)
        ``last_motion``, int64: last step with motion, as in `freeze`. ``last_moving_element``,
        int64: index along hidden of the element that moved at this step; of several the smallest,
        and of equally small ones the first. ``moving_elements``, int64: number of elements that
        moved at this step. ``last_moving_size``, float64: absolute value of the element before it
        moved. −1, −1, 0 and NaN for a token that never moved.

    Raises
    ------
    InvalidArgument
        For an unknown lattice, or if W holds values that its ``native_dtype`` does not.
    VariableNotRecorded
        If the run does not hold W.

    Examples
    --------
    >>> found = last_moving_element(ds).sel(token=ord("z")).compute()
    >>> found.last_motion.item(), found.moving_elements.item(), found.last_moving_size.item()
    (16, 4, 0.65234375)
    """
    scan.require_rows(1, "last_moving_element")
    points = scan.points(lattice)
    stretches = da.blockwise(
        of_only_blocks,
        "st",
        points.blocks,
        "sth",
        points.boundaries,
        "sth",
        per_row(points.blocks, scan.steps),
        "sxy",
        kernel=_last_moves,
        adjust_chunks={"s": 1},
        dtype=_FACTS,
        align_arrays=False,
        meta=np.empty((0, 0), _FACTS),
    )
    facts = stretches.rechunk({0: -1}).map_blocks(
        _latest, drop_axis=0, dtype=_FACTS, meta=np.empty(0, _FACTS)
    )
    never, step = flag_attributes({-1: "never"}), {"units": "1", **lattice_attributes(lattice)}
    of_each: dict[str, tuple[str, dict[str, Any]]] = {
        "last_moving_element": ("element", {"long_name": "element that moved last", **never}),
        "last_motion": ("step", {"long_name": "last step with motion", **never}),
        "moving_elements": ("moving", {"long_name": "elements that moved at the last motion"}),
        "last_moving_size": (
            "size",
            {"long_name": "size of the element that moved last", "units": scan.units},
        ),
    }
    return xr.Dataset(
        {
            name: scan.wrap(field(facts, fact), points.variable, dims=("token",)).assign_attrs(
                {**step, **attributes}
            )
            for name, (fact, attributes) in of_each.items()
        }
    )
