"""The configuration of a run: immutable, validated and complete."""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from trajstore.defaults import COMMIT_EVERY
from trajstore.errors import ConfigError, InvalidArgument, did_you_mean
from trajstore.schema import KEYFRAMES, TIERS, VARIABLES, Encoding, resolve_variables
from trajstore.units import parse_bytes

MAY_CHANGE = frozenset(
    {
        "training.steps",
        "training.threads",
        "recording.memory",
        "recording.commit_every",
        "recording.checkpoint_every",
    }
)
"""Fields that may change when a run is resumed."""

_COMMENT = 98  # columns of a comment in TOML


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _size(text: str) -> str:
    parse_bytes(text)
    return text


def _listed(names: Any) -> Any:
    """Names in one text, separated by commas, as a list; other values as they are."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def _variables(names: tuple[str, ...]) -> tuple[str, ...]:
    # The names of tiers are kept: variables of a tier that a run lacks are left out later.
    resolve_variables(names)
    return names


def _populations(populations: Any) -> Any:
    """Return texts NAME=EXPRESSION; a table becomes a list of such texts."""
    if isinstance(populations, Mapping):
        populations = [f"{name}={text}" for name, text in populations.items()]
    if not isinstance(populations, list | tuple) or not all(
        isinstance(item, str) and "=" in item for item in populations
    ):
        raise ValueError(
            'expected NAME=EXPRESSION or NAME=FILE, a list such as ["rare=token_count < 10"], or a '
            'table [recording.populations] with rare = "token_count < 10"'
        )
    return populations


class ModelConfig(_Section):
    """A GPT-2 without dropout."""

    vocab_size: int = Field(default=128, ge=2)
    """Tokens."""
    context: int = Field(default=128, ge=2)
    """Positions of one training example."""
    hidden: int = Field(default=64, ge=1)
    """Hidden dimensions; a multiple of heads."""
    layers: int = Field(default=2, ge=1)
    """Transformer layers."""
    heads: int = Field(default=2, ge=1)
    """Attention heads of a layer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights, the gradients and, unless optimizer.state_dtype is set, the optimizer's
    state."""
    tied: bool = True
    """Use one matrix as embedding and unembedding. With two, each has a run of its own."""

    @property
    def parameters(self) -> int:
        """Number of parameter tensors: 12 per layer, the embeddings and 2 of the last norm."""
        return 12 * self.layers + (4 if self.tied else 5)

    @property
    def other_elements(self) -> int:
        """Elements of all parameters except the embedding."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.context * self.hidden + self.layers * layer + 2 * self.hidden

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide {self.hidden} hidden dimensions; set "
                "model.heads to a divisor of model.hidden"
            )
        return self


class DataConfig(_Section):
    """The text and its tokens."""

    corpus: Literal["gatsby", "fineweb"] = "gatsby"
    """Text to train on; a path given to `record` replaces it."""
    tokenizer: Literal["ascii", "gpt2", "none"] = "ascii"
    """One token per ASCII byte, the tokenizer of GPT-2, or no tokenizer. A path given to `record`
    replaces it."""
    target_offset: Literal[1, 2] = 1
    """Distance in tokens from a position to its target: 1 is the next token, 2 the one after."""
    live_tokens: int = Field(default=30_590, ge=1)
    """Distinct ids of the built-in stream of ids, which replaces a missing text if the tokenizer is
    not ascii."""
    mostly_dead: int | None = Field(default=None, ge=1)
    """Largest count of a live token in the population mostly_dead; default: no such population."""
    skipped_shuffles: int = Field(default=0, ge=0)
    """Number of shuffles of the examples that the plain loop draws and discards before training."""


class InitializationConfig(_Section):
    """Initial values of the embedding and an untied unembedding; all else starts as in GPT-2."""

    kind: Literal["point", "normal", "default"] = "point"
    """point: one random unit vector for all tokens, plus noise; normal: independent elements;
    default: as in GPT-2."""
    sigma: float = Field(default=1e-5, ge=0)
    """Standard deviation of the noise (point) or of the elements (normal)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the values are drawn and added, before rounding to the weights' type."""
    reseed: bool = False
    """Seed again, with training.seed, right before the embedding is drawn."""
    seed: int | None = Field(default=None, ge=0)
    """Seed again, with this seed, right before the embedding is drawn: several trainings from one
    embedding."""


