"""The encoding ``replay`` of a new run: the rule of its computed arrays, if there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trajstore.codec.computed_rows import GRADIENT
from trajstore.errors import InvalidArgument
from trajstore.schema import ENCODINGS
from trajstore.values.native_types import native_type
from trajstore.values.optimizer_rule import OptimizerRule

__all__ = ["check_encoding", "replay_rule"]

logger = logging.getLogger(__name__)


def check_encoding(encoding: str, *, shared: bool = False) -> None:
    """Raise an error unless a new run can have the encoding.

    Parameters
    ----------
    encoding : str
    shared : bool
        True if several processes write the run.

    Raises
    ------
    InvalidArgument
        If the encoding is unknown, or several processes cannot write it.
    """
    if encoding not in ENCODINGS:
        raise InvalidArgument(f"encoding: got {encoding!r}, expected {' or '.join(ENCODINGS)}")
    if encoding == "replay" and shared:
        raise InvalidArgument(
            "encoding: got 'replay' for a run that several processes write; use 'delta', and "
            "export the run afterwards with --encoding replay"
        )


def replay_rule(
    attributes: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    on_note: Callable[[str], None] | None = None,
) -> OptimizerRule | None:
    """Rule with which a run of the encoding ``replay`` computes W and the moments.

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
        note = f"W and the moments are stored as differences, not computed: {error}"
        if on_note is None:
            logger.warning("%s", note)
        else:
            on_note(note)
        return None


def _rule(attributes: Mapping[str, Any], variables: Mapping[str, str]) -> OptimizerRule:
    optimizer = attributes.get("optimizer") or {}
    rule = OptimizerRule.of(optimizer)
    if optimizer["hyperparameters"].get("rounding", "nearest") != "nearest":
        raise InvalidArgument(f"the optimizer {optimizer['class']!r} rounds at random")
    missing = [name for name in (*rule.state, GRADIENT, "lr") if name not in variables]
    if missing:
        raise InvalidArgument(f"the run does not hold {', '.join(missing)}")
    wide = [name for name in (*rule.state, GRADIENT) if native_type(variables[name]).itemsize > 4]
    if wide:
        raise InvalidArgument(f"{', '.join(wide)} are float64")
    every = (attributes.get("recording") or {}).get("every", 1)
    if every != 1:
        raise InvalidArgument(f"the run is recorded every {every} steps")
    return rule
