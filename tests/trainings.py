"""The kit of trainings: tiny models, the loops that train them, and runs that they record.

`Lists` is a second recorder that keeps plain lists, to compare with; `Loop` is a loop whose body
`develop` gets; `Recorded` is a run with copies that torch itself made of each step. `launched`
counts the operations of torch that a call launches.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from trajstore.trainers import capture, develop, restore

VOCAB, HIDDEN, BATCH, CONTEXT = 17, 8, 3, 5


class TinyModel(torch.nn.Module):
    """A language model with tied embeddings that returns its loss and logits."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.mix = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.mix(self.embedding(input_ids))))
        if labels is None:
            return {"logits": logits}
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


def batches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Batches of ids below 13: the last four tokens are dead."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 13, (BATCH, CONTEXT + 1), generator=generator)
        made.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    return made


def adamw(model: Any, lr: Any = 0.01, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def steps(
    model: Any,
    optimizer: Any,
    count: int = 3,
    *,
    lists: Any = None,
    clip: float = 0,
    seed: int = 0,
    accumulate: int = 1,
    after: Callable[[Any, int], None] = lambda model, number: None,
) -> Iterator[Any]:
    """A plain loop on any device; yields the output before each step, when it has clipped.

    Lists keep what each step got and did. `after` may change the model between the steps.
    """
    device = next(model.parameters()).device
    for number in range(count):
        optimizer.zero_grad()
        for batch in batches(accumulate, seed + number):
            output = model(**{name: ids.to(device) for name, ids in batch.items()})
            (output["loss"] / accumulate if accumulate > 1 else output["loss"]).backward()
        if lists is not None:
            lists.add(grad=lists.parameter.grad, loss=output["loss"])
            lists.add(logits=output["logits"][0, -1])
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if lists is not None:
                lists.add(grad_norm=norm)
        yield output
        optimizer.step()
        if lists is not None:
            lists.after_step(optimizer)
        after(model, number)


def take_steps(model: Any, optimizer: Any, count: int = 3, **options: Any) -> None:
    deque(steps(model, optimizer, count, **options), maxlen=0)


OF_A_LOOP = ("clip", "seed", "accumulate", "after")


def trained(model: Any, optimizer: Any, path: Path, count: int = 3, **options: Any) -> Lists:
    """A plain loop with both recorders; takes the options of `steps` and of `capture`."""
    of_loop = {name: options.pop(name) for name in OF_A_LOOP if name in options}
    lists = Lists(model.embedding.weight)
    with capture(model, optimizer, path, **{"fsync": False} | options):
        take_steps(model, optimizer, count, lists=lists, **of_loop)
    return lists


class Lists:
    """The dumb recorder: clones of everything, in lists."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        nan = torch.full_like(parameter, float("nan"))
        self.rows: dict[str, list[Any]] = {"W": [parameter.detach().clone()], "grad": [nan]}

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            dtype = torch.float64 if isinstance(value, float) else None
            kept = torch.as_tensor(value, dtype=dtype).detach().clone()
            self.rows.setdefault(name, []).append(kept)

    def after_step(self, optimizer: Any) -> None:
        self.add(W=self.parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state.get(self.parameter, {})
            if name in state:
                self.rows.setdefault(name, [torch.zeros_like(self.parameter)])
                self.add(**{name: state[name]})

    def agree_with(self, path: Path) -> xr.Dataset:
        """Compare every row that was kept, bit for bit."""
        ds = xr.open_zarr(path, chunks=None)
        for name, rows in self.rows.items():
            wide = torch.float64 if rows[-1].dtype == torch.float64 else torch.float32
            kept = torch.stack([row.to(wide) for row in rows]).cpu().numpy()
            stored = ds[name].values[-len(rows) :]
            unsigned = f"u{kept.itemsize}"
            both_nan = np.isnan(kept) & np.isnan(stored)
            same = (kept.view(unsigned) == stored.view(unsigned)) | both_nan
            assert kept.shape == stored.shape, name
            assert same.all(), f"{name} differs in rows {np.unique(np.nonzero(~same)[0])}"
            assert ds[name].attrs["native_dtype"] == str(rows[-1].dtype).removeprefix("torch.")
        return ds


def tiny_run(
    path: Path,
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=0.01),
    *,
    dtype: Any = torch.float32,
    count: int = 9,
    clip: float = 0.3,
    accumulate: int = 1,
    change: Callable[[Any], None] = lambda model: None,
    between: Callable[[Any, int], None] = lambda model, number: None,
    **options: Any,
) -> Path:
    """Train `TinyModel` in a plain loop that names its clipping; in blocks of 4 rows.

    `change` may change the gradients before the step, and `between` the model after it.
    """
    torch.manual_seed(1)
    model = TinyModel(dtype)
    made = optimizer(model.parameters())
    options = {"max_grad_norm": clip, "block_rows": 4, "fsync": False} | options
    with capture(model, made, path, **options):
        for _ in steps(model, made, count, clip=clip, accumulate=accumulate, after=between):
            change(model)
    return path


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).split(HIDDEN, dim=-1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(torch.nn.functional.relu(x).square())


class SmallGPT(torch.nn.Module):
    """For Muon and AdamW together, in bfloat16, as in modded-nanoGPT.

    The logits that it returns are those of the next token.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.bfloat16()

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.blocks(self.embedding(input_ids)))
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


