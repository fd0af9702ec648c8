"""Questions about a recorded run, answered lazily.

Each function takes a Dataset with the variables of a run and returns a lazy DataArray or Dataset;
results do not depend on how the data is chunked. `compute` answers several in one pass.

In the examples ``ds`` is a small run of 20 steps over the 128 ASCII tokens, in bfloat16, of which
ten occur in the text; their W started at 1.5, that of the dead tokens at 0.75.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, whose import would take most of the time that this one takes
if TYPE_CHECKING:
    from typing import Any

    __all__: list[str]

    from trajstore.analysis.accessor import TrajAccessor as TrajAccessor
    from trajstore.analysis.functions import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Imported when the first function is used: commands import this package for their help.
    import importlib

    if name == "TrajAccessor":
        return importlib.import_module("trajstore.analysis.accessor").TrajAccessor
    functions = importlib.import_module("trajstore.analysis.functions")
    if name == "__all__":
        return [*functions.__all__, "TrajAccessor"]
    if name not in functions.__all__:
        raise AttributeError(f"module 'trajstore.analysis' has no attribute {name!r}")
    return getattr(functions, name)


def __dir__() -> list[str]:
    return [*__getattr__("__all__")]
