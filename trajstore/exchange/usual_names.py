"""Usual names of arrays and numbers in files.

A name is looked up whole, and then without common additions: the prefix ``run_0_``, the suffixes
``_history`` or ``_bits``, ``_E``, ``_W`` or ``_U`` for the matrix, ``dead_`` or ``live_`` for the
rows of some tokens. Case does not matter. Arrays with other names need a layout, or ``map``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trajstore.schema import EVERYTHING, INTEGERS, MODEL, OF_EXAMPLES, STEP, VARIABLES

Values = Literal["float", "whole", "truth"]
Matrix = Literal["E", "W"]
Population = Literal["all", "dead", "live"]


@dataclass(frozen=True, kw_only=True)
class ArrayKind:
    """A kind of array in a file.

    Attributes
    ----------
    name : str
        Name of the resulting variable or coordinate, or of its content.
    names : tuple of str
        Common names in lower case.
    dims : tuple of str
        ``tokens`` is any number of tokens; ``vocabulary`` has one value per id.
    values : {'float', 'whole', 'truth'}
        Type of the values. 16-bit integers count as bits of 16-bit floats, 0 and 1 as booleans.
    """

    name: str
    names: tuple[str, ...]
    dims: tuple[str, ...]
    values: Values = "float"

    @property
    def is_variable(self) -> bool:
        """True if it has a row per step."""
        return self.name in VARIABLES


_NAMES = {
    "W": "w weight weights embedding embeddings embedding_matrix emb e wte unembedding "
    "unembeddings w_e w_u w_in w_out token_embedding token_embeddings wte.weight wte_weight "
    "embed_tokens.weight embed.weight embedding.weight embeddings.weight token_embedding.weight "
    "tok_embeddings.weight lm_head.weight lm_head unembed.weight "
    "tensor tensors",  # without a name, in a file of torch.save
    "grad": "grad grads gradient gradients g",
    "exp_avg": "exp_avg m momentum momenta first_moment first_moments adam_m",
    "exp_avg_sq": "exp_avg_sq v variance variances second_moment second_moments adam_v",
    "delta": "delta deltas update updates weight_delta weight_deltas embedding_deltas",
    "logits": "logits logit",
    "loss": "loss losses train_loss train_losses training_loss training_losses",
    "lr": "lr lrs learning_rate learning_rates",
    "hidden_mean": "hidden_mean hidden_means h_mean h_means mean_h mean_hidden",
    "grad_norm": "grad_norm grad_norms gradient_norm gradient_norms",
    "step": "step steps recorded_step recorded_steps step_number step_numbers global_step "
    "global_steps iteration iterations checkpoint_steps steps_of_the_names",
    "token": "token token_id token_ids token_indices recorded_tokens vocab_ids vocabulary_ids",
    "dead_mask": "dead_mask untrained_mask is_dead is_untrained dead_token_mask",
    "live_mask": "live_mask trained_mask is_live is_trained live_token_mask",
    "dead_ids": "dead_ids dead_token_ids dead_indices dead_token_indices dead_tokens untrained_ids "
    "untrained_token_ids untrained_indices untrained_tokens untrained_token_indices",
    "live_ids": "live_ids live_token_ids live_indices live_token_indices live_tokens trained_ids "
    "trained_token_ids trained_indices trained_tokens trained_token_indices",
    "token_count": "token_count token_counts counts count occurrences frequencies "
    "token_frequencies token_frequency token_occurrence_counts appearances vocab_counts",
}
"""Common names. Other variables are known by their own name only, in lower case."""

_DIMS: dict[str, tuple[str, ...]] = {
    # MODEL, EVERYTHING, INTEGERS: no other program has them.
    # OF_EXAMPLES, hyperparameters: only whole runs identify them.
    **{
        name: entry.dims
        for name, entry in VARIABLES.items()
        if name not in (*MODEL, *EVERYTHING, *INTEGERS, *OF_EXAMPLES, "hyperparameters")
    },
    STEP.name: ("step",),
    "token": ("token",),
    **dict.fromkeys(("dead_mask", "live_mask"), ("vocabulary",)),
    **dict.fromkeys(("dead_ids", "live_ids"), ("tokens",)),
    "token_count": ("vocabulary",),
}

ARRAY_KINDS: dict[str, ArrayKind] = {
    name: ArrayKind(
        name=name,
        names=tuple(_NAMES.get(name, name.lower()).split()),
        dims=dims,
        values="float" if name in VARIABLES else "truth" if name.endswith("mask") else "whole",
    )
    for name, dims in _DIMS.items()
}
"""Kinds by name."""

_RUN = re.compile(r"(?:run|trial|replicate)[_\-./]?(\d+)[_\-./](.+)", re.IGNORECASE)
_OF_MATRIX: dict[str, Matrix] = {
    **dict.fromkeys("e w_e w_in wte embed_tokens tok_embeddings".split(), "E"),
    **dict.fromkeys("w_u w_out lm_head unembed unembedding unembeddings".split(), "W"),
}
_POPULATIONS: dict[str, Population] = {
    "dead": "dead",
    "untrained": "dead",
    "live": "live",
    "trained": "live",
}
_LETTERS: dict[str, Matrix] = {"e": "E", "w": "W", "u": "W"}
_STORAGE = (
    "(?:_(?:history|histories|hist|trajectory|traj|bits|u16|uint16|bf16|bfloat16|f16|fp16|f32|fp32"
    "|float32|series|movie|all|over_time))?"
)
_ADDITIONS = re.compile(
    rf"(?:(dead|live|untrained|trained)_)?(.+?){_STORAGE}(?:_([ewu]))?{_STORAGE}"
)


@dataclass(frozen=True, kw_only=True)
class Name:
    """Parsed name of an array.

    Attributes
    ----------
    kind : ArrayKind
    run : int, optional
        Number of the run in ``run_0_…``.
    matrix : {'E', 'W'}, optional
    tokens : {'all', 'dead', 'live'}
        Tokens of its rows.
    """

    kind: ArrayKind
    run: int | None = None
    matrix: Matrix | None = None
    tokens: Population = "all"


def named(key: str) -> Name | None:
    """Parse the name of an array; None if it is not a usual one.

    Examples
    --------
    >>> name = named("run_2_momentum_E")
    >>> name.kind.name, name.run, name.matrix
    ('exp_avg', 2, 'E')
    >>> name = named("dead_grads")
    >>> name.kind.name, name.tokens
    ('grad', 'dead')
    """
    match = _RUN.fullmatch(key)
    run, text = (int(match[1]), match[2]) if match else (None, key)
    *groups, last = re.sub(r"[\s\-]+", "_", text.lower().rstrip("'")).split("/")
    name = _parsed("_".join((*groups, last)))
    # A group whose own name is known decides; the name inside it does not.
    if name is None and groups and not any(map(_parsed, groups)):
        name = _parsed(last)
    return name and replace(name, run=run)


def _parsed(text: str) -> Name | None:
    """A name without the number of a run: exact, without its path, or without additions."""
    *path, last = text.split(".")
    for at in range(len(path) + 1):
        suffix = ".".join((*path[at:], last))
        kind = _BY_NAME.get(suffix)
        if kind is not None and not (at and suffix == "weight"):  # a weight of any layer
            matrix = _OF_MATRIX.get(suffix.partition(".")[0]) if kind.name == "W" else None
            return Name(kind=kind, matrix=matrix)
    match = _ADDITIONS.fullmatch(last)
    kind = _BY_NAME.get(match[2]) if match and last not in ("weight", "weights") else None
    if match is None or kind is None or (match[1] and not kind.is_variable):
        return None
    matrix = _LETTERS.get(match[3]) or (_OF_MATRIX.get(match[2]) if kind.name == "W" else None)
    return Name(kind=kind, matrix=matrix, tokens=_POPULATIONS.get(match[1], "all"))


_BY_NAME = {name: kind for kind in ARRAY_KINDS.values() for name in kind.names}


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A number that belongs to the configuration.

    Attributes
    ----------
    name : str
    names : tuple of str
        Common names in lower case.
    paths : tuple of tuple of str
        Its possible places in the attributes of a run; the first existing one counts. An import
        writes to the first.
    codes : dict of str to int
        Number of each word; empty if the attribute itself is a number.
    """

    name: str
    names: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    codes: Mapping[str, int] = field(default_factory=dict)


