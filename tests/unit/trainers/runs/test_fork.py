"""A fork is the run that it was forked from until there, and then another one."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from altered_runs import rewrite
from damage import contents
from small_trainings import BLOCK, Straight, last_checkpoint, same_values, small_config, stop_after

from trajstore import RunWriter, errors, repair, verify
from trajstore.store.storage.remote_path import checkpoint_folder
from trajstore.trainers import RunConfig, fork, record, recorded_config, replay

STEPS = 9


@pytest.fixture(scope="module")
def whole(straight: Straight) -> Path:
    return straight(small_config(["gatsby"], steps=STEPS))


def parts(one: Path, other: Path) -> dict[str, int | None]:
    """First step at which each common variable differs."""
    a, b = (xr.open_zarr(path, chunks=None).load() for path in (one, other))
    rows = min(a.sizes["step"], b.sizes["step"])
    assert (a.step.values[:rows] == b.step.values[:rows]).all()
    found: dict[str, int | None] = {}
    for name in set(a.data_vars) & set(b.data_vars):
        left, right = (ds[name].values[:rows].reshape(rows, -1) for ds in (a, b))
        unsigned = f"u{left.itemsize}"
        rows_apart = np.flatnonzero((left.view(unsigned) != right.view(unsigned)).any(1))
        found[name] = int(a.step.values[rows_apart[0]]) if rows_apart.size else None
    return found


def test_without_a_checkpoint_the_steps_until_there_are_proven(whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    notes: list[str] = []
    proven: list[tuple[int, int]] = []
    other = fork(
        whole, tmp_path / "other.zarr", at=5, settings=["optimizer.lr=3e-3"],
        on_note=notes.append, on_retrain=lambda *at: proven.append(at),
    )  # fmt: skip
    assert proven == [(step, 5) for step in range(1, 6)]
    assert "steps 1 to 5 are trained again" in notes[0]
    found = parts(whole, other)
    assert found["W"] == found["lr"] == 6
    assert found["loss"] == found["grad"] == 7
    for variable in ("W", "grad", "lr"):
        shards = [path / variable for path in (whole, other)]
        first, second = ([*sorted(shard.glob("c.*"))] for shard in shards)
        assert first[0].samefile(second[0])
        assert first[0].stat().st_nlink == 2
        assert not first[1].samefile(second[1])
    assert contents(whole) == before


def test_weights_and_moments_become_float32(whole: Path, stopped: Path, tmp_path: Path) -> None:
    other = fork(stopped, tmp_path / "other.zarr", at=5, settings=["model.dtype=float32"])
    ds = xr.open_zarr(other).load()
    for variable in ("W", "grad", "exp_avg", "exp_avg_sq", "grad_norm", "clip_coef"):
        assert ds[variable].attrs["native_dtype"] == "float32"
    found = parts(whole, other)
    assert (found["W"], found["lr"]) == (6, None)
    entry = ds.attrs["provenance"]["fork"]
    assert (entry["run"], entry["created"]) == (str(stopped), xr.open_zarr(stopped).created)
    assert (entry["step"], entry["proven_until"]) == (5, 5)
    assert entry["settings"] == {"model.dtype": "float32"}
    assert (other / "W" / "c.0.0.0").stat().st_nlink == 1
    narrow = ds.W.values[6:].view("u4") & 0xFFFF
    assert narrow.any()
    taken = last_checkpoint(other)
    assert taken.tensors["optimizer.transformer.wte.weight.exp_avg"].dtype == torch.float32
    assert verify(other).clean
    replayed = replay(other)
    assert not replayed.findings
    assert replayed.replayed == STEPS - 5
    assert "before the run was forked" in str(replayed.unreplayed)


ADAM = ["optimizer.name=adam", "optimizer.betas=[0.8,0.9]", "training.max_grad_norm=0.1"]
SGD = ["optimizer.name=sgd", "optimizer.momentum=0.9"]


@pytest.mark.parametrize(
    ("settings", "kind", "note"),
    [
        (ADAM, "Adam", None),
        (SGD, "SGD", "sgd cannot use the state of adamw, so it starts without state at step 6"),
        (["training.steps=8"], "AdamW", "jumps at step 6"),
    ],
)
def test_settings_take_effect(
    settings: list[str], kind: str, note: str | None, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    other = fork(stopped, tmp_path / "o.zarr", at=5, settings=settings, on_note=notes.append)
    assert parts(whole, other)["W"] in (6, 7)
    told = [sentence for sentence in notes if "round" not in sentence]
    assert bool(told) == bool(note)
    assert note is None or note in told[0]
    ds = xr.open_zarr(other)
    config = RunConfig.parse(ds.attrs["config"])
    assert config == recorded_config(stopped).with_values(settings)
    assert ds.attrs["optimizer"]["class"].endswith(f".{kind}")
    assert ("exp_avg" in ds) == (kind != "SGD")
    if kind != "SGD":
        assert ds.attrs["optimizer"]["hyperparameters"]["betas"] == [*config.optimizer.betas]
    assert not replay(other).findings
    assert verify(other).clean


@pytest.mark.nightly
def test_a_fork_is_resumed_forked_and_repaired_as_any_run(
    stopped: Path, text: Path, tmp_path: Path
) -> None:
    before = contents(stopped)
    straight, path = tmp_path / "straight.zarr", tmp_path / "run.zarr"
    changes = ["optimizer.lr=3e-3", "model.dtype=float32"]
    fork(stopped, straight, at=5, settings=changes)
    fork(stopped, path, at=5, settings=changes, stop=stop_after(1))
    record(recorded_config(path), path, resume=True, stop=stop_after(1))
    further = fork(path, tmp_path / "further.zarr", at=7, settings=["optimizer.lr=1e-4"])
    assert parts(straight, further)["W"] == 8
    entry = xr.open_zarr(further).attrs["provenance"]["fork"]
    assert entry["run"] == str(path)
    assert entry["forked_before"]["run"] == str(stopped)
    record(recorded_config(path), path, resume=True)
    assert set(parts(straight, path).values()) == {None}
    shutil.rmtree(checkpoint_folder(path))
    with pytest.raises(errors.NothingToResume, match=r"is a fork of .* at step 5"):
        fork(path, tmp_path / "no.zarr", at=7, corpus=text)
    (path / "W" / "c.1.0.0").unlink()
    assert repair(path).rows == BLOCK
    assert contents(stopped) == before
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix == ".zarr") == [
        "further.zarr", "run.zarr", "straight.zarr",
    ]  # fmt: skip


def test_a_fork_to_stochastic_sgd_is_replayed_and_keeps_its_populations(
    text: Path, tmp_path: Path
) -> None:
    """Its random numbers are those of the step, wherever it begins to draw them."""
    source, other = tmp_path / "run.zarr", tmp_path / "other.zarr"
    (ids := tmp_path / "ids.txt").write_text("65\n66\n")
    variant = [
        "gatsby-adam", "optimizer.name=sgd", "training.autocast=float16", "model.dtype=float32",
        "schedule.name=linear", "initialization.kind=normal", "initialization.sigma=300",
        f"recording.populations=['some={ids}']",
    ]  # fmt: skip
    record(small_config(variant, steps=STEPS), source, corpus=text, stop=stop_after(5))
    to = ["optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.rounding=stochastic"]
    fork(source, other, at=5, settings=to, corpus=text)
    replayed, skipped = replay(other), int((xr.open_zarr(other).skipped == 1).sum())
    assert (bool(replayed.findings), replayed.replayed > 0, skipped > 0) == (False, True, True)
    taken = last_checkpoint(other).tensors["optimizer.transformer.wte.weight.step"]
    assert taken == STEPS - skipped
    ds = xr.open_zarr(other)
    assert ds.token.values[ds.is_some.values].tolist() == [65, 66]
    ids.write_text("65\n67\n")
    with pytest.raises(errors.InvalidArgument, match=r"populations: is_some: .* was recorded with"):
        fork(source, tmp_path / "no.zarr", at=4, corpus=text)
    assert not (tmp_path / "no.zarr").exists()


def copy(stopped: Path, to: Path) -> Path:
    """A copy of the run, with its checkpoint."""
    shutil.copytree(checkpoint_folder(stopped), checkpoint_folder(to))
    return Path(shutil.copytree(stopped, to))


@pytest.mark.nightly
def test_from_the_nearest_checkpoint_before(stopped: Path, tmp_path: Path) -> None:
    path = copy(stopped, tmp_path / "run.zarr")
    record(recorded_config(path), path, resume=True)
    shutil.rmtree(checkpoint_folder(path))
    shutil.copytree(checkpoint_folder(stopped), checkpoint_folder(path))
    proven: list[int] = []
    fork(path, tmp_path / "other.zarr", at=7, on_retrain=lambda step, last: proven.append(step))
    assert proven == [6, 7]


def test_what_cannot_be_forked_is_one_sentence_and_leaves_nothing(
    whole: Path, stopped: Path, text: Path, tmp_path: Path
) -> None:
    other = recorded_config(stopped).with_values(["training.seed=7"]).model_dump(mode="json")
    seeded = copy(stopped, tmp_path / "seeded.zarr")
    RunWriter.resume(seeded, attributes={"config": other}).close()
    rewrite(altered := copy(stopped, tmp_path / "altered.zarr"), "W", (5, 3, 2))
    wide = record(small_config(["gatsby", "model.dtype=float32"], steps=3), tmp_path / "wide.zarr")
    own = tmp_path / "own.zarr"
    with RunWriter.create(own, token=[0, 1], hidden=2, variables={"W": "float32"}) as run:
        run.append(0, W=np.zeros((2, 2), "float32"))
    cases: list[tuple[Any, int, list[str], Any, str]] = [
        (whole, 10, [], errors.StepNotFound, "no row of step 10; the nearest: 9"),
        (whole, 0, [], errors.InvalidArgument, "fork at step 0"),
        (whole, 9, [], errors.ConfigError, "no step remains after step 9.*training.steps=18"),
        (whole, 6, ["recording.every=2"], errors.ConfigError, "every cannot change at a fork"),
        (whole, 6, ["training.autocast=float16"], errors.ConfigError, "gradient scaler"),
        (wide, 2, ["model.dtype=bfloat16"], errors.ConfigError,
         "W would change from float32 to bfloat16"),
        (tmp_path / "no.zarr", 3, [], errors.RunNotFound, "no run"),
        ("s3://bucket/run.zarr", 3, [], errors.InvalidArgument, "copy the run"),
        (own, 0, [], errors.NothingToResume, r"only the program.*restore\(\).*what_if\(\)"),
        (altered, 5, [], errors.NothingToResume, "the checkpoint of step 5 differ"),
        # As if another machine had made the beginning.
        (seeded, 3, [], errors.NothingToResume,
         r"forked at step 3, .*at step 0 W differs"),
    ]  # fmt: skip
    before = contents(tmp_path)
    for source, at, settings, kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            fork(source, tmp_path / "other.zarr", at=at, settings=settings, corpus=text)
    with pytest.raises(errors.InvalidArgument, match="is the run to fork"):
        fork(altered, altered, at=3, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("failing", "overwrite"), [("step-", False), ("step-", True), ("other.zarr", False)]
)
def test_what_fails_while_it_is_made_leaves_all_as_it_was(
    failing: str, overwrite: bool, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint cannot get its name, or the run cannot.

    A run that was to be replaced loses a checkpoint of the same step: it can repeat its training.
    """
    target = tmp_path / "other.zarr"
    if overwrite:
        copy(stopped, target)
    before, changes, failed = contents(tmp_path), ["optimizer.lr=3e-3"], []  # type: ignore[var-annotated]
    before.pop("other.ckpt/step-00000005.safetensors", None)

    def fail(call: Any, source: Any, to: Any) -> Any:
        if not failed and Path(to).name.startswith(failing) and tmp_path in Path(to).parents:
            failed.append(to)
            raise OSError(28, "No space left on device")
        return call(source, to)

    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(fail, getattr(os, name)))
        with pytest.raises(OSError, match="No space"):
            fork(stopped, target, at=5, settings=changes, overwrite=overwrite)
    assert contents(tmp_path) == before
    fork(stopped, target, at=5, settings=changes, overwrite=overwrite)
    assert xr.open_zarr(target).attrs["provenance"]["fork"]["step"] == 5
    assert last_checkpoint(target).step == STEPS


