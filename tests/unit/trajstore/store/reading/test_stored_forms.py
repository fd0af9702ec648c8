"""Forms of chunks and corrections, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from compact_runs import RULE_ARRAYS, sample_part

from trajstore import RunWriter
from trajstore.errors import FormatError
from trajstore.store.reading.stored_forms import stored_forms


def test_what_the_rule_does_not_give_is_counted(sample: Path, tmp_path: Path) -> None:
    path = sample_part(sample, tmp_path / "run.zarr")
    elements = (22 - 3) * 128 * 16  # 3 blocks, of which each stores its first row
    sound = {"chunks": 3, "differences": 0, "elements": elements, "corrected": 0}
    assert stored_forms(path) == {
        name: {"chunks": 3, "differences": 0} if name == "grad" else sound
        for name in ("W", "grad", "exp_avg", "exp_avg_sq")
    }
    rows = xr.open_zarr(path).load()
    with RunWriter.resume(path, rows=21) as run:
        row: dict[str, Any] = {str(name): rows[name].values[21] for name in rows.data_vars}
        row["W"][5:8, 3] = 22
        run.append(21, **row)
    assert stored_forms(path)["W"] == sound | {"corrected": 3}
    assert stored_forms(path)["exp_avg"] == sound


def test_a_delta_run_has_no_stored_forms(sample: Path) -> None:
    assert stored_forms(sample) == {}


@pytest.mark.parametrize("name", RULE_ARRAYS)
def test_a_broken_chunk_is_refused(sample: Path, tmp_path: Path, name: str) -> None:
    path = sample_part(sample, tmp_path / "run.zarr")
    shard = path / name / "c.1.0.0"
    data = bytearray(shard.read_bytes())
    data[40] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FormatError, match=f"{name}, block 1 .*the run is damaged"):
        stored_forms(path)
