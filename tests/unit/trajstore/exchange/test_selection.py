from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded
from trajstore.exchange.selection import select
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled


@pytest.fixture
def source(small_run: tuple[Path, Any]) -> TiledRun:
    return open_tiled(small_run[0])  # steps 0, 2, … 20; tokens 0, 7, … 63, every third dead


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, range(0, 21, 2)), ("0:6", [0, 2, 4]), (":5", [0, 2, 4]), ("16:", [16, 18, 20]),
        ("0:20:10", [0, 10]), ("::6", [0, 6, 12, 18]), ("2::6", [2, 8, 14, 20]),
        ("20,4, 0:3", [0, 2, 4, 20]), (4, [4]), (np.int64(4), [4]), (slice(0, 5), [0, 2, 4]),
        ([20, 4], [4, 20]), (np.array([8]), [8]),
    ],
)  # fmt: skip
def test_steps_are_chosen_by_their_numbers(source: TiledRun, steps: Any, expected: Any) -> None:
    rows = select(source, steps=steps).rows
    assert source.steps[rows].tolist() == list(expected)


def test_tokens_by_population_ids_and_file(source: TiledRun, tmp_path: Path) -> None:
    ids = source.coordinates["token"]
    chosen = {name: select(source, tokens=name).tokens for name in ("dead", "live")}
    assert ids[chosen["dead"]].tolist() == [0, 21, 42, 63]
    assert ids[chosen["live"]].tolist() == [7, 14, 28, 35, 49, 56]
    assert select(source, tokens="all").tokens is None
    listed = tmp_path / "ids.txt"
    listed.write_text("14, 7\n63\n")
    for tokens in ("14,7,63", [63, 14, 7], np.array([7, 14, 63, 7]), listed, str(listed)):
        assert ids[select(source, tokens=tokens).tokens].tolist() == [7, 14, 63]


@pytest.mark.parametrize(
    ("selected", "error", "message"),
    [
        *(({"steps": steps}, InvalidArgument, "step") for steps in
          ("", "a", "1:2:3:4", "-3:", "::0", "1,,2", "21:", slice(-4, None))),
        *(({"tokens": tokens}, InvalidArgument, "token") for tokens in
          ("5", "none-such.txt", [], "99999999999999999999")),
        ({"steps": "3"}, StepNotFound, r"step 3 was not recorded; .* 0 to 20"),
        ({"tokens": [999]}, InvalidArgument, r"token 999 was .* holds \d+ ids, from \d+ to"),
        ({"variables": "exp_avg"}, VariableNotRecorded, "exp_avg was not recorded"),
        ({"variables": "weights"}, InvalidArgument, "no variable 'weights'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_run_does_not_hold_is_refused(
    source: TiledRun, selected: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select(source, **selected)


def test_variables_keep_the_order_of_the_schema(source: TiledRun) -> None:
    assert select(source, variables="loss, W").variables == ("W", "loss")
    assert select(source, variables=["grad"]).variables == ("grad",)
