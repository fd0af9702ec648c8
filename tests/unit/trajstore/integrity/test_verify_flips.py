"""One flipped bit, in any file of a run: `verify` finds it, or it provably changes nothing.

`make flips` flips 300 instead of 60.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from bits_and_calls import nightly_but
from checkpoints import write_checkpoint
from compact_runs import sample_part
from damage import flip
from tamperings import READERS, TAMPERINGS, Tampering, World, all_metadata, make_world, take

import trajstore
from trajstore import open_run, verify
from trajstore.codec.computed_rows import cache as computed
from trajstore.errors import FormatError

FLIPS = int(os.environ.get("TRAJSTORE_FLIPS", "60"))


def kinds(run: Path) -> dict[str, list[Path]]:
    """Files of a run, by kind, so that small kinds get their share of flips."""
    coordinates = ("token", "is_dead", "token_count", "token_text", "parameter")
    chunks = sorted(run.glob("*/c.*"))
    return {
        "shard": [path for path in chunks if path.parent.name not in coordinates],
        "coordinate": [path for path in chunks if path.parent.name in coordinates],
        "metadata file of an array": sorted(run.glob("*/zarr.json")),
        "root": [run / "zarr.json"],
        "checkpoint": sorted(run.with_suffix(".ckpt").iterdir()),
    }


def values(opener: Callable[[Path], xr.Dataset], run: Path) -> dict[str, Any]:
    """Every variable as a reader gets it; None where it gets an error."""
    try:
        ds = opener(run)
    except Exception:  # whatever xarray and zarr raise
        return {}
    found: dict[str, Any] = {}
    for name in ds.variables:
        try:
            array = ds[name].values
            found[str(name)] = array.tobytes() if array.dtype.kind in "bif" else array.tolist()
        except Exception:  # likewise
            found[str(name)] = None
    return found


def harmless(before: bytes, after: bytes) -> bool:
    """Whether a metadata file has the same values, but for a digit of the last commit's time."""
    old, new = json.loads(before), json.loads(after)
    if "updated" in old["attributes"]:
        new["attributes"]["updated"] = old["attributes"]["updated"]
    return json.dumps(new) == json.dumps(old)


def longer(before: bytes, after: bytes) -> bool:
    """Whether an array's own metadata file has got more rows, and nothing else has changed."""
    old, new = json.loads(before), json.loads(after)
    ahead = new["shape"][0] > old["shape"][0]
    return ahead and new | {"shape": [old["shape"][0], *new["shape"][1:]]} == old


@pytest.fixture(params=["delta", "compact"])
def either(request: pytest.FixtureRequest, run: Path, sample: Path) -> Iterator[Path]:
    """Run of either encoding, without rows that were computed before."""
    path = run
    if request.param == "compact":
        computed.clear(most=0)
        path = sample_part(sample, run.with_name("replay.zarr"))
    write_checkpoint(path.with_suffix(".ckpt") / "step-00000008.safetensors")
    yield path
    computed.clear()


@pytest.mark.nightly
def test_every_flipped_bit_is_found_or_harmless(either: Path) -> None:
    run = either
    clean = verify(run)
    assert clean.clean
    assert clean.notes == ()
    readers = (open_run, xr.open_zarr)
    good = {reader: values(reader, run) for reader in readers}
    rng = random.Random(f"flips of {run.name}")
    for number in range(FLIPS):
        kind, paths = list(kinds(run).items())[number % 5]
        path = rng.choice(paths)
        before = path.read_bytes()
        bit = rng.randrange(8 * len(before))
        flip(path, bit)
        where = f"bit {bit} of {path}"
        found = verify(run)
        if not found.clean:
            assert any(
                path in (problem.path, problem.path / "zarr.json") or path.suffix == ".json"
                for problem in found.problems
            ), where
        elif found.notes:
            assert kind == "metadata file of an array", where
            assert longer(before, path.read_bytes()), where
        else:
            assert kind in ("root", "metadata file of an array"), where
            assert harmless(before, path.read_bytes()), where
        if kind in ("shard", "coordinate"):
            for reader in readers:
                for name, got in values(reader, run).items():
                    assert got is None or got == good[reader][name], f"{where}: {name}"
        flip(path, bit)
    assert verify(run) == clean
    assert {reader: values(reader, run) for reader in readers} == good


