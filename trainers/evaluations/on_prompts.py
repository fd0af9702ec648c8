"""Ready-made evaluations of a prompt: attention, logit lens, and generated text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.argument_types import Count, checks_types
from trajstore.errors import InvalidArgument
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.evaluations.on_texts import context_of, logits_of, prediction_offset
from trajstore.trainers.step_models.run_tokenizer import run_tokenizer
from trajstore.trainers.texts.tokenizer import Tokenizer

__all__ = ["Attention", "Generation", "LogitLens", "attention", "generation", "logit_lens"]

_NORMS = ("ln_f", "norm", "final_layer_norm", "final_norm", "final_layernorm")
"""Names of the last normalization in models of transformers."""


@checks_types
def attention(
    run: RunPath, prompt: str, *, tokenizer: str | os.PathLike[str] | None = None
) -> Attention:
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
    Attention
        Its results, float32: ``attention`` (layer, head, query, key), the weights; and
        ``attention_entropy`` (layer, head), the mean over the queries of their entropy, in nats.

    Raises
    ------
    InvalidArgument
        If the run has no tokenizer, or the prompt is empty.
    CorpusError
        If the tokenizer cannot encode the prompt.
    """
    found = run_tokenizer(dict(open_group(run).attrs), tokenizer)
    return Attention(prompt=prompt, ids=_ids_of(prompt, found))


@checks_types
def logit_lens(
    run: RunPath, prompt: str, *, tokenizer: str | os.PathLike[str] | None = None
) -> LogitLens:
    """Return an evaluation of the logit lens of a prompt.

    The hidden states after the embedding (depth 0) and after each block are normalized and
    unembedded like the last one. Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Parameters
    ----------
    run, prompt, tokenizer
        As for `attention`.

    Returns
    -------
    LogitLens
        Its results (depth, position): ``lens_text``, the most probable token;
        ``lens_probability``, its probability; and ``lens_loss``, the loss of the target in nats,
        NaN if the prompt ends before the target.

    Raises
    ------
    InvalidArgument, CorpusError
        As `attention`.
    """
    attributes = dict(open_group(run).attrs)
    found = run_tokenizer(attributes, tokenizer)
    return LogitLens(
        prompt=prompt,
        ids=_ids_of(prompt, found),
        texts=np.array(found.texts(), object),
        offset=prediction_offset(attributes),
    )


@checks_types
def generation(
    run: RunPath,
    prompt: str,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    length: Count | None = None,
) -> Generation:
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
    Generation
        Its result: ``generation``, the generated text without the prompt.

    Raises
    ------
    InvalidArgument, CorpusError
        As `attention`. Also if `length` is below 1, or the prompt has fewer tokens than a
        prediction needs.
    """
    attributes = dict(open_group(run).attrs)
    found = run_tokenizer(attributes, tokenizer)
    offset, ids = prediction_offset(attributes), _ids_of(prompt, found)
    if len(ids) < offset:
        raise InvalidArgument(f"the prompt has {len(ids)} tokens, expected at least {offset}")
    return Generation(
        prompt=prompt, ids=ids, offset=offset, length=length or 40, tokenizer=found.pretrained()
    )


def _ids_of(prompt: str, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    ids = tokenizer.ids(prompt.encode(), "prompt")
    if not len(ids):
        raise InvalidArgument("the prompt is empty, expected a text")
    return ids


def _input(ids: npt.NDArray[np.int64], model: torch.nn.Module) -> torch.Tensor:
    """Return a batch of one prompt, on the device of the model."""
    if len(ids) > context_of(model):
        raise InvalidArgument(
            f"the prompt has {len(ids)} tokens, but the model reads {context_of(model)}; give a "
            "shorter prompt"
        )
    return torch.from_numpy(ids)[None].to(next(model.parameters()).device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """The evaluation of `attention`.

    Attributes
    ----------
    prompt : str
    ids : ndarray of int64
    """

    prompt: str
    ids: npt.NDArray[np.int64]

    def __str__(self) -> str:
        return f"attention of {self.prompt!r}"

    @torch.no_grad()
    def __call__(self, model: Any, step: int) -> dict[str, Any]:
        """Return the results of a step."""
        if not hasattr(model, "set_attn_implementation"):
            raise InvalidArgument(
                f"{type(model).__name__} is not a model of transformers, which attention needs"
            )
        model.set_attn_implementation("eager")  # others do not return the weights
        found = model(_input(self.ids, model), output_attentions=True).attentions
        weights = torch.stack(found)[:, 0].float()
        entropy = torch.special.entr(weights).sum(-1).mean(-1)
        return {
            "attention": (("layer", "head", "query", "key"), weights.cpu().numpy()),
            "attention_entropy": (("layer", "head"), entropy.cpu().numpy(), {"units": "nat"}),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitLens:
    """The evaluation of `logit_lens`.

    Attributes
    ----------
    prompt : str
    ids : ndarray of int64
    texts : ndarray of str, (token,)
    offset : int
        Distance from a token to its target.
    """

    prompt: str
    ids: npt.NDArray[np.int64]
    texts: npt.NDArray[Any]
    offset: int

    def __str__(self) -> str:
        return f"logit-lens of {self.prompt!r}"

    @torch.no_grad()
    def __call__(self, model: Any, step: int) -> dict[str, Any]:
        """Return the results of a step."""
        body = getattr(model, "base_model", None)
        norm = next((getattr(body, name) for name in _NORMS if hasattr(body, name)), None)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if norm is None or head is None:
            raise InvalidArgument(
                f"{type(model).__name__} has no last normalization or unembedding of a known name "
                f"({', '.join(_NORMS)}), which logit-lens needs"
            )
        ids = _input(self.ids, model)
        states = model(ids, output_hidden_states=True).hidden_states
        # transformers returns the last state after the normalization.
        normalized = [norm(state) for state in states[:-1]] + [states[-1]]
        logits = torch.stack([head(state)[0] for state in normalized]).float()
        chances = logits.log_softmax(-1)
        top, token = chances.max(-1)
        targets = ids[0, self.offset :]
        lost = torch.full_like(top, float("nan"))
        known = chances[:, : len(targets)]
        lost[:, : len(targets)] = -known.gather(-1, targets.expand(len(known), -1)[..., None])[
            ..., 0
        ]
        dims = ("depth", "position")
        return {
            "lens_text": (dims, self.texts[token.cpu().numpy()]),
            "lens_probability": (dims, top.exp().cpu().numpy()),
            "lens_loss": (dims, lost.cpu().numpy(), {"units": "nat"}),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """The evaluation of `generation`.

    Attributes
    ----------
    prompt : str
    ids : ndarray of int64
    offset : int
        Distance from a token to the one that it predicts.
    length : int
    tokenizer : PreTrainedTokenizerFast
    """

    prompt: str
    ids: npt.NDArray[np.int64]
    offset: int
    length: int
    tokenizer: Any

    def __str__(self) -> str:
        return f"generation of {self.length} tokens after {self.prompt!r}"

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, step: int) -> dict[str, Any]:
        """Return the results of a step."""
        ids, context = _input(self.ids, model), context_of(model)
        for _ in range(self.length):
            logits = logits_of(model(ids[:, -context:]))
            ids = torch.cat([ids, logits[:, -self.offset].argmax(-1, keepdim=True)], 1)
        return {"generation": self.tokenizer.decode(ids[0, len(self.ids) :].tolist())}
