"""Advice about the types of a training run, before it is recorded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

from torch.optim import Optimizer

from trajstore.optimizer_advice import Advice, advise
from trajstore.trainers.recording.flat_vectors import type_name
from trajstore.trainers.recording.parameters import RecordedParameter
from trajstore.trainers.recording.provenance import optimizer_attributes

_LOG = logging.getLogger(__name__)


def optimizer_advice(parameters: Sequence[RecordedParameter]) -> list[Advice]:
    """Return advice about types in which the optimizer has no effect.

    Parameters
    ----------
    parameters : sequence of RecordedParameter

    Returns
    -------
    list of Advice
        Each sentence once, for all parameters together.
    """
    found = (
        advice
        for parameter in parameters
        if parameter.optimizer is not None
        for advice in advise(
            optimizer_attributes(parameter.optimizer, parameter.group, {}),
            state=_state_type(parameter, parameter.optimizer),
            weights=type_name(parameter.tensor.dtype),
        )
    )
    return list({advice.sentence: advice for advice in found}.values())


def report_notes(sentences: Iterable[str], on_note: Callable[[str], None] | None) -> None:
    """Pass sentences to a function, or else to the logger of this module.

    They are not Python warnings, because a filter may turn those into errors.
    """
    report = on_note or functools.partial(_LOG.warning, "%s")
    for sentence in sentences:
        report(sentence)


def _state_type(parameter: RecordedParameter, optimizer: Optimizer) -> str:
    """Return the type of the state: from the group, the existing state, or the parameter."""
    if "state_dtype" in parameter.group:
        return str(parameter.group["state_dtype"])
    state = optimizer.state.get(parameter.tensor, {})
    return type_name(state.get("exp_avg_sq", parameter.tensor).dtype)
