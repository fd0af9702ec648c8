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

from loops.judge import judged
from loops.loop import Situation
from loops.situations import CHOSEN, SITUATIONS, drawn

pytestmark = pytest.mark.torch

ALL = "TRAJSTORE_LOOPS" in os.environ
DRAWN = int(os.environ.get("TRAJSTORE_LOOPS", "50"))

Check = Callable[[Iterable[Situation]], None]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def all_right(situations: Iterable[Situation]) -> None:
        wrong = [verdict.lines() for one in situations if (verdict := judged(one, tmp_path)).wrong]
        assert not wrong, f"{len(wrong)} recordings are wrong:\n" + "\n".join(wrong)

    return all_right


def test_chosen_loops(check: Check) -> None:
    check(SITUATIONS[name] for name in CHOSEN)


@pytest.mark.nightly
def test_situations(check: Check) -> None:
    situations = [*SITUATIONS.values()]
    check(situations if ALL else random.Random(0).sample(situations, 120))


@pytest.mark.nightly
def test_drawn_loops(check: Check) -> None:
    check(map(drawn, range(DRAWN)))
