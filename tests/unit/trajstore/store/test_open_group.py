"""Runs at addresses, and what is said where nothing can read them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xarray as xr

from trajstore import FormatError, MissingExtra, RunNotFound, RunWriter, open_run, verify
from trajstore.store.open_group import open_group


def test_a_run_is_read_through_fsspec(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/far.zarr", recursive=True)
    try:
        xr.testing.assert_identical(open_run(path).load(), open_run("memory://far.zarr").load())
    finally:
        memory.rm("/far.zarr", recursive=True)


@pytest.mark.parametrize(
    ("module", "address", "remedy"),
    [
        ("s3fs", "s3://bucket/run.zarr", r"run: pip install 'trajstore\[s3\]'$"),
        ("gcsfs", "gs://bucket/run.zarr", "install gcsfs .*; install it$"),
    ],
)
def test_what_is_missing_is_named(
    module: str, address: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=f"^{address} needs a package .*{remedy}"):
        open_group(address)


def _run(path: Path) -> Path:
    with RunWriter.create(
        path, token=[1, 2], hidden=2, variables={"W": "float32"}, block_rows=2
    ) as run:
        for step in range(6):
            run.append(step, W=np.zeros((2, 2), "f4"))
    return path


def _rows(root: Any) -> None:
    for name in ("W", "step"):
        root["consolidated_metadata"]["metadata"][name]["shape"][0] = 10**15


def _blocks(root: Any) -> None:
    grid = root["consolidated_metadata"]["metadata"]["W"]["chunk_grid"]
    grid["configuration"]["chunk_shape"][0] = 10**15


def _deep(root: Any) -> None:
    value: Any = {}
    for _ in range(200):
        value = {"a": value}
    root["attributes"]["config"] = value


def _named(name: str) -> Any:
    def rename(root: Any) -> None:
        arrays = root["consolidated_metadata"]["metadata"]
        arrays[name] = arrays["W"]

    return rename


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rows, "the last of them are not stored"),
        (_blocks, "W has blocks of"),
        (_deep, "nested more than 100 deep"),
        (_named("../../x"), "'../../x' is no name of an array"),
        (_named("/etc/passwd"), "is no name of an array"),
        (_named(".."), "is no name of an array"),
        (None, "at most 16,777,216"),
        ("pipe", "no regular file"),
    ],
)
def test_what_is_out_of_all_proportion_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    document = _run(tmp_path / "run.zarr") / "zarr.json"
    if callable(change):
        root = json.loads(document.read_bytes())
        change(root)
        document.write_text(json.dumps(root))
    elif change is None:
        document.write_text(document.read_text() + " " * (17 << 20))
    else:
        document.unlink()
        os.mkfifo(document)
    with pytest.raises(FormatError, match=message):
        open_group(tmp_path / "run.zarr")
    assert not verify(tmp_path / "run.zarr").clean


def test_the_runs_of_several_parameters_are_named(tmp_path: Path) -> None:
    _run(tmp_path / "c.wte.weight.zarr")
    with pytest.raises(RunNotFound, match=r"of that name there are .*c\.wte\.weight\.zarr$"):
        open_group(tmp_path / "c.zarr")
    with pytest.raises(RunNotFound, match=r"no run at .*other\.zarr$"):
        open_group(tmp_path / "other.zarr")
