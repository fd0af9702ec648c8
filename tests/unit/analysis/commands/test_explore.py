from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from trajstore.cli.main import main


@pytest.mark.parametrize("options", [["--host", "::1"], ["--host", "no.such.host.invalid"]])
def test_an_address_that_cannot_be_used_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr("trajstore.analysis.exploring.server.check_panel", lambda: None)
    done = CliRunner().invoke(main, ["explore", str(tmp_path / "run.zarr"), *options])
    assert done.exit_code == 2
    assert f"cannot listen on {options[1]!r}, port 5006" in done.stderr


def test_a_used_port_and_a_missing_run_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.analysis.exploring.server.check_panel", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(main, ["explore", str(tmp_path / "run.zarr"), "--port", port])
    assert done.exit_code == 2
    assert "--port 0 for a free one" in done.stderr
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
    monkeypatch.setattr(
        f"{folder}.live_run.LiveRun", lambda run, report: contextlib.nullcontext(run)
    )
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = CliRunner().invoke(main, ["explore", "run.zarr", "--port", "0", "--open"])
    assert done.exit_code == 128 + signal.SIGTERM, done.output
    (address,) = opened
    assert f"at {address} until Ctrl-C" in done.stdout
