from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

from trajstore.errors import InvalidArgument
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.rounded_optimizer import (
    RoundedAdam,
    RoundedAdamW,
    RoundedSGD,
    round_stochastically,
)

CLASSES = [
    (RoundedAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (RoundedAdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.99), "amsgrad": True}),
    (RoundedSGD, torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    (RoundedSGD, torch.optim.SGD, {"lr": 1e-1}),
]
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHAPES = ((37, 5), (11,), ())


def parameters(dtype: Any, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def give_gradients(params: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator) * 1e-2
        parameter.grad = gradient.to(parameter.dtype)


def train(optimizer: Any, params: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(params, step)
        optimizer.step()


def bits(params: list[Any], optimizer: Any) -> list[Any]:
    """Everything that is trained, for comparisons of bits and types."""
    tensors = [p.detach() for p in params]
    tensors += [v for p in params for _, v in sorted(optimizer.state[p].items())]
    return [(t.dtype, t.flatten().view(torch.uint8).tolist()) for t in tensors]


def state_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """Without the count by which SGD rounds at random; torch's own has none."""
    state = dict(optimizer.state[parameter])
    if isinstance(optimizer, RoundedSGD) and optimizer.defaults["rounding"] == "stochastic":
        state.pop("step", None)
    return state


@pytest.mark.parametrize(("rounded", "real", "settings"), CLASSES)
@pytest.mark.parametrize(
    ("weights", "state", "rounding"),
    [
        *product(("bfloat16", "float16"), ("bfloat16", "float32"), ("nearest",)),
        ("float32", "float32", "stochastic"),  # nothing is rounded
    ],
)
def test_each_step_is_the_real_one_in_float32_rounded_once(
    rounded: Any, real: Any, settings: dict[str, Any], weights: str, state: str, rounding: str
) -> None:
    params = parameters(TYPES[weights])
    optimizer = rounded(params, state_dtype=state, rounding=rounding, **settings)
    for step in range(4):
        give_gradients(params, step)
        expected = []
        for parameter in params:
            wide = torch.nn.Parameter(parameter.detach().float().clone())
            wide.grad = parameter.grad.float().clone()
            alone = real([wide], **settings)
            before = state_of(optimizer, parameter)
            if before:
                alone.state[wide] = {name: value.float().clone() for name, value in before.items()}
            alone.step()
            after = alone.state[wide]
            rounded_state = {
                name: value if name == "step" else value.to(TYPES[state])
                for name, value in after.items()
                if value is not None
            }
            expected.append((wide.detach().to(TYPES[weights]), rounded_state))
        optimizer.step()
        for parameter, (W, values) in zip(params, expected, strict=True):
            assert torch.equal(parameter, W)
            found = state_of(optimizer, parameter)
            assert found.keys() == values.keys()
            for name, value in values.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)


def test_float64_anywhere_is_computed_in_float64() -> None:
    params = parameters(torch.bfloat16)
    optimizer = RoundedAdam(params, state_dtype="float64")
    train(optimizer, params, 0, 3)
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype == torch.float64
    assert not torch.equal(state["exp_avg"], state["exp_avg"].float().double())
    narrow = RoundedAdam(parameters(torch.float64), state_dtype="float32")
    train(narrow, narrow.param_groups[0]["params"], 0, 1)
    assert {v.dtype for s in narrow.state.values() for v in s.values()} == {torch.float32}


@pytest.mark.parametrize(("rounded", "_real", "settings"), CLASSES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("state", ["bfloat16", "float32"])
def test_a_state_dict_carries_a_training_on_bit_for_bit(
    rounded: Any, _real: Any, settings: dict[str, Any], rounding: str, state: str
) -> None:
    own = {"state_dtype": state, "rounding": rounding, "rounding_seed": 7}
    params = parameters(torch.bfloat16)
    optimizer = rounded(params, **own, **settings)
    train(optimizer, params, 0, 3)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    # Its own settings are those of the state dict.
    other = rounded(again, state_dtype="float64", **settings)
    saved = copy.deepcopy(optimizer.state_dict())
    # The order of the state does not enter.
    saved["state"] = {k: dict(reversed(v.items())) for k, v in saved["state"].items()}
    other.load_state_dict(saved)
    assert bits(params, optimizer) == bits(again, other)
    assert other.param_groups[0]["state_dtype"] == state
    train(optimizer, params, 3, 6)
    train(other, again, 3, 6)
    assert bits(params, optimizer) == bits(again, other)
    for index, values in saved["state"].items():  # what was loaded is not trained on
        for name, value in values.items():
            if value is not None:
                assert not torch.equal(value, other.state[again[index]][name])


def test_a_state_of_the_real_class_is_taken_up_as_hooks_change_it() -> None:
    params = parameters(torch.bfloat16)
    real = torch.optim.AdamW(params)
    train(real, params, 0, 2)
    optimizer = RoundedAdamW(params, state_dtype="float32", rounding="stochastic")
    optimizer.load_state_dict(real.state_dict())
    state = optimizer.state[params[0]]["exp_avg"]
    assert state.dtype == torch.bfloat16
    train(optimizer, params, 2, 3)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    assert optimizer.param_groups[0]["rounding"] == "stochastic"
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given | {"state": {}})
    optimizer.load_state_dict(real.state_dict())
    assert not optimizer.state


def test_a_closure_makes_the_gradients() -> None:
    (W,) = params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    optimizer = RoundedSGD(params, lr=0.5, state_dtype="float32")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (W.float() ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert torch.equal(W, torch.zeros(3, dtype=W.dtype))


def test_it_leaves_the_global_generator_alone_and_follows_its_seed() -> None:
    ends = []
    for seed in (3, 3, 4):
        params = parameters(torch.bfloat16)
        optimizer = RoundedAdamW(
            params, state_dtype="bfloat16", rounding="stochastic", rounding_seed=seed
        )
        torch.manual_seed(len(ends))
        before = torch.get_rng_state()
        train(optimizer, params, 0, 4)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(bits(params, optimizer))
    assert ends[0] == ends[1] != ends[2]


def test_how_many_threads_there_are_does_not_enter() -> None:
    ends = []
    for number in (1, 2):
        with process_mode(number):
            W = torch.nn.Parameter(torch.ones(400, 300, dtype=torch.bfloat16))
            optimizer = RoundedAdamW([W], state_dtype="bfloat16", rounding="stochastic")
            W.grad = torch.linspace(-1, 1, W.numel()).view_as(W).to(W.dtype)
            optimizer.step()
            ends.append(W.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_dtype": "int8"}, "RoundedAdam: state_dtype is 'int8', expected one of bfloat16"),
        ({"state_dtype": torch.float32}, "state_dtype is torch.float32, expected one of"),
        ({"rounding": "up"}, "rounding is 'up', expected one of nearest, stochastic"),
        ({"rounding_seed": 1.5}, "rounding_seed is 1.5, expected an integer"),
        ({"foreach": True}, "does not take foreach=True: it steps one parameter at a time"),
    ],
)
def test_impossible_settings_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    given = {"state_dtype": "float32"} | settings
    with pytest.raises(InvalidArgument, match=message):
        RoundedAdam(parameters(torch.bfloat16), **given)
    optimizer = RoundedAdam(parameters(torch.bfloat16), state_dtype="float32")
    with pytest.raises(InvalidArgument, match=message):
        optimizer.add_param_group({"params": parameters(torch.float32), **settings})
    assert len(optimizer.param_groups) == 1


def test_what_no_optimizer_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid beta parameter"):  # by the real class
        RoundedAdam(parameters(torch.bfloat16), betas=(0.9, 1.5), state_dtype="float32")
    number = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidArgument, match=r"parameter of torch\.complex64, expected a real"):
        RoundedSGD([number], lr=1.0, state_dtype="float32")
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = RoundedSGD(embedding.parameters(), lr=1.0, state_dtype="float32")
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidArgument, match="got a sparse gradient, expected a dense one"):
        optimizer.step()
    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    for wide, dtype in ((float32, float32), (float32, torch.float64), (bfloat16, float16)):
        with pytest.raises(InvalidArgument, match=f"got {wide} to round to {dtype}, expected fl"):
            round_stochastically(torch.ones(2, dtype=wide), dtype, torch.Generator())


