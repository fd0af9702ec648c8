"""Operations of torch that a call launches, counted by the profiler of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

_NOT_LAUNCHED = frozenset(
    "alias as_strided contiguous detach detach_ empty empty_like empty_strided expand expand_as "
    "flatten is_nonzero item lift_fresh promote_types reshape resolve_conj resolve_neg result_type "
    "select slice split split_with_sizes squeeze t to unbind unsqueeze view view_as".split()
)
"""Views, memory without values, and questions. A conversion appears as the copy inside it."""


def launched(call: Callable[[], object]) -> Counter[str]:
    """Return the names of the operations that a call launches, and how often.

    An operation on a list of tensors counts once, as it is one kernel on a device.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return launched_in(profile)


def launched_in(profile: torch.profiler.profile) -> Counter[str]:
    """Return the same of a profile."""

    def is_launched(event: object) -> bool:
        name = event.name.removeprefix("aten::")
        return event.name.startswith("aten::") and name not in _NOT_LAUNCHED

    events = [event for event in profile.events() if is_launched(event)]
    return Counter(event.name for event in events if not _is_inside(event, is_launched))


def _is_inside(event: object, counts: Callable[[object], bool]) -> bool:
    parent = event.cpu_parent
    return parent is not None and (counts(parent) or _is_inside(parent, counts))
