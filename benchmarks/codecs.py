"""What one encoding thread does with real histories: speed and ratio of the candidates.

python benchmarks/codecs.py [--gatsby RUN.zarr]

The figures behind the choice in `trajstore.encoding`. Wordybird's rows are those of
`history.py`; Gatsby's are of a recorded run, which this makes if none is given. Speeds are bytes of
the native type a second of processor time, of one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from history import MATRICES, wordybird
from measure import cache, machine, save, table

from trajstore.bits import native_type
from trajstore.encoding import Chain
from trajstore.group import open_group
from trajstore.stored import stored_array

NATIVE = native_type("bfloat16")
CANDIDATES = [
    ("delta", "lz4", level) for level in (1, 5, 9)
] + [("delta", "zstd", level) for level in (1, 3)] + [
    ("step-last", "lz4", 9), ("step-last", "zstd", 1), ("step-last", "zstd", 3),
    ("plain", "zstd", 1),
]  # fmt: skip


def main() -> None:
    """Print a table for each history."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gatsby", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    text = ""
    results: dict[str, Any] = {"machine": machine()}
    for title, shapes, source in (
        ("Wordybird", [(16, 1_006), (16, 503), (32, 503), (8, 2_012)], _wordybird),
        ("Gatsby", [(256, 128), (64, 128)], lambda: _gatsby(options.gatsby)),
    ):
        history = source()
        rows = []
        for shape in shapes:
            # All candidates on the chosen shape, and the chosen one on all shapes.
            chosen = ("delta", "lz4", 9) if title == "Wordybird" else ("delta", "zstd", 3)
            for candidate in CANDIDATES if shape == shapes[0] else [chosen]:
                facts = _measure(history, shape, candidate, options.rounds)
                results[f"{title} {shape} {candidate}"] = facts
                rows.append(
                    [
                        f"{shape[0]} × {shape[1]:,}",
                        " ".join(map(str, candidate)).replace("lz4 ", "lz4-").replace(
                            "zstd ", "zstd-"
                        ),
                        f"{facts['encode'] / 1e6:,.0f}",
                        f"{facts['decode'] / 1e6:,.0f}",
                        f"{facts['ratio']:.2f}",
                        *(f"{facts[name]:.1f}" for name in MATRICES),
                    ]
                )  # fmt: skip
                print(*rows[-1], sep="  ", flush=True)
        columns = ["chunk (step × token)", "candidate", "encode MB/s", "decode MB/s", "ratio"]
        text += table(f"One encoding thread, rows of {title}", [*columns, *MATRICES], rows) + "\n"
    save("codecs", text, results)


def _wordybird() -> dict[str, np.ndarray]:
    # Early, middle and late rows; live and dead tokens.
    return {
        name: np.concatenate([bits[at : at + 32, :8_048] for at in (1, 80, 160)])
        for name, bits in wordybird().items()
    }


def _gatsby(run: Path | None) -> dict[str, np.ndarray]:
    if run is None:
        import trainers

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
    candidate: tuple[Any, str, int],
    rounds: int,
) -> dict[str, float]:
    kind, compressor, level = candidate
    chain = Chain(native=NATIVE, kind=kind, compressor=compressor, level=level)
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
            out = np.empty(chunks[0].shape, np.float32)
            start = time.thread_time()
            for data, chunk in zip(packed, chunks, strict=True):
                chain.decode(data, chunk.shape, window, out)
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
