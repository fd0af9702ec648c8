"""The recorder beside plain lists, in loops of every kind: no value is wrong, or lost silently.

``TRAJSTORE_LOOPS=1000`` judges all situations and so many drawn loops, instead of some (`make
loops`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from loops.judge import Verdict, judged
from loops.loop import Situation
from loops.situations import CHOSEN, SITUATIONS, drawn

pytestmark = pytest.mark.torch

ALL = "TRAJSTORE_LOOPS" in os.environ
DRAWN = int(os.environ.get("TRAJSTORE_LOOPS", "50"))

MISSING = {
    "mixed/sgd": {"grad_norm"},
    "mixed/adamw": {"grad_norm", "loss"},
    "mixed/data": {"clip_coef", "grad_norm"},
    "mixed/halving": {"clip_coef", "grad_norm", "loss"},
    "mixed/fused": {"clip_coef", "loss"},
    "hand-then-clip/given-fused": {"clip_coef", "grad_norm"},
    "scratch/clip": {"clip_coef"},
    "hook-clip/halves-clip-once-halving": {"clip_coef"},
    "closure/plain-lbfgs": {"clip_coef"},
    "in-turn/pass-between-two": {"grad_norm"},
    "in-backward/plain-each": {"clip_coef", "grad_norm", "loss"},
}
"""What a note names in place of a value; of the other chosen loops each value is recorded."""
USUAL = """
plain clip assigned-clip observed-discard noam retrying setting twin move nan assigned-closure aside
checkpointed returning early-bound schedule limit
""".split()
"""Kinds of loops whose recordings have no notes."""

Check = Callable[[Iterable[Situation]], list[Verdict]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def all_right(situations: Iterable[Situation]) -> list[Verdict]:
        verdicts = [judged(one, tmp_path) for one in situations]
        wrong = [verdict.lines() for verdict in verdicts if verdict.wrong]
        assert not wrong, f"{len(wrong)} recordings are wrong:\n" + "\n".join(wrong)
        return verdicts

    return all_right


def test_chosen_loops(check: Check) -> None:
    verdicts = check(SITUATIONS[name] for name in CHOSEN)
    assert {one.situation.name: one.missing for one in verdicts if one.missing} == MISSING
    assert not [one.lines() for one in verdicts if one.notes and one.situation.kind in USUAL]


@pytest.mark.nightly
def test_situations(check: Check) -> None:
    """Some are one of each kind."""
    situations = random.Random(0).sample([*SITUATIONS.values()], len(SITUATIONS))
    check(situations if ALL else {one.kind: one for one in situations}.values())


@pytest.mark.nightly
def test_drawn_loops(check: Check) -> None:
    check(map(drawn, range(DRAWN)))
