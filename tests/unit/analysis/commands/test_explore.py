from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from trajstore.cli.main import main


def test_a_used_address_and_a_missing_run_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.analysis.exploring.server.check_panel", lambda: None)
    done = CliRunner().invoke(main, ["explore", str(tmp_path / "run.zarr"), "--host", "::1"])
    assert done.exit_code == 2
    assert "cannot listen on '::1', port 5006" in done.stderr
    done = CliRunner().invoke(main, ["explore", str(tmp_path / "run.zarr"), "--port", "0"])
    assert done.exit_code == 2
    assert "there is no run at" in done.stderr


def test_the_page_is_opened_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def serving(*given: object) -> Iterator[Callable[[], int]]:
        yield lambda: signal.SIGTERM

    opened: list[str] = []
    folder = "trajstore.analysis.exploring"
    monkeypatch.setattr(f"{folder}.server.check_panel", lambda: None)
    monkeypatch.setattr(f"{folder}.server.serving", serving)
    monkeypatch.setattr(f"{folder}.page.LiveRun", lambda run, report: contextlib.nullcontext(run))
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = CliRunner().invoke(main, ["explore", "run.zarr", "--port", "0", "--open"])
    assert done.exit_code == 128 + signal.SIGTERM, done.output
    (address,) = opened
    assert f"at {address} until Ctrl-C" in done.stdout
