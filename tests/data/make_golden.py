"""Writes golden stores: those that are not there. Every build of this format must read them.

python tests/data/make_golden.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trajstore import RunWriter
from trajstore.store.metadata import block_plan as layout

ROWS, TOKENS, HIDDEN = 7, 4, 3
TYPES = {"W": "bfloat16", "grad": "float16", "exp_avg": "float32", "logits": "bfloat16",
         "loss": "float32", "lr": "float64"}  # fmt: skip
SHAPES = {"W": (TOKENS, HIDDEN), "grad": (TOKENS, HIDDEN), "exp_avg": (TOKENS, HIDDEN),
          "logits": (TOKENS,), "loss": (), "lr": ()}  # fmt: skip
WIDTHS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}


def golden_bits(name: str) -> np.ndarray:
    """Bits of all rows of a variable, by a formula that needs no random numbers."""
    shape = (ROWS, *SHAPES[name])
    width = WIDTHS[TYPES[name]]
    counter = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    mixed = (counter + 1) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(64 - width)).astype(f"u{width // 8}")


def write(path: Path, block_rows: int) -> None:
    """One golden store."""
    if path.exists():
        return
    with RunWriter.create(
        path,
        token=[2, 3, 5, 7],
        hidden=HIDDEN,
        variables=TYPES,
        is_dead=[True, False, False, True],
        token_count=[0, 10, 20, 0],
        token_text=["a", "b", "é", "\\n"],
        config={"golden": True},
        block_rows=block_rows,
    ) as run:
        bits = {name: golden_bits(name) for name in TYPES}
        for row in range(ROWS):
            for name, place in run.next_row().items():
                place[...] = bits[name][row]
            run.commit_row(10 * row)


def main() -> None:
    folder = Path(__file__).parent
    write(folder / "format3-delta.zarr", 3)
    # So that these rows are stored as large ones are, each block in two parts of two inner chunks.
    layout._SMALL_ROW, layout._FEWEST_TOKENS, layout._LARGEST_OBJECT = 0, 1, 10 * HIDDEN * 4 * 2
    layout._CHUNK = layout._CHUNK_OF_HISTORIES = 1
    write(folder / "format3-delta-large.zarr", 10)


if __name__ == "__main__":
    main()
