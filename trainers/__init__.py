"""Training runs that record themselves.

Nothing here is imported before it is asked for: `import trainers` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.attachment import capture
    from trainers.callback import TrajectoryCallback
    from trainers.config import RunConfig
    from trainers.continuation import recorded_config
    from trainers.downloads import fetch
    from trainers.planning import plan
    from trainers.presets import PRESETS, preset
    from trainers.recording import record

__all__ = [
    "PRESETS",
    "RunConfig",
    "TrajectoryCallback",
    "capture",
    "fetch",
    "plan",
    "preset",
    "record",
    "recorded_config",
]

_HOME = {
    "PRESETS": "trainers.presets",
    "RunConfig": "trainers.config",
    "TrajectoryCallback": "trainers.callback",
    "capture": "trainers.attachment",
    "fetch": "trainers.downloads",
    "plan": "trainers.planning",
    "preset": "trainers.presets",
    "record": "trainers.recording",
    "recorded_config": "trainers.continuation",
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
