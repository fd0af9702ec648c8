"""Import of a module as soon as xarray is there, without importing xarray for it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # of typing, whose import would take most of the time that this one takes
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["import_with_xarray"]


def import_with_xarray(module: str) -> None:
    """Import a module that extends xarray: now, if xarray is imported, else right after it.

    Source: the import hooks that the documentation of `importlib` describes.
    """
    if "xarray" in sys.modules and sys.modules["xarray"] is not None:
        import importlib

        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, _AfterXarray(module))


class _AfterXarray:  # a base class of importlib.abc would take most of the time of importing this
    """Finds xarray where it is, and has the module imported when xarray has been.

    It stays until then: whoever only looks whether xarray is there, or fails to import it, does not
    use it up.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._looking: set[int] = set()  # threads

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "xarray":
            return None
        import importlib.util
        import threading

        thread = threading.get_ident()
        if thread in self._looking:
            return None
        self._looking.add(thread)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(thread)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_both(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(self._module)

        # On this one loader, which stays what it is for whoever asks it for files or sources.
        spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec
