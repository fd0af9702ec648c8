"""Functions of the model, evaluated at many recorded steps."""

from collections.abc import Callable
from typing import Any

from trajstore.trainers.evaluations.evaluate import Evaluated, evaluate
from trajstore.trainers.evaluations.on_texts import (
    attention,
    cka,
    generation,
    hidden_cosine,
    logit_lens,
    loss,
)

__all__ = [
    "READY_MADE",
    "Evaluated",
    "attention",
    "cka",
    "evaluate",
    "generation",
    "hidden_cosine",
    "logit_lens",
    "loss",
]

READY_MADE: dict[str, Callable[..., Any]] = {
    make.__name__.replace("_", "-"): make
    for make in (loss, attention, cka, logit_lens, generation, hidden_cosine)
}
"""Ready-made evaluations by their names on the command line."""
