"""Where a repeated training differs first, and possible reasons."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from trajstore.provenance import RunAttributes
from trajstore.store.reading.open_group import open_group, root_attributes
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.recording.existing_run import RowDifference
from trajstore.trainers.recording.notes import COMPUTED_AS_RECORDED, changed_provenance


def explain_difference(
    run: Location, difference: RowDifference, device: torch.device | None = None
) -> str:
    """Return where a repeated training first differs, and possible reasons.

    Without the `device` of an own loop, the run has a configuration.
    """
    recorded = RunAttributes.of(root_attributes(run))
    provenance = recorded.provenance
    where = f"at step {difference.step} {' and '.join(_first(difference.variables))}"
    where += " differ" if len(difference.variables) > 1 else " differs"
    if parameters := _differing_parameters(run, difference):
        where += f", in {' and '.join(_first(parameters))}"
    if "lr" in difference.variables:
        return (
            f"{where}, because the learning rate differed from that of the configuration; the run "
            "was resumed with another schedule"
        )
    if device is None:
        from trajstore.trainers.runs.changed_settings import recorded_config
        from trajstore.trainers.runs.training_setup import find_device

        device = find_device(recorded_config(run).training.device)
    now = changed_provenance(provenance, device)
    changes = [
        f"{name} was {provenance.get(name)} and is now {value}"
        for name, value in now.items()
        if name not in COMPUTED_AS_RECORDED
    ]
    for entry in recorded.resumed:
        changes += [
            f"{name} was {value} from step {entry['step'] + 1} on"
            for name, value in entry.items()
            if name not in ("step", "time", *COMPUTED_AS_RECORDED)
        ]
    reason = ", ".join(changes) or "versions, machine and number of threads are unchanged"
    return f"{where} ({reason})"


def _differing_parameters(run: Location, difference: RowDifference) -> tuple[str, ...]:
    """Return the parameters whose digests differ."""
    if "params_digest" not in difference.stored:
        return ()
    group: Any = open_group(run)
    wrong = difference.stored["params_digest"] != difference.computed["params_digest"]
    return tuple(itertools.compress(map(str, group["parameter"][...]), wrong))


def _first(variables: tuple[str, ...]) -> list[str]:
    """Return the first variables and the number of the others."""
    texts = list(variables[:2])
    if len(variables) > 2:
        texts = [", ".join(texts), f"{len(variables) - 2} more"]
    return texts