class OptimizerConfig(_Section):
    """The optimizer. Biases and layer norms have no weight decay, as in the Trainer."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """adam adds the decay to the gradient; adamw subtracts it from the weights."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """Decay rates of Adam's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Term that Adam adds to the denominator."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay."""
    state_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the optimizer's state; default: the type of the weights. If the types differ, each
    step is computed in float32, and weights and state are rounded once after it."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of weights and state after each step. stochastic rounds up or down at random, with
    the exact value as the mean, seeded by training.seed; the step is computed in float32."""

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> Self:
        if self.momentum and self.name != "sgd":
            raise ValueError(
                f"momentum = {self.momentum} needs sgd; {self.name} has betas: leave out momentum "
                "or set optimizer.name=sgd"
            )
        return self


class ScheduleConfig(_Section):
    """The learning rate over the run."""

    name: Literal["linear", "cosine", "constant"] = "linear"
    """Decay to zero along a line or half a cosine, or no decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear growth from zero before the decay."""
    steps: int | None = Field(default=None, ge=1)
    """Step at which the decay ends; default: training.steps."""


class TrainingConfig(_Section):
    """The training loop."""

    loop: Literal["trainer", "plain"] = "trainer"
    """The Hugging Face Trainer, or a plain PyTorch loop."""
    steps: int = Field(default=10_000, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=32, ge=1)
    """Examples of one micro-batch."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches of one optimizer step."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Global norm to which gradients are clipped; 0 disables clipping."""
    autocast: Literal["none", "bfloat16", "float16"] = "bfloat16"
    """Mixed precision of the forward pass; float16 adds a gradient scaler."""
    products: Literal["auto", "native", "float32"] = "auto"
    """Products of 16-bit matrices on the CPU: torch's own, or in float32 and rounded once. auto
    times both and takes the faster one; the run records the choice."""
    seed: int = Field(default=42, ge=0)
    """Random seed."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch, on which the bits of the training depend. Default: as the recorded run
    that is resumed or forked; otherwise torch's default."""


class RecordingConfig(_Section):
    """The recorded variables and their storage."""

    variables: Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_variables)] = (
        Field(
            default=("matrix",),
            description=f"Tiers of variables ({', '.join(TIERS)}), or variables by name "
            f"({', '.join(VARIABLES)}).",
        )
    )
    every: int = Field(default=1, ge=1)
    """Steps from one row to the next; the last step is always recorded."""
    tokens: str = "all"
    """all, dead, live, or a file of token ids."""
    populations: Annotated[tuple[str, ...], BeforeValidator(_populations)] = ()
    """Groups of tokens: NAME=EXPRESSION over the coordinates of the tokens, or NAME=FILE; a list or
    a table."""
    logits_mode: Literal["last", "mean"] = "last"
    """Logits at the last position: of the first sequence, or the mean over the step's sequences."""
    encoding: Encoding = "delta"
    """delta stores each array as differences between steps; compact stores the gradient, and
    computes W and Adam's moments from it."""
    memory: Annotated[str, AfterValidator(_size)] = "1GiB"
    """Memory of all buffers of the recorder together, such as 512MiB."""
    block_rows: int | None = Field(default=None, ge=1)
    """Rows of a block; default: planned from the memory."""
    keyframe_every: int = Field(default=500, ge=1)
    """Steps from one keyframe to the next, with the tier keyframes."""
    commit_every: float = Field(default=COMMIT_EVERY, ge=0)
    """Maximum seconds between commits, also of an incomplete block; 0 commits complete blocks
    only."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Minimum steps between checkpoints, which are written at the end of a block. Default: they are
    at least 10 s apart and take at most 1 % of the time. One more is written when the training ends
    or is interrupted."""


