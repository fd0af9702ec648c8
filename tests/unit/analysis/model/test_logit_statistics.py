from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


def test_statistics_of_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (7, 9)).astype(np.float32)
    logits[0] = np.nan
    logits[1] = 1.5
    logits[2, 3] = -np.inf
    logits[3] *= 1000  # its exponential overflows
    dead = np.arange(9) % 2 == 0
    ds = xr.Dataset(
        {"logits": (("step", "token"), logits)},
        coords={"step": np.arange(7), "token": np.arange(9), "is_dead": ("token", dead)},
    )
    for chunked in (ds, ds.chunk(step=3, token=4)):
        got = analysis.logit_stats(chunked).compute()
        wide = logits.astype(np.longdouble)
        with np.errstate(all="ignore"):
            weights = np.exp(wide - wide.max(1, keepdims=True))
            p = weights / weights.sum(1, keepdims=True)
            entropy = -np.where(p > 0, p * np.log(p), np.where(np.isnan(p), np.nan, 0)).sum(1)
            np.testing.assert_allclose(got.entropy, entropy.astype(float), atol=1e-12)
            np.testing.assert_allclose(got.dead_mass, p[:, dead].sum(1).astype(float), atol=1e-12)
            np.testing.assert_array_equal(got.logit_min, logits.min(1))
            np.testing.assert_array_equal(got.logit_max, logits.max(1))
            np.testing.assert_allclose(got.logit_range, wide.max(1).astype(float) - wide.min(1))
            np.testing.assert_allclose(got.logit_std, logits.astype(float).std(1))
    assert got.entropy[1] == pytest.approx(np.log(9))
    assert "dead_mass" not in analysis.logit_stats(ds.drop_vars("is_dead"))


def test_logit_stats_need_logits_of_step_and_token(make_run, walk):
    ds = make_run(walk(3, 2, 2))
    with pytest.raises(VariableNotRecorded, match=r"logits.*weights"):
        analysis.logit_stats(ds)
    with pytest.raises(InvalidArgument, match="expected step, token"):
        analysis.logit_stats(ds.assign(logits=ds.W))
