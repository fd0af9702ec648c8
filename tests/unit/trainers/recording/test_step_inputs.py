"""The inputs of a step are read back with their names, types, shapes and bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from trainings import (  # noqa: E402
    HIDDEN,
    VOCAB,
    TinyModel,
    same,
)

from trajstore import open_run  # noqa: E402
from trajstore.errors import InvalidArgument  # noqa: E402
from trajstore.trainers import capture  # noqa: E402
from trajstore.trainers.recording.step_inputs import decoded  # noqa: E402

pytestmark = pytest.mark.torch

Step = Callable[["Reader", Any], Any]


class Reader(TinyModel):
    """A model with arguments of every kind, which uses the ids only."""

    def forward(
        self, ids: Any, mask: Any = None, *more: Any, extras: Any = None, **rest: Any
    ) -> Any:
        return self.head(torch.tanh(self.mix(self.embedding(ids))))


def record(
    path: Path, *steps: Step, model: Any = None, variables: Any = "keyframes"
) -> tuple[list[Any], list[str]]:
    """Record steps; returns the inputs that are read back from each row, and the notes.

    A step gets the model and the recorder, and returns the output that its loss is computed from.
    """
    torch.manual_seed(1)
    model = Reader() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    notes: list[str] = []
    with capture(
        model, optimizer, path, variables=variables, on_note=notes.append, fsync=False
    ) as recorder:
        for step in steps:
            optimizer.zero_grad()
            step(model, recorder).square().sum().backward()
            optimizer.step()
    ds = open_run(path)
    rows = [decoded(row) for row in ds.inputs.values] if "inputs" in ds else []
    return rows, notes


def ids(*shape: int, seed: int = 0) -> Any:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def every_bit(dtype: Any) -> Any:
    """Values whose bits are random: NaN with payloads, subnormals, negative zeros."""
    rng = np.random.default_rng(2)
    return torch.from_numpy(rng.integers(0, 256, 12 * 8, dtype="u1")).view(dtype)


def test_values_of_each_type_keep_their_bits(tmp_path: Path) -> None:
    types = [
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.complex64, torch.complex128,
    ]  # fmt: skip
    given = {f"of {dtype}": every_bit(dtype) for dtype in types}
    given |= {
        "temperature": torch.tensor(-0.0),
        "causal": torch.tensor(True),
        "mask": torch.tensor([[True, False], [False, True]]),
    }
    given |= {f"empty {dtype}": torch.zeros(2, 0, 3, dtype=dtype) for dtype in types[:-2]}
    (_, found), _ = record(tmp_path / "run.zarr", lambda model, run: model(ids(3), **given))
    assert same(found, [{"ids": ids(3), **given}])
    assert found[0]["temperature"].shape == ()


def test_arguments_and_what_is_in_dicts_and_lists_have_names(tmp_path: Path) -> None:
    mask, scale = torch.ones(2, 3, dtype=torch.bool), torch.rand(2)
    more = torch.arange(3), torch.arange(4)
    steps = [
        lambda model, run: model(ids(2, 3), mask, *more, scale=scale),
        lambda model, run: model(mask=mask, ids=ids(2, 3), scale=scale),
        lambda model, run: model(ids(2, 3), None, extras="text", scale=0.5),  # no tensors
        lambda model, run: model(
            ids(2, 3), é=[more[0]], extras={"a": scale, "b": {"c": [more[1], "text", None]}}
        ),
    ]
    (start, *found), _ = record(tmp_path / "run.zarr", *steps)
    assert start == []
    named = {"ids": ids(2, 3), "mask": mask, "scale": scale}
    of_more = {"more.0": more[0], "more.1": more[1]}
    nested = {"é.0": more[0], "extras.a": scale, "extras.b.c.0": more[1]}
    only_ids = {"ids": ids(2, 3)}
    assert same(found, [[named | of_more], [named], [only_ids], [only_ids | nested]])


def test_a_tensor_that_the_loop_fills_again_is_kept(tmp_path: Path) -> None:
    place, vectors = torch.rand(4), torch.rand(2, HIDDEN, requires_grad=True)
    before = place.clone()

    def step(model: Any, run: Any) -> Any:
        output = model(ids(3), mask=place[::2], vectors=vectors) * vectors.sum()
        place.zero_()
        return output

    (_, found), _ = record(tmp_path / "run.zarr", step)
    assert same(found, [{"ids": ids(3), "mask": before[::2], "vectors": vectors}])
    assert not found[0]["vectors"].requires_grad


def test_the_passes_of_a_step_are_in_order(tmp_path: Path) -> None:
    def step(model: Any, run: Any) -> Any:
        with torch.no_grad():
            model(ids(5, seed=9))  # an evaluation, which the step does not use
        return torch.cat([model(ids(size, seed=size)) for size in (3, 4, 2)])

    (_, found), _ = record(tmp_path / "run.zarr", step)
    assert same(found, [{"ids": ids(size, seed=size)} for size in (3, 4, 2)])


def indexed(model: Any, run: Any) -> Any:
    return model(ids(2, 3), example_index=torch.tensor([4, 1]))


def test_the_indices_of_the_examples_are_no_inputs(tmp_path: Path) -> None:
    (_, found), _ = record(tmp_path / "run.zarr", indexed, variables=["keyframes", "inputs"])
    assert same(found, [{"ids": ids(2, 3)}])
    assert open_run(tmp_path / "run.zarr").batch.values[1].tolist() == [4, 1]


def test_a_run_with_the_indices_of_its_examples_has_no_inputs(tmp_path: Path) -> None:
    def observed(model: Any, run: Any) -> Any:
        run.observe(batch=[4, 1])
        return model(ids(2, 3))

    for number, step in enumerate((indexed, observed)):
        path = tmp_path / f"{number}.zarr"
        _, notes = record(path, step)
        ds = open_run(path)
        assert "inputs" not in ds
        assert ds.batch.values[1].tolist() == [4, 1]
        assert not [note for note in notes if "inputs" in note]


def test_observed_inputs_replace_those_of_the_model(tmp_path: Path) -> None:
    targets = torch.rand(3)

    def step(model: Any, run: Any) -> Any:
        outputs = []
        for seed in (1, 2):
            outputs.append(model(ids(3, seed=seed)))
            run.observe(inputs={"ids": ids(3, seed=seed), "of": {"targets": [targets * seed]}})
        return torch.cat(outputs)

    (_, found), _ = record(tmp_path / "run.zarr", step)
    named = [{"ids": ids(3, seed=seed), "of.targets.0": targets * seed} for seed in (1, 2)]
    assert same(found, named)


def test_observed_inputs_that_are_no_dict_are_an_error(tmp_path: Path) -> None:
    def step(model: Any, run: Any) -> Any:
        with pytest.raises(InvalidArgument, match=r"inputs: got tensor.*expected a dict"):
            run.observe(inputs=torch.zeros(2))
        return model(ids(3))

    record(tmp_path / "run.zarr", step)


def test_a_step_without_room_has_no_inputs_and_a_note(tmp_path: Path) -> None:
    sizes = (9, 12, 3000, 9)
    steps = [lambda model, run, size=size: model(ids(size)) for size in sizes]
    (_, *found), notes = record(tmp_path / "run.zarr", *steps)
    assert same([found[0], found[1], found[3]], [[{"ids": ids(size)}] for size in (9, 12, 9)])
    assert found[2] == []
    (note,) = [note for note in notes if "cannot be developed" in note]
    words = len(open_run(tmp_path / "run.zarr").inputs[0])
    assert f"the rows have room for {words}" in note
    assert not open_run(tmp_path / "run.zarr").inputs[3].values.any()


def test_a_model_without_tensors_has_no_inputs(tmp_path: Path) -> None:
    class Alone(TinyModel):
        def forward(self) -> Any:
            return self.head(self.embedding.weight[:2])

    rows, notes = record(tmp_path / "run.zarr", lambda model, run: model(), model=Alone())
    assert rows == []
    assert any("pass those that determine the step with observe(inputs" in note for note in notes)


def test_a_damaged_description_is_an_error() -> None:
    words = np.array([8, *np.frombuffer(b'[[["ids"', "<i8"), 0])
    with pytest.raises(ValueError, match=r"."):
        decoded(words)
