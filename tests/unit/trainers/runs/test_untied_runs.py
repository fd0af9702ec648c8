"""A training with untied weights: two runs under one name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from small_trainings import last_checkpoint, same_values, small_config, stop_after  # noqa: E402

from trajstore import RunWriter, open_run  # noqa: E402
from trajstore.errors import ConfigError, InvalidArgument, NothingToResume, RunExists  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import fork, plan, record, recorded_config, replay  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 9
CONFIG = small_config(["gatsby"], "model.tied=false", "training.products=native", steps=STEPS)
BOTH = ("run.lm_head.weight.zarr", "run.transformer.wte.weight.zarr")


def both(path: Path) -> list[Path]:
    return [path.with_name(name) for name in BOTH]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[Path]:
    path = tmp_path_factory.mktemp("straight") / "run.zarr"
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


def test_each_run_holds_its_matrix(straight: list[Path]) -> None:
    end = last_checkpoint(straight[0]).tensors
    runs = [open_run(run).load() for run in straight]
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
    for run in straight:
        assert replay(run).clean


def test_a_plan_covers_both_runs(straight: list[Path], text: Path) -> None:
    planned = plan(CONFIG, corpus=text).facts()
    found = [information(run) for run in straight]
    assert planned["runs"] == 2
    assert planned["files"] == sum(facts["files"] for facts in found)
    assert planned["bytes_native"] == sum(facts["bytes_native"] for facts in found)
    assert "2 runs" in planned["notes"][1]


def test_both_resume_as_if_never_stopped(stopped: Path, straight: list[Path], text: Path) -> None:
    assert recorded_config(stopped) == CONFIG
    assert record(CONFIG, stopped, corpus=text, resume=True) == stopped
    for one, other in zip(straight, both(stopped), strict=True):
        same_values(one, other)
    notes: list[str] = []
    record(CONFIG, stopped, corpus=text, resume=True, on_note=notes.append)
    assert f"{stopped} has all 9 steps already" in notes[0]


def test_a_run_that_was_committed_later_decides(
    stopped: Path, straight: list[Path], text: Path
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
    for one, other in zip(straight, both(stopped), strict=True):
        same_values(one, other)


def test_what_cannot_be_done_is_an_error(stopped: Path, text: Path) -> None:
    first, second = both(stopped)
    with pytest.raises(InvalidArgument, match="holds one of the two matrices"):
        fork(first, stopped.with_name("fork.zarr"), at=3)
    with pytest.raises(RunExists, match="lm_head"):
        record(CONFIG, stopped, corpus=text)
    tied = CONFIG.with_values(["model.tied=true"])
    with pytest.raises(ConfigError, match=r"tied is False in .*, got True"):
        record(tied, stopped, corpus=text, resume=True)
    whole = CONFIG.with_values(['recording.variables=["everything"]'])
    with pytest.raises(InvalidArgument, match="is recorded with one matrix, but model"):
        record(whole, stopped.with_name("whole.zarr"), corpus=text)
    renamed = shutil.copytree(first, stopped.with_name("copy.zarr"))
    with pytest.raises(InvalidArgument, match="has another name; rename both to NAME"):
        record(CONFIG, renamed, corpus=text, resume=True)
    shutil.rmtree(second)
    with pytest.raises(NothingToResume, match=f"{second.name} is missing, the other run"):
        record(CONFIG, stopped, corpus=text, resume=True)
    stopped.mkdir()
    with pytest.raises(RunExists, match="is the common name of the two runs"):
        record(CONFIG, stopped, corpus=text, overwrite=True)
