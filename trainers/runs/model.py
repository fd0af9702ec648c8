"""The model and how its embedding starts."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trajstore.trainers.config import InitialisationConfig, ModelConfig

__all__ = ["build_model", "initialise"]


def build_model(config: ModelConfig) -> GPT2LMHeadModel:
    """GPT-2 without dropout, with tied embeddings, cast to its type as a whole.

    Weights are drawn from torch's global generator, in float32.
    """
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context,
            n_embd=config.hidden,
            n_layer=config.layers,
            n_head=config.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    # GPT-2 leaves its kind of loss open. Named, the Trainer counts the targets that are left after
    # the loss's own shift; otherwise it divides by one too many a sequence, and the loss and all
    # gradients are 1/128 too small.
    model.loss_type = "ForCausalLM"
    return model.to(getattr(torch, config.dtype))


@torch.no_grad()
def initialise(model: GPT2LMHeadModel, config: InitialisationConfig, seed: int) -> None:
    """Give the embedding matrix its start.

    ``point``: all tokens are one random unit vector plus noise of standard deviation ``sigma``,
    first the vector drawn, then the noise. ``normal``: every element is drawn from N(0, sigma²).
    ``default``: as `build_model` left it.

    Everything is drawn on the CPU, whatever the device, in the type that the configuration names,
    and then rounded to the weights' type.

    Parameters
    ----------
    model : GPT2LMHeadModel
    config : InitialisationConfig
    seed : int
        Of the run, for ``config.reseed``.
    """
    if config.reseed:
        torch.manual_seed(seed)
    if config.kind == "default":
        return
    embedding = model.get_input_embeddings().weight
    tokens, hidden = embedding.shape
    dtype = getattr(torch, config.dtype)
    if config.kind == "point":
        vector = torch.randn(hidden, dtype=dtype)
        noise = torch.randn(tokens, hidden, dtype=dtype) * config.sigma
        embedding.copy_(vector / vector.norm() + noise)
    else:
        embedding.copy_(torch.randn(tokens, hidden, dtype=dtype) * config.sigma)
