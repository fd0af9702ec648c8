"""Usual names of arrays and numbers in files, and the numbers that a file holds.

A name is looked up whole, and then without common additions: the prefix ``run_0_``, the suffixes
``_history`` or ``_bits``, ``_E``, ``_W`` or ``_U`` for the matrix, ``dead_`` or ``live_`` for the
rows of some tokens. Case does not matter. Arrays with other names need ``--map``.

Numbers are attributes, strings with numbers, and arrays of one value. They become the configuration
of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trajstore.errors import FormatError
from trajstore.formats.array_file import ArrayFile, is_number, number_in, plain_number, values_of
from trajstore.schema import EVERYTHING, INTEGERS, MODEL, OF_EXAMPLES, STEP, VARIABLES

Values = Literal["float", "whole", "truth"]


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
    # OF_EXAMPLES: only whole runs identify them.
    **{
        name: entry.dims
        for name, entry in VARIABLES.items()
        if name not in (*MODEL, *EVERYTHING, *INTEGERS, *OF_EXAMPLES)
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
_POPULATION = re.compile(r"(dead|live|untrained|trained)_(.+)")
_OF_MATRIX = {
    **dict.fromkeys("e w_e w_in wte embed_tokens tok_embeddings".split(), "E"),
    **dict.fromkeys("w_u w_out lm_head unembed unembedding unembeddings".split(), "W"),
}
_POPULATIONS = {"dead": "dead", "untrained": "dead", "live": "live", "trained": "live"}
_MATRIX = re.compile(r"(.+)_([ewu])")
_LETTERS = {"e": "E", "w": "W", "u": "W"}
_STORAGE = re.compile(
    r"(.+)_(?:history|histories|hist|trajectory|traj|bits|u16|uint16|bf16|bfloat16|f16|fp16|f32|fp32"
    r"|float32|series|movie|all|over_time)"
)


@dataclass(frozen=True, kw_only=True)
class Name:
    """Parsed name of an array.

    Attributes
    ----------
    kind : ArrayKind, optional
        None for a name that is not in the table.
    run : int, optional
        Number of the run in ``run_0_…``.
    matrix : {'E', 'W'}, optional
    population : {'dead', 'live'}, optional
        Tokens of its rows.
    """

    kind: ArrayKind | None
    run: int | None = None
    matrix: str | None = None
    population: str | None = None


def named(key: str) -> Name:
    """Parse the name of an array.

    Examples
    --------
    >>> name = named("run_2_momentum_E")
    >>> name.kind.name, name.run, name.matrix
    ('exp_avg', 2, 'E')
    >>> name = named("dead_grads")
    >>> name.kind.name, name.population
    ('grad', 'dead')
    """
    text, run = key, None
    if match := _RUN.fullmatch(text):
        run, text = int(match[1]), match[2]
    *groups, last = text.lower().rstrip("'").split("/")
    stems = [_stem("/".join((*groups, last)))]
    # A group whose own name is known decides; the name inside it does not.
    if groups and not any(_is_known(_stem(group)) for group in groups):
        stems.append(_stem(last))
    for wording, matrix, population in (each for stem in stems for each in _readings(stem)):
        kind = _by_name().get(wording)
        if kind is not None and (population is None or kind.is_variable):
            implied = _OF_MATRIX.get(wording.partition(".")[0]) if kind.name == "W" else None
            return Name(kind=kind, run=run, matrix=matrix or implied, population=population)
    return Name(kind=None, run=run)


def _stem(text: str) -> str:
    return re.sub(r"[\s\-/]+", "_", text)


def _is_known(group: str) -> bool:
    return any(wording in _by_name() for wording, *_ in _readings(group))


def _readings(stem: str) -> Iterator[tuple[str, str | None, str | None]]:
    """Possible names within a name, the longest first, each with its matrix and population."""
    yield stem, None, None
    parts = stem.split(".")
    for at in range(1, len(parts)):  # the path to a tensor of a model or an optimizer
        if parts[at:] != ["weight"]:  # a weight of any layer
            yield ".".join(parts[at:]), None, None
    if parts[-1] in ("weight", "weights"):
        return
    last, population = parts[-1], None
    for _ in range(2):
        if match := _STORAGE.fullmatch(last):
            last = match[1]
            yield last, None, population
        if match := _MATRIX.fullmatch(last):
            yield match[1], _LETTERS[match[2]], population
            if inner := _STORAGE.fullmatch(match[1]):
                yield inner[1], _LETTERS[match[2]], population
        match = _POPULATION.fullmatch(last)
        if match is None:
            return
        population, last = _POPULATIONS[match[1]], match[2]
        yield last, None, population


@cache
def _by_name() -> dict[str, ArrayKind]:
    return {name: kind for kind in ARRAY_KINDS.values() for name in kind.names}


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

_ELSEWHERE = ("config", "scalars")
_LONGEST_TEXT = 64
_PAIR = re.compile(r"\s*[(\[]([^,]*),([^,]*?),?\s*[)\]]\s*")
_GROUPED = re.compile(r"(?:.+\.)?param_groups\.\d+\.(betas\.[01]|eps|weight_decay)")


def single_numbers(file: ArrayFile, ignored: tuple[str, ...]) -> dict[str, Any]:
    """Single numbers of a file by key. A pair gives two, such as ``betas[0]`` and ``betas[1]``.

    Parameters
    ----------
    file : ArrayFile
    ignored : tuple of str
        Keys to ignore.
    """
    numbers = dict(_of_attributes(file, ignored))
    for key in file.keys:
        shape = file.shape(key)
        if key in ignored or (shape and named(key).kind is not None):
            continue
        if shape == () or shape == (1,):
            number = number_of_one(file, key)
            if number is not None:
                numbers[key] = number
        elif shape == (2,) and is_pair(key) and is_number(file.dtype(key)):
            numbers |= _both(key, [plain_number(value) for value in values_of(file, key)])
    return numbers | _agreed_of_groups(numbers)


def number_of_one(file: ArrayFile, key: str) -> int | float | bool | None:
    """Number in an array of one value; None if it is not a number, or not finite."""
    dtype = file.dtype(key)
    if dtype.startswith(("str", "bytes")):
        value = file.read(key).reshape(-1)[0]
        return _number(value.decode(errors="replace") if isinstance(value, bytes) else str(value))
    return plain_number(values_of(file, key).reshape(-1)[0]) if is_number(dtype) else None


def numbers_per_run(file: ArrayFile, ignored: tuple[str, ...]) -> dict[str, list[Any]]:
    """Attributes that are lists of numbers, by key."""
    return {
        key: value
        for key, value in file.attributes.items()
        if isinstance(value, list) and len(value) > 1 and key not in ignored and not is_pair(key)
    }


def _of_attributes(file: ArrayFile, ignored: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in file.attributes.items():
        if key in ignored:
            continue
        pair = _pair(value) if is_pair(key) else None
        if pair is not None:
            yield from _both(key, pair).items()
            continue
        single = value[0] if isinstance(value, list) and len(value) == 1 else value
        number = _number(single) if isinstance(single, str) else single
        if isinstance(number, int | float):
            yield key, number


def _pair(value: Any) -> list[Any] | None:
    """Both numbers of a list, or of a string such as ``(0.9, 0.95)``."""
    if isinstance(value, str):
        match = _PAIR.fullmatch(value) if len(value) <= _LONGEST_TEXT else None
        value = [_number(text) for text in match.groups()] if match else None
    return value if isinstance(value, list) and len(value) == 2 and None not in value else None


def _both(key: str, values: list[Any]) -> dict[str, Any]:
    return {f"{key}[{at}]": value for at, value in enumerate(values) if value is not None}


def _agreed_of_groups(numbers: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters that are equal in all parameter groups of an optimizer's state."""
    by_name: dict[str, set[Any]] = {}
    for key, value in numbers.items():
        if match := _GROUPED.fullmatch(key):
            by_name.setdefault(f"param_groups.{match[1]}", set()).add(value)
    return {key: next(iter(values)) for key, values in by_name.items() if len(values) == 1}


