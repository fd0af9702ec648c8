"""What a replay reads and says, and which steps it leaves out, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from altered_runs import change_attributes, flip
from trainings import scaled_run, tiny_run

from trajstore import RunWriter, export, open_run
from trajstore.cli.run_commands import print_replay
from trajstore.errors import TrajstoreError
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.trainers import capture, replay, what_if
from trajstore.trainers.replays.recorded_rows import RecordedRows

SUMMARIES = ("grad_token_norm", "W_step_norm", "W_ulp_l1")


def reasons(path: Path) -> dict[str, tuple[int, int, int]]:
    """Number, first and last of the steps that are not proven, by reason; nothing is wrong."""
    found = replay(path)
    assert (found.clean, found.findings) == (True, ())
    assert found.replayed + sum(one.steps for one in found.unreplayed) == found.steps
    return {one.reason: (one.steps, one.first, one.last) for one in found.unreplayed}


def test_large_blocks_are_read_in_parts(tmp_path: Path) -> None:
    rows = RecordedRows(open_tiled(tiny_run(tmp_path / "run.zarr", count=20, block_rows=16)))
    whole, parts = (list(rows.read(["W"], window=window)) for window in (1 << 20, 5 * 17 * 8 * 4))
    assert [row.step for row in parts] == [row.step for row in whole] == [*range(21)]
    for one, other in zip(parts, whole, strict=True):
        assert np.array_equal(one.bits["W"], other.bits["W"])


def test_progress_counts_rows_and_the_console_shows_what_is_wrong_and_what_is_not_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    found = replay(
        tiny_run(tmp_path / "run.zarr", count=3), on_progress=lambda *at: seen.append(at)
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    print_replay(found.facts())
    shown = capsys.readouterr().out
    assert "Replayed 3 of 3 steps with torch.optim.adamw.AdamW: 0 values differ." in shown
    path = tiny_run(tmp_path / "some.zarr", variables="weights+grads", count=7, every=2)
    flip(path, "grad", (0, 3, 1), 0)
    print_replay(replay(path).facts())
    shown = capsys.readouterr().out
    for sentence in (
        "0 values differ; 4 steps not proven.",
        "Problem: step 0, token 3, hidden 1: grad differs from the state before training.",
        "Not proven: 3 steps from 2 to 6 were not replayed: the row of the step before",
    ):
        assert sentence in shown


# Steps that are left out ------------------------------------------------------------------------


def test_only_pairs_of_consecutive_steps(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=7, every=2)
    ((reason, steps),) = reasons(path).items()
    assert "every > 1" in reason
    assert steps == (3, 2, 6)
    assert replay(path).variables["exp_avg"].steps == 1  # 6 to 7
    path = tiny_run(tmp_path / "rebuilt.zarr", count=7, every=2, variables="weights+grads")
    found = reasons(path)
    assert list(found.values()) == [(3, 2, 6), (1, 7, 7)]
    assert "exp_avg, exp_avg_sq is not recorded" in list(found)[1]


def test_skipped_steps_between_rows_are_not_guessed(tmp_path: Path) -> None:
    held = ("W", "grad", "exp_avg", "exp_avg_sq", "lr", "clip_coef", "skipped")  # no step_count
    path = scaled_run(tmp_path / "run.zarr", fused=False, count=13, every=2, variables=held)
    assert any("the number of skipped steps before it" in reason for reason in reasons(path))


def test_an_unknown_factor_of_a_gradient_before_clipping(tmp_path: Path) -> None:
    def clip(model: Any) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    path = tiny_run(tmp_path / "run.zarr", max_grad_norm=0.0, clip=0.0, change=clip)
    flip(path, "grad", (3, 1, 1), 20)
    ((reason, steps),) = reasons(path).items()
    assert "clip_coef is NaN" in reason
    assert steps == (1, 3, 3)
    note = {"note": "a closure", "first_step": 3, "last_step": 3, "count": 1, "unproven": [[3, 3]]}
    change_attributes(path, lambda root: root.update(notes=[note]))
    with pytest.raises(TrajstoreError, match="clip_coef is NaN at step 3"):
        what_if(path, tmp_path / "unknown.zarr")


def test_runs_without_gradients(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", variables=("weights", *SUMMARIES), count=3)
    ((reason, _),) = reasons(path).items()
    assert "gradient was not recorded; record weights+grads or matrix" in reason
    compared = {name: one.steps for name, one in replay(path).variables.items()}
    assert compared == {"W_step_norm": 3, "W_ulp_l1": 3}
    for missing in ("lr", "clip_coef"):
        names = [name for name in ("W", "grad", "loss", "lr", "clip_coef") if name != missing]
        path = tiny_run(tmp_path / f"{missing}.zarr", variables=names, count=3)
        ((reason, _),) = reasons(path).items()
        assert "every tier has it" in reason


DEFAULTS = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"class": "os.system"}, "the optimizer os.system cannot be replayed; supported"),
        ({"class": None}, "does not record its optimizer"),
        ({"hyperparameters": {}}, "does not record the optimizer's betas, eps, lr, weight_decay"),
        ({"hyperparameters": DEFAULTS | {"lr": "fast"}}, "refuses the recorded hyperparameters"),
    ],
)
def test_optimizers_that_are_not_known(change: Any, reason: str, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=3)
    change_attributes(path, lambda root: root["optimizer"].update(change))
    ((said, _),) = reasons(path).items()
    assert reason in said


def test_nothing_is_replayed_without_rows_or_settings(tmp_path: Path) -> None:
    held = {"W": "float32", "grad": "bfloat16"}
    for rows in (0, 3):
        path = tmp_path / f"{rows}.zarr"
        with RunWriter.create(path, token=[1, 2], hidden=3, variables=held) as run:
            for step in range(rows):
                zero = np.zeros((2, 3), "f4")
                run.append(step=step, W=zero, grad=zero if step else zero * np.nan)
        result = replay(path)
        assert (result.steps, result.replayed, result.clean) == (max(rows - 1, 0), 0, True)
    assert result.unreplayed[0].steps == 2
    assert not result.exact


def test_the_step_after_missing_steps_is_not_proven(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=9)
    export(path, tmp_path / "gaps.zarr", format="run", steps=[0, 1, 2, 5, 6, 8])
    assert reasons(tmp_path / "gaps.zarr") == {
        "steps 3 to 4 are missing": (1, 5, 5),
        "step 7 is missing": (1, 8, 8),
    }


# Recorded by `capture`: the recorder itself notes the steps ------------------------------------


@pytest.mark.parametrize(("tier", "rebuilt"), [("matrix", []), ("weights+grads", [(3, 5, 9)])])
def test_weights_that_the_loop_sets_between_steps(tier: str, rebuilt: Any, tmp_path: Path) -> None:
    """Later steps are proven, if they need no state from before."""

    def between(model: Any, number: int) -> None:
        if number + 2 in (4, 7, 8):
            with torch.no_grad():
                model.embedding.weight[3] = 0.5

    path = tiny_run(tmp_path / "run.zarr", count=9, variables=tier, between=between)
    found = reasons(path)
    assert "code outside optimizer.step() changed" in next(iter(found))
    assert [*found.values()] == [(3, 4, 8), *rebuilt]


SPARSE = {
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1), "", True),
    "sparse adam": (lambda p: torch.optim.SparseAdam(p, lr=0.1), "", True),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), "one by one", True),
    "sgd, each row once": (lambda p: torch.optim.SGD(p, lr=0.1), "", False),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "one by one", True),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own optimizers
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients(kind: str, tmp_path: Path) -> None:
    make, unproven, twice = SPARSE[kind]
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(50, 7, mode="sum", sparse=True)
    optimizer, path = make(list(bag.parameters())), tmp_path / "run.zarr"
    gradients = []
    with capture(bag, optimizer, path, parameter="weight"):
        for _ in range(12):
            ids = torch.randint(50, (4, 9)) if twice else torch.randperm(50)[:36].reshape(4, 9)
            weights = torch.randn(4, 7)
            weights[0] = 0  # rows of a batch whose gradient is 0
            (bag(ids) * weights).mean().backward()
            gradients.append(bag.weight.grad.coalesce().to_dense())
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_array_equal(open_run(path).grad[1:], torch.stack(gradients))
    found = reasons(path)
    assert [unproven in reason for reason in found] == [True] * bool(unproven)
    assert [*found.values()] == [(12, 1, 12)] * bool(unproven)
    if kind == "momentum":
        assert open_run(path).momentum_buffer[12].values.any()
    if kind == "sparse adam":
        with pytest.raises(TrajstoreError, match="only the rows of a batch"):
            what_if(path, tmp_path / "other.zarr")


STATEFUL = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("tier", ["matrix", "weights+grads"])
def test_an_optimizer_that_has_taken_steps(kind: str, tier: str, tmp_path: Path) -> None:
    def optimizer(parameters: Any) -> Any:
        made = STATEFUL[kind](parameters)
        for _ in range(3):
            for parameter in made.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            made.step()
        return made

    path = tiny_run(tmp_path / "run.zarr", optimizer, count=6, variables=tier)
    found = reasons(path)
    assert bool(found) == (tier == "weights+grads")  # it lacks the state
    if kind == "adamw":
        assert open_run(path).step_count.values.tolist() == [3, 4, 5, 6, 7, 8, 9]
    if (kind, tier) == ("adamw", "matrix"):
        ds = open_run(path)
        update = ds.traj.adam_update().adam_update.values
        np.testing.assert_allclose(update, ds.W.diff("step"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("tier", ["matrix", "weights+grads"])
def test_steps_without_a_gradient_are_none(kind: str, tier: str, tmp_path: Path) -> None:
    numbers = iter(range(9))

    def change(model: Any) -> None:
        if next(numbers) in (3, 4):
            model.head.weight.grad = None

    path = tiny_run(
        tmp_path / "run.zarr", STATEFUL[kind], count=9, change=change, variables=tier,
        parameter="head.weight",
    )  # fmt: skip
    assert np.isnan(open_run(path).grad[4:6]).all()
    assert reasons(path) == {}
    if kind == "adamw":
        what_if(path, tmp_path / "same.zarr")
        np.testing.assert_array_equal(open_run(tmp_path / "same.zarr").W, open_run(path).W)


def test_state_that_the_loop_replaces(tmp_path: Path) -> None:
    made: list[Any] = []

    def optimizer(parameters: Any) -> Any:
        made.append(STATEFUL["adamw"](parameters))
        return made[0]

    def between(model: Any, number: int) -> None:
        if number == 3:
            made[0].state.clear()

    path = tiny_run(tmp_path / "run.zarr", optimizer, count=6, between=between)
    ((reason, steps),) = reasons(path).items()
    assert "state of embedding.weight was written or replaced before a step" in reason
    assert steps == (1, 5, 5)


def test_a_fused_step_of_a_matrix_that_is_not_contiguous(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(41, 7, bias=False)
    model.weight = torch.nn.Parameter(torch.randn(41, 7).t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with capture(model, optimizer, tmp_path / "run.zarr", parameter="weight"):
        for _ in range(6):
            model(torch.randn(3, 41)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ((reason, steps),) = reasons(tmp_path / "run.zarr").items()
    assert "not contiguous" in reason
    assert steps == (6, 1, 6)


@pytest.mark.nightly  # importing the compiler takes seconds
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = torch.nn.Linear(9, 7, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    with capture(model, optimizer, tmp_path / "run.zarr", parameter="weight"):
        for compiled in (False, True, True, False):
            model(torch.randn(3, 9)).square().sum().backward()
            step() if compiled else optimizer.step()
            optimizer.zero_grad()
    ((reason, steps),) = reasons(tmp_path / "run.zarr").items()
    assert "is compiled" in reason
    assert steps == (2, 2, 3)


# Other machines ---------------------------------------------------------------------------------


OF_FIRST_STEP = ("W", "grad", "exp_avg", "exp_avg_sq", "lr", "clip_coef")
"""Without the hyperparameters of each step."""


@pytest.mark.parametrize(
    ("facts", "sentences"),
    [
        ({"cpu_capability": "AVX1024"}, ["AVX1024", "ATEN_CPU_CAPABILITY=avx1024"]),
        (
            {"device": "xpu:0", "device_name": "A770", "torch": "1.0"},
            ["recorded on xpu:0 (A770), replayed on cpu", "recorded with torch 1.0"],
        ),
    ],
)
def test_another_machine_rounds_otherwise_and_that_is_no_error(
    facts: dict[str, str], sentences: list[str], tmp_path: Path
) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=3, variables=OF_FIRST_STEP)
    here = open_run(path).attrs["provenance"]["cpu_capability"]
    assert here == torch.backends.cpu.get_cpu_capability()
    change_attributes(path, lambda root: root["provenance"].update(facts))
    flip(path, "W", (2, 3, 1), 1)
    found = replay(path)
    assert (found.clean, found.exact) == (True, False)
    assert found.variables["W"].differing > 0 < found.variables["W"].ulps
    pairs = zip(sentences, found.notes, strict=True)
    assert all(sentence in note for sentence, note in pairs)


@pytest.mark.parametrize(
    "facts", [{"cpu_capability": "AVX1024"}, {"device": "xpu"}, {"threads": 2}], ids=str
)
def test_a_run_that_was_resumed_elsewhere(facts: Any, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=9)
    resumed = [{"step": 5, "time": "2030-01-01T00:00:00+00:00", **facts}]
    change_attributes(path, lambda root: root["provenance"].update(resumed=resumed))
    flip(path, "W", (8, 3, 1), 20)
    found = replay(path)
    assert found.replayed == 9
    assert found.clean == ("threads" not in facts)
    assert found.differing
    flip(path, "W", (3, 3, 1), 20)
    assert [one.step for one in replay(path).findings[:2]] == [3, 4]
