"""Runs at addresses, and what is said where nothing can read them."""

from __future__ import annotations

import json
import os
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from damage import put
from object_stores import copied, web_server

from trajstore import RunWriter, open_run, verify
from trajstore.errors import (
    FormatError,
    InvalidArgument,
    ObjectStoreError,
    RunNotFound,
)
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.run_info import information
from trajstore.store.writing.create import annotate_run


def test_a_missing_address_is_an_error() -> None:
    with pytest.raises(RunNotFound, match="there is no run at memory://open/none"):
        open_group("memory://open/none")


def test_a_group_without_a_run_is_refused(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    copied(path / "W", "memory://open/array")
    with pytest.raises(FormatError, match="memory://open/array is not a Zarr v3 group"):
        open_group("memory://open/array")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("file:///tmp/run.zarr", "an unknown kind of address, expected one of s3://, gs://"),
        ("s3://bucket", "names no run; expected SCHEME://BUCKET/KEY"),
        ("s3:///run.zarr", "names no run"),
        ("s3://user:secret@bucket/run.zarr", "credentials come from the environment"),
        ("hf://datasets/user/name", "names no run; expected hf://datasets/USER/NAME/RUN.zarr"),
        ("hf://user//run.zarr", "names no run; expected hf://"),
        ("s3://[bucket/run.zarr", "is not an address: Invalid IPv6 URL"),
        (
            "https://host/run.zarr?signature=1",
            "is not a supported address, expected SCHEME://BUCKET/KEY",
        ),
    ],
)
def test_addresses_that_cannot_be(address: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_group(address)


def _run(path: Path) -> Path:
    with RunWriter.create(
        path, token=[1, 2], hidden=2, variables={"W": "float32"}, block_rows=2
    ) as run:
        for step in range(6):
            run.append(step, W=np.zeros((2, 2), "f4"))
    return path


ARRAYS = "consolidated_metadata.metadata"
HUGE = 1 << 40
ROWS = {
    "attributes.committed_rows": HUGE,
    f"{ARRAYS}.W.shape.0": HUGE,
    f"{ARRAYS}.step.shape.0": HUGE,
}
LONG_BLOCKS = {f"{ARRAYS}.W.chunk_grid.configuration.chunk_shape.0": HUGE}


def _changed(metadata: Path, changes: dict[str, Any]) -> bytes:
    """A root with other members."""
    root = json.loads(metadata.read_bytes())
    for place, value in changes.items():
        put(root, place, value)
    return json.dumps(root).encode()


def annotated(run: Path) -> None:
    annotate_run(run, token_text=["a", "b"])


def is_noticed(run: Path) -> bool:
    try:
        return not verify(run).clean
    except FormatError as error:
        return "announce" in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ROWS, r"step has shape \[1099511627776\], but its last block is not stored"),
        (
            {"attributes.committed_rows": HUGE},
            "committed_rows is 1099511627776, expected 6, the rows of its arrays",
        ),
        (
            {f"{ARRAYS}.W.shape.1": HUGE, f"{ARRAYS}.token.shape.0": HUGE},
            r"token\.chunk_grid\.configuration\.chunk_shape\.0 is 2, expected 1099511627776",
        ),
        (
            {f"{ARRAYS}.W.shape.2": HUGE},
            r"W\.shape is .*, expected lengths that blocks of \[2, 2, 2\] cover",
        ),
        (
            LONG_BLOCKS,
            r"chunk_shape is \[1099511627776, 2, 2\], expected .* at most 274,877,906,944",
        ),
        (
            {f"{ARRAYS}.W.chunk_grid.configuration.chunk_shape.0": 1 << 30},
            r"metadata\.W\.codecs\.0\..*, expected at most 65,536 chunks in a block",
        ),
        (
            {"attributes.config": reduce(lambda inner, _: {"a": inner}, range(200), {})},
            "nested more than 100 deep",
        ),
        ({ARRAYS: {"../../x": {}}}, "an invalid name, '../../x'"),
        ("large", "at most 16,777,216"),
        ("pipe", "not a regular file"),
    ],
)
def test_what_is_out_of_all_proportion_is_refused(
    tmp_path: Path, changes: Any, message: str
) -> None:
    metadata = _run(tmp_path / "run.zarr") / "zarr.json"
    if changes == "pipe":
        metadata.unlink()
        os.mkfifo(metadata)
    elif changes == "large":
        metadata.write_text(metadata.read_text() + " " * (17 << 20))
    else:
        metadata.write_bytes(_changed(metadata, changes))
    for opened in (open_group, open_run, RunWriter.resume, annotated):
        with pytest.raises(FormatError, match=message):
            opened(tmp_path / "run.zarr")
    assert is_noticed(tmp_path / "run.zarr")


def test_the_same_at_an_address(tmp_path: Path) -> None:
    metadata = _run(tmp_path / "run.zarr") / "zarr.json"
    far = copied(metadata.parent, "memory://out/of/proportion.zarr")
    for content, message in (
        (metadata.read_bytes() + b" " * (17 << 20), "at most 16,777,216"),
        (_changed(metadata, LONG_BLOCKS), r"chunk_shape is \[1099511627776, 2, 2\], expected"),
        (_changed(metadata, ROWS), r"step has shape .* last block is not stored"),
    ):
        (far / "zarr.json").write_bytes(content)
        for read in (open_run, information, RunWriter.resume):
            with pytest.raises(FormatError, match=message):
                read(far)


def test_a_server_without_ends_is_asked_in_another_way(small_run: tuple[Path, Any]) -> None:
    """As Azure is; most objects of this run are shorter than the end that is asked for."""
    path = small_run[0]
    with web_server(path.parent, ranges=r"bytes=\d") as (server, _):
        xr.testing.assert_identical(
            open_run(path).load(), open_run(f"{server}/{path.name}", chunks=None).load()
        )


def test_a_server_without_ranges_is_reported(small_run: tuple[Path, Any]) -> None:
    path = small_run[0]
    told = pytest.raises(ObjectStoreError, match=r"^http://.*/c.*; runs are read in parts: copy")
    with web_server(path.parent, ranges="none") as (server, _), told:
        open_run(f"{server}/{path.name}").load()


@pytest.mark.parametrize(
    ("runs", "asked", "message"),
    [
        (["c.wte.weight"], "c.zarr", r"similar names: .*c\.wte\.weight\.zarr$"),
        (["c.wte.weight"], "other.zarr", r"at .*other\.zarr; runs in .*: c\.wte\.weight\.zarr$"),
        ("abcdef", "gatsby.zarr", r"; runs in .*: a\.zarr, b\.zarr, c\.zarr, d\.zarr, e\.zarr …$"),
        (["gatsby"], "gatsby.zar", r"did you mean 'gatsby\.zarr'\?"),
        ("ab", "", r"a folder of runs; pass .*a\.zarr, or all .*/\*\.zarr$"),
    ],
)
def test_runs_in_the_folder_are_named(
    tmp_path: Path, runs: list[str], asked: str, message: str
) -> None:
    for name in runs:
        _run(tmp_path / f"{name}.zarr")
    with pytest.raises(RunNotFound if asked else FormatError, match=message):
        open_group(tmp_path / asked)
