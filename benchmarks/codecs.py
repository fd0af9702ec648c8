"""Speed and ratio of candidate codecs in one encoding thread, on real histories.

python benchmarks/codecs.py [--gatsby RUN.zarr]
python benchmarks/codecs.py --gradients RUN.zarr [--chunk 16 480]

These figures are the reason for the choice in `trajstore.codec.chunk`. Wordybird's rows come
from `history.py`; Gatsby's come from the given run, or from one that is recorded here. Speeds are
bytes of the native type per second of processor time, in one thread. `--gradients` compares forms
of the gradient instead, with rows from the start, the middle and the end of a run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from history import MATRICES, wordybird
from measure import cache, machine, save, table

from trajstore import threads
from trajstore.codec.chunk import Chain, Decoder
from trajstore.codec.delta import fold
from trajstore.codec.predicted_rows import coefficients_and_differences
from trajstore.store.reading.array_reader import stored_array
from trajstore.store.reading.open_group import open_group
from trajstore.values.native_types import native_type

NATIVE = native_type("bfloat16")


def lz4(level: int, blocksize: int = 1 << 17, **options: Any) -> Chain:
    """Return differences, compressed by lz4."""
    return Chain(
        native=NATIVE, kind="delta", compressor="lz4", level=level, blocksize=blocksize, **options
    )


def zstd(level: int) -> Chain:
    """Return differences, compressed by zstd."""
    return Chain(native=NATIVE, kind="delta", compressor="zstd", level=level)


def by_token(level: int) -> Chain:
    """Return differences token by token, with a shuffle of bytes."""
    return lz4(level, 1 << 16, token_first=True, shuffle="shuffle")


def predicted(compressor: Any, level: int, shuffle: Any, blocksize: int) -> Chain:
    """Return differences to a prediction over tokens."""
    return Chain(
        native=NATIVE,
        kind="predicted",
        compressor=compressor,
        level=level,
        shuffle=shuffle,
        blocksize=blocksize,
    )


GRADIENTS = [
    ("time, bits, lz4-5", lz4(5)),
    ("time, bits, zstd-3", zstd(3)),
    ("tokens, bits, lz4-5", predicted("lz4", 5, "bitshuffle", 1 << 17)),
    ("tokens, bits, zstd-1", predicted("zstd", 1, "bitshuffle", 1 << 18)),
    ("tokens, bits, zstd-3", predicted("zstd", 3, "bitshuffle", 1 << 18)),
    ("tokens, bytes, zstd-1", predicted("zstd", 1, "shuffle", 1 << 19)),
    ("tokens, bytes, zstd-3", predicted("zstd", 3, "shuffle", 1 << 19)),
    ("tokens, bytes, zstd-9", predicted("zstd", 9, "shuffle", 1 << 19)),
]
WORDYBIRD = [
    ("delta, bits, lz4-1", (16, 508), lz4(1)),
    ("delta, bits, lz4-5 (chosen)", (16, 508), lz4(5)),
    ("delta, bits, lz4-9", (16, 508), lz4(9)),
    ("delta, bits, lz4-9, blocks left to Blosc", (16, 1_006), lz4(9, 0)),
    ("delta, bits, lz4-9", (8, 1_006), lz4(9)),
    ("delta, bits, lz4-9", (32, 254), lz4(9)),
    ("delta, bytes, lz4-5", (16, 508), lz4(5, shuffle="shuffle")),
    ("delta, bytes, token first, lz4-5", (8, 1_006), by_token(5)),
    ("delta, bytes, token first, lz4-5 (chosen for W)", (8, 762), by_token(5)),
    ("delta, bytes, token first, lz4-9", (8, 762), by_token(9)),
    ("delta, bytes, token first, lz4-9", (16, 508), by_token(9)),
    ("delta, bits, zstd-1", (16, 508), zstd(1)),
]
GATSBY = [
    ("delta, bits, zstd-1", (256, 128), zstd(1)),
    ("delta, bits, zstd-3 (chosen)", (256, 128), zstd(3)),
    ("delta, bits, zstd-3", (64, 128), zstd(3)),
    ("delta, bits, lz4-9", (256, 128), lz4(9)),
]


def main() -> None:
    """Print a table for each history."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gatsby", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gradients", type=Path)
    parser.add_argument("--chunk", type=int, nargs=2, default=(16, 480))
    options = parser.parse_args()
    if options.gradients:
        compare_gradients(options.gradients, options.chunk, options.rounds)
        return
    text = ""
    results: dict[str, Any] = {"machine": machine()}
    for title, candidates, source in (
        ("Wordybird", WORDYBIRD, _wordybird),
        ("Gatsby", GATSBY, lambda: _gatsby(options.gatsby)),
    ):
        history = source()
        rows = []
        for name, shape, chain in candidates:
            facts = _measure(history, shape, chain, options.rounds)
            results[f"{title}: {name}, {shape[0]} × {shape[1]}"] = facts
            rows.append(
                [
                    name,
                    f"{shape[0]} × {shape[1]:,}",
                    *(f"{facts[what] / 1e6:,.0f}" for what in ("encode", "decode")),
                    *(f"{facts[what]:.2f}" for what in ("ratio", *MATRICES)),
                ]
            )
            print(*rows[-1], sep="  ", flush=True)
        columns = ["candidate", "chunk (step × token)", "encode MB/s", "decode MB/s", "ratio"]
        text += table(f"One encoding thread, rows of {title}", [*columns, *MATRICES], rows) + "\n"
    save("codecs", text, results)


