"""Trainings of both loops and encodings, and resumed ones, give the same bits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from bits_and_calls import nightly_but

torch = pytest.importorskip("torch")
pytest.importorskip("torch")
pytest.importorskip("obstore")
from checkpoints import write_checkpoint  # noqa: E402
from compact_runs import RULE_ARRAYS  # noqa: E402
from list_recorder import TinyModel, batches  # noqa: E402
from small_trainings import (  # noqa: E402
    BLOCK,
    TEXT,
    last_checkpoint,
    same_values,
    small_config,
    stop_after,
)
from stored_forms import stored_forms  # noqa: E402

from trajstore import (  # noqa: E402
    RunWriter,
    export,
    open_run,
    verify,
)
from trajstore.errors import (  # noqa: E402
    ConfigError,
    CorpusError,
    FormatError,
    InvalidArgument,
    NothingToResume,
    RunExists,
    RunLocked,
    RunNotFound,
)
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.store.storage.remote_path import (  # noqa: E402
    checkpoint_folder,
    location,
)
from trajstore.trainers import RunConfig, TrajectoryCallback, capture, fork, record, recorded_config  # noqa: E402
from trajstore.trainers.counterfactuals.what_if import what_if  # noqa: E402
from trajstore.trainers.replays.replay import replay  # noqa: E402
from trajstore.trainers.runs.run_state import RunState  # noqa: E402

pytestmark = pytest.mark.torch

COMPACT_STEPS, COMPACT = 10, "recording.encoding=compact"
COMPACT_QUICK = ("trainer", "adam, decay, dead tokens", "skipped steps")
COMPACT_VARIANTS = {
    "trainer": (["gatsby"], RULE_ARRAYS),
    "adam, decay, dead tokens": (
        ["gatsby-adam", "optimizer.weight_decay=0.1", "recording.tokens=dead"], RULE_ARRAYS,
    ),
    "float32, sgd": (["gatsby", "model.dtype=float32", "optimizer.name=sgd"], ("W",)),
    "float32 moments": (["gatsby", "optimizer.state_dtype=float32"], RULE_ARRAYS),
    "skipped steps": (
        ["gatsby-adam", "training.autocast=float16", "model.dtype=float32",
         "initialization.kind=normal", "initialization.sigma=30", "optimizer.lr=1"], RULE_ARRAYS,
    ),
    "without gradients": (["gatsby", "recording.variables=['weights']"], ()),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly_but(COMPACT_VARIANTS, *COMPACT_QUICK))
def test_both_encodings_hold_the_same_bits(name: str, text: Path, tmp_path: Path) -> None:
    variant, computed = COMPACT_VARIANTS[name]
    plain, stopped = tmp_path / "plain.zarr", tmp_path / "compact.zarr"
    config = small_config(variant, steps=COMPACT_STEPS)
    record(config, plain, corpus=text)
    if name == "skipped steps":
        assert xr.open_zarr(plain).skipped.values[1:].any()
    notes: list[str] = []
    compact = config.with_values([COMPACT])
    record(compact, stopped, corpus=text, stop=stop_after(6), on_note=notes.append)
    kinds = {name: array["kind"] for name, array in information(stopped)["arrays"].items()}
    assert tuple(name for name in kinds if kinds[name] == "computed") == computed
    assert sum("stored as differences" in note for note in notes) == (not computed)
    notes.clear()
    record(compact, stopped, corpus=text, resume=True, on_note=notes.append)
    assert not any("stored as differences" in note for note in notes)
    same_values(plain, stopped)
    assert verify(stopped).clean
    back = tmp_path / "back.zarr"
    export(stopped, back, encoding="delta")
    same_values(plain, back)
    if name in ("trainer", "float32 moments"):
        forms = [stored_forms(stopped)[name] for name in computed]
        assert all(not form["differences"] and not form["corrected"] for form in forms)


def test_skipped_steps_do_not_count(tmp_path: Path) -> None:
    """3 of 20, in two blocks; the scaler's optimizer counts 17."""
    path = tmp_path / "run.zarr"
    torch.manual_seed(1)
    model = TinyModel(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with capture(model, optimizer, path, scaler=scaler, encoding="compact", block_rows=8):
        for number, batch in enumerate(batches(20)):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            scaler.scale(loss * (math.inf if number in (0, 5, 12) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert xr.open_zarr(path).skipped.sum() == 3
    for name in RULE_ARRAYS:
        form = stored_forms(path)[name]
        assert (form["differences"], form["corrected"]) == (0, 0), name


def test_a_fork_and_a_what_if_keep_the_encoding(text: Path, tmp_path: Path) -> None:
    config = small_config(["gatsby"], steps=COMPACT_STEPS)
    runs = {}
    for encoding in ("delta", "compact"):
        path = tmp_path / f"{encoding}.zarr"
        record(config.with_values([f"recording.encoding={encoding}"]), path, corpus=text)
        betas = ["optimizer.betas=[0.8, 0.99]"]
        forked = fork(path, tmp_path / f"{encoding}-fork.zarr", at=6, settings=betas)
        what_if(path, tmp_path / f"{encoding}-what-if.zarr", betas)
        runs[encoding] = (path, forked, tmp_path / f"{encoding}-what-if.zarr")
        assert replay(forked).clean
    for plain, compact in zip(*runs.values(), strict=True):
        ds = same_values(plain, compact)
        assert ds.attrs["encoding"] == "compact"
        assert verify(compact).clean
    for path, beta in zip(runs["compact"], (0.9, 0.8, 0.8), strict=True):
        metadata = json.loads((path / "W" / "zarr.json").read_bytes())
        assert metadata["codecs"][0]["configuration"]["rule"]["optimizer"]["beta1"] == beta
    with pytest.raises(ConfigError, match=r"recording\.encoding cannot change at a fork"):
        fork(runs["delta"][0], tmp_path / "no.zarr", at=6, settings=[COMPACT])
    with pytest.raises(ConfigError, match=r"recording\.encoding"):
        record(config.with_values([COMPACT]), runs["delta"][0], corpus=text, resume=True)


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="encoding='zip', expected 'delta' or 'compact'"):
        TrajectoryCallback(tmp_path / "run.zarr", encoding="zip")


STEPS, EPOCH = 16, 6
SUMMARIES = (
    "recording.variables=['matrix','W_step_norm','W_ulp_l1','grad_token_norm','hidden_mean',"
    "'hidden_trace','hidden_cosine','batch','example_loss','hidden_states']"
)
VARIANTS = {
    "trainer": ["gatsby"],
    "trainer, every 3, accumulated": [
        "gatsby", "recording.every=3", "training.accumulation=4", "schedule.name=cosine",
        "recording.tokens=live", SUMMARIES,
    ],
    "trainer, float32, momentum": [
        "gatsby", "optimizer.name=sgd", "optimizer.momentum=0.9", "model.dtype=float32",
        "schedule.warmup_steps=4",
    ],
    "plain": ["gatsby-adam", "schedule.name=linear", SUMMARIES],
    "plain, every 3, accumulated": [
        "gatsby-adam", "recording.every=3", "training.accumulation=4", "recording.tokens=dead",
        SUMMARIES,
    ],
    "trainer, float32 state, rounded at random": [
        "gatsby", "optimizer.state_dtype=float32", "optimizer.rounding=stochastic", SUMMARIES,
    ],
    "plain, momentum rounded at random": [
        "gatsby-adam", "optimizer.name=sgd", "optimizer.momentum=0.9",
        "optimizer.rounding=stochastic", "recording.tokens=dead",
    ],
    "plain, float16": [
        "gatsby-adam", "training.autocast=float16", "model.dtype=float32",
        "initialization.kind=normal", "initialization.sigma=30", "optimizer.lr=1",
        "training.max_grad_norm=1", "schedule.name=cosine",
    ],
}  # fmt: skip


def config_of(name: str, *assignments: str) -> RunConfig:
    return small_config(VARIANTS[name], *assignments, steps=STEPS)


def checkpoints(run: Path) -> list[int]:
    files = checkpoint_folder(run).glob("step-*.safetensors")
    return sorted(int(file.stem.removeprefix("step-")) for file in files)


def agree(one: Path, other: Path) -> xr.Dataset:
    """Every variable of two runs, and the whole state of their trainings after the last step."""
    b = same_values(one, other)
    assert b.attrs["status"] == "complete"
    c, d = last_checkpoint(one), last_checkpoint(other)
    assert (c.step, c.rows, c.state) == (d.step, d.rows, d.state)
    assert c.tensors.keys() == d.tensors.keys()
    for name, tensor in c.tensors.items():
        bits, expected = (t.reshape(-1).view(torch.uint8) for t in (d.tensors[name], tensor))
        assert torch.equal(bits, expected), name
    ids = torch.tensor(b.token.values.tolist())
    weights = d.tensors["model.transformer.wte.weight"].float()[ids].numpy()
    assert (b.W.values[-1] == weights).all()
    return b


PLACES = {
    "at the first step": 1,
    "within a block and an epoch": 5,
    "at the end of an epoch": EPOCH,
    "at the end of a block": 2 * BLOCK - 1,
    "before the last step": STEPS - 1,
}
QUICK = (
    ("trainer", "at the first step"),
    ("plain", "at the end of an epoch"),
    ("trainer, every 3, accumulated", "within a block and an epoch"),
    ("trainer, float32 state, rounded at random", "at the end of a block"),
    ("plain, float16", "before the last step"),
)
"""Of each loop, of each place and of each kind of state at least one."""
NIGHTLY = (
    ("plain, every 3, accumulated", "at the end of an epoch"),
    ("trainer, float32, momentum", "within a block and an epoch"),
    ("plain, momentum rounded at random", "at the end of a block"),
)


@pytest.mark.parametrize(
    ("name", "place"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY)],
)
def test_a_seam_leaves_no_trace(
    name: str, place: str, straight: Callable[[RunConfig], Path], text: Path, tmp_path: Path
) -> None:
    path, step = tmp_path / "run.zarr", PLACES[place]
    record(config_of(name), path, corpus=text, stop=stop_after(step))
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values[-1] == step
    assert checkpoints(path) == [step]
    record(recorded_config(path), path, resume=True)
    ds = agree(straight(config_of(name)), path)
    assert checkpoints(path) == [STEPS]
    assert ds.attrs["provenance"]["resumed"][0]["step"] == step
    if "float16" in name:
        assert 0 < ds.skipped.sum() < STEPS


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("trainer", 11),
        pytest.param("plain, every 3, accumulated", 9, marks=pytest.mark.nightly),
        pytest.param("plain, float16", 11, marks=pytest.mark.nightly),
    ],
)
def test_a_training_that_fails_continues_from_a_checkpoint_before(
    name: str, step: int, straight: Callable[[RunConfig], Path], text: Path, tmp_path: Path
) -> None:
    def fail(recorder: Any) -> None:
        if recorder.step == 14:
            raise RuntimeError("the power went")

    path = tmp_path / "run.zarr"
    config = config_of(name, "recording.checkpoint_every=2")
    with pytest.raises(RuntimeError, match="the power went"):
        record(config, path, corpus=text, on_step=fail)
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values[-1] == 14
    assert checkpoints(path)[-1] == step
    record(recorded_config(path), path, resume=True)
    agree(straight(config_of(name)), path)
    assert xr.open_zarr(path).attrs["provenance"]["resumed"][0]["step"] == step