@pytest.mark.nightly
def test_a_fork_with_other_types_resumes_from_its_rows(straight: Straight, tmp_path: Path) -> None:
    everything = small_config(["gatsby", "recording.variables=everything"], steps=STEPS)
    settings, source = ["model.dtype=float32", "optimizer.lr=1e-4"], straight(everything)
    ends = {"whole.zarr": STEPS, "other.zarr": 2}
    whole, other = (
        fork(source, tmp_path / name, at=5, settings=settings, stop=stop_after(steps))
        for name, steps in ends.items()
    )
    record(recorded_config(other), other, resume=True)
    ds = same_values(whole, other)
    assert ds.params.attrs["native_dtype"] == ds.attrs["parameters"][1]["dtype"] == "float32"
    assert not checkpoint_folder(other).exists()
    assert verify(other).clean


def test_a_fork_to_another_optimizer_has_none_of_the_state(
    straight: Straight, tmp_path: Path
) -> None:
    momentum = ["gatsby-adam", "optimizer.name=sgd", "optimizer.momentum=0.9"]
    source = straight(small_config(momentum, "recording.variables=everything", steps=STEPS))
    settings = ["optimizer.name=adam", "optimizer.momentum=0", "optimizer.lr=1e-4"]
    ds = xr.open_zarr(other := fork(source, tmp_path / "a.zarr", at=7, settings=settings))
    assert (ds.attrs["status"], ds.sizes["step"]) == ("complete", STEPS + 1)
    assert not {"momentum_buffer", "params_momentum_buffer", "param_kept"} & {*ds}
    assert verify(other).clean
