"""The segments of a run, from the attributes of its root."""

from __future__ import annotations

from typing import Any

import pytest

from trajstore.store.metadata.metadata_form import (
    are_segments,
    listed_segments,
    recorded_threads,
    segments_attribute,
    trained_segments,
)


def config(steps: int, **others: Any) -> dict[str, Any]:
    return {"training": {"steps": steps, **others}, "recording": {"memory": "1GiB"}}


def test_a_later_resume_replaces_what_came_after_it() -> None:
    attributes = {
        "config": config(7),
        "provenance": {
            "threads": 2,
            "resumed": [{"step": 4, "threads": 8}, {"step": 3}, {"step": 5, "threads": 6}],
        },
    }
    assert [recorded_threads(attributes, step) for step in (0, 4, 5)] == [2, 2, 6]
    found = trained_segments(attributes, 1, 7)
    assert [(one.first, one.last, one.threads) for one in found] == [(1, 5, 2), (5, 7, 6)]
    assert recorded_threads({}, 3) is None


def test_each_configuration_holds_until_the_next() -> None:
    attributes: dict[str, Any] = {"config": config(5)}
    for steps, step in ((8, 5), (12, 8), (9, 7)):
        attributes |= segments_attribute(attributes, config(steps), step)
        attributes["config"] = config(steps)
    listed = [(entry["step"], entry["config"]["training"]["steps"])
              for entry in listed_segments(attributes)]  # fmt: skip
    assert listed == [(0, 5), (5, 8), (7, 9)]
    found = trained_segments(attributes, 2, 7)
    assert [(one.first, one.last) for one in found] == [(2, 5), (5, 7)]


def test_only_what_is_trained_with_begins_a_segment() -> None:
    same = config(5, device="cpu") | {"recording": {"memory": "64MiB"}}
    assert segments_attribute({"config": config(5, device="auto")}, same, 3) == {}
    before = {"config": config(8)} | segments_attribute({"config": config(5)}, config(8), 5)
    changed = config(8) | {"recording": {"memory": "64MiB"}}
    assert segments_attribute(before, changed, 6)["segments"][-1] == {
        "step": 5,
        "config": changed,
    }


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, [3], [{"step": 0}], [{"step": 1, "config": {}}], [{"step": 0, "config": 3}],
        [{"step": True, "config": {}}],
        [{"step": 0, "config": {}}, {"step": 0, "config": {}}],
        [{"step": 0, "config": {}, "more": 1}],
    ],
)  # fmt: skip
def test_what_cannot_be_a_list_of_segments(value: Any) -> None:
    assert not are_segments(value)
    assert are_segments([{"step": 0, "config": {}}, {"step": 4, "config": {}}])
