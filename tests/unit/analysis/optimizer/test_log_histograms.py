"""Every token is counted once."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore.analysis.optimizer.log_histograms import log_histogram
from trajstore.errors import InvalidArgument


def values(chunks=None):
    rng = np.random.default_rng(0)
    data = 10 ** rng.uniform(-4, 4, (5, 40))
    data[0, :6] = [0, np.nan, np.inf, -1, 1.0, 0.1]
    da = xr.DataArray(data, dims=("step", "token"), name="length")
    da = da.assign_coords(is_dead=("token", np.arange(40) % 3 == 0))
    return da.chunk(chunks) if chunks else da


@pytest.mark.parametrize("chunks", [None, {"step": 2, "token": 7}])
def test_counts(chunks):
    da = values(chunks)
    found = log_histogram(da, -3, 3, 2).compute()
    edges = np.append(found.lower, found.upper[-1])
    np.testing.assert_allclose(edges, np.logspace(-3, 3, 13))
    for population, members in (
        ("dead", da.is_dead.values),
        ("live", ~da.is_dead.values),
        ("all", slice(None)),
    ):
        part = found.sel(population=population)
        for row in range(5):
            numbers = da.values[row, members]
            inside = numbers[np.isfinite(numbers) & (numbers > 0)]
            # The last class of NumPy's takes its upper edge as well, and nothing lies on it.
            np.testing.assert_array_equal(part["count"][row], np.histogram(inside, edges)[0])
            assert part.zero[row] == (numbers == 0).sum()
            assert part.nan[row] == np.isnan(numbers).sum()
        total = part["count"].sum("value_class") + part.zero + part.outside + part.nan
        assert (total == da.values[0, members].size).all()
    assert found.outside.sel(population="all")[0] >= 2  # −1 and infinity


def test_impossible_classes():
    for options in ({"lowest": 3, "highest": 3}, {"per_decade": 0}):
        with pytest.raises(InvalidArgument, match="expected the second power to be larger"):
            log_histogram(values(), **options)
    with pytest.raises(InvalidArgument, match="expected token among them"):
        log_histogram(values().mean("token"))
