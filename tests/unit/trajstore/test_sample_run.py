"""The sample run: whole, a training that replays, and never in the way of other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trajstore import RunWriter, analysis, open_run, sample_run, verify
from trajstore.errors import RunExists


def test_the_sample_run_shows_the_freeze_of_dead_tokens(sample: Path) -> None:
    ds = open_run(sample).load()
    assert (ds.loss[1] > ds.loss[-1]).item()
    assert (ds.grad[-1].where(ds.is_dead, 1) != 0).any("hidden").all()
    frozen = analysis.freeze(ds).frozen_since.where(ds.is_dead, drop=True)
    assert ((frozen > 100) & (frozen < 300)).all()
    cause = analysis.freeze_cause(ds).values
    assert (cause[cause != 0] == analysis.CAUSES.index("lost_update")).mean() > 0.99


@pytest.mark.torch
def test_the_sample_run_replays(sample: Path) -> None:
    pytest.importorskip("torch")
    from trajstore.trainers.replays.replay import replay

    assert verify(sample).clean
    found = replay(sample)
    assert found.replayed == 300
    # torch fuses a product and a sum on some processors only.
    assert found.differing < 20


def test_a_sample_run_is_returned_as_it_is(sample: Path) -> None:
    before = (sample / "zarr.json").stat().st_mtime_ns
    assert sample_run(sample) == sample
    assert (sample / "zarr.json").stat().st_mtime_ns == before


def test_sample_run_does_not_replace_other_paths(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with RunWriter.create(
        tmp_path / "run.zarr", token=[0], hidden=1, variables={"W": "float32"}
    ) as run:
        run.append(step=0, W=np.float32([[1]]))
    for name in ("folder", "run.zarr"):
        with pytest.raises(RunExists, match="exists and is not a complete sample run"):
            sample_run(tmp_path / name)
