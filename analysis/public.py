"""Decorator of the public functions of the analysis.

A decorated function is a name of `trajstore.analysis` and a method of ``ds.traj``. ``make names``
writes all names into ``analysis/names.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, TypeVar

from trajstore.analysis.names import MODULES

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Public = Annotated[T, "a name of trajstore.analysis"]
"""Type of a constant that is public, such as ``CAUSES: Public[tuple[str, ...]]``."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A public function of the analysis.

    Attributes
    ----------
    function : callable
    each_run : bool
        True if its method applies it to each of several runs; False if it takes them together.
    is_method : bool
        False for a name that the accessor defines itself, or that is no method.
    """

    function: Callable[..., Any]
    each_run: bool = True
    is_method: bool = True


FUNCTIONS: dict[str, Function] = {}
"""Public functions by name, of the modules that have been imported."""


def public(*, each_run: bool = True, is_method: bool = True) -> Callable[[F], F]:
    """Decorator that adds a function to `FUNCTIONS`.

    Parameters
    ----------
    each_run, is_method : bool
        Attributes of `Function`.
    """

    def publish(function: F) -> F:
        FUNCTIONS[function.__name__] = Function(
            function=function, each_run=each_run, is_method=is_method
        )
        return function

    return publish


def import_functions() -> None:
    """Import the modules of all public functions."""
    for module in dict.fromkeys(MODULES.values()):
        import_module(module)
