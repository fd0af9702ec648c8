"""Runs at addresses, and what is said where nothing can read them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xarray as xr

from trajstore import MissingExtra, open_run
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
