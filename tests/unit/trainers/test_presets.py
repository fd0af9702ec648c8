"""What each preset is, that it trains, is asked about, and writes the files of its notebooks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from safetensors.torch import load_file

from trajstore import analysis, export, open_run
from trajstore.trainers import plan, preset, record
from trajstore.trainers.downloads import CACHE_VARIABLE
from trajstore.trainers.runs.training_setup import build_training
from trajstore.trainers.texts import load_corpus

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


SERIES = {
    "flannel": (
        "flannel-7",
        "W bfloat16 4, grad_W bfloat16 4, momentum_W float32 4, variance_W float32 4, "
        "W_initial bfloat16 2, n_steps int64 0, batch_size int64 0, n_live int64 0, n_dead int64 0",
    ),
    "thimble": (
        "thimble-7",
        "W uint16 3, grad_W uint16 3, momentum_W uint16 3, variance_W uint16 3, losses float32 1, "
        "dead_mask bool 1, live_mask bool 1, dead_ids int64 1, live_ids int64 1",
    ),
    "crucible": (
        "crucible-2",
        "W uint16 3, g float32 3, m float32 3, v float32 3, delta_W_prime float32 3, "
        "loss float32 1, dead_mask bool 1, dead_indices int64 1",
    ),
}
"""Layout of each preset, and name, type and rank of the arrays that its notebooks read."""


@pytest.mark.parametrize("name", SERIES)
def test_a_preset_of_a_series_writes_what_its_notebooks_read(name: str, tmp_path: Path) -> None:
    layout, arrays = SERIES[name]
    run = record(preset(name).with_values(SMALL), tmp_path / "run.zarr")
    export(run, tmp_path / "file", layout=layout)
    if name == "thimble":
        with pytest.importorskip("h5py").File(tmp_path / "file") as opened:
            file = {key: opened[key][()] for key in opened}
    else:
        file = load_file(tmp_path / "file")
    expected = [array.rsplit(" ", 2) for array in arrays.split(", ")]
    for key, dtype, rank in expected:
        found = f"{file[key].dtype} {file[key].ndim}".removeprefix("torch.")
        assert found == f"{dtype} {rank}", key
    tokens = 50 if name == "crucible" else 300
    assert file["W"].shape[-3:] == (4, tokens, 8)
    assert file["losses" if "losses" in file else "loss"].shape[-1] == 4


def test_a_seed_of_the_start_alone() -> None:
    seeds = ("initialization.seed=7", "initialization.reseed=true", "initialization.reseed=false")
    first, reseeded, free = (
        build_training(config, load_corpus(config)).model.state_dict()
        for seed, training in zip(seeds, (8, 7, 7), strict=True)
        for config in [preset("thimble").with_values([*SMALL, seed, f"training.seed={training}"])]
    )
    W, layer = "transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"
    assert [first[W].equal(other[W]) for other in (reseeded, free)] == [True, False]
    assert [free[layer].equal(other[layer]) for other in (reseeded, first)] == [True, False]
