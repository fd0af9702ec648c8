"""Notes of a recording, with the steps that no replay can prove."""

from typing import Any

from trajstore.trainers.recording.notes import RunNotes


def noted(notes: RunNotes, *steps: int, sentence: str = "W was set") -> None:
    for step in steps:
        notes.step = step
        notes.mention(sentence, unproven=True)


def test_unproven_steps_are_exact() -> None:
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, 2, 3, 3, 4, 7)
    notes.mention("a fact about step 7")
    assert notes.entries[0] == {
        "note": "W was set", "first_step": 2, "last_step": 7, "count": 4,
        "unproven": [[2, 4], [7, 7]],
    }  # fmt: skip
    assert "unproven" not in notes.entries[1]


def test_a_resumed_recording_keeps_them_up_to_its_step() -> None:
    before: list[dict[str, Any]] = [
        {"note": name, "first_step": 2, "last_step": 9, "count": 5, "unproven": [[2, 4], [7, 9]]}
        for name in ("W was set", "another")
    ] + [{"note": "later", "first_step": 9, "last_step": 9, "count": 1}]
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, 9, 10)
    resumed = notes.resumed(before, 8)
    assert [one["note"] for one in resumed] == ["another", "W was set"]
    assert [one["unproven"] for one in resumed] == [[[2, 4], [7, 8]], [[2, 4], [7, 8], [9, 10]]]
    noted(notes, 11, sentence="another")
    assert resumed[0]["unproven"] == [[2, 4], [7, 8], [11, 11]]
    assert (resumed[1]["first_step"], resumed[1]["last_step"]) == (2, 10)
    assert before[0]["unproven"] == [[2, 4], [7, 9]]


def test_the_number_of_ranges_is_bounded() -> None:
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, *range(1, 4001, 2))
    ranges = notes.entries[0]["unproven"]
    assert (len(ranges), ranges[-1]) == (1000, [1999, 3999])