class RunConfig(_Section):
    """Everything that determines a run, except the text itself.

    Examples
    --------
    >>> config = RunConfig().with_values(["training.steps=200", "optimizer.lr=3e-4"])
    >>> config.training.steps, config.optimizer.lr
    (200, 0.0003)
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    initialization: InitializationConfig = InitializationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    recording: RecordingConfig = RecordingConfig()

    @property
    def decay_steps(self) -> int:
        """Step at which the decay of the learning rate ends."""
        return self.schedule.steps or self.training.steps

    @property
    def examples(self) -> int:
        """Examples of one optimizer step, over all its micro-batches."""
        return self.training.batch_size * self.training.accumulation

    @property
    def records_batch(self) -> bool:
        """True if the indices of a step's examples are recorded."""
        return "batch" in resolve_variables(self.recording.variables)

    @property
    def has_keyframes(self) -> bool:
        """True if the whole state is recorded in keyframes."""
        return KEYFRAMES in self.recording.variables

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration of nested values.

        Raises
        ------
        ConfigError
            If a field is unknown or impossible; the message has its value and what is allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_sentence(error, cls)) from None

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read the configuration from a TOML file, as `to_toml` writes it.

        Raises
        ------
        ConfigError
            If the file cannot be read, is not TOML, or has an impossible value.
        """
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration {path} is not TOML: {error}") from error
        return cls.parse(values)

    def flat(self) -> dict[str, Any]:
        """Return JSON values of all fields, by ``section.field``."""
        return {
            f"{section}.{field}": value
            for section, fields in self.model_dump(mode="json").items()
            for field, value in fields.items()
        }

    def to_toml(self) -> str:
        """Return all fields as TOML, with their meaning and allowed values in comments.

        A field without a value is a comment, because TOML has no null.
        """
        lines = []
        for section, fields in self.model_dump(mode="json").items():
            kind: Any = type(self).model_fields[section].annotation
            lines += [*_comment(inspect.cleandoc(kind.__doc__)), f"[{section}]"]
            for name, value in fields.items():
                field = kind.model_fields[name]
                lines += _comment(field.description or "")
                notes = ["not set"] * (value is None) + allowed(field)
                line = f"# {name} = …" if value is None else f"{name} = {literal(value)}"
                lines.append(f"{line}  # {', '.join(notes)}" if notes else line)
            lines.append("")
        return "\n".join(lines)

    def with_values(self, assignments: Iterable[str]) -> Self:
        """Return the configuration with single fields changed.

        Parameters
        ----------
        assignments : iterable of str
            ``section.field=value``, the value as TOML; a bare word is a string.

        Raises
        ------
        ConfigError
            If an assignment has another form, an unknown field or an impossible value.
        """
        listed = isinstance(assignments, Iterable) and not isinstance(assignments, str | Mapping)
        settings = list(assignments) if listed else []
        if not listed or not all(isinstance(item, str) for item in settings):
            raise ConfigError(
                f"got {assignments!r}, expected a list of section.field=value, such as "
                "['optimizer.lr=3e-4']"
            )
        values = self.model_dump()
        for assignment in settings:
            name, equals, text = assignment.partition("=")
            section, dot, field = field_name(assignment).partition(".")
            if not (equals and dot and section and field):
                meant = _elsewhere(name.strip(), type(self)) if equals else ""
                raise ConfigError(
                    f"got {assignment!r}{meant}, expected section.field=value, such as "
                    "optimizer.lr=3e-4"
                )
            values.setdefault(section, {})[field] = _toml_value(text.strip())
        return self.parse(values)


def field_name(assignment: str) -> str:
    """Return the field of an assignment, ``section.field``.

    >>> field_name("optimizer.lr=1e-5")
    'optimizer.lr'
    """
    return assignment.partition("=")[0].strip()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _COMMENT)]


def literal(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()


def allowed(field: FieldInfo) -> list[str]:
    """Return the choices and bounds of a field."""
    annotation = field.annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    choices = [str(choice) for kind in kinds for choice in get_args(kind)
               if get_origin(kind) is Literal]  # fmt: skip
    if bool in kinds:
        choices += ["true", "false"]
    limits = [f"one of {', '.join(choices)}"] if choices else []
    bounds = {"gt": "more than", "ge": "at least", "lt": "less than"}
    limits += [
        f"{words} {getattr(bound, name)}"
        for bound in field.metadata
        for name, words in bounds.items()
        if hasattr(bound, name)
    ]
    return limits


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        owner: Any = model
        for part in path[:-1]:
            owner = owner.model_fields[part].annotation
        meant = did_you_mean(path[-1], owner.model_fields) or _elsewhere(path[-1], model)
        if not meant and len(path) == 1 and isinstance(first["input"], dict):
            # There is no such section; another section may have the field that was to be set.
            meant = next((place for key in first["input"] if (place := _elsewhere(key, model))), "")
        return f"unknown field {name}{meant}; the fields are {', '.join(owner.model_fields)}"
    cause: Any = first.get("ctx", {}).get("error")  # of a validator of ours
    is_sentence = isinstance(cause, ValueError) and len(cause.args) == 1
    reason: str = cause.args[0] if is_sentence else first["msg"].removeprefix("Value error, ")
    if reason[0].isupper():
        reason = reason[0].lower() + reason[1:]
    value = first["input"]
    if len(path) == 1 and isinstance(value, Mapping):  # a section whose fields do not fit together
        return f"{name}: " + reason
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else repr(value)
    if first["type"] == "literal_error":
        reason += did_you_mean(str(value), re.findall(r"'([^']*)'", first["ctx"]["expected"]))
    example = None
    if first["type"].endswith(("_parsing", "_type", "_from_float")):
        example = RunConfig().flat().get(".".join(path[:2]))
    if example is not None:
        reason = f"{reason.partition(',')[0]}, such as "
        reason += f"{'.'.join(path[:2])}={literal(example)}"
    return f"{name} = {text}: " + reason


def _elsewhere(field: str, model: type[BaseModel]) -> str:
    """Return a suggestion of the section that has a field of this name."""
    sections: dict[str, Any] = {
        name: section.annotation for name, section in model.model_fields.items()
    }
    names = [f"{name}.{field}" for name, kind in sections.items() if field in kind.model_fields]
    return f" (did you mean {names[0]!r}?)" if names else ""


# Errors of the store's own validators are ValueErrors, which pydantic collects.
assert issubclass(InvalidArgument, ValueError)
