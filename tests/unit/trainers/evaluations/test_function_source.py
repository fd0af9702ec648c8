from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trajstore.errors import InvalidArgument

pytest.importorskip("torch")

from trajstore.trainers.evaluations.evaluate import load_function

pytestmark = pytest.mark.torch


def test_a_function_of_a_file_imports_modules_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "neighbor_of_probe.py").write_text("FACTOR = 2\n")
    (tmp_path / "probe.py").write_text(
        "from neighbor_of_probe import FACTOR\ndef probe(model, step):\n    return FACTOR * step\n"
    )
    assert load_function(f"{tmp_path}/probe.py:probe")(None, 3) == 6
    assert load_function("math:sqrt")(4) == 2


def test_a_file_runs_once_beside_a_module_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "math.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "@dataclass\n"
        "class Probe:\n"
        "    count: ClassVar[int] = 1\n"
        "def made():\n"
        "    return Probe()\n"
    )
    probe, made = (load_function(f"{tmp_path}/math.py:{name}") for name in ("Probe", "made"))
    assert type(made()) is probe
    assert load_function("math:sqrt")(4) == 2
    (tmp_path / "math.py").write_text("def made():\n    return 5\n")
    assert load_function(f"{tmp_path}/math.py:made")() == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("probe.py", "expected FILE.py:function"),
        ("probe.py:", "expected FILE.py:function"),
        ("missing.py:probe", "there is no file missing.py"),
        ("no_such_module:probe", "cannot import no_such_module: ModuleNotFoundError"),
        ("math:sqr", "math has no function sqr.*sqrt"),
        ("math:pi", "math has no function pi"),
    ],
)
def test_a_wrong_source(source: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_function(source)


def test_an_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "broken_probe.py").write_text("1 / 0\n")
    with pytest.raises(InvalidArgument, match=r"broken_probe.py: ZeroDivisionError: division"):
        load_function(f"{tmp_path}/broken_probe.py:probe")
