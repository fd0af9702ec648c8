"""Speed of writing rows to an object store: S3 on loopback, alternating with a local folder.

The server is moto, a Python process on the same machine that keeps objects in memory. A third
contender only puts the same objects, to measure the server alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from history import MATRICES, record, wordybird
from measure import alternate, cache, machine, save, table

from trajstore.store.storage.remote_path import REMOTE_REQUESTS, RemotePath, location
from trajstore.threads import in_parallel

RUN = "s3://bucket/run.zarr"
LOCAL, REMOTE, PUT = "local folder", "S3 on loopback", "the same objects, put only"


@contextmanager
def server() -> Iterator[None]:
    """Run an S3 server with an empty bucket, at the address in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }
    try:
        while process.poll() is None:
            try:
                request = urllib.request.Request(f"{address}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                break
            except urllib.error.URLError:
                time.sleep(0.2)  # the server does not report when it is ready
        yield
    finally:
        process.terminate()
        process.wait()


def put_only(run: Path) -> None:
    """Put every object of a run, with as many requests at a time as a writer."""
    far = location(RUN)
    files = [file for file in run.rglob("*") if file.is_file()]
    jobs = [
        partial((far / file.relative_to(run).as_posix()).write_bytes, file.read_bytes())
        for file in files
        if isinstance(far, RemotePath)
    ]
    list(in_parallel(jobs, REMOTE_REQUESTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--first", type=int, default=40, help="first row of the history")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    span = slice(options.first, options.first + options.rows)
    history = wordybird()
    rows = {name: np.array(history[name][span]) for name in MATRICES}
    size = sum(array.nbytes for array in rows.values())
    folder = cache() / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    local = folder / "run.zarr"

    def taken(work: Callable[[], None]) -> tuple[float, dict[str, Any]]:
        work()
        return size, {}

    def empty(name: str) -> None:
        if name != LOCAL:
            far = location(RUN)
            assert isinstance(far, RemotePath)
            far.remove_below()

    facts = machine()
    with server():
        results = alternate(
            {
                LOCAL: partial(taken, partial(record, local, rows, overwrite=True)),
                REMOTE: partial(taken, partial(record, RUN, rows, overwrite=True)),
                PUT: partial(taken, partial(put_only, local)),
            },
            options.rounds,
            memory=size,
            after=empty,
        )
    shutil.rmtree(folder)
    seconds = {name: measured.seconds for name, measured in results.items()}

    def ratios(name: str) -> str:
        """Return the ratios of the rates, round by round."""
        pairs = zip(seconds[LOCAL], seconds[name], strict=True)
        found = sorted(local / other for local, other in pairs)
        return f"{statistics.median(found):.2f} ({found[0]:.2f}–{found[-1]:.2f})"

    text = table(
        f"Ingest to S3 on loopback: {options.rows} rows of Wordybird, {size / 1e6:,.0f} MB",
        ["target", "MB/s", "ratio to a local folder"],
        [[name, f"{results[name].rate / 1e6:,.0f}", ratios(name)] for name in results],
    )
    save("object-store", text, {"machine": facts, "seconds": seconds})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
