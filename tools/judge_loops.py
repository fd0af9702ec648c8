"""Judge the recorder by loops of every kind, and print a table.

``python tools/judge_loops.py --situations [WORD …]``, ``--drawn FIRST LAST``
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from loops.judge import judged
from loops.loop import Situation
from loops.situations import SITUATIONS, drawn


def report(situations: Iterable[Situation]) -> None:
    """Print each wrong one in two lines, then a table by kind."""
    kinds: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        for situation in situations:
            verdict = judged(situation, Path(folder))
            kinds.setdefault(situation.kind, Counter())[verdict.word] += 1
            if verdict.wrong:
                print(verdict.lines(), flush=True)
    total = sum(kinds.values(), Counter())
    print(f"{'kind':24} {'true':>5} {'missing':>8} {'wrong':>6}")
    for kind, count in [*kinds.items(), ("all", total)]:
        print(f"{kind:24} {count['true']:5} {count['missing']:8} {count['wrong']:6}")


def main() -> None:
    """Judge the chosen loops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--situations", nargs="*", metavar="WORD", help="all whose name has a word")
    parser.add_argument("--drawn", nargs=2, type=int, metavar=("FIRST", "LAST"), help="seeds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trajstore").disabled = True
    if given.situations is not None:
        words = given.situations or [""]
        report(s for s in SITUATIONS.values() if any(word in s.name for word in words))
    if given.drawn:
        report(drawn(seed) for seed in range(given.drawn[0], given.drawn[1] + 1))


if __name__ == "__main__":
    main()
