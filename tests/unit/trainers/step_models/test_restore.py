"""A loop continues from a recorded step without a checkpoint, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from list_recorder import batches  # noqa: E402
from muon_runs import SmallGPT, muon_and_adamw  # noqa: E402
from muon_runs import train as train_gpt  # noqa: E402
from recorded_models import same  # noqa: E402
from small_trainings import same_values  # noqa: E402

from trajstore.errors import InvalidArgument, NothingToResume  # noqa: E402
from trajstore.trainers import capture, optimizer_state_at, restore  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 7


class Model(torch.nn.Module):
    """Dropout, changing buffers, a parameter without gradient in odd steps, one not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4)
        self.normalization = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.1)
        self.sometimes = torch.nn.Linear(4, 4)
        self.fixed = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 11, bias=False)

    def forward(self, ids: Any, *, whole: bool) -> Any:
        hidden = self.normalization(self.fixed(self.embedding(ids)).flatten(0, 1))
        return self.head(self.dropout(torch.tanh(self.sometimes(hidden)) if whole else hidden))


def built() -> tuple[Any, Any]:
    model = Model()
    groups = [
        {"params": [model.embedding.weight, model.head.weight], "weight_decay": 0.1},
        {"params": [*model.normalization.parameters(), *model.sometimes.parameters()], "lr": 0.1},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def train(
    path: Path, model: Any, optimizer: Any, *, first: int = 0, last: int = STEPS, every: int = 1
) -> None:
    """Train with two micro-batches and clipping; the examples of a step follow from its number."""
    with capture(
        model, optimizer, path, variables="everything", parameter="embedding.weight",
        resume=first > 0, first_step=first, max_grad_norm=0.05, every=every,
    ) as recorder:  # fmt: skip
        for step in range(first, last):
            optimizer.param_groups[1]["lr"] = 0.1 / (step + 1)
            losses = []
            for part in range(2):
                ids = (torch.arange(10).reshape(2, 5) * (step + part + 1)) % 11
                logits = model(ids, whole=step % 2 == 0)
                loss = torch.nn.functional.cross_entropy(logits, ids.flatten()) / 2
                loss.backward()
                losses.append(loss.detach() * 2)
            recorder.observe(loss=torch.stack(losses).mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("restored") / "run.zarr"
    torch.manual_seed(5)
    train(path, *built())
    return path


@pytest.mark.parametrize("step", [None, 2])
def test_a_loop_continues_from_a_recorded_step(run: Path, step: int | None, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run.zarr"))
    model, optimizer = built()
    first = restore(path, model, optimizer, step=step)
    assert first == (STEPS - 1 if step is None else step)
    train(path, model, optimizer, first=first)
    ds = same_values(run, path)
    assert "random_state" in ds
    assert "buffers" in ds


def test_the_last_step_of_a_model_with_dropout_is_repeated(run: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"does not hold step {STEPS + 1}"):
        restore(run, *built(), step=STEPS)


def test_rows_with_a_next_step_can_be_restored(tmp_path: Path) -> None:
    train(tmp_path / "run.zarr", *built(), every=3)
    assert restore(tmp_path / "run.zarr", *built()) == 6
    with pytest.raises(InvalidArgument, match=r"does not hold step 4, .* restore step 6"):
        restore(tmp_path / "run.zarr", *built(), step=3)
    train(tmp_path / "none.zarr", *built(), every=3, last=3)
    with pytest.raises(InvalidArgument, match="no step that can be restored"):
        restore(tmp_path / "none.zarr", *built())


def test_types_are_never_changed(run: Path) -> None:
    model, optimizer = built()
    with pytest.raises(InvalidArgument, match=r"embedding.weight is float64 in the model"):
        restore(run, model.double(), optimizer)


def test_the_optimizer_is_of_the_recorded_class(run: Path) -> None:
    model, _ = built()
    other = torch.optim.RAdam(model.parameters())
    with pytest.raises(InvalidArgument, match=r"the optimizer is RAdam, and that of .* was AdamW"):
        restore(run, model, other)


def test_a_resume_compares_the_whole_state(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run.zarr"))
    model, optimizer = built()
    restore(path, model, optimizer, step=3)
    optimizer.state[model.sometimes.weight]["exp_avg"][0, 0] += 1
    model.normalization.running_mean[1] = 2
    with pytest.raises(NothingToResume, match="buffers, params_exp_avg of the training differ"):
        train(path, model, optimizer, first=3)
    same_values(run, path)  # nothing has changed


def test_muon_and_adamw_continue_from_a_step_in_the_middle(tmp_path: Path) -> None:
    data = batches(30)
    path = tmp_path / "run.zarr"
    options = {"variables": "everything", "encoding": "compact"}
    model = SmallGPT()
    pair = muon_and_adamw(model)
    with capture(model, pair, path, **options):
        train_gpt(model, pair, data)
    weights = [one.clone() for one in model.parameters()]
    ended = [one.state_dict() for one in pair]
    assert same([one["state"] for one in optimizer_state_at(path, 30)],
                [one["state"] for one in ended])  # fmt: skip

    model = SmallGPT(seed=1)
    pair = muon_and_adamw(model)
    assert restore(path, model, pair[::-1], step=18) == 18
    for optimizer, held in zip(pair, optimizer_state_at(path, 18), strict=True):
        assert same(optimizer.state_dict()["state"], held["state"])
        optimizer.load_state_dict(held)
    copied = Path(shutil.copytree(path, tmp_path / "copy.zarr"))
    with capture(model, pair, copied, resume=True, first_step=18, **options):
        train_gpt(model, pair, data[18:], first=18)
    assert all(map(torch.equal, model.parameters(), weights))
    assert same([one.state_dict() for one in pair], ended)
    same_values(path, copied)
