"""Several processes that train one model together."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import traceback
from pathlib import Path

from forked_processes import processes

_SECONDS = 120


def run_together(count: int, program: str, folder: Path, *arguments: object) -> None:
    """Run a program in so many processes that can join one group, and insist that all end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = [folder / f"error{rank}.txt" for rank in range(count)]
    group = []
    for rank, error in enumerate(errors):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [textwrap.dedent(program), *map(str, arguments)]
        group.append(processes.Process(target=_run, args=(words, environment, error)))
        group[-1].start()
    for process in group:
        process.join(_SECONDS)
        process.kill()
        process.join()
    told = "\n".join(error.read_text() for error in errors if error.exists())
    assert [process.exitcode for process in group] == [0] * count, told


def _run(words: list[str], environment: dict[str, str], error: Path) -> None:
    os.environ.update(environment)
    program, *sys.argv[1:] = words
    try:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        error.write_text(traceback.format_exc())
        raise
