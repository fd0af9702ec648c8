"""Explanations of a mismatch by one flipped bit, found by flipping every bit that may have been.

An explanation counts only if it gives every stored bit of the element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replay.findings import Suspect
from trajstore.trainers.replay.recorded_steps import RecordedStep, StepMismatch
from trajstore.trainers.replay.row_checks import flipped_clip_coefs, flipped_rates
from trajstore.trainers.replay.step_simulator import Simulator, StepInputs
from trajstore.trainers.replay.summary_checks import token_norm_bits

__all__ = ["flipped_scalar", "flipped_values", "has_recorded_norm"]

Array = npt.NDArray[Any]


def flipped_values(
    mismatch: StepMismatch, places: Array, goes_on: Array, simulator: Simulator
) -> list[list[Suspect]]:
    """For each element, the values of which one flipped bit explains everything.

    Parameters
    ----------
    mismatch : StepMismatch
    places : ndarray of int, (element, 2)
        Positions along token and hidden.
    goes_on : ndarray of bool, (element,)
        Whether the next row follows from what was stored, and from nothing else.
    simulator : Simulator
    """
    step = mismatch.recorded
    at = tuple(places.T)
    wrong = mismatch.wrong[:, at[0], at[1]]
    found: list[list[Suspect]] = [[] for _ in places]
    for name, bad in zip(simulator.recorded, wrong, strict=True):
        difference = step.stored[name][at] ^ mismatch.result.bits[name][at]
        single = bad & (np.bitwise_count(difference) == 1) & (wrong.sum(axis=0) == 1)
        for number in np.flatnonzero(single & ~goes_on):
            found[number].append(Suspect(name, step.step))
    if step.inputs.gradient is not None:
        explains = _explained_by_gradient(step, step.inputs.gradient, at, simulator)
        # A gradient that has not its recorded length was altered; so nothing else was.
        for number in np.flatnonzero(explains & ~has_recorded_norm(step, at[0], simulator)):
            found[number].clear()
        for number in np.flatnonzero(explains):
            found[number].append(Suspect("grad", step.step))
    for name in sorted(step.unproven):
        for number in np.flatnonzero(_explained_by_state(step, name, at, simulator)):
            found[number].append(Suspect(name, step.step - 1))
    return found


def flipped_scalar(mismatch: StepMismatch, besides: Array, simulator: Simulator) -> Suspect | None:
    """Scalar of which one flipped bit gives the whole row; None if there is none.

    Parameters
    ----------
    mismatch : StepMismatch
    besides : ndarray of bool, (token, hidden)
        Values that are explained already.
    simulator : Simulator
    """
    step = mismatch.recorded
    if step.skipped:
        return None
    variants = [("lr", inputs) for inputs in flipped_rates(step.inputs)]
    if not step.clip_coef_trusted:
        variants += [("clip_coef", inputs) for inputs in flipped_clip_coefs(step.inputs)]
    for name, inputs in variants:
        if not (step.wrong(simulator.simulate(inputs)) & ~besides).any():
            return Suspect(name, step.step)
    return None


def has_recorded_norm(step: RecordedStep, tokens: Array, simulator: Simulator) -> Array:
    """Which tokens' gradients have the recorded length; all where none is recorded.

    Parameters
    ----------
    step : RecordedStep
    tokens : ndarray of int
        Positions along token.
    simulator : Simulator
    """
    if step.grad_token_norm is None or step.inputs.gradient is None:
        return np.ones(len(tokens), bool)
    own = token_norm_bits(step.inputs.gradient[tokens], simulator.natives["grad"])
    same: Array = own == step.grad_token_norm[tokens]
    return same


def _explained_by_gradient(
    step: RecordedStep, gradient: Array, at: tuple[Array, ...], simulator: Simulator
) -> Array:
    """At which elements some flipped bit of the gradient gives what is stored, its length too."""
    explains = np.zeros(len(at[0]), bool)
    for flipped in _flipped(gradient, at):
        right = _right(step, replace(step.inputs, gradient=flipped), at, simulator)
        if step.grad_token_norm is not None:
            rows = gradient[at[0]].copy()
            # Each element's bit alone, whatever else of its token is looked at.
            rows[np.arange(len(rows)), at[1]] = flipped[at]
            norms = token_norm_bits(rows, simulator.natives["grad"])
            right &= norms == step.grad_token_norm[at[0]]
        explains |= right
    return explains


def _explained_by_state(
    step: RecordedStep, name: str, at: tuple[Array, ...], simulator: Simulator
) -> Array:
    """At which elements some flipped bit of the state before gives what is stored."""
    explains = np.zeros(len(at[0]), bool)
    before = step.inputs.before
    for flipped in _flipped(before[name], at):
        inputs = replace(step.inputs, before=before | {name: flipped})
        explains |= _right(step, inputs, at, simulator)
    return explains


def _flipped(source: Array, at: tuple[Array, ...]) -> Iterator[Array]:
    """The array with a bit of these elements flipped, one bit after the other."""
    for bit in range(8 * source.itemsize):
        flipped = source.copy()
        flipped[at] ^= source.dtype.type(1 << bit)
        yield flipped


def _right(
    step: RecordedStep, inputs: StepInputs, at: tuple[Array, ...], simulator: Simulator
) -> Array:
    """At which elements other inputs give what is stored."""
    wrong = step.wrong(simulator.simulate(inputs))[:, at[0], at[1]]
    right: Array = ~np.any(wrong, axis=0)
    return right
