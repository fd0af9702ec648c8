from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from grammar_files import write

from trajstore.exchange.guessing.detect_arrays import _tied
from trajstore.formats.open_file import open_file


@dataclass
class Matrix:
    key: str
    shape: tuple[int, ...]
    matrix: str | None
    dtype: str = "float32"


def test_compared_a_few_rows_at_a_time(tmp_path: Path) -> None:
    values = np.arange(8192 * 1024, dtype="f4").reshape(-1, 1024)  # 32 MiB
    other = values.copy()
    for change in (0.0, 1.0):
        other[-1, -1] += change
        write(tmp_path / "f", "safetensors", {"wte.weight": values, "lm_head.weight": other})
        pair = [Matrix("wte.weight", values.shape, "E"), Matrix("lm_head.weight", other.shape, "W")]
        with open_file(tmp_path / "f") as file:
            tracemalloc.start()
            found = _tied(file, pair)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert found is (None if change else pair[1])
        assert peak < values.nbytes / 2
