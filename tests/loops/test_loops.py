"""The recorder beside plain lists, in loops of every kind: no value is wrong, or lost silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from loops.judge import judged
from loops.loop import Situation
from loops.situations import CHOSEN, SITUATIONS, drawn

pytestmark = pytest.mark.torch

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
def test_all_loops(check: Check) -> None:
    check(SITUATIONS.values())


@pytest.mark.nightly
def test_drawn_loops(check: Check) -> None:
    check(map(drawn, range(250)))
