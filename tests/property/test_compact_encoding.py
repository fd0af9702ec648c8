"""Runs that compute their rows hold any bits: those of the rule, altered ones, and noise."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from still_timer import commit_now
from stored_forms import stored_forms

from trajstore import RunWriter, open_run, verify
from trajstore.values.native_types import NATIVE_TYPES, cast, narrow, widen
from trajstore.values.optimizer_rule import SETTINGS, OptimizerRule, Rates

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
CLASSES = {
    "adamw": ("torch.optim.adamw.AdamW", ADAM),
    "adam": ("torch.optim.adam.Adam", {**ADAM, "maximize": True}),
    "rounded": ("trajstore.trainers.rounded_optimizer.RoundedAdamW", ADAM),
    "sgd": ("torch.optim.sgd.SGD", {"momentum": 0, "weight_decay": 0.1}),
    "none": ("of.my.own.Lion", {}),
}


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "tokens": draw(st.integers(1, 40)),
        "hidden": draw(st.integers(1, 9)),
        "rows": draw(st.integers(1, 20)),
        "block_rows": draw(st.integers(1, 9)),
        "W": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "state": draw(st.sampled_from(["same", "bfloat16", "float32"])),
        "optimizer": draw(st.sampled_from(sorted(CLASSES))),
        "clipped": draw(st.booleans()),
        "skips": draw(st.booleans()),
        "drifts": draw(st.booleans()),
        "noise": draw(st.sampled_from([0, 0.001, 0.2, 1])),
        "cut": draw(st.integers(0, 20)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def history(drawn: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Bits of each matrix, native types, and numbers of each step."""
    rng = np.random.default_rng(drawn["seed"])
    shape = (drawn["tokens"], drawn["hidden"])
    state = drawn["W"] if drawn["state"] == "same" else drawn["state"]
    natives = {"W": drawn["W"], "grad": drawn["W"], "exp_avg": state, "exp_avg_sq": state}
    name, settings = CLASSES[drawn["optimizer"]]
    rule = OptimizerRule.of(
        {"class": "AdamW", "hyperparameters": ADAM}
        if drawn["optimizer"] == "none"
        else {"class": name, "hyperparameters": settings}
    )
    values = {each: NATIVE_TYPES[native] for each, native in natives.items()}
    row = {each: np.zeros(shape, np.float32) for each in MATRICES}
    rates = {"lr": 0.01 / (1 + np.arange(drawn["rows"])), "loss": np.ones(drawn["rows"], "f4")}
    if drawn["clipped"]:
        rates["clip_coef"] = (0.5 ** rng.integers(0, 3, drawn["rows"])).astype(np.float32)
    if drawn["skips"]:
        rates["skipped"] = rng.integers(0, 2, drawn["rows"]).astype(np.float32)
        rates["skipped"][0] = np.nan  # no step leads to row 0
    if drawn["drifts"]:
        drift = rng.choice([0.5, 0.9, 1], (drawn["rows"], len(SETTINGS)))
        rates["hyperparameters"] = drift * [getattr(rule, name) for name in SETTINGS]
        rates["hyperparameters"][0] = np.nan
    skipped = rates.get("skipped", np.zeros(drawn["rows"])) == 1
    bits: dict[str, list[Any]] = {each: [] for each in MATRICES}
    for at in range(drawn["rows"]):
        shared = rng.standard_normal((1, shape[1]))
        grad = rng.standard_normal((shape[0], 1)) * shared * 10.0 ** rng.integers(-9, 3)
        with np.errstate(over="ignore"):
            row["grad"] = cast(grad.astype(np.float32), natives["grad"])
        if at and not skipped[at]:
            clip = rates["clip_coef"][at] if drawn["clipped"] else 1.0
            taken = at - int(skipped[: at + 1].sum())
            own = rates["hyperparameters"][at].tolist() if drawn["drifts"] else ()
            own = tuple(zip(SETTINGS, own, strict=False))
            numbers = Rates(lr=rates["lr"][at], clip=clip, step=taken, numbers=own)
            row |= rule.next_row(row, row["grad"], natives, numbers)
        for each in MATRICES:
            pattern = narrow(row[each], values[each])
            strange = rng.integers(0, 2 ** (8 * pattern.itemsize), shape, dtype=pattern.dtype)
            pattern = np.where(rng.random(shape) < drawn["noise"], strange, pattern)
            bits[each].append(pattern)
            row[each] = widen(pattern, values[each])
    return {each: np.array(rows) for each, rows in bits.items()}, natives, rates


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "4")), deadline=None)
@given(histories())
def test_any_bits_come_back(drawn: dict[str, Any]) -> None:
    bits, natives, rates = history(drawn)
    name, settings = CLASSES[drawn["optimizer"]]
    rate_types = {"lr": "float64", "loss": "float32", "clip_coef": "float32", "skipped": "float32",
                  "hyperparameters": "float64"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"

        def append(writer: RunWriter, first: int, stop: int) -> None:
            for at in range(first, stop):
                places = writer.next_row()
                for each in MATRICES:
                    places[each][...] = bits[each][at]
                for each, values in rates.items():
                    places[each][...] = values[at : at + 1].view(places[each].dtype)[0]
                writer.commit_row(at)

        with RunWriter.create(
            path,
            token=np.arange(drawn["tokens"]),
            hidden=drawn["hidden"],
            variables=natives | {each: rate_types[each] for each in rates},
            hyperparameter=SETTINGS,
            attributes={"optimizer": {"class": name, "hyperparameters": settings}},
            block_rows=drawn["block_rows"],
            commit_every=None,
            encoding="compact",
        ) as writer:
            half = drawn["rows"] // 2
            append(writer, 0, half)
            if half:
                commit_now(writer)
            append(writer, half, drawn["rows"])
        fingerprint = xr.open_zarr(path).attrs["content_digest"]
        assert verify(path).clean
        cut = min(drawn["cut"], drawn["rows"])
        with RunWriter.resume(path, rows=cut, commit_every=None) as writer:
            append(writer, cut, drawn["rows"])
        assert xr.open_zarr(path).attrs["content_digest"] == fingerprint
        if not drawn["noise"]:
            assert not any(form.get("corrected") for form in stored_forms(path).values())
        for reader in (xr.open_zarr, open_run):
            ds = reader(path)
            for each in MATRICES:
                expected = widen(bits[each], NATIVE_TYPES[natives[each]])
                assert ds[each].values.tobytes() == expected.tobytes(), each
            token = drawn["seed"] % drawn["tokens"]
            np.testing.assert_array_equal(
                ds.W[:, token].values, widen(bits["W"][:, token], NATIVE_TYPES[natives["W"]])
            )
