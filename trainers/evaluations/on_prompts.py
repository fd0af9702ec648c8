"""Ready-made evaluations of prompts: attention, CKA, logit lens, and generated text."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.evaluations.on_texts import (
    Ids,
    ReadyMade,
    context_of,
    double,
    logits_of,
    read_with,
    windows,
)
from trajstore.trainers.step_models.recorded_parameters import RunParameters
from trajstore.trainers.step_models.step_model import model_at
from trajstore.trainers.texts.tokenizer import Tokenizer

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
    found, _ = read_with(run, tokenizer)
    compute = partial(_attention, _ids_of(prompt, found))
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
    found, _ = read_with(run, tokenizer)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise InvalidArgument("got no prompts, expected at least one")
    stored = RunParameters(run)
    step = int(stored.steps[stored.number(stored.steps[-1] if against is None else against)])
    compute = _Similarity(run, step, [_ids_of(one, found) for one in texts])
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
    found, offset = read_with(run, tokenizer)
    texts = np.array(found.texts(), object)
    compute = partial(_lens, _ids_of(prompt, found), texts, offset)
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
    found, offset = read_with(run, tokenizer)
    ids, length = _ids_of(prompt, found), length or 40
    if len(ids) < offset:
        raise InvalidArgument(f"the prompt has {len(ids)} tokens, expected at least {offset}")
    return ReadyMade(
        name=f"generation of {length} tokens after {prompt!r}",
        compute=partial(_generate, ids, offset, length, found.pretrained()),
    )


def _ids_of(prompt: str, tokenizer: Tokenizer) -> Ids:
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
            f"{type(model).__name__} is not a model of transformers, which {evaluation} needs"
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
        found = [float((one.T @ other).square().sum()) for one, other in pairs]
        return {"cka": (("layer",), np.array(found))}

    def _states(self, model: Any) -> list[torch.Tensor]:
        """Return each layer's centered states X (position, hidden), divided by √‖XᵀX‖."""
        batches = [batch for ids in self._prompts for batch in windows(ids, model)]
        outputs = [model(batch, output_hidden_states=True).hidden_states[1:] for batch in batches]
        found = []
        for parts in zip(*outputs, strict=True):
            states = double(torch.cat([part.flatten(0, 1) for part in parts]))
            states -= states.mean(0)
            found.append(states / (states.T @ states).norm().sqrt())
        return found


def _attention(ids: Ids, model: Any) -> dict[str, Any]:
    _require_transformers(model, "attention")
    model.set_attn_implementation("eager")  # others do not return the weights
    found = model(_input(ids, model), output_attentions=True).attentions
    weights = torch.stack(found)[:, 0].float()
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
            f"({', '.join(_NORMS)}), which logit-lens needs"
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
