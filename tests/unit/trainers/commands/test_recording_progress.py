from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text

from trajstore.cli import output as bars
from trajstore.cli.output import PlainConsole
from trajstore.trainers.commands import record as progress_module
from trajstore.trainers.commands.record import RecordingProgress


def recorder(step: int) -> Any:
    writer = SimpleNamespace(
        bytes_recorded=step << 20, bytes_written=0, rows=step, committed_rows=0, seconds_waited=0.0
    )
    return SimpleNamespace(step=step, loss=SimpleNamespace(item=lambda: 3.14159), writer=writer)


@pytest.mark.parametrize("width", [80, 140])
def test_the_bar_of_a_recording_can_be_read(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = PlainConsole(
        file=written, width=width, force_terminal=True, color_system=None, soft_wrap=True
    )
    monkeypatch.setattr(progress_module, "err", console)
    monkeypatch.setattr(bars, "err", console)
    monkeypatch.setattr(progress_module._Rate, "render", lambda *_: Text("12.3 steps/s"))
    with RecordingProgress(20_000) as shown:
        shown.show_step(recorder(1))
        shown._next = 0
        shown.show_step(recorder(12_345))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", written.getvalue())
    lines = plain.replace("\r", "\n").splitlines()
    last = [line for line in lines if "step 12345/20000" in line][-1]
    assert "loss 3.142, 12.06 GiB" in last
    assert "steps/s" in last
    assert last.count("━") + last.count("╸") + last.count("╺") >= 12
    assert len(last.rstrip()) <= width
    assert ("rows in memory" in last) is (width == 140)
    assert "on disk" not in last, "nothing is yet"


def test_time_and_pace_are_counted_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 112.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(now))
    shown = RecordingProgress(3)
    assert (shown.seconds, shown.rate) == (None, None)
    shown.show_corpus(corpus())
    shown.show_step(recorder(1))
    assert (shown.seconds, shown.rate) == (10, None)
    shown.show_step(recorder(3))
    assert (shown.seconds, shown.rate) == (12, 1)


def corpus() -> Any:
    import numpy as np

    ids = np.zeros(3, "i4")
    return SimpleNamespace(
        counts=lambda: ids, name="x", size=3, ids=ids, vocab_size=3, sha256="0" * 64
    )
