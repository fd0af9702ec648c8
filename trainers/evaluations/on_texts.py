"""Ready-made evaluations on a text: its loss, and the cosines of W to the mean hidden state."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument
from trajstore.store.reading.open_run import open_group
from trajstore.store.reading.run_info import attribute
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.step_models.run_tokenizer import run_tokenizer
from trajstore.trainers.texts.corpus import tokenize_file
from trajstore.trainers.texts.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

_CONTEXT = 1024
"""Most tokens of a window."""

_LOGITS = 1 << 25
"""Most logits of a batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyMade:
    """A ready-made evaluation, which pickle can pass to other processes.

    Attributes
    ----------
    name : str
        Name in the store, which differs for different inputs.
    compute : callable
        Called with the model; returns the results of a step.
    """

    name: str
    compute: Callable[[torch.nn.Module], dict[str, Any]]

    def __str__(self) -> str:
        return self.name

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, step: int) -> dict[str, Any]:
        """Return the results of a step."""
        return self.compute(model)


@checks_types
def loss(
    run: RunPath,
    text: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    length: Count | None = None,
) -> ReadyMade:
    """Return an evaluation of the loss and the perplexity on a text.

    The text is cut into windows of the model's context, at most 1,024 tokens. The loss is the mean
    over all targets within their windows, in nats, without autocast. A target is the next token;
    for the presets the token after next, as in their training.

    Parameters
    ----------
    run : path-like or str
        Its tokenizer reads the text.
    text : path-like
        A text file.
    tokenizer : path-like or str, optional
        Tokenizer instead of the run's: ``ascii``, a folder, or a ``tokenizer.json``.
    length : int, optional
        Number of tokens to read of the text; default: all.

    Returns
    -------
    ReadyMade
        Its results: ``text_loss``, in nats, and ``perplexity``, the exponential of it.

    Raises
    ------
    InvalidArgument
        If the text cannot be read, or the run has no tokenizer.
    CorpusError
        If the tokenizer cannot encode the text.
    """
    ids, offset = _ids_of(run, text, tokenizer, length)
    return ReadyMade(name=f"loss on {_identity(ids)}", compute=partial(_loss, ids, offset))


@checks_types
def hidden_cosine(
    run: RunPath,
    text: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    length: Count | None = None,
) -> ReadyMade:
    """Return an evaluation of the cosine of each token's W to the mean hidden state of a text.

    The hidden states are those that the output embeddings multiply, over all windows of the text.

    Parameters
    ----------
    run, text, tokenizer, length
        As for `loss`.

    Returns
    -------
    ReadyMade
        Its results: ``hidden_mean_cosine`` (token), float32, and ``hidden_mean_norm``, the L2 norm
        of the mean.

    Raises
    ------
    InvalidArgument, CorpusError
        As `loss`.
    """
    ids, _ = _ids_of(run, text, tokenizer, length)
    return ReadyMade(name=f"hidden-cosine on {_identity(ids)}", compute=partial(_cosine, ids))


def _ids_of(
    run: RunPath,
    text: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None,
    length: int | None,
) -> tuple[Ids, int]:
    found, offset = read_with(run, tokenizer)
    ids = tokenize_file(Path(text), found).ids[:length]
    if len(ids) <= offset:
        raise InvalidArgument(f"{text} has {len(ids)} tokens, too few to predict one; give more")
    return ids, offset


def read_with(run: RunPath, tokenizer: str | os.PathLike[str] | None) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a run, and the distance from a token to its target."""
    attributes = dict(open_group(run).attrs)
    offset = int(attribute(attributes, "config", "data", "target_offset") or 1)
    return run_tokenizer(attributes, tokenizer), offset


def _loss(ids: Ids, offset: int, model: torch.nn.Module) -> dict[str, Any]:
    total, count = 0.0, 0
    for batch in windows(ids, model):
        targets = batch[:, offset:]
        logits = logits_of(model(batch))[:, : targets.shape[1]].float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        total += float(double(losses).sum())
        count += losses.numel()
    mean = total / count
    return {
        "text_loss": xr.DataArray(mean, attrs={"units": "nat"}),
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
    }


def _cosine(ids: Ids, model: torch.nn.Module) -> dict[str, Any]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise InvalidArgument(
            f"{type(model).__name__} has no get_output_embeddings(), which hidden-cosine needs"
        )
    sums: list[torch.Tensor] = []

    def add(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        sums.append(double(inputs[0].flatten(0, -2)).sum(0))

    handle = head.register_forward_pre_hook(add)
    try:
        for batch in windows(ids, model):
            model(batch)
    finally:
        handle.remove()
    mean = torch.stack(sums).sum(0) / len(ids)
    W = double(head.weight)
    cosine = torch.nn.functional.cosine_similarity(W, mean[None], dim=1)
    return {
        "hidden_mean_cosine": xr.DataArray(
            cosine.float().cpu().numpy(),
            coords={"token": np.arange(len(W), dtype=np.int32)},
            dims="token",
        ),
        "hidden_mean_norm": float(mean.norm()),
    }


def double(values: torch.Tensor) -> torch.Tensor:
    """Return values in float64, on the CPU if they are on MPS, which has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _identity(ids: Ids) -> str:
    """Return a name of a text, which differs for different texts."""
    return f"{len(ids)} tokens (sha256 {hashlib.sha256(ids.tobytes()).hexdigest()[:12]})"


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits of a model's output: the output itself, or its attribute ``logits``."""
    found: torch.Tensor = getattr(output, "logits", output)
    return found


def context_of(model: torch.nn.Module) -> int:
    """Return the most tokens of an input, at most 1,024."""
    config = getattr(model, "config", None)
    return min(getattr(config, "max_position_embeddings", None) or _CONTEXT, _CONTEXT)


def windows(ids: Ids, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield batches of equal windows of a text, on the device of the model."""
    context = context_of(model)
    device = next(model.parameters()).device
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or int(ids.max()) + 1
    whole = len(ids) // context
    rows = torch.from_numpy(ids[: whole * context]).view(whole, context)
    if whole:
        for batch in rows.split(max(1, _LOGITS // (context * vocabulary))):
            yield batch.to(device)
    if rest := len(ids) - whole * context:
        yield torch.from_numpy(ids[-rest:])[None].to(device)
