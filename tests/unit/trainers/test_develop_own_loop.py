"""A loop reaches the state of any step from the keyframe before it, or an error names the step."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_runs import rewrite
from bits_and_calls import nightly_but
from crashing import killed
from damage import contents, flip
from small_trainings import examples, same_values, tiny_gpt2, trainer_of
from torch.nn.functional import cross_entropy
from trainings import (
    EVERY,
    STEPS,
    Accumulated,
    Loop,
    Scaled,
    Scheduled,
    batches,
    same,
)

from trajstore import open_run, verify
from trajstore.errors import (
    FormatError,
    InvalidArgument,
    NothingToResume,
    RecordingError,
    StepNotFound,
    VariableNotRecorded,
)
from trajstore.trainers import TrajectoryCallback, capture, develop, restore
from trajstore.trainers.process_mode import process_mode, process_modes

Recorded = Callable[..., tuple[Path, list[Any]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Records a kind of loop once; the run, and the states after each step."""
    folder = tmp_path_factory.mktemp("recorded")

    @functools.cache
    def record(kind: type[Loop], variables: str = "keyframes") -> tuple[Path, list[Any]]:
        path = folder / f"{kind.__name__}-{variables}.zarr"
        return path, kind().train(path, variables=variables)

    return record


@pytest.fixture
def run(recorded: Recorded, tmp_path: Path) -> Path:
    """A copy of the run of `Scheduled`."""
    return Path(shutil.copytree(recorded(Scheduled)[0], tmp_path / "run.zarr"))


@pytest.mark.parametrize("kind", nightly_but([Accumulated, Scaled], Accumulated))
def test_developed_steps_are_recorded_with_everything(
    kind: type[Loop], recorded: Recorded, tmp_path: Path
) -> None:
    path = recorded(kind)[0]  # before the capture, which would follow a training inside it
    loop = kind()
    options = {"scaler": loop.scaler, **loop.options}
    with capture(loop.model, loop.optimizers, tmp_path / "part.zarr", variables="everything",
                 first_step=3, **options):  # fmt: skip
        loop.develop(path, 5)
    part = open_run(tmp_path / "part.zarr", chunks=None)
    assert part.step.values.tolist() == [3, 4, 5]
    whole = open_run(recorded(kind, "everything")[0], chunks=None).sel(step=[3, 4, 5])
    assert {*part.data_vars} == {*whole.data_vars}
    for name in whole.data_vars:
        rows = [ds[name].values[ds.step.values > 3] for ds in (part, whole)]
        assert rows[0].tobytes() == rows[1].tobytes(), name
    for name in ("W", "params"):
        assert part[name].values[0].tobytes() == whole[name].values[0].tobytes()
    assert verify(tmp_path / "part.zarr").clean


class Unclipped(Scheduled):
    """A loop that forgets to clip."""

    def step(self, inputs: list[Any]) -> None:
        for part in inputs:
            logits = self.model(part["ids"])["logits"]
            cross_entropy(logits.flatten(0, 1).float(), part["targets"].flatten()).backward()
        self.take()


def test_another_loop_is_an_error_with_step_and_parameter_unless_allowed(run: Path) -> None:
    before = contents(run)
    with pytest.raises(
        NothingToResume,
        match=r"at step 4 W, params_digest and 1 more differ, in embedding.weight, mix.weight and "
        r".*step\(\) does what the loop did.*allow_different=True",
    ):
        Unclipped().develop(run, 5)
    assert contents(run) == before
    done = Unclipped().develop(run, 5, allow_different=True)
    assert (done.steps, done.keyframe) == (2, 3)
    assert done.difference is not None
    assert done.difference.startswith("at step 4 ")


def test_threads_and_modes_are_the_recorded_ones(tmp_path: Path) -> None:
    seen = []

    class Observed(Scheduled):
        def step(self, inputs: list[Any]) -> None:
            seen.append((torch.get_num_threads(), process_modes()))
            super().step(inputs)

    modes = {"default_dtype": "float64", "deterministic": 1}
    with process_mode(2, modes):
        Observed().train(tmp_path / "run.zarr", last=2)
    with process_mode(1):
        Observed().develop(tmp_path / "run.zarr", 1)
    assert seen == [(2, modes)] * 3


@pytest.mark.parametrize(
    ("name", "error"),
    [("keyframes/W/c.1.0.0", FormatError), ("keyframes/params_exp_avg/c.1.0", FormatError),
     ("params_digest/c.2.0", RecordingError), ("inputs/c.2.0", FormatError)],
)  # fmt: skip
def test_a_flipped_bit_is_named(name: str, error: type[Exception], run: Path) -> None:
    flip(run / name, 8 * 30 + 3)
    with pytest.raises(error, match=rf"{name}.*the checksum does not match"):
        Scheduled().develop(run, 5)


