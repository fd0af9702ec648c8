"""Last element of each vector that moves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import Array, measure
from trajstore.analysis.scan.input_checks import Fact, record_of
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import (
    changed_vectors,
    moved_elements,
    moved_vectors,
    tiles,
    with_lattice_attributes,
)
from trajstore.analysis.scan.scan import Scan

_FACTS = {
    "last_moving_element": Fact("i8", "element that moved last", flags={-1: "never"}),
    "last_motion": Fact("i8", "last step with motion", flags={-1: "never"}),
    "moving_elements": Fact("i8", "elements that moved at the last motion"),
    "last_moving_size": Fact("f8", "size of the element that moved last"),
}
_NOTHING = np.array((-1, -1, 0, np.nan), record_of(_FACTS))


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
        found["last_motion"][at] = steps[row, 0, 0]
        found["last_moving_element"][at] = element
        found["moving_elements"][at] = elements.sum(-1)
        found["last_moving_size"][at] = size[np.arange(at.size), element]
    return result


def _latest(segments: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Facts of the rows in which each token moved last: (segment, token) to (token)."""
    last = segments["last_motion"].argmax(0)
    return np.asarray(segments[last, np.arange(segments.shape[1])])


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
    segments = measure(
        _last_moves,
        "st",
        points,
        scan.steps,
        dtype=_FACTS,
        sizes={"s": 1},
    )
    found = measure(_latest, "t", segments.rechunk({0: -1}), dtype=_FACTS)
    result = scan.of_tokens(found, _FACTS, points.variable, dims=("token",))
    result["last_moving_size"].attrs["units"] = scan.units
    return with_lattice_attributes(result, lattice)