def _number(text: str) -> int | float | None:
    """The finite number in a text."""
    number = number_in(text)
    return number if isinstance(number, int | float) and abs(number) < math.inf else None


def attributes_of(
    where: Path, numbers: Mapping[str, Any], mapped: Mapping[str, str]
) -> dict[str, Any]:
    """Attributes of a run, from the numbers of a file.

    Parameters
    ----------
    where : Path
        Path of the file, for messages.
    numbers : mapping of str to int, float or bool
        Numbers by their keys in the file.
    mapped : mapping of str to str
        Keys and the scalars that they are mapped to.

    Raises
    ------
    FormatError
        If two numbers mean the same quantity and differ.
    """
    attributes: dict[str, Any] = {}
    first: dict[tuple[str, ...], str] = {}
    for key, path, value in _placed(numbers, mapped):
        other = first.setdefault(path, key)
        if other is not key and not _same(numbers[other], numbers[key]):
            raise FormatError(
                f"{where}: {other} is {numbers[other]} and {key} is {numbers[key]}, but both mean "
                f"{'.'.join(path)}; omit one with --map ignore={key}"
            )
        _put(attributes, path, value)
    given = attributes.get("optimizer", {}).get("hyperparameters", {})
    betas = given.pop("betas", {})
    if len(betas) == 2:
        given["betas"] = [betas["0"], betas["1"]]
    elif betas:
        number = next(iter(betas))
        _put(attributes, (*_ELSEWHERE, f"adam_beta{int(number) + 1}"), betas[number])
    if attributes.get("optimizer") == {"hyperparameters": {}}:
        del attributes["optimizer"]
    return attributes


