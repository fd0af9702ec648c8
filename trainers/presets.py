"""Presets: functions that each return a complete configuration, with what differs from defaults."""

from __future__ import annotations

from collections.abc import Callable

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.trainers.config import (
    DataConfig,
    InitializationConfig,
    ModelConfig,
    OptimizerConfig,
    RecordingConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def gatsby() -> RunConfig:
    """Lil Gatsby, W, gradient and moments: 128 ASCII tokens that start at one point (15.1a)."""
    return RunConfig(data=DataConfig(target_offset=2), training=TrainingConfig(threads=1))


def gatsby_gradients() -> RunConfig:
    """Lil Gatsby, W and its gradient only: shows what moves a dead token (14.1a)."""
    recording = RecordingConfig(variables=("W", "grad", "loss", "lr", "grad_norm", "clip_coef"))
    return gatsby().model_copy(update={"recording": recording})


def gatsby_adam() -> RunConfig:
    """Lil Gatsby in a plain PyTorch loop: Adam, GPT-2's initialization, mean logits (1.12a)."""
    return RunConfig(
        data=DataConfig(target_offset=2, skipped_shuffles=1),
        initialization=InitializationConfig(kind="default"),
        optimizer=OptimizerConfig(name="adam", weight_decay=0.0),
        schedule=ScheduleConfig(name="constant"),
        training=TrainingConfig(loop="plain", max_grad_norm=0.0, autocast="none", threads=1),
        recording=RecordingConfig(logits_mode="mean"),
    )


def wordybird_1() -> RunConfig:
    """Wordybird 1, 100 steps: the 50,257 tokens of GPT-2, drawn from N(0, 0.02) (1.12f)."""
    return RunConfig(
        model=ModelConfig(vocab_size=50_257),
        data=DataConfig(corpus="fineweb", tokenizer="gpt2", target_offset=2),
        initialization=InitializationConfig(kind="normal", sigma=0.02, reseed=True),
        optimizer=OptimizerConfig(weight_decay=0.0),
        training=TrainingConfig(steps=100),
    )


def wordybird_1b() -> RunConfig:
    """Wordybird 1b: Wordybird 1 with 200 steps in one recording (1.12f)."""
    return wordybird_1().with_values(["training.steps=200"])


def duckling() -> RunConfig:
    """Duckling: 8,192 tokens × 128, float32 weights and state under bfloat16 autocast, rare ids."""
    return RunConfig(
        model=ModelConfig(vocab_size=8_192, hidden=128, heads=4, dtype="float32"),
        data=DataConfig(corpus="fineweb", tokenizer="none", live_tokens=6_500, mostly_dead=10),
        initialization=InitializationConfig(kind="normal", sigma=0.02),
        optimizer=OptimizerConfig(weight_decay=0.0),
        training=TrainingConfig(steps=300),
    )


def flannel() -> RunConfig:
    """Flannel 7: 10,000 tokens, 3,699 of them dead, drawn from N(0, 0.02), the Trainer (1.20h)."""
    return RunConfig(
        model=ModelConfig(vocab_size=10_000),
        data=DataConfig(corpus="fineweb", tokenizer="none", live_tokens=6_301, target_offset=2),
        initialization=InitializationConfig(kind="normal", sigma=0.02, reseed=True),
        optimizer=OptimizerConfig(weight_decay=0.0),
        training=TrainingConfig(steps=1_000, batch_size=128),
    )


def thimble() -> RunConfig:
    """Thimble 7: Flannel's tokens in a plain loop, bfloat16 alone, until all is frozen (1.31a)."""
    return flannel().with_values(
        [
            "initialization.reseed=false",
            "schedule.name=constant",
            "training.loop=plain",
            "training.steps=6000",
            "training.max_grad_norm=0",
            "training.autocast=none",
        ]
    )


def crucible() -> RunConfig:
    """Crucible 2: Thimble's loop on the next token, dead tokens only, 500 steps (crucible_2)."""
    return thimble().with_values(
        ["data.target_offset=1", "training.steps=500", "recording.tokens=dead"]
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        gatsby, gatsby_gradients, gatsby_adam, wordybird_1, wordybird_1b, duckling, flannel,
        thimble, crucible,
    )
}  # fmt: skip


@checks_types
def preset(name: str) -> RunConfig:
    """Return the configuration of a preset.

    Raises
    ------
    InvalidArgument
        If there is no preset of this name; the message lists the presets.

    Examples
    --------
    >>> preset("gatsby").training.steps
    10000
    """
    try:
        return PRESETS[name]()
    except KeyError:
        raise InvalidArgument(
            f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; "
            f"choose from {', '.join(PRESETS)}"
        ) from None
