"""From one recorded row to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

__all__ = ["between_rows"]

Kernel = Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[Any]]


def between_rows(W: xr.DataArray, kernel: Kernel, dtype: npt.DTypeLike) -> xr.DataArray:
    """Apply a kernel to every row and the one before it.

    Each block is read once; only the last row of the block before it is held besides.

    Parameters
    ----------
    W : DataArray, (step, token, hidden)
    kernel : callable
        From (earlier, later), both (rows, token, hidden), to (rows, token).
    dtype : dtype
        Of the result.

    Returns
    -------
    DataArray, (step, token)
        One row fewer than `W`; each has the step of the later row.
    """
    W = W.transpose("step", "token", "hidden")
    data = W.data

    def pairs(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return kernel(block[:-1], block[1:])

    if W.chunks is None:
        result = pairs(np.asarray(data))
    else:
        data = data.rechunk({2: -1})
        steps, tokens, _ = data.chunks
        # Every block but the first begins with the last row of the one before.
        result = da.overlap.overlap(data, depth={0: (1, 0)}, boundary="none").map_blocks(
            pairs,
            drop_axis=2,
            chunks=((steps[0] - 1, *steps[1:]), tokens),
            dtype=dtype,
            meta=np.empty((0, 0), dtype),
        )
    coords = {
        name: coordinate
        for name, coordinate in W.isel(step=slice(1, None)).coords.items()
        if "hidden" not in coordinate.dims
    }
    return xr.DataArray(result, dims=("step", "token"), coords=coords)
