from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trajstore
from trajstore.cli import start, stop_signals


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_imports_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signal.signal(signal.SIGINT, stop_signals._stop)
    signal.raise_signal(signal.SIGINT)
    assert ended == [130]
    assert capfd.readouterr().err == "trajstore: stopped by Ctrl-C\n"


def test_little_is_imported_before_ctrl_c_is_a_sentence() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(trajstore.__file__).parents[1])!r})
import trajstore.cli.start
print([name for name in ("typing", "contextlib", "threading", "click") if name in sys.modules])
"""
    bare = [sys.executable, "-S", "-E", "-c", code]  # without what the environment imports
    assert subprocess.run(bare, capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_a_working_command_gets_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def command(**options: str) -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        stop_signals.working()
        seen.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr("trajstore.cli.main.main", command)
    start.main()
    assert seen == [stop_signals._stop, signal.default_int_handler]


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr("trajstore.cli.main.main", lambda **options: stop_signals.working())
    start.main()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