@pytest.mark.parametrize(
    ("variable", "places", "parameter"),
    [
        ("params", [(1, 5), (1, 9)], "mix.weight"),
        pytest.param("params", [(1, 66), (1, 67)], "mix.bias", marks=pytest.mark.nightly),
        pytest.param("W", [(1, 4, 0), (1, 6, 3)], "embedding.weight", marks=pytest.mark.nightly),
    ],
)
def test_an_altered_keyframe_does_not_fit_its_digest(
    variable: str, places: list[Any], parameter: str, run: Path
) -> None:
    for place in places:
        rewrite(run / "keyframes", variable, place)
    assert verify(run).clean  # each checksum fits
    with pytest.raises(FormatError, match=rf"the keyframe of step 3 .* digest of {parameter};"):
        Scheduled().develop(run, 5)
    assert Scheduled().develop(run, 2).difference is None


@pytest.mark.parametrize(("times", "after"), [(0, 3), (2, 5)])
def test_a_body_takes_exactly_one_step(times: int, after: int, run: Path) -> None:
    class Wrong(Scheduled):
        def step(self, inputs: list[Any]) -> None:
            for _ in range(times):
                super().step(inputs)

    with pytest.raises(InvalidArgument, match=rf"ended after optimizer step {after}, expected 4"):
        Wrong().develop(run, 5)


def test_steps_and_runs_that_cannot_be_developed(run: Path, recorded: Recorded) -> None:
    at: Any
    for source, at, kind, message in (
        (run, 9, StepNotFound, "no row of step 9"),
        (run, 1.5, InvalidArgument, r"got at=1\.5, expected a whole"),
        (recorded(Scheduled, "everything")[0], 5, VariableNotRecorded, "no keyframes; restore"),
    ):
        with pytest.raises(kind, match=message):
            Scheduled().develop(source, at)
    with pytest.raises(StepNotFound, match=r"from the keyframe 3 \(trajstore\.trainers\.develop"):
        restore(run, Scheduled().model, Scheduled().optimizers, step=5)


def test_a_step_whose_inputs_did_not_fit(tmp_path: Path) -> None:
    class Longer(Scheduled):
        def inputs(self, number: int) -> list[Any]:
            parts = super().inputs(number)
            longer = {name: part.repeat(50, 1) for name, part in parts[0].items()}
            return [longer] if number == 1 else parts

    Longer().train(tmp_path / "run.zarr", last=3)
    assert Longer().develop(tmp_path / "run.zarr", 1).difference is None
    with pytest.raises(VariableNotRecorded, match="inputs of step 2, because they did not fit"):
        Longer().develop(tmp_path / "run.zarr", 2)


def test_a_body_gets_the_indices_of_the_examples(tmp_path: Path) -> None:
    data = torch.cat([batch["input_ids"] for batch in batches(STEPS)])

    class Indexed(Scheduled):
        def inputs(self, number: int) -> list[Any]:
            return [{"batch": torch.tensor([number, 2, number + 5][: 3 - number % 2])}]

        def step(self, inputs: list[Any]) -> None:
            self.observe(batch=inputs[0]["batch"])
            ids = data[inputs[0]["batch"]]
            self.model(ids, ids)["loss"].backward()
            self.take()

    states = Indexed().train(tmp_path / "run.zarr")
    assert "inputs" not in open_run(tmp_path / "run.zarr")
    loop = Indexed()
    assert loop.develop(tmp_path / "run.zarr", 5).difference is None
    assert same(loop.state(), states[5])


LONGER: dict[str, Any] = {"last": 2 * STEPS, "block_rows": 1}


def train(path: Path, told: Connection) -> None:
    """Record a loop in a process, telling each step."""
    Accumulated().train(path, on_step=lambda run: told.send(run.step), **LONGER)


@pytest.mark.nightly
def test_a_killed_loop_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.zarr", tmp_path / "run.zarr"
    Accumulated().train(whole, **LONGER)
    assert killed(train, path, after_step=10)
    assert verify(path).clean
    Accumulated().resume(path, **LONGER)
    for part in (".", "keyframes"):
        same_values(whole / part, path / part)


