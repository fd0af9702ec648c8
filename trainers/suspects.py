"""Which stored value is to blame when a step does not give what was stored after it.

A value that was altered in row t makes step t disagree, and step t + 1 as well. So the next step is
carried out twice: from what was stored, and from what step t gives. Where only the latter gives the
next row, the value stored at t was altered alone. Where only the former does, what went into step t
is wrong: its gradient, its learning rate, a row before that nothing else vouches for; or the
history was stitched there. An explanation by one flipped bit is looked for, and counts only if it
gives every stored bit of the element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.findings import Finding, distance
from trainers.recomputation import norm_bits
from trainers.transition import Outcome, Simulator, Transition

__all__ = ["Disagreement", "explain", "possible_rate", "rate_variants"]

Array = npt.NDArray[Any]

_LARGEST_RATE = 1e30
_FEW = 16  # elements of one step that are looked at one by one


@dataclass(frozen=True, kw_only=True, eq=False)
class Disagreement:
    """A step that does not give what is stored.

    Attributes
    ----------
    transition : Transition
    outcome : Outcome
        What it gives.
    """

    transition: Transition
    outcome: Outcome

    @property
    def wrong(self) -> Array:
        """Which stored values disagree, (variable, token, hidden)."""
        return self.outcome.wrong(self.transition.stored)


def explain(
    case: Disagreement,
    follows: tuple[Array, Array] | None,
    simulator: Simulator,
    tokens: Array,
    *,
    thorough: bool,
) -> Iterator[Finding]:
    """Findings that account for a disagreement.

    Parameters
    ----------
    case : Disagreement
    follows : tuple of two ndarrays of bool, (token, hidden), optional
        Where the next row follows from what was stored, and from what the step gives; None if
        there is no next row to ask.
    simulator : Simulator
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    thorough : bool
        Look for flipped bits.
    """
    wrong = case.wrong
    concerned = wrong.any(axis=0)
    stored, computed = follows or (np.ones_like(concerned), np.ones_like(concerned))
    alone = concerned & ~stored & computed
    yield from _altered(case, wrong & alone, simulator, tokens)
    rest = concerned & ~alone
    if not rest.any():
        return
    places = np.argwhere(rest)
    if not thorough or len(places) > _FEW:
        if thorough:
            blamed = _blamed_scalar(case, alone, simulator)
            if blamed is not None:
                yield blamed
                return
        yield _unexplained(case, wrong & rest, simulator, tokens)
        return
    goes_on = (stored & ~computed)[tuple(places.T)]
    candidates = _candidates(case, places, goes_on, simulator)
    blamed = _blamed_scalar(case, alone, simulator)
    if blamed is not None:
        if len(places) > 1 or not candidates[0]:
            yield blamed
            return
        candidates[0].append((blamed.variable, blamed.step))
    merged: dict[tuple[Any, ...], Finding] = {}
    for place, found, after in zip(places, candidates, goes_on, strict=True):
        element = np.zeros_like(rest)
        element[tuple(place)] = True
        finding = _of_element(case, element, found, after, simulator, tokens)
        key = (finding.kind, finding.variable, finding.step, finding.token, finding.others)
        if key in merged:
            first = merged[key]
            apart = [f.ulps for f in (first, finding) if f.ulps is not None]
            finding = replace(first, values=first.values + 1, ulps=max(apart, default=None))
        merged[key] = finding
    yield from merged.values()


def _of_element(
    case: Disagreement,
    element: Array,
    found: list[tuple[str, int]],
    goes_on: bool,
    simulator: Simulator,
    tokens: Array,
) -> Finding:
    """Finding for one element, of which flipped bits have found some explanations, or none."""
    wrong = case.wrong & element
    token, hidden = np.argwhere(element)[0]
    names = [name for name, bad in zip(simulator.recorded, wrong, strict=True) if bad.any()]
    named = found or _likeliest(case, names, token, goes_on, simulator)
    if not named:
        return _unexplained(case, wrong, simulator, tokens)
    (variable, step), *others = named
    here = step == case.transition.step and variable in names
    return Finding(
        kind="altered",
        variable=variable,
        step=step,
        token=int(tokens[token]),
        hidden=int(hidden),
        ulps=_apart(case, variable, element, simulator) if here else None,
        others=tuple(f"{name} at step {at}" for name, at in others),
    )


def _altered(
    case: Disagreement, wrong: Array, simulator: Simulator, tokens: Array
) -> Iterator[Finding]:
    """Stored values that the next step does not know of."""
    for name, mask in zip(simulator.recorded, wrong, strict=True):
        places = np.argwhere(mask)
        if not len(places):
            continue
        rows = np.unique(places[:, 0])
        groups = [mask] if len(places) > _FEW else [mask & _only(mask, row) for row in rows]
        for group in groups:
            token, hidden = np.argwhere(group)[0]
            yield Finding(
                kind="altered",
                variable=name,
                step=case.transition.step,
                token=int(tokens[token]),
                hidden=int(hidden),
                values=int(np.count_nonzero(group)),
                tokens=int(np.count_nonzero(group.any(axis=1))),
                ulps=_apart(case, name, group, simulator),
            )


def _only(mask: Array, row: int) -> Array:
    chosen = np.zeros_like(mask)
    chosen[row] = True
    return chosen


def _apart(case: Disagreement, name: str, mask: Array, simulator: Simulator) -> int | None:
    stored, computed = case.transition.stored[name][mask], case.outcome.bits[name][mask]
    return distance(stored, computed, simulator.natives[name])


def _candidates(
    case: Disagreement, places: Array, goes_on: Array, simulator: Simulator
) -> list[list[tuple[str, int]]]:
    """For each element: variables and steps of which one flipped bit explains everything."""
    transition = case.transition
    at = tuple(places.T)
    wrong = case.wrong[(slice(None), *at)]
    found: list[list[tuple[str, int]]] = [[] for _ in places]
    for name, bad in zip(simulator.recorded, wrong, strict=True):
        difference = transition.stored[name][at] ^ case.outcome.bits[name][at]
        single = bad & (np.bitwise_count(difference) == 1) & (wrong.sum(axis=0) == 1)
        for number in np.flatnonzero(single & ~goes_on):
            found[number].append((name, transition.step))
    flips: list[tuple[str, int, Array]] = []
    if transition.gradient is not None:
        explains = _flips(transition, "grad", at, simulator)
        flips.append(("grad", transition.step, explains))
        # A gradient that has not its recorded length was altered; so nothing else was.
        for number in np.flatnonzero(explains & ~_has_its_norm(transition, at[0], simulator)):
            found[number].clear()
    for name in sorted(transition.unproven):
        flips.append((name, transition.step - 1, _flips(transition, name, at, simulator)))
    for name, step, explains in flips:
        for number in np.flatnonzero(explains):
            found[number].append((name, step))
    return found


def _flips(transition: Transition, name: str, at: tuple[Array, ...], simulator: Simulator) -> Array:
    """At which elements some flipped bit of a variable gives what is stored."""
    explains = np.zeros(len(at[0]), bool)
    source = transition.gradient if name == "grad" else transition.before[name]
    assert source is not None
    for bit in range(8 * source.itemsize):
        flipped = source.copy()
        flipped[at] ^= source.dtype.type(1 << bit)
        changed = (
            replace(transition, gradient=flipped)
            if name == "grad"
            else replace(transition, before=transition.before | {name: flipped})
        )
        outcome = simulator.outcome(changed)
        right = ~outcome.wrong(transition.stored)[(slice(None), *at)].any(axis=0)
        if name == "grad" and transition.norms is not None:
            rows = source[at[0]].copy()
            rows[np.arange(len(rows)), at[1]] ^= source.dtype.type(1 << bit)
            right &= norm_bits(rows, simulator.natives["grad"]) == transition.norms[at[0]]
        explains |= right
    return explains


def _has_its_norm(transition: Transition, tokens: Array, simulator: Simulator) -> Array:
    """Which tokens' gradients have the recorded length; all where none is recorded."""
    if transition.norms is None or transition.gradient is None:
        return np.ones(len(tokens), bool)
    own = norm_bits(transition.gradient[tokens], simulator.natives["grad"])
    same: Array = own == transition.norms[tokens]
    return same


