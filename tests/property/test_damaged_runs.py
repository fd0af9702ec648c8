"""Damage of any kind: `verify` notices it or it changes nothing, and no command fails unnamed.

`make flips` flips 300 bits instead of 30. ``TRAJSTORE_METADATA=5000`` tries that many runs with
damaged metadata files with each command instead of a few; with ``pytest -s`` each prints what came
of it, as in ``benchmarks/results/metadata-fuzz.md``.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import partial, reduce
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but
from checkpoints import write_checkpoint
from compact_runs import sample_part
from damage import (
    COORDINATES,
    METADATA_KEY,
    RUNS,
    TAMPERINGS,
    Damage,
    arrays_of,
    edit,
    flip,
    member,
    root,
    taken,
    wide_run,
    write,
    write_runs,
)
from forked_processes import processes
from golden_runs import unpack

from trajstore import RunWriter, open_run, repair, verify
from trajstore.cli.main import main as command
from trajstore.codec.computed_rows import cache as computed
from trajstore.errors import TrajstoreError
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


OPENERS: dict[str, Callable[[Path], xr.Dataset]] = {"plain": xr.open_zarr, "ours": open_run}


def exact(values: np.ndarray) -> Any:
    """All bits of numbers, or the texts."""
    return values.tobytes() if values.dtype.kind in "bif" else values.tolist()


def is_misled(opened: Callable[[Path], xr.Dataset], path: Path, truth: xr.Dataset) -> bool:
    """Whether any values are others than were recorded, and no error; fewer rows are none."""
    try:
        ds = opened(path)
    except Exception:  # whatever zarr and xarray raise
        return False
    for name, whole in truth.variables.items():
        try:
            found = ds[name].load()
        except Exception:  # an error is no wrong number, whoever raises it; the next may be one
            continue
        expected = whole[: len(found)] if "step" in whole.dims else whole
        if found.dims != expected.dims or found.dtype != expected.dtype:
            return True
        if exact(found.values) != exact(expected.values):
            return True
    return False


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
    whole = xr.open_zarr(run).load()
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
            assert not any(is_misled(opened, run, whole) for opened in OPENERS.values()), where
        flip(path, bit)
    assert verify(run) == clean


@pytest.mark.parametrize(
    ("file", "old", "new", "notes"),
    [
        ("zarr.json", b'"updated": "20', b'"updated": "30', []),
        ("zarr.json", b"1.5e-05", b"1.5E-05", []),
        ("W/zarr.json", b"\n  11,", b"\n  15,", ["W is 4 rows ahead"]),
    ],
)
def test_each_harmless_change_is_what_it_is_said_to_be(
    run: Path, file: str, old: bytes, new: bytes, notes: list[str]
) -> None:
    """The list in docs/reference/integrity.md, one by one."""
    before = (run / file).read_bytes()
    assert old in before
    write(run / file, before.replace(old, new, 1))
    found = verify(run)
    assert found.clean
    assert [note.split(" of ")[0] for note in found.notes] == notes


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


FIRST = {item.name.partition(":")[0]: item for item in reversed(TAMPERINGS)}.values()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("item", nightly_but(TAMPERINGS, *FIRST), ids=lambda item: item.name)
def test_verify_notices_each_tampering_and_readers_are_misled_as_documented(
    item: Damage, copy: Path, truth: xr.Dataset
) -> None:
    item.act(copy)
    assert not verify(copy, threads=1).clean
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
    taken("shorter.zarr", METADATA_KEY, f"*/{METADATA_KEY}")(copy)
    assert any("older metadata" in str(item) for item in verify(copy).problems)
    with RunWriter.resume(copy, rows=9) as writer:
        assert verify(copy).clean
        writer.close("interrupted")
    assert verify(copy).clean


# Metadata files that are damaged at random: wrong types, missing members, broken texts.

OTHERS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1.5, 1e300, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30, "",
    "x", "0", "NaN", "W", "a/b", "..", "\x00", "\ud800", "é" * 300, "days since 2000-01-01",
    [], {}, [None], [[]], [-1], [1 << 40], [0, 1, 2, 3], {"a": 1}, {"name": "x"},
    {"name": None, "configuration": []},
)  # fmt: skip


def other_value(value: Any, rng: random.Random) -> Any:
    """Something in the place of a value."""
    deep = reduce(lambda inner, _: {"a": [inner]}, range(rng.choice((2, 45, 55))), value)
    like = (str(value), [value], {"a": value}, [value, value], {"name": value}, deep)
    near = (-value, value + 1, value - 1, value << 40, value / 2) if type(value) is int else ()
    return rng.choice((*rng.sample(OTHERS, 6), *like, *near))


def places(value: Any, rng: random.Random) -> list[tuple[Any, Any]]:
    """A way into a metadata file, as container and key, that ends anywhere."""
    found: list[tuple[Any, Any]] = []
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found.append((value, key))
        value = value[key]
    return found


def change_one(metadata: Any, seed: int) -> None:
    """Change one member of a metadata file in its place."""
    rng = random.Random(seed)
    if not (found := places(metadata, rng)):
        return
    (container, key), kind = rng.choice(found), rng.randrange(8)
    value = container[key]
    if kind in (1, 2) and isinstance(container, dict):
        names = (f"{key}x", "", "..", "a/b", "configuration", "name")
        container[rng.choice(names)] = value
    elif kind == 1:
        container.insert(key, value)
    elif kind == 3:  # of another place of the metadata file
        other, name = rng.choice(places(metadata, rng))
        container[key] = json.loads(json.dumps(other[name]))
    elif kind > 3:
        container[key] = other_value(value, rng)
    if kind in (0, 2):
        del container[key]


def broken_text(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are no metadata file, or hardly one."""
    at = rng.randrange(len(data))
    before, after = data[:at], data[at:]
    others = (
        before,
        before + rng.randbytes(1) + after[1:],
        before + b"\xff\xfe\x80" + after,
        data.decode(errors="replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32"))),
        data.replace(b"{", b'{"attributes": {}, "shape": [1], "attributes": 1, ', 1),
        rng.choice((b"", b"null", b"[]", b"{}", b"1", b'"x"', b"[" * 10000, b"\x00" * 9)),
        before + after.replace(b"3", b"9" * 5000, 1),
        before + after.replace(b"null", b"NaN", 1).replace(b"1", b"Infinity", 1),
        before + after[rng.choice((1, 8, 64)) :],
        data + after,
    )
    return rng.choice(others)


