"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from trajstore.cli.options import file_stem, runs_and_names
from trajstore.errors import InvalidArgument


def test_a_quantity_before_the_run_is_called_so() -> None:
    with pytest.raises(InvalidArgument, match=r"got freeze before the run; .*: a\.zarr freeze sky"):
        runs_and_names(["freeze", "a.zarr", "sky"], {"freeze", "sky"})


@pytest.mark.parametrize(
    ("given", "runs", "stem"),
    [
        (["one.zarr"], ["one.zarr"], "one"),
        (["dir/pair.zarr"], ["dir/pair.E.zarr", "dir/pair.W.zarr"], "pair"),
        (["sweep/"], ["sweep/a.zarr", "sweep/b.zarr"], "runs"),
        (["*.zarr"], ["a.zarr", "b.zarr"], "runs"),
        (["*.zarr"], ["a.zarr"], "a"),
        (["a.zarr", "b.zarr"], ["a.zarr", "b.zarr"], "runs"),
    ],
)
def test_the_name_of_an_output_file(
    given: list[str], runs: list[str], stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    assert file_stem(given, runs) == stem