@pytest.mark.nightly
def test_the_body_of_a_trainer(tmp_path: Path) -> None:
    """The inputs have the number of tokens that the loss is divided by."""
    torch.manual_seed(1)
    run = TrajectoryCallback(tmp_path / "run.zarr", variables="keyframes", keyframe_every=EVERY)
    given = {"gradient_accumulation_steps": 2, "max_steps": STEPS, "data": examples(30)}
    trainer_of(tiny_gpt2(), tmp_path, run, **given).train()
    model = tiny_gpt2()
    trainer = trainer_of(model, tmp_path, **given)
    optimizer = trainer.create_optimizer()

    def step(inputs: list[Any]) -> None:
        for part in inputs:
            count = part.pop("num_items_in_batch")
            trainer.compute_loss(model, part, num_items_in_batch=count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    for at in (5, 2):
        assert develop(tmp_path / "run.zarr", model, optimizer, step, at=at).difference is None


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_the_body_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from trajstore.trainers import LightningCallback

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.model = tiny_gpt2()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    path = tmp_path / "run.zarr"
    run = LightningCallback(path, module="model", variables="keyframes", keyframe_every=EVERY)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[run],
    )  # fmt: skip
    trainer.fit(Lit(), torch.utils.data.DataLoader(examples(30), batch_size=4, shuffle=True))
    other = Lit()
    optimizer = other.configure_optimizers()

    def step(inputs: list[Any]) -> None:
        other.training_step(inputs[0], 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    for at in (5, 2):
        assert develop(path, other.model, optimizer, step, at=at).difference is None


IDS = torch.arange(10).view(2, 5)


def test_a_pass_between_the_steps_changes_statistics_and_is_named(tmp_path: Path) -> None:
    loop = Accumulated()
    loop.after = lambda number: loop.model(IDS)  # type: ignore[method-assign]
    loop.train(tmp_path / "run.zarr")
    with pytest.raises(NothingToResume, match="at step 2 step_digest differs"):
        Accumulated().develop(tmp_path / "run.zarr", 2)


def test_other_buffers_at_the_end_are_no_keyframe(tmp_path: Path) -> None:
    loop = Accumulated()
    with capture(loop.model, loop.optimizers, tmp_path / "run.zarr", variables="keyframes",
                 keyframe_every=EVERY, **loop.options) as run:  # fmt: skip
        for number in range(2):
            loop.step(loop.inputs(number))
        loop.model(IDS)
    assert any("no keyframe of its last step" in note for note in run.notes())
    assert open_run(tmp_path / "run.zarr/keyframes").step.values.tolist() == [0, 1]
    loop.train(tmp_path / "run.zarr", first=2, last=3, resume=True)
    assert open_run(tmp_path / "run.zarr").step.values.tolist() == [0, 1, 2, 3]


def test_a_loop_continues_with_the_parameters_of_its_run(tmp_path: Path) -> None:
    loop, path = Accumulated(), tmp_path / "run.zarr"
    loop.train(path, last=2)
    with torch.no_grad():
        loop.model.normalization.bias += 1
    with pytest.raises(NothingToResume, match="params of the training differ"):
        loop.train(path, first=2, resume=True)


def test_draws_between_the_passes_of_a_step_are_noted(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Dropout(), torch.nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"variables": "keyframes", "parameter": "0.weight"}
    for draws in (False, True):
        with capture(model, optimizer, tmp_path / f"{draws}.zarr", **options) as run:
            for _ in range(2):
                torch.rand(1)  # before the first pass: each row has the state after it
                for _ in range(2):
                    model(torch.arange(5)).sum().backward()
                    if draws:
                        torch.rand(1)
                optimizer.step()
        assert any("between the forward passes" in note for note in run.notes()) == draws


def test_an_error_of_the_body_has_the_names_of_the_inputs(run: Path) -> None:
    def step(inputs: list[Any]) -> None:
        raise KeyError("targets")

    loop = Scheduled()
    with pytest.raises(KeyError) as error:
        develop(run, loop.model, loop.optimizers, step, at=2)
    assert "the inputs of step 1 of" in error.value.__notes__[0]
    assert "[['ids', 'targets']]" in error.value.__notes__[0]


OWN_LOOP = """
import sys
OTHERS = dict.fromkeys(
    "accelerate datasets huggingface_hub platformdirs pooch pydantic tokenizers tomli_w "
    "transformers".split()
)
sys.modules.update(OTHERS)  # an import fails

import torch
import trajstore
from trajstore.errors import MissingExtra
from trajstore.trainers import capture

assert "xarray" not in sys.modules  # it takes long
from trajstore.trainers import checkout, develop, evaluate, replay, restore

def build():
    return torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16))

model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(inputs):
    optimizer.zero_grad()
    ids = inputs[0]["input"]
    torch.nn.functional.cross_entropy(model(ids), ids).backward()
    optimizer.step()

def record(steps, **options):
    with capture(model, optimizer, "own.zarr", variables="keyframes", keyframe_every=4, **options):
        for number in range(steps):
            step([{"input": torch.arange(number, number + 8) % 16}])

record(6)
record(4, resume=True, first_step=restore("own.zarr", model, optimizer))
assert trajstore.open_run("own.zarr").sizes["step"] == 11
assert replay("own.zarr").clean
assert develop("own.zarr", model, optimizer, step, at=7).difference is None
assert checkout("own.zarr", "folder", step=8, constructor=build).step == 8

def norm(model, step):
    return {"norm": model[0].weight.norm()}

assert evaluate("own.zarr", norm, "norms.zarr", steps=[8], constructor=build).steps == 1
try:
    from trajstore.trainers import TrajectoryCallback
except MissingExtra as error:
    print(error)
print([name for name in OTHERS if sys.modules[name] is not None])
"""


@pytest.mark.nightly
def test_an_own_loop_needs_torch_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_LOOP], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    needed, imported = done.stdout.splitlines()
    assert "needs the extra train" in needed
    assert imported == "[]"
