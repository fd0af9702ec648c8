"""The recorded systems of the notebooks, each a function that returns a complete configuration."""

from __future__ import annotations

from collections.abc import Callable

from trainers.config import (
    DataConfig,
    InitialisationConfig,
    ModelConfig,
    OptimizerConfig,
    RecordingConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from trajstore.errors import InvalidArgument

__all__ = ["PRESETS", "preset"]


def gatsby() -> RunConfig:
    """Lil Gatsby, everything recorded: 128 ASCII tokens that start as one point (15.1a)."""
    return RunConfig(
        model=ModelConfig(vocab_size=128, context=128, hidden=64, layers=2, heads=2),
        data=DataConfig(corpus="gatsby", tokenizer="ascii", target_offset=2),
        initialisation=InitialisationConfig(kind="point", sigma=1e-5),
        optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
        schedule=ScheduleConfig(name="linear"),
        training=TrainingConfig(steps=10_000, batch_size=32, max_grad_norm=1.0, seed=42),
        recording=RecordingConfig(record=("all",)),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {"gatsby": gatsby}


def preset(name: str) -> RunConfig:
    """Configuration of that name.

    Raises
    ------
    InvalidArgument
        If there is none; the message names those there are.
    """
    try:
        return PRESETS[name]()
    except KeyError:
        raise InvalidArgument(
            f"there is no preset {name!r}; choose from {', '.join(PRESETS)}"
        ) from None
