"""Ready-made evaluations of texts (loss, cosines of W) and prompts (attention, CKA and others)."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
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
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.states.stored_model import StoredModel
from trajstore.trainers.step_model import model_at
from trajstore.trainers.texts import Tokenizer, run_tokenizer, tokenize_file

Ids = npt.NDArray[np.int64]

_CONTEXT = 1024
"""Most tokens of a window."""

_LOGITS = 1 << 25
"""Most logits of a batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyMade:
    """A ready-made evaluation, a function for `evaluate`.

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
    ids, offset = _text_ids(run, text, tokenizer, length)
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
    ids, _ = _text_ids(run, text, tokenizer, length)
    return ReadyMade(name=f"hidden-cosine on {_identity(ids)}", compute=partial(_cosine, ids))


def _text_ids(
    run: RunPath,
    text: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None,
    length: int | None,
) -> tuple[Ids, int]:
    encoder, offset = read_with(run, tokenizer)
    ids = tokenize_file(Path(text), encoder).ids[:length]
    if len(ids) <= offset:
        raise InvalidArgument(f"{text} has {len(ids)} tokens, too few to predict one; give more")
    return ids, offset


def read_with(run: RunPath, tokenizer: str | os.PathLike[str] | None) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a run, and the distance from a token to its target."""
    attributes = root_attributes(run)
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
            f"{type(model).__name__} has no get_output_embeddings(); hidden-cosine needs it"
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
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


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


_NORMS = ("ln_f", "norm", "final_layer_norm", "final_norm", "final_layernorm")
"""Names of the last normalization in models of transformers."""


@checks_types
def attention(
    run: RunPath, prompt: str, *, tokenizer: str | os.PathLike[str] | None = None
) -> ReadyMade:
    """Return an evaluation of the attention patterns of a prompt.

    Parameters
    ----------
    run : path-like or str
        Its tokenizer reads the prompt.
    prompt : str
    tokenizer : path-like or str, optional
        Tokenizer instead of the run's: ``ascii``, a folder, or a ``tokenizer.json``.

    Returns
    -------
    ReadyMade
        Its results, float32: ``attention`` (layer, head, query, key), the weights; and
        ``attention_entropy`` (layer, head), the mean over the queries of their entropy, in nats.

    Raises
    ------
    InvalidArgument
        If the run has no tokenizer, or the prompt is empty.
    CorpusError
        If the tokenizer cannot encode the prompt.
    """
    encoder, _ = read_with(run, tokenizer)
    compute = partial(_attention, _prompt_ids(prompt, encoder))
    return ReadyMade(name=f"attention of {prompt!r}", compute=compute)


