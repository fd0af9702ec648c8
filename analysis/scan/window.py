"""Windows of steps: the steps to return, or the only steps to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps


def rows_of_window(ds: xr.Dataset, steps: Steps) -> xr.Dataset:
    """Rows of a Dataset in a window, as selected by `select_part`."""
    if steps is None:
        return ds
    from trajstore.exchange.selection import select_part  # imports zarr

    return select_part(ds, steps=steps)


def windowed_scan(
    ds: xr.Dataset,
    steps: Steps = None,
    *,
    within: bool = False,
    measures: Mapping[str, Sequence[str]] | None = None,
) -> Scan:
    """Prepare a scan of a run with a window of steps.

    Parameters
    ----------
    ds : Dataset
        The whole run.
    steps : str, int, slice or iterable of int, optional
        The window, as for `select_part`. Default: all steps.
    within : bool
        Use only the rows of the window, as if there were no others. By default the window selects
        from the results of the whole run.
    measures : mapping of str to sequence of str
        As for `Scan`.

    Raises
    ------
    InvalidArgument, StepNotFound
        For `within` without a window, or if a step was not recorded.
    """
    if steps is None:
        if within:
            raise InvalidArgument("got within without steps; add steps, such as 100:200")
        return Scan(ds, measures)
    part = rows_of_window(ds, steps)
    return Scan(part, measures) if within else Scan(ds, measures, part["step"].values)
