"""Configurations: fields, files and presets, which train and write what their notebooks read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_trainings import small_config

from trajstore import export
from trajstore.errors import ConfigError, InvalidArgument
from trajstore.exchange.layouts import LAYOUTS
from trajstore.trainers import plan, preset, record
from trajstore.trainers.config import RunConfig
from trajstore.trainers.presets import PRESETS
from trajstore.trainers.runs.training_setup import build_training
from trajstore.trainers.texts import load_corpus


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
    tokens = [preset(name).recording.tokens for name in ("thimble", "crucible")]
    assert tokens == ["all", "dead"]
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
        *[(f"recording.populations={value}", "recording.populations = .*expected NAME=EXPRESSION")
          for value in ("'rare'", "'a=token < 3'", "[3]", "3")],
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


def test_populations_as_a_list_or_a_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for text in (
        'populations = ["rare=token_count < 10"]',
        'populations.rare = "token_count < 10"',
    ):
        file.write_text(f"[recording]\n{text}\n")
        assert RunConfig.from_toml(file).recording.populations == ("rare=token_count < 10",)


def test_assignments_may_come_one_after_the_other() -> None:
    config = preset("gatsby").with_values(f"optimizer.lr={rate}" for rate in (1, 2))
    assert config.optimizer.lr == 2
    for value in ("optimizer.lr=1", {"optimizer.lr": 1}, [3]):
        with pytest.raises(ConfigError, match=r"expected a list of section.field=value, such as"):
            preset("gatsby").with_values(value)  # type: ignore[arg-type]


# Presets ----------------------------------------------------------------------------------------

FEW_IDS = ("model.vocab_size=300", "data.live_tokens=250")


def test_duckling_is_float32_under_autocast() -> None:
    config = preset("duckling")
    assert config.data.mostly_dead == 10
    arrays = plan(config).facts()["arrays"]
    types = [arrays[name]["native_dtype"] for name in ("W", "grad", "exp_avg", "logits")]
    assert types == ["float32"] * 3 + ["bfloat16"]
    assert arrays["W"]["bytes_native"] == 301 * 8192 * 128 * 4


@pytest.mark.parametrize(
    ("name", "layout", "tokens"), [("flannel", "flannel-7", 300), ("crucible", "crucible-2", 50)]
)
def test_a_preset_of_a_series_writes_what_its_notebooks_read(
    name: str, layout: str, tokens: int, tmp_path: Path
) -> None:
    run = record(small_config([name], *FEW_IDS, steps=3), tmp_path / "run.zarr")
    export(run, tmp_path / "file", layout=layout)
    file = load_file(tmp_path / "file")
    assert {column.key for column in LAYOUTS[layout].columns} <= {*file}
    assert file["W"].shape[-3:] == (4, tokens, 8)


def test_a_seed_of_the_start_alone() -> None:
    seeds = ("initialization.seed=7", "initialization.reseed=true", "initialization.reseed=false")
    first, reseeded, free = (
        build_training(config, load_corpus(config)).model.state_dict()
        for seed, training in zip(seeds, (8, 7, 7), strict=True)
        for config in [
            small_config(["thimble"], *FEW_IDS, seed, f"training.seed={training}", steps=1)
        ]
    )
    W, layer = "transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"
    assert [first[W].equal(other[W]) for other in (reseeded, free)] == [True, False]
    assert [free[layer].equal(other[layer]) for other in (reseeded, first)] == [True, False]
