from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from watched_runs import begin, extend

from trajstore.cli.watch_view import facts, line, overview, sparkline, view
from trajstore.watching.measures import BoundedCurve
from trajstore.watching.run_follower import Look, RunFollower


def shown(look: Look, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(view("run.zarr", look, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.fixture
def look(tmp_path: Path) -> Look:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(20))
        return RunFollower(tmp_path / "run.zarr").look()


@pytest.mark.parametrize("width", [80, 140])
def test_the_view_fits_and_says_everything(look: Look, width: int) -> None:
    lines = shown(look, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in (
        "recording", "step 19 of 40", "47%", "loss", "3.1000", "|grad| dead", "|grad| live",
        "unchanged dead", "100.0%", "unchanged live", "20 rows", "on disk", "last commit", "ago",
        "learning rate 0.1", "largest gradient: token", "from grad", "from W",
    ):  # fmt: skip
        assert part in text, part
    assert "…" in text
    assert "read so far" not in text
    assert "█" in text


def test_token_texts_do_no_harm(tmp_path: Path) -> None:
    for number, hostile in enumerate(
        ("<script>alert(1)</script>", "\x1b[31mred\x07", "\u202e[b]x")
    ):
        path = tmp_path / f"{number}.zarr"
        with begin(path, token_text=[hostile * 3] * 6) as run:
            extend(run, range(4))
            reported = RunFollower(path).look()
        assert reported.largest is not None
        text = "\n".join(shown(reported, 80))
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert ("<script>" in text) is (number == 0)
        assert len(text.splitlines()) == len(shown(reported, 140))


def test_a_line_says_the_same_without_colours(look: Look) -> None:
    printed = line("run\x1b.zarr", look)
    assert printed.startswith(r"run\x1b.zarr: recording, step 19 of 40, loss 3.1000, |grad| dead ")
    assert "\n" not in printed
    reported = facts("run.zarr", look)
    assert reported["last"]["loss"] == pytest.approx(3.1)
    assert set(reported["largest_gradient"]) == {"token", "norm"}


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ("absent", "waiting"),
        ("abandoned", "The recording process died"),
        ("interrupted", "interrupted"),
        ("complete", "complete"),
    ],
)
def test_every_status_is_shown(status: Any, sentence: str) -> None:
    reported = Look(status=status, commit_at=0.0, commit_age=1.0, curves={}, attributes={})
    assert sentence in " ".join(shown(reported, 80))
    assert line("r", reported)


def test_a_late_commit_and_unread_rows_are_shown(look: Look) -> None:
    config = {"recording": {"commit_every": 10.0}}
    late = Look(
        **{**vars(look), "commit_age": 41.0, "measured": 3, "attributes": {"config": config}}
    )
    text = "\n".join(shown(late, 80))
    assert "The last commit is overdue" in text
    assert "read so far: 3 of 20 rows" in text
    soon = Look(**{**vars(late), "commit_age": 39.0})
    assert "overdue" not in "\n".join(shown(soon, 80))


def test_a_sparkline_of_anything() -> None:
    def drawn(values: list[float], log: bool = False) -> str:
        curve = BoundedCurve()
        curve.add(0, values)
        return sparkline(curve, 8, log=log)

    assert drawn([]) == ""
    assert drawn([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert drawn([2, 2]) == "▁▁"
    assert drawn([math.nan, math.nan]) == "  "
    assert drawn([0, 0], log=True) == "▁▁"
    assert drawn([0, 1e-9, 1, math.nan, 1e9], log=True) == "▁▁▅ █"


@pytest.mark.parametrize("width", [80, 140])
def test_several_runs_have_a_line_each(look: Look, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    absent = Look(status="absent", curves={}, attributes={})
    console.print(overview({"one.zarr": look, "\x1b[31mother.zarr": absent}, width))
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert max(len(first), len(second)) <= width
    for part in ("one.zarr", "recording", "step 19 of 40", "loss 3.1000"):
        assert part in first
    assert "not created yet" in second
    assert "\x1b" not in second
