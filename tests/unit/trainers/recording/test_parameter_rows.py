"""Few operations of torch a row, for any number of parameters: each takes microseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from launched_operations import launched  # noqa: E402

from trajstore.trainers import capture  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, HIDDEN, WARM = 17, 8, 3


def operations(path: Path, layers: int, *, clips: bool, tier: str) -> int:
    """Return the number that the recorder launches in a step after the first ones."""
    torch.manual_seed(0)
    hidden = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
    parts = torch.nn.Embedding(VOCAB, HIDDEN), *hidden, torch.nn.Linear(HIDDEN, VOCAB)
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    ids = torch.arange(12).view(2, 6)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    def in_a_step() -> int:
        for _ in range(WARM):
            step()
        return launched(step).total()

    alone = in_a_step()
    options: dict[str, Any] = {"max_grad_norm": 0.1} if clips else {}
    with capture(model, optimizer, path, parameter="0.weight", variables=tier, **options):
        return in_a_step() - alone


@pytest.mark.parametrize(
    ("tier", "clips", "most"),
    [("matrix", False, 20), ("matrix", True, 30), ("everything", True, 60)],
)
def test_a_row_launches_few_operations_for_any_number_of_parameters(
    tier: str, clips: bool, most: int, tmp_path: Path
) -> None:
    few, many = (
        operations(tmp_path / f"{layers}.zarr", layers, clips=clips, tier=tier)
        for layers in (2, 12)
    )
    assert 5 < few == many <= most
