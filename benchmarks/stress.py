"""A producer that is faster than the writer, for a minute: constant memory and correct rows.

python benchmarks/stress.py [--seconds N]

Rows of a real history are appended as fast as the writer takes them. Then every row is read and
compared with the crc32c from the time of appending.
"""

from __future__ import annotations

import argparse
import shutil
import time

import google_crc32c
import numpy as np
from history import MATRICES, wordybird
from measure import cache, machine, resident, save, table

from trajstore import RunWriter
from trajstore.store.reading.array_reader import stored_array
from trajstore.store.reading.open_group import open_group


def main() -> None:
    """Print resident memory every tenth of the time, and the result of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=200, help="steps of the repeated history")
    options = parser.parse_args()
    history = wordybird(options.steps)
    # In memory, because reading from the disk would slow down the producer.
    source = {name: np.array(history[name][40:56]) for name in MATRICES}
    path = cache() / "scratch-stress.zarr"
    shutil.rmtree(path, ignore_errors=True)
    tokens, hidden = source["W"].shape[1:]
    expected: list[tuple[int, ...]] = []
    sums = {
        name: [google_crc32c.value(row.tobytes()) for row in rows] for name, rows in source.items()
    }
    looks: list[tuple[float, int, int]] = []
    before = resident("VmRSS")
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=hidden,
        variables=dict.fromkeys(MATRICES, "bfloat16"),
    ) as run:
        started = time.perf_counter()
        while (now := time.perf_counter() - started) < options.seconds:
            # Never the same row at the same position of a block, nor the same block twice in a row.
            at = (len(expected) * 7 + len(expected) // 16) % 16
            run.append(step=len(expected), **{name: source[name][at] for name in MATRICES})
            expected.append(tuple(sums[name][at] for name in MATRICES))
            if now >= len(looks) * options.seconds / 10:
                looks.append((now, len(expected), resident("VmRSS") - before))
        planned, threads, waited = run.layout.memory, run.layout.threads, run.seconds_waited
        taken = run.bytes_recorded
    seconds = time.perf_counter() - started
    group = open_group(path)
    wrong = 0
    for number, name in enumerate(MATRICES):
        array = stored_array(path, name, group[name])
        for start in range(0, len(expected), run.layout.block_rows):
            block = array.bits((slice(start, start + run.layout.block_rows),))
            for row, bits in enumerate(block, start):
                wrong += google_crc32c.value(bits.tobytes()) != expected[row][number]
    rows = [[f"{at:.0f}", f"{count:,}", f"{memory / 2**20:,.0f}"] for at, count, memory in looks]
    text = table("A producer faster than the writer", ["s", "rows", "resident MiB"], rows)
    text += (
        f"\n{len(expected):,} rows, {taken / 1e9:.1f} GB in {seconds:.0f} s "
        f"({taken / seconds / 1e6:,.0f} MB/s), of which the producer waited {waited:.0f} s; "
        f"{threads} encoding threads; planned memory {planned / 2**20:,.0f} MiB.\n"
        f"Read again: {group['W'].shape[0]:,} rows, {wrong} of "
        f"{len(expected) * len(MATRICES):,} matrices differ.\n"
    )
    save("stress", text, {"machine": machine(), "looks": looks, "wrong": wrong})
    shutil.rmtree(path)


if __name__ == "__main__":
    main()
