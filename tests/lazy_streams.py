"""`torch.cuda` on the CPU, with streams that run as late as their waits allow."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Streams:
    """Streams of one device, of which one may be lazy: it works only when something waits for it.

    Parameters
    ----------
    lazy : {'training', 'copying', 'none'}
    without : {'wait_event', 'wait_stream', 'synchronize'}, optional
        Kind of wait that has no effect.
    """

    def __init__(self, lazy: str, without: str | None = None) -> None:
        self.lazy, self.without = lazy, without
        self.lock = threading.RLock()  # a second thread waits for events
        self.released = threading.Event()
        self.training = self.now = Stream(self, "training")

    def Stream(self, device: Any) -> Stream:
        return Stream(self, "copying")

    def Event(self, *, blocking: bool) -> Event:
        assert blocking  # else the thread that waits keeps a core busy
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name
        self.work: list[Callable[[], object] | None] = []

    def add(self, work: Callable[[], object]) -> None:
        with self.streams.lock:
            self.work.append(work)
            if self.name != self.streams.lazy:
                self.run(len(self.work))

    def run(self, count: int) -> None:
        """Run what is left of the first pieces of work."""
        with self.streams.lock:
            for place in range(count):
                work, self.work[place] = self.work[place], None
                if work is not None:
                    work()

    def wait_event(self, event: Event) -> None:
        if self.streams.without != "wait_event":
            self.add(event.reach)

    def wait_stream(self, other: Stream) -> None:
        if self.streams.without != "wait_stream":
            event = Event(self.streams)
            event.record(other)
            self.add(event.reach)


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record(self, stream: Stream | None = None) -> None:
        self.of = stream or self.streams.now
        self.count = len(self.of.work)

    def reach(self) -> None:
        self.of.run(self.count)

    def synchronize(self) -> None:
        self.streams.released.wait()
        if self.streams.without != "synchronize":
            self.reach()


class OnDevice(torch.Tensor):
    """A tensor that names cuda as its device. Only the work of a stream fills it."""

    streams: Streams
    device = torch.device("cuda")  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_copy_:
            return [place.copy_(source) for place, source in zip(*args, strict=True)]
        with torch._C.DisableTorchFunctionSubclass():
            tensor = func(*args, **(kwargs or {}))
        is_view = func in (torch.Tensor.__getitem__, torch.Tensor.view)
        return tensor.as_subclass(cls) if is_view else tensor

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> OnDevice:  # type: ignore[override]
        plain, values = self.as_subclass(torch.Tensor), source.as_subclass(torch.Tensor)
        self.streams.now.add(lambda: plain.copy_(values))
        return self


class LazyTorch:
    """The module torch, with these streams. Memory that nothing has filled holds 255s."""

    def __init__(self, streams: Streams) -> None:
        self.cuda = OnDevice.streams = streams
        self.pinned = 0  # bytes, with those that the allocator adds

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, pin_memory: bool = False, **_: Any) -> OnDevice:
        if pin_memory:
            self.pinned += next(2**n for n in itertools.count() if 2**n >= size)
        return torch.full((size,), 255, dtype=torch.uint8).as_subclass(OnDevice)
