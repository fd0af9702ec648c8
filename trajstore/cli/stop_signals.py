"""Ctrl-C and SIGTERM as a request to stop, not as an end."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # of typing, whose import would take most of the time that this one takes
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self

__all__ = ["StopRequest", "stop_at_once", "working"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that a signal asked to stop; the second one ends the process at once.

    Called by whoever works in steps, after each of them: True when it is time to stop. Until
    `begin` there is nothing that could be finished, and a signal raises `SystemExit`. A context
    manager, for the main thread.

    Attributes
    ----------
    number : int or None
        Of the signal that came.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._begun = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __call__(self) -> bool:
        """Tell whether it is time to stop."""
        return self.number is not None

    def begin(self) -> None:
        """Have a signal wait for the end of a step from now on."""
        self._begun = True

    @property
    def exit_code(self) -> int:
        """What a process exits with that a signal ended."""
        return 128 + (self.number or 0)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # Ignored, as in the background of a script, it stays ignored; None is not Python's.
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
        _say(b"Stopping after this step; a second signal stops at once.\n")


def stop_at_once() -> None:
    """Have Ctrl-C end the process with a sentence: until something is done, until `working`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def working() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` from now on: there may be something to be tidied."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    # An exception in the middle of an import becomes whatever the imported makes of it.
    _say(b"trajstore: stopped by Ctrl-C\n")
    os._exit(128 + number)


def _say(sentence: bytes) -> None:
    """Write to standard error, not through a stream, which interrupted code may be writing to."""
    # contextlib would take as long to import as all that comes before it.
    try:  # noqa: SIM105
        os.write(2, sentence)
    except OSError:  # nobody may be listening any more
        pass
