"""The encoding ``compact`` of a new run: the rule of its computed arrays, if there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from trajstore.codec.computed_rows import GRADIENT, VECTOR_RATES
from trajstore.errors import InvalidArgument
from trajstore.values.native_types import native_type
from trajstore.values.optimizer_rule import VECTORS, OptimizerRule, VectorRule

logger = logging.getLogger(__name__)


def check_encoding(encoding: str, *, shared: bool) -> None:
    """Raise an error unless a new run can have the encoding.

    Parameters
    ----------
    encoding : str
    shared : bool
        True if several processes write the run.

    Raises
    ------
    InvalidArgument
        If several processes cannot write it.
    """
    if encoding == "compact" and shared:
        raise InvalidArgument(
            "encoding: got 'compact' for a run that several processes write; use 'delta', and "
            "export the run afterwards with encoding='compact'"
        )


def compact_rule(
    attributes: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    on_note: Callable[[str], None] | None = None,
) -> OptimizerRule | None:
    """Rule with which a run of the encoding ``compact`` computes W and the moments.

    None if it stores them as differences. A note then states the reason.

    Parameters
    ----------
    attributes : mapping, optional
        Attributes of the root. ``optimizer`` and ``recording`` are used.
    variables : mapping of str to str
        Native type of each variable.
    on_note : callable, optional
        Called with the note (default: log it).
    """
    try:
        return _rule(attributes or {}, variables)
    except InvalidArgument as error:
        _note(f"W and the moments are stored as differences, not computed: {error}", on_note)
        return None


def vector_rule(
    attributes: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    on_note: Callable[[str], None] | None = None,
) -> VectorRule | None:
    """Rule with which a run computes the vectors of all other parameters, as `compact_rule`.

    None, without a note, if the run does not hold them.
    """
    if VECTORS["W"] not in variables:
        return None
    try:
        rule = VectorRule.of(attributes or {})
        _check((*rule.state, VECTORS[GRADIENT]), VECTOR_RATES[:2], attributes or {}, variables)
    except InvalidArgument as error:
        names = f"{VECTORS['W']} and its moments"
        _note(f"{names} are stored as differences, not computed: {error}", on_note)
        return None
    return rule


def _note(note: str, on_note: Callable[[str], None] | None) -> None:
    report = on_note or partial(logger.warning, "%s")
    report(note)


def _rule(attributes: Mapping[str, Any], variables: Mapping[str, str]) -> OptimizerRule:
    optimizer = attributes.get("optimizer") or {}
    rule = OptimizerRule.of(optimizer)
    if optimizer["hyperparameters"].get("rounding", "nearest") != "nearest":
        raise InvalidArgument(f"the optimizer {optimizer['class']!r} rounds at random")
    _check((*rule.state, GRADIENT), ("lr",), attributes, variables)
    return rule


def _check(
    arrays: Collection[str],
    rates: Collection[str],
    attributes: Mapping[str, Any],
    variables: Mapping[str, str],
) -> None:
    if missing := [name for name in (*arrays, *rates) if name not in variables]:
        raise InvalidArgument(f"the run does not hold {', '.join(missing)}")
    if wide := [name for name in arrays if native_type(variables[name]).itemsize > 4]:
        raise InvalidArgument(f"{', '.join(wide)} are float64")
    if (every := (attributes.get("recording") or {}).get("every", 1)) != 1:
        raise InvalidArgument(f"the run is recorded every {every} steps")
