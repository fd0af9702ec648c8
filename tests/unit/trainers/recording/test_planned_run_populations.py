"""Populations that are given when a run is made stay with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from list_recorder import VOCAB, TinyModel, batches  # noqa: E402
from small_trainings import TEXT, small_config, stop_after  # noqa: E402

from trajstore import analysis, export, import_file, open_run, verify  # noqa: E402
from trajstore.errors import InvalidArgument  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import capture, fork, plan, record  # noqa: E402

pytestmark = pytest.mark.torch

COUNTS = np.arange(VOCAB) % 5
GIVEN: dict[str, Any] = {
    "rare": "0 < token_count <= 1",
    "first": [0, 1, 2],
    "odd": np.arange(VOCAB) % 2 == 1,
}
EXPECTED = {
    "is_rare": COUNTS == 1,
    "is_first": np.arange(VOCAB) < 3,
    "is_odd": np.arange(VOCAB) % 2 == 1,
}


def run_of(path: Path, model: Any = None, **options: Any) -> Path:
    torch.manual_seed(1)
    model = TinyModel() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"variables": "W,loss", "token_count": COUNTS, "block_rows": 4, **options}
    with capture(model, optimizer, path, **options):
        for batch in batches(5):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    return path


def test_tokens_that_never_occur_are_dead(tmp_path: Path) -> None:
    assert (open_run(run_of(tmp_path / "a.zarr")).is_dead.values == (COUNTS == 0)).all()
    given = open_run(run_of(tmp_path / "b.zarr", token_count=None, is_dead=COUNTS > 2))
    assert "token_count" not in given.coords
    ds = open_run(run_of(tmp_path / "c.zarr", tokens="dead"))
    assert ds.token.values.tolist() == np.flatnonzero(COUNTS == 0).tolist()


def test_they_are_coordinates_wherever_the_run_goes(tmp_path: Path) -> None:
    tokens = [1, 3, 6, 16]
    path = run_of(tmp_path / "run.zarr", populations=GIVEN, tokens=tokens)
    file = export(path, tmp_path / "run.safetensors")
    copies = [
        import_file(file, tmp_path / "again.zarr").path,
        export(path, tmp_path / "copy.zarr", format="run").path,
    ]
    for made in (path, *copies):
        ds = xr.open_zarr(made)
        for name, mask in EXPECTED.items():
            assert ds[name].dtype == bool
            np.testing.assert_array_equal(ds.coords[name], mask[tokens])
        assert not verify(made).problems
        found = analysis.centroid(open_run(made)).population.values.tolist()
        assert sorted(found) == ["all", "dead", "first", "live", "odd", "rare"]
    pytest.importorskip("h5py")
    hdf5 = import_file(export(path, tmp_path / "run.h5", format="hdf5"), tmp_path / "h5.zarr").path
    assert not set(EXPECTED) & set(xr.open_zarr(hdf5).coords)
    (path / "is_rare" / "c.0").write_bytes(b"damaged")
    assert [problem.array for problem in verify(path).problems if problem.array] == ["is_rare"]


def test_a_run_that_continues_keeps_them(tmp_path: Path) -> None:
    model = TinyModel()
    path = run_of(tmp_path / "run.zarr", model, populations=GIVEN)
    on: dict[str, Any] = {"resume": True}
    for given in (None, GIVEN):
        first = int(open_run(path).step[-1])
        run_of(path, model, populations=given, first_step=first, **on)
        np.testing.assert_array_equal(open_run(path).is_rare, EXPECTED["is_rare"])
    for given in ({"rare": GIVEN["rare"]}, {**GIVEN, "odd": [4]}):
        with pytest.raises(InvalidArgument, match=r"is_(first, )?.*odd differ from .*leave them"):
            run_of(path, model, populations=given, first_step=15, **on)


def test_what_is_no_population_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="got the population 'token_count <', expected an "):
        run_of(tmp_path / "run.zarr", populations={"rare": "token_count <"})
    assert not (tmp_path / "run.zarr").exists()


def test_populations_of_a_configuration_stay_with_its_runs(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("65\n66\n")
    (tmp_path / "text.txt").write_bytes(TEXT)
    given = ["rare=0 < token_count < 3", f"capitals={tmp_path / 'ids.txt'}"]
    config = small_config(["gatsby"], 'recording.variables=["weights"]', steps=8)
    config = config.with_values([f"recording.populations={given}"])
    text = tmp_path / "text.txt"
    path = record(config, tmp_path / "run.zarr", corpus=text)
    ds = open_run(path).load()
    assert ds.token.values[ds.is_capitals.values].tolist() == [65, 66]
    count = ds.token_count.values
    np.testing.assert_array_equal(ds.is_rare, (count > 0) & (count < 3))
    assert ds.attrs["config"]["recording"]["populations"] == given
    assert plan(config).files == sum(file.is_file() for file in path.rglob("*"))
    with pytest.raises(InvalidArgument, match="expected NAME=EXPRESSION or NAME=FILE"):
        plan(config.with_values(['recording.populations=["rare"]']))

    half = record(config, tmp_path / "half.zarr", corpus=text, stop=stop_after(4))
    forked = fork(half, tmp_path / "forked.zarr", at=4, corpus=text)
    record(config, half, corpus=text, resume=True)
    for one in (forked, half):
        xr.testing.assert_equal(open_run(one).load(), ds)
        assert not verify(one).problems
    (tmp_path / "ids.txt").write_text("65\n67\n")
    with pytest.raises(InvalidArgument, match="populations: is_capitals differ from"):
        fork(half, tmp_path / "other.zarr", at=4, corpus=text)
    assert not (tmp_path / "other.zarr").exists()


def test_an_empty_population_is_noted_at_the_start(tmp_path: Path) -> None:
    told: list[str] = []
    given = {"none": "token_count < 0", "capitals": [3]}
    path = run_of(tmp_path / "run.zarr", populations=given, tokens=[3], on_note=told.append)
    assert told == ["the population none has no token"]
    assert information(path)["populations"] == {"capitals": 1, "none": 0}
