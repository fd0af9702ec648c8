from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from trajstore.errors import ConfigError, InvalidArgument
from trajstore.schema import COORDINATES
from trajstore.store.reading.run_info import information
from trajstore.trainers import plan, record
from trajstore.trainers.downloads import CACHE_VARIABLE
from trajstore.trainers.presets import preset

pytestmark = pytest.mark.torch

SMALL = [
    "training.steps=5", "training.batch_size=2", "model.context=8", "model.layers=1",
    "training.device=cpu", "recording.block_rows=4", "model.hidden=8",
]  # fmt: skip

CASES: dict[str, list[str]] = {
    "compact": ["recording.encoding=compact"],
    "summaries in float32": [
        "model.dtype=float32", "training.autocast=none",
        "recording.variables=['matrix', 'hidden_mean', 'grad_token_norm', 'W_step_norm', "
        "'W_ulp_l1']",
    ],
    "the whole model, every third step, dead tokens": [
        "recording.every=3", "recording.tokens=dead", 'recording.variables=["matrix", "norms"]',
        "model.layers=2",
    ],
    "what the steps saw of ids without a tokenizer": [
        'recording.variables=["W", "hidden_trace", "batch", "example_loss", "hidden_states"]',
        "training.accumulation=2", "model.context=24",
        "data.tokenizer=none", "data.live_tokens=100", "data.mostly_dead=50",
    ],
    "the state of the model": ['recording.variables=["everything"]'],
    "the state of the model, with momentum": [
        'recording.variables=["everything"]', "optimizer.name=sgd", "training.loop=plain",
        "optimizer.momentum=0.9",
        "training.autocast=float16", "model.dtype=float32", "model.layers=2",
    ],
    "cells beside float32 weights": [
        "model.dtype=float32", 'recording.variables=["weights", "cells"]',
    ],
    "moments of float32 of a stream of ids": [
        "optimizer.state_dtype=float32",
        "data.tokenizer=gpt2", "data.corpus=fineweb", "data.live_tokens=100",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_recording_agrees_with_its_plan(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    config = preset("gatsby").with_values([*SMALL, *CASES[case]])
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
        config = preset("gatsby").with_values([*SMALL, "training.steps=1", *changed])
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
    config = preset("gatsby").with_values([*SMALL, "training.steps=1"])
    with pytest.raises(ConfigError, match=r"exp_avg_sq can never decay.*state_dtype=float32"):
        record(config, path, strict_numerics=True)
    assert list(tmp_path.iterdir()) == []
    record(config.with_values(["model.dtype=float32"]), path, strict_numerics=True)
    assert information(path)["committed_rows"] == 2
