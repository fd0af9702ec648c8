"""A run that every figure can be drawn of, without a display."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xarray as xr

ADAM = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield
    pyplot.close("all")


@pytest.fixture
def run(make_run, walk) -> xr.Dataset:
    rng = np.random.default_rng(0)
    rows, tokens, hidden = 23, 11, 6
    grad = rng.normal(size=(rows, tokens, hidden)).astype(np.float32)
    past = grad * (np.arange(rows) > 0)[:, None, None]
    grad[0] = np.nan
    loss = np.linspace(3, 2, rows).astype(np.float32)
    loss[0] = np.nan
    ds = make_run(
        walk(rows, tokens, hidden),
        grad=grad,
        exp_avg=past / 10,
        exp_avg_sq=past**2,
        logits=rng.normal(size=(rows, tokens)).astype(np.float32),
        loss=loss,
        lr=np.linspace(1e-3, 1e-4, rows),
        is_dead=np.arange(tokens) % 3 == 0,
        chunks=(6, 4, 6),
    )
    lost = rng.random((rows, 3)).astype(np.float32)
    lost[0] = np.nan
    return ds.assign_attrs(optimizer=ADAM).assign(
        param_update_lost=(("step", "parameter"), lost),
        param_norm=(("step", "parameter"), 1 + lost),
        parameter=["wte.weight", "ln_f.weight", "ln_f.bias"],
    )
