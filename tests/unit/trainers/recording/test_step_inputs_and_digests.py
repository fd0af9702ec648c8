"""Inputs of a step are read back bit for bit; digests are those of whole numbers of Python."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from trainings import HIDDEN, VOCAB, TinyModel, same, steps

from trajstore import open_run
from trajstore.errors import InvalidArgument
from trajstore.trainers import capture
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.digests import ROW, StepDigests, digests
from trajstore.trainers.recording.step_inputs import decoded

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


def test_inputs_are_those_of_each_pass_bit_for_bit(tmp_path: Path) -> None:
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
    place, vectors = torch.rand(4), torch.rand(2, HIDDEN, requires_grad=True)
    before = place.clone()

    def fills_again(model: Any, run: Any) -> Any:
        output = model(ids(3), mask=place[::2], vectors=vectors) * vectors.sum()
        place.zero_()
        return output

    def evaluates(model: Any, run: Any) -> Any:
        with torch.no_grad():
            model(ids(5, seed=9))  # the step does not use it
        return torch.cat([model(ids(size, seed=size)) for size in (3, 4, 2)])

    taken = lambda model, run: model(ids(3), **given), fills_again, evaluates
    (_, *found), _ = record(tmp_path / "run.zarr", *taken)
    assert same(found[0], [{"ids": ids(3), **given}])
    assert found[0][0]["temperature"].shape == ()
    assert same(found[1], [{"ids": ids(3), "mask": before[::2], "vectors": vectors}])
    assert not found[1][0]["vectors"].requires_grad
    assert same(found[2], [{"ids": ids(size, seed=size)} for size in (3, 4, 2)])


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


def indexed(model: Any, run: Any) -> Any:
    return model(ids(2, 3), example_index=torch.tensor([4, 1]))


def test_the_indices_of_the_examples_are_no_inputs_and_replace_them(tmp_path: Path) -> None:
    def observed(model: Any, run: Any) -> Any:
        run.observe(batch=[4, 1])
        return model(ids(2, 3))

    (_, found), _ = record(tmp_path / "run.zarr", indexed, variables=["keyframes", "inputs"])
    assert same(found, [{"ids": ids(2, 3)}])
    for number, step in enumerate((indexed, observed)):
        rows, notes = record(tmp_path / f"{number}.zarr", step)
        assert open_run(tmp_path / f"{number}.zarr").batch.values[1].tolist() == [4, 1]
        assert (rows, [note for note in notes if "inputs" in note]) == ([], [])


def test_observed_inputs_replace_those_of_the_model(tmp_path: Path) -> None:
    targets = torch.rand(3)

    def step(model: Any, run: Any) -> Any:
        outputs = []
        with pytest.raises(InvalidArgument, match=r"inputs: got tensor.*expected a dict"):
            run.observe(inputs=torch.zeros(2))
        for seed in (1, 2):
            outputs.append(model(ids(3, seed=seed)))
            run.observe(inputs={"ids": ids(3, seed=seed), "of": {"targets": [targets * seed]}})
        return torch.cat(outputs)

    (_, found), _ = record(tmp_path / "run.zarr", step)
    named = [{"ids": ids(3, seed=seed), "of.targets.0": targets * seed} for seed in (1, 2)]
    assert same(found, named)


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


FACTOR = 0x94D049BB133111EB
TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def unsigned(number: int) -> int:
    return number % 2**64


def splitmix64(count: int) -> list[int]:
    """The first numbers of the generator with the seed 0, made odd."""
    state, numbers = 0, []
    for _ in range(count):
        state = unsigned(state + 0x9E3779B97F4A7C15)
        z = state
        z = unsigned((z ^ z >> 30) * 0xBF58476D1CE4E5B9)
        z = unsigned((z ^ z >> 27) * 0x94D049BB133111EB)
        numbers.append(z ^ z >> 31 | 1)
    return numbers


WEIGHTS = splitmix64(ROW + 8)


def mixed(word: int) -> int:
    for _ in range(2):
        word = unsigned(word * FACTOR)
        word ^= word >> 32
    return word


def plain_digest(tensor: Any) -> int:
    """The digest as its module describes it, without torch and NumPy."""
    data = bits(tensor).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return unsigned(
        sum(
            mixed(word) * WEIGHTS[place % ROW] * WEIGHTS[ROW + place // ROW]
            for place, word in enumerate(words)
        )
    )


def bits(tensor: Any) -> Any:
    """A copy of the bits of a tensor, flat, as signed integers."""
    kind = getattr(torch, f"int{8 * tensor.itemsize}")
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(kind)


def numbers(*tensors: Any) -> list[int]:
    return [unsigned(number) for number in digests(tensors).tolist()]


def all_differ(*tensors: Any) -> bool:
    return len({*numbers(*tensors)}) == len(tensors)


def draw(count: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def test_a_digest_is_that_of_whole_numbers_of_python() -> None:
    """Tensors of any lengths, types and bits share one call."""
    patterns = torch.tensor([0, -(2**31), 2**31 - 1, -1, 1, 0x7F800000, 0x7FC00001])
    values = patterns.to(torch.int32).view(torch.float32)  # zeros, NaN, subnormal, infinity
    tensors = [values, *values.split(1)]
    for dtype in TYPES:
        row = ROW * 8 // dtype.itemsize
        sizes = [0, 1, 2, 3, 7, 8, 1001, row - 1, row, row + 1, 3 * row + 5]
        table = draw(35 * 6, dtype).view(35, 6)
        flat = table.flatten()
        tensors += [*(draw(size, dtype) for size in sizes), *(flat[at:] for at in range(1, 8))]
        tensors += [table.T, table[:, ::2], table[1:, 1:5], table[3]]
    random.Random(3).shuffle(tensors)
    assert numbers(*tensors) == [plain_digest(tensor) for tensor in tensors]
    assert all_differ(*values.split(1))
    assert numbers() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_no_two_pairs_of_changed_signs_have_one_digest(dtype: Any) -> None:
    signs = torch.ones(64 * 63 // 2, 64, dtype=dtype)
    for row, pair in zip(signs, itertools.combinations(range(64), 2), strict=True):
        row[list(pair)] = -1  # 4 in a word of bfloat16: also in the same bit
    values = draw(64, dtype)
    assert all_differ(values, *(values * signs))


def test_threads_do_not_change_a_digest() -> None:
    tensors = [draw(300_001), draw(70_000, torch.bfloat16), draw(5)]
    found = []
    for threads in (1, 2):
        with process_mode(threads):
            found.append(numbers(*tensors))
    assert found[0] == found[1]


def plain_gradient_digest(gradients: list[Any]) -> int:
    return unsigned(
        sum(
            plain_digest(gradient) * WEIGHTS[number]
            for number, gradient in enumerate(gradients)
            if gradient is not None
        )
    )


def test_the_gradients_of_several_optimizers_have_one_digest() -> None:
    parameters = [torch.nn.Parameter(draw(6)) for _ in range(4)]
    step = StepDigests(torch.nn.ParameterList(parameters))
    places, values = torch.tensor([[4, 4, 1]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(places, values, (6,), check_invariants=True)
    parameters[2].grad = sparse
    for number in (0, 3):
        parameters[number].grad = draw(6) + number
    step.add_gradients([{"params": parameters[2:]}, {"params": parameters[1:2]}])
    step.add_gradients([{"params": [parameters[0], torch.nn.Parameter(draw(3))]}])
    found = step.after_step()
    first, last = parameters[0].grad, parameters[3].grad
    expected = plain_gradient_digest([first, None, sparse.to_dense(), last])
    assert unsigned(int(found["step_digest"])) == expected
    assert found["params_digest"].tolist() == digests(parameters).tolist()
    assert int(step.after_step()["step_digest"]) == 0  # of the next step


def test_the_rows_of_a_run_have_the_digests_of_the_loop(
    tiny: Any, optimizer: Any, path: Path
) -> None:
    model, of_parameters, of_gradients = tiny.bfloat16(), [], [0]
    with capture(model, optimizer, path, variables="keyframes"):
        for _ in steps(model, optimizer):
            of_parameters.append([*map(plain_digest, model.parameters())])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            of_gradients.append(plain_gradient_digest([p.grad for p in model.parameters()]))
    of_parameters.append([*map(plain_digest, model.parameters())])
    ds = xr.open_zarr(path, chunks=None)
    assert ds.params_digest.dtype == ds.step_digest.dtype == np.int64
    assert ds.params_digest.values.view(np.uint64).tolist() == of_parameters
    assert ds.step_digest.values.view(np.uint64).tolist() == of_gradients
    assert ds.parameter.values.tolist() == [name for name, _ in model.named_parameters()]


def test_buffers_count_after_the_parameters() -> None:
    model = torch.nn.BatchNorm1d(3)
    step, before = StepDigests(model), model.num_batches_tracked.clone()
    found = []
    for tracked in (before, before + 1):
        model.num_batches_tracked.copy_(tracked)
        found.append(unsigned(int(step.after_step()["step_digest"])))
        buffers = [model.running_mean, model.running_var, model.num_batches_tracked]
        assert found[-1] == plain_gradient_digest([None, None, *buffers])
    assert found[0] != found[1]
