from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from bits_and_calls import Cli, random_bits

from trajstore import RunWriter


def record(
    path: Path, rows: int, changed: tuple[int, int] | None = None, parameter: str = "W"
) -> Path:
    """A run of finite values, with one bit of W changed in one row at one token."""
    with RunWriter.create(
        path, token=np.arange(5), hidden=3, variables={"W": "bfloat16", "loss": "float32"},
        attributes={"recording": {"parameter": parameter}},
    ) as run:  # fmt: skip
        for step in range(rows):
            w = random_bits((5, 3), step) & 0xBFFF  # exponents that are finite
            if changed and step == changed[0]:
                w[changed[1], 0] ^= 1
            run.append(step=step, W=w, loss=np.float32(step))
    return path


def test_the_first_difference_is_named(tmp_path: Path, trajstore_cli: Cli) -> None:
    one, other = record(tmp_path / "a.zarr", 9), record(tmp_path / "b.zarr", 7, (4, 2))
    text = trajstore_cli("compare", one, other).stdout
    assert "Over 7 common steps and 2 common variables, the runs differ in W.\n" in text
    assert "The first run has 9 rows, the second 7.\n" in text
    facts = json.loads(trajstore_cli("compare", one, other, "--json").stdout)
    assert facts["variables"]["W"]["first_difference"] == 4
    assert facts["variables"]["W"]["differing_steps"] == 1
    assert [value > 0 for value in facts["variables"]["W"]["distance"]] == [
        step == 4 for step in range(7)
    ]
    assert facts["variables"]["loss"]["first_difference"] == -1


def test_over_names_the_step_from_which_losses_differ(tmp_path: Path, trajstore_cli: Cli) -> None:
    one, other = record(tmp_path / "a.zarr", 5), record(tmp_path / "b.zarr", 5)
    text = trajstore_cli("compare", one, other, "--over", "1%").stdout
    assert "are identical, bit for bit" in text
    assert "The losses never differ by more than 1%; the largest difference: 0.000%" in text
    with RunWriter.resume(other) as run:
        run.append(step=5, W=np.zeros((5, 3), "f4"), loss=np.float32(5.1))
    with RunWriter.resume(one) as run:
        run.append(step=5, W=np.zeros((5, 3), "f4"), loss=np.float32(5))
    text = " ".join(trajstore_cli("compare", one, other, "--over", "1%").stdout.split())
    assert "differ by more than 1% from step 5 on, at 1 of 1 step; the largest" in text
    facts = json.loads(trajstore_cli("compare", one, other, "--over", "50%", "--json").stdout)
    assert facts["loss"]["first_over"] == -1
    assert (
        "expected a percentage" in trajstore_cli("compare", one, other, "--over", "1", rc=2).stderr
    )


def test_a_name_stands_for_the_two_matrices_of_a_training(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    record(tmp_path / "un.E.zarr", 3, parameter="E")
    alone = trajstore_cli("compare", tmp_path / "un.zarr", rc=2).stderr
    assert "expected two runs" in alone
    record(tmp_path / "un.W.zarr", 3, (1, 2), parameter="W")
    text = trajstore_cli("compare", tmp_path / "un.zarr").stdout
    assert "Over 3 common steps and 2 common variables, the runs differ in W.\n" in text


def test_variables_that_only_one_run_has_are_named(tmp_path: Path, trajstore_cli: Cli) -> None:
    one = record(tmp_path / "a.zarr", 2)
    with RunWriter.create(
        tmp_path / "b.zarr",
        token=np.arange(5),
        hidden=3,
        variables={"W": "bfloat16", "grad": "float32", "logits": "float32"},
    ) as run:
        for step in range(2):
            w = random_bits((5, 3), step) & 0xBFFF
            run.append(step=step, W=w, grad=np.zeros((5, 3), "f4"), logits=np.zeros(5, "f4"))
    text = trajstore_cli("compare", one, run.path).stdout
    assert "Over 2 common steps and 1 common variable, the runs are identical" in text
    assert "Only the first run has loss.\nOnly the second run has grad, logits.\n" in text
    facts = json.loads(trajstore_cli("compare", one, run.path, "--json").stdout)
    assert (facts["only_first"], facts["only_second"]) == (["loss"], ["grad", "logits"])


def test_what_cannot_be_compared_says_why(tmp_path: Path, trajstore_cli: Cli) -> None:
    one = record(tmp_path / "a.zarr", 2)
    for token, rc, told in (
        ([4, 2, 9, 0, 1, 3], 0, "has 5 tokens, the second 6; only the 5 common tokens"),
        ([7, 8], 2, "no common token"),
    ):
        with RunWriter.create(
            tmp_path / f"{rc}.zarr", token=token, hidden=3, variables={"W": "bfloat16"}
        ) as run:
            run.append(step=0, W=np.zeros((len(token), 3), "f4"))
        done = trajstore_cli("compare", one, run.path, rc=rc)
        assert told in " ".join((done.stdout + done.stderr).split())
