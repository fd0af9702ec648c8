"""Damage of any kind: `verify` notices it or it changes nothing, and no command fails unnamed.

`make flips` flips 300 bits instead of 30. ``TRAJSTORE_METADATA=5000`` tries that many runs with
damaged metadata files with each command instead of a few; with ``pytest -s`` each prints what came
of it, as in ``benchmarks/results/metadata-fuzz.md``. This file is also the script that a process of
its own runs: ``test_damaged_runs.py COMMAND,… TRIES [FIRST]``; its last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import xarray as xr
from bits_and_calls import nightly_but
from checkpoints import write_checkpoint
from compact_runs import sample_part
from damage import (
    COORDINATES,
    RUNS,
    TAMPERINGS,
    Damage,
    flip,
    metadata_of,
    wide_run,
    write,
    write_runs,
)
from damaged_metadata import damage_metadata
from golden_runs import unpack

from trajstore import RunWriter, open_run, repair, verify
from trajstore.cli.main import main as command
from trajstore.codec.computed_rows import cache as computed
from trajstore.errors import FormatError, TrajstoreError
from trajstore.store.writing.create import annotate_run

FLIPS = int(os.environ.get("TRAJSTORE_FLIPS", "30"))


def kinds(run: Path) -> dict[str, list[Path]]:
    """Files of a run, by kind, so that small kinds get their share of flips."""
    coordinates = (*COORDINATES, "parameter")
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return wide_run(tmp_path / "run.zarr")


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


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("zarr.json", b'"updated": "20', b'"updated": "30'),
        ("zarr.json", b"1.5e-05", b"1.5E-05"),
        ("W/zarr.json", b"\n  11,", b"\n  15,"),
    ],
)
def test_each_harmless_change_is_what_it_is_said_to_be(
    run: Path, file: str, old: bytes, new: bytes
) -> None:
    """The list in docs/reference/integrity.md, one by one."""
    before = (run / file).read_bytes()
    after = before.replace(old, new, 1)
    assert after != before
    write(run / file, after)
    found = verify(run)
    assert found.clean
    if file == "zarr.json":
        assert harmless(before, after)
    else:
        assert longer(before, after)
        assert found.notes[0].startswith("W is 4 rows ahead")


OPENERS: dict[str, Callable[[Path], xr.Dataset]] = {"plain": xr.open_zarr, "ours": open_run}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("tampering"))


@pytest.fixture(scope="module")
def truth(originals: Path) -> xr.Dataset:
    return xr.open_zarr(originals).load()


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Path:
    """A copy to tamper with, of hard links, beside the other runs."""
    for name in RUNS[1:]:
        (tmp_path / name).symlink_to(originals.with_name(name))
    return Path(shutil.copytree(originals, tmp_path / RUNS[0], copy_function=os.link))


def is_misled(opened: Callable[[Path], xr.Dataset], path: Path, truth: xr.Dataset) -> bool:
    """Whether any values are others than were recorded, and no error; fewer rows are none."""
    try:
        ds = opened(path)
    except Exception:  # whatever zarr and xarray raise
        return False
    for name in (*truth.data_vars, "step", *COORDINATES):
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
        return not verify(path, threads=1).clean
    except FormatError as error:
        return "has store format 1" in str(error)


FIRST = {item.name.partition(":")[0]: item for item in reversed(TAMPERINGS)}.values()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("item", nightly_but(TAMPERINGS, *FIRST), ids=lambda item: item.name)
def test_verify_notices_each_tampering_and_readers_are_misled_as_documented(
    item: Damage, copy: Path, truth: xr.Dataset
) -> None:
    item.act(copy)
    assert is_noticed(copy)
    assert item.misled == tuple(
        name for name, opened in OPENERS.items() if is_misled(opened, copy, truth)
    )


def test_the_runs_are_sound_and_others_would_mislead(originals: Path, truth: xr.Dataset) -> None:
    for name in RUNS:
        path = originals.with_name(name)
        assert verify(path).clean
        misled = {is_misled(opened, path, truth) for opened in OPENERS.values()}
        assert misled == {name in ("before.zarr", "other.zarr")}


def test_an_older_run_as_a_whole_is_the_older_run(copy: Path) -> None:
    """Nothing in a run can say that there was a later one; who kept its fingerprint knows."""
    kept = xr.open_zarr(copy).attrs["fingerprint"]
    shutil.rmtree(copy)
    shutil.copytree(copy.with_name("shorter.zarr"), copy)
    assert verify(copy).clean
    assert xr.open_zarr(copy).attrs["fingerprint"] != kept


def test_metadata_of_an_older_state_are_what_a_cut_leaves_in_a_run_that_continues(
    copy: Path,
) -> None:
    metadata_of("shorter.zarr")(copy)
    assert any("older metadata" in str(item) for item in verify(copy).problems)
    with RunWriter.resume(copy, rows=9) as writer:
        assert verify(copy).clean
        writer.close("interrupted")
    assert verify(copy).clean


# Commands that are tried on damaged metadata files; in a process of its own, for its memory.

TRIES = int(os.environ.get("TRAJSTORE_METADATA", "20"))
MOST_SECONDS = 10
MOST_MEMORY = 100 << 20
MOST_SPACE = 3 << 30
"""Bytes of addresses that a try may take; each thread takes many and uses few."""

GOLDEN = ("delta.zarr", "parts.zarr")


class Hang(BaseException):
    """A try has taken too long."""


def _opened(run: Path) -> None:
    ds = open_run(run)
    assert ds.sizes["step"] == len(ds["step"])
    ds.isel(step=slice(-1, None)).load()


def _resumed(run: Path) -> None:
    with RunWriter.resume(run, commit_every=None) as writer:
        rows = writer.rows
    assert rows == open_run(run, chunks=None).sizes["step"]
    # Own metadata files that say other things than the root are replaced with the next row only.
    lost = [problem for problem in verify(run).problems if problem.remedy == "cut"]
    assert not lost, f"resumed, and not sound: {lost[0]}"


def _annotated(run: Path) -> None:
    annotate_run(run, token_text=["v", "w", "x", "y"], overwrite=True)
    open_run(run, chunks=None).load()


def _repaired(run: Path) -> None:
    _command("repair", run)
    found = verify(run)
    if found.clean:
        open_run(run, chunks=None).load()
    else:
        # What the fingerprint finds it finds once all else is sound.
        assert repair(run, dry_run=True).unrepaired, f"repaired, and not sound: {found.problems[0]}"


def _command(name: str, run: Path) -> None:
    with suppress(SystemExit):
        command(["--debug", name, str(run)], prog_name="trajstore", standalone_mode=False)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "open_run": _opened,
    "resume": _resumed,
    "verify": partial(_command, "verify"),
    "repair": _repaired,
    "annotate": _annotated,
    "info": partial(_command, "info"),
}


def fuzz(name: str, tries: int, first: int = 0) -> dict[str, Any]:
    """Try a command on so many damaged runs; what it came to."""
    folder = Path(tempfile.mkdtemp(prefix="metadata files-"))
    sound, run = unpack(folder), folder / "run.zarr"
    came_to: Counter[str] = Counter()
    raw: dict[str, int] = {}

    def fresh(golden: str) -> Path:
        """A copy of links: writers and damage replace files, and write into none."""
        shutil.rmtree(run, ignore_errors=True)
        return Path(shutil.copytree(sound / golden, run, copy_function=os.link))

    for golden in GOLDEN:
        COMMANDS[name](fresh(golden))  # what is loaded is no memory of a try
    start, space = _memory("VmRSS"), _memory("VmSize") + MOST_SPACE
    Path("/proc/self/clear_refs").write_text("5")
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
    for number in range(first, first + tries):
        damage_metadata(fresh(GOLDEN[number % 2]), random.Random(f"{name} {number}"))
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            COMMANDS[name](run)
            came_to["done"] += 1
        except TrajstoreError as error:
            came_to[type(error).__name__] += 1
        except (Exception, Hang) as error:
            came_to["raw"] += 1
            frames = traceback.extract_tb(error.__traceback__)[-2:]
            where = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in frames)
            raw.setdefault(f"{type(error).__name__} at {where}: {str(error)[:200]}", number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    shutil.rmtree(folder)
    return {"came_to": came_to, "raw": raw, "peak": _memory("VmHWM") - start}


def _too_long(number: int, frame: FrameType | None) -> None:
    raise Hang


def _memory(of: str) -> int:
    """Bytes that this process has (VmRSS, VmSize), or had at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{of}:")[2].split()[0]) << 10


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="measures the memory as Linux tells it")
def test_damaged_metadata_are_errors() -> None:
    arguments = [sys.executable, __file__, ",".join(COMMANDS), str(TRIES)]
    kits = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": kits}
    done = subprocess.run(
        arguments,
        env=environment,
        capture_output=True,
        text=True,
        timeout=7200 * len(COMMANDS),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        print(f"\n{name}: {TRIES} tries, {found}")
        assert found["raw"] == {}, name
        assert found["peak"] < MOST_MEMORY, name
        # Some damage is harmless to who does not read it; some must be noticed.
        assert found["came_to"]["done"] > 0, name
        assert name in ("verify", "repair") or found["came_to"]["FormatError"] > TRIES / 4, name


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _too_long)
    os.fsync = lambda descriptor: None  # no try loses its power
    tries, *first = map(int, sys.argv[2:])
    print("\n" + json.dumps({name: fuzz(name, tries, *first) for name in sys.argv[1].split(",")}))
