"""Runs at addresses, and what is said where nothing can read them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from object_stores import copied

from trajstore import FormatError, InvalidArgument, MissingExtra, RunNotFound, open_run
from trajstore.store.open_group import open_group


def test_a_run_is_read_at_an_address(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    copied(path, "memory://open/some/far.zarr")
    far = open_run("memory://open/some/far.zarr/")
    xr.testing.assert_identical(open_run(path).load(), far.load())


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(RunNotFound, match="there is no run at memory://open/none"):
        open_group("memory://open/none")


def test_what_is_no_run_is_said(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    copied(path / "W", "memory://open/array")
    with pytest.raises(FormatError, match="memory://open/array is not a Zarr v3 group"):
        open_group("memory://open/array")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("file:///tmp/run.zarr", "an address of an unknown kind; known are s3://, gs://"),
        ("s3://bucket", "names no run; expected SCHEME://BUCKET/KEY"),
        ("s3:///run.zarr", "names no run"),
        ("s3://user:secret@bucket/run.zarr", "credentials come from the environment"),
        ("https://host/run.zarr?signature=1", "an address is SCHEME://BUCKET/KEY"),
    ],
)
def test_addresses_that_cannot_be(address: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_group(address)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"run: pip install 'trajstore\[s3\]'$"):
        open_group("s3://bucket/run.zarr")
