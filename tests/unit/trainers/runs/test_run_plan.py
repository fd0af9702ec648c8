"""A plan is that of its run; the optimizer of a training; trainings of two matrices."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trainings import last_checkpoint, same_values, small_config, stop_after

from trajstore import RunWriter, open_run
from trajstore.errors import ConfigError, InvalidArgument, NothingToResume, RunExists
from trajstore.schema import COORDINATES
from trajstore.store.reading.run_info import information
from trajstore.trainers import fork, plan, preset, record, recorded_config, replay
from trajstore.trainers.downloads import CACHE_VARIABLE
from trajstore.trainers.rounded_optimizer import RoundedAdam, RoundedAdamW, RoundedSGD
from trajstore.trainers.runs.training_setup import build_model, build_optimizer

CASES: dict[str, list[str]] = {
    "compact": ["recording.encoding=compact"],
    "summaries, and cells beside float32 weights": [
        "model.dtype=float32", "training.autocast=none",
        "recording.variables=['matrix', 'hidden_mean', 'grad_token_norm', 'W_step_norm', "
        "'W_ulp_l1', 'cells']",
    ],
    "the whole model, every third step, dead tokens, moments of float32": [
        "recording.every=3", "recording.tokens=dead", 'recording.variables=["matrix", "norms"]',
        "model.layers=2", "optimizer.state_dtype=float32",
    ],
    "what the steps saw of ids without a tokenizer": [
        'recording.variables=["W", "hidden_trace", "batch", "example_loss", "hidden_states"]',
        "training.accumulation=2", "model.context=24",
        "data.tokenizer=none", "data.live_tokens=100", "data.mostly_dead=50",
    ],
    "the state of the model, with momentum": [
        'recording.variables=["everything"]', "optimizer.name=sgd", "training.loop=plain",
        "optimizer.momentum=0.9",
        "training.autocast=float16", "model.dtype=float32", "model.layers=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_recording_agrees_with_its_plan(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    config = small_config(["gatsby"], *CASES[case], steps=5)
    planned = plan(config).facts()
    writers: list[Any] = []
    path = record(
        config,
        tmp_path / "run.zarr",
        on_step=lambda recorder: writers.append(recorder.writer),
    )
    happened = information(path)
    assert planned["rows"] == happened["committed_rows"]
    assert planned["files"] == happened["files"]
    assert planned["bytes_native"] == happened["bytes_native"]
    assert planned["memory"] == writers[-1].layout.memory
    for name, array in planned["arrays"].items():
        found = happened["arrays"][name]
        assert array["native_dtype"] == found["native_dtype"], name
        assert array["bytes_native"] == found["bytes_native"], name
        assert (array["chunk"], array["shard"]) == (found["chunk"], found["shard"]), name
    assert planned["arrays"].keys() | COORDINATES.keys() >= (happened["arrays"].keys())


def test_notes_tell_what_the_size_depends_on() -> None:
    config = preset("wordybird-1b").with_values(["recording.encoding=compact"])
    (measured,) = plan(config).notes
    assert "benchmarks" in measured
    sparse = plan(config.with_values(["recording.every=2"]))
    assert sparse.notes[1].endswith("the run is recorded every 2 steps")


def test_too_little_memory_is_reported_before_the_run() -> None:
    with pytest.raises(InvalidArgument, match="memory"):
        plan(preset("wordybird-1").with_values(["recording.memory=1MiB"]))


def test_the_advice_of_a_plan_is_that_of_its_run(tmp_path: Path) -> None:
    for changed, about in (
        ([], ["exp_avg_sq", "W"]),
        (["optimizer.betas=[0.9, 0.99]", "optimizer.name=adam"], []),
    ):
        config = small_config(["gatsby"], *changed, steps=1)
        notes: list[str] = []
        path = record(config, tmp_path / "run.zarr", overwrite=True, on_note=notes.append)
        advice = plan(config).facts()["advice"]
        assert [one["variable"] for one in advice] == about
        assert [one["sentence"] for one in advice] == notes[: len(advice)]
        assert information(path)["advice"] == advice
    sgd = preset("gatsby").with_values(["optimizer.name=sgd"])
    assert plan(sgd).facts()["advice"] == []


def test_strict_numerics_record_nothing_or_what_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    config = small_config(["gatsby"], steps=1)
    with pytest.raises(ConfigError, match=r"exp_avg_sq can never decay.*state_dtype=float32"):
        record(config, path, strict_numerics=True)
    assert list(tmp_path.iterdir()) == []
    record(config.with_values(["model.dtype=float32"]), path, strict_numerics=True)
    assert information(path)["committed_rows"] == 2


F32 = "model.dtype=float32"


def built(*assignments: str) -> Any:
    config = small_config(["gatsby"], "training.seed=11", *assignments, steps=1)
    return build_optimizer(build_model(config.model), config)


CLASSES = {"adamw": RoundedAdamW, "adam": RoundedAdam, "sgd": RoundedSGD}


@pytest.mark.parametrize("name", CLASSES)
def test_other_state_or_rounding_is_rounded_once(name: str) -> None:
    for same in ([], ["optimizer.state_dtype=bfloat16"], [F32, "optimizer.state_dtype=float32"]):
        optimizer = built(f"optimizer.name={name}", *same)
        assert type(optimizer) is CLASSES[name].real_class
        assert "rounding" not in optimizer.param_groups[0]
    momentum = "optimizer.momentum=0.5" if name == "sgd" else "optimizer.betas=[0.9, 0.5]"
    for state, rounding, *assignments in (
        ("float32", "nearest", "optimizer.state_dtype=float32"),
        ("bfloat16", "nearest", F32, "optimizer.state_dtype=bfloat16"),
        ("bfloat16", "stochastic", "optimizer.rounding=stochastic"),
    ):
        changes = [f"optimizer.name={name}", "optimizer.weight_decay=0.25", momentum, *assignments]
        optimizer = built(*changes)
        assert type(optimizer) is CLASSES[name]
        for group, decay in zip(optimizer.param_groups, (0.25, 0), strict=True):
            own = (group["state_dtype"], group["rounding"], group["rounding_seed"])
            assert own == (state, rounding, 11)
            assert group["momentum" if name == "sgd" else "betas"] in (0.5, (0.9, 0.5))
            assert group["weight_decay"] == decay


# Untied weights: two runs under one name ---------------------------------------------------------

CONFIG = small_config(["gatsby"], "model.tied=false", "training.products=native", steps=9)
BOTH = ("run.lm_head.weight.zarr", "run.transformer.wte.weight.zarr")


def both(path: Path) -> list[Path]:
    return [path.with_name(name) for name in BOTH]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[Path]:
    path = tmp_path_factory.mktemp("pair") / "run.zarr"
    assert record(CONFIG, path, corpus=text) == path
    return both(path)


@pytest.fixture(scope="module")
def _stopped(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    record(CONFIG, folder / "run.zarr", corpus=text, stop=stop_after(6))
    return folder


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_stopped, tmp_path, dirs_exist_ok=True)) / "run.zarr"


def test_each_run_holds_its_matrix(pair: list[Path]) -> None:
    end = last_checkpoint(pair[0]).tensors
    runs = [open_run(run).load() for run in pair]
    for ds, name in zip(runs, ("lm_head.weight", "transformer.wte.weight"), strict=True):
        assert ds.attrs["recording"]["parameter"] == name
        np.testing.assert_array_equal(ds.W[-1], end[f"model.{name}"].float())
        assert (ds.W[0] != ds.W[-1]).any()
    unembedding, embedding = runs
    assert (unembedding.W[0] != embedding.W[0]).all()  # each starts at a point of its own
    np.testing.assert_array_equal(unembedding.loss, embedding.loss)
    dead = unembedding.is_dead.values
    assert (unembedding.grad[1:, dead] != 0).any(["step", "hidden"]).all()
    assert (embedding.grad[1:, dead] == 0).all()  # a dead token is never an input
    for run in pair:
        assert replay(run).clean


def test_a_plan_covers_both_runs(pair: list[Path], text: Path) -> None:
    planned = plan(CONFIG, corpus=text).facts()
    found = [information(run) for run in pair]
    assert planned["runs"] == 2
    assert planned["files"] == sum(facts["files"] for facts in found)
    assert planned["bytes_native"] == sum(facts["bytes_native"] for facts in found)
    assert "2 runs" in planned["notes"][1]


def test_both_resume_as_if_never_stopped(stopped: Path, pair: list[Path], text: Path) -> None:
    assert recorded_config(stopped) == CONFIG
    assert record(CONFIG, stopped, corpus=text, resume=True) == stopped
    for one, other in zip(pair, both(stopped), strict=True):
        same_values(one, other)
    notes: list[str] = []
    record(CONFIG, stopped, corpus=text, resume=True, on_note=notes.append)
    assert f"{stopped} has all 9 steps already" in notes[0]


@pytest.mark.nightly
def test_a_run_that_was_committed_later_decides(
    stopped: Path, pair: list[Path], text: Path
) -> None:
    """A process that was killed between the commits of two runs leaves one of them shorter."""
    RunWriter.resume(both(stopped)[1], rows=5).close("interrupted")
    repeated: list[int] = []
    record(
        CONFIG,
        stopped,
        corpus=text,
        resume=True,
        on_retrain=lambda step, last: repeated.append(step),
    )
    assert repeated == [1, 2, 3, 4]  # the checkpoint of step 6 is of more rows
    for one, other in zip(pair, both(stopped), strict=True):
        same_values(one, other)


def test_what_cannot_be_done_is_an_error(stopped: Path, text: Path) -> None:
    path, (first, second) = stopped, both(stopped)
    renamed = shutil.copytree(first, path.with_name("copy.zarr"))
    tied = CONFIG.with_values(["model.tied=true"])
    whole = CONFIG.with_values(['recording.variables=["everything"]'])
    other = path.with_name("other.zarr")
    with pytest.raises(InvalidArgument, match="holds one of the two matrices"):
        fork(first, other, at=3)

    def refused(kind: Any, sentence: str, config: Any, run: Path, **options: Any) -> None:
        with pytest.raises(kind, match=sentence):
            record(config, run, corpus=text, **options)

    refused(RunExists, "lm_head", CONFIG, path)
    refused(ConfigError, "tied is False in .*, got True", tied, path, resume=True)
    refused(InvalidArgument, "is recorded with one matrix, but model", whole, other)
    refused(InvalidArgument, "another name; rename both to NAME", CONFIG, renamed, resume=True)
    shutil.rmtree(second)
    refused(NothingToResume, f"{second.name} is missing, the other", CONFIG, path, resume=True)
    path.mkdir()
    refused(RunExists, "is the common name of the two runs", CONFIG, path, overwrite=True)
