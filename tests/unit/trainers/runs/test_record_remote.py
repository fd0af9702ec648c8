"""Trainings that are recorded to an address: as to a folder, checkpoints included."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("obstore")
import xarray as xr
from small_trainings import small_config, stop_after

from trajstore import open_run
from trajstore.errors import RunExists
from trajstore.store.storage.remote_path import location
from trajstore.trainers import capture, record

pytestmark = pytest.mark.torch

ADDRESS = "memory://trainings/run.zarr"


def test_a_training_at_an_address(tmp_path: Path, text: Path) -> None:
    config = small_config(["gatsby"], steps=9)
    here = record(config, tmp_path / "run.zarr", corpus=text)
    record(config, ADDRESS, corpus=text, stop=stop_after(5))
    far = location(ADDRESS)
    folder = far.with_name("run.ckpt")
    assert [path.name for path in folder.iterdir()] == ["step-00000005.safetensors"]
    assert open_run(ADDRESS).attrs["status"] == "interrupted"
    with pytest.raises(RunExists):
        record(config, ADDRESS, corpus=text)
    record(config, ADDRESS, corpus=text, resume=True)
    assert [path.name for path in folder.iterdir()] == ["step-00000009.safetensors"]
    xr.testing.assert_equal(open_run(ADDRESS).load(), open_run(here).load())
    assert not far.with_name(".run.zarr.lock").exists()


def test_without_its_checkpoint_it_is_trained_again(tmp_path: Path, text: Path) -> None:
    config = small_config(["gatsby"], steps=6)
    address = "memory://trainings/again.zarr"
    here = record(config, tmp_path / "run.zarr", corpus=text)
    record(config, address, corpus=text, stop=stop_after(4))
    location(address).with_name("again.ckpt").remove_below()  # type: ignore[union-attr]
    record(config, address, corpus=text, resume=True)
    xr.testing.assert_equal(open_run(address).load(), open_run(here).load())


def test_any_loop_can_record_to_an_address() -> None:
    import torch

    address = "memory://trainings/loop.zarr"
    model = torch.nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, address, parameter="weight", variables=["W", "grad"]):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    ds = open_run(address)
    assert ds.W.shape == (4, 5, 3)
    assert (ds.W[-1].values == model.weight.detach().numpy()).all()
