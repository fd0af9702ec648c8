"""A run that every figure can be drawn of, without a display."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.fixture(scope="session")
def run(adam_run: xr.Dataset) -> xr.Dataset:
    rows = adam_run.sizes["step"]
    loss = np.linspace(3, 2, rows).astype(np.float32)
    lost = np.random.default_rng(1).random((rows, 3)).astype(np.float32)
    loss[0], lost[0] = np.nan, np.nan
    ds = adam_run.chunk({"step": 12})
    return ds.assign(
        grad=ds.grad.where(ds.step > 0),
        loss=("step", loss),
        lr=("step", np.linspace(1e-3, 1e-4, rows)),
        param_update_lost=(("step", "parameter"), lost),
        param_norm=(("step", "parameter"), 1 + lost),
        parameter=["wte.weight", "ln_f.weight", "ln_f.bias"],
    )