def compare_gradients(run: Path, chunk: tuple[int, int], rounds: int) -> None:
    """Print a table of the forms of the gradient, for the start, the middle and the end."""
    threads._ENOUGH = 0  # loops are compiled from the start, if numba is installed
    rows, tokens = chunk
    array = stored_array(run, "grad", open_group(run)["grad"])
    steps, all_tokens, hidden = array.shape
    places = [t * (all_tokens // tokens - 1) // 7 * tokens for t in range(8)]
    history = {
        f"steps {first} to {first + rows - 1}": np.concatenate(
            [
                array.bits((slice(first, first + rows), slice(at, at + tokens)))
                for at in sorted(set(places))
            ],
            axis=1,
        )
        for first in (1, (steps - rows) // 2, steps - rows)
    }
    lines, results = [], {}
    for name, chain in GRADIENTS:
        facts = results[name] = _measure(history, chunk, chain, rounds)
        speeds = (f"{facts[what] / 1e6:,.0f}" for what in ("encode", "decode"))
        lines.append([name, *speeds, *(f"{facts[what]:.2f}" for what in ("ratio", *history))])
        print(*lines[-1], sep="  ", flush=True)
    small = dict(GRADIENTS)["tokens, bytes, zstd-1"]
    lines.append(["tokens, bytes, zstd-1, coefficients along steps", "–", "–", "–"])
    for bits in history.values():
        size = 0
        for at in range(0, bits.shape[1], tokens):
            made = coefficients_and_differences(bits[:, at : at + tokens], NATIVE)
            assert made is not None
            along = np.empty_like(made[0])
            fold(made[0], along)
            size += sum(len(small.compress(each)) for each in (along, made[1]))
        lines[-1].append(f"{bits.nbytes / size:.2f}")
    title = f"Gradients of {run.stem}, chunks of {rows} × {tokens} × {hidden}"
    columns = ["differences", "encode MB/s", "decode MB/s", "ratio", *history]
    save("gradients", table(title, columns, lines), {"machine": machine()} | results)


def _wordybird() -> dict[str, np.ndarray]:
    # Early, middle and late rows; live and dead tokens.
    return {
        name: np.concatenate([bits[at : at + 32, :8_048] for at in (1, 80, 160)])
        for name, bits in wordybird().items()
    }


def _gatsby(run: Path | None) -> dict[str, np.ndarray]:
    if run is None:
        from trajstore import trainers

        run = cache() / "gatsby-2000.zarr"
        if not run.exists():
            trainers.record(trainers.preset("gatsby").with_values(["training.steps=2000"]), run)
    group = open_group(run)
    history = {}
    for name in MATRICES:
        array = stored_array(run, name, group[name])
        history[name] = np.concatenate(
            [array.bits((slice(at, at + 256),)) for at in (1, 800, array.shape[0] - 256)]
        )
    return history


def _measure(
    history: dict[str, np.ndarray],
    shape: tuple[int, int],
    chain: Chain,
    rounds: int,
) -> dict[str, float]:
    facts: dict[str, float] = {}
    packed_bytes = native_bytes = 0
    best = {"encode": 0.0, "decode": 0.0}
    for name, bits in history.items():
        chunks = [
            bits[row : row + shape[0], token : token + shape[1]]
            for row in range(0, len(bits) - shape[0] + 1, shape[0])
            for token in range(0, bits.shape[1] - shape[1] + 1, shape[1])
        ]
        size = sum(chunk.nbytes for chunk in chunks)
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        for _ in range(rounds):
            start = time.thread_time()
            packed = [chain.encode(chunk, chunk.shape) for chunk in chunks]
            seconds["encode"].append(time.thread_time() - start)
            window = tuple(slice(0, length) for length in chunks[0].shape)
            decoder = Decoder(chain, chunks[0].shape)
            out = np.empty(chunks[0].shape, np.float32)
            start = time.thread_time()
            for data in packed:
                decoder.decode(data, window, out)
            seconds["decode"].append(time.thread_time() - start)
        facts[name] = size / sum(map(len, packed))
        packed_bytes += sum(map(len, packed))
        native_bytes += size
        for key, values in seconds.items():
            best[key] += min(values)
    facts["ratio"] = native_bytes / packed_bytes
    return facts | {key: native_bytes / value for key, value in best.items()}


if __name__ == "__main__":
    main()
