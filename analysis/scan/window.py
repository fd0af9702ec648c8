"""Windows of steps: what of a run is shown, or all that is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps

__all__ = ["rows_of_window", "windowed_scan"]


def rows_of_window(ds: xr.Dataset, steps: Steps) -> xr.Dataset:
    """Rows of a Dataset that are in a window, as `select_part` chooses them."""
    if steps is None:
        return ds
    from trajstore.exchange.selection import select_part  # which loads zarr

    return select_part(ds, steps=steps)


def windowed_scan(
    ds: xr.Dataset,
    steps: Steps = None,
    *,
    within: bool = False,
    measures: Mapping[str, Sequence[str]] | None = None,
) -> Scan:
    """Prepare a run, of which some steps are shown.

    Parameters
    ----------
    ds : Dataset
        The whole run.
    steps : str, int, slice or iterable of int, optional
        The window, as for `select_part`; by default all steps.
    within : bool
        Look at the rows of the window alone, as if there were no others. By default what is shown
        of them is what the whole run gives.
    measures : mapping of str to sequence of str
        As for `Scan`.

    Raises
    ------
    InvalidArgument, StepNotFound
        For `within` without a window, or if a step is not there.
    """
    if steps is None:
        if within:
            raise InvalidArgument("got within without steps; say which steps, such as 100:200")
        return Scan(ds, measures)
    part = rows_of_window(ds, steps)
    return Scan(part, measures) if within else Scan(ds, measures, part["step"].values)
