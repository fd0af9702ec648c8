"""The process: Ctrl-C during imports, and terminals of ASCII and Latin-1."""

from __future__ import annotations

import io
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

import trajstore
from trajstore.cli import start, stop_signals
from trajstore.cli.main import main
from trajstore.cli.stop_signals import StopRequest


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_imports_is_a_sentence_and_little_is_imported_before() -> None:
    code = f"""
import sys, signal
sys.path.insert(0, {str(Path(trajstore.__file__).parents[1])!r})
import trajstore.cli.start
print([name for name in ("typing", "contextlib", "threading", "click") if name in sys.modules])
class Interrupted:
    def __getattr__(self, name):
        sys.stdout.flush()
        signal.raise_signal(signal.SIGINT)
sys.modules["trajstore.cli.main"] = Interrupted()
trajstore.cli.start.main()
"""
    bare = [sys.executable, "-S", "-E", "-c", code]  # without what the environment imports
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60)
    printed = (done.returncode, done.stdout, done.stderr)
    assert printed == (130, "[]\n", "trajstore: stopped by Ctrl-C\n")


Run = tuple[Path, dict[str, np.ndarray]]


def printed(words: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command whose output has that encoding; return standard output and error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "argv", ["trajstore", *shlex.split(words)])
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit):
        start.main()
    written: Any = [stream.detach().getvalue() for stream in (out, err)]
    return b"".join(written).decode(encoding)


@pytest.mark.parametrize(
    ("before", "during"),
    [
        (signal.default_int_handler, [stop_signals._stop, signal.default_int_handler]),
        (signal.SIG_IGN, [signal.SIG_IGN, signal.SIG_IGN]),  # it stays ignored
    ],
)
def test_a_working_command_gets_a_keyboard_interrupt(
    before: Any, during: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def work() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        stop_signals.working()
        seen.append(signal.getsignal(signal.SIGINT))

    signal.signal(signal.SIGINT, before)
    command = SimpleNamespace(load=lambda: click.Command("work", callback=work))
    monkeypatch.setitem(main._entry_points, "work", command)  # type: ignore[attr-defined]
    printed("work", "ascii", monkeypatch)
    assert seen == during


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_results_helps_and_errors_can_be_printed(
    encoding: str, small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small_run
    for name in main._entry_points:  # type: ignore[attr-defined]
        assert printed(f"{name} --help", encoding, monkeypatch).startswith("Usage: trajstore")
    np.save(path.parent / "W.npy", np.zeros((3, 4, 2), "float32"))
    shown = {
        words: printed(words.format(path), encoding, monkeypatch)
        for words in (
            "info {0}", "info {0} {0}", "info --json {0}", "verify {0}",
            "summary {0}", "analyze {0} norm", "import {0}/../W.npy --dry-run", "info no-漢.zarr",
        )
    }  # fmt: skip
    times = "x" if encoding == "ascii" else "×"
    assert f"11 {times} 10 {times} 6" in shown["info {0}"]
    assert f"3{times}4{times}2" in shown["import {0}/../W.npy --dry-run"]
    assert r"there is no run at no-\u6f22.zarr" in shown["info no-漢.zarr"]
    one, other = "漢…▁█—é".encode(encoding, "trajstore.similar"), r"\u6f22~_#-"
    assert one == (other + r"\xe9" if encoding == "ascii" else other + "é").encode(encoding)


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_the_first_signal_asks_to_stop_and_the_second_ends_the_process(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {other: signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)}
    with StopRequest() as stop:
        stop.begin()
        assert not stop()
        assert stop.number is None
        signal.raise_signal(number)
        assert stop()
        assert stop.number == number
        assert stop.exit_code == 128 + number
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert {other: signal.getsignal(other) for other in before} == before
    assert "a second signal stops at once" in capfd.readouterr().err


@SIGNALS
def test_before_anything_is_done_a_signal_is_the_end(number: int) -> None:
    with StopRequest() as stop:
        assert not stop()
        with pytest.raises(SystemExit) as error:
            signal.raise_signal(number)
    assert error.value.code == 128 + number
