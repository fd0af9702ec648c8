"""Digests are those of code in whole numbers of Python, and every changed bit changes them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from trainings import TinyModel, steps  # noqa: E402

from trajstore.trainers import capture  # noqa: E402
from trajstore.trainers.process_mode import process_mode  # noqa: E402
from trajstore.trainers.recording.digests import ROW, StepDigests, digests  # noqa: E402

pytestmark = pytest.mark.torch

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


def flipped(tensor: Any, *places: tuple[int, int]) -> Any:
    """A copy of a tensor with flipped bits: (element, bit), counted from the lowest."""
    changed = bits(tensor)
    for element, bit in places:
        mask = 1 << bit
        highest = bit == 8 * tensor.itemsize - 1
        changed[element] ^= -mask if highest else mask
    return changed.view(tensor.dtype)


def numbers(*tensors: Any) -> list[int]:
    return [unsigned(number) for number in digests(tensors).tolist()]


def all_differ(*tensors: Any) -> bool:
    return len({*numbers(*tensors)}) == len(tensors)


def draw(count: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_digest_is_that_of_whole_numbers_of_python(dtype: Any) -> None:
    row = ROW * 8 // dtype.itemsize
    sizes = [0, 1, 2, 3, 7, 8, 1001, row - 1, row, row + 1, 3 * row + 5]
    tensors = [draw(size, dtype) for size in sizes]
    assert numbers(*tensors) == [plain_digest(tensor) for tensor in tensors]


def test_tensors_of_any_lengths_share_one_call() -> None:
    rng = random.Random(3)
    words = [rng.choice([0, 1, 5, 300, ROW // 2, ROW - 1, ROW, ROW + 1]) for _ in range(60)]
    tensors = [draw(2 * length, rng.choice(TYPES)) for length in words]
    assert numbers(*tensors) == [number for tensor in tensors for number in numbers(tensor)]
    assert numbers() == []


def test_bits_of_no_usual_number_count() -> None:
    patterns = torch.tensor([0, -(2**31), 2**31 - 1, -1, 1, 0x7F800000, 0x7FC00001])
    values = patterns.to(torch.int32).view(torch.float32)  # zeros, NaN, subnormal, infinity
    assert numbers(values) == [plain_digest(values)]
    assert all_differ(*[values[[place]] for place in range(len(values))])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_view_has_the_digest_of_its_values(dtype: Any) -> None:
    table = draw(35 * 6, dtype).view(35, 6)
    flat = table.flatten()
    views = [table.T, table[:, ::2], table[1:, 1:5], table[3], *(flat[at:] for at in range(1, 8))]
    copies = [view.clone(memory_format=torch.contiguous_format) for view in views]
    assert numbers(*views) == numbers(*copies) == [plain_digest(view) for view in views]


def test_a_sparse_gradient_has_the_digest_of_its_dense_form() -> None:
    embedding = torch.nn.Embedding(9, 3, sparse=True)
    embedding(torch.tensor([4, 4, 1])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient.is_sparse
    assert numbers(gradient) == numbers(gradient.to_dense())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_flip_of_one_bit_changes_the_digest(dtype: Any) -> None:
    values = draw(19, dtype)
    flips = itertools.product(range(19), range(8 * dtype.itemsize))
    assert all_differ(values, *(flipped(values, place) for place in flips))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_swap_of_two_elements_changes_the_digest(dtype: Any) -> None:
    values = torch.arange(1, 33).to(dtype)

    def swapped(one: int, other: int) -> Any:
        order = torch.arange(32)
        order[[one, other]] = order[[other, one]]
        return values[order]

    pairs = itertools.combinations(range(32), 2)
    assert all_differ(values, *(swapped(*pair) for pair in pairs))


def test_equal_changes_of_two_words_do_not_cancel() -> None:
    words = bits(draw(40, torch.float64))

    def changed(*changes: tuple[int, int]) -> Any:
        other = words.clone()
        for place, change in changes:
            other[place] += change
        return other.view(torch.float64)

    tensors = [changed()]
    for change in (1, 2**32, 2**52, 2**62):
        for one, other in itertools.combinations(range(12), 2):
            tensors += [changed((one, change), (other, -change)),
                        changed((one, -change), (other, change))]  # fmt: skip
    assert all_differ(*tensors)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_two_pairs_of_changed_signs_have_one_digest(dtype: Any) -> None:
    values, sign = draw(64, dtype), 8 * dtype.itemsize - 1
    pairs = itertools.combinations(range(64), 2)  # 4 in a word of bfloat16: also in the same bit
    changed = (flipped(values, *((element, sign) for element in pair)) for pair in pairs)
    assert all_differ(values, *changed)


def test_flips_in_several_rows_change_the_digest() -> None:
    """One, or two of the highest bit."""
    values, rng = draw(3 * ROW, torch.float64), random.Random(5)
    flips = {((rng.randrange(3 * ROW), rng.randrange(64)),) for _ in range(100)}
    pairs = {tuple(sorted(rng.sample(range(3 * ROW), 2))) for _ in range(100)}
    flips |= {tuple((at, 63) for at in pair) for pair in pairs}
    assert all_differ(values, *(flipped(values, *places) for places in flips))


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
    for number in (0, 2, 3):
        parameters[number].grad = draw(6) + number
    step.add_gradients([{"params": parameters[2:]}, {"params": parameters[1:2]}])
    step.add_gradients([{"params": [parameters[0], torch.nn.Parameter(draw(3))]}])
    found = step.after_step()
    assert unsigned(int(found["step_digest"])) == plain_gradient_digest(
        [parameter.grad for parameter in parameters]
    )
    assert found["params_digest"].tolist() == digests(parameters).tolist()
    assert int(step.after_step()["step_digest"]) == 0  # of the next step


def test_the_rows_of_a_run_have_the_digests_of_the_loop(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = TinyModel(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    of_parameters, of_gradients = [], [0]
    with capture(model, optimizer, tmp_path / "run.zarr", variables="keyframes"):
        for _ in steps(model, optimizer):
            of_parameters.append([*map(plain_digest, model.parameters())])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            of_gradients.append(plain_gradient_digest([p.grad for p in model.parameters()]))
    of_parameters.append([*map(plain_digest, model.parameters())])
    ds = xr.open_zarr(tmp_path / "run.zarr", chunks=None)
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
        numbers = splitmix64(5)
        buffers = [model.running_mean, model.running_var, model.num_batches_tracked]
        assert found[-1] == unsigned(
            sum(plain_digest(buffer) * numbers[2 + n] for n, buffer in enumerate(buffers))
        )
    assert found[0] != found[1]
