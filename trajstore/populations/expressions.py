"""Select tokens by an expression over their coordinates. Expressions are never executed.

    token_count < quantile(token_count, 0.25) and not is_dead
    category(token_text) in ("Lu", "Ll") or token in (3, 14)

The syntax is a subset of Python: comparisons, ``and``, ``or``, ``not``, ``in``, numbers, texts and
lists of them. Names are coordinates along token, or populations. ``quantile(x, q)`` is over the
tokens of the Dataset. ``category(x)`` is the Unicode general category that all characters of a text
share, ignoring leading and trailing spaces, or ``mixed``. ``major(x)`` is its first letter, such as
``L`` for letters.
"""

from __future__ import annotations

import ast
import operator
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.nearest_name import did_you_mean
from trajstore.populations.masks import populations

Array = npt.NDArray[Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _category(text: str, letters: int) -> str:
    # A text that consists only of spaces has the category of a space.
    found = {unicodedata.category(character)[:letters] for character in text.strip(" ") or text}
    return found.pop() if len(found) == 1 else "mixed"


class _Expression:
    """One expression over the tokens of a Dataset.

    Parameters
    ----------
    ds : Dataset
    text : str
    """

    def __init__(self, ds: xr.Dataset, text: str) -> None:
        self.ds, self.text = ds, text
        names, groups = populations(ds)
        self._populations = dict(zip(names, groups, strict=True))

    def tokens(self) -> npt.NDArray[np.bool_]:
        """True for each selected token."""
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise InvalidArgument(
                f"got the population {self.text!r}, expected an expression such as "
                "'token_count < quantile(token_count, 0.25)', or an existing file"
            ) from error
        return self._truth(tree.body)

    def _refuse(self, node: ast.AST, expected: str, known: Iterable[str] = ()) -> InvalidArgument:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return InvalidArgument(
            f"got {part!r}{did_you_mean(part, known)} in the population {self.text!r}, expected "
            f"{expected}"
        )

    def _truth(self, node: ast.expr) -> npt.NDArray[np.bool_]:
        """The mask of an expression, bool (token)."""
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return np.asarray(join.reduce([self._truth(one) for one in node.values]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._truth(node.operand)
        if isinstance(node, ast.Compare):
            return self._compared(node)
        found = self._value(node)
        if not isinstance(found, np.ndarray) or found.dtype != bool:
            raise self._refuse(node, "a condition on each token")
        return found

    def _compared(self, node: ast.Compare) -> npt.NDArray[np.bool_]:
        result = np.ones(self.ds.sizes["token"], bool)
        left = self._value(node.left)
        per_token = isinstance(left, np.ndarray)
        for comparison, right_node in zip(node.ops, node.comparators, strict=True):
            if isinstance(comparison, ast.In | ast.NotIn):
                members = self._members(left, right_node)
                result &= members if isinstance(comparison, ast.In) else ~members
                continue
            if type(comparison) not in _COMPARISONS:
                raise self._refuse(node, "one of == != < <= > >= in, not in")
            right = self._value(right_node)
            if _is_text(left) != _is_text(right):
                raise self._refuse(node, "two numbers or two texts")
            result &= np.asarray(_COMPARISONS[type(comparison)](_exact(left), _exact(right)), bool)
            per_token |= isinstance(right, np.ndarray)
            left = right
        if not per_token:
            raise self._refuse(node, "a coordinate along token in the comparison")
        return result

    def _members(self, left: Any, node: ast.expr) -> npt.NDArray[np.bool_]:
        if not isinstance(node, ast.Tuple | ast.List) or not isinstance(left, np.ndarray):
            example = 'token_text in ("a", "e")' if _is_text(left) else "token in (1, 2)"
            raise self._refuse(node, f"a coordinate in a list of values, such as {example}")
        wanted = [self._value(one) for one in node.elts]
        if any(isinstance(one, np.ndarray) or _is_text(one) != _is_text(left) for one in wanted):
            raise self._refuse(node, "values of the same type as the coordinate")
        result = np.zeros(left.shape, bool)
        for one in wanted:
            result |= np.asarray(left == _exact(one), bool)
        return result

    def _value(self, node: ast.expr) -> Any:
        """A number, a text, or an array of either along token."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand)
            if _is_text(value) or np.asarray(value).dtype == bool:
                raise self._refuse(node, "a number after the minus")
            return -value
        if isinstance(node, ast.Name):
            return self._coordinate(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._called(node, node.func.id)
        raise self._refuse(
            node, "comparisons of coordinates, numbers and texts, with and, or, not, in"
        )

    def _coordinate(self, node: ast.Name) -> Array:
        known = {
            str(name): coordinate
            for name, coordinate in self.ds.coords.items()
            if coordinate.dims == ("token",)
        }
        if node.id in known:
            values = np.asarray(known[node.id].values)
            return values if values.dtype.kind in "biuf" else values.astype(object)
        if node.id in self._populations:
            return np.asarray(self._populations[node.id])
        expected = dict.fromkeys((*known, *self._populations))
        raise self._refuse(node, f"one of {', '.join(expected)}", expected)

    def _called(self, node: ast.Call, name: str) -> Any:
        values = [self._value(argument) for argument in node.args]
        if name == "quantile" and len(values) == 2:
            of, level = values
            if (
                not isinstance(of, np.ndarray)
                or of.dtype.kind not in "iuf"
                or isinstance(level, np.ndarray | str)
                or not 0 <= level <= 1
            ):
                raise self._refuse(node, "quantile(numbers of the tokens, q from 0 to 1)")
            return float(np.quantile(of, level)) if of.size else np.nan
        if name in ("category", "major") and len(values) == 1:
            if not isinstance(values[0], np.ndarray) or not _is_text(values[0]):
                raise self._refuse(node, f"{name}(texts of the tokens)")
            letters = 2 if name == "category" else 1
            return np.array([_category(text, letters) for text in values[0]], object)
        raise self._refuse(node, "quantile(x, q), category(x) or major(x)")


def _exact(value: Any) -> Any:
    """The value for a comparison. NumPy strips trailing NUL characters of its own texts."""
    return np.array(value, object) if isinstance(value, str) else value


def _is_text(value: Any) -> bool:
    return value.dtype == object if isinstance(value, np.ndarray) else isinstance(value, str)


def select_tokens(ds: xr.Dataset, expression: str) -> npt.NDArray[np.bool_]:
    """Tokens for which an expression over their coordinates holds.

    Parameters
    ----------
    ds : Dataset
        With the coordinates in the expression.
    expression : str
        See the module docstring for the syntax.

    Returns
    -------
    ndarray of bool, (token,)

    Raises
    ------
    InvalidArgument
        If the expression is invalid or contains an unknown name.
    """
    return _Expression(ds, expression).tokens()
