"""`evaluate` calls functions, given as objects or by name, with models of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from trainings import OwnModel

from trajstore import open_run
from trajstore.errors import InvalidArgument, StepNotFound
from trajstore.trainers import evaluate
from trajstore.trainers.evaluations.evaluate import load_function

PROBE = """\
import pathlib, torch
@torch.no_grad()
def probe(model, step):
    if pathlib.Path({folder!r}, f"fails {{step}}").exists():
        model.get_submodule("missing")
    return {{"sum": model.lm_head.weight.float().sum().item(), "name": f"step {{step}}"}}
"""


def norm(model: Any, step: int) -> dict[str, Any]:
    return {"norm": model.get_parameter("embedding.weight").detach().norm()}


@pytest.fixture
def probe(tmp_path: Path) -> str:
    (tmp_path / "probe.py").write_text(PROBE.format(folder=str(tmp_path)))
    return f"{tmp_path / 'probe.py'}:probe"


def test_a_failure_keeps_the_steps_before_it_and_the_same_call_continues(
    recorded: Any, tmp_path: Path, probe: str
) -> None:
    out = tmp_path / "out.zarr"
    (tmp_path / "fails 4").touch()
    message = r"step 4: .*probe raised AttributeError.*missing.* \(probe.py, line 5\).*up to step 3"
    with pytest.raises(InvalidArgument, match=message):
        evaluate(recorded.path, probe, out)
    assert xr.open_zarr(out)["step"].values.tolist() == [0, 1, 2, 3]
    (tmp_path / "fails 4").unlink()
    progress: list[tuple[int, int]] = []
    found = evaluate(recorded.path, probe, out, on_progress=lambda *now: progress.append(now))
    assert (found.steps, found.new, found.names) == (7, 3, ("name", "sum"))
    assert progress == [(5, 7), (6, 7), (7, 7)]
    ds = xr.open_zarr(out).load()
    assert ds["name"].values.tolist() == [f"step {step}" for step in range(7)]
    sums = [float(one["lm_head.weight"].float().sum()) for one in recorded.models]
    assert ds["sum"].values.tolist() == sums


def test_steps_of_a_constructed_model_merge_with_the_run(own: Any, tmp_path: Path) -> None:
    options: Any = {"every": 2, "constructor": OwnModel}
    found = evaluate(own.path, norm, tmp_path / "out.zarr", steps="0:5", **options)
    out = xr.open_zarr(found.path)
    both = xr.merge([open_run(own.path), out], join="inner")
    assert both["step"].values.tolist() == [0, 2, 4]
    expected = np.linalg.norm(both["W"].values.reshape(3, -1), axis=1)
    np.testing.assert_allclose(both["norm"].values, expected, rtol=1e-6)
    assert evaluate(own.path, norm, found.path, **options).new == 1  # step 6


def test_impossible_calls(own: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"every": 0}, InvalidArgument, "got every=0"),
        ({"steps": 9}, StepNotFound, "step 9 was not recorded"),
        ({"every": 4, "steps": "1:4"}, InvalidArgument, "no selected step is a multiple of 4"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            evaluate(own.path, norm, out, constructor=OwnModel, **options)
    assert not out.exists()
    evaluate(own.path, norm, out, every=3, constructor=OwnModel)
    with pytest.raises(InvalidArgument, match=r"up to step 6 but not of step 1.*overwrite=True"):
        evaluate(own.path, norm, out, constructor=OwnModel)
    assert evaluate(own.path, norm, out, overwrite=True, constructor=OwnModel).steps == 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One for files of functions; the search path is put back afterwards."""
    monkeypatch.syspath_prepend(tmp_path / "other")
    return tmp_path


def test_a_function_of_a_file_imports_modules_next_to_it(folder: Path) -> None:
    (folder / "neighbor_of_probe.py").write_text("FACTOR = 2\n")
    (folder / "probe.py").write_text(
        "from neighbor_of_probe import FACTOR\ndef probe(model, step):\n    return FACTOR * step\n"
    )
    assert load_function(f"{folder}/probe.py:probe")(None, 3) == 6
    assert load_function("math:sqrt")(4) == 2


MATH = """\
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
@dataclass
class Probe:
    count: ClassVar[int] = 1
def made():
    return Probe()
"""


def test_a_file_runs_once_beside_a_module_of_its_name(folder: Path) -> None:
    (folder / "math.py").write_text(MATH)
    probe, made = (load_function(f"{folder}/math.py:{name}") for name in ("Probe", "made"))
    assert type(made()) is probe
    assert load_function("math:sqrt")(4) == 2
    (folder / "math.py").write_text("def made():\n    return 5\n")
    assert load_function(f"{folder}/math.py:made")() == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("probe.py", "expected FILE.py:function"),
        ("probe.py:", "expected FILE.py:function"),
        ("missing.py:probe", "there is no file missing.py"),
        ("no_such_module:probe", "cannot import no_such_module: ModuleNotFoundError"),
        ("math:sqr", "math has no function sqr.*sqrt"),
        ("math:pi", "math has no function pi"),
        ("{folder}/broken_probe.py:probe", r"broken_probe.py: ZeroDivisionError: division"),
    ],
)
def test_a_wrong_source(source: str, message: str, folder: Path) -> None:
    (folder / "broken_probe.py").write_text("1 / 0\n")
    with pytest.raises(InvalidArgument, match=message):
        load_function(source.format(folder=folder))