def claim_length(run: Path, rng: random.Random) -> None:
    """Have all metadata files claim a length that nobody stored, in the same way."""
    dim, length = rng.choice(("step", "token", "hidden")), 1 << rng.choice((20, 31, 40, 47))
    blocks = rng.random() < 0.4
    if dim == "step":
        root("attributes.committed_rows", length)(run)
        if blocks:
            root("attributes.block_rows", length)(run)
    for name, array in arrays_of(json.loads((run / METADATA_KEY).read_bytes())).items():
        for at in (at for at, each in enumerate(array["dimension_names"]) if each == dim):
            member(name, f"shape.{at}", length)(run)
            if blocks:
                member(name, f"chunk_grid.configuration.chunk_shape.{at}", length)(run)


def damage_metadata(run: Path, rng: random.Random) -> None:
    """Damage a metadata file of a run, or several; of an array sometimes both, in the same way."""
    if rng.random() < 0.04:
        claim_length(run, rng)
    names = ["", "", "", *sorted(path.parent.name for path in run.glob(f"*/{METADATA_KEY}"))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name, seed = rng.choice(names), rng.randrange(1 << 32)
        path = run / name / METADATA_KEY
        if rng.random() < 0.12:
            write(path, broken_text(path.read_bytes() or b"{}", rng))
            continue
        # Damaged before, a file may be no JSON, or have no such member.
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            edit(path, partial(change_one, seed=seed))
            if name and rng.random() < 0.6:
                whole = json.loads((run / METADATA_KEY).read_bytes())
                change_one(arrays_of(whole)[name], seed)
                write(run / METADATA_KEY, json.dumps(whole).encode())


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
    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        command(["--debug", name, str(run)], prog_name="trajstore", standalone_mode=False)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "open_run": _opened,
    "resume": _resumed,
    "verify": partial(_command, "verify"),
    "repair": _repaired,
    "annotate": _annotated,
    "info": partial(_command, "info"),
}


def fuzz(name: str, folder: Path) -> dict[str, Any]:
    """Try a command on many damaged runs; what it came to. In a process of its own."""
    signal.signal(signal.SIGALRM, _too_long)
    os.fsync = lambda descriptor: None  # no try loses its power
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
    for number in range(TRIES):
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
    return {"came_to": came_to, "raw": raw, "peak": _memory("VmHWM") - start}


def _too_long(number: int, frame: FrameType | None) -> None:
    raise Hang


def _memory(of: str) -> int:
    """Bytes that this process has (VmRSS, VmSize), or had at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{of}:")[2].split()[0]) << 10


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="measures the memory as Linux tells it")
def test_damaged_metadata_are_errors(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=processes, max_tasks_per_child=1) as pool:
        folders = [tmp_path / name for name in COMMANDS]
        came = dict(zip(COMMANDS, pool.map(fuzz, COMMANDS, folders), strict=True))
    for name, found in came.items():
        print(f"\n{name}: {TRIES} tries, {found}")
        assert found["raw"] == {}, name
        assert found["peak"] < MOST_MEMORY, name
        # Some damage is harmless to who does not read it; some must be noticed.
        assert found["came_to"]["done"] > 0, name
        assert name in ("verify", "repair") or found["came_to"]["FormatError"] > TRIES / 4, name