def places_of(numbers: Mapping[str, Any], mapped: Mapping[str, str]) -> dict[str, str]:
    """Path of each number in the attributes, by its key, for display."""
    return {key: ".".join(path) for key, path, _ in _placed(numbers, mapped)}


def scalar_numbers(
    numbers: Mapping[str, Any], name: str, mapped: Mapping[str, str]
) -> dict[str, Any]:
    """Numbers that are a given scalar of the table, by their keys."""
    of_key = {key: _scalar_value(key, mapped) for key in numbers}
    return {
        key: numbers[key]
        for key, scalar in of_key.items()
        if scalar is not None and scalar.name == name
    }


def _scalar_value(key: str, mapped: Mapping[str, str]) -> Scalar | None:
    return SCALARS.get(mapped[key]) if key in mapped else scalar_of(key)


def _placed(
    numbers: Mapping[str, Any], mapped: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for key, value in numbers.items():
        lower = key.lower()
        if lower in (*POPULATION_SIZES, *STARTING_STEP):
            continue  # checked, not kept
        if lower in ARRAY_KINDS[STEP.name].names:
            continue  # the label of a row
        if isinstance(value, float) and not math.isfinite(value):
            continue
        if isinstance(value, int) and abs(value) >= 1 << 63:
            continue
        scalar = _scalar_value(key, mapped)
        if scalar is None and "." in key:
            continue  # a number of one of many parts of a checkpoint
        # The first of several words for a number.
        words = {code: word for word, code in reversed([*scalar.codes.items()])} if scalar else {}
        if scalar is None or (scalar.codes and value not in words):
            yield key, (*_ELSEWHERE, key), value
        else:
            yield key, scalar.paths[0], words.get(value, value)


def _same(number: Any, other: Any) -> bool:
    """True if two numbers are equal to the precision of float32."""
    return math.isclose(number, other, rel_tol=1e-6)


def _put(attributes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        attributes = attributes.setdefault(key, {})
    attributes[last] = value
