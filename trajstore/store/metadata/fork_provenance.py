"""Optimizers of a fork's steps, from its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def steps_of_another_optimizer(attributes: Mapping[str, Any]) -> int:
    """Last step of an optimizer other than that of the run's attributes; 0 if there is none.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of a run. All forks in its history count.
    """
    provenance = attributes.get("provenance")
    fork = provenance.get("fork") if isinstance(provenance, Mapping) else None
    last, common = 0, None
    while isinstance(fork, Mapping):
        step = fork.get("step")
        if not isinstance(step, int):
            break
        # Of an earlier fork, the run holds only the steps until here.
        common = step if common is None else min(common, step)
        if fork.get("optimizer") is not None:
            last = max(last, common)
        fork = fork.get("forked_before")
    return last
