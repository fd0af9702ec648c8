"""The compiled loop gives the bits of the rule in NumPy, also of NaN, infinity and subnormals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from trajstore.codec import adam_loop  # noqa: E402
from trajstore.codec.chunk import chain  # noqa: E402
from trajstore.codec.computed_rows import ComputedUnit  # noqa: E402
from trajstore.values.native_types import NATIVE_TYPES  # noqa: E402
from trajstore.values.optimizer_rule import OptimizerRule  # noqa: E402

ROWS, SHAPE = 6, (37, 61)  # more than the loop takes at a time, and no multiple of it


def unit_of(natives: dict[str, str], **settings: Any) -> ComputedUnit:
    given = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, **settings}
    rule = OptimizerRule.of({"class": given.pop("name", "AdamW"), "hyperparameters": given})
    chains = {name: chain(NATIVE_TYPES[native], 3, small=True) for name, native in natives.items()}
    return ComputedUnit(rule=rule, chains=chains)


@pytest.mark.nightly  # each combination of types is compiled, for seconds
@pytest.mark.parametrize(
    ("native", "state", "settings"),
    [
        ("bfloat16", "float32", {"name": "Adam", "betas": [0.3, 0.99]}),
        ("bfloat16", "float32", {"name": "RoundedAdamW", "maximize": True, "amsgrad": True}),
        ("bfloat16", "float32", {"eps": 0}),  # and a second moment of 0 divides by 0
        ("bfloat16", "bfloat16", {}),
        ("float32", "float32", {"weight_decay": 0}),
    ],
)
def test_the_loop_gives_the_bits_of_the_rule(
    native: str, state: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    natives = {"W": native, "grad": native, "exp_avg": state, "exp_avg_sq": state}
    unit = unit_of(natives, **settings)
    rng = np.random.default_rng(1)
    bits = {
        name: rng.integers(0, 2 ** (8 * NATIVE_TYPES[each].itemsize), (ROWS, *SHAPE))
        .astype(NATIVE_TYPES[each].bits)
        for name, each in natives.items()
    }  # fmt: skip
    for each in bits.values():
        each[:, :5] = 0
    rates = {
        "step": np.array([0, 1, 2, 3, 50, 9000]),
        "lr": np.array([np.nan, 1e-3, 1e-3, np.nan, 0.3, 1e-5]),
        "clip_coef": np.array([np.nan, 1, 0.5, 1, 0.25, np.nan], np.float32),
        "skipped": np.array([0, 0, 0, 0, 0, 0], np.float32),
    }
    made = []
    for compiled in (False, True):
        loop = adam_loop.CompiledLoop("trajstore.codec.adam_loop", "adam_rows")
        monkeypatch.setattr(loop, "is_worth", lambda count, compiled=compiled: compiled)
        monkeypatch.setattr(adam_loop, "_LOOP", loop)
        out = {name: np.zeros_like(bits[name]) for name in unit.rule.state}
        numbers = unit._rates(unit.rule, rates, 0)
        unit._follow(bits, out, unit.rule.state, numbers)
        assert loop._ready or not compiled
        back = {name: bits[name].copy() for name in bits}
        for name in out:
            back[name][1:] = out[name][1:]
        unit._follow(back, back, unit.rule.state, numbers)
        for name, given in bits.items():
            np.testing.assert_array_equal(back[name], given)
        made.append(out)
    for name in unit.rule.state:
        np.testing.assert_array_equal(made[0][name], made[1][name])
