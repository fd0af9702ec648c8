"""Hidden states of a model whose logits no module computes, and whose loss the loop computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import Lists, batches  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from trajstore import open_run  # noqa: E402
from trajstore.errors import InvalidArgument, RecordingError  # noqa: E402
from trajstore.trainers import capture  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, HIDDEN, CONTEXT = 17, 8, 5
VARIABLES = ("W", "grad", "loss", "hidden_mean", "hidden_trace", "hidden_cosine", "hidden_states")


class OwnModel(torch.nn.Module):
    """A transformer with learned positions; its unembedding is the embedding's weight."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.position = torch.nn.Embedding(CONTEXT, HIDDEN)
        layer = torch.nn.TransformerEncoderLayer(
            HIDDEN, 2, 16, dropout=0.0, batch_first=batch_first
        )
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.encoder(x, mask=mask, is_causal=True)
        return hidden @ self.embedding.weight.T, hidden


def train(
    path: Path, *, steps: int = 3, parts: int = 2, observe: Any = None, **options: Any
) -> Any:
    """Train with micro-batches, and return the hidden states of each step."""
    model = OwnModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"parameter": "embedding.weight", "variables": VARIABLES, **options}
    lists = Lists(model.embedding.weight)
    seen: list[list[Any]] = []
    with capture(model, optimizer, path, **options) as run:
        for step in range(steps):
            optimizer.zero_grad()
            seen.append([])
            for batch in batches(parts, step):
                logits, hidden = model(batch["input_ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                (loss / parts).backward()
                run.observe(loss=loss)
                if observe is not None:
                    observe(run, hidden)
                seen[-1].append(hidden.detach())
            with torch.no_grad():
                model(batch["input_ids"])  # nobody trains on that
            lists.add(grad=model.embedding.weight.grad)
            optimizer.step()
            lists.after_step(optimizer)
    lists.rows = {name: lists.rows[name] for name in ("W", "grad")}
    lists.agree_with(path)
    return seen


def from_the_loop(run: Any, hidden: Any) -> None:
    run.observe(hidden=hidden)


@pytest.mark.parametrize(
    ("observe", "options"),
    [(from_the_loop, {}), (None, {"hidden_from": "encoder"}),
     (from_the_loop, {"hidden_from": "embedding"})],
    ids=["observed", "module", "observed instead"],
)  # fmt: skip
def test_states_are_what_the_loop_computes_itself(
    observe: Any, options: dict[str, str], tmp_path: Path
) -> None:
    for parts in (1, 2):
        path = tmp_path / f"{parts}.zarr"
        seen = train(path, parts=parts, observe=observe, **options)
        ds = open_run(path).load()
        for row, hidden in enumerate(seen, start=1):
            whole = torch.cat(hidden)
            np.testing.assert_array_equal(ds.hidden_states[row], whole.numpy())
            means = [part.mean((0, 1)) for part in hidden]
            mean = means[0] if parts == 1 else means[0] + (means[1] - means[0]) * 0.5
            np.testing.assert_array_equal(ds.hidden_mean[row], mean.numpy())


@pytest.mark.parametrize("name", VARIABLES[3:])
def test_missing_states_are_an_error_that_names_the_fix(name: str, tmp_path: Path) -> None:
    match = rf"{name} not recorded.*observe\(hidden=…\).*hidden_from=…"
    with pytest.raises(RecordingError, match=match):
        train(tmp_path / "run.zarr", variables=("W", "grad", name), strict=True)


class OwnMatrix(OwnModel):
    """Has the matrix as a parameter of its own, so its inputs are ids and no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(VOCAB, CONTEXT))
        self.inner = torch.nn.Linear(HIDDEN, CONTEXT)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        hidden = self.inner(super().forward(ids)[1])
        return hidden @ self.W.T, hidden


def step_of(model: Any, path: Path, *, passed: Any = None, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with capture(model, optimizer, path, variables=("W", "hidden_mean"), **options) as run:
        model(batches(1)[0]["input_ids"])[0].sum().backward()
        if passed is not None:
            run.observe(hidden=passed)
        optimizer.step()


class NamedInput(OwnModel):
    """Passes the hidden states to its head by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        self.last = super().forward(ids)[1]
        return self.head(input=self.last), self.last


def test_the_head_takes_the_states_by_name(tmp_path: Path) -> None:
    model = NamedInput()
    step_of(model, tmp_path / "run.zarr", parameter="head.weight")
    recorded = open_run(tmp_path / "run.zarr").hidden_mean[1]
    np.testing.assert_array_equal(recorded, model.last.detach().mean((0, 1)))


def test_what_is_no_hidden_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    model = OwnModel()
    of_W = {"parameter": "embedding.weight"}
    with pytest.raises(InvalidArgument, match=r"hidden: got float32 of shape \(5, 8\), expected f"):
        step_of(model, path, passed=torch.ones(5, 8), **of_W)
    with pytest.raises(RecordingError, match=r"no such module \(did you mean 'encoder'\?\)"):
        step_of(model, path, hidden_from="encode", **of_W)
    with pytest.raises(RecordingError, match=r"hidden_from='position': got float32 of shape \(5"):
        step_of(model, path, hidden_from="position", strict=True, **of_W)
    with pytest.raises(RecordingError, match=r"batch_first=False.*observe\(hidden=output\.trans"):
        step_of(OwnModel(batch_first=False), path, hidden_from="encoder", **of_W)
    with pytest.raises(RecordingError, match="hidden_mean not recorded"):
        step_of(
            OwnMatrix(), path, parameter="W", strict=True
        )  # its inputs are as many ids as W is wide
    assert not path.exists()
