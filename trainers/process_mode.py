"""Modes of the process on which the bits of a training depend, as recorded and set again.

The optimizer's step alone depends on `flush_denormal` and on the number of threads. Forward and
backward passes depend on all of them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import backends

from trajstore.errors import RecordingError

_GRAIN = 32_768  # elements of an operation for each thread of torch
_APART = 1024
_LEAST_NORMAL = 2.0**-126

_MAIN, _OTHERS = "main thread", "other threads"


def _flushes() -> bool | str:
    """Return whether threads of torch replace subnormal numbers by 0: True if all of them do."""
    threads = torch.get_num_threads()
    size = threads * _GRAIN if threads > 1 else 1
    numbers = torch.zeros(size, dtype=torch.float32, device="cpu")
    numbers[::_APART] = _LEAST_NORMAL
    kept = (numbers * 0.5)[::_APART].view(torch.int32) != 0  # a flushing thread also reads 0
    main, *others = (not each.all() for each in kept.view(threads, -1))
    if others and any(others) != main:
        return _MAIN if main else _OTHERS
    return main


def _flush(value: bool | str) -> None:
    """Let threads of torch replace subnormal numbers by 0, or keep them.

    torch sets the calling thread. The others have what that thread had when they were started, so
    they are ended; the next operation starts new ones.
    """
    if _flushes() != value and torch.get_num_threads() > 1:
        end_threads = ctypes.CDLL(None).omp_pause_resource_all
        torch.set_flush_denormal(value in (True, _OTHERS))
        end_threads(_PAUSE_HARD)
        _flushes()
    torch.set_flush_denormal(value in (True, _MAIN))


_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set that of one backend
        return None


def _flag(place: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(getattr, place, name), functools.partial(setattr, place, name)


_MODES: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
    "flush_denormal": (False, _flushes, _flush),
    "default_dtype": (
        "float32",
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "deterministic": (
        0, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
    ),
    "float32_matmul_precision": (
        "highest", _matmul_precision, torch.set_float32_matmul_precision,
    ),
    "mkldnn": (True, *_flag(backends.mkldnn, "enabled")),
    "flash_sdp": (True, backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    "mem_efficient_sdp": (
        True, backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp,
    ),
    "cudnn_sdp": (True, backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
    "cudnn": (True, *_flag(backends.cudnn, "enabled")),
    "cudnn_deterministic": (False, *_flag(backends.cudnn, "deterministic")),
    "cudnn_benchmark": (False, *_flag(backends.cudnn, "benchmark")),
}  # fmt: skip
"""Value in a new process, function that returns it, and function that sets it."""


def process_modes() -> dict[str, Any]:
    """Return the modes that are not those of a new process, as JSON values."""
    return {
        name: value
        for name, (usual, get, _) in _MODES.items()
        if (value := get()) not in (usual, None)
    }


@contextmanager
def process_mode(threads: int | None, modes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Set the number of threads of torch on the CPU and the modes of the process, and put back.

    Parameters
    ----------
    threads : int, optional
        Default: no change.
    modes : mapping, optional
        As `process_modes` gives them: others are those of a new process. Default: no change.

    Raises
    ------
    RecordingError
        If the threads of this process cannot get a mode.
    """
    threads_before = torch.get_num_threads()
    # Before the number of threads changes: other threads may have another mode.
    present = {} if modes is None else {name: get() for name, (_, get, _) in _MODES.items()}
    torch.set_num_threads(threads or threads_before)
    changed: list[tuple[Callable[[Any], Any], Any]] = []
    try:
        for name, before in present.items():
            usual, get, put = _MODES[name]
            wanted = (modes or {}).get(name, usual)
            if before in (wanted, None):  # None: not known, so left as it is
                continue
            changed.append((put, before))
            with suppress(AttributeError, RuntimeError, TypeError, ValueError):
                put(wanted)
            if get() != wanted:
                raise RecordingError(
                    f"{name} is {before!r} in this process, and cannot be set to {wanted!r} as in "
                    "the recording; compute in a new process"
                )
        yield
    finally:
        torch.set_num_threads(threads_before)
        for put, before in reversed(changed):
            put(before)
