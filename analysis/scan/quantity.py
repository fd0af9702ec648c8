"""The decorator of a quantity: a function of a `Scan` that users call with a Dataset."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

import xarray as xr

from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import checks_types
from trajstore.populations import errors_about_rows, named_as_rows

P = ParamSpec("P")
R = TypeVar("R", bound=xr.DataArray | xr.Dataset)
F = TypeVar("F", bound=Callable[..., xr.DataArray | xr.Dataset])


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A quantity of a run.

    Attributes
    ----------
    function : callable
        The public function of a Dataset or a `Scan`, and options.
    alone : bool
        True if it is never computed together with others, because it requires its own options.
    across_runs : bool
        True if it is one quantity of several runs; else it has a value for each run.
    measures : tuple of str
        Measures of the change between rows that it needs with default options.
    only_native : bool
        True if it accepts only the native lattice of W.
    of_window : bool
        True if it describes only the rows of a window, such as a mean over them. By default a
        window selects from the values of the whole run.
    """

    function: Callable[..., xr.DataArray | xr.Dataset]
    alone: bool = False
    across_runs: bool = False
    measures: tuple[str, ...] = ()
    only_native: bool = False
    of_window: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options of the public function."""
        return tuple(inspect.signature(self.function).parameters)[1:]

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the options without a default."""
        parameters = inspect.signature(self.function).parameters
        return tuple(
            key for key in self.options if parameters[key].default is inspect.Parameter.empty
        )

    def kind_of(self, option: str) -> str:
        """Kind of values of an option: ``text``, ``numbers`` or ``whole numbers``."""
        types = _types_in(typing.get_type_hints(self.function)[option]) - {type(None)}
        if types == {int}:
            return "whole numbers"
        return "numbers" if types <= {int, float} else "text"

    def known(self, **options: Any) -> dict[str, Any]:
        """The given options that this quantity has."""
        return {name: value for name, value in options.items() if name in self.options}


def _types_in(hint: Any) -> set[Any]:
    """Types in a type hint; for a literal, the types of its values."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return {type(part) for part in parts}
    return set().union(*map(_types_in, parts)) if parts else {hint}


_REGISTERED: dict[str, Quantity] = {}


def every_quantity() -> dict[str, Quantity]:
    """All quantities by name, in the order of `Methods`, which imports their modules."""
    methods: Any = import_module("trajstore.analysis.methods")  # it imports this module
    return {name: _REGISTERED[name] for name in vars(methods.Methods) if name in _REGISTERED}


def quantities_of_one_pass() -> dict[str, Quantity]:
    """Quantities that can be computed together, in the order of lists."""
    return {
        name: quantity
        for name, quantity in every_quantity().items()
        if not (quantity.alone or quantity.across_runs)
    }


def takes_scan(
    function: Callable[Concatenate[Scan, P], R],
) -> Callable[Concatenate[xr.Dataset | Scan, P], R]:
    """Decorator that makes a function of a `Scan` accept a Dataset or a Scan.

    It also checks the types of the other arguments. For one parameter of a run, results and errors
    name its rows, not tokens. The public signature has a Dataset, ``ds``.
    """
    checked = checks_types(function)

    def prepared(ds: xr.Dataset | Scan, *arguments: P.args, **options: P.kwargs) -> R:
        scan = ds if isinstance(ds, Scan) else Scan(ds)
        with errors_about_rows(scan.ds):
            result = checked(scan, *arguments, **options)
        return result if scan is ds else named_as_rows(result, scan.ds)

    signature = inspect.signature(function)
    scan, *others = signature.parameters.values()
    ds = scan.replace(name="ds", annotation="xr.Dataset")
    hints = function.__annotations__.items()
    public: Any = functools.update_wrapper(prepared, function)
    public.__signature__ = signature.replace(parameters=[ds, *others])
    public.__annotations__ = {
        "ds": ds.annotation,
        **{name: hint for name, hint in hints if name != scan.name},
    }
    decorated: Callable[Concatenate[xr.Dataset | Scan, P], R] = public
    return decorated


def _windowed(
    function: Callable[Concatenate[Scan, P], R], of_window: bool
) -> Callable[Concatenate[Scan, P], R]:
    """The function extended to a `Scan` with a window, according to `Quantity.of_window`."""

    def windowed(scan: Scan, /, *arguments: P.args, **options: P.kwargs) -> R:
        if not scan.has_window:
            return function(scan, *arguments, **options)
        if of_window:
            return function(scan.of_window(), *arguments, **options)
        return scan.in_window(function(scan.without_window(), *arguments, **options))

    functools.update_wrapper(windowed, function)
    return windowed


def registered(**facts: Any) -> Callable[[F], F]:
    """Decorator of a public function that is a quantity.

    Parameters
    ----------
    **facts
        Attributes of `Quantity`.
    """

    def register(function: F) -> F:
        _REGISTERED[function.__name__] = Quantity(function=function, **facts)
        return function

    return register


def quantity(
    **facts: Any,
) -> Callable[[Callable[Concatenate[Scan, P], R]], Callable[Concatenate[xr.Dataset | Scan, P], R]]:
    """Decorator of a quantity of a `Scan`: combines `registered` and `takes_scan`.

    Parameters
    ----------
    **facts
        Attributes of `Quantity`.
    """

    def decorate(
        function: Callable[Concatenate[Scan, P], R],
    ) -> Callable[Concatenate[xr.Dataset | Scan, P], R]:
        windowed = _windowed(function, facts.get("of_window", False))
        return registered(**facts)(takes_scan(windowed))

    return decorate