_RULE, _MODEL = "optimizer.hyperparameters", "config.model"


def _scalar(names: str, paths: str, **codes: int) -> Scalar:
    in_use, places = tuple(names.split()), tuple(tuple(path.split(".")) for path in paths.split())
    return Scalar(name=in_use[0], names=in_use, paths=places, codes=codes)


_INIT = "config.initialization"
SCALARS: dict[str, Scalar] = {
    scalar.name: scalar
    for scalar in (
        _scalar(
            "learning_rate lr peak_lr base_lr",
            f"{_RULE}.initial_lr config.optimizer.lr {_RULE}.lr",
        ),
        _scalar("weight_decay wd", f"{_RULE}.weight_decay"),
        _scalar("adam_beta1 beta1 beta_1 betas[0] adam_betas[0]", f"{_RULE}.betas.0"),
        _scalar("adam_beta2 beta2 beta_2 betas[1] adam_betas[1]", f"{_RULE}.betas.1"),
        _scalar("adam_epsilon adam_eps epsilon eps", f"{_RULE}.eps"),
        _scalar("init_sigma init_scale init_std", f"{_INIT}.sigma"),
        # Type in which the initial values were drawn: 0 for float32 (then rounded; also a point
        # without a type), 1 for bfloat16.
        _scalar(
            "init_method_code",
            f"{_INIT}.dtype {_INIT}.kind",
            float32=0,
            bfloat16=1,
            point=0,
        ),
        _scalar("seed random_seed fixed_seed train_seed", "config.training.seed"),
        _scalar("init_seed", f"{_INIT}.seed config.training.seed"),
        _scalar("vocab_size n_vocab vocabulary_size", f"{_MODEL}.vocab_size"),
        _scalar("hidden_dim hidden_size d_model n_embd", f"{_MODEL}.hidden"),
        _scalar("n_layers n_layer num_layers", f"{_MODEL}.layers"),
        _scalar("n_heads n_head num_heads", f"{_MODEL}.heads"),
        _scalar("num_steps n_steps total_steps", "config.training.steps"),
        _scalar("batch_size", "config.training.batch_size"),
        _scalar("tied_weights tie_weights", f"{_MODEL}.tied"),
    )
}
"""Scalars by name. Other numbers of a file go to ``config.scalars`` under their own names."""


