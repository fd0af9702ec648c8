"""An export to another encoding that is killed leaves the whole run, or none, and can be repeated.

`TRAJSTORE_KILLS` sets how many are killed, four for each (`make crash`).
"""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import xarray as xr
from crashing import KillAt, create, encoding_of, killed, row

from trajstore import export, verify

ROWS = 18


def exported(source: Path, out: Path, kill: KillAt | None, told: Connection | None) -> None:
    """Export a run to the encoding of its new name; in a process."""
    if kill is not None:
        kill.install()
    export(source, out, encoding=encoding_of(out), overwrite=True)


@pytest.mark.nightly
@pytest.mark.parametrize("names", [("run.zarr", "compact.zarr"), ("compact.zarr", "run.zarr")])
def test_a_killed_export_leaves_the_whole_run_or_none(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    source, out = tmp_path / "source-compact.zarr", tmp_path / "out" / names[1]
    out.parent.mkdir()
    with create(source) as run:  # rows that follow from the gradient
        for step in range(ROWS):
            run.append(step=step, **row(step, "compact"))
    if names[0] == "run.zarr":
        export(source, source.with_name("run.zarr"), encoding="delta")
        source = source.with_name("run.zarr")
    rng = random.Random(names[0])
    kills = 0
    for number in range(4 * int(os.environ.get("TRAJSTORE_KILLS", "1"))):
        kill = KillAt(1 + number * 7 % 25, after=rng.random() < 0.5)
        kills += killed(exported, source, out, kill)
        if out.exists():
            assert verify(out).clean
    assert kills
    assert not killed(exported, source, out, None)
    assert [each.name for each in out.parent.iterdir()] == [out.name]
    ds = xr.open_zarr(out)
    assert ds.attrs["encoding"] == encoding_of(out)
    for step in range(ROWS):
        expected = row(step, "compact")
        assert (ds.W[step].values.view("u4") >> 16 == expected["W"]).all()
    assert verify(out).clean
