"""Several processes that train one model together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["run_together"]


def run_together(count: int, program: str, folder: Path, *arguments: object) -> None:
    """Run a program in so many processes that can join one group, and insist that all end well."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(program))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(count):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(errors)
