"""Writers that share in a run, each in a thread of its own in place of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from trajstore.store.writing.resumed_run import TokenShare

Result = TypeVar("Result")


class Meeting:
    """Where so many threads exchange what they say."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._said: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=20)

    def share(self, number: int) -> TokenShare:
        """That of one of them."""

        def exchange(value: Any) -> list[Any]:
            self._said[number] = value
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return TokenShare(number=number, count=self.count, exchange=exchange)


def all_together(count: int, work: Callable[[TokenShare], Result]) -> list[Result | BaseException]:
    """What so many threads return that do the same with their shares, or what they raise."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, meeting.share(number)) for number in range(count)]
    return [future.exception() or future.result() for future in futures]
