"""Bytes on disk of whole runs, compared with the notebooks' files of the same steps.

python benchmarks/size.py [RUN.zarr …], by default the 200 steps of Wordybird of `history.py`

The notebooks write every tensor of every step in its native type into one safetensors file. Its
size follows from the shapes: 1,316 MB for 10,000 steps of Lil Gatsby and 5.19 GB for 200 steps of
Wordybird.
"""

from __future__ import annotations

import argparse

from measure import cache, machine, save, table

from trajstore.store.reading.run_info import information


def main() -> None:
    """Print a table of the arrays of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="*", default=[str(cache() / "wordybird-200" / "run.zarr")])
    rows: list[list[str]] = []
    results = {"machine": machine()}
    for path in parser.parse_args().run:
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
