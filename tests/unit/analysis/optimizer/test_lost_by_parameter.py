from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from parameter_tables import parameter_table

from trajstore import analysis
from trajstore.analysis.optimizer.lost_updates import lost_by_parameter

SHAPES = {"W": [5, 3], "a": [2, 4], "bias": [3], "scalar": [], "fixed": [2, 2]}
ROWS = 6


@pytest.fixture
def run() -> xr.Dataset:
    """A run in which about half of the elements keep their value in a step."""
    rng = np.random.default_rng(2)
    offset = sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name != "W")

    def values(*shape: int, zeros: float) -> np.ndarray:
        found = rng.normal(size=(ROWS, *shape)).astype("f4")
        return np.where(rng.random(found.shape) < zeros, 0, found).astype("f4")

    element, matrix = ("step", "element"), ("step", "token", "hidden")
    params = values(offset, zeros=0.5).cumsum(0)
    params[2, :3], params[3, :3] = 0.0, -0.0
    grad = values(offset, zeros=0.3)
    grad[:, -4:] = np.nan
    count = np.tile(np.arange(ROWS, dtype="f4")[:, None], len(SHAPES))
    count[4:, 2] -= 1
    ds = xr.Dataset(
        {
            "W": (matrix, values(5, 3, zeros=0.5).cumsum(0), {"native_dtype": "float32"}),
            "grad": (matrix, values(5, 3, zeros=0.3)),
            "params": (element, params),
            "params_grad": (element, grad),
            "params_lr": (("step", "group"), np.array([[np.nan, 1, 1, 1, 1, 0]], "f4").T),
            "params_count": (("step", "parameter"), count),
        },
        coords={"step": np.arange(ROWS), "token": np.arange(5), "parameter": list(SHAPES)},
        attrs={"parameters": parameter_table(SHAPES, "W")},
    )
    return ds.chunk(step=2, element=3)


def test_every_step_against_a_loop_over_elements(run):
    found = lost_by_parameter(run, range(1, ROWS)).compute()
    ds = run.compute()
    for row in range(1, ROWS):
        for number, entry in enumerate(run.attrs["parameters"]):
            if entry["variable"] == "W":
                names, part = ("W", "grad"), slice(None)
            else:
                size = int(np.prod(entry["shape"]))
                names = ("params", "params_grad")
                part = slice(entry["offset"], entry["offset"] + size)
            W, grad = (ds[name].values[:, part].reshape(ROWS, -1) for name in names)
            wanted = lost = 0
            for before, after, gradient in zip(W[row - 1], W[row], grad[row], strict=True):
                wanted += gradient != 0
                lost += gradient != 0 and before == after
            rate = ds.params_lr.values[row, 0]
            skipped = entry["name"] == "bias" and row == 4
            known = wanted and rate and not skipped and entry["name"] != "fixed"
            expected = lost / wanted if known else np.nan
            np.testing.assert_equal(found.values[row - 1, number], expected)
    assert 0 < found.sel(parameter="a").mean() < 1


def test_steps_with_a_gap_are_unknown(run):
    assert lost_by_parameter(run.isel(step=[0, 2]), [1]).isnull().all()


def test_the_summary_has_it_for_whole_runs_only(run):
    found = analysis.summary(run).param_update_lost
    assert found.dims == ("when", "parameter")
    np.testing.assert_array_equal(found, lost_by_parameter(run, [1, ROWS - 1]))
    assert "param_update_lost" not in analysis.summary(run.isel(token=slice(3)))
