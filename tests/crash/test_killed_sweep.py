"""A sweep that is killed and started again skips complete runs and resumes the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from forked_processes import processes

pytest.importorskip("torch")
from trajstore.cli.main import main
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.lock import is_written_to
from trajstore.trainers import preset, record
from trajstore.trainers.recording.torch_threads import torch_threads

pytestmark = [pytest.mark.torch, pytest.mark.nightly]

FIELDS = (
    "training.products=float32",  # the same in every process
    "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=2",
    "training.device=cpu", "recording.block_rows=8",
)  # fmt: skip


def test_killed_in_the_middle_and_started_again(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "runs"
    text.write_bytes(b"It was a bright cold day in April. " * 9)
    config = tmp_path / "small.toml"
    config.write_text(preset("gatsby-adam").with_values(FIELDS).to_toml())
    swept = ["sweep", "--config", config, "--corpus", text, "-o", folder, "--threads", 1]
    running = folder / "small_seed=2.zarr"
    process = processes.Process(
        target=run_command, args=(*swept, "--seeds", 2, "--steps", 1_000_000)
    )
    process.start()
    wait_until(lambda: running.exists() and open_group(running).attrs["committed_rows"] > 8)
    process.kill()
    process.join()
    wait_until(lambda: not is_written_to(running))
    left = open_group(running)
    assert left.attrs["status"] == "interrupted"
    steps = int(left["step"][-1]) + 9
    for seed in (1, 2):
        wanted = preset("gatsby-adam").with_values(
            [*FIELDS, f"training.steps={steps}", f"training.seed={seed}"]
        )
        path = folder / "small_seed=1.zarr" if seed == 1 else tmp_path / "straight.zarr"
        with torch_threads(1):  # as those of the sweep
            record(wanted, path, corpus=text)
    done = trajstore_cli(*swept, "--seeds", "1:3", "--steps", steps)
    lines = [line.split() for line in done.stdout.splitlines() if "small_seed" in line]
    assert lines[0][1:4] == ["complete", "already", str(steps + 1)]
    assert lines[1][1:3] == ["complete", str(steps + 1)]
    assert "small_seed=2.zarr: complete after" in done.stderr
    xr.testing.assert_equal(xr.open_zarr(running), xr.open_zarr(tmp_path / "straight.zarr"))
    assert json.loads((folder / "sweep.json").read_text()) == {
        "threads": 1,
        "runs": ["small_seed=2.zarr", "small_seed=1.zarr"],  # in the order of the calls
    }


def run_command(*arguments: Any) -> None:
    main([*map(str, arguments)])


def wait_until(condition: Callable[[], bool]) -> None:
    never = threading.Event()
    for _ in range(6000):
        if condition():
            return
        never.wait(0.05)
    raise TimeoutError
