from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from watched_runs import begin, extend

from trajstore.cli import watch_command
from trajstore.cli.main import main

COMMAND = Path(sys.executable).with_name("trajstore")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with begin(tmp_path / "run.zarr") as made:
        extend(made, range(10))
    return tmp_path / "run.zarr"


def test_a_run_that_has_ended_is_shown_once_and_that_is_all(run: Path) -> None:
    for options in ([], ["--once"], ["--interval", "9999"]):
        done = CliRunner().invoke(main, ["watch", str(run), *options])
        assert done.exit_code == 0, done.output
        assert done.output.count("\n") == 1
        assert "complete, step 9 of 40" in done.output
    reported = json.loads(CliRunner().invoke(main, ["watch", str(run), "--once", "--json"]).stdout)
    assert (reported["status"], reported["rows"], reported["lr"]) == ("complete", 10, 0.1)


def test_watch_follows_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.zarr"
    made = []

    def between(seconds: float) -> None:
        assert seconds == 0.5
        if not made:
            made.append(begin(path))
        elif made[0].rows < 8:
            extend(made[0], range(made[0].rows, made[0].rows + 4))
        else:
            made[0].close()

    monkeypatch.setattr(watch_command.time, "sleep", between)
    done = CliRunner().invoke(main, ["watch", str(path), "--interval", "0.5"])
    printed = [line.split(": ")[1] for line in done.output.splitlines()]
    assert [text.split(",")[0] for text in printed] == [
        "waiting; the run does not exist yet", "recording", "recording", "recording", "complete",
    ]  # fmt: skip
    assert "step 7 of 40" in printed[-1]


def test_a_missing_run_and_a_dead_recorder_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    done = CliRunner().invoke(main, ["watch", str(path), "--once"])
    assert (done.exit_code, done.stderr) == (2, f"trajstore: there is no run at {path}\n")
    run = begin(path)
    extend(run, range(4))
    run._lock.release()  # as the system does if a process dies
    done = CliRunner().invoke(main, ["watch", str(path)])
    assert done.exit_code == 1
    assert "recording process died" in done.output


def test_ctrl_c_ends_it_without_a_word(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_command.time, "sleep", interrupted)
    done = CliRunner().invoke(main, ["watch", str(run.with_name("later.zarr"))])
    assert done.exit_code == 130
    assert done.stderr == ""


def test_on_a_terminal_it_draws_the_view(run: Path) -> None:
    code = f"""
import os, pty, sys, fcntl, struct, termios
pid, terminal = pty.fork()
if not pid:
    size = struct.pack("HHHH", 24, 140, 0, 0)
    fcntl.ioctl(0, termios.TIOCSWINSZ, size)
    os.execve({str(COMMAND)!r}, ["trajstore", "watch", {str(run)!r}],
              os.environ | {{"TERM": "xterm-256color", "PYTHONUTF8": "1", "COLUMNS": "140"}})
while True:
    try:
        data = os.read(terminal, 65536)
    except OSError:
        break
    if not data:
        break
    os.write(1, data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "|grad| dead" in done.stdout
    assert "\x1b[?25l" in done.stdout, "the cursor is hidden"
    assert done.stdout.rstrip().endswith("\x1b[?25h"), "and shown again"
    bar = next(text for text in done.stdout.splitlines() if "step 9 of 40" in text)
    bar = re.sub(r"\x1b\[[0-9;]*m", "", bar)
    assert bar.rstrip().endswith("22%")
    assert len(bar.rstrip()) == 140


def test_several_runs_have_a_line_each_until_all_have_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = begin(run.with_name("later.zarr"))
    monkeypatch.setattr(watch_command.time, "sleep", lambda seconds: later.close())
    done = CliRunner().invoke(main, ["watch", str(run.parent)])
    printed = [line.split(": ")[1].split(",")[0] for line in done.output.splitlines()]
    assert (done.exit_code, printed) == (0, ["recording", "complete", "complete"])
