"""Bytes on disk of runs, compared with their native types, for each variable and type of weights.

python benchmarks/size.py [--steps N] [RUN.zarr …]

Without a run, trains Lil Gatsby in bfloat16 and in float32, and exports both with `compact`. An
update changes most of the 24 bits of a float32 weight, and few of the 8 bits of a bfloat16 one.
"""

from __future__ import annotations

import argparse

from measure import cache, machine, save, table

from trajstore import export
from trajstore.store.reading.run_info import information
from trajstore.trainers import preset, record


def gatsby(dtype: str, steps: int) -> list[str]:
    """Return the paths of two runs of Lil Gatsby, with `delta` and with `compact`."""
    delta, compact = (
        cache() / f"gatsby-{dtype}-{steps}-{encoding}.zarr" for encoding in ("delta", "compact")
    )
    changes = [f"training.steps={steps}", f"model.dtype={dtype}"]
    record(preset("gatsby").with_values(changes), delta, resume=True)
    if not compact.exists():
        export(delta, compact, encoding="compact")
    return [str(delta), str(compact)]


def main() -> None:
    """Print a table of the arrays of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="*")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    types = "bfloat16", "float32"
    runs = options.run or [path for dtype in types for path in gatsby(dtype, options.steps)]
    rows: list[list[str]] = []
    results = {"machine": machine()}
    for path in runs:
        facts = information(path)
        results[path] = facts
        arrays = {name: facts["arrays"][name] for name in sorted(facts["arrays"])} | {"all": facts}
        for name, array in arrays.items():
            if array["bytes_native"] < 100_000:
                continue
            rows.append(
                [
                    path.rpartition("/")[2],
                    f"{facts['committed_rows']:,}",
                    facts["encoding"],
                    name,
                    f"{array['bytes_native'] / 1e6:,.1f}",
                    f"{array['bytes_on_disk'] / 1e6:,.1f}",
                    f"{array['ratio']:.2f}",
                ]
            )
    columns = ["run", "rows", "encoding", "array", "native MB", "on disk MB", "ratio"]
    save("size", table("Bytes on disk", columns, rows), results)


if __name__ == "__main__":
    main()