def _blamed_scalar(case: Disagreement, alone: Array, simulator: Simulator) -> Finding | None:
    """The scalar of which one flipped bit gives the whole row, but for values altered alone."""
    transition = case.transition
    if transition.gradient is None:
        return None
    variants = [("lr", variant) for variant in rate_variants(transition)]
    if not transition.clip_trusted:
        clip = transition.clip
        variants += [
            ("clip_coef", replace(transition, clip=clip ^ clip.dtype.type(1 << bit)))
            for bit in range(8 * clip.itemsize)
        ]
    for name, variant in variants:
        if not (simulator.outcome(variant).wrong(transition.stored) & ~alone).any():
            return Finding(kind="altered", variable=name, step=transition.step, tokens=0)
    return None


def possible_rate(lr: float) -> bool:
    """Whether an optimizer can calculate with a learning rate: torch refuses larger ones."""
    return abs(lr) < _LARGEST_RATE


def rate_variants(transition: Transition) -> Iterator[Transition]:
    """The transition with each bit of its learning rate flipped."""
    lr = np.array(transition.lr).view(np.uint64)
    for bit in range(64):
        flipped = float((lr ^ np.uint64(1 << bit)).view(np.float64))
        if possible_rate(flipped):
            yield replace(transition, lr=flipped)


def _likeliest(
    case: Disagreement, names: list[str], token: int, goes_on: bool, simulator: Simulator
) -> list[tuple[str, int]]:
    """What more than one altered bit of an element explains; nothing if that is unlikely."""
    transition = case.transition
    if len(names) == 1 and not goes_on:
        return [(names[0], transition.step)]
    has_its_norm = _has_its_norm(transition, np.array([token]), simulator)[0]
    trusted = transition.norms is not None and has_its_norm
    # Where there are moments, a gradient that moves W moves them as well.
    shows = names != ["W"] or not simulator.rule.names
    if transition.gradient is not None and not trusted and shows:
        return [("grad", transition.step)]
    return []


def _unexplained(case: Disagreement, wrong: Array, simulator: Simulator, tokens: Array) -> Finding:
    """The values that do not follow from the row before, all in one."""
    transition = case.transition
    names = [name for name, mask in zip(simulator.recorded, wrong, strict=True) if mask.any()]
    mask = wrong.any(axis=0)
    token, hidden = np.argwhere(mask)[0]
    apart = [
        _apart(case, name, own, simulator)
        for name, own in zip(simulator.recorded, wrong, strict=True)
        if name in names
    ]
    rebuilt = transition.gradient is not None and simulator.rebuilt
    return Finding(
        kind="skipped" if transition.gradient is None else "diverged",
        variable=", ".join(names),
        step=transition.step,
        token=int(tokens[token]),
        hidden=int(hidden),
        values=int(np.count_nonzero(wrong)),
        tokens=int(np.count_nonzero(mask.any(axis=1))),
        ulps=None if None in apart else max(value for value in apart if value is not None),
        others=("a gradient of this step or of one before",) if rebuilt else (),
    )
