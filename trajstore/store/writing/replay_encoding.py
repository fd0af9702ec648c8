"""The encoding ``replay`` of a new run: by which rule its arrays are computed, or why by none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trajstore.codec.computed_rows import GRADIENT
from trajstore.errors import InvalidArgument
from trajstore.schema import ENCODINGS
from trajstore.values.native_types import native_type
from trajstore.values.optimizer_rule import OptimizerRule

__all__ = ["replay_rule"]

logger = logging.getLogger(__name__)


def replay_rule(
    encoding: str,
    attributes: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    *,
    shared: bool,
) -> OptimizerRule | None:
    """Rule by which a run computes W and the moments; None if it stores them.

    A run of the encoding ``replay`` without a rule stores them as differences, with a warning.

    Parameters
    ----------
    encoding : str
    attributes : mapping, optional
        Of the root; ``optimizer`` is what matters.
    variables : mapping of str to str
        Native type of each variable.
    shared : bool
        Whether several processes write the run.

    Raises
    ------
    InvalidArgument
        If the encoding is unknown, or several processes cannot write it.
    """
    if encoding not in ENCODINGS:
        raise InvalidArgument(f"encoding: got {encoding!r}, expected {' or '.join(ENCODINGS)}")
    if encoding != "replay":
        return None
    if shared:
        raise InvalidArgument(
            "encoding: got 'replay' for a run that several processes write; use 'delta', and "
            "export the run afterwards with --encoding replay"
        )
    try:
        rule = OptimizerRule.of((attributes or {}).get("optimizer"))
    except InvalidArgument as error:
        _warn(str(error))
        return None
    missing = [name for name in (*rule.state, GRADIENT, "lr") if name not in variables]
    if missing:
        _warn(f"the run does not hold {', '.join(missing)}")
        return None
    wide = [name for name in (*rule.state, GRADIENT) if native_type(variables[name]).itemsize > 4]
    if wide:
        _warn(f"{', '.join(wide)} are float64")
        return None
    return rule


def _warn(reason: str) -> None:
    logger.warning("W and the moments are stored, not computed: %s", reason)
