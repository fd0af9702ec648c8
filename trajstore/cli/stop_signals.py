"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # importing typing would dominate the import time here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Record the first stop signal; a second one ends the process at once.

    A loop calls the object after each step and stops when it returns True. Before `begin`, a
    signal raises `SystemExit`, because no step is in progress. Use it as a context manager in the
    main thread.

    Attributes
    ----------
    number : int or None
        Number of the received signal.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._begun = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __call__(self) -> bool:
        """Return True if a signal was received."""
        return self.number is not None

    def begin(self) -> None:
        """From now on, delay a stop until the end of the current step."""
        self._begun = True

    def check(self) -> None:
        """Raise `KeyboardInterrupt` or `SystemExit` if a signal was received.

        An exception raised by the signal itself could be lost: Python ignores those in callbacks.
        """
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is not None:
            raise SystemExit(self.exit_code)

    @property
    def exit_code(self) -> int:
        """Exit code of a process that a signal ended."""
        return 128 + (self.number or 0)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # An ignored signal (background job of a script) stays ignored. None: not set by Python.
            if handler not in (signal.SIG_IGN, None):
                self._before[number] = handler
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        if not self._begun:
            raise SystemExit(self.exit_code)
        _write(b"Stopping after this step; a second signal stops at once.\n")


def stop_at_once() -> None:
    """Make Ctrl-C print one sentence and end the process, until `working` is called."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def working() -> None:
    """Make Ctrl-C raise `KeyboardInterrupt` from now on, so that callers can clean up."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    # An exception during an import could be caught or replaced by the imported module.
    _write(b"trajstore: stopped by Ctrl-C\n")
    os._exit(128 + number)


def _write(sentence: bytes) -> None:
    """Write to the file descriptor: interrupted code may be writing to the stream."""
    # Importing contextlib would double the import time of this module.
    try:  # noqa: SIM105
        os.write(2, sentence)
    except OSError:  # standard error may be closed
        pass