# Stochastic rounding -------------------------------------------------------------------------


NARROWINGS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float64, torch.float32),
]


@pytest.mark.parametrize(("wide", "dtype"), NARROWINGS, ids=str)
def test_values_of_the_type_stay(wide: Any, dtype: Any) -> None:
    """Across its whole range, and infinities."""
    signed = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(signed)
    every = torch.linspace(info.min, info.max, 65536, dtype=torch.float64).to(signed).view(dtype)
    every = torch.cat([every, torch.tensor([0.0, -0.0, torch.inf, -torch.inf], dtype=dtype)])
    values = every[~every.isnan()].to(wide)
    rounded = round_stochastically(values, dtype, torch.Generator().manual_seed(1))
    assert torch.equal(rounded.to(wide), values)
    assert torch.equal(rounded.signbit(), values.signbit())
    nan = torch.tensor([float("nan")], dtype=wide)
    assert round_stochastically(nan, dtype, torch.Generator()).isnan().all()


@pytest.mark.parametrize(("wide", "dtype"), NARROWINGS, ids=str)
def test_stochastic_rounding_has_the_right_mean(wide: Any, dtype: Any) -> None:
    """Around one, below it, among subnormal numbers, at zero, and at the largest number."""
    signed = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    ends = torch.tensor([1.0, torch.finfo(dtype).max], dtype=dtype).view(signed)
    low = torch.stack([ends[0], ends[0] - 1, ends[1] - 1, ends[0] * 0 + 3, ends[0] * 0])
    below, above = (bits.view(dtype).to(wide) for bits in (low, low + 1))
    number, fraction = 40_000, 0.3125
    spread = (fraction * (1 - fraction) / number) ** 0.5
    for sign in (1, -1):
        value = (sign * (below + (above - below) * fraction)).repeat(number, 1)
        rounded = round_stochastically(value, dtype, torch.Generator().manual_seed(2)).to(wide)
        up = rounded == sign * above
        assert (up | (rounded == sign * below)).all()
        assert ((up.double().mean(0) - fraction).abs() < 5 * spread).all()


def test_beyond_the_largest_number_it_is_rounded_to_nearest() -> None:
    largest = torch.finfo(torch.float16).max
    values = torch.tensor([largest + 1, largest + 15.9, largest + 16, 1e30]).repeat(100, 1)
    values = torch.cat([values, -values])
    rounded = round_stochastically(values, torch.float16, torch.Generator().manual_seed(3))
    assert torch.equal(rounded, values.half())
    assert rounded[0, 0] == largest
    assert rounded[0, 3] == torch.inf
