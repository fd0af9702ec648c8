"""Train models and record every optimizer step.

Names are imported on first use, so `import trajstore.trainers` does not need torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if __name__ == "trainers":  # in the root of a clone, where this folder lies beside the package
    raise ImportError("trainers is a part of trajstore; import trajstore.trainers instead")

if TYPE_CHECKING:
    from trajstore.trainers import evaluations as evaluations
    from trajstore.trainers.config import RunConfig as RunConfig
    from trajstore.trainers.counterfactuals.what_if import what_if as what_if
    from trajstore.trainers.develop_own_loop import develop as develop
    from trajstore.trainers.downloads import fetch as fetch
    from trajstore.trainers.evaluations.evaluate import evaluate as evaluate
    from trajstore.trainers.matrix_products import float32_products as float32_products
    from trajstore.trainers.presets import PRESETS as PRESETS
    from trajstore.trainers.presets import preset as preset
    from trajstore.trainers.recording.capture import attach as attach
    from trajstore.trainers.recording.capture import capture as capture
    from trajstore.trainers.recording.hf_callback import TrajectoryCallback as TrajectoryCallback
    from trajstore.trainers.recording.lightning_callback import (
        LightningCallback as LightningCallback,
    )
    from trajstore.trainers.replays.replay import replay as replay
    from trajstore.trainers.rounded_optimizer import RoundedAdam as RoundedAdam
    from trajstore.trainers.rounded_optimizer import RoundedAdamW as RoundedAdamW
    from trajstore.trainers.rounded_optimizer import RoundedSGD as RoundedSGD
    from trajstore.trainers.runs.changed_settings import recorded_config as recorded_config
    from trajstore.trainers.runs.developed_run import develop_run as develop_run
    from trajstore.trainers.runs.fork import fork as fork
    from trajstore.trainers.runs.proven_steps import prove as prove
    from trajstore.trainers.runs.record import record as record
    from trajstore.trainers.runs.run_plan import plan as plan
    from trajstore.trainers.step_model import checkout as checkout
    from trajstore.trainers.step_model import model_at as model_at
    from trajstore.trainers.step_model import models as models
    from trajstore.trainers.step_model import optimizer_state_at as optimizer_state_at
    from trajstore.trainers.step_model import restore as restore

_HOME = {
    "LightningCallback": "trajstore.trainers.recording.lightning_callback",
    "PRESETS": "trajstore.trainers.presets",
    "RoundedAdam": "trajstore.trainers.rounded_optimizer",
    "RoundedAdamW": "trajstore.trainers.rounded_optimizer",
    "RoundedSGD": "trajstore.trainers.rounded_optimizer",
    "RunConfig": "trajstore.trainers.config",
    "TrajectoryCallback": "trajstore.trainers.recording.hf_callback",
    "attach": "trajstore.trainers.recording.capture",
    "capture": "trajstore.trainers.recording.capture",
    "checkout": "trajstore.trainers.step_model",
    "develop": "trajstore.trainers.develop_own_loop",
    "develop_run": "trajstore.trainers.runs.developed_run",
    "evaluate": "trajstore.trainers.evaluations.evaluate",
    "evaluations": "trajstore.trainers.evaluations",
    "fetch": "trajstore.trainers.downloads",
    "float32_products": "trajstore.trainers.matrix_products",
    "fork": "trajstore.trainers.runs.fork",
    "model_at": "trajstore.trainers.step_model",
    "models": "trajstore.trainers.step_model",
    "optimizer_state_at": "trajstore.trainers.step_model",
    "plan": "trajstore.trainers.runs.run_plan",
    "preset": "trajstore.trainers.presets",
    "prove": "trajstore.trainers.runs.proven_steps",
    "record": "trajstore.trainers.runs.record",
    "recorded_config": "trajstore.trainers.runs.changed_settings",
    "replay": "trajstore.trainers.replays.replay",
    "restore": "trajstore.trainers.step_model",
    "what_if": "trajstore.trainers.counterfactuals.what_if",
}

_OF_TORCH = ("attach", "capture", "checkout", "develop", "evaluate", "float32_products", "model_at",
             "models", "optimizer_state_at", "replay", "restore", "RoundedAdam", "RoundedAdamW",
             "RoundedSGD")  # fmt: skip
_EXTRAS = {**dict.fromkeys(_OF_TORCH, "torch"), "LightningCallback": "lightning"}
"""The extra that each name needs; the others need ``train``."""

__all__ = [
    name for name in _HOME if name != "LightningCallback" or importlib.util.find_spec("lightning")
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trajstore.errors import needs_extra

    with needs_extra(f"trainers.{name}", _EXTRAS.get(name, "train")):
        module = importlib.import_module(_HOME[name])
    return module if name == "evaluations" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
