"""A run with keyframes, opened with developed=True, reads as one that recorded everything."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from altered_runs import change_attributes, rewrite
from damage import flip
from forked_processes import processes
from small_trainings import small_config
from trainings import Accumulated, Loop, Pair, Scaled

from trajstore import open_run, verify
from trajstore.errors import (
    CorpusError,
    InvalidArgument,
    NothingToResume,
    VariableNotRecorded,
)
from trajstore.trainers import develop_run
from trajstore.trainers.developed_dataset import developed_dataset

LAYER = "transformer.h.0.attn.c_attn.weight"


def config_of(tier: str, *settings: str) -> Any:
    return small_config(["gatsby-adam"], f"recording.variables={tier}",
                        "recording.keyframe_every=3", *settings, steps=6)  # fmt: skip


@pytest.fixture(scope="module")
def whole(straight: Any) -> xr.Dataset:
    """The run that recorded everything."""
    return open_run(straight(config_of("everything")), chunks=None).load()


@pytest.fixture
def run(straight: Any, tmp_path: Path) -> Path:
    """A run with keyframes at 0, 3, 6, and an empty cache."""
    return Path(shutil.copytree(straight(config_of("keyframes")), tmp_path / "run.zarr"))


@pytest.fixture(scope="module")
def developed(straight: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run, all of whose stretches were developed."""
    folder = tmp_path_factory.mktemp("developed")
    shutil.copytree(straight(config_of("keyframes")), folder / "run.zarr")
    opened(folder / "run.zarr").params.load()
    return folder


@pytest.fixture
def full(developed: Path, tmp_path: Path) -> Path:
    """A copy of that run and its cache."""
    return Path(shutil.copytree(developed, tmp_path / "full")) / "run.zarr"


def opened(run: Path, chunks: Any = "blocks", limit: int = 1 << 30) -> xr.Dataset:
    """The run as `open_run` with developed=True opens it; it is trained in this process."""

    def train(first: int, last: int, target: Path) -> None:
        develop_run(run, target, steps=slice(first, last + 1))

    return developed_dataset(run, chunks, limit, train)


def cached(run: Path) -> dict[str, int]:
    """When each stretch was written."""
    paths = sorted(run.with_suffix(".developed").glob("*.zarr"))
    return {path.name: (path / "zarr.json").stat().st_mtime_ns for path in paths}


def same(one: Any, other: Any) -> bool:
    return bool(one.values.tobytes() == other.values.tobytes())


@pytest.mark.parametrize("chunks", ["blocks", None])
def test_every_variable_of_every_step(chunks: Any, full: Path, whole: xr.Dataset) -> None:
    before = cached(full)
    assert [*before] == ["0-3.zarr", "4-6.zarr"]
    ds = opened(full, chunks)
    assert {*ds.data_vars} - {*whole.data_vars} == {"params_digest", "step_digest"}
    for name in whole.data_vars:
        assert (ds[name].dims, ds[name].attrs) == (whole[name].dims, whole[name].attrs)
        assert same(ds[name], whole[name]), name
    rows = {"step": [6, 1, 6], "element": slice(9, 1, -2)}
    assert same(ds.params_grad.isel(rows), whole.params_grad.isel(rows))
    assert same(ds.params.isel(step=slice(5, 2, -1), element=3),
                whole.params.isel(step=slice(5, 2, -1), element=3))  # fmt: skip
    assert cached(full) == before
    assert verify(full).clean


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        ["training.autocast=float16", "model.dtype=float32", "initialization.kind=normal",
         "initialization.sigma=300", "optimizer.lr=1", "recording.keyframe_every=6"],  # skips steps
        ["optimizer.name=sgd", "optimizer.momentum=0.9"],
    ],
)  # fmt: skip
def test_counts_and_marks_follow_from_the_keyframes(
    settings: list[str], straight: Any, tmp_path: Path
) -> None:
    path = shutil.copytree(straight(config_of("keyframes", *settings)), tmp_path / "run.zarr")
    ds = opened(path)
    whole = open_run(straight(config_of("everything", *settings)), chunks=None)
    parameters = [each.traj.parameter(LAYER) for each in (ds, whole)]
    assert cached(path) == {}
    for one, other in [parameters, (ds, whole)]:
        assert {*one.data_vars} - {"step_digest", "params_digest"} == {*other.data_vars}
        for name in other.data_vars:
            assert same(one[name], other[name]), name


def test_a_read_develops_the_stretches_it_needs(run: Path, whole: xr.Dataset) -> None:
    ds = opened(run)
    assert same(ds.loss, whole.loss)
    parameter = ds.traj.parameter(LAYER)  # its counts follow from the keyframes
    assert same(ds.params_count, whole.params_count)
    assert cached(run) == {}
    assert same(ds.params.sel(step=5), whole.params.sel(step=5))
    first = cached(run)
    assert [*first] == ["4-6.zarr"]
    of_whole = whole.traj.parameter(LAYER)
    for name in ("W", "grad", "exp_avg"):
        assert same(parameter[name].sel(step=6), of_whole[name].sel(step=6))
    assert {*parameter.data_vars} - {"step_digest"} == {*of_whole.data_vars}
    layers = [each.traj.layers(steps=6, metrics="frobenius").frobenius for each in (ds, whole)]
    assert same(*layers)
    assert cached(run) == first


@pytest.mark.nightly
def test_a_stretch_that_is_damaged_foreign_or_removed_is_developed_again(
    full: Path, whole: xr.Dataset
) -> None:
    cache = full.with_suffix(".developed")
    stretch, ds = cache / "4-6.zarr", opened(full)

    def is_developed_again() -> bool:
        before = cached(full).get("4-6.zarr")
        return (
            same(ds.params.sel(step=5), whole.params.sel(step=5))
            and before != cached(full)["4-6.zarr"]
        )

    assert not is_developed_again()
    flip(stretch / "params/c.0.0", 8 * 30 + 3)
    assert is_developed_again()
    change_attributes(stretch, lambda given: given["provenance"].pop("developed"))
    (cache / ".0-3.zarr.4194305.partial").mkdir()  # of a process that does not exist
    assert is_developed_again()
    assert [path.name for path in sorted(cache.iterdir())] == ["0-3.zarr", "4-6.zarr"]
    shutil.rmtree(cache)
    assert is_developed_again()


def test_steps_that_differ_are_not_shown(full: Path) -> None:
    rewrite(full, "params_digest", (5, 2))
    ds = opened(full)
    with pytest.raises(NothingToResume, match=r"steps 4 to 6 .*: at step 5 params_digest differs"):
        ds.params.sel(step=6).load()
    assert "4-6.zarr" not in cached(full)


@pytest.mark.nightly  # a process imports torch
def test_a_missing_text_is_named(run: Path, tmp_path: Path) -> None:
    def lose(attributes: dict[str, Any]) -> None:
        attributes["provenance"]["sources"] = {"corpus": str(tmp_path / "lost.txt")}

    change_attributes(run / "keyframes", lose)
    change_attributes(run, lose)
    with pytest.raises(
        CorpusError, match=r"steps 4 to 6 of .*: the corpus .*by hand.*step=4:7 -o "
    ):
        open_run(run, developed=True).params.sel(step=5).load()


def test_the_cache_has_a_limit(full: Path, whole: xr.Dataset) -> None:
    ds = open_run(full, developed=True, cache_size="20KiB")
    assert same(ds.params, whole.params)  # what is there is read
    shutil.rmtree(full.with_suffix(".developed") / "0-3.zarr")
    with pytest.raises(InvalidArgument, match=r"steps 0 to 3 .* KiB when all 4 .*cache_size='"):
        ds.params.sel(step=2).load()


@pytest.mark.nightly
def test_the_steps_that_were_not_read_for_the_longest_time_go_first(full: Path) -> None:
    cache = full.with_suffix(".developed")
    shutil.copytree(cache / "0-3.zarr", cache / "1-3.zarr")
    os.utime(cache / "0-3.zarr", (0, 0))
    os.utime(cache / "1-3.zarr", (1, 1))
    opened(full).params.sel(step=0).load()
    shutil.rmtree(cache / "4-6.zarr")
    size = sum(each.stat().st_size for each in (cache / "0-3.zarr").rglob("*"))
    opened(full, limit=2 * size).params.sel(step=5).load()
    assert [*cached(full)] == ["0-3.zarr", "4-6.zarr"]


def test_runs_that_cannot_be_developed(straight: Any, tmp_path: Path) -> None:
    with pytest.raises(VariableNotRecorded, match=r"no keyframes.*variables='keyframes'"):
        open_run(straight(config_of("everything")), developed=True)
    Accumulated().train(tmp_path / "own.zarr", last=1)
    with pytest.raises(InvalidArgument, match=r"your own loop, .* give developed=build, a func"):
        open_run(tmp_path / "own.zarr", developed=True)


@pytest.mark.nightly  # a page of the documentation runs such code
@pytest.mark.parametrize("kind", [Scaled, Pair])
def test_an_own_loop_is_developed_with_a_new_model(kind: type[Loop], tmp_path: Path) -> None:
    def build() -> tuple[Any, ...]:
        loop = kind()
        return loop.model, loop.optimizers, loop.step, loop.scaler

    kind().train(tmp_path / "whole.zarr", last=6, variables="everything")
    kind().train(tmp_path / "run.zarr", last=6)
    whole = open_run(tmp_path / "whole.zarr", chunks=None).load()
    ds = open_run(tmp_path / "run.zarr", developed=build)
    for name in whole.data_vars:
        assert same(ds[name], whole[name]), name
    assert verify(tmp_path / "run.developed/4-6.zarr").clean


def read(run: Path) -> None:
    opened(run).params.sel(step=5).load()


@pytest.mark.nightly
def test_two_readers_train_once_and_a_kill_leaves_a_sound_cache(
    run: Path, whole: xr.Dataset
) -> None:
    def wait_for_training(left: set[Path]) -> set[Path]:
        while not (begun := {*cache.glob(".4-6.zarr.*.partial")} - left):
            time.sleep(0.01)  # between two looks at the folder; who is killed cannot report
        return begun

    cache = run.with_suffix(".developed")
    killed, other = (processes.Process(target=read, args=(run,)) for _ in range(2))
    killed.start()
    left = wait_for_training(set())
    killed.kill()
    killed.join()
    assert "4-6.zarr" not in cached(run)
    ds = open_run(run, developed=True)
    threads = [threading.Thread(target=lambda: ds.params.sel(step=5).load()) for _ in range(2)]
    for each in threads:
        each.start()
    wait_for_training(left)
    other.start()
    for each in (*threads, other):
        each.join()
    assert other.exitcode == 0
    assert [path.name for path in cache.iterdir()] == ["4-6.zarr"]
    assert same(ds.params.sel(step=5), whole.params.sel(step=5))
