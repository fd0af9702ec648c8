"""Functions given as ``FILE.py:function`` or ``MODULE:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trajstore.errors import InvalidArgument, did_you_mean


def load_function(source: str) -> Callable[..., Any]:
    """Import a function by ``FILE.py:function`` or ``MODULE:function``.

    Modules next to the file can be imported by it.

    Raises
    ------
    InvalidArgument
        If the text has another form, the file or the function does not exist, or the import fails.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise InvalidArgument(f"got {source!r}, expected FILE.py:function, such as probe.py:probe")
    module = _file(place) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [one for one, value in vars(module).items() if callable(value)]
        raise InvalidArgument(f"{place} has no function {name}{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # any code of the module
        raise InvalidArgument(
            f"cannot import {name}: {type(error).__name__}: {error}; give FILE.py:function, or the "
            "name of an installed module"
        ) from error


def _file(place: str) -> ModuleType:
    path = Path(place).absolute()
    if not path.is_file():
        raise InvalidArgument(f"there is no file {place}; give FILE.py:function")
    # A name of its own: another module of this name may be imported. An edited file is run again.
    content = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()
    name = f"{path.stem}_{content[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses, which look up their module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any code of the file
        del sys.modules[name]
        raise InvalidArgument(f"cannot import {place}: {type(error).__name__}: {error}") from error
    return module
