"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from trajstore.cli.options import file_stem


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
