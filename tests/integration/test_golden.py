"""Stores that an earlier build of the same format wrote are read, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trajstore
from trajstore.schema import FORMAT
from trajstore.values.native_types import native_type, widen

DATA = Path(__file__).parents[1] / "data"

_spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


FINGERPRINTS = {
    "delta": "31451b6087303a6b3350cda1da930f5a39c234d7e8542d22d70c0016c19747c6",
    "delta-large": "551445c84adf9bcb14363539d17f7728c1074d0f9ad2e53ef18f2a8706ab57eb",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
@pytest.mark.parametrize("opener", [trajstore.open_run, xr.open_zarr])
def test_a_golden_store_reads_as_it_was_written(name: str, opener: object) -> None:
    ds = opener(DATA / f"format3-{name}.zarr")
    assert ds.attrs["trajstore_format"] == FORMAT
    assert ds.attrs["status"] == "complete"
    assert ds.step.values.tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert ds.token.values.tolist() == [2, 3, 5, 7]
    assert ds.is_dead.values.tolist() == [True, False, False, True]
    assert ds.token_text.values.tolist() == ["a", "b", "é", "\\n"]
    for variable, dtype in golden.TYPES.items():
        expected = widen(golden.golden_bits(variable), native_type(dtype))
        assert ds[variable].attrs["native_dtype"] == dtype
        assert ds[variable].values.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_golden_store_is_sound(name: str) -> None:
    """Labels, content digest and fingerprint are made again from what is stored."""
    found = trajstore.verify(DATA / f"format3-{name}.zarr")
    assert found.clean, found.problems
    attributes = trajstore.open_run(DATA / f"format3-{name}.zarr").attrs
    assert attributes["fingerprint"] == FINGERPRINTS[name]
