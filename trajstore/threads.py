"""Handing work to threads, also when the interpreter is ending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["submit"]

T = TypeVar("T")


def submit(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Have a pool do something; do it here, if the interpreter is ending and pools take no more."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done