@checks_types
def cka(
    run: RunPath,
    prompts: str | Sequence[str],
    *,
    against: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> ReadyMade:
    """Return an evaluation of how similar each layer's hidden states are to those of another step.

    With the hidden states X and Y (position, hidden) of a layer at two steps, each with the mean
    over the positions subtracted, linear CKA is ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), with Frobenius norms, in
    float64. It is 1 if Y is X rotated and scaled, and 0 if no feature of one correlates with the
    other. It is NaN if all positions are equal. Source: Kornblith et al., "Similarity of Neural
    Network Representations Revisited" (2019).

    Fewer positions than hidden dimensions make it too large: give long prompts, or many.

    Parameters
    ----------
    run : path-like or str
        Its tokenizer reads the prompts.
    prompts : str or sequence of str
        All their positions are compared. A prompt longer than the model's context is cut into
        windows.
    against : int, optional
        Recorded step to compare with; default: the last one.
    tokenizer : path-like or str, optional
        As for `attention`.

    Returns
    -------
    ReadyMade
        Its result: ``cka`` (layer), float64, after each block. The last state is normalized, as
        transformers returns it.

    Raises
    ------
    InvalidArgument, CorpusError
        As `attention`.
    VariableNotRecorded, StepNotFound
        If the run lacks the parameters or the step.
    """
    encoder, _ = read_with(run, tokenizer)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise InvalidArgument("got no prompts, expected at least one")
    stored = StoredModel(run)
    step = int(stored.steps[stored.number(stored.steps[-1] if against is None else against)])
    compute = _Similarity(run, step, [_prompt_ids(text, encoder) for text in texts])
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    name = f"cka of prompts (sha256 {digest[:12]}) against step {step}"
    return ReadyMade(name=name, compute=compute)


@checks_types
def logit_lens(
    run: RunPath, prompt: str, *, tokenizer: str | os.PathLike[str] | None = None
) -> ReadyMade:
    """Return an evaluation of the logit lens of a prompt.

    The hidden states after the embedding (depth 0) and after each block are normalized and
    unembedded like the last one. Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Parameters
    ----------
    run, prompt, tokenizer
        As for `attention`.

    Returns
    -------
    ReadyMade
        Its results (depth, position): ``lens_text``, the most probable token;
        ``lens_probability``, its probability; and ``lens_loss``, the loss of the target in nats,
        NaN if the prompt ends before the target.

    Raises
    ------
    InvalidArgument, CorpusError
        As `attention`.
    """
    encoder, offset = read_with(run, tokenizer)
    texts = np.array(encoder.texts(), object)
    compute = partial(_lens, _prompt_ids(prompt, encoder), texts, offset)
    return ReadyMade(name=f"logit-lens of {prompt!r}", compute=compute)


@checks_types
def generation(
    run: RunPath,
    prompt: str,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    length: Count | None = None,
) -> ReadyMade:
    """Return an evaluation of the text that the model generates after a prompt.

    Each token is the most probable one (greedy). A preset predicts the token after next, so it
    generates from the hidden state one position earlier.

    Parameters
    ----------
    run, prompt, tokenizer
        As for `attention`.
    length : int, optional
        Number of generated tokens; default: 40.

    Returns
    -------
    ReadyMade
        Its result: ``generation``, the generated text without the prompt.

    Raises
    ------
    InvalidArgument, CorpusError
        As `attention`. Also if `length` is below 1, or the prompt has fewer tokens than a
        prediction needs.
    """
    encoder, offset = read_with(run, tokenizer)
    ids, length = _prompt_ids(prompt, encoder), length or 40
    if len(ids) < offset:
        raise InvalidArgument(f"the prompt has {len(ids)} tokens, expected at least {offset}")
    return ReadyMade(
        name=f"generation of {length} tokens after {prompt!r}",
        compute=partial(_generate, ids, offset, length, encoder.pretrained()),
    )


def _prompt_ids(prompt: str, tokenizer: Tokenizer) -> Ids:
    ids = tokenizer.ids(prompt.encode(), "prompt")
    if not len(ids):
        raise InvalidArgument("the prompt is empty, expected a text")
    return ids


def _input(ids: Ids, model: torch.nn.Module) -> torch.Tensor:
    """Return a batch of one prompt, on the device of the model."""
    if len(ids) > context_of(model):
        raise InvalidArgument(
            f"the prompt has {len(ids)} tokens, but the model reads {context_of(model)}; give a "
            "shorter prompt"
        )
    return torch.from_numpy(ids)[None].to(next(model.parameters()).device)


def _require_transformers(model: torch.nn.Module, evaluation: str) -> None:
    if not hasattr(model, "set_attn_implementation"):
        raise InvalidArgument(
            f"{type(model).__name__} is not a model of transformers; {evaluation} needs one"
        )


class _Similarity:
    """CKA with the hidden states of a reference step, which the first call computes."""

    def __init__(self, run: RunPath, step: int, prompts: list[Ids]) -> None:
        self._run, self._step, self._prompts = run, step, prompts
        self._reference: list[torch.Tensor] = []

    def __call__(self, model: torch.nn.Module) -> dict[str, Any]:
        _require_transformers(model, "cka")
        if not self._reference:
            reference = model_at(self._run, self._step, constructor=lambda: copy.deepcopy(model))
            self._reference = self._states(reference)
        pairs = zip(self._states(model), self._reference, strict=True)
        similarities = [
            float((states.T @ reference_states).square().sum())
            for states, reference_states in pairs
        ]
        return {"cka": (("layer",), np.array(similarities))}

    def _states(self, model: Any) -> list[torch.Tensor]:
        """Return each layer's centered states X (position, hidden), divided by √‖XᵀX‖."""
        batches = [batch for ids in self._prompts for batch in windows(ids, model)]
        outputs = [model(batch, output_hidden_states=True).hidden_states[1:] for batch in batches]
        normalized = []
        for parts in zip(*outputs, strict=True):
            states = double(torch.cat([part.flatten(0, 1) for part in parts]))
            states -= states.mean(0)
            normalized.append(states / (states.T @ states).norm().sqrt())
        return normalized


def _attention(ids: Ids, model: Any) -> dict[str, Any]:
    _require_transformers(model, "attention")
    model.set_attn_implementation("eager")  # others do not return the weights
    attentions = model(_input(ids, model), output_attentions=True).attentions
    weights = torch.stack(attentions)[:, 0].float()
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    return {
        "attention": (("layer", "head", "query", "key"), weights.cpu().numpy()),
        "attention_entropy": (("layer", "head"), entropy.cpu().numpy(), {"units": "nat"}),
    }


def _lens(ids: Ids, texts: npt.NDArray[Any], offset: int, model: Any) -> dict[str, Any]:
    body = getattr(model, "base_model", None)
    norm = next((getattr(body, name) for name in _NORMS if hasattr(body, name)), None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if norm is None or head is None:
        raise InvalidArgument(
            f"{type(model).__name__} has no last normalization or unembedding of a known name "
            f"({', '.join(_NORMS)}); logit-lens needs them"
        )
    tokens = _input(ids, model)
    states = model(tokens, output_hidden_states=True).hidden_states
    # transformers returns the last state after the normalization.
    normalized = [norm(state) for state in states[:-1]] + [states[-1]]
    logits = torch.stack([head(state)[0] for state in normalized]).float()
    chances = logits.log_softmax(-1)
    top, token = chances.max(-1)
    targets = tokens[0, offset:]
    lost = torch.full_like(top, float("nan"))
    known = chances[:, : len(targets)]
    lost[:, : len(targets)] = -known.gather(-1, targets.expand(len(known), -1)[..., None])[..., 0]
    dims = ("depth", "position")
    return {
        "lens_text": (dims, texts[token.cpu().numpy()]),
        "lens_probability": (dims, top.exp().cpu().numpy()),
        "lens_loss": (dims, lost.cpu().numpy(), {"units": "nat"}),
    }


def _generate(
    ids: Ids, offset: int, length: int, tokenizer: Any, model: torch.nn.Module
) -> dict[str, Any]:
    tokens, context = _input(ids, model), context_of(model)
    for _ in range(length):
        logits = logits_of(model(tokens[:, -context:]))
        tokens = torch.cat([tokens, logits[:, -offset].argmax(-1, keepdim=True)], 1)
    return {"generation": tokenizer.decode(tokens[0, len(ids) :].tolist())}
