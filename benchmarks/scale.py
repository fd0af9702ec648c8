"""Estimates for runs larger than any recorded here, from the plan of their blocks and from rates.

python benchmarks/scale.py

The recorder's planner computes rows of a block, objects and memory. The compression ratio and the
encoding speed of one core were measured on recordings of the same width (see
docs/concepts/performance.md). Nothing is recorded.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from measure import save, table

from trajstore.store.metadata.block_plan import plan

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
UNLIMITED = 1 << 40
# US dollars, prices of a large provider of object stores.
MONTH_OF_A_GB, PUT, GET = 0.023, 5e-6, 4e-7


@dataclass(frozen=True)
class Case:
    """Runs of one kind.

    Attributes
    ----------
    name : str
    tokens, hidden, steps, runs : int
    dtype : str
        Native type of all four matrices.
    ratio : float
        Bytes of the native types per stored byte.
    speed : float
        MB of the native types that one core encodes per second.
    """

    name: str
    tokens: int
    hidden: int
    steps: int
    dtype: str
    ratio: float
    speed: float
    runs: int = 1

    def facts(self) -> dict[str, str]:
        """Return the cost of all its runs together, unless the name is of one run or step."""
        layout = plan(
            dict.fromkeys((*MATRICES, "logits"), self.dtype) | {"loss": "float32"},
            tokens=self.tokens,
            hidden=self.hidden,
            memory=UNLIMITED,
            threads=8,
        )
        row = sum(array.row_bytes for array in layout.arrays.values())
        blocks = math.ceil(self.steps / layout.block_rows)
        objects = blocks * sum(array.parts for array in layout.arrays.values())
        puts = objects + blocks * (
            len(layout.arrays) + 1
        )  # a commit: all metadata files, and the root
        native = self.runs * self.steps * row
        stored = native / self.ratio
        return {
            "MB per step": f"{row / 1e6:,.2f}",
            "rows of a block": str(layout.block_rows),
            "memory of the writer, GB": f"{layout.memory / 1e9:,.2f}",
            "native TB": f"{native / 1e12:,.2f}",
            "stored TB": f"{stored / 1e12:,.2f}",
            "objects of a run": f"{objects:,}",
            "encoding, core-seconds per step": f"{row / 1e6 / self.speed:,.4f}",
            "encoding, core-hours": f"{native / 1e6 / self.speed / 3600:,.1f}",
            "$ per month": f"{stored / 1e9 * MONTH_OF_A_GB:,.0f}",
            "$ for writing": f"{self.runs * puts * PUT:,.2f}",
            "$ for reading": f"{self.runs * objects * GET:,.2f}",
            "objects of one token's W": f"{blocks:,}",
        }


CASES = (
    Case("GPT-2 small, bfloat16", 50_257, 768, 100_000, "bfloat16", 2.07, 313),
    Case("GPT-2 small, float32", 50_257, 768, 100_000, "float32", 1.59, 322),
    Case("151,936 × 2,560, bfloat16", 151_936, 2_560, 10_000, "bfloat16", 2.07, 313),
    Case("1,000 × Lil Gatsby", 128, 64, 10_000, "bfloat16", 4.57, 231, runs=1_000),
)


def main() -> None:
    """Print a table with a column for each case."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    facts = {case.name: case.facts() for case in CASES}
    names = next(iter(facts.values()))
    rows = [[name, *(facts[case][name] for case in facts)] for name in names]
    save("scale", table("Larger runs", ["", *facts], rows), facts)


if __name__ == "__main__":
    main()