POPULATION_SIZES = {
    **dict.fromkeys(
        "n_dead n_untrained num_dead num_untrained dead_count dead_tokens untrained_tokens".split(),
        "dead",
    ),
    **dict.fromkeys(
        "n_live n_trained num_live num_trained live_count live_tokens trained_tokens".split(),
        "live",
    ),
}
"""Names of the numbers of dead or live tokens."""

_CONFIGURATION = re.compile(
    r"^(?:(?:config|cfg|args|hparams|hyper_?parameters|hyperparams|settings|param_groups"
    r"|meta|metadata)[./])+"
)
"""Common groups of such numbers."""


def is_pair(key: str) -> bool:
    """True if a name is one of a pair of numbers: both betas of Adam."""
    return _CONFIGURATION.sub("", key.lower()) in ("betas", "adam_betas")


def scalar_of(key: str) -> Scalar | None:
    """Scalar of a name, or of its plural, which has one number per run. None for other names."""
    stem = _CONFIGURATION.sub("", key.lower())
    if pair := re.fullmatch(r"(.+)[./]([01])", stem):
        stem = f"{pair[1]}[{pair[2]}]" if is_pair(pair[1]) else stem
    for wording in (stem, stem.removesuffix("s")):
        for scalar in SCALARS.values():
            if wording in scalar.names:
                return scalar
    return None


STARTING_STEP = ("starting_step", "start_step", "resumed_from", "resume_step")
"""Names of the step at which a training was resumed."""
