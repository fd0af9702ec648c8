from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.populations import row_vectors


def history(*dims: str) -> xr.Dataset:
    rng = np.random.default_rng(5)
    W = rng.normal(size=(9, 6, 4)).astype("f4").round(1)
    W[5:, 2] = W[4, 2]
    attrs = {"native_dtype": "float32", "units": "1"}
    names = {"W": W, "grad": rng.normal(size=W.shape).astype("f4")}
    ds = xr.Dataset({name: (("step", *dims), values, attrs) for name, values in names.items()})
    return ds.assign_coords({"step": np.arange(9), dims[0]: np.arange(6)})


def test_each_quantity_takes_the_rows_of_a_parameter():
    of_tokens, of_rows = history("token", "hidden"), history("row", "column")
    computed = []
    for name in analysis.QUANTITIES:
        try:
            expected = analysis.compute(of_tokens, [name]).load()
        except VariableNotRecorded:
            continue
        found = analysis.compute(of_rows, [name]).load()
        assert not {"token", "hidden"} & {*found.dims, *found.coords}
        assert "token" not in str([variable.attrs for variable in found.values()]).split()
        again = {"row": "token", "column": "hidden"}
        xr.testing.assert_equal(
            found.rename({old: new for old, new in again.items() if old in found.dims}), expected
        )
        computed.append(name)
    assert {"freeze", "clusters", "pca", "grad_norms", "regimes"} <= set(computed)
    expected = analysis.vectors(of_tokens, "grad").W
    xr.testing.assert_equal(analysis.vectors(of_rows, "grad").W, expected)


def test_populations_of_a_parameter_are_rows_by_number():
    ds = analysis.with_populations(history("row", "column"), first="row < 2", odd=[1, 3, 5])
    found = analysis.centroid(ds).centroid
    assert found.population.values.tolist() == ["all", "first", "odd"]
    W = ds.W.values.astype("f8")
    np.testing.assert_allclose(found.sel(population="first"), W[:, :2].mean(1))
    np.testing.assert_allclose(found.sel(population="odd"), W[:, 1::2].mean(1))


def test_selected_rows_keep_their_numbers_and_the_name():
    part = history("row", "column").isel(row=[4, 1]).assign_attrs(recording={"parameter": "a.b"})
    found = row_vectors(part)
    assert found.token.values.tolist() == [4, 1]
    assert found.attrs["parameter"] == "a.b"
    ds = history("token", "hidden")
    assert row_vectors(ds) is ds


def test_a_parameter_without_elements_has_no_quantities():
    with pytest.raises(InvalidArgument, match=r"a\.b has no elements"):
        row_vectors(
            history("row", "column").isel(column=[]).assign_attrs(recording={"parameter": "a.b"})
        )
