from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
from grammar_files import write

from trajstore.exchange.guessing.detect_arrays import detect_arrays
from trajstore.formats.open_file import open_file


def test_tied_matrices_are_compared_a_few_rows_at_a_time(tmp_path: Path) -> None:
    values = np.arange(8192 * 1024, dtype="f4").reshape(-1, 1024)  # 32 MiB
    other = values.copy()
    for change, expected in ((0.0, ["wte.weight"]), (1.0, ["wte.weight", "lm_head.weight"])):
        other[-1, -1] += change
        write(tmp_path / "f", "safetensors", {"wte.weight": values, "lm_head.weight": other})
        with open_file(tmp_path / "f") as file:
            tracemalloc.start()
            detected = detect_arrays(file)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert {one.key for one in detected.found} == set(expected)
        assert peak < values.nbytes / 2