def muon_and_adamw(model: Any) -> tuple[Any, Any]:
    """Muon for the hidden matrices, AdamW with two groups for embeddings and vectors."""
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    tables = [model.embedding.weight, model.head.weight]
    groups = [{"params": tables, "lr": 0.02}, {"params": vectors, "lr": 0.01}]
    return torch.optim.Muon(hidden, lr=0.05), torch.optim.AdamW(groups)


RECORDED_STEPS = 6


@dataclass(kw_only=True)
class Recorded:
    """A run, and the state dicts of model and optimizer after each step."""

    path: Path
    model: Any
    optimizer: Any
    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)

    def keep(self) -> None:
        self.models.append(copy.deepcopy(self.model.state_dict()))
        self.optimizers.append(copy.deepcopy(self.optimizer.state_dict()))


class OwnModel(torch.nn.Module):
    """Buffers that change, a parameter without gradient in odd steps, and one not trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4)
        self.normalization = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(dropout)
        self.sometimes = torch.nn.Linear(4, 4)
        self.fixed = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 11, bias=False)

    def forward(self, ids: Any, *, whole: bool = True) -> Any:
        hidden = self.normalization(self.fixed(self.embedding(ids)).flatten(0, 1))
        return self.head(self.dropout(torch.tanh(self.sometimes(hidden)) if whole else hidden))


def gpt2() -> Any:
    """GPT-2 in bfloat16 with tied embeddings, without dropout."""
    config = GPT2Config(
        vocab_size=128, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(torch.bfloat16)


def record_gpt2(folder: Path, **options: Any) -> Recorded:
    """Train with two groups of AdamW, whose rate falls."""
    torch.manual_seed(3)
    model = gpt2()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    recorded = Recorded(path=folder / "gpt2.zarr", model=model, optimizer=optimizer)
    chosen = {"variables": "everything", "origin": {"tokenizer": {"name": "ascii"}}, **options}
    with capture(model, optimizer, recorded.path, **chosen):
        recorded.keep()
        for _ in range(RECORDED_STEPS):
            ids = torch.randint(0, 128, (2, 8))
            model(ids, labels=ids).loss.backward()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
            recorded.keep()
    return recorded


def record_own(folder: Path) -> Recorded:
    """Train a model that is not one of transformers."""
    torch.manual_seed(4)
    model = OwnModel()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    recorded = Recorded(path=folder / "own.zarr", model=model, optimizer=optimizer)
    with capture(
        model, optimizer, recorded.path, variables="everything", parameter="embedding.weight"
    ) as recorder:
        recorded.keep()
        for step in range(RECORDED_STEPS):
            ids = torch.randint(0, 11, (2, 5))
            logits = model(ids, whole=step % 2 == 0)
            loss = cross_entropy(logits, ids.flatten())
            loss.backward()
            recorder.observe(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            recorded.keep()
    return recorded


def same(value: Any, other: Any) -> bool:
    """True if two nested values are the same, tensors bit for bit."""
    if isinstance(value, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (value.detach(), other.detach())]
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(*bits)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return (
            type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
        )
    return bool(value == other)


STEPS, EVERY = 7, 3  # keyframes: 0, 3, 6, 7


class Loop:
    """A training loop. `step` is its body, which `develop` gets."""

    optimizers: Any
    model: Any
    scaler: Any = None
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.observe: Callable[..., None] = lambda **values: None

    def inputs(self, number: int) -> list[Any]:
        """The inputs of the micro-batches of a step."""
        return batches(1, number)

    def step(self, inputs: list[Any]) -> None:
        raise NotImplementedError  # each loop has a body of its own

    def after(self, number: int) -> None:
        """What the loop does between the steps."""

    def train(self, path: Path, first: int = 0, last: int = STEPS, **options: Any) -> list[Any]:
        """Record the loop; the states after each step."""
        options = {"variables": "keyframes", "keyframe_every": EVERY, "block_rows": 2,
                   "scaler": self.scaler, **self.options, **options}  # fmt: skip
        states = [self.state()]
        with capture(self.model, self.optimizers, path, first_step=first, **options) as run:
            self.observe = run.observe
            for number in range(first, last):
                self.step(self.inputs(number))
                states.append(self.state())
                self.after(number)
        return states

    def develop(self, path: Path, at: int, **options: Any) -> Any:
        return develop(path, self.model, self.optimizers, self.step, at=at, scaler=self.scaler,
                       **options)  # fmt: skip

    def resume(self, path: Path, **options: Any) -> None:
        """Restore the last step that the run holds, and train the rest."""
        first = restore(path, self.model, self.optimizers)
        self.train(path, first=first, resume=True, **options)

    def state(self) -> Any:
        """A copy of everything that torch keeps."""
        made = self.optimizers if isinstance(self.optimizers, tuple) else (self.optimizers,)
        states = [optimizer.state_dict()["state"] for optimizer in made]
        return copy.deepcopy((dict(self.model.state_dict()), states))


class Scheduled(Loop):
    """The loop computes the loss and clips; the rate of each step is another."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel(torch.bfloat16)
        self.optimizers = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def inputs(self, number: int) -> list[Any]:
        (batch,) = super().inputs(number)
        return [{"ids": batch["input_ids"], "targets": batch["labels"]}]

    def step(self, inputs: list[Any]) -> None:
        for part in inputs:
            logits = self.model(part["ids"])["logits"]
            loss = cross_entropy(logits.flatten(0, 1).float(), part["targets"].flatten())
            loss.backward()
            self.observe(loss=loss, inputs=part)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.take()

    def take(self) -> None:
        self.optimizers.step()
        self.optimizers.zero_grad()

    def after(self, number: int) -> None:
        self.optimizers.param_groups[0]["lr"] = 0.02 / (1 + abs(number - 3))


