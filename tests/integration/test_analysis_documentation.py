"""What docs/analysis.md shows runs as it is written, and shows everything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trajstore
from trajstore import analysis

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trajstore_cli: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("session")
    trajstore_cli("record", "--preset", "gatsby", "--steps", 12, "-o", folder / "gatsby.zarr")
    return folder


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    session = examples("python")[0]
    lines = [line for line in session.splitlines() if line and not line.startswith("#")]
    assert len(lines) < 15
    exec(compile(session, str(PAGE), "exec"), {})
    assert "last motion: 12 12" in capsys.readouterr().out
    assert (folder / "regimes.png").stat().st_size > 5000


def test_every_example(folder: Path) -> None:
    ds = trajstore.open_run(folder / "gatsby.zarr")
    for example in examples("python")[1:]:
        if ".plot()" in example:
            pytest.importorskip("matplotlib")
        result = eval(example.strip(), {"ds": ds})
        if hasattr(result, "compute"):
            result.compute()


@pytest.mark.nightly
def test_every_command(folder: Path, trajstore_cli: Callable[..., Any], tmp_path: Path) -> None:
    for line in examples("sh")[0].splitlines():
        words = line.partition("#")[0].split()
        assert words[0] == "trajstore"
        arguments = [
            folder / word if word == "gatsby.zarr" else tmp_path / word if "." in word else word
            for word in words[1:]
        ]
        trajstore_cli(*arguments)


def test_every_function_is_described() -> None:
    page = PAGE.read_text()
    for name in analysis.__all__:
        if name.islower() and name != "answer":
            assert f"`{name}(" in page or f"`trajstore.analysis.{name}(" in page, name
