"""The model and the initial values of its embeddings."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trajstore.trainers.config import InitializationConfig, ModelConfig


def build_model(config: ModelConfig) -> GPT2LMHeadModel:
    """Build GPT-2 without dropout, and convert all weights to one type.

    Weights are drawn in float32 from torch's global generator.
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
            tie_word_embeddings=config.tied,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    # GPT-2 does not set its kind of loss. With it, the Trainer counts the targets after the shift
    # inside the loss. Otherwise it divides by one target too many per sequence, and the loss and
    # all gradients are 1/128 too small.
    model.loss_type = "ForCausalLM"
    return model.to(getattr(torch, config.dtype))


@torch.no_grad()
def initialize(model: GPT2LMHeadModel, config: InitializationConfig, seed: int) -> None:
    """Set the initial values of the embedding matrix, and then of an untied unembedding.

    ``point``: one random unit vector for all tokens of a matrix plus noise of standard deviation
    ``sigma``; the vector is drawn first. ``normal``: every element is drawn from N(0, sigma²).
    ``default``: the values of `build_model`.

    All values are drawn on the CPU, for any device, in the type of the configuration. Then they are
    rounded to the weights' type.

    Parameters
    ----------
    model : GPT2LMHeadModel
    config : InitializationConfig
    seed : int
        Seed of the run, for ``config.reseed``.
    """
    if config.reseed:
        torch.manual_seed(seed)
    if config.kind == "default":
        return
    matrices = [model.get_input_embeddings().weight]
    if model.lm_head.weight is not matrices[0]:
        matrices.append(model.lm_head.weight)
    dtype = getattr(torch, config.dtype)
    for matrix in matrices:
        tokens, hidden = matrix.shape
        if config.kind == "point":
            vector = torch.randn(hidden, dtype=dtype, device="cpu")
            noise = torch.randn(tokens, hidden, dtype=dtype, device="cpu") * config.sigma
            matrix.copy_(vector / vector.norm() + noise)
        else:
            matrix.copy_(torch.randn(tokens, hidden, dtype=dtype, device="cpu") * config.sigma)
