"""What each preset is, and that the newest one trains and is asked about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from trajstore import analysis, open_run
from trajstore.trainers import plan, preset, record
from trajstore.trainers.downloads import CACHE_VARIABLE

pytestmark = pytest.mark.torch

SMALL = (
    "model.context=8", "model.hidden=8", "model.layers=1", "training.batch_size=4",
    "training.device=cpu", "training.steps=3", "model.vocab_size=300", "data.live_tokens=250",
)  # fmt: skip


def test_duckling_is_float32_under_autocast() -> None:
    config = preset("duckling")
    planned = plan(config).facts()
    types = {name: array["native_dtype"] for name, array in planned["arrays"].items()}
    assert [types[name] for name in ("W", "grad", "exp_avg", "exp_avg_sq")] == ["float32"] * 4
    assert types["logits"] == "bfloat16"
    assert planned["arrays"]["W"]["bytes_native"] == 301 * 8192 * 128 * 4
    (note,) = planned["notes"]
    assert "lower 16 bits of the mantissa do not" in note
    assert planned["arrays"]["W"]["bytes_on_disk"] < planned["arrays"]["W"]["bytes_native"]
    cells = plan(config.with_values(["recording.variables=['cells']"])).facts()
    assert cells["notes"] == []
    share = cells["arrays"]["cells"]["bytes_on_disk"] / planned["arrays"]["W"]["bytes_on_disk"]
    assert 0.2 < share < 0.4


def test_duckling_has_dead_and_mostly_dead_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    config = preset("duckling").with_values([*SMALL, "data.mostly_dead=500"])
    ds = open_run(record(config, tmp_path / "run.zarr"))
    count = ds.token_count.values
    rare = (count > 0) & (count <= 500)
    assert 0 < rare.sum() < 250
    found = analysis.regimes(ds, "bfloat16").compute()
    assert found.population.values.tolist() == ["dead", "live", "all", "mostly_dead"]
    np.testing.assert_array_equal(found.counts.sum("regime_name"), [[50, 250, 300, rare.sum()]] * 3)
    sizes = analysis.summary(ds).population_tokens.to_series()
    assert sizes.to_dict() == {"dead": 50, "live": 250, "all": 300, "mostly_dead": rare.sum()}
    assert (analysis.freeze(ds).is_mostly_dead.values == rare).all()
