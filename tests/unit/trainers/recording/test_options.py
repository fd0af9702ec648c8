from __future__ import annotations

import errno
import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from trajstore import RunWriter  # noqa: E402
from trajstore.errors import InvalidArgument  # noqa: E402
from trajstore.trainers import TrajectoryCallback, attach, capture  # noqa: E402
from trajstore.trainers.recording.options import RecordingOptions  # noqa: E402

pytestmark = pytest.mark.torch

OPTIONS = {option.name: option.default for option in fields(RecordingOptions)}
OF_A_LOOP = {
    "ends_step": None,
    "scaler": None,
    "max_grad_norm": None,
    "first_step": 0,
    "on_step": None,
    "on_note": None,
}


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


def test_the_callback_of_lightning_takes_the_same() -> None:
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


def test_a_whole_float_is_a_count() -> None:
    assert range(RecordingOptions(every=2.0).every) == range(2)  # type: ignore[arg-type]


def test_named_variables_are_required_and_those_of_tiers_optional() -> None:
    options = RecordingOptions(variables="weights, W_ulp_l1")
    assert options.required == {"W_ulp_l1"}
    assert options.resolved[0] == "W"
    assert {"loss", "W_ulp_l1"} < set(options.resolved)
    assert RecordingOptions(variables=("W", "matrix")).required == {"W"}


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (np.ones(4, int), r"got shape \(4,\), expected one value for each of the 17 rows of emb"),
        (np.ones(4), "at position 0 of 4 values of float64, .* each of the 17 rows of emb"),
    ],
)
def test_labels_of_another_vocabulary_are_refused_before_a_step(
    counts: Any, told: str, tiny: Any, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(tiny.parameters())
    with (
        pytest.raises(InvalidArgument, match=f"token_count: .*{told}"),
        capture(tiny, optimizer, tmp_path / "run.zarr", token_count=counts),
    ):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("options", [{"parameter": ["a", "b"]}, {"resume": True}, {}])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    RunWriter.create(
        folder / "run.zarr", token=np.arange(3), hidden=2, variables={"W": "float32"}
    ).close()
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **given: Any) -> int:
        if flags & os.O_RDWR and tmp_path / "folder" in (Path(path), *Path(path).parents):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *more, **given)

    monkeypatch.setattr(os, "open", refuse)  # root may write despite the permissions
    name = "run.zarr" if options.get("resume") else "new/run.zarr"
    with pytest.raises(InvalidArgument, match=f"write to the folder {folder}, which is read-only"):
        TrajectoryCallback(folder / name, **options)
