"""Configurations: fields, files and presets, which train and write what their notebooks read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from safetensors.torch import load_file

from trajstore import analysis, export, open_run
from trajstore.errors import ConfigError, InvalidArgument
from trajstore.trainers import plan, preset, record
from trajstore.trainers.config import RunConfig
from trajstore.trainers.downloads import CACHE_VARIABLE
from trajstore.trainers.presets import PRESETS
from trajstore.trainers.runs.training_setup import build_training
from trajstore.trainers.texts import load_corpus

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", PRESETS)
def test_what_presets_print_is_what_config_takes(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(preset(name).to_toml())
    assert RunConfig.from_toml(file) == preset(name)


def test_toml_names_every_field_and_its_choices() -> None:
    config = preset("gatsby")
    lines = config.to_toml().splitlines()
    named = [line.removeprefix("# ").partition(" = ")[0] for line in lines if " = " in line]
    assert named == [name.partition(".")[2] for name in config.flat()]
    assert 'name = "adamw"  # one of adamw, adam, sgd' in lines
    assert "# state_dtype = …  # not set, one of bfloat16, float32" in lines
    assert "every = 1  # at least 1" in lines
    assert "reseed = false  # one of true, false" in lines


def test_the_presets_are_the_notebooks() -> None:
    assert list(PRESETS) == [
        "gatsby", "gatsby-gradients", "gatsby-adam", "wordybird-1", "wordybird-1b", "duckling",
        "flannel", "thimble", "crucible",
    ]  # fmt: skip
    offsets = [make().data.target_offset for make in PRESETS.values()]
    assert offsets == [2, 2, 2, 2, 2, 1, 2, 2, 1]
    assert all(make().training.seed == 42 for make in PRESETS.values())
    adam, bird, longer = (preset(n) for n in ("gatsby-adam", "wordybird-1", "wordybird-1b"))
    assert (adam.optimizer.name, adam.training.loop) == ("adam", "plain")
    assert (adam.training.max_grad_norm, adam.recording.logits_mode) == (0, "mean")
    assert (bird.training.steps, longer.training.steps) == (100, 200)
    assert bird.model_copy(update={"training": longer.training}) == longer
    assert (bird.model.vocab_size, bird.optimizer.weight_decay) == (50_257, 0)
    assert preset("gatsby-gradients").recording.variables[:2] == ("W", "grad")
    with pytest.raises(InvalidArgument, match="wordybird-1b"):
        preset("wordybird-9")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("optimizer.lr=-1", "optimizer.lr = -1: input should be greater than 0"),
        ("optimizer.lr=inf", "optimizer.lr = inf: input should be a finite number"),
        ("optimizer.lr=abc", "= 'abc': .* a valid number, such as optimizer.lr=0.001$"),
        ("training.steps=1.5", "= 1.5: .* a valid integer, such as training.steps=10000$"),
        ("optimizer.rate=1", "unknown field optimizer.rate; the fields are name, lr"),
        ("optimiser.lr=1", r"unknown field optimiser \(did you mean 'optimizer'\?\); the fields"),
        ("init.sigma=1", r"unknown field init \(did you mean 'initialization.sigma'\?\)"),
        ("schedule.name=step", "schedule.name = 'step': input should be 'linear', 'cosine' or"),
        ("model.heads=3", "^model: 3 heads do not divide 64"),
        ("recording.variables=[\"W\", \"speed\"]", "recording.variables = .*cannot record 'speed'"),
        ("optimizer.momentum=0.9", "^optimizer: momentum = 0.9 needs sgd"),
        ("lr", "expected section.field=value"),
    ],
)  # fmt: skip
def test_impossible_values_name_the_field(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.").replace(r"\.*", ".*")):
        preset("gatsby").with_values([assignment])


def test_a_file_that_is_no_configuration_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        RunConfig.from_toml(file)
    file.write_text("steps = ")
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        RunConfig.from_toml(file)


@pytest.mark.parametrize(
    "text", ['populations = ["rare=token_count < 10"]', 'populations.rare = "token_count < 10"']
)
def test_populations_as_a_list_or_a_table(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[recording]\n{text}\n")
    assert RunConfig.from_toml(file).recording.populations == ("rare=token_count < 10",)


@pytest.mark.parametrize("value", ["'rare'", "'a=token < 3'", "[3]", "3"])
def test_populations_of_another_form(value: str) -> None:
    with pytest.raises(ConfigError, match=r"recording.populations = .*expected NAME=EXPRESSION"):
        preset("gatsby").with_values([f"recording.populations={value}"])


def test_assignments_may_come_one_after_the_other() -> None:
    config = preset("gatsby").with_values(f"optimizer.lr={rate}" for rate in (1, 2))
    assert config.optimizer.lr == 2


@pytest.mark.parametrize("value", ["optimizer.lr=1", {"optimizer.lr": 1}, [3]], ids=str)
def test_assignments_are_a_list(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a list of section.field=value, such as"):
        preset("gatsby").with_values(value)


# Presets ----------------------------------------------------------------------------------------

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
