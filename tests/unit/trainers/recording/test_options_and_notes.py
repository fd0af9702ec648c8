"""Options that a recording is given, its notes and its advice."""

from __future__ import annotations

import errno
import inspect
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk import stand_in
from trainings import VOCAB, TinyModel, take_steps

from trajstore import RunWriter
from trajstore.errors import ConfigError, InvalidArgument
from trajstore.store.reading.run_info import information
from trajstore.trainers import TrajectoryCallback, attach, capture
from trajstore.trainers.recording.notes import RunNotes, optimizer_advice, provenance
from trajstore.trainers.recording.options import RecordingOptions
from trajstore.trainers.recording.parameters import JoinedOptimizer, find_parameters

OPTIONS = {option.name: option.default for option in fields(RecordingOptions)}
OF_A_LOOP = dict.fromkeys(("ends_step", "scaler", "max_grad_norm", "on_step", "on_note"))
OF_A_LOOP |= {"first_step": 0}


def keywords(function: Any) -> dict[str, Any]:
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is not parameter.empty
    }


def test_what_users_may_write_is_shown_with_its_defaults() -> None:
    assert keywords(capture) == keywords(attach) == OPTIONS | OF_A_LOOP
    assert keywords(TrajectoryCallback) == OPTIONS | {"on_step": None, "on_note": None}
    assert list(inspect.signature(capture).parameters)[:3] == ["model", "optimizer", "path"]
    assert list(inspect.signature(TrajectoryCallback).parameters)[:2] == ["path", "variables"]
    pytest.importorskip("lightning")
    from trajstore.trainers import LightningCallback

    further = {"module": "", "on_step": None, "on_note": None}
    assert keywords(LightningCallback) == OPTIONS | further


@pytest.mark.parametrize("function", [attach, capture, TrajectoryCallback.__init__])
def test_every_option_is_documented_where_it_is_taken(function: Any) -> None:
    documented = inspect.getdoc(function) or ""
    names = documented.partition("----------\n")[2].partition("\n\n")[0]
    for name in keywords(function):
        assert any(
            name in line.partition(" : ")[0].split(", ")
            for line in names.splitlines()
            if not line.startswith(" ")
        ), name
    assert "options" not in names


def test_wrong_names_are_refused_with_the_right_one(tiny: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(tiny.parameters())
    options: dict[str, Any] = {"evry": 2}
    with pytest.raises(TypeError, match=r"capture\(\) got .* 'evry' \(did you mean 'every'\?\)"):
        capture(tiny, optimizer, tmp_path / "run.zarr", **options)
    with pytest.raises(TypeError, match=r"it takes path, variables, .* every, "):
        TrajectoryCallback(tmp_path / "run.zarr", **{"steps_between_rows": 2})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": 0}, "got every=0, expected a whole number of at least 1"),
        ({"block_rows": 0}, "got block_rows=0, expected a whole number of at least 1"),
        ({"logits_mode": "first"}, "got logits_mode='first', expected 'last' or 'mean'"),
        ({"commit_every": 0}, "commit_every: got 0, expected seconds above 0, or None"),
        ({"memory": "much"}, "got size 'much'"),
        ({"variables": "grad"}, "got 'grad' without W; add W or cells"),
        ({"variables": ["W", "wait"]}, "cannot record 'wait'"),
        ({"resume": True, "overwrite": True}, "got both resume and overwrite"),
    ],
)
def test_what_is_impossible_is_refused_where_it_is_written(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        RecordingOptions(**wrong)


def test_named_variables_are_required_and_those_of_tiers_optional() -> None:
    options = RecordingOptions(variables="weights, W_ulp_l1")
    assert options.required == {"W_ulp_l1"}
    assert options.resolved[0] == "W"
    assert {"loss", "W_ulp_l1"} < set(options.resolved)
    assert RecordingOptions(variables=("W", "matrix")).required == {"W"}
    assert range(RecordingOptions(every=2.0).every) == range(2)  # type: ignore[arg-type]


def test_labels_of_another_vocabulary_are_refused_before_a_step(tiny: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(tiny.parameters())
    for counts, told in ((np.ones(4, int), r"got shape \(4,\)"), (np.ones(4), "of float64")):
        with (
            pytest.raises(InvalidArgument, match=f"token_count: .*{told}.* the 17 rows of emb"),
            capture(tiny, optimizer, tmp_path / "run.zarr", token_count=counts),
        ):
            pytest.fail("it was accepted")


@pytest.mark.parametrize("options", [{"parameter": ["a", "b"]}, {"resume": True}, {}])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="file is not a folder"):
        TrajectoryCallback(tmp_path / "file" / "run.zarr", **options)
    folder, real = tmp_path / "folder", os.open
    variables = {"W": "float32"}
    with RunWriter.create(folder / "run.zarr", token=[0], hidden=2, variables=variables) as run:
        run.append(0, W=np.zeros((1, 2), "float32"))

    def refuse(path: Any, flags: int, *more: Any, **given: Any) -> int:
        if flags & os.O_RDWR and folder in (Path(path), *Path(path).parents):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *more, **given)

    stand_in(monkeypatch, open=refuse)  # root may write despite the permissions
    name = "run.zarr" if options.get("resume") else "new/run.zarr"
    with pytest.raises(InvalidArgument, match=f"write to the folder {folder}, which is read-only"):
        TrajectoryCallback(folder / name, **options)


