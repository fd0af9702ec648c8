"""Each way to tamper with a run is noticed, and is read as its list says: `tests/tamperings.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xarray as xr
from bits_and_calls import nightly_but
from tamperings import READERS, TAMPERINGS, Tampering, World, all_metadata, make_world, take

import trajstore
from trajstore.errors import FormatError

NAMES = ("W", "grad", "loss", "step", "token", "is_dead", "token_count", "token_text")
OPENERS: dict[str, Callable[[Path], xr.Dataset]] = {
    "plain": xr.open_zarr,
    "ours": trajstore.open_run,
}

FIRST = {item.kind: item for item in reversed(TAMPERINGS)}.values()


class Whole:
    """Runs, and what the one that is tampered with holds."""

    def __init__(self, folder: Path, encoding: str) -> None:
        self.world = make_world(folder, encoding)
        self.truth = xr.open_zarr(self.world.run).load()


@pytest.fixture(
    scope="module", params=["delta", pytest.param("compact", marks=pytest.mark.nightly)]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("tampering"), request.param)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[World], Path]:
    """Makes a copy, of hard links: whoever changes a file replaces it."""
    return lambda world: Path(
        shutil.copytree(world.run, tmp_path / "run.zarr", copy_function=os.link)
    )


def is_misled(opened: Callable[[Path], xr.Dataset], path: Path, truth: xr.Dataset) -> bool:
    """Whether any values are others than were recorded, and no error; fewer rows are none."""
    try:
        ds = opened(path)
    except Exception:  # whatever zarr and xarray raise
        return False
    for name in NAMES:
        try:
            values = ds[name].values
        except Exception:  # an error is no wrong number, whoever raises it; the next may be one
            continue
        expected = truth[name][: len(values)] if "step" in truth[name].dims else truth[name]
        if ds[name].dims != expected.dims or values.dtype != expected.dtype:
            return True
        if values.tolist() != expected.values.tolist():
            return True
    return False


def is_noticed(path: Path) -> bool:
    """Whether `verify` finds something, or refuses the run as one of another format."""
    try:
        return not trajstore.verify(path, threads=1).clean
    except FormatError as error:
        return "has store format 1" in str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "item", nightly_but(TAMPERINGS, *FIRST), ids=lambda item: f"{item.kind}: {item.name}"
)
def test_verify_notices_each_tampering_and_readers_are_misled_as_documented(
    item: Tampering, whole: Whole, run: Callable[[World], Path]
) -> None:
    path = run(whole.world)
    item.act(path, whole.world)
    assert is_noticed(path)
    misled = {reader: is_misled(OPENERS[reader], path, whole.truth) for reader in READERS}
    assert misled == {reader: item.misleads(reader) for reader in READERS}


def test_the_runs_are_sound_and_each_case_has_a_name_of_its_own(whole: Whole) -> None:
    world = whole.world
    for path in (world.run, world.shorter, world.before, world.other):
        assert trajstore.verify(path).clean
    for opened in OPENERS.values():
        assert not is_misled(opened, world.run, whole.truth)
    assert is_misled(xr.open_zarr, world.other, whole.truth)
    assert is_misled(xr.open_zarr, world.before, whole.truth)
    assert len(TAMPERINGS) == len({(item.kind, item.name) for item in TAMPERINGS})


def test_an_older_run_as_a_whole_is_the_older_run(
    whole: Whole, run: Callable[[World], Path]
) -> None:
    """Nothing in a run can say that there was a later one; who kept its fingerprint knows."""
    world = whole.world
    path = run(world)
    take(path, world.shorter, [
        str(file.relative_to(world.shorter)) for file in world.shorter.rglob("*") if file.is_file()
    ])  # fmt: skip
    assert trajstore.verify(path).clean
    fingerprints = {
        xr.open_zarr(where).attrs["fingerprint"] for where in (path, world.shorter, world.run)
    }
    assert len(fingerprints) == 2


def test_metadata_of_an_older_state_are_what_a_cut_leaves_in_a_run_that_continues(
    whole: Whole, run: Callable[[World], Path]
) -> None:
    world = whole.world
    path = run(world)
    all_metadata(path, world.shorter)
    assert any("older metadata" in str(item) for item in trajstore.verify(path).problems)
    with trajstore.RunWriter.resume(path, rows=9) as writer:
        assert trajstore.verify(path).clean
        writer.close("interrupted")
    assert trajstore.verify(path).clean