def test_each_harmless_change_is_what_it_is_said_to_be(run: Path) -> None:
    """The list in docs/reference/integrity.md, one by one."""
    root = run / "zarr.json"
    text = root.read_bytes()
    cases = {
        "updated": text.replace(b'"updated": "20', b'"updated": "30'),
        "spelling": text.replace(b"1.5e-05", b"1.5E-05", 1),
    }
    for name, changed in cases.items():
        assert changed != text, name
        root.write_bytes(changed)
        assert verify(run).clean, name
        assert harmless(text, changed)
    root.write_bytes(text)
    path = run / "W" / "zarr.json"
    text = path.read_bytes()
    path.write_bytes(text.replace(b"\n  11,", b"\n  15,", 1))
    assert longer(text, path.read_bytes())
    found = verify(run)
    assert found.clean
    assert found.notes[0].startswith("W is 4 rows ahead")
    path.write_bytes(text)


NAMES = ("W", "grad", "loss", "step", "token", "is_dead", "token_count", "token_text")
OPENERS: dict[str, Callable[[Path], xr.Dataset]] = {
    "plain": xr.open_zarr,
    "ours": trajstore.open_run,
}

FIRST = {item.kind: item for item in reversed(TAMPERINGS)}.values()


class Whole:
    """Runs, and what the one that is tampered with holds."""

    def __init__(self, folder: Path) -> None:
        self.world = make_world(folder)
        self.truth = xr.open_zarr(self.world.run).load()


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
    item: Tampering, originals: Whole, hard_links: Callable[[World], Path]
) -> None:
    path = hard_links(originals.world)
    item.act(path, originals.world)
    assert is_noticed(path)
    misled = {reader: is_misled(OPENERS[reader], path, originals.truth) for reader in READERS}
    assert misled == {reader: item.misleads(reader) for reader in READERS}


def test_the_runs_are_sound_and_each_case_has_a_name_of_its_own(originals: Whole) -> None:
    world = originals.world
    for path in (world.run, world.shorter, world.before, world.other):
        assert trajstore.verify(path).clean
    for opened in OPENERS.values():
        assert not is_misled(opened, world.run, originals.truth)
    assert is_misled(xr.open_zarr, world.other, originals.truth)
    assert is_misled(xr.open_zarr, world.before, originals.truth)
    assert len(TAMPERINGS) == len({(item.kind, item.name) for item in TAMPERINGS})


def test_an_older_run_as_a_whole_is_the_older_run(
    originals: Whole, hard_links: Callable[[World], Path]
) -> None:
    """Nothing in a run can say that there was a later one; who kept its fingerprint knows."""
    world = originals.world
    path = hard_links(world)
    take(path, world.shorter, [
        str(file.relative_to(world.shorter)) for file in world.shorter.rglob("*") if file.is_file()
    ])  # fmt: skip
    assert trajstore.verify(path).clean
    fingerprints = {
        xr.open_zarr(where).attrs["fingerprint"] for where in (path, world.shorter, world.run)
    }
    assert len(fingerprints) == 2


def test_metadata_of_an_older_state_are_what_a_cut_leaves_in_a_run_that_continues(
    originals: Whole, hard_links: Callable[[World], Path]
) -> None:
    world = originals.world
    path = hard_links(world)
    all_metadata(path, world.shorter)
    assert any("older metadata" in str(item) for item in trajstore.verify(path).problems)
    with trajstore.RunWriter.resume(path, rows=9) as writer:
        assert trajstore.verify(path).clean
        writer.close("interrupted")
    assert trajstore.verify(path).clean


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("tampering"))


@pytest.fixture
def hard_links(tmp_path: Path) -> Callable[[World], Path]:
    """Makes a copy, of hard links: whoever changes a file replaces it."""
    return lambda world: Path(
        shutil.copytree(world.run, tmp_path / "run.zarr", copy_function=os.link)
    )
