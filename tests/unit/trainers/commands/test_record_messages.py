from __future__ import annotations

from pathlib import Path

import pytest

from trajstore.trainers.commands.record import print_interrupted, print_recorded

FACTS = {
    "committed_rows": 4, "bytes_native": 4096, "bytes_on_disk": 2048, "ratio": 2.0,
    "steps": {"first": 0, "last": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "rate", "took"),
    [
        (61.7, 4.9512, " in 1 min 2 s (4.95 steps per second)"),
        (2, None, " in 2.0 s"),
        (None, None, ""),
    ],
)
def test_the_end_of_a_recording_says_how_long_it_took_and_what_to_type(
    seconds: float | None, rate: float | None, took: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("my run.zarr")
    print_recorded(path, {path: FACTS}, seconds, rate)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"Recorded 4 rows to my run.zarr{took}: 4 KiB in 2 KiB on disk (ratio 2.00)."
    assert [line.split()[:2] for line in said[2:]] == [
        ["trajstore", verb] for verb in ("summary", "analyze", "verify")
    ]
    assert all("'my run.zarr'" in line for line in said[2:])


def test_both_runs_of_untied_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_recorded(Path("un.zarr"), {Path("un.E.zarr"): FACTS, Path("un.W.zarr"): FACTS}, 1.0, 4.0)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in printed[:2]] == ["un.E.zarr", "un.W.zarr"]
    commands = [line.split()[1:3] for line in printed[3:]]
    assert commands == [
        ["summary", "un.zarr"], ["analyze", "un.E.zarr"], ["verify", "un.zarr"],
        ["compare", "un.zarr"],
    ]  # fmt: skip


def test_an_interrupted_one_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    print_interrupted(Path("my run.zarr"), FACTS, fsync=False)
    assert capsys.readouterr().err == (
        "Interrupted after step 3; 4 rows are committed. Resume with: "
        "trajstore record --resume -o 'my run.zarr' --no-fsync\n"
    )
