"""Quantities of a recorded run, computed lazily.

Each function takes a Dataset with the variables of a run and returns a lazy DataArray or Dataset.
Results do not depend on the chunks of the data. `compute` computes several quantities in one pass.

In the examples, ``ds`` is a small bfloat16 run of 20 steps over the 128 ASCII tokens. Ten of them
occur in the text. W starts at 1.5 for these, and at 0.75 for the dead tokens.
"""

from __future__ import annotations

if __name__ == "analysis":  # in the root of a clone, where this folder lies beside the package
    raise ImportError("analysis is a part of trajstore; import trajstore.analysis instead")

TYPE_CHECKING = False  # importing typing would dominate the import time here
if TYPE_CHECKING:
    from typing import Any

    __all__: list[str]

    from trajstore.analysis.accessor import *  # noqa: F403
    from trajstore.analysis.methods import *  # noqa: F403
    from trajstore.analysis.several_quantities import *  # noqa: F403

_ROOMS = ("methods", "several_quantities", "accessor")
"""Modules of the public names, which are in their ``__all__``."""


def __getattr__(name: str) -> Any:
    # Import functions on first use: commands import this package for their help.
    from importlib import import_module

    rooms = [import_module(f"trajstore.analysis.{room}") for room in _ROOMS]
    known = {each: getattr(room, each) for room in rooms for each in room.__all__}
    import_module("trajstore.installation").register_accessors()
    globals().update(known, __all__=[*known])
    if name not in globals():
        raise AttributeError(f"module 'trajstore.analysis' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return [*__getattr__("__all__")]