class Accumulated(Loop):
    """Micro-batches of several lengths, dropout, buffers, and a loop that draws numbers, too."""

    options: ClassVar[dict[str, Any]] = {"parameter": "embedding.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.model = OwnModel(dropout=0.1)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    def inputs(self, number: int) -> list[Any]:
        generator = torch.Generator().manual_seed(number)
        whole = torch.tensor(number % 2 == 0)
        return [
            {"ids": torch.randint(0, 11, (2, 3 + part), generator=generator), "whole": whole}
            for part in range(3)
        ]

    def step(self, inputs: list[Any]) -> None:
        for part in inputs:
            logits = self.model(part["ids"], whole=bool(part["whole"]))
            (cross_entropy(logits, part["ids"].flatten()) / len(inputs)).backward()
            self.observe(inputs=part)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizers.step()
        self.optimizers.zero_grad()

    def after(self, number: int) -> None:
        torch.rand(number + 1)


class Scaled(Loop):
    """A float16 loop whose scaler skips the first steps, and grows again."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.model, self.fused = TinyModel(), fused
        self.optimizers = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)

    def step(self, inputs: list[Any]) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = self.model(**inputs[0])["loss"]
        self.scaler.scale(loss).backward()
        if not self.fused:
            self.scaler.unscale_(self.optimizers)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizers)
        self.scaler.update()
        self.optimizers.zero_grad()


def scaled_run(path: Path, *, fused: bool, count: int = 14, **options: Any) -> Path:
    """A run of such a loop, which names its clipping."""
    options = {"variables": "matrix", "max_grad_norm": 0.3} | options
    Scaled(fused=fused).train(path, last=count, **options)
    return path


class Pair(Loop):
    """The loop clips for Muon and AdamW, whose rates fall."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SmallGPT()
        self.optimizers = muon_and_adamw(self.model)

    def step(self, inputs: list[Any]) -> None:
        self.model(**inputs[0])["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def after(self, number: int) -> None:
        for group in [group for one in self.optimizers for group in one.param_groups]:
            group["lr"] *= 0.8


NOT_LAUNCHED = frozenset(
    "alias as_strided contiguous detach detach_ empty empty_like empty_strided expand expand_as "
    "flatten is_nonzero item lift_fresh promote_types reshape resolve_conj resolve_neg result_type "
    "select slice split split_with_sizes squeeze t to unbind unsqueeze view view_as".split()
)
"""Views, memory without values, and questions. A conversion appears as the copy inside it."""


def launched(call: Callable[[], Any]) -> Counter[str]:
    """Return the names of the operations that a call launches, and how often.

    An operation on a list of tensors counts once, as it is one kernel on a device.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()

    def is_launched(event: Any) -> bool:
        name = event.name.removeprefix("aten::")
        return event.name.startswith("aten::") and name not in NOT_LAUNCHED

    events = [event for event in profile.events() if is_launched(event)]
    return Counter(event.name for event in events if not is_inside(event, is_launched))


def is_inside(event: Any, counts: Callable[[Any], bool]) -> bool:
    parent = event.cpu_parent
    return parent is not None and (counts(parent) or is_inside(parent, counts))
