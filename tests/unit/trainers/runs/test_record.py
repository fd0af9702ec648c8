"""Trainings of both loops and encodings, and resumed ones, give the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from altered_runs import rewrite
from bits_and_calls import nightly_but
from checkpoints import write_checkpoint
from compact_runs import RULE_ARRAYS
from damage import contents
from small_trainings import (
    TEXT,
    Straight,
    checkpoints,
    last_checkpoint,
    same_checkpoints,
    same_values,
    small_config,
    stop_after,
)
from stored_forms import stored_forms

from trajstore import RunWriter, errors, open_run, verify
from trajstore.store.reading.run_info import information
from trajstore.store.storage.remote_path import (
    checkpoint_folder,
    location,
)
from trajstore.trainers import (
    RunConfig,
    TrajectoryCallback,
    fork,
    record,
    recorded_config,
    replay,
    what_if,
)

STEPS, EPOCH = 9, 6
COMPACT = "recording.encoding=compact"
SKIPPING = "adam, decay, dead tokens, skipped steps"
COMPACT_VARIANTS = {
    "trainer": (["gatsby"], RULE_ARRAYS),
    SKIPPING: (
        ["gatsby-adam", "optimizer.weight_decay=0.1", "recording.tokens=dead",
         "training.autocast=float16", "model.dtype=float32",
         "initialization.kind=normal", "initialization.sigma=30", "optimizer.lr=1"], RULE_ARRAYS,
    ),
    "float32, sgd": (["gatsby", "model.dtype=float32", "optimizer.name=sgd"], ("W",)),
    "without gradients": (["gatsby", "recording.variables=['weights']"], ()),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly_but(COMPACT_VARIANTS, SKIPPING))
def test_both_encodings_hold_the_same_bits(
    name: str, straight: Straight, text: Path, tmp_path: Path
) -> None:
    variant, computed = COMPACT_VARIANTS[name]
    path = tmp_path / "run.zarr"
    for options in ({"stop": stop_after(6)}, {"resume": True}):
        notes: list[str] = []
        config = small_config(variant, COMPACT, steps=STEPS)
        record(config, path, corpus=text, on_note=notes.append, **options)
        assert any("as differences" in note for note in notes) == (not computed)
    kinds = {name: array["kind"] for name, array in information(path)["arrays"].items()}
    assert tuple(name for name in kinds if kinds[name] == "computed") == computed
    ds = same_values(straight(small_config(variant, steps=STEPS)), path)
    assert verify(path).clean
    assert ("skipped" in ds and ds.skipped.values[1:].any()) == (name == SKIPPING)
    for one in computed:
        form = stored_forms(path)[one]
        assert form["differences"] == 0
        # W would differ everywhere if a skipped step counted.
        assert form["corrected"] <= (form["elements"] / 20 if name == SKIPPING else 0)


def test_a_fork_and_a_what_if_keep_the_encoding(
    straight: Straight, text: Path, tmp_path: Path
) -> None:
    run = straight(small_config(["gatsby"], COMPACT, steps=3))
    betas = ["optimizer.betas=[0.8, 0.99]"]
    forked = fork(run, tmp_path / "fork.zarr", at=2, settings=betas)
    what_if(run, tmp_path / "what-if.zarr", betas)
    for path, beta in ((run, 0.9), (forked, 0.8), (tmp_path / "what-if.zarr", 0.8)):
        metadata = json.loads((path / "W" / "zarr.json").read_bytes())
        assert metadata["codecs"][0]["configuration"]["rule"]["optimizer"]["beta1"] == beta
        assert xr.open_zarr(path).attrs["encoding"] == "compact"
        assert replay(path).clean
        assert verify(path).clean
    other = "recording.encoding=delta"
    with pytest.raises(errors.ConfigError, match=r"recording\.encoding cannot change at a fork"):
        fork(run, tmp_path / "no.zarr", at=2, settings=[other])
    with pytest.raises(errors.ConfigError, match=r"recording\.encoding"):
        record(recorded_config(run).with_values([other]), run, corpus=text, resume=True)


SUMMARIES = (
    "recording.variables=['matrix','W_step_norm','W_ulp_l1','grad_token_norm','hidden_mean',"
    "'hidden_trace','hidden_cosine','batch','example_loss','hidden_states']"
)
RANDOM = "plain, momentum rounded at random"
VARIANTS = {
    "trainer": ["gatsby"],
    "trainer, every 3, accumulated": [
        "gatsby", "recording.every=3", "training.accumulation=4", "schedule.name=cosine",
        "recording.tokens=live", SUMMARIES,
    ],
    "plain": ["gatsby-adam", "schedule.name=linear", f"schedule.steps={STEPS}"],
    RANDOM: [
        "gatsby-adam", "optimizer.name=sgd", "optimizer.momentum=0.9",
        "optimizer.rounding=stochastic", "recording.tokens=dead", SUMMARIES,
    ],
}  # fmt: skip


def config_of(name: str, *assignments: str) -> RunConfig:
    return small_config(VARIANTS[name], *assignments, steps=STEPS)


def agree(one: Path, other: Path) -> xr.Dataset:
    """Every variable of two runs, and the whole state of their trainings after the last step."""
    b = same_values(one, other)
    assert b.attrs["status"] == "complete"
    same_checkpoints(one, other)
    ids = torch.tensor(b.token.values.tolist())
    weights = last_checkpoint(other).tensors["model.transformer.wte.weight"].float()[ids].numpy()
    assert (b.W.values[-1] == weights).all()
    return b


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("trainer, every 3, accumulated", 5),  # within a block and an epoch
        pytest.param("plain", EPOCH, marks=pytest.mark.nightly),
    ],
)
def test_a_seam_leaves_no_trace_where_name_settings_and_versions_change(
    name: str, step: int, straight: Straight, text: Path, tmp_path: Path
) -> None:
    begun, run = tmp_path / "begun.zarr", tmp_path / "run.zarr"
    record(config_of(name), begun, corpus=text, stop=stop_after(step))
    ds = xr.open_zarr(begun)
    assert (ds.attrs["status"], ds.step.values[-1]) == ("interrupted", step)
    assert checkpoints(begun) == [step]
    checkpoint_folder(begun).rename(checkpoint_folder(begun.rename(run)))
    provenance = ds.attrs["provenance"] | {"torch": "1.0"}
    RunWriter.resume(run, attributes={"provenance": provenance}).close("interrupted")
    changes = ["recording.memory=64MiB", "recording.checkpoint_every=3", "recording.commit_every=3"]
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        changes.append("training.device=auto")  # which is the CPU here, as before
    config, notes = recorded_config(run).with_values(changes), []  # type: ignore[var-annotated]
    record(config, run, corpus=text, resume=True, on_note=notes.append)
    ds = agree(straight(config_of(name)), run)
    assert checkpoints(run)[-1] == STEPS
    assert ds.attrs["config"]["recording"]["memory"] == "64MiB"
    assert "segments" not in ds.attrs
    (note,) = notes
    assert f"torch was 1.0 and is now {torch.__version__}" in note
    (entry,) = ds.attrs["provenance"]["resumed"]
    assert (entry["step"], entry["torch"]) == (step, torch.__version__)


def test_a_training_that_fails_continues_from_a_checkpoint_before(
    straight: Straight, text: Path, tmp_path: Path
) -> None:
    def fail(recorder: Any) -> None:
        if recorder.step == 8:
            raise RuntimeError("the power went")

    path = tmp_path / "run.zarr"
    config = config_of("trainer", "recording.checkpoint_every=2")
    with pytest.raises(RuntimeError, match="the power went"):
        record(config, path, corpus=text, on_step=fail)
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values[-1] == 8
    assert checkpoints(path)[-1] == 7
    record(recorded_config(path), path, resume=True)
    agree(straight(config_of("trainer")), path)
    assert xr.open_zarr(path).attrs["provenance"]["resumed"][0]["step"] == 7


def test_a_checkpoint_past_the_committed_rows_is_passed_over(
    interrupted: Path, straight: Straight
) -> None:
    early = checkpoint_folder(interrupted) / "step-00000005.safetensors"
    data = early.read_bytes()
    record(recorded_config(interrupted), interrupted, resume=True, stop=stop_after(2))
    assert checkpoints(interrupted) == [7]
    early.write_bytes(data)
    early.with_name("step-00000006.safetensors").symlink_to("gone")  # a recording removed it
    RunWriter.resume(interrupted, rows=7).close("interrupted")
    record(recorded_config(interrupted), interrupted, resume=True)
    ds = agree(straight(config_of("trainer")), interrupted)
    assert [entry["step"] for entry in ds.attrs["provenance"]["resumed"]] == [5, 5]


def test_a_run_that_is_named_alike_is_refused_before_it_is_trained(
    interrupted: Path, text: Path
) -> None:
    alike = interrupted.with_suffix("")
    assert checkpoint_folder(alike) == checkpoint_folder(interrupted)
    with pytest.raises(errors.RunExists, match=r"run.zarr exists, and run would have"):
        record(config_of("trainer"), alike, corpus=text)
    assert not alike.exists()
    assert checkpoints(interrupted) == [5]


def test_a_run_that_has_all_its_steps_is_complete_and_can_be_extended(
    straight: Straight, text: Path, tmp_path: Path
) -> None:
    path, notes = tmp_path / "run.zarr", []  # type: ignore[var-annotated]
    record(config_of(RANDOM, "training.steps=6"), path, corpus=text, stop=stop_after(5))
    before = xr.open_zarr(path).load()
    shorter = recorded_config(path).with_values(["training.steps=5"])
    record(shorter, path, resume=True, on_note=notes.append)
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "complete"
    assert ds.load().identical(before.assign_attrs(ds.attrs))
    assert ds.attrs["config"] == before.attrs["config"]
    assert notes == []
    assert checkpoints(path) == [5]
    metadata = (path / "zarr.json").read_bytes()
    record(shorter, path, resume=True, on_note=notes.append)
    assert "has all 5 steps already" in notes.pop()
    assert (path / "zarr.json").read_bytes() == metadata
    for last in (6, STEPS):
        longer = recorded_config(path).with_values([f"training.steps={last}"])
        record(longer, path, resume=True, on_note=notes.append)
    unbroken = straight(config_of(RANDOM))
    ds = agree(unbroken, path)
    assert notes == []
    assert ds.attrs["config"] == xr.open_zarr(unbroken).attrs["config"]


def test_an_extension_moves_the_decay_or_keeps_it_and_says_so(text: Path, tmp_path: Path) -> None:
    path, notes = tmp_path / "run.zarr", []  # type: ignore[var-annotated]
    record(config_of("trainer", "training.steps=4"), path, corpus=text)
    longer = recorded_config(path).with_values(["training.steps=6"])
    record(longer, path, resume=True, on_note=notes.append)
    note = notes.pop()
    assert notes == []
    assert "jumps at step 5, from 0 to 0.000333333" in note
    assert "with schedule.steps=6" in note
    ds = xr.open_zarr(path)
    assert ds.lr.values[4:].tolist() == [1e-3 / 4, 1e-3 * 2 / 6, 1e-3 / 6]
    assert ds.attrs["optimizer"]["schedule"]["steps"] == 6
    assert ds.attrs["config"]["training"]["steps"] == 6
    longer = recorded_config(path).with_values(["training.steps=8", "schedule.steps=6"])
    record(longer, path, resume=True, on_note=notes.append)
    (note,) = notes
    assert "the rate is 0 in steps 7 to 8" in note
    assert (xr.open_zarr(path).lr.values[7:] == 0).all()


def test_what_cannot_be_resumed_is_one_sentence_and_changes_nothing(
    interrupted: Path, tmp_path: Path
) -> None:
    config, recorded = recorded_config(interrupted), xr.open_zarr(interrupted).attrs["provenance"]
    (file,) = checkpoint_folder(interrupted).iterdir()
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT + b"!")

    def refused(kind: Any, match: str, *settings: str, **options: Any) -> None:
        before = contents(interrupted)
        with pytest.raises(kind, match=match):
            record(config.with_values(settings), interrupted, resume=True, **options)
        assert contents(interrupted) == before

    refused(errors.ConfigError, "optimizer.lr is 0.001", "optimizer.lr=3e-4")
    refused(errors.ConfigError, "schedule.steps is not set", "schedule.steps=99")
    refused(errors.NothingToResume, r"5 steps already, got training\.steps=4; .* resume=True",
            "training.steps=4")  # fmt: skip
    refused(errors.InvalidArgument, "both", overwrite=True)
    refused(errors.CorpusError, r"other\.txt .* differs from that of .* april\.txt of 70",
            corpus=other)  # fmt: skip
    with RunWriter.resume(interrupted):
        refused(errors.RunLocked, "writ|lock")
    for change, kind, match in (
        ({"device": "cuda:0"}, errors.ConfigError, r"recorded on cuda.*training.device=cuda"),
        ({"tokenizer": {"name": "ascii", "sha256": "0" * 64}}, errors.CorpusError,
         "give the recorded one: tokenizer=…"),
    ):  # fmt: skip
        changed = {"provenance": recorded | change}
        RunWriter.resume(interrupted, attributes=changed).close("interrupted")
        refused(kind, match)
    RunWriter.resume(interrupted, attributes={"provenance": recorded}).close("interrupted")
    rewrite(interrupted, "W", (5, 3, 2))
    refused(errors.NothingToResume, r"differ from .* at step 5")
    write_checkpoint(file)
    refused(errors.FormatError, r"has checkpoint format 1, .* reads the formats 3 to 4;")
    with pytest.raises(errors.RunNotFound, match="there is no run at"):
        recorded_config(tmp_path / "nowhere.zarr")
    with pytest.raises(errors.InvalidArgument, match="encoding='zip', expected 'delta'"):
        TrajectoryCallback(tmp_path / "run.zarr", encoding="zip")


ADDRESS = "memory://trainings/run.zarr"


def test_a_training_at_an_address(straight: Straight, text: Path) -> None:
    config = config_of("trainer")
    record(config, ADDRESS, corpus=text, stop=stop_after(3))
    far = location(ADDRESS)
    folder = far.with_name("run.ckpt")
    assert [path.name for path in folder.iterdir()] == ["step-00000003.safetensors"]
    assert open_run(ADDRESS).attrs["status"] == "interrupted"
    with pytest.raises(errors.RunExists):
        record(config, ADDRESS, corpus=text)
    record(config, ADDRESS, corpus=text, resume=True, stop=stop_after(2))
    assert [path.name for path in folder.iterdir()] == ["step-00000005.safetensors"]
    folder.remove_below()  # type: ignore[union-attr]
    repeated: list[int] = []
    record(config, ADDRESS, corpus=text, resume=True, on_retrain=lambda at, _: repeated.append(at))
    assert repeated == [1, 2, 3, 4, 5]
    xr.testing.assert_equal(open_run(ADDRESS).load(), open_run(straight(config)).load())
    assert not far.with_name(".run.zarr.lock").exists()
