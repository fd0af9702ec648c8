"""`trajstore record` as a sweep starts it: it stops when its standard input ends.

Standard input is a pipe that the sweep holds open. The pipe closes when the sweep ends, also by
SIGKILL. The run then commits and stops, as after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading

_STANDARD_INPUT = 0


def main() -> None:
    """Run `trajstore` with the arguments of this process."""
    threading.Thread(target=_stop_at_end, name="trajstore-sweep", daemon=True).start()
    from trajstore.cli.main import main as trajstore

    trajstore(prog_name="trajstore")


def _stop_at_end() -> None:
    while os.read(_STANDARD_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
