"""One flipped bit, in any file of a run: `verify` finds it, or it provably changes nothing.

`make flips` flips 300 instead of 60.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from checkpoints import write_checkpoint
from compact_runs import sample_part
from damage import flip, wide_run

from trajstore import open_run, verify
from trajstore.codec.computed_rows import cache as computed

FLIPS = int(os.environ.get("TRAJSTORE_FLIPS", "60"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = wide_run(tmp_path_factory.mktemp("flips") / "run.zarr")
    write_checkpoint(path.with_name("run.ckpt") / "step-00000008.safetensors")
    return path


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
def either(
    request: pytest.FixtureRequest, run: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Run of either encoding, without rows that were computed before."""
    if request.param == "delta":
        return run
    monkeypatch.setattr(computed, "_most", 0)
    path = run.with_name("replay.zarr")
    write_checkpoint(path.with_suffix(".ckpt") / "step-00000008.safetensors")
    return sample_part(sample, path)


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
