"""A training that is killed while it records, and resumed, is the training that never was.

Killed at any object that a commit or a checkpoint moves into its place, and at any step; a reader
polls the run throughout and compares every row it sees. It is always the same call that begins the
run and goes on with it, with checkpoints and commits at the ends of blocks, or by time, or without.
`TRAJSTORE_KILLS` sets how many trainings are killed (`make crash`); with it, each more often.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from crashing import KillAt, Reader, killed, poll

from trajstore import verify

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.nightly]

STEPS = 26
SIZES = [
    "model.hidden=8",
    "model.layers=1",
    "model.heads=1",
    "model.context=8",
    "training.batch_size=2",
    "training.device=cpu",
    f"training.steps={STEPS}",
    "recording.block_rows=4",
]
BY_TIME = ["recording.commit_every=0.001"]
EVERYTHING = ["recording.variables=['everything']", "recording.commit_every=0"]
COMPACT = [
    "recording.checkpoint_every=4",
    "recording.commit_every=0",
    "recording.encoding=compact",
]
SEEDS = int(os.environ.get("TRAJSTORE_KILLS", "1"))
TIMES = 4 if "TRAJSTORE_KILLS" in os.environ else 2  # that one training is killed
TEXT = "So we beat on, boats against the current, borne back ceaselessly into the past."


def train(
    path: Path,
    preset: str,
    corpus: Path,
    changes: list[str],
    kill: KillAt | None,
    told: Connection | None,
) -> None:
    """Record a training from wherever it stands, telling each step; in a process."""
    import torch

    from trajstore import trainers
    from trajstore.store.writing import commit
    from trajstore.trainers.runs import checkpointing

    torch.set_num_threads(1)
    if changes == BY_TIME:  # of seconds, such a training has few
        checkpointing._MIN_INTERVAL = 0.0
        checkpointing._PAUSE_FACTOR = commit._PAUSE = 0
    if kill is not None:
        kill.install()
    config = trainers.preset(preset).with_values([*SIZES, *changes])
    options: dict[str, Any] = {"corpus": corpus}
    if told is not None:
        options["on_step"] = lambda recorder: told.send(recorder.step)
        options["on_retrain"] = lambda step, last: told.send(step)
    trainers.record(config, path, resume=True, **options)


def compare_rows(path: Path, stop: Any, result: Connection) -> None:
    """Open a run over and over, and hold what it shows against the run that was never killed."""
    expected = xr.open_zarr(path.with_name("whole.zarr")).load()

    def compare(ds: xr.Dataset, at: list[int]) -> None:
        for name in expected.data_vars:
            seen, there = ds[name][at].values, expected[name][at].values
            assert seen.tobytes() == there.tobytes(), f"{name} differs in rows {at}"

    poll(path, stop, result, compare, restarts=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder with the text and the run of a preset that was never killed, made once."""

    @cache
    def train_once(preset: str) -> Path:
        folder = tmp_path_factory.mktemp(preset)
        (folder / "text.txt").write_text(TEXT)
        assert not killed(train, folder / "whole.zarr", preset, folder / "text.txt", [], None)
        assert xr.open_zarr(folder / "whole.zarr").sizes["step"] == STEPS + 1
        return folder

    return train_once


@pytest.mark.parametrize(
    ("preset", "changes"),
    # One preset trains with the Trainer, the other in a loop of ours.
    [
        ("gatsby", COMPACT),
        ("gatsby", []),
        ("gatsby-adam", BY_TIME),
        ("gatsby-adam", EVERYTHING),
    ],
    ids=["by steps, compact", "without checkpoints", "by time", "from the last row"],
)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_killed_training_ends_as_if_it_had_not_been(
    trained: Callable[[str], Path], preset: str, seed: int, changes: list[str]
) -> None:
    folder = trained(preset)
    corpus = folder / "text.txt"
    rng = random.Random(seed)
    path = folder / f"run-{seed}-{len(changes)}.zarr"
    with Reader(path, compare_rows) as reader:
        for number in range(TIMES):
            if number == 0:  # at a move that every such training comes to
                kill = KillAt(rng.randrange(1, 40), after=rng.random() < 0.5)
                assert killed(train, path, preset, corpus, changes, kill)
            elif rng.random() < 0.5:
                kill = KillAt(rng.randrange(1, 120), after=rng.random() < 0.5)
                killed(train, path, preset, corpus, changes, kill)
            else:
                last = rng.randrange(1, STEPS + 1)
                killed(train, path, preset, corpus, changes, None, after_step=last)
            if path.exists():
                found = verify(path)
                assert found.clean, found.problems
        for _ in range(2):  # the second call finds all steps
            assert not killed(train, path, preset, corpus, changes, None)
    assert path.with_suffix(".ckpt").exists() == (changes != EVERYTHING)
    check_end(path, xr.open_zarr(folder / "whole.zarr").load())
    assert reader.most == STEPS + 1


def check_end(path: Path, expected: xr.Dataset) -> None:
    """Fail unless a run is complete, and every bit is that of another."""
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "complete"
    assert ds.sizes["step"] == STEPS + 1
    for name in expected.variables:
        assert ds[name].values.tobytes() == expected[name].values.tobytes(), name
    assert verify(path).clean
