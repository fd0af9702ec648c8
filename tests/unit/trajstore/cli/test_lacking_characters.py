"""Commands on terminals of ASCII and Latin-1."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.cli import start
from trajstore.cli.main import main

ENCODINGS = pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
Run = tuple[Path, dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def printed(words: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command whose output has that encoding; return standard output and error."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "argv", ["trajstore", *shlex.split(words)])
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with pytest.raises(SystemExit):
        start.main()
    written: Any = [stream.detach().getvalue() for stream in streams]
    return b"".join(written).decode(encoding)


@ENCODINGS
def test_every_help_can_be_printed(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in main._entry_points:  # type: ignore[attr-defined]
        assert printed(f"{name} --help", encoding, monkeypatch).startswith("Usage: trajstore")


@ENCODINGS
def test_results_and_errors_can_be_printed(
    encoding: str, small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small_run
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


def test_info_in_the_locale_c(small_run: Run) -> None:
    code = "from trajstore.cli.start import main; main()"
    command = [sys.executable, "-c", code, "info", str(small_run[0])]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, env=os.environ | plain, timeout=60)
    assert b"11 x 10 x 6" in done.stdout
    assert done.stderr == b""
