"""Training runs that record themselves.

Nothing here is imported before it is asked for: `import trainers` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.config import RunConfig
    from trainers.counterfactuals.what_if import what_if
    from trainers.presets import PRESETS, preset
    from trainers.recording.capture import capture
    from trainers.recording.hf_callback import TrajectoryCallback
    from trainers.runs.fork import fork
    from trainers.runs.record import record
    from trainers.runs.resume_checks import recorded_config
    from trainers.runs.run_plan import plan
    from trainers.runs.timed_steps import time_steps
    from trainers.texts.fetch import fetch

__all__ = [
    "PRESETS",
    "RunConfig",
    "TrajectoryCallback",
    "capture",
    "fetch",
    "fork",
    "plan",
    "preset",
    "record",
    "recorded_config",
    "time_steps",
    "what_if",
]

_HOME = {
    "PRESETS": "trainers.presets",
    "RunConfig": "trainers.config",
    "TrajectoryCallback": "trainers.recording.hf_callback",
    "capture": "trainers.recording.capture",
    "fetch": "trainers.texts.fetch",
    "fork": "trainers.runs.fork",
    "plan": "trainers.runs.run_plan",
    "preset": "trainers.presets",
    "record": "trainers.runs.record",
    "recorded_config": "trainers.runs.resume_checks",
    "time_steps": "trainers.runs.timed_steps",
    "what_if": "trainers.counterfactuals.what_if",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainers' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOME[name])
    except ModuleNotFoundError as error:
        from trajstore.errors import MissingExtra

        raise MissingExtra(
            f"trainers.{name} needs {error.name}, which is not installed; "
            "run: pip install 'trajstore[train]'"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