NEVER = "exp_avg_sq can never decay: 0.999·v rounds back to v for 100 % of bfloat16 values"


def noted(notes: RunNotes, *steps: int, sentence: str = "W was set") -> None:
    for step in steps:
        notes.step = step
        notes.mention(sentence, unproven=True)


def test_unproven_steps_are_exact_in_a_number_of_ranges_that_is_bounded() -> None:
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, 2, 3, 3, 4, 7)
    notes.mention("a fact about step 7")
    assert notes.entries[0] == {
        "note": "W was set", "first_step": 2, "last_step": 7, "count": 4,
        "unproven": [[2, 4], [7, 7]],
    }  # fmt: skip
    assert "unproven" not in notes.entries[1]
    noted(notes, *range(9, 4001, 2))
    ranges = notes.entries[0]["unproven"]
    assert (len(ranges), ranges[-1]) == (1000, [2003, 3999])


def test_a_resumed_recording_keeps_them_up_to_its_step() -> None:
    before: list[dict[str, Any]] = [
        {"note": name, "first_step": 2, "last_step": 9, "count": 5, "unproven": [[2, 4], [7, 9]]}
        for name in ("W was set", "another")
    ] + [{"note": "later", "first_step": 9, "last_step": 9, "count": 1}]
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, 9, 10)
    resumed = notes.resumed(before, 8)
    assert [entry["note"] for entry in resumed] == ["another", "W was set"]
    assert [entry["unproven"] for entry in resumed] == [[[2, 4], [7, 8]], [[2, 4], [7, 8], [9, 10]]]
    noted(notes, 11, sentence="another")
    assert resumed[0]["unproven"] == [[2, 4], [7, 8], [11, 11]]
    assert (resumed[1]["first_step"], resumed[1]["last_step"]) == (2, 10)
    assert before[0]["unproven"] == [[2, 4], [7, 9]]


def train(model: Any, path: Path, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    with capture(model, optimizer, path, is_dead=np.arange(VOCAB) > 12, fsync=False, **options):
        take_steps(model, optimizer, 2)


def test_a_function_gets_advice_before_the_first_step_and_not_again(path: Path) -> None:
    received: list[str] = []

    def on_note(note: str) -> None:
        assert not path.exists()
        received.append(note)

    model = TinyModel(torch.bfloat16)
    train(model, path, on_note=on_note)
    assert len(received) == 1
    assert received[0].startswith(NEVER)
    assert [advice["sentence"] for advice in information(path)["advice"]] == received
    train(model, path, on_note=received.append, resume=True, first_step=2)
    assert sum(NEVER in note for note in received) == 1
    with pytest.raises(ConfigError, match="exp_avg_sq can never decay"):
        train(model, path, resume=True, first_step=4, strict_numerics=True)
    assert information(path)["committed_rows"] == 5


def test_advice_is_logged_without_a_function_or_ends_a_strict_recording(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyModel(torch.bfloat16)
    with pytest.raises(ConfigError, match=f"strict numerics.*{NEVER}"):
        train(model, tmp_path / "run.zarr", strict_numerics=True)
    assert list(tmp_path.iterdir()) == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    train(tiny, tmp_path / "float32.zarr", strict_numerics=True)
    assert not caplog.records
    train(model, tmp_path / "run.zarr")
    (record,) = caplog.records
    assert record.name == "trajstore.trainers.recording.notes"
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(NEVER)


def test_the_type_of_a_state_that_is_there_counts() -> None:
    model = TinyModel(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    parameters = find_parameters(model, JoinedOptimizer(optimizer), None)
    twice = [*parameters, *parameters]  # each advice comes once
    assert [advice.variable for advice in optimizer_advice(twice)] == ["exp_avg_sq"]
    wide = torch.zeros_like(parameters[0].tensor, dtype=torch.float32)
    optimizer.state[parameters[0].tensor] = {"exp_avg": wide, "exp_avg_sq": wide}
    assert optimizer_advice(parameters) == []


def test_the_provenance_has_the_seed_of_torch() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert provenance(torch.device("cpu"))["seed"] == 7
        torch.seed()
        assert "seed" not in provenance(torch.device("cpu")), "nothing has set it"
