"""An accelerator of our own (`own_device.cpp`), and the recorder's code as it runs on others."""

from __future__ import annotations

import contextlib
import importlib.machinery
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "own"


def load() -> Any:
    """Build the device, and register it as the backend `NAME`; once in a process.

    Returns
    -------
    module
        Counters and settings of the device.
    """
    built = cpp_extension.load(
        "own_device", [str(Path(__file__).with_suffix(".cpp"))], extra_cflags=["-O0", "-w"]
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return built


def _module() -> types.ModuleType:
    """Return what `torch.cuda` is for CUDA."""

    @contextlib.contextmanager
    def stream(chosen: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(chosen)
        yield
        torch.accelerator.set_stream(before)

    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        Stream=torch.Stream,
        Event=lambda **options: torch.Event(NAME, **options),
        stream=stream,
        current_stream=torch.accelerator.current_stream,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        synchronize=torch.accelerator.synchronize,
        get_device_name=lambda device=None: NAME,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        # Kernels run on the CPU, and so draw from its generator.
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )
    return module


def run_branch(branch: str) -> None:
    """Let the recorder, not yet imported, treat the device as it treats 'cuda' or 'mps'.

    In its code the name of that device, as a text or in ``torch.cuda``, becomes `NAME`.
    """
    get_code = importlib.machinery.SourceFileLoader.get_code
    setattr(torch.backends, NAME, getattr(torch.backends, branch))  # its modes are of the process

    def renamed(code: types.CodeType) -> types.CodeType:
        constants = (
            renamed(constant)
            if isinstance(constant, types.CodeType)
            else NAME
            if constant == branch
            else constant
            for constant in code.co_consts
        )
        names = (NAME if name == branch else name for name in code.co_names)
        return code.replace(co_consts=tuple(constants), co_names=tuple(names))

    def get_renamed(loader: Any, name: str) -> types.CodeType | None:
        code = get_code(loader, name)
        return renamed(code) if code and name.startswith("trajstore.trainers.") else code

    importlib.machinery.SourceFileLoader.get_code = get_renamed  # type: ignore[assignment]