@pytest.mark.parametrize(("name", "last"), [("trainer", STEPS), ("plain, every 3, accumulated", 5)])
def test_a_run_is_never_closed_without_its_last_checkpoint(
    name: str, last: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.zarr"
    close, seen = RunWriter.close, []

    def look(self: RunWriter, *status: Any) -> None:
        seen.append((*status, checkpoints(path)[-1:]))
        close(self, *status)
        assert last_checkpoint(path).rows <= self.committed_rows

    monkeypatch.setattr(RunWriter, "close", look)
    record(
        config_of(name, "recording.checkpoint_every=4"), path, corpus=text, stop=stop_after(last)
    )
    assert seen == [("complete" if last == STEPS else "interrupted", [last])]
    assert checkpoints(path) == [last]
    assert not list(tmp_path.glob(".*.lock"))


def test_a_checkpoint_past_the_committed_rows_is_passed_over(
    straight: Callable[[RunConfig], Path], text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    record(
        config_of("trainer", "recording.checkpoint_every=1"), path, corpus=text, stop=stop_after(7)
    )
    folder = checkpoint_folder(path)
    early = (folder / "step-00000007.safetensors").read_bytes()
    record(recorded_config(path), path, resume=True, stop=stop_after(3))
    assert checkpoints(path) == [10]
    (folder / "step-00000007.safetensors").write_bytes(early)
    RunWriter.resume(path, rows=9).close("interrupted")
    record(recorded_config(path), path, resume=True)
    agree(straight(config_of("trainer")), path)
    assert [entry["step"] for entry in xr.open_zarr(path).attrs["provenance"]["resumed"]] == [7, 7]


def test_a_run_that_is_named_alike_is_refused_before_it_is_trained(
    interrupted: Path, text: Path
) -> None:
    alike = interrupted.with_suffix("")
    assert checkpoint_folder(alike) == checkpoint_folder(interrupted)
    with pytest.raises(RunExists, match=r"run\.ckpt has checkpoints of run\.zarr"):
        record(config_of("trainer"), alike, corpus=text)
    assert not alike.exists()
    assert checkpoints(interrupted) == [5]


def test_a_new_run_takes_no_notice_of_old_checkpoints(interrupted: Path, text: Path) -> None:
    folder = checkpoint_folder(interrupted)
    old = next(folder.iterdir())
    assert old.name == "step-00000005.safetensors"
    record(config_of("trainer"), interrupted, corpus=text, overwrite=True, stop=stop_after(3))
    assert checkpoints(interrupted) == [3]


@pytest.mark.parametrize(
    "name", [pytest.param("trainer, every 3, accumulated", marks=pytest.mark.nightly), "plain"]
)
def test_a_finished_run_is_extended_without_a_seam(name: str, text: Path, tmp_path: Path) -> None:
    decay = f"schedule.steps={STEPS}"
    straight, path = tmp_path / "straight.zarr", tmp_path / "run.zarr"
    record(config_of(name, decay), straight, corpus=text)
    record(config_of(name, decay, "training.steps=10"), path, corpus=text)
    ds = xr.open_zarr(path)
    assert ds.step.values[-1] == 10
    assert ds.attrs["optimizer"]["schedule"]["steps"] == STEPS
    notes: list[str] = []
    longer = recorded_config(path).with_values([f"training.steps={STEPS}"])
    record(longer, path, resume=True, on_note=notes.append)
    ds = agree(straight, path)
    assert notes == []
    assert ds.attrs["config"] == xr.open_zarr(straight).attrs["config"]


def test_a_run_that_has_all_its_steps_is_marked_complete(
    straight: Callable[[RunConfig], Path], text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    record(config_of("plain"), path, corpus=text, stop=stop_after(10))
    before = xr.open_zarr(path).load()
    notes: list[str] = []
    shorter = recorded_config(path).with_values(["training.steps=10"])
    record(shorter, path, resume=True, on_note=notes.append)
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "complete"
    assert ds.load().identical(before.assign_attrs(ds.attrs))
    assert ds.attrs["config"] == before.attrs["config"]
    assert notes == []
    assert checkpoints(path) == [10]
    metadata = (path / "zarr.json").read_bytes()
    record(shorter, path, resume=True, on_note=notes.append)
    assert "has all 10 steps already" in notes[0]
    assert (path / "zarr.json").read_bytes() == metadata
    record(recorded_config(path), path, resume=True)
    agree(straight(config_of("plain")), path)


def test_an_extension_that_moves_the_decay_says_so(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    record(config_of("trainer", "training.steps=8"), path, corpus=text)
    notes: list[str] = []
    longer = recorded_config(path).with_values(["training.steps=16"])
    record(longer, path, resume=True, on_note=notes.append)
    assert len(notes) == 1
    assert "jumps at step 9, from 0 to 0.0005" in notes[0]
    assert "with schedule.steps=16" in notes[0]
    ds = xr.open_zarr(path)
    assert ds.lr.values[8:11].tolist() == [1e-3 / 8, 1e-3 * 8 / 16, 1e-3 * 7 / 16]
    assert ds.attrs["optimizer"]["schedule"]["steps"] == 16
    assert ds.attrs["config"]["training"]["steps"] == 16


def test_an_extended_run_can_keep_its_schedule(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    record(config_of("trainer", "training.steps=8", "schedule.name=cosine"), path, corpus=text)
    notes: list[str] = []
    longer = recorded_config(path).with_values(["training.steps=12", "schedule.steps=8"])
    record(longer, path, resume=True, on_note=notes.append)
    (note,) = notes
    assert "the rate is 0 in steps 9 to 12" in note
    assert (xr.open_zarr(path).lr.values[9:] == 0).all()


@pytest.mark.parametrize(
    ("assignment", "field"),
    [
        ("optimizer.lr=3e-4", "optimizer.lr is 0.001"),
        ("schedule.steps=99", "schedule.steps is not set"),
        ("recording.variables=['W']", "recording.variables"),
    ],
)
def test_a_changed_configuration_is_refused(interrupted: Path, assignment: str, field: str) -> None:
    before = (interrupted / "zarr.json").read_bytes()
    with pytest.raises(ConfigError, match=field):
        record(recorded_config(interrupted).with_values([assignment]), interrupted, resume=True)
    assert (interrupted / "zarr.json").read_bytes() == before
    assert checkpoints(interrupted) == [5]


def test_recording_settings_may_change_on_resume(
    interrupted: Path, straight: Callable[[RunConfig], Path]
) -> None:
    changes = ["recording.memory=64MiB", "recording.checkpoint_every=3", "recording.commit_every=3"]
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        changes.append("training.device=auto")  # which is the CPU here, as before
    config = recorded_config(interrupted).with_values(changes)
    record(config, interrupted, resume=True)
    agree(straight(config_of("trainer")), interrupted)
    assert xr.open_zarr(interrupted).attrs["config"]["recording"]["memory"] == "64MiB"


def test_other_versions_are_reported(interrupted: Path) -> None:
    provenance = xr.open_zarr(interrupted).attrs["provenance"] | {"torch": "1.0"}
    RunWriter.resume(interrupted, attributes={"provenance": provenance}).close("interrupted")
    notes: list[str] = []
    record(recorded_config(interrupted), interrupted, resume=True, on_note=notes.append)
    assert f"torch was 1.0 and is now {torch.__version__}" in notes[0]
    resumed = xr.open_zarr(interrupted).attrs["provenance"]["resumed"]
    assert resumed[0]["torch"] == torch.__version__


def test_another_device_tokenizer_or_text_is_refused(interrupted: Path, tmp_path: Path) -> None:
    config, recorded = recorded_config(interrupted), xr.open_zarr(interrupted).attrs["provenance"]
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT + b"!")
    with pytest.raises(
        CorpusError, match=r"other\.txt .* differs from that of .* april\.txt of 70"
    ):
        record(config, interrupted, resume=True, corpus=other)
    for change, kind, message in (
        ({"device": "cuda:0"}, ConfigError, r"recorded on cuda.*training.device=cuda"),
        ({"tokenizer": {"name": "ascii", "sha256": "0" * 64}}, CorpusError,
         "give the recorded one: tokenizer=…"),
    ):  # fmt: skip
        changed = {"provenance": recorded | change}
        RunWriter.resume(interrupted, attributes=changed).close("interrupted")
        with pytest.raises(kind, match=message):
            record(config, interrupted, resume=True)
    assert xr.open_zarr(interrupted).attrs["status"] == "interrupted"


def test_resume_needs_a_run_and_more_steps(interrupted: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="there is no run at"):
        recorded_config(tmp_path / "nowhere.zarr")
    config = recorded_config(interrupted)
    with pytest.raises(
        NothingToResume, match=r"5 steps already, got training\.steps=4; .* resume=True"
    ):
        record(config.with_values(["training.steps=4"]), interrupted, resume=True)
    with pytest.raises(InvalidArgument, match="both"):
        record(config, interrupted, resume=True, overwrite=True)


def test_a_run_that_is_being_recorded_is_left_alone(interrupted: Path) -> None:
    with RunWriter.resume(interrupted), pytest.raises(RunLocked):
        record(recorded_config(interrupted), interrupted, resume=True)


def test_weights_that_are_not_the_runs_are_refused(interrupted: Path, tmp_path: Path) -> None:
    file = checkpoint_folder(interrupted) / "step-00000005.safetensors"
    taken = RunState.load(file)
    taken.tensors["model.transformer.wte.weight"][3, 2] += 1
    taken.save(file)
    with pytest.raises(NothingToResume, match=r"differ from .* at step 5"):
        record(recorded_config(interrupted), interrupted, resume=True)
    assert xr.open_zarr(interrupted).sizes["step"] == 6


def test_a_checkpoint_of_another_format_is_refused(interrupted: Path) -> None:
    write_checkpoint(checkpoint_folder(interrupted) / "step-00000005.safetensors")
    with pytest.raises(FormatError, match=r"has checkpoint format 1, .* reads format 3;"):
        record(recorded_config(interrupted), interrupted, resume=True)


def test_nothing_is_unpickled(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, refuse)
    record(recorded_config(interrupted), interrupted, resume=True)
    assert xr.open_zarr(interrupted).attrs["status"] == "complete"


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
