"""What a fork's provenance says of the optimizers that made its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["steps_of_another_optimizer"]


def steps_of_another_optimizer(attributes: Mapping[str, Any]) -> int:
    """Last step that was taken with another optimizer than the run's attributes say; 0 for none.

    Parameters
    ----------
    attributes : mapping
        Of the root of a run. Of a fork of a fork, all forkings are looked at.
    """
    provenance = attributes.get("provenance")
    fork = provenance.get("fork") if isinstance(provenance, Mapping) else None
    last, common = 0, None
    while isinstance(fork, Mapping):
        step = fork.get("step")
        if not isinstance(step, int):
            break
        # Of what was forked before, only the steps until here are in the run.
        common = step if common is None else min(common, step)
        if fork.get("optimizer") is not None:
            last = max(last, common)
        fork = fork.get("forked_before")
    return last
